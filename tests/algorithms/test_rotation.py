"""What the server's view of FedRP-Subspace tells: a random rotation of the thetas, i.e. their Gram matrix, no more.

The claim (docs/privacy-proofs.md, "Rotation"): with a Gaussian matrix and SGD with momentum, the view
V = (theta_1 .. theta_K) of a round and Q V have the same law for every rotation Q of R^m. Tested on the bytes that
reach the server, with two-sample tests that must accept where the claim holds and reject where it is broken on
purpose.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from scipy.spatial.distance import cdist
from scipy.stats import special_ortho_group
from torch import nn

from fedrp import Task
from fedrp.engines.sequential import SequentialTrainer
from fedrp.learning.objective import Examples, LocalSGD, Objective, Stack
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind
from helpers import Federation, tiny_config

DIM, CLIENTS, INPUTS = 4, 2, 24
VIEWS = 120
ACCEPT, REJECT = 0.05, 0.002


class Linear(nn.Module):
    """One output; with `push`, its gradient is the mean of the inputs, whatever the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze(1)


def push(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


class AdamTrainer(SequentialTrainer):
    """Adam on the variables in place of SGD: each coordinate is scaled by its own past, so directions matter."""

    def train(
        self,
        start: Stack,
        data: Sequence[Examples],
        clients: Sequence[int],
        round_: int,
        sgd: LocalSGD,
        objective: Objective,
    ) -> Stack:
        moment, square, variables = np.zeros_like(start), np.zeros_like(start), start.copy()
        for step in range(1, 5):
            one = sgd._replace(lr=1.0, momentum=0.0, epochs=1, batch_size=10**6)
            moved = super().train(variables, data, clients, round_, one, objective._replace(step_size=None))
            gradient = variables - moved
            moment = 0.9 * moment + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            scaled = moment / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
            variables = (variables - np.float32(0.05) * scaled).astype(np.float32)
        return variables


def regression(seed: int) -> Task:
    """Clients with data of their own and a loss that makes training depend on where it is."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(CLIENTS * 8, INPUTS)).astype(np.float32)
    y = (x @ rng.normal(size=INPUTS) + 1).astype(np.float32)
    parts = [(x[i::CLIENTS], y[i::CLIENTS]) for i in range(CLIENTS)]
    return Task(Linear, parts, parts[0], loss=nn.functional.mse_loss)


def pushed(directions: np.ndarray) -> Task:
    """Client i's gradient is always row i."""
    parts = [(row[None].astype(np.float32), np.zeros(1, np.float32)) for row in directions]
    return Task(Linear, parts, parts[0], loss=push)


def view(task: Task, seed: int, adam: bool = False, **changes: object) -> np.ndarray:
    """(theta_1, theta_2) of the first round as a DIM x CLIENTS matrix, from the bytes that reached the server."""
    config = tiny_config(
        "fedrp-subspace",
        **{"clients": CLIENTS, "rounds": 1, "dim": DIM, "projection": "gaussian", "seed": seed, **changes},
    )
    federation = Federation(config, task)
    if adam:
        sgd = federation.bench.trainer
        federation.bench = dataclasses.replace(federation.bench, trainer=AdamTrainer(sgd.model, sgd.seed))
    federation.round()
    uploads = [m for packet in federation.received for m in wire.messages_of(wire.decode(packet), Kind.UPLOAD)]
    by_client = sorted(uploads, key=lambda message: message.sender)
    return np.stack([message.payload for message in by_client], axis=1).astype(np.float64)


def views(task: Task, first_seed: int, **options: object) -> np.ndarray:
    return np.stack([view(task, first_seed + number, **options) for number in range(VIEWS)])


def rotated(sample: np.ndarray, seed: int) -> np.ndarray:
    """Each view, turned by a random rotation of its own."""
    turns = special_ortho_group.rvs(DIM, size=len(sample), random_state=np.random.default_rng(seed))
    return turns @ sample


def p_value(one: np.ndarray, other: np.ndarray, seed: int, permutations: int = 999) -> float:
    """The energy test of equal laws (Szekely, Rizzo 2004) on views and on what depends on directions most: shapes.

    Two distances, of views and of their fourth powers per coordinate, each scaled by its mean, are added.
    """
    pooled = np.concatenate([one, other]).reshape(len(one) + len(other), -1)
    powers = (pooled / np.linalg.norm(pooled, axis=1, keepdims=True)) ** 4
    distances = sum(matrix / matrix.mean() for matrix in (cdist(pooled, pooled), cdist(powers, powers)))
    rng = np.random.default_rng(seed)
    labels = np.repeat([1.0, -1.0], [len(one), len(other)]) / len(one)
    orders = np.stack([labels, *(rng.permutation(labels) for _ in range(permutations))])
    energies = -np.einsum("ij,ij->i", orders @ distances, orders)
    return float(np.mean(energies >= energies[0] - 1e-12))


def test_the_test_itself_accepts_equal_laws_and_rejects_others() -> None:
    rng = np.random.default_rng(0)
    one, other, third = (rng.normal(size=(VIEWS, DIM, CLIENTS)) for _ in range(3))
    assert p_value(one, other, 1) > ACCEPT
    assert p_value(one, 1.5 * third, 1) < REJECT
    assert p_value(one, np.sign(third), 1) < REJECT
    many = [p_value(*rng.normal(size=(2, 40, DIM, CLIENTS)), seed, 199) for seed in range(100)]
    assert 0.3 < np.mean(many) < 0.7  # p-values of equal laws are uniform


SGD = {"momentum": 0.9, "batch_size": 3, "lr": 0.02, "grad_clip": 1.0, "proximal": 0.01}


def test_sgd_in_a_gaussian_subspace_shows_a_random_rotation() -> None:
    """Several steps with momentum, clipped gradients and a proximal pull, on a loss that is not linear."""
    one, other = (views(regression(1), seed, **SGD) for seed in (0, 10_000))
    assert p_value(one, rotated(other, 2), 3) > ACCEPT


def test_adam_shows_more_than_that() -> None:
    one, other = (views(regression(1), seed, adam=True, rotation="none") for seed in (0, 10_000))
    assert p_value(one, rotated(other, 2), 3) < REJECT
    assert p_value(one, other, 3) > ACCEPT  # it is the rotation that is noticed


def sparse_and_dense() -> tuple[np.ndarray, np.ndarray]:
    """Two pairs of gradients with one Gram matrix: along single coordinates, and spread over all of them."""
    sparse = np.zeros((CLIENTS, INPUTS))
    sparse[0, 0], sparse[1, :2] = 1.0, (0.96, 0.28)
    turn = special_ortho_group.rvs(INPUTS, random_state=np.random.default_rng(4))
    return sparse, sparse @ turn


def test_two_data_sets_with_one_gram_matrix_look_alike_to_the_server() -> None:
    sparse, dense = sparse_and_dense()
    np.testing.assert_allclose(sparse @ sparse.T, dense @ dense.T, atol=1e-12)
    assert p_value(views(pushed(sparse), 0), views(pushed(dense), 10_000), 5) > ACCEPT


def test_two_data_sets_with_other_gram_matrices_do_not() -> None:
    sparse, dense = sparse_and_dense()
    dense[1] = -dense[1]  # the clients now disagree
    assert p_value(views(pushed(sparse), 0), views(pushed(dense), 10_000), 5) < REJECT


def test_a_sign_matrix_shows_more_than_the_gram_matrix() -> None:
    """Why no such claim is made for it: how many coordinates a gradient has can be seen."""
    sparse, dense = sparse_and_dense()
    changes = {"projection": "sign", "rotation": "none"}
    one, other = (views(pushed(rows), seed, **changes) for rows, seed in ((sparse, 0), (dense, 10_000)))
    assert p_value(one, other, 5) < REJECT
    assert p_value(one, rotated(one, 2), 3) < REJECT


def test_with_a_rotation_it_shows_no_more_whatever_the_optimiser() -> None:
    sparse, dense = sparse_and_dense()
    for adam in (False, True):
        changes = {"projection": "sign", "rotation": "haar", "adam": adam}
        one, other = (views(pushed(rows), seed, **changes) for rows, seed in ((sparse, 0), (dense, 10_000)))
        assert p_value(one, rotated(one, 2), 3) > ACCEPT
        assert adam or p_value(one, other, 5) > ACCEPT  # Adam's steps have other Gram matrices
