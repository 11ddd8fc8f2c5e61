"""The server alone against a secret matrix: all that a `gaussian` matrix leaves of the uploads is lengths and angles.

Angles tell which clients hold the same class. To tell *which* class a group holds, the adversary compares the observed
angles with those between gradients of public images, at models that it draws itself as it does not know the real one,
and names the clients such that the two fit best. Its reconstruction is the mean public image of the class.
"""

import numpy as np
import numpy.typing as npt
import torch

from fedrp.attacks.inversion import gradient_at, scaled
from fedrp.attacks.metrics import Images
from fedrp.attacks.observations import angles
from fedrp.attacks.view import View
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.sizes import KEY_BYTES
from fedrp.learning.initial import secret_initial
from fedrp.rng import RunSeed

Labels = npt.NDArray[np.intp]
Cosines = npt.NDArray[np.float64]

_MODELS = 8  # drawn by the adversary
_PER_CLASS = 6  # public images of each class
_RESTARTS = 20


def named_classes(view: View, images: Images, labels: Labels, seed: RunSeed, round_: int = 1) -> Labels:
    """A class for each client of a round, from the angles between uploads and public images with labels."""
    rng = seed.generator("public-pictures")  # the name stays: it decides what is drawn
    classes = range(view.public.classes)
    chosen = np.stack([rng.choice(np.flatnonzero(labels == label), _PER_CLASS, replace=False) for label in classes])
    typical = np.mean([_typical(view, images[chosen], seed, number) for number in range(_MODELS)], axis=0)
    observed = angles(view, round_)
    found = [_fitted(observed, typical, rng) for _ in range(_RESTARTS)]
    return min(found, key=lambda names: _misfit(observed, typical, names))


def _typical(view: View, images: Images, seed: RunSeed, number: int) -> Cosines:
    """Mean cosine between gradients of two classes (classes x classes), at a model of the adversary's own."""
    key = SecretKey(seed.generator("own-model", number).bytes(KEY_BYTES))
    gradient = gradient_at(view.public, secret_initial(view.public.model, key))
    classes, count = images.shape[:2]
    rows = []
    for label in range(classes):
        for image in torch.from_numpy(images[label]):
            row = gradient(scaled(view.public, image[None]), torch.tensor([label])).detach()
            rows.append(row / row.norm())
    stack = torch.stack(rows)
    cosines = (stack @ stack.T).numpy().reshape(classes, count, classes, count)
    sums = cosines.sum(axis=(1, 3)) - np.eye(classes) * count  # an image is not compared with itself
    return np.asarray(sums / (count**2 - np.eye(classes) * count))


def _fitted(observed: Cosines, typical: Cosines, rng: np.random.Generator) -> Labels:
    """Names from a random start, improved by renaming single clients and by exchanging two classes until none helps."""
    labels = rng.integers(len(typical), size=len(observed))
    best = np.inf
    while (misfit := _misfit(observed, typical, labels)) < best:
        best = misfit
        for client in rng.permutation(len(labels)):
            others = np.arange(len(labels)) != client
            errors = np.square(observed[client, others] - typical[:, labels[others]]).sum(axis=1)
            labels[client] = errors.argmin()
        for first, second in zip(*np.triu_indices(len(typical), 1), strict=True):
            exchange = np.arange(len(typical))
            exchange[[first, second]] = second, first
            labels = min(labels, exchange[labels], key=lambda names: _misfit(observed, typical, names))
    return labels


def _misfit(observed: Cosines, typical: Cosines, labels: Labels) -> float:
    off = ~np.eye(len(labels), dtype=bool)
    return float(np.square(observed - typical[np.ix_(labels, labels)])[off].sum())
