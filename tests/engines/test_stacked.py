"""The stacked engine: the same training as one client after the other, up to rounding."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import platformdirs
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

from fedrp import RunConfig, RunResult, Speed, Task, simulate
from fedrp.engines import calibration
from fedrp.engines.calibration import Workload, choose_engine
from fedrp.engines.choice import SEQUENTIAL, make_trainer, trainer_of
from fedrp.engines.stacked import StackedTrainer, stacked_views
from fedrp.errors import ConfigError
from fedrp.learning.layout import layout_of
from fedrp.learning.objective import PLAIN, Examples, LocalSGD, Objective
from fedrp.learning.trainer import LocalModel, Trainer
from fedrp.learning.zoo import MODELS
from fedrp.rng import RunSeed
from fedrp.stacking.rewrite import rewritten
from fedrp.stacking.values import NotStackableError, Pass, Stacked
from helpers import FEATURES, DropoutNet, FrozenNet, TinyNet, blobs, tiny_config, tiny_task

CPU = torch.device("cpu")
WORDS, LENGTH = 20, 7


class Words(nn.Module):
    """A small transformer on indices, with parameters of its own and a head tied to nothing."""

    def __init__(self, dropout: float = 0.0, norm_first: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 16, padding_idx=0)
        self.places = nn.Parameter(torch.randn(1, LENGTH, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x) + self.places[:, : x.shape[1]]
        return self.head(self.encoder(h, src_key_padding_mask=x == 0).mean(dim=1))


class Causal(nn.Module):
    """Attention itself, with a mask and the length first; the table is used again as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 16)
        self.attention = nn.MultiheadAttention(16, 4)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x).transpose(0, 1)
        mixed, _ = self.attention(h, h, h, attn_mask=self.mask, need_weights=False)
        return F.linear(self.norm(h + mixed)[:, :, :].transpose(0, 1)[:, -1], self.table.weight)[:, :3]


class Functional(nn.Module):
    """Functions where others use layers, a residual, cat, and a parameter with another rank than what it scales."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect")
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.out = nn.Linear(8 * 49, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(torch.relu(self.first(x)), 2)
        h = h + F.silu(self.second(h))
        h = F.avg_pool2d(torch.cat([h, -h], dim=1), 2)
        h = F.pad(h, (0, 0, 1, 1))[:, :, 1:-1, :]
        return self.out(h.reshape(h.size(0), -1)).sigmoid() * self.scale


class Sequence1d(nn.Sequential):
    """A convolution over one dimension, in-place activations and dropout of channels."""

    def __init__(self) -> None:
        super().__init__(
            *[nn.Conv1d(2, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Dropout1d(0.3), nn.AvgPool1d(2)],
            *[nn.Flatten(), nn.Linear(8 * 4, 3), nn.LogSoftmax(dim=1)],
        )


def small_vgg() -> nn.Module:
    """VGG-16's kinds of layers, narrow."""
    layers: list[nn.Module] = [nn.ZeroPad2d(2)]
    channels = 1
    for width in (4, 8):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(8 * 49, 16), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def frozen() -> nn.Module:
    return FrozenNet()


def pixels(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda count: torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


def indices(count: int) -> torch.Tensor:
    drawn = torch.randint(1, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(count))
    drawn[::2, -2:] = 0
    return drawn


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "lenet5": (lambda: MODELS["lenet5"].build((1, 28, 28), 3), pixels(1, 28, 28)),
    "cnn": (lambda: MODELS["cnn"].build((3, 8, 8), 3), pixels(3, 8, 8)),
    "resnet18": (lambda: MODELS["resnet18"].build((3, 8, 8), 3), pixels(3, 8, 8)),
    "small vgg": (small_vgg, pixels(1, 28, 28)),
    "words": (Words, indices),
    "words, norm first": (lambda: Words(norm_first=True), indices),
    "causal": (Causal, indices),
    "functional": (Functional, pixels(1, 28, 28)),
    "one dimension": (Sequence1d, pixels(2, 10)),
    "dropout": (DropoutNet, pixels(FEATURES)),
    "frozen and tied": (frozen, pixels(FEATURES)),
}
SIZES = (20, 33, 8, 20, 5)  # uneven batches, and clients that are done before others
SGD = LocalSGD(0.05, 0.9, 8, 2, grad_clip=1.0)


def precise(net: str, engine: str) -> Trainer:
    """A trainer that computes in double precision."""
    trainer = make_trainer(NETS[net][0], F.cross_entropy, CPU, RunSeed(0), engine)
    trainer.model.module.double()
    return trainer


def examples(net: str, count: int) -> Examples:
    x = NETS[net][1](count)
    return Examples(x.double() if x.is_floating_point() else x, torch.arange(count) % 3)


