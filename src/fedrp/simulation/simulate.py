"""The simulator: real rounds on one machine. It carries bytes between the two halves, measures, and keeps a run folder.

A run folder holds `config.json`, `metrics.jsonl` (a line per round), `checkpoint/` (the last complete round),
`result.json` and `model.safetensors` (the delivered model); and `lock`, held while a run goes on.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fedrp.algorithms.given_start import require_hidden_start
from fedrp.algorithms.outlook import Outlook, announced_outlook
from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS, BASELINES, method_of
from fedrp.backends.choice import open_backend
from fedrp.backends.workers import Backend
from fedrp.config.run import Resolved, RunConfig
from fedrp.config.speed import Speed
from fedrp.engines.calibration import Workload, choose_engine
from fedrp.errors import ConfigError, DivergenceError
from fedrp.learning.evaluate import Evaluation
from fedrp.learning.layout import Layout, built, layout_of
from fedrp.learning.norm_floor import with_norm_floor
from fedrp.learning.preflight import preflight, require_device
from fedrp.learning.task import Task, examples, split_among_clients
from fedrp.mechanisms.cohort import Coins
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.ledger import delta_warnings, statements
from fedrp.projection import kernels
from fedrp.protocol import server as server_side
from fedrp.protocol.rounds import begin, rounds
from fedrp.protocol.server_state import Server, new_server
from fedrp.rng import RunSeed
from fedrp.simulation.alone import Alone, LoneClients
from fedrp.simulation.carrier import NoStore, SimulatedCarrier
from fedrp.simulation.clients import Clients, Tap
from fedrp.simulation.identities import simulated_coins, simulated_roster, simulated_run_id
from fedrp.simulation.kept_engine import keep_engine, kept_engine
from fedrp.simulation.population import End, Population, ShardSetup, grouped, set_threads
from fedrp.simulation.result import RoundRecord, RunResult, Traffic, Trained
from fedrp.simulation.runfolder import Fingerprint, Progress, RunFolder
from fedrp.types import Packets

_log = logging.getLogger(__name__)

OnRound = Callable[[RoundRecord], None]

_PORTION = 250  # clients
_DIVERGED = 100.0  # times the loss of an untrained model (plus 1)


def simulate(
    config: RunConfig,
    task: Task,
    speed: Speed | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    tap: Tap | None = None,
    backend: Backend | None = None,
) -> RunResult:
    """Train a task with the configured algorithm and return what came of it.

    `tap` is on the wire, see `Tap`. `backend` is one that is open already (`fedrp.backends.choice.open_backend`), so
    that several runs share its workers.

    Guarantees: the result is a function of `config`, `task` and the engine alone, whatever the number and kind of
    workers, and whether or not the run was killed and resumed in between. Engines differ in the last digits.
    """
    speed = speed or Speed()
    if resume and out is None:
        raise ConfigError("resume=True needs out, the folder of the run to go on with")
    require_device(speed.device)
    began = time.monotonic()
    layout = layout_of(built(task.model))
    setup = _setup(config, task, speed, layout.size)
    untrained = preflight(
        task.model, task.loss, task.correct, list(setup.data.values()), setup.test, torch.device(speed.device)
    )
    privacy = statements(method_of(setup.config).releases(setup.config), setup.config.dp_delta)
    outlook = announced_outlook(setup.config, layout.size, task.model)
    records: list[RoundRecord] = []
    earlier = seconds = 0.0  # earlier sittings' time, and that of all rounds so far
    with _opened(out, setup, layout, resume) as folder, _computing(setup, layout.size, folder, tap, backend) as course:
        if folder and folder.checkpoint():
            _, records, earlier = course.take_up(folder)
            seconds = earlier
        for trained in course.rounds():
            record = _measured(setup, trained, course)
            _look_for_divergence(setup.config, record, untrained)
            records.append(record)
            seconds = earlier + time.monotonic() - began
            if folder:
                course.keep(folder, record, seconds)
            if on_round:
                on_round(record)
        result = _finish(course, setup, records, layout.size, privacy, outlook, seconds)
        if folder:
            folder.finish(result)
    return result


def _setup(config: RunConfig, task: Task, speed: Speed, parameters: int) -> ShardSetup:
    given = dataclasses.replace(config.stored, dataset=task.dataset, model=task.model_name)
    config = resolved(with_norm_floor(given, task.model), parameters)
    if config.algorithm in ALGORITHMS:
        require_hidden_start(config, task.model, parameters)
    data = dict(enumerate(split_among_clients(task, config)))
    run = simulated_run_id(config)
    groups = grouped(config.clients, parameters)
    test = examples(task.test, "the test set")
    return ShardSetup(config, speed, run, task.model, task.loss, task.correct, groups, data, test)


@contextmanager
def _opened(out: str | Path | None, setup: ShardSetup, layout: Layout, resume: bool) -> Iterator[RunFolder | None]:
    """The run folder, if one is asked for."""
    if out is None:
        yield None
        return
    task = Fingerprint.of(setup.data.values(), setup.test, layout)
    with RunFolder.open(Path(out), setup.config, task, resume) as folder:
        yield folder


@contextmanager
def _computing(
    setup: ShardSetup, parameters: int, folder: RunFolder | None, tap: Tap | None, given: Backend | None
) -> Iterator["Course[Any]"]:
    """The clients at work; after that, this process has as many threads as before."""
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(torch.set_num_threads, torch.get_num_threads())
        afterwards.callback(kernels.set_threads, kernels.get_threads())
        set_threads(setup.speed)
        setup = _with_engine(setup, folder)
        backend = given or afterwards.enter_context(open_backend(setup.speed))
        try:
            if setup.config.algorithm in BASELINES:
                yield Alone(setup, LoneClients(setup, backend))
            else:
                yield Federated.begun(setup, parameters, backend, tap)
        except BaseException:  # also Ctrl-C: workers may have answers under way that the next run must not get
            backend.stop()
            raise


def _with_engine(setup: ShardSetup, folder: RunFolder | None) -> ShardSetup:
    """The set-up with the engine that the run began with, or that is chosen now, once for all workers."""
    speed, config = setup.speed, setup.config
    engine = kept_engine(folder, speed.engine) if folder else None
    if engine is None:
        batches = sum(-(-len(data.y) // config.batch_size) for data in setup.data.values())
        steps = round(batches * config.local_epochs * config.rounds * config.participation)
        work = Workload(list(setup.data.values()), config.batch_size, steps)
        engine = choose_engine(speed.engine, setup.factory, setup.loss, torch.device(speed.device), work)
        if folder:
            keep_engine(folder, engine)
    return setup._replace(speed=dataclasses.replace(speed, engine=engine))


# --- how rounds are done ---------------------------------------------------------------------------------------------


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

    def ends(self, clients: Sequence[int]) -> Mapping[int, End]:
        """What clients would be told if the run ended now."""

    def last_traffic(self) -> Traffic:
        """Of what all clients are told at the end."""

    def take_up(self, folder: RunFolder) -> Progress:
        """Go on after the last round that is in a folder."""

    def keep(self, folder: RunFolder, record: RoundRecord, seconds: float) -> None:
        """Write a round into a folder."""


@dataclass
class Federated:
    """A run of the protocol. Server and clients are saved together, after each round."""

    clients: Clients
    server: Server

    @classmethod
    def begun(cls, setup: ShardSetup, parameters: int, backend: Backend, tap: Tap | None) -> "Federated":
        """Clients and a server that have not met yet."""
        config = setup.config
        upload_size = Pipeline.of(config, ALGORITHMS[config.algorithm].server).upload_size(parameters)
        roster = simulated_roster(RunSeed(config.seed), config.clients)
        return cls(Clients(setup, roster, backend, tap), new_server(config, setup.run, upload_size))

    @property
    def secret(self) -> bool:
        """Whether clients share secret matrices."""
        return self.server.algorithm.round_keys

    def rounds(self) -> Iterator[Trained]:
        """The rounds that are left."""
        carrier, store = SimulatedCarrier.of(self.server, self.clients), NoStore()
        self.server = begin(self.server, carrier, store, self.server.config.clients)
        for closed in rounds(self.server, carrier, store, seeded_coins):
            self.server, report = closed.server, closed.report
            self.clients.close_round()
            if report.void:
                _log.warning("round %d was given up: %s", self.server.round, report.void)
            count = len(report.participants)
            yield Trained(
                *(self.server.round, count, closed.cohort - count),
                *(carrier.take_traffic(), closed.seconds, report.consensus_bound),
            )

    def ends(self, clients: Sequence[int]) -> Packets:
        """What clients would be told if the run ended now."""
        return dict(server_side.finish(self.server, tuple(clients)))  # for workers, who get their parts of it

    def last_traffic(self) -> Traffic:
        """Of what all clients are told at the end."""
        total, clients = Traffic(), range(self.server.config.clients)
        for first in range(0, len(clients), _PORTION):  # all packets at once may be large
            total = total.plus(Traffic.of(self.ends(clients[first : first + _PORTION]), {}))
        return total

    def take_up(self, folder: RunFolder) -> Progress:
        """Go on after the last round that is in a folder."""
        progress = folder.load(self.clients)
        self.server = folder.load_server(self.server, progress.checkpoint)
        return progress

    def keep(self, folder: RunFolder, record: RoundRecord, seconds: float) -> None:
        """Write a round into a folder."""
        folder.save(self.clients, record, seconds, self.server)


def seeded_coins(server: Server) -> Coins:
    """What chooses participants; here it must be the same in every run with this seed."""
    return simulated_coins(server.config, server.round + 1)


# --- what is measured ------------------------------------------------------------------------------------------------


def _measured(setup: ShardSetup, trained: Trained, course: Course[End]) -> RoundRecord:
    """What is recorded of a round, with the scores of its models if it is the turn of this round, or the last."""
    began, last = time.monotonic(), trained.round == setup.config.rounds
    due = last or trained.round % setup.speed.eval_every == 0
    evaluation = evaluate(setup.config, course, all_clients=last) if due else None
    return RoundRecord(**trained._asdict(), evaluation=evaluation, evaluation_seconds=time.monotonic() - began)


def _look_for_divergence(config: Resolved, record: RoundRecord, untrained: float) -> None:
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
        f"of an untrained model about {untrained:.3g} (lr={config.lr}): lower --lr"
    )
    if config.private:
        text += ", --clip or the noise"
    if not config.ball and not (config.private and math.isfinite(loss)):
        raise DivergenceError(text)
    _log.warning("%s (the run goes on)", text)


def evaluate(config: Resolved, course: Course[End], all_clients: bool) -> Evaluation:
    """Score the models of the last completed round: what would be delivered if the run ended now."""
    clients, chosen = course.clients, delivering_client(config)
    if method_of(config).delivers == "consensus":
        delivered = clients.score(course.ends([chosen]))[chosen]
        same = delivered.accuracy
        return Evaluation(delivered, delivered, same, same, same)
    ends = course.ends(range(config.clients))
    scores = clients.score(ends if all_clients else {chosen: ends[chosen]})
    average = clients.score_model(clients.average(ends))
    if not all_clients:
        return Evaluation(scores[chosen], average)
    accuracies = [score.accuracy for score in scores.values()]
    mean = sum(accuracies) / len(accuracies)
    return Evaluation(scores[chosen], average, mean, min(accuracies), max(accuracies))


def delivering_client(config: Resolved) -> int:
    """The client whose model is delivered where every client keeps its own: drawn at random, once per run."""
    return int(RunSeed(config.seed).generator("delivered").integers(config.clients))


def _finish(
    course: Course[End],
    setup: ShardSetup,
    records: list[RoundRecord],
    parameters: int,
    privacy: tuple[Guarantee, ...],
    outlook: Outlook | None,
    seconds: float,
) -> RunResult:
    chosen = delivering_client(setup.config)
    model = course.clients.final_models(course.ends([chosen]))[chosen]
    examples_held = sum(len(data.y) for data in setup.data.values())
    return RunResult(
        config=setup.config,
        parameters=parameters,
        secret=course.secret,
        records=tuple(records),
        last_traffic=course.last_traffic(),
        privacy=privacy,
        warnings=delta_warnings(privacy, setup.config.clients, examples_held),
        outlook=outlook,
        model=model,
        seconds=seconds,
        images_per_round=examples_held * setup.config.local_epochs * setup.config.participation,
        peak_rss_mb=course.clients.peak_memory(),
        state=course.clients.state(model),
    )
