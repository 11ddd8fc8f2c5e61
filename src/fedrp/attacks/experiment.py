"""Attacks from start to end: choose images, record a run on them, attack one adversary's view, compare.

Only this file knows both the truth and the attack; it hands the attack a `View` and public data, nothing else.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.attacks.inversion import Effort, invert
from fedrp.attacks.keysearch import (
    ROWS,
    SEED_BITS,
    OnTried,
    keyed_guess,
    search,
    seeded_guess,
    seeded_matrix,
    typical_size,
)
from fedrp.attacks.label_inference import named_classes
from fedrp.attacks.metrics import Area, Images, area, matched, psnr, ssim
from fedrp.attacks.observations import angles, find_observations, opened_keys, uploads
from fedrp.attacks.outcome import Outcome, Scenario, Target, mean
from fedrp.attacks.record import record
from fedrp.attacks.target_models import TargetModel
from fedrp.attacks.verdicts import key_verdict
from fedrp.attacks.view import ADVERSARIES, Recording
from fedrp.config.run import RunConfig
from fedrp.crypto.sizes import KEY_BYTES
from fedrp.errors import ConfigError, DataError
from fedrp.learning.data import Dataset, load_dataset
from fedrp.learning.task import Task
from fedrp.rng import RunSeed

OnStep = Callable[[int, int], None]  # (targets done, targets in all)

_CLIP = 1.0  # where there is noise: longer than any update of one step, so nothing is cut off


def attack_images(
    scenario: Scenario, effort: Effort, data_dir: Path | None = None, on_step: OnStep | None = None
) -> Outcome:
    """Record a run and reconstruct its images from one adversary's view."""
    dataset = load_dataset(scenario.dataset, data_dir)
    chosen = _chosen(scenario, dataset)
    recording = record_run(scenario, dataset, chosen)
    view = recording.view(ADVERSARIES[scenario.adversary], insider=scenario.clients - 1)
    prior = _unit(dataset.test_x).mean(axis=0)
    seed = RunSeed(scenario.seed)
    began = time.monotonic()
    rounds = range(scenario.round - scenario.joined + 1, scenario.round + 1)
    by_round = [find_observations(view, seed, round_)[: scenario.targets] for round_ in rounds]
    observations = list(zip(*by_round, strict=True))  # all clients take part in every round, in the same order
    targets = []
    for number, about in enumerate(observations):
        clients = about[0].clients
        truth = np.concatenate([chosen[client] for client in clients])
        guess = invert(view.public, about, len(truth), effort, prior, seed)
        originals = _unit(dataset.train_x[truth])
        order = matched(originals, guess.images)
        found = guess.images[order]
        pairs = list(zip(originals, found, strict=True))
        target = Target(
            clients=clients,
            originals=originals,
            found=found,
            labels=tuple(dataset.train_y[truth].tolist()),
            labels_found=tuple(guess.labels[index] for index in order),
            psnr=tuple(psnr(*pair) for pair in pairs),
            ssim=tuple(ssim(*pair) for pair in pairs),
            mismatch=guess.mismatch,
        )
        targets.append(target)
        if on_step:
            on_step(number + 1, len(observations))
    attacked = [image for target in targets for image in target.originals]
    rng = seed.generator("other-picture")  # the name stays: it decides what is drawn
    others = _unit(dataset.test_x[rng.integers(len(dataset.test_x), size=len(attacked))])
    return Outcome(
        scenario=scenario,
        effort=effort,
        parameters=observations[0][0].model.size,
        guessed=observations[0][0].guessed,
        targets=tuple(targets),
        mean_image=tuple(psnr(image, prior) for image in attacked),
        other_image=tuple(psnr(*pair) for pair in zip(attacked, others, strict=True)),
        prior=prior,
        seconds=time.monotonic() - began,
    )


class Links(NamedTuple):
    """What the server alone makes of angles between uploads."""

    same_class: Area  # how well it tells pairs of clients of one class from others
    label_rate: float  # share of clients whose class it names; guessing gives one by the number of classes
    psnr: float  # of the mean public image of the class that it names
    psnr_mean_image: float  # of the mean of all public images


def attack_angles(scenario: Scenario, data_dir: Path | None = None) -> Links:
    """The server alone against a secret matrix; `scenario.clients` should be a few dozen, with one image each."""
    dataset = load_dataset(scenario.dataset, data_dir)
    chosen = _chosen(scenario, dataset)
    view = record_run(scenario, dataset, chosen).view(ADVERSARIES["server"])
    cosines = angles(view, scenario.round)
    labels = np.array([dataset.train_y[truth[0]] for truth in chosen])
    same = labels[:, None] == labels
    pairs = np.triu_indices(scenario.clients, 1)
    if same[pairs].all() or not same[pairs].any():
        raise ConfigError(f"clients={scenario.clients} is too few: give enough for pairs of one and of two classes")
    public = _unit(dataset.test_x)
    named = named_classes(view, public, dataset.test_y, RunSeed(scenario.seed), scenario.round)
    originals = _unit(dataset.train_x[[truth[0] for truth in chosen]])
    means = np.stack([public[dataset.test_y == label].mean(axis=0) for label in range(dataset.classes)])
    return Links(
        area(cosines[pairs][same[pairs]], cosines[pairs][~same[pairs]]),
        float(np.mean(named == labels)),
        mean([psnr(*pair) for pair in zip(originals, means[named], strict=True)]),
        mean([psnr(original, public.mean(axis=0)) for original in originals]),
    )