def starts(trainer: Trainer, count: int) -> np.ndarray:
    model = trainer.model.layout.flatten(trainer.model.module).astype(np.float64)
    return model + np.random.default_rng(0).normal(0, 0.02, (count, model.size))


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", NETS)
def test_gradients_are_those_of_one_client_after_the_other(net: str) -> None:
    """With lr 1 and one step, what is reached says the gradient."""
    once = LocalSGD(1.0, 0.0, 6, 1)
    data = [examples(net, size) for size in (6, 4, 6)]
    reached = []
    for engine in (SEQUENTIAL, "stacked:4"):
        trainer = precise(net, engine)
        start = starts(trainer, 3)
        reached.append(trainer.train(start, data, [4, 0, 2], 1, once) - start)
    np.testing.assert_allclose(reached[1], reached[0], rtol=0, atol=1e-10)
    assert np.abs(reached[0]).max() > 1e-3


@pytest.mark.parametrize("net", ["lenet5", "words"])
def test_padding_has_no_gradient_at_all(net: str) -> None:
    trainer = precise(net, "stacked:2")
    assert isinstance(trainer, StackedTrainer)
    module, layout = trainer.model.module, trainer.model.layout
    weights = torch.from_numpy(starts(trainer, 2))
    x = torch.stack([examples(net, 5).x, examples(net, 5).x.flip(0)])
    found = []
    for padding in (x[:, 3:], x[:, 3:].flip(1) if net == "words" else 100 * x[:, 3:]):
        batch = torch.cat([x[:, :3], padding], dim=1)
        leaves = [view.requires_grad_() for view in stacked_views(layout, weights.clone())]
        parameters = {id(p): leaf for p, leaf in zip(module.parameters(), leaves, strict=True)}
        outputs = trainer.program(Pass(2, parameters, (3, 3)), Stacked(batch, 2))
        found.append(torch.autograd.grad(outputs[:, :3].square().sum(), leaves))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_rewritten_model_runs_forward_and_backward_without_data() -> None:
    """On the meta device nothing can come to the host."""
    module = MODELS["cnn"].build((3, 32, 32), 10).to("meta")
    program = rewritten(module)
    matrix = torch.empty(4, layout_of(module).size, device="meta")
    leaves = [view.requires_grad_() for view in stacked_views(layout_of(module), matrix)]
    parameters = {id(p): leaf for p, leaf in zip(module.parameters(), leaves, strict=True)}
    outputs = program(Pass(4, parameters, (64,) * 4), Stacked(torch.empty(64, 12, 32, 32, device="meta"), 4, True))
    assert outputs.shape == (4, 64, 10)
    gradients = torch.autograd.grad(outputs.sum(), leaves)
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves]


# --- whole runs ------------------------------------------------------------------------------------------------------


def subspace(start: np.ndarray) -> Objective:
    basis = torch.from_numpy(np.random.default_rng(1).normal(0, 0.1, (6, start.shape[1])))
    base = torch.from_numpy(start)
    return Objective(
        lambda theta, gradients, _rows: gradients @ basis.T + 0.01 * theta,
        lambda theta, rows: base[rows] + theta @ basis,
        lambda steps: 0.3 / steps,
        at_once=True,
    )


def admm(start: np.ndarray) -> Objective:
    anchor = torch.from_numpy(start)
    dual = 0.01 * torch.arange(len(start))[:, None]
    return Objective(lambda weights, gradients, rows: gradients + dual[rows] + 0.1 * (weights - anchor[rows]))


OBJECTIVES: dict[str, Callable[[np.ndarray], Objective]] = {
    "plain": lambda _start: PLAIN,
    "admm": admm,
    "subspace": subspace,
}


def rounds(trainer: Trainer, net: str, objective: str) -> np.ndarray:
    """Three rounds in which clients go on from a mixture of their own model and the mean."""
    data = [examples(net, size) for size in SIZES]
    models = starts(trainer, len(SIZES))
    for round_ in range(1, 4):
        goal = OBJECTIVES[objective](models)
        inside = goal.weights is not None
        start = np.zeros((len(SIZES), 6)) if inside else models
        reached = trainer.train(start, data, [7, 3, 0, 1, 9], round_, SGD, goal)
        if goal.weights is not None:
            reached = goal.weights(torch.from_numpy(reached), slice(None)).numpy()
        models = 0.5 * reached + 0.5 * reached.mean(axis=0)
    return models


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("net", ["lenet5", "words, norm first", "dropout", "frozen and tied"])
def test_engines_agree_over_a_run_in_double_precision(net: str, objective: str) -> None:
    expected = rounds(precise(net, SEQUENTIAL), net, objective)
    for engine in ("stacked:2", "stacked:8"):
        np.testing.assert_allclose(rounds(precise(net, engine), net, objective), expected, rtol=0, atol=1e-9)


