"""Local training: SGD as everyone knows it, the same for a client alone and in company."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedrp.auditing.parties import CanaryTrainer
from fedrp.crypto.secret import SecretKey
from fedrp.engines.choice import make_trainer
from fedrp.engines.descent import clipped
from fedrp.errors import ConfigError, DivergenceError
from fedrp.learning.initial import public_initial
from fedrp.learning.layout import load_vector
from fedrp.learning.objective import Examples, LocalSGD, Objective, on_device
from fedrp.learning.trainer import Trainer
from fedrp.projection.families import FAMILIES, make_projection
from fedrp.rng import RunSeed
from helpers import FEATURES, DropoutNet, FrozenNet, TinyNet, blobs, client_batches, tiny_config

CONFIG = tiny_config(local_epochs=2)
SGD = LocalSGD(0.05, 0.9, CONFIG.batch_size, CONFIG.local_epochs)
SIZES = (20, 33, 8, 5)  # not all a multiple of the batch, so clients take different numbers of steps
DATA = [Examples(*blobs(size, seed)) for seed, size in enumerate(SIZES)]
ROUND = 3


def starts(count: int = len(SIZES)) -> np.ndarray:
    return np.stack([public_initial(TinyNet, RunSeed(seed)) for seed in range(count)])


def by_hand(start: np.ndarray, data: Examples, client: int) -> np.ndarray:
    module = load_vector(TinyNet(), start)
    optimiser = torch.optim.SGD(module.parameters(), lr=SGD.lr, momentum=SGD.momentum)
    for batch in client_batches(CONFIG, ROUND, client, len(data.y)):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(data.x[batch]), data.y[batch]).backward()
        optimiser.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).numpy()


def test_equals_torch_sgd_with_momentum(trainer: Trainer) -> None:
    clients = [5, 0, 2, 9]
    reached = trainer.train(starts(), DATA, clients, ROUND, SGD)
    for row, client in enumerate(clients):
        np.testing.assert_allclose(reached[row], by_hand(starts()[row], DATA[row], client), atol=1e-6)


def test_the_start_is_not_changed(trainer: Trainer) -> None:
    start = starts()
    start.setflags(write=False)
    reached = trainer.train(start, DATA, range(4), ROUND, SGD)
    assert np.array_equal(start, starts())
    assert not np.array_equal(reached, start)


@pytest.mark.parametrize("net", [TinyNet, DropoutNet])
def test_a_client_reaches_the_same_bits_alone_and_in_any_company(net: type[nn.Module]) -> None:
    trainer = make_trainer(net, nn.functional.cross_entropy, torch.device("cpu"), RunSeed(0))
    together = trainer.train(starts(), DATA, [0, 1, 2, 3], ROUND, SGD)
    for client in range(4):
        alone = trainer.train(starts()[client : client + 1], [DATA[client]], [client], ROUND, SGD)
        assert alone[0].tobytes() == together[client].tobytes()
    order = [2, 0, 3]
    mixed = trainer.train(starts()[order], [DATA[c] for c in order], order, ROUND, SGD)
    assert mixed.tobytes() == together[order].tobytes()


def test_dropout_differs_by_client_and_round() -> None:
    trainer = make_trainer(DropoutNet, nn.functional.cross_entropy, torch.device("cpu"), RunSeed(0))
    whole_batch = SGD._replace(batch_size=100, epochs=1)  # no order of batches that could differ instead
    results = {
        trainer.train(starts(1), [DATA[0]], [client], round_, whole_batch).tobytes()
        for client, round_ in [(0, 1), (1, 1), (0, 2)]
    }
    assert len(results) == 3


def test_training_leaves_the_global_generator_alone(trainer: Trainer) -> None:
    state = torch.get_rng_state()
    trainer.train(starts(), DATA, range(4), ROUND, SGD)
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_differ_by_seed_and_round(trainer: Trainer) -> None:
    other = dataclasses.replace(trainer, seed=RunSeed(1))
    results = [t.train(starts(1), DATA[:1], [0], round_, SGD) for t, round_ in [(trainer, 1), (trainer, 2), (other, 1)]]
    assert len({result.tobytes() for result in results}) == 3


def test_an_added_gradient_is_followed(trainer: Trainer) -> None:
    target = 0.25
    pull = Objective(lambda variables, gradients, rows: 0 * gradients + (variables - target))
    reached = trainer.train(starts(), DATA, range(4), ROUND, SGD._replace(epochs=60, momentum=0.0, lr=0.5), pull)
    np.testing.assert_allclose(reached, target, atol=1e-5)


def test_training_on_a_chart_equals_autograd_through_it(trainer: Trainer) -> None:
    """Variables theta in R^4 with weights base + theta B: the gradient is that of the composed function."""
    base = starts()
    B = np.random.default_rng(0).normal(0, 0.5, (4, base.shape[1])).astype(np.float32)
    origin, basis = torch.from_numpy(base), torch.from_numpy(B)
    chart = Objective(
        lambda _theta, gradients, _rows: gradients @ basis.T, lambda theta, rows: origin[rows] + theta @ basis
    )
    reached = trainer.train(np.zeros((4, 4), np.float32), DATA, range(4), ROUND, SGD, chart)

    for client, data in enumerate(DATA):
        theta = torch.zeros(4, requires_grad=True)
        optimiser = torch.optim.SGD([theta], lr=SGD.lr, momentum=SGD.momentum)
        module = TinyNet()
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        for batch in client_batches(CONFIG, ROUND, client, len(data.y)):
            flat = origin[client] + theta @ basis
            pieces = torch.split(flat, [shape.numel() for shape in shapes.values()])
            weights = {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
            optimiser.zero_grad()
            outputs = torch.func.functional_call(module, weights, (data.x[batch],))
            nn.functional.cross_entropy(outputs, data.y[batch]).backward()
            optimiser.step()
        np.testing.assert_allclose(reached[client], theta.detach().numpy(), atol=1e-5)


def test_divergence_names_client_and_round(trainer: Trainer) -> None:
    poisoned = [*DATA[:2], Examples(DATA[2].x * float("inf"), DATA[2].y), DATA[3]]
    with pytest.raises(DivergenceError, match=r"client 12 .*not finite in round 3 .*lr=0\.05.*lower lr"):
        trainer.train(starts(), poisoned, [10, 11, 12, 13], ROUND, SGD)


def test_gradients_whose_squares_overflow_are_clipped_and_do_not_vanish() -> None:
    gradients = torch.full((1, 4), 1e30)
    np.testing.assert_allclose(clipped(gradients, 1.0), 0.5)


def test_divergence_is_seen_where_clipped_gradients_keep_everything_finite(trainer: Trainer) -> None:
    wild = SGD._replace(lr=1000.0, grad_clip=1.0)
    with pytest.raises(DivergenceError, match=r"the loss of client 11 went from \d.* to \S+ in round 3 .*lower lr"):
        trainer.train(starts(), DATA, [10, 11, 12, 13], ROUND, wild)
    trainer.train(starts(), DATA, [10, 11, 12, 13], ROUND, SGD._replace(lr=1.0, grad_clip=1.0))


def test_where_a_stop_would_tell_divergence_is_only_logged(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    poisoned = [*DATA[:2], Examples(DATA[2].x * float("inf"), DATA[2].y), DATA[3]]
    reached = trainer.train(starts(), poisoned, [10, 11, 12, 13], ROUND, SGD._replace(log_divergence=True))
    assert [bool(np.isfinite(row).all()) for row in reached] == [True, True, False, True]
    assert "client 12 has values that are not finite in round 3" in caplog.text
    assert "1 of 4 clients" in caplog.text


def test_random_frozen_layers_and_buffers_are_the_same_in_every_process() -> None:
    """What is not in the vector must come from the run seed, or each process would train another model."""

    def features() -> nn.Module:
        net = TinyNet()
        net.hidden.requires_grad_(False)
        return net

    def train() -> bytes:
        made = make_trainer(features, nn.functional.cross_entropy, torch.device("cpu"), RunSeed(0))
        return made.train(np.zeros((1, 27), np.float32), DATA[:1], [0], ROUND, SGD).tobytes()

    first = train()
    torch.rand(FEATURES)  # another state of the global generator, as in another process
    assert train() == first


# --- what is not in the vector ---------------------------------------------------------------------------------------


def trainer_of(factory: Callable[[], nn.Module]) -> Trainer:
    return make_trainer(factory, nn.functional.cross_entropy, torch.device("cpu"), RunSeed(0))


def test_the_state_is_the_whole_model_as_it_was_trained() -> None:
    trainer = trainer_of(FrozenNet)
    (reached,) = trainer.train(starts(1), DATA[:1], [0], ROUND, SGD)
    state = trainer.model.state(reached)
    module = FrozenNet()
    module.load_state_dict(state)
    assert torch.equal(module(DATA[0].x), trainer.model.bind(reached)(DATA[0].x))
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state) == 9  # tied, but with memory of its own


def test_every_process_has_the_same_frozen_parts_whatever_its_generator() -> None:
    first = trainer_of(FrozenNet).model.state(starts(1)[0])
    torch.rand(3)
    again = trainer_of(FrozenNet).model.state(starts(1)[0])
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


class Counting(TinyNet):
    """Counts its batches, in a buffer."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        return super().forward(x)


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("factory", "name"), [(lambda: Counting(True), "batches"), (spectral, r"0\.parametrizations\.weight\.0\._u")]
)
def test_buffers_that_change_in_training_are_refused_by_name(factory: Callable[[], nn.Module], name: str) -> None:
    trainer = trainer_of(factory)
    start = trainer.model.layout.flatten(trainer.model.module)[None]
    with pytest.raises(ConfigError, match=f"buffer '{name}' changes while the model trains"):
        trainer.train(start, DATA[:1], [0], ROUND, SGD)


