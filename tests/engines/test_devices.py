"""Devices other than the CPU, without one: on the meta device there are shapes and no numbers, so that whatever a step
of training asks the host for must ask here."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedrp import RunConfig
from fedrp.algorithms.client_side import Local, Participant, Step
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS
from fedrp.crypto.secret import SecretKey
from fedrp.engines.choice import make_trainer
from fedrp.learning.initial import public_initial
from fedrp.learning.objective import Examples, LocalSGD, Objective, Stack
from fedrp.learning.zoo import MODELS
from fedrp.projection.families import FAMILIES, make_projection
from fedrp.projection.rotation import make_rotation
from fedrp.rng import RunSeed

META = torch.device("meta")
CLIENTS, BATCH, STEPS = 3, 4, 3
SHAPE = (1, 28, 28)
KEYS = [SecretKey(bytes([number]) * 32) for number in range(2)]


class ToHost(TorchDispatchMode):
    """Counts what comes from the device to the host, and gives ones for it, as the device has no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device == META
        if there and func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
            return 1.0
        if there and func is torch.ops.aten._to_copy.default and kwargs.get("device", META) != META:
            self.count += 1
            return torch.ones(args[0].shape)
        if there and func is torch.ops.aten.equal.default:
            self.count += 1
            return True
        return func(*args, **kwargs)


def lenet() -> nn.Module:
    return MODELS["lenet5"].build(SHAPE, 10)


def moved(algorithm: str, family: str | None, engine: str, steps: int) -> int:
    """How many tensors and numbers come to the host in a round of so many local steps."""
    settings: dict[str, Any] = {} if family is None else {"projection": family, "dim": 20}
    asked = RunConfig(algorithm=algorithm, clients=CLIENTS, batch_size=BATCH, grad_clip=1.0, **settings)
    initial = public_initial(lenet, RunSeed(0))
    config = resolved(asked, initial.size)
    data = [Examples(torch.zeros(steps * BATCH, *SHAPE), torch.zeros(steps * BATCH, dtype=torch.long))] * CLIENTS
    trainer = make_trainer(lenet, nn.functional.cross_entropy, META, RunSeed(0), engine)
    sgd = LocalSGD(config.lr, config.momentum, config.batch_size, 1, config.grad_clip)

    def train(start: Stack, objective: Objective) -> Stack:
        return trainer.train(start, data, range(CLIENTS), 1, sgd, objective)

    side = ALGORITHMS[algorithm].client
    local = Local(
        config,
        KEYS[1],
        lambda key: make_projection(config.projection, key, initial.size, config.dim),
        lambda key: make_rotation(config.rotation, key, config.dim),
        train,
        META,
    )
    participants = [Participant(side.init(config, initial), [Step(KEYS[0], None)]) for _ in range(CLIENTS)]
    with ToHost() as mode:
        side.round(local, participants)
    return mode.count


@pytest.mark.parametrize("engine", ["sequential", "stacked:2"])
@pytest.mark.parametrize(
    ("algorithm", "family"),
    [
        ("fedavg", None),
        ("fedadmm", None),
        *((name, family) for name in ("fedrp-subspace", "fedrp") for family in FAMILIES),
    ],
)
def test_no_step_of_training_brings_anything_to_the_host(algorithm: str, family: str | None, engine: str) -> None:
    once, more = (moved(algorithm, family, engine, steps) for steps in (2, 2 + STEPS))
    assert once == more > 0  # what was reached, and the losses of each client's first and last step


def test_a_projection_without_a_form_on_the_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a streamed `gaussian` matrix: both products of every step go by the host."""
    for family in FAMILIES.values():
        kind = type(family.make(KEYS[0], 10, 2, 2**20))
        monkeypatch.setattr(kind, "native", lambda _self, _device: None)
    once, more = (moved("fedrp-subspace", "sign", "sequential", steps) for steps in (2, 2 + STEPS))
    assert more == once + 2 * STEPS


@pytest.mark.parametrize("family", FAMILIES)
def test_a_matrix_moves_to_a_device_once(family: str) -> None:
    projection = make_projection(family, KEYS[0], 300, 7)
    operator = projection.on(META)
    assert projection.on(META) is operator
    images = operator.forward(torch.zeros(3, 300, device=META))
    assert (images.shape, images.device) == ((3, 7), META)
    assert operator.adjoint(images).shape == (3, 300)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_single_precision_a_device_computes_what_the_kernels_do(family: str) -> None:
    projection = make_projection(family, KEYS[0], 61_706, 100)
    operator = projection.native(torch.device("cpu"))
    assert operator is not None
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((3, 61_706), np.float32)
    expected = projection.forward(vectors)
    images = operator.forward(torch.from_numpy(vectors)).numpy()
    scale = np.linalg.norm(expected, axis=1).max()
    np.testing.assert_allclose(images, expected, rtol=0, atol=1e-6 * scale)
    thetas = generator.standard_normal((3, 100), np.float32)
    preimages = operator.adjoint(torch.from_numpy(thetas)).numpy()
    if FAMILIES[family].same_bits:
        assert preimages.tobytes() == projection.adjoint(thetas).tobytes()
    else:
        np.testing.assert_allclose(preimages, projection.adjoint(thetas), rtol=0, atol=1e-5)