def attack_keys(bits: int, seed: int = 0, on_tried: OnTried | None = None) -> dict[str, Any]:
    """Search for the seed of a matrix that was made as in common practice, then, with as much time, for a real key."""
    if not 1 <= bits <= SEED_BITS:
        raise ConfigError(
            f"bits={bits} is not valid: expected 1 to {SEED_BITS}, the size of a seed of torch's generator"
        )
    dataset = load_dataset("mnist-mini")
    scenario = Scenario(algorithm="fedavg", clients=2, rounds=2, dim=ROWS, seed=seed)
    chosen = _chosen(scenario, dataset)
    view = record_run(scenario, dataset, chosen).view(ADVERSARIES["server"])
    model = find_observations(view, RunSeed(seed))[0].model  # public: it comes from the run's seed
    typical = typical_size(model, ROWS)
    secret = int(RunSeed(seed).generator("secret-seed").integers(2**bits))
    trained = uploads(view, 1)[0]
    seen = seeded_matrix(secret, ROWS, model.size) @ trained
    seeds = search(range(2**bits), seeded_guess(model, ROWS), seen, typical, on_tried=on_tried)

    real = record_run(dataclasses.replace(scenario, algorithm="fedrp", projection="gaussian"), dataset, chosen)
    inside = real.view(ADVERSARIES["server+client"])
    granted = find_observations(inside, RunSeed(seed))[0].model  # more than the server has
    guess = keyed_guess(granted, ROWS, "gaussian")
    upload = uploads(real.view(ADVERSARIES["server"]), 1)[0]
    keys = search(itertools.count(), guess, upload, typical_size(granted, ROWS), budget=seeds.seconds)
    true_key = int.from_bytes(opened_keys(inside)[1].reveal(), "big")
    control = search([true_key], guess, upload, typical_size(granted, ROWS))
    result = {
        "parameters": model.size,
        "seed_bits": bits,
        "seed_found": seeds.found == secret,
        "seeds_tried": seeds.tried,
        "seconds": round(seeds.seconds, 2),
        "seeds_per_second": round(seeds.rate),
        "hours_for_all_32_bit_seeds": round(2**SEED_BITS / seeds.rate / 3600, 1),
        "key_bits": 8 * KEY_BYTES,
        "key_found": keys.found is not None,
        "keys_tried": keys.tried,
        "keys_per_second": round(keys.rate),
        "log2_years_for_all_keys": round(8 * KEY_BYTES - math.log2(keys.rate * 365.25 * 86400), 1),
        "true_key_would_be_recognised": control.found == true_key,
    }
    return {**result, "verdict": key_verdict(result)}


def record_run(scenario: Scenario, dataset: Dataset, chosen: list[npt.NDArray[np.intp]]) -> Recording:
    """Train a real run in which client i holds the training images `chosen[i]`, and keep its packets."""
    data = [(dataset.normalised(dataset.train_x[index]), dataset.train_y[index]) for index in chosen]
    shape = tuple(dataset.train_x.shape[1:])
    unscored = np.zeros((1, *shape), np.float32), np.zeros(1, np.int64)  # nobody asks how good the model is
    task = Task(TargetModel(scenario.model, shape, dataset.classes), data, unscored, model_name=scenario.model)
    noised = scenario.dp_epsilon is not None or scenario.algorithm == "fedavg-dp"
    config = RunConfig(
        algorithm=scenario.algorithm,
        model=scenario.model,
        clients=scenario.clients,
        rounds=max(scenario.rounds, scenario.round + 1),  # an aggregate reaches the clients in the next round
        batch_size=scenario.images,
        dim=scenario.dim,
        projection=scenario.projection,
        dp_epsilon=scenario.dp_epsilon,
        clip=_CLIP if noised else None,
        deliver="client" if scenario.algorithm == "fedrp" else None,  # rounds are attacked, not what comes after them
        seed=scenario.seed,
    )
    (mean,), (deviation,) = dataset.mean, dataset.std
    return record(config, task, shape, dataset.classes, -mean / deviation, (1 - mean) / deviation)


def _chosen(scenario: Scenario, dataset: Dataset) -> list[npt.NDArray[np.intp]]:
    """The training images of each client, drawn by the seed."""
    if dataset.train_x.dtype != np.uint8 or len(dataset.mean) != 1 or dataset.train_x.ndim != 4:
        raise DataError(f"data set '{scenario.dataset}' cannot be attacked: this attack is about grey images of bytes")
    count = scenario.clients * scenario.images
    if count > len(dataset.train_x):
        raise DataError(f"clients={scenario.clients} with images={scenario.images}: there are not so many images")
    # The same first images whatever the number of clients, so that adversaries can be compared on them.
    drawn = RunSeed(scenario.seed).generator("attacked").permutation(len(dataset.train_x))[:count]
    return list(drawn.reshape(scenario.clients, scenario.images))


def _unit(images: npt.NDArray[Any]) -> Images:
    return np.asarray(images / 255.0, np.float64)
