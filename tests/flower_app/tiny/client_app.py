"""The tests' client: tiny data, and secrets that repeat."""

import time

from fedrp.flower.client import make_client_app
from fedrp.flower.task import ClientContext, LocalTask
from flower_helpers import simulated, tiny_load


def load(context: ClientContext) -> LocalTask:
    if context.index == 1:
        time.sleep(float(context.run["app-slow"]))
    return tiny_load(context)


app = make_client_app(load, simulated)