def test_any_loss_is_taken_on_each_client_alone() -> None:
    """One that is not a mean over examples would show a padded batch, or one of two clients."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets) * (1 + outputs.var(dim=0, correction=0).mean())

    reached = []
    for engine in (SEQUENTIAL, "stacked:4"):
        trainer = make_trainer(TinyNet, loss, CPU, RunSeed(0), engine)
        trainer.model.module.double()
        data = [examples("dropout", size) for size in SIZES]
        reached.append(trainer.train(starts(trainer, 5), data, range(5), 1, SGD))
    np.testing.assert_allclose(reached[1], reached[0], rtol=0, atol=1e-10)


def test_examples_without_a_class_are_left_out_as_torch_does() -> None:
    reached = []
    data = [Examples(x, y.masked_fill(torch.arange(len(y)) % 4 == 1, -100)) for x, y in map(precise_blobs, SIZES)]
    for engine in (SEQUENTIAL, "stacked:4"):
        trainer = make_trainer(TinyNet, nn.CrossEntropyLoss(), CPU, RunSeed(0), engine)
        trainer.model.module.double()
        reached.append(trainer.train(starts(trainer, 5), data, range(5), 1, SGD))
    np.testing.assert_allclose(reached[1], reached[0], rtol=0, atol=1e-10)


def precise_blobs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = blobs(size, size)
    return x.double(), y


def test_dropout_is_drawn_by_client_round_and_step_alone() -> None:
    trainer = make_trainer(DropoutNet, F.cross_entropy, CPU, RunSeed(0), "stacked:4")
    start = trainer.model.layout.flatten(trainer.model.module)
    data, whole = Examples(*blobs(24)), LocalSGD(0.5, 0.0, 24, 1)

    def reached(clients: list[int], round_: int = 1) -> np.ndarray:
        stack = np.repeat(start[None], len(clients), axis=0)
        return trainer.train(stack, [data] * len(clients), clients, round_, whole)

    together = reached([0, 1, 2])
    assert len({row.tobytes() for row in together}) == 3  # the same data and start: only the draws differ
    np.testing.assert_allclose(reached([2, 5, 0])[[2, 0]], together[[0, 2]], atol=1e-6)
    assert np.array_equal(reached([0, 1, 2]), together)
    assert not np.allclose(reached([0, 1, 2], 2), together, atol=1e-3)


# --- through the simulator -------------------------------------------------------------------------------------------


def outcome(result: RunResult) -> tuple[bytes, list[float]]:
    return result.model.tobytes(), [record.evaluation.delivered.loss for record in result.records]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedadmm", "fedrp", "fedrp-subspace"])
def test_results_are_the_same_for_any_number_of_workers_and_near_those_of_the_other_engine(algorithm: str) -> None:
    config = tiny_config(algorithm, clients=5, partition="dirichlet:1")
    one, two = (simulate(config, tiny_task(), Speed(workers=count, engine="stacked:2")) for count in (1, 2))
    assert outcome(one) == outcome(two)
    other = simulate(config, tiny_task(), Speed(engine=SEQUENTIAL))
    np.testing.assert_allclose(one.model, other.model, atol=1e-4)


def test_a_resumed_run_keeps_its_engine(tmp_path: Path) -> None:
    config = tiny_config("fedavg", rounds=3)
    expected = simulate(config, tiny_task(), Speed(engine="stacked:2"))

    class Stopped(Exception):  # noqa: N818 - a stop, not an error
        pass

    def stop(_record: object, _model: object) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        simulate(config, tiny_task(), Speed(engine="stacked:2"), tmp_path / "run", on_round=stop)
    assert json.loads((tmp_path / "run" / "engine.json").read_text()) == {"engine": "stacked:2"}
    with pytest.raises(ConfigError, match="started with engine 'stacked:2', not 'sequential': resume with the same"):
        simulate(config, tiny_task(), Speed(engine=SEQUENTIAL), tmp_path / "run", resume=True)
    resumed = simulate(config, tiny_task(), Speed(workers=2), tmp_path / "run", resume=True)
    assert outcome(resumed) == outcome(expected)


# --- what cannot be stacked ------------------------------------------------------------------------------------------


class Branching(TinyNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class Centred(TinyNet):
    """Mixes the examples of a batch where no table sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(1, -1, FEATURES)
        return super().forward((flat - flat.mean(dim=1)[:, None]).reshape(-1, FEATURES))


