"""Table 2 of the paper: bytes that a client sends in a round, measured on encoded messages."""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fedrp.algorithms.resolve import resolved
from fedrp.compression.coding import place_of, upload_coding_of
from fedrp.config.run import RunConfig
from fedrp.learning.layout import built, layout_of
from fedrp.learning.zoo import MODELS
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind, Message

SHAPES = {"lenet5": (1, 28, 28), "resnet18": (3, 32, 32), "vgg16": (3, 32, 32)}
PAPER_MODELS = {"lenet5": "241 KB", "resnet18": "42 MB", "vgg16": "512 MB"}
PAPER_DIMS = {
    1: "4 Byte", 5: "20 Byte", 10: "40 Byte", 50: "200 Byte", 100: "400 Byte", 1000: "4 KB", 10000: "40 KB",
}  # fmt: skip
_CLASSES = 10


class Sent(NamedTuple):
    """A line of the table."""

    what: str
    numbers: int
    bits: float
    payload: int
    message: int  # with the framing
    paper: str | None


def table2() -> list[Sent]:
    """FedAvg by model, FedRP by m, and what this package sends by default."""
    with torch.device("meta"):  # shapes alone: VGG-16 takes half a minute to draw its weights
        sizes = {name: layout_of(built(functools.partial(_model, name))).size for name in SHAPES}
    lines = [_sent(f"FedAvg, {name}", sizes[name], 32.0, paper) for name, paper in PAPER_MODELS.items()]
    lines += [_sent(f"FedRP, m = {m:,}", m, 32.0, paper) for m, paper in PAPER_DIMS.items()]
    for name, parameters in sizes.items():
        config = resolved(RunConfig(algorithm="fedrp-subspace", model=name), parameters)
        lines.append(_sent(f"FedRP-Subspace by default, {name}", config.dim, config.bits, None))
    return lines


def _model(name: str) -> nn.Module:
    return MODELS[name].build(SHAPES[name], _CLASSES)


def _sent(what: str, numbers: int, bits: float, paper: str | None) -> Sent:
    """Encode an upload of so many numbers, and measure it."""
    coding = upload_coding_of(numbers, bits)
    vector = np.tile(np.array([0.5, -0.25, 0.125], np.float32), -(-numbers // 3))[:numbers]
    payload = coding.encode(vector, place_of(bytes(16), 1, 0))
    context = bytes(wire.CONTEXT_BYTES)
    packet = wire.encode([Message(Kind.UPLOAD, context, 1, 0, payload, weight=1, width=coding.width)])
    return Sent(what, numbers, bits, payload.nbytes, len(packet), paper)
