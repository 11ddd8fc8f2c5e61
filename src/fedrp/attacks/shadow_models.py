"""Likelihood-ratio attack (LiRA, Carlini et al. 2022): is the model like those trained with an example, or without it?

The adversary trains shadow models by the run's own settings, each on the run's data with every candidate in or out by a
coin. It knows all of the training data but that: whom differential privacy holds against. A shadow run has a seed of
its own; with that of the run, which the simulator derives keys and noise from, it would know those as well.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import norm

from fedrp.algorithms.table import method_of
from fedrp.config.checks import require
from fedrp.config.run import Resolved, RunConfig
from fedrp.config.speed import Speed
from fedrp.errors import DataError
from fedrp.learning.layout import ModelFactory, built, load_vector
from fedrp.learning.objective import Examples
from fedrp.learning.pixels import floats
from fedrp.learning.task import Task
from fedrp.mechanisms.delivery import averages
from fedrp.rng import RunSeed
from fedrp.simulation.measures import delivering_client
from fedrp.simulation.simulate import simulate
from fedrp.types import Vector

Scores = npt.NDArray[np.float64]
Coins = npt.NDArray[np.bool_]  # (shadow models, pairs): whether the member is in, or else the stranger
OnShadow = Callable[[int, int], None]  # (shadow models trained, in all)

FEWEST = 4  # shadow models: two with each candidate and two without, for a mean and a variance
_OWN_VARIANCE = 64  # shadow models from which on each example's variance is its own; with fewer, all share one
_BATCH = 500
_SCORED = 100  # examples that shadow runs are scored on, which nobody asks for


class Candidates(NamedTuple):
    """Pairs of a member and a stranger of the same class, who could take its place."""

    shares: Sequence[Examples]  # of the clients of the run
    clients: npt.NDArray[np.intp]  # whose each member is
    places: npt.NDArray[np.intp]  # where in its client's share
    strangers: Examples


class Ratios(NamedTuple):
    """Log likelihood ratios, high for members, and what they cost."""

    members: Scores
    strangers: Scores
    seconds: float  # of one shadow model


def require_shadows(count: int) -> None:
    """Refuse a number of shadow models that the attack cannot be made with; 0 asks for no attack."""
    holds = count == 0 or (count >= FEWEST and count % 2 == 0)
    require(holds, "shadows", count, f"0, or an even number of at least {FEWEST}")


def paired(
    shares: Sequence[Examples], clients: npt.NDArray[np.intp], places: npt.NDArray[np.intp], strangers: Examples
) -> Candidates:
    """Candidates of members, given by client and place, and strangers: as many pairs of one class as there are."""
    labels = np.array([int(shares[client].y[place]) for client, place in zip(clients, places, strict=True)])
    others = strangers.y.numpy()
    members, beside = [], []
    for label in np.unique(labels):
        own, other = np.flatnonzero(labels == label), np.flatnonzero(others == label)
        count = min(len(own), len(other))
        members.append(own[:count])
        beside.append(other[:count])
    if not sum(map(len, members)):
        raise DataError("no test example is of the class of a training example: no pairs for the likelihood ratio")
    chosen, index = np.concatenate(members), torch.from_numpy(np.concatenate(beside))
    return Candidates(shares, clients[chosen], places[chosen], Examples(floats(strangers.x[index]), strangers.y[index]))


def likelihood_ratios(
    model: Vector, task: Task, config: Resolved, candidates: Candidates, count: int, on_shadow: OnShadow | None = None
) -> Ratios:
    """Attack a model of these settings with `count` shadow models."""
    began = time.process_time()
    coins = _coins(count, len(candidates.clients), RunSeed(config.seed).generator("shadow-coins"))
    both = _both(candidates)
    seen = []
    for number, coin in enumerate(coins):
        seen.append(confidences(task.model, _shadow(task, config, candidates, coin, number), both))
        if on_shadow:
            on_shadow(number + 1, count)
    seconds = (time.process_time() - began) / count
    ratios = log_ratios(confidences(task.model, model, both), np.stack(seen), np.hstack([coins, ~coins]))
    pairs = len(candidates.clients)
    return Ratios(ratios[:pairs], ratios[pairs:], seconds)


def confidences(factory: ModelFactory, model: Vector, data: Examples) -> Scores:
    """How sure a model is of each example's class: log of p / (1 - p), which is nearly normal over shadow models."""
    module = load_vector(built(factory), model).eval()
    found = []
    with torch.inference_mode():
        for start in range(0, len(data.y), _BATCH):
            part = slice(start, start + _BATCH)
            outputs, labels = module(floats(data.x[part])).double(), data.y[part][:, None]
            own = outputs.gather(1, labels)[:, 0]
            found.append(own - outputs.scatter(1, labels, -math.inf).logsumexp(dim=1))
    return np.asarray(torch.cat(found).numpy())


