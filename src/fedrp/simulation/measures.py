"""What is measured after a round, and what is made of it: scores, divergence, the best model so far, callbacks."""

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

from torch import nn

from fedrp.algorithms.table import method_of
from fedrp.config.run import Resolved
from fedrp.errors import ConfigError, DivergenceError
from fedrp.learning.evaluate import Evaluation, Headline, Score, Spread
from fedrp.learning.task import Task
from fedrp.means import trimmed_mean
from fedrp.mechanisms.delivery import averages
from fedrp.reporting.records import Delivery, RoundRecord, Traffic, Trained
from fedrp.rng import RunSeed
from fedrp.simulation.population import End, Population, ShardSetup
from fedrp.simulation.runfolder import Files, Progress, RunFolder
from fedrp.storage.codec import Stored, packed, read
from fedrp.types import Vector

_log = logging.getLogger(__name__)

_DIVERGED = 100.0  # times the loss of an untrained model (plus 1)
_BEST_FILE = "best.safetensors"


class Course(Protocol[End]):
    """A run on its way from round to round: `Federated` by the protocol, or every client `Alone`."""

    @property
    def clients(self) -> Population[End]:
        """All of them."""

    @property
    def secret(self) -> bool:
        """Whether clients share secret matrices."""

    def rounds(self) -> Iterator[Trained]:
        """The rounds that are left."""

    def deliver(self) -> Delivery | None:
        """Have all clients' models averaged after the last round, if they are to be."""

    def ends(self, clients: Sequence[int]) -> Mapping[int, End]:
        """What clients would be told if the run ended now."""

    def last_traffic(self) -> Traffic:
        """Of what all clients are told at the end."""

    def take_up(self, folder: RunFolder) -> Progress:
        """Go on after the last round that is in a folder."""

    def keep(self, folder: RunFolder, record: RoundRecord, seconds: float, files: Files) -> None:
        """Write a round into a folder, with files of the caller's."""


# --- scores ----------------------------------------------------------------------------------------------------------


def measured(setup: ShardSetup, trained: Trained, course: Course[End]) -> RoundRecord:
    """What is recorded of a round, with the scores of its models if it is the turn of this round, or the last."""
    began, last = time.monotonic(), trained.round == setup.config.rounds
    due = last or trained.round % setup.speed.eval_every == 0
    evaluation = evaluate(setup.config, course, all_clients=last) if due else None
    return RoundRecord(**trained._asdict(), evaluation=evaluation, evaluation_seconds=time.monotonic() - began)


def evaluate(config: Resolved, course: Course[End], all_clients: bool) -> Evaluation:
    """Score the models of the last completed round: what would be delivered if the run ended now."""
    clients, chosen = course.clients, delivering_client(config)
    if method_of(config).delivers == "consensus":
        delivered = clients.score(course.ends([chosen]))[chosen]
        return Evaluation(delivered, delivered, Spread(delivered, delivered, delivered))
    ends = course.ends(range(config.clients))
    asked = ends if all_clients else {} if averages(config) else {chosen: ends[chosen]}
    scores = clients.score(asked)
    average = clients.score_model(clients.average(ends))
    delivered = average if averages(config) else scores[chosen]
    if averages(config) and config.trimmed_share:
        delivered = clients.score_model(delivered_model(config, course))
    return Evaluation(delivered, average, Spread.of(list(scores.values())) if all_clients else None)


def delivering_client(config: Resolved) -> int:
    """The client whose model is delivered where every client keeps its own: drawn at random, once per run."""
    return int(RunSeed(config.seed).generator("delivered").integers(config.clients))


def delivered_model(config: Resolved, course: Course[End]) -> Vector:
    """The model that would be delivered if the run ended now; a mean of models but for the rounding under masks."""
    clients = course.clients
    if not averages(config):
        return model_of(course, delivering_client(config))
    ends = course.ends(range(config.clients))
    if config.trimmed_share:
        return trimmed_mean([model for _, model in sorted(clients.final_models(ends).items())], config.trimmed_share)
    return clients.average(ends)