class Moody(TinyNet):
    """Computes something else in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * x if self.training else x)


class Counting(TinyNet):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))


def hooked() -> nn.Module:
    net = TinyNet()
    net.hidden.register_forward_hook(lambda *_: None)
    return net


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (with_batch_norm, r"layer '1' \(BatchNorm1d\)"),
    "a layer of its own parameters": (lambda: nn.Sequential(TinyNet(), nn.PReLU()), r"layer '1' \(PReLU\)"),
    "a branch": (Branching, "its forward cannot be traced"),
    "mixed examples": (Centred, "its outputs are not those"),
    "training mode": (Moody, "its outputs are not those"),
    "a buffer that changes": (Counting, "buffer 'count' changes"),
    "hooks": (hooked, r"layer 'hidden' \(Linear\) has hooks"),
}
LONG = Workload([Examples(*blobs(40, seed)) for seed in range(4)], 8, 10**6)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_known_is_trained_one_after_the_other(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    factory, reason = UNKNOWN[kind]
    caplog.set_level(logging.INFO)
    assert choose_engine("auto", factory, F.cross_entropy, CPU, LONG) == SEQUENTIAL
    assert "the model cannot be stacked" in caplog.text
    with pytest.raises(ConfigError, match=rf"engine 'stacked' cannot train this model: {reason}.*; use engine='auto'"):
        choose_engine("stacked", factory, F.cross_entropy, CPU, LONG)


def test_rewriting_leaves_the_module_as_it_was() -> None:
    module = Counting().eval()
    module.hidden.train()
    with pytest.raises(NotStackableError):
        rewritten(module)
    assert module.count == 0
    assert module.hidden.training
    assert not module.training


def test_a_stacked_engine_for_batch_norm_is_refused_in_one_line() -> None:
    task = tiny_task()
    with pytest.raises(ConfigError, match=r"^engine 'stacked:4' cannot train this model: layer '1' \(BatchNorm1d\)"):
        simulate(tiny_config("fedavg"), Task(with_batch_norm, task.train, task.test), Speed(engine="stacked:4"))


def test_no_other_engine_is_known() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'stakked', did you mean 'stacked'"):
        Speed(engine="stakked")


# --- choosing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_: tmp_path / "cache")
    return tmp_path / "cache" / "engines.json"


def test_the_choice_is_measured_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = choose_engine("auto", TinyNet, F.cross_entropy, CPU, LONG)
    assert SEQUENTIAL in next(iter(json.loads(cache.read_text()).values()))
    monkeypatch.setattr(calibration, "measured_seconds", lambda *_: pytest.fail("measured again"))
    assert choose_engine("auto", TinyNet, F.cross_entropy, CPU, LONG) == first
    cache.write_text("not JSON")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        choose_engine("auto", TinyNet, F.cross_entropy, CPU, LONG)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("slow", ["sequential", "stacked"])
def test_an_engine_that_is_obviously_slower_is_not_chosen(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer_of

    def slowed(model: object, seed: object, engine: str) -> object:
        trainer = made(model, seed, engine)  # type: ignore[arg-type]
        return Slow(trainer) if engine.startswith(slow) else trainer

    monkeypatch.setattr(calibration, "trainer_of", slowed)
    chosen = choose_engine("auto", TinyNet, F.cross_entropy, CPU, LONG)
    assert not chosen.startswith(slow)


@dataclasses.dataclass(frozen=True)
class Slow:
    """A real engine that does much besides."""

    trainer: Trainer

    @property
    def model(self) -> LocalModel:
        return self.trainer.model

    def train(self, start: np.ndarray, *rest: object) -> np.ndarray:
        for _ in range(20 * len(start)):
            torch.mm(torch.ones(200, 200), torch.ones(200, 200))
        return self.trainer.train(start, *rest)  # type: ignore[arg-type]


def test_short_runs_do_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measured_seconds", lambda *_: pytest.fail("measured"))
    short = LONG._replace(steps=100)
    assert choose_engine("auto", TinyNet, F.cross_entropy, CPU, short) == SEQUENTIAL


def test_a_config_has_no_engine() -> None:
    """It belongs to how a run is computed, not to what it is: sites of a deployment need not agree on it."""
    assert "engine" not in {field.name for field in dataclasses.fields(RunConfig)}


def test_dropout_of_attention_weights_is_refused_by_name() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
    with pytest.raises(NotStackableError, match=r"'0.self_attn' .* dropout of attention weights"):
        rewritten(nn.Sequential(layer))


def test_near_ties_between_stacks_go_to_the_same_engine() -> None:
    near = {"sequential": 3.0, "stacked:1": 1.2, "stacked:2": 1.1, "stacked:4": 1.0, "stacked:8": 0.95}
    assert calibration.preferred(near) == "stacked:4"
    assert calibration.preferred({**near, "stacked:8": 0.8}) == "stacked:8"
