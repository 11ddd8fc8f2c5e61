"""The tests' server: the real one, which then says what objects it has and holds still while its memory is searched."""

import gc
import hashlib
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrp.flower.server_app import serve
from helpers import TinyNet

app = ServerApp()


def held(parameters: int) -> dict[str, int]:
    """Objects in this process that a server must not have."""
    containers = gc.get_objects()
    everything = {id(ref): ref for container in containers for ref in (container, *gc.get_referents(container))}
    ours = [type(thing) for thing in everything.values() if str(type(thing).__module__).startswith("fedrp")]
    names = [kind.__name__ for kind in ours]
    arrays = [thing for thing in everything.values() if isinstance(thing, np.ndarray)]
    tensors = [thing for thing in everything.values() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    secrets = {
        name: names.count(name) for name in ("SecretKey", "Identity", "Client", "Site", "Workbench", "Projection")
    }
    return {
        **secrets,
        "arrays": sum(array.size == parameters for array in arrays),
        "tensors": sum(not tensor.is_meta for tensor in tensors),
        "searched": len(everything),
    }


@app.main()
def main(grid: Grid, context: Context) -> None:
    serve(grid, context, TinyNet)
    store = Path(str(context.run_config["store"]))
    marker = hashlib.sha256(b"marker").digest()  # what a search of this process must find
    if context.run_config["app-search"]:
        (store / "held.json").write_text(json.dumps(held(83)))
        (store / "pid").write_text(str(os.getpid()))
        end = time.monotonic() + 120
        while not (store / "searched").exists() and time.monotonic() < end:
            time.sleep(0.1)
    del marker