def model_of(course: Course[End], client: int) -> Vector:
    """The model that a client would end with if the run ended now."""
    return course.clients.final_models(course.ends([client]))[client]


def headline_of(task: Task, scored: Score) -> Headline:
    """What a run of a task is judged by."""
    return Headline.of(task.metrics, task.goal, scored)


def look_for_divergence(config: Resolved, record: RoundRecord, untrained: float) -> None:
    """Compare the loss after a round with that of an untrained model: within a round each client looks for itself.

    With noise a bad model may be all that can be had, so only one that is none is refused (it is made of noised sums,
    so this tells nothing more). With a ball a stop would tell of a client's data: it is only logged.
    """
    if record.evaluation is None:
        return
    loss = record.evaluation.delivered.loss
    if math.isfinite(loss) and loss <= _DIVERGED * (1 + abs(untrained)):
        return
    text = (
        f"training diverged: the test loss after round {record.round} is {loss:.3g}, "
        f"of an untrained model about {untrained:.3g} (lr={config.lr}): lower lr"
    )
    noisy = config.private or config.record_private
    if noisy:
        text += ", clip or the noise"
    if not config.ball and not (noisy and math.isfinite(loss)):
        raise DivergenceError(text)
    _log.warning("%s (the run goes on)", text)


# --- the best model --------------------------------------------------------------------------------------------------

KEEPS = ("last", "best")  # which model a run delivers


@dataclass(frozen=True)
class Best:
    """The best model so far, by the headline. It is kept with every checkpoint, so that no crash parts the two."""

    round: int
    value: float
    model: Vector

    def files(self, run: bytes) -> Files:
        """What a checkpoint keeps of it."""
        return {_BEST_FILE: packed(run, Stored({"round": self.round, "value": self.value}, {"model": self.model}))}

    @classmethod
    def read(cls, checkpoint: Path, run: bytes) -> "Best | None":
        """The one of a checkpoint; None if it keeps none."""
        if not (checkpoint / _BEST_FILE).exists():
            return None
        about, arrays = read(checkpoint / _BEST_FILE, run)
        return cls(about["round"], about["value"], arrays["model"])


def better_of(best: Best | None, record: RoundRecord, task: Task, model: Callable[[], Vector]) -> Best | None:
    """The best model after one more round; the first of several that are equally good."""
    if record.evaluation is None:
        return best
    scored = record.evaluation.delivered
    headline = headline_of(task, scored)
    value = headline.value(scored)
    if math.isnan(value) or (best and not headline.better(value, best.value)):
        return best
    return Best(record.round, value, model())


# --- callbacks -------------------------------------------------------------------------------------------------------


class Signal(Enum):
    """What a callback can ask for."""

    STOP = "stop"


Stop: Final = Signal.STOP  # returned by `on_round`: the run ends with this round


class RoundModel:
    """The model that a round would deliver: `model()` builds the module, once, and only if it is asked for."""

    def __init__(self, round_: int, config: Resolved, build: Callable[[], nn.Module]) -> None:
        self.config = config  # of the run
        self._round, self._build = round_, build
        self._module: nn.Module | None = None
        self._over = False

    def __call__(self) -> nn.Module:
        """A module of its own, to be changed at will."""
        if self._module is None:
            if self._over:
                raise ConfigError(f"the model of round {self._round} was asked for too late: call model() in on_round")
            self._module = self._build()
        return self._module

    def close(self) -> None:
        """The round is over: what is built from now on would be another model."""
        self._over = True


OnRound = Callable[[RoundRecord, RoundModel], Signal | None]


def require_callback(on_round: object) -> None:
    """Refuse, before anything is trained, what cannot be called with (record, model)."""
    if on_round is None:
        return
    if not callable(on_round):
        raise ConfigError(f"on_round is a {type(on_round).__name__}: give a function of (record, model)")
    try:
        inspect.signature(on_round).bind(None, None)
    except TypeError:
        raise ConfigError("on_round does not take (record, model): give a function of these two") from None
    except ValueError:  # some built-in functions have no signature
        pass
