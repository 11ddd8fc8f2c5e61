"""SHA-256 of final models and of all wire bytes of small runs: the same before and after a change of shape.

    python scripts/fingerprint_runs.py > before.json

Every algorithm, plain, masked and with noise. Sealed keys and the signatures over them are made with fresh randomness
of the operating system, so the payloads of DEAL and SEALED messages (and the checksums over them) are left out. It uses
nothing but the public interface and the documented layout of messages, so that it runs on either side of a change.
"""

import hashlib
import json
import struct
import sys

import numpy as np
import torch

import fedrp
from fedrp.algorithms.table import methods

_HEADER = struct.Struct("<BBB4sH3sII4sI")
_ITEM = {0: 1, 1: 4, 2: 4}  # bytes, by the code of a payload's type
_SEALED_KINDS = (4, 5)  # DEAL, SEALED
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "masked": {"secure_aggregation": True},
    "noise": {"noise_multiplier": 0.5, "clip": 1.0},
    "masked noise": {"noise_multiplier": 0.5, "clip": 1.0, "secure_aggregation": True},
}


def settled_bytes(packet: bytes) -> bytes:
    """A packet without what is drawn anew in every run."""
    parts, start = [], 0
    while start < len(packet):
        fields = _HEADER.unpack_from(packet, start)
        end = start + _HEADER.size + fields[7] * _ITEM[fields[2]]
        sealed = fields[1] in _SEALED_KINDS
        parts.append(packet[start : start + _HEADER.size - 4] if sealed else packet[start:end])
        start = end
    return b"".join(parts)


def task() -> fedrp.Task:
    rng = np.random.default_rng(0)
    y = np.arange(240) % 3
    x = np.random.default_rng(1).normal(0, 1.5, (3, 6))[y] + rng.normal(0, 1, (240, 6))
    features, labels = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)
    return fedrp.Task(Net, (features[:160], labels[:160]), (features[160:], labels[160:]))


class Net(torch.nn.Sequential):
    """83 parameters."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def fingerprints(algorithm: str, changes: dict[str, object]) -> dict[str, str]:
    wire = hashlib.sha256()

    def tap(sent: dict[int, bytes], replies: dict[int, bytes]) -> None:
        for packets in (sent, replies):
            for client in sorted(packets):
                wire.update(struct.pack("<I", client) + settled_bytes(packets[client]))

    base = {"clients": 4, "rounds": 3, "batch_size": 8, "dim": 12, "lr": 0.05}
    config = fedrp.RunConfig(algorithm=algorithm, **{**base, **changes})  # type: ignore[arg-type]
    result = fedrp.simulate(config, task(), tap=tap)
    return {"model": hashlib.sha256(result.model.tobytes()).hexdigest(), "wire": wire.hexdigest()}


def main() -> None:
    found = {}
    for algorithm in methods():
        for variant, changes in VARIANTS.items():
            try:
                found[f"{algorithm} {variant}"] = fingerprints(algorithm, changes)
            except fedrp.FedRPError as error:
                print(f"{algorithm} {variant}: {error}", file=sys.stderr)
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
