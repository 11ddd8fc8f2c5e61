"""FedRP as printed in the paper (Algorithm 1), in plain loops: the readable twin of `fedrp.algorithms.fedrp`.

Nothing is encoded, sealed or fast here, and the matrices are dense arrays. A test feeds `fedrp` below the matrices, the
batches and the initial vector of a library run, and gets the library's models.

    python examples/fedrp_in_100_lines.py
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.learning.data import load_dataset

Array = npt.NDArray[np.float64]
Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]  # inputs and labels
Gradient = Callable[[Array, Batch], Array]  # of the mean loss of a batch, with respect to w


class Settings(NamedTuple):
    """Learning rate and momentum of local SGD, and the penalty rho."""

    lr: float
    momentum: float
    rho: float


def client_round(
    w: Array, y: Array, A: Array, zbar: Array, batches: Sequence[Batch], gradient: Gradient, settings: Settings
) -> tuple[Array, Array]:
    """Steps 1 and 2 of a round: the client's new model w_i and dual variable y_i.

    w_i <- argmin_w f_i(w) + y_i'(A w - zbar) + rho/2 ||A w - zbar||^2, by SGD with momentum;
    y_i <- y_i + rho (A w_i - zbar).
    """
    lr, momentum, rho = settings
    velocity = np.zeros_like(w)
    for batch in batches:
        penalty = A.T @ (y + rho * (A @ w - zbar))
        velocity = momentum * velocity + gradient(w, batch) + penalty
        w = w - lr * velocity
    return w, y + rho * (A @ w - zbar)


def fedrp(
    w0: Array,
    matrices: Sequence[Array],  # A^0, A^1, ... (m x n): secret, all clients know them and the server does not
    batches: Sequence[Sequence[Sequence[Batch]]],  # batches[round][client] is a list of batches
    gradient: Gradient,
    settings: Settings,
) -> Iterator[list[Array]]:
    """The models of all clients after each round."""
    clients = range(len(batches[0]))
    models = [w0 for _ in clients]
    duals = [np.zeros(len(matrices[0])) for _ in clients]
    zbar = matrices[0] @ w0  # all start from the same secret w0: no exchange is needed
    for t, round_batches in enumerate(batches):
        A, A_next = matrices[t], matrices[t + 1]
        for i in clients:
            models[i], duals[i] = client_round(models[i], duals[i], A, zbar, round_batches[i], gradient, settings)
        sent = [A_next @ w for w in models]  # step 4: m numbers per client, under a matrix drawn after training
        zbar = np.mean(sent, axis=0)  # the server's whole work
        yield list(models)


def softmax_gradient(w: Array, batch: Batch) -> Array:
    """Gradient of the cross-entropy of a linear classifier; w holds its (classes x features) matrix."""
    x, labels = batch
    scores = x @ w.reshape(-1, x.shape[1]).T
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(x)), labels] -= 1
    return np.asarray(p.T @ x / len(x)).ravel()


def main(clients: int = 5, rounds: int = 5, m: int = 200, lr: float = 0.02) -> None:
    """Train a linear classifier, 784 x 10 parameters, of the bundled MNIST images."""
    rng = np.random.default_rng(0)  # a demonstration only: in earnest, A and w0 come from a secret key
    data = load_dataset("mnist-mini")
    x, test_x = (data.normalised(part).reshape(len(part), -1) for part in (data.train_x, data.test_x))
    n = x.shape[1] * data.classes
    matrices = [rng.normal(0, m**-0.5, (m, n)) for _ in range(rounds + 1)]
    parts = np.array_split(rng.permutation(len(x)), clients)
    orders = [[np.array_split(rng.permutation(part), len(part) // 64) for part in parts] for _ in range(rounds)]
    batches = [[[(x[b], data.train_y[b]) for b in client] for client in order] for order in orders]
    settings = Settings(lr, 0.9, rho=0.5 / (lr * (1 + (n / m) ** 0.5) ** 2))  # SGD is stable below four times this rho

    def accuracy(w: Array) -> str:
        return f"{100 * np.mean((test_x @ w.reshape(data.classes, -1).T).argmax(axis=1) == data.test_y):.2f} %"

    print(f"a client sends {m} numbers a round instead of {n}")
    for t, models in enumerate(fedrp(rng.normal(0, 0.01, n), matrices, batches, softmax_gradient, settings), start=1):
        print(f"round {t}: {accuracy(models[0])} one client, {accuracy(np.mean(models, axis=0))} the average model")


if __name__ == "__main__":
    main()
