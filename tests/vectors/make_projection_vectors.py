"""Make projection.json: known answers for every family, computed by the dense float64 oracle, not by the library.

Run it again only when a family's version changes:  python tests/vectors/make_projection_vectors.py

The input is w[i] = (7919 i mod 1009) / 512 - 1 and theta[i] = (6007 i mod 1013) / 512 - 1, exact in float32. Values are
hexadecimal floats at the stated places: exact for `sign`, within the stated tolerance for the others. The digests are
of all float32 values (little-endian, -0 as 0) for the families that give the same bits everywhere: by the oracle
for `sign`, whose sums of these inputs are exact in any order, and by the library for others, which round.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from fedrp.crypto.secret import SecretKey  # noqa: E402
from fedrp.projection.families import FAMILIES, make_projection, norm_bound  # noqa: E402
from fedrp.projection.tags import TAGS  # noqa: E402
from oracles import projection as oracle  # noqa: E402

KEYS = ["000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f", "ff" * 32]
SHAPES = [(1, 1), (10, 3), (100, 100), (1000, 1), (4099, 16), (9001, 900)]


def answers(result, size, digest):
    places = sorted({int(place) for place in np.linspace(0, len(result) - 1, 12)})
    answer = {"places": places, "values": [float(np.float32(result[place])).hex() for place in places]}
    answer["tolerance"] = 1e-6 * size
    if digest is not None:
        answer["sha256"] = sha256((digest.astype("<f4") + np.float32(0)).tobytes()).hexdigest()
    return answer


def case(family, key_hex, n, m):
    key = SecretKey(bytes.fromhex(key_hex))
    version, bound = TAGS[family].version, norm_bound(family, n, m)
    matrix = oracle.matrix(family, key, n, m, version)
    w = (7919 * np.arange(n) % 1009) / 512 - 1
    theta = (6007 * np.arange(m) % 1013) / 512 - 1
    forward, adjoint = matrix @ w, theta @ matrix
    digests = (forward, adjoint) if family == "sign" else (None, None)
    if family != "sign" and FAMILIES[family].same_bits:
        library = make_projection(family, key, n, m)
        digests = library.forward(w.astype(np.float32)), library.adjoint(theta.astype(np.float32))
    return {
        "family": family, "version": version, "key": key_hex, "n": n, "m": m,
        "forward": answers(forward, bound * np.linalg.norm(w), digests[0]),
        "adjoint": answers(adjoint, bound * np.linalg.norm(theta), digests[1]),
    }  # fmt: skip


if __name__ == "__main__":
    cases = [case(family, key, n, m) for family in FAMILIES for key in KEYS for n, m in SHAPES]
    lines = ",\n".join(json.dumps(entry) for entry in cases)
    (HERE / "projection.json").write_text(f'{{"about": "see make_projection_vectors.py", "cases": [\n{lines}\n]}}\n')
