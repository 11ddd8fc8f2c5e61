"""FedRP-Subspace: its equations step by step, exact consensus, and defaults that never diverge."""

import dataclasses
import hmac

import numpy as np
import pytest
import torch

from fedrp import RunConfig, Task, simulate
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.subspace import fingerprint, step_size
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from fedrp.learning.initial import secret_initial
from fedrp.learning.layout import layout_of, load_vector
from fedrp.learning.task import named_task, split_among_clients
from fedrp.learning.zoo import MODELS
from fedrp.projection import kernels
from fedrp.projection.families import FAMILIES, make_projection, norm_bound
from helpers import CLASSES, FEATURES, Federation, TinyNet, blobs, client_batches, round_keys, tiny_config, tiny_task

PARAMETERS = layout_of(TinyNet()).size


def reference(config: RunConfig, task: Task) -> np.ndarray:
    """The algorithm as its equations say it, in float64 with the matrix written out."""
    data = split_among_clients(task, config)
    keys = round_keys(config)
    w = secret_initial(TinyNet, keys[0]).astype(np.float64)
    velocity = np.zeros_like(w)
    for round_ in range(1, config.rounds + 1):
        family = config.projection or "gaussian"
        matrix = make_projection(family, keys[round_], PARAMETERS, config.dim).forward(np.eye(PARAMETERS, dtype="f4")).T
        A = matrix.astype(np.float64)
        bound = norm_bound(family, PARAMETERS, config.dim)
        thetas = []
        for client, (x, y) in enumerate(data):
            theta, moving = np.zeros(config.dim), np.zeros(config.dim)
            batches = client_batches(config, round_, client, len(y))
            lr = step_size(config.lr or 0.0, config.momentum, bound, len(batches))
            for batch in batches:
                net = load_vector(TinyNet(), (w + A.T @ theta).astype(np.float32))
                net.zero_grad()
                torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
                g = torch.cat([p.grad.reshape(-1) for p in net.parameters()]).numpy().astype(np.float64)
                step = A @ g + config.proximal * PARAMETERS / config.dim * theta
                if config.grad_clip:
                    step *= min(1.0, config.grad_clip / np.linalg.norm(step))
                moving = config.momentum * moving + step
                theta = theta - lr * moving
            thetas.append(theta)
        weights = [len(d.y) if config.weighting == "samples" else 1 for d in data]
        velocity = (config.server_momentum or 0.0) * velocity + A.T @ np.average(thetas, axis=0, weights=weights)
        w = w + velocity
    return w


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"grad_clip": 0.1},
        {"server_momentum": 0.5},
        {"proximal": 0.3},
        {"weighting": "samples", "partition": "dirichlet:0.5"},
        {"momentum": 0.0, "local_epochs": 2},
        {"local_epochs": 8, "partition": "dirichlet:0.5"},  # step sizes of clients differ
    ],
    ids=lambda change: ",".join(change) or "plain",
)
def test_the_simulator_computes_the_equations(family: str, change: dict[str, object]) -> None:
    config, task = tiny_config("fedrp-subspace", projection=family, **change), tiny_task()
    by_hand = reference(resolved(config, PARAMETERS), task)
    np.testing.assert_allclose(simulate(config, task).model, by_hand, rtol=0, atol=2e-5)


def test_the_step_size_is_bounded_by_the_matrix_norm() -> None:
    assert step_size(0.1, 0.9, norm_bound=4.0, steps=5) == 0.1
    assert step_size(0.1, 0.9, norm_bound=80.0, steps=5) == pytest.approx(0.01)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_round_moves_no_further_than_one_of_fifteen_steps(momentum: float) -> None:
    def moved(steps: int) -> float:
        """How far gradients of length 1 that never turn bring theta, by running them."""
        theta, velocity = 0.0, 0.0
        for _ in range(steps):
            velocity = momentum * velocity + 1.0
            theta += step_size(0.1, momentum, 20.0, steps) * velocity
        return theta

    assert all(moved(steps) < moved(steps + 1) for steps in range(1, 15))
    assert [moved(steps) for steps in (16, 50, 1000)] == pytest.approx([moved(15)] * 3)


@pytest.mark.parametrize(
    ("change", "momentum"),
    [
        ({"clients": 49}, 0.0),
        ({"clients": 50}, 0.5),
        ({"clients": 50, "dim": 1}, 0.0),
        ({"clients": 100, "participation": 0.4}, 0.0),
        ({"clients": 50, "noise_multiplier": 1.0}, 0.5),
        ({"clients": 3, "server_momentum": 0.9}, 0.9),
    ],
)
def test_momentum_over_rounds_is_for_crowds_with_enough_dimensions(change: dict[str, object], momentum: float) -> None:
    config = tiny_config("fedrp-subspace", **change)
    assert resolved(config, PARAMETERS).server_momentum == momentum


def learning_task() -> Task:
    return Task(TinyNet, blobs(240, 1), blobs(300, 2))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dim", [1, 2, 10, 40, PARAMETERS - 1, PARAMETERS])
