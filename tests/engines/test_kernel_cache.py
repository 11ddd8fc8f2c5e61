"""Compiled kernels: in a folder of our own, and all of them compiled by the set-up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import fedrp
for family in ("sign", "gaussian", "hadamard"):
    for memory in (0, 4096):
        config = fedrp.RunConfig(
            algorithm="fedrp-subspace", projection=family, clients=2, rounds=2, dim=50, train_examples=20
        )
        fedrp.simulate(config, fedrp.named_task(config), fedrp.Speed(projection_memory=memory))
"""


@pytest.mark.slow
def test_after_the_set_up_a_run_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "FEDRP_CACHE": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    found = []
    for arguments in (["-m", "fedrp.engines.compile"], ["-c", RUN]):
        subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True, timeout=300)
        found.append(sorted(tmp_path.rglob("*.nbc")))
    assert found[0] == found[1]
    assert len(found[0]) >= 9