def log_ratios(seen: Scores, shadows: Scores, inside: Coins) -> Scores:
    """The log likelihood ratio of each example: of normal distributions fitted to shadow models with and without it.

    Args:
        seen: the attacked model's confidence in each example.
        shadows: that of each shadow model (shadow models, examples).
        inside: which of them were trained with the example.
    """
    return _log_density(seen, shadows, inside) - _log_density(seen, shadows, ~inside)


def _log_density(seen: Scores, shadows: Scores, counted: Coins) -> Scores:
    """That of normal distributions fitted to the shadow models that count."""
    count = counted.sum(axis=0)
    mean = np.where(counted, shadows, 0.0).sum(axis=0) / count
    variance = np.where(counted, np.square(shadows - mean), 0.0).sum(axis=0) / (count - 1)
    if len(shadows) < _OWN_VARIANCE:
        variance = variance.mean()
    return np.asarray(norm.logpdf(seen, mean, np.sqrt(variance) + np.finfo(np.float64).tiny))


def _coins(count: int, pairs: int, rng: np.random.Generator) -> Coins:
    """Each member is in just half of the shadow models, each time instead of its stranger."""
    even = np.arange(count)[:, None] % 2 == np.zeros(pairs, int)
    return rng.permuted(even, axis=0)


def _both(candidates: Candidates) -> Examples:
    where = zip(candidates.clients, candidates.places, strict=True)
    members = [floats(candidates.shares[client].x[place : place + 1]) for client, place in where]
    return Examples(torch.cat([*members, floats(candidates.strangers.x)]), candidates.strangers.y.repeat(2))


def _shadow(task: Task, config: Resolved, candidates: Candidates, coin: Coins, number: int) -> Vector:
    """The model that the run would deliver, had it been trained on other examples where the coin says so."""
    own = shadow_settings(config, number)
    parts = list(_swapped(candidates, ~coin))
    if method_of(config).delivers == "client" and not averages(config):  # the delivered one is to hold the candidates
        first, second = delivering_client(config), delivering_client(Resolved.of(own))
        parts[first], parts[second] = parts[second], parts[first]
    strangers = candidates.strangers
    scored = Examples(strangers.x[:_SCORED], strangers.y[:_SCORED])
    run = dataclasses.replace(task, train=parts, test=scored)
    return simulate(own, run, Speed(workers=1, eval_every=config.rounds)).model


def shadow_settings(config: Resolved, number: int) -> RunConfig:
    """The settings of a run, with a seed of a shadow run's own; the data come split already."""
    seed = RunSeed(config.seed).integer("shadow", number)
    return dataclasses.replace(config.stored, seed=seed, partition="iid", train_examples=None)


def _swapped(candidates: Candidates, swap: Coins) -> Sequence[Examples]:
    """The shares, with strangers in the places of some members."""
    parts = []
    for client, share in enumerate(candidates.shares):
        mine = np.flatnonzero((candidates.clients == client) & swap)
        x, places = floats(share.x).clone(), torch.from_numpy(candidates.places[mine])
        x[places] = floats(candidates.strangers.x[torch.from_numpy(mine)])
        parts.append(Examples(x, share.y))  # of the same class
    return parts