def test_default_settings_never_diverge_whatever_m(family: str, dim: int) -> None:
    config = RunConfig(algorithm="fedrp-subspace", clients=4, rounds=8, dim=dim, projection=family, batch_size=8)
    losses = [record.evaluation.delivered.loss for record in simulate(config, learning_task()).records]
    # w may wander where m is tiny, but it must not run away; with enough directions it learns.
    assert max(losses) < 3 * np.log(CLASSES) + 3
    if dim >= 10:
        assert losses[-1] < 0.9 * losses[0] or losses[-1] < 0.3


@pytest.mark.parametrize(
    ("model", "examples", "learns"),
    [
        ("lenet5", 512, True),
        pytest.param("cnn", 128, True, marks=pytest.mark.slow),
        # Four steps are too few for these, for FedAvg as well; they must not run away.
        *(pytest.param(name, 128, False, marks=pytest.mark.slow) for name in ("resnet18", "vgg16")),
    ],
)
def test_default_settings_are_stable_with_every_bundled_model(model: str, examples: int, learns: bool) -> None:
    config = RunConfig(algorithm="fedrp-subspace", model=model, clients=2, rounds=4, train_examples=examples)
    task = named_task(config)
    x, y = task.train  # type: ignore[misc]
    seen = dataclasses.replace(task, test=(x[:400], y[:400]))
    losses = [record.evaluation.delivered.loss for record in simulate(config, seen).records]
    assert max(losses) < 2 * np.log(10)
    assert not learns or losses[-1] < np.log(10) - 0.01  # better than knowing nothing


@pytest.mark.parametrize("dim", [1, 10, 100])
def test_default_settings_do_not_run_away_where_a_real_model_has_few_directions(dim: int) -> None:
    """LeNet-5 has 61,706 parameters: ||A|| is 25 at m = 100 and 248 at m = 1."""
    config = RunConfig(algorithm="fedrp-subspace", clients=2, rounds=4, train_examples=512, dim=dim)
    task = named_task(config)
    x, y = task.train  # type: ignore[misc]
    seen = dataclasses.replace(task, test=(x[:400], y[:400]))
    losses = [record.evaluation.delivered.loss for record in simulate(config, seen).records]
    assert max(losses) < 2 * np.log(10)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"clip": 2.0}, "clip=2.0"),
        ({"clip_quantile": 0.5}, "clip_quantile=0.5"),
        ({"dp_noise": "local"}, "dp_noise=local"),
    ],
)
def test_options_that_only_act_with_noise_are_not_taken_in_silence(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} does nothing without noise: add dp_epsilon"):
        resolved(tiny_config("fedrp-subspace", **change), PARAMETERS)
    resolved(tiny_config("fedrp-subspace", clients=40, noise_multiplier=0.0, **change), PARAMETERS)


def test_the_models_above_are_all() -> None:
    assert set(MODELS) == {"lenet5", "cnn", "resnet18", "vgg16"}


@pytest.mark.parametrize("family", ["sign", "hadamard"])
def test_copies_are_bit_identical_whatever_the_threads_and_who_computes_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("fedrp-subspace", projection=family, clients=6)
    task = tiny_task(96)
    one = simulate(config, task).model
    monkeypatch.setattr(kernels, "_VALUES_PER_THREAD", 1)  # so that even small vectors are cut up
    run = Federation(config, task)  # clients one by one, not stacked
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        run.round()
    kernels.set_threads(1)
    for model in run.final_models().values():
        assert model.tobytes() == one.tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fingerprint_tells_models_and_keys_apart(family: str) -> None:
    key, other = SecretKey(bytes(32)), SecretKey(bytes(31) + b"\x01")
    model = np.linspace(-1, 1, FEATURES * 50, dtype=np.float32)
    mark = fingerprint(family, key, model)
    assert mark == fingerprint(family, key, model.copy())
    assert mark != fingerprint(family, other, model)
    assert mark != fingerprint(family, key, model + np.float32(0.1))


def test_the_mark_of_a_model_is_never_a_part_of_a_derived_key() -> None:
    """HKDF is HMAC inside: with one key for both, a model whose bytes are a label would tell the label's key."""
    secret = SecretKey(bytes(32)).derive("fingerprint")
    model = np.frombuffer(b"fedrp/shift\x01", np.float32)
    derived = secret.derive("shift").reveal()
    assert derived == hmac.digest(secret.reveal(), model.tobytes(), "sha256")
    assert fingerprint("sign", SecretKey(bytes(32)), model) != derived[:16]


@pytest.mark.parametrize("partition", ["shards:2", "dirichlet:0.1"])
def test_it_learns_where_clients_hold_few_of_the_classes(partition: str) -> None:
    """A client alone reaches 18 % of all ten digits on average (fwc, the same settings)."""
    config = RunConfig(
        algorithm="fedrp-subspace",
        projection="sign",
        train_examples=2000,
        rounds=8,
        partition=partition,
    )
    assert simulate(config, named_task(config)).accuracy > 35