def test_a_cache_that_is_not_saved_may_change() -> None:
    reached = trainer_of(lambda: Counting(False)).train(starts(1), DATA[:1], [0], ROUND, SGD)
    assert np.array_equal(reached, trainer_of(TinyNet).train(starts(1), DATA[:1], [0], ROUND, SGD))


def test_any_engine_that_fits_the_protocol_can_train_a_client() -> None:
    """The audit's engine and the sequential one go through the same door."""
    sequential = trainer_of(TinyNet)
    engines: list[Trainer] = [sequential, CanaryTrainer(sequential.model)]
    for engine in engines:
        reached = engine.train(starts(1), DATA[:1], [0], ROUND, SGD)
        assert reached.shape == starts(1).shape
        assert reached.dtype == np.float32


@pytest.mark.parametrize("limit", [0.1, 1.0, 3.0])
def test_clipping_gives_the_bits_that_numpy_gives(limit: float) -> None:
    rows = np.random.default_rng(0).normal(0, 0.1, (5, 1003)).astype(np.float32)
    rows[0] *= 0.001
    expected = rows.copy()
    for row in expected:
        if (norm := np.linalg.norm(row)) > limit:
            row *= np.float32(limit) / norm
    assert clipped(torch.from_numpy(rows.copy()), limit).numpy().tobytes() == expected.tobytes()


def test_objectives_read_the_memory_of_writeable_arrays_and_a_copy_of_others() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert on_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data
    array.setflags(write=False)
    assert torch.equal(on_device(array, torch.device("cpu")), torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_projections_of_tensors_are_those_of_arrays(family: str) -> None:
    """Also of rows with padding between them, as training has."""
    projection = make_projection(family, SecretKey(bytes(32)), 50, 7)
    padded = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32))[:, :50]
    forward, adjoint = projection.on(torch.device("cpu"))
    images = forward(padded)
    assert images.numpy().tobytes() == projection.forward(padded.numpy()).tobytes()
    assert adjoint(images).numpy().tobytes() == projection.adjoint(images.numpy()).tobytes()
