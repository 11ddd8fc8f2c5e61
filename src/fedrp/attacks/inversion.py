"""Gradient inversion: images whose gradient explains what was seen.

- `lbfgs`: deep leakage from gradients (Zhu et al. 2019), second order, in double precision.
- `adam`: signed Adam on the angle between gradients, with total variation (Geiping et al. 2020).

Both match angles, not lengths: the learning rate and the clipping of gradients only scale an update, so neither has to
be known. With `known_step` lengths count as well: "deep leakage from model" (Zhao et al. 2022) with the learning
rate that the settings state; without it, its variant for unknown learning rates. Labels come from the last layer's
bias (iDLG, Zhao et al. 2020) where it is seen, otherwise from the class whose typical gradient lies closest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.functional import cosine_similarity

from fedrp.algorithms.subspace import step_size
from fedrp.attacks.metrics import Images
from fedrp.attacks.observations import Observation
from fedrp.attacks.view import Public
from fedrp.config.checks import require, require_choice
from fedrp.learning.layout import built, layout_of
from fedrp.projection.families import Projection
from fedrp.rng import RunSeed
from fedrp.types import Vector


@dataclass(frozen=True)
class Effort:
    """How hard an attack tries."""

    method: str = "lbfgs"
    iterations: int = 200
    restarts: int = 1  # from different starting images; the one that explains the observation best is kept
    smoothness: float = 1e-3  # weight of total variation
    known_step: bool = False  # match lengths too, trusting the stated learning rate

    def __post_init__(self) -> None:
        require_choice("method", self.method, METHODS)
        for name in ("iterations", "restarts"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "a whole number of at least 1")
        require(0 <= self.smoothness < float("inf"), "smoothness", self.smoothness, "a number of at least 0")


class Reconstruction(NamedTuple):
    """What an attack believes."""

    images: Images  # (N, C, H, W) from 0 to 1
    labels: tuple[int, ...]
    mismatch: float  # what is left of the objective


Objective = Callable[[torch.Tensor], torch.Tensor]


def invert(
    public: Public, observations: Sequence[Observation], count: int, effort: Effort, prior: Images, seed: RunSeed
) -> Reconstruction:
    """`count` images that explain observations about them, one per round; the first of them names the labels.

    `prior` is where the search starts: a typical image (C, H, W).
    """
    labels = recovered_labels(public, observations[0], count, prior)
    y = torch.tensor(labels)
    misses = [_miss(public, observation, y, effort.known_step) for observation in observations]

    def objective(images: torch.Tensor) -> torch.Tensor:
        each = torch.stack([miss(images) for miss in misses])
        return each.mean() + effort.smoothness * _variation(images)

    found = []
    for restart in range(effort.restarts):
        noise = seed.generator("start", restart).normal(0, _START_NOISE, (count, *public.shape))
        start = torch.from_numpy(np.clip(prior + noise, 0, 1))
        found.append(METHODS[effort.method](objective, start, effort.iterations))
    best, mismatch = min(found, key=lambda item: item[1])
    return Reconstruction(best.clamp(0, 1).numpy(), labels, mismatch)


def _miss(public: Public, observation: Observation, labels: torch.Tensor, known_step: bool) -> Objective:
    """How badly images explain one observation."""
    gradient = gradient_at(public, observation.model)
    target = torch.from_numpy(-observation.update)
    if known_step:
        target = target / _stated_step(public, observation)

    def miss(images: torch.Tensor) -> torch.Tensor:
        seen = _seen(gradient(scaled(public, images), labels), observation.projection)
        if known_step:
            return (seen - target).square().sum() / target.square().sum()
        return 1 - cosine_similarity(seen, target, dim=0)

    return miss


def recovered_labels(public: Public, observation: Observation, count: int, prior: Images) -> tuple[int, ...]:
    """The labels that explain an observation best, found one after the other."""
    gradient = gradient_at(public, observation.model)
    target = torch.from_numpy(-observation.update)
    typical = scaled(public, torch.from_numpy(prior)[None])
    prototypes = torch.stack(
        [
            _seen(gradient(typical, torch.tensor([label])), observation.projection).detach()
            for label in range(public.classes)
        ]
    )
    if observation.projection is None:  # the last layer's bias lies at the end of the vector and says it most plainly
        target, prototypes = target[-public.classes :], prototypes[:, -public.classes :]
        if count == 1:
            return (int(target.argmin()),)
    labels: list[int] = []
    whole = torch.zeros_like(target)
    for _ in range(count):
        fits = cosine_similarity(whole + prototypes, target[None], dim=1)
        labels.append(int(fits.argmax()))
        whole = whole + prototypes[labels[-1]]
    return tuple(sorted(labels))


_START_NOISE = 0.02


def gradient_at(public: Public, model: Vector) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(images, labels) -> the gradient of the mean loss at a model, differentiable by the images."""
    module = built(public.model).double().eval()
    layout = layout_of(built(public.model))
    views = layout.views(torch.from_numpy(model.astype(np.float64)))
    weights = [view.clone().requires_grad_() for view in views]

    def gradient(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs = functional_call(module, dict(zip(layout.names, weights, strict=True)), (images,))
        parts = torch.autograd.grad(public.loss(outputs, labels), weights, create_graph=True)
        return torch.cat([part.reshape(-1) for part in parts])

    return gradient


def _stated_step(public: Public, observation: Observation) -> float:
    lr = public.config.lr
    if public.config.algorithm != "fedrp-subspace" or observation.projection is None:
        return lr
    return step_size(lr, public.config.momentum, observation.projection.norm_bound, steps=1)


class _Project(torch.autograd.Function):
    """A w as a step of automatic differentiation."""

    @staticmethod
    def forward(ctx: Any, vector: torch.Tensor, projection: Projection) -> torch.Tensor:
        ctx.projection = projection
        return torch.from_numpy(projection.forward(vector.detach().float().numpy())).double()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(ctx.projection.adjoint(gradients[0].float().numpy())).double(), None


def _seen(gradient: torch.Tensor, projection: Projection | None) -> torch.Tensor:
    return gradient if projection is None else _Project.apply(gradient, projection)  # type: ignore[no-untyped-call]


def scaled(public: Public, images: torch.Tensor) -> torch.Tensor:
    """Images from [0, 1] to what the model is trained on."""
    return public.low + (public.high - public.low) * images


def _variation(images: torch.Tensor) -> torch.Tensor:
    """Total variation; not quite absolute values, so that it is smooth."""
    down, across = images.diff(dim=-2), images.diff(dim=-1)
    return torch.sqrt(down.square() + _SMOOTH).mean() + torch.sqrt(across.square() + _SMOOTH).mean()


_SMOOTH = 1e-6


def _lbfgs(objective: Objective, start: torch.Tensor, iterations: int) -> tuple[torch.Tensor, float]:
    images = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [images],
        1,
        iterations,
        tolerance_grad=1e-9,
        tolerance_change=1e-11,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimiser.zero_grad()
        miss = objective(images)
        miss.backward()  # type: ignore[no-untyped-call]
        return float(miss.detach())

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return images.detach(), float(objective(images).detach())


def _adam(objective: Objective, start: torch.Tensor, iterations: int) -> tuple[torch.Tensor, float]:
    images = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([images], lr=_ADAM_STEP)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, iterations)
    for _ in range(iterations):
        optimiser.zero_grad()
        objective(images).backward()  # type: ignore[no-untyped-call]
        if images.grad is not None:
            images.grad.sign_()
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return images.detach(), float(objective(images).detach())


_ADAM_STEP = 0.03

METHODS: dict[str, Callable[[Objective, torch.Tensor, int], tuple[torch.Tensor, float]]] = {
    "lbfgs": _lbfgs,
    "adam": _adam,
}
