"""The same algorithms on real machines, carried by Flower: `client_app` for the sites, `server_app` for the server.

Needs the extra `fedrp[flower]`. See docs/deploy.md, and examples/flower-app for a complete app.
"""

from fedrp.flower.client_app import client_app
from fedrp.flower.server_app import server_app
from fedrp.flower.task import ClientContext, LocalTask

__all__ = ["ClientContext", "LocalTask", "client_app", "server_app"]
