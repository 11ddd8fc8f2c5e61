"""Membership inference: was this example in the training set? The adversary holds the final model of a run.

Three attacks: the loss itself (Yeom et al. 2018); the loss less that of reference models which the adversary trains on
data of its own, half of the test set (difficulty calibration, Watson et al. 2022); and, if asked for, the likelihood
ratio with shadow models (`fedrp.attacks.shadow_models`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedrp.algorithms.table import method_of
from fedrp.attacks.outcome import Attack, Losses, Membership
from fedrp.attacks.shadow_models import OnShadow, likelihood_ratios, paired, require_shadows
from fedrp.config.checks import require
from fedrp.config.run import Resolved
from fedrp.engines.choice import make_trainer
from fedrp.errors import ConfigError
from fedrp.learning.initial import public_initial
from fedrp.learning.layout import ModelFactory, built, layout_of, load_vector
from fedrp.learning.objective import Examples, LocalSGD
from fedrp.learning.pixels import floats
from fedrp.learning.task import Task, examples, named_task, split_among_clients
from fedrp.mechanisms.delivery import averages
from fedrp.rng import RunSeed
from fedrp.simulation.measures import delivering_client
from fedrp.storage.begun import begun_config
from fedrp.types import Vector

_REFERENCE_EPOCHS = 10
_BATCH = 500


def attack_membership(
    folder: Path,
    references: int = 2,
    data_dir: Path | None = None,
    shadows: int = 0,
    on_shadow: OnShadow | None = None,
) -> Membership:
    """Attack the model in a run folder; members are the training examples that the model was trained on.

    Args:
        folder: of a finished run.
        references: models to train on other data than the run's, for the calibrated attack; 0 leaves it out.
        data_dir: where data sets are.
        shadows: runs to train for the likelihood ratio, with the settings of this one; 0 leaves it out.
        on_shadow: called after each of them.
    """
    require(references >= 0, "references", references, "a whole number of at least 0")
    require_shadows(shadows)
    config = Resolved.of(begun_config(folder))
    task = named_task(config, data_dir)
    shares = split_among_clients(task, config)
    own = method_of(config).delivers == "client" and not averages(config)
    holders = [delivering_client(config)] if own else range(len(shares))
    members = _joined([shares[client] for client in holders])
    rng = RunSeed(config.seed).generator("membership")
    outside = examples(task.test, "the test set")
    order = rng.permutation(len(outside.y))
    half = len(order) // 2
    known, strangers = _taken(outside, order[:half]), _taken(outside, order[half:])
    chosen = rng.permutation(len(members.y))[: len(strangers.y)]
    members = _taken(members, chosen)
    model = _model(folder, task.model)
    inside, beyond = (losses(task.model, model, part) for part in (members, strangers))
    about: dict[str, Any] = {
        "algorithm": config.algorithm,
        "clients": config.clients,
        "rounds": config.rounds,
        "members": len(members.y),
        "members_of": "the client whose model is delivered" if own else "all clients",
        "non_members": len(strangers.y),
        "mean_loss_members": float(inside.mean()),
        "mean_loss_non_members": float(beyond.mean()),
        "references": references,
    }
    attacks = {"loss": Attack(-inside, -beyond)}
    if references:
        models = [_reference(task, config, known, number) for number in range(references)]
        calm_in, calm_out = (
            np.mean([losses(task.model, reference, part) for reference in models], axis=0)
            for part in (members, strangers)
        )
        attacks["calibrated"] = Attack(calm_in - inside, calm_out - beyond)
    if shadows:
        where = np.array([(client, place) for client in holders for place in range(len(shares[client].y))])[chosen]
        candidates = paired(shares, where[:, 0], where[:, 1], strangers)
        ratios = likelihood_ratios(model, task, config, candidates, shadows, on_shadow)
        attacks["likelihood_ratio"] = Attack(ratios.members, ratios.strangers)
        about |= {"shadows": shadows, "seconds_per_shadow": round(ratios.seconds, 1), "pairs": len(ratios.members)}
    return Membership(about, attacks)


def losses(factory: ModelFactory, model: Vector, data: Examples) -> Losses:
    """The loss of a model on each example."""
    module = load_vector(built(factory), model).eval()
    with torch.inference_mode():
        parts = [
            torch.nn.functional.cross_entropy(module(floats(data.x[batch])), data.y[batch], reduction="none")
            for batch in (slice(start, start + _BATCH) for start in range(0, len(data.y), _BATCH))
        ]
    return np.asarray(torch.cat(parts).double().numpy())


def _reference(task: Task, config: Resolved, data: Examples, number: int) -> Vector:
    """A model of the adversary's own, trained on a random three quarters of its data."""
    seed = RunSeed(RunSeed(config.seed).integer("reference", number))
    trainer = make_trainer(task.model, task.loss, torch.device("cpu"), seed)
    start = public_initial(task.model, seed)[None]
    part = _taken(data, seed.generator("half").permutation(len(data.y))[: 3 * len(data.y) // 4])
    sgd = LocalSGD(config.lr, config.momentum, config.batch_size, _REFERENCE_EPOCHS, config.grad_clip)
    return np.asarray(trainer.train(start, [part], [0], 1, sgd)[0])


def _model(folder: Path, factory: ModelFactory) -> Vector:
    layout = layout_of(built(factory))
    try:
        tensors = load_file(folder / "model.safetensors")
        return np.concatenate([tensors[name].reshape(-1) for name in layout.names])
    except (OSError, KeyError, SafetensorError):
        raise ConfigError(f"{folder} is not the folder of a finished run: it has no readable model") from None


def _joined(parts: list[Examples]) -> Examples:
    return Examples(torch.cat([floats(part.x) for part in parts]), torch.cat([part.y for part in parts]))


def _taken(data: Examples, index: npt.NDArray[np.intp]) -> Examples:
    chosen = torch.from_numpy(index)
    return Examples(data.x[chosen], data.y[chosen])
