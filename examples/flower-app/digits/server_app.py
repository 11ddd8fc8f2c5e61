"""Runs at the server, which never sees a model: it is told the architecture to count the parameters."""

from digits.task import model
from fedrp.flower import server_app

app = server_app(model)
