"""Every family gives the known answers of projection.json, which the dense oracle made."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from fedrp.crypto.secret import SecretKey
from fedrp.projection.families import make_projection
from fedrp.projection.tags import TAGS

VECTORS = json.loads((Path(__file__).parent / "projection.json").read_text())


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"{case['family']}-{case['n']}x{case['m']}")
def test_known_answers(case):
    assert TAGS[case["family"]].version == case["version"]
    projection = make_projection(case["family"], SecretKey(bytes.fromhex(case["key"])), case["n"], case["m"])
    w = ((7919 * np.arange(case["n"]) % 1009) / 512 - 1).astype(np.float32)
    theta = ((6007 * np.arange(case["m"]) % 1013) / 512 - 1).astype(np.float32)
    for result, expected in ((projection.forward(w), case["forward"]), (projection.adjoint(theta), case["adjoint"])):
        values = np.array([float.fromhex(value) for value in expected["values"]], np.float32)
        sample = result[np.array(expected["places"])]
        if case["family"] == "sign":
            np.testing.assert_array_equal(sample, values)
        else:
            np.testing.assert_allclose(sample, values, atol=expected["tolerance"])
        if "sha256" in expected:
            assert sha256((result + 0).astype("<f4").tobytes()).hexdigest() == expected["sha256"]
