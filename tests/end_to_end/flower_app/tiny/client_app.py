"""The tests' client: tiny data, and secrets that repeat."""

import time

from fedrp.crypto.sealing import Identity
from fedrp.flower.client_app import make_client_app
from fedrp.flower.task import ClientContext
from fedrp.simulation.identities import SimulatedEntropy
from flower_helpers import simulated, tiny_load


def slow(context: ClientContext, identity: Identity) -> SimulatedEntropy:
    if context.index == 1:
        time.sleep(float(context.run["app-slow"]))
    return simulated(context, identity)


app = make_client_app(tiny_load, slow)
