"""The simulator: real rounds on one machine. It carries bytes between the two halves, measures, and keeps a run folder.

A run folder holds `config.json`, `metrics.jsonl` (a line per round), `checkpoint/` (the last complete round),
`result.json` and `model.safetensors` (the delivered model); and `lock`, held while a run goes on.
"""

import contextlib
import dataclasses
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedrp.algorithms.given_start import require_hidden_start
from fedrp.algorithms.norm_floor import with_norm_floor
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS
from fedrp.config.run import Resolved, RunConfig
from fedrp.config.speed import Speed
from fedrp.errors import ConfigError, DivergenceError
from fedrp.learning.evaluate import Evaluation
from fedrp.learning.layout import Layout, built, layout_of
from fedrp.learning.preflight import preflight
from fedrp.learning.task import Task, examples, split_among_clients
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.ledger import delta_warnings, statements
from fedrp.projection import kernels
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.rounds import ClosedRound, NoStore, begin, rounds
from fedrp.protocol.server_state import Server, new_server
from fedrp.rng import RunSeed
from fedrp.simulation.backend import Hosts, HostSetup, Tap, grouped, set_threads
from fedrp.simulation.carrier import HostCarrier
from fedrp.simulation.identities import simulated_roster
from fedrp.simulation.result import RoundRecord, RunResult, Traffic
from fedrp.simulation.runfolder import Fingerprint, RunFolder

_log = logging.getLogger(__name__)

OnRound = Callable[[RoundRecord], None]

_DIVERGED = 100.0  # times the loss of an untrained model (plus 1)


def simulate(
    config: RunConfig,
    task: Task,
    speed: Speed | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    tap: Tap | None = None,
) -> RunResult:
    """Train a task with the configured algorithm and return what came of it. `tap` is on the wire, see `Tap`.

    Guarantees: the result is a function of `config` and `task` alone, whatever the number of workers, and whether or
    not the run was killed and resumed in between.
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
    upload_size = ALGORITHMS[config.algorithm].server.upload_size(setup.config, layout.size)
    server = new_server(setup.config, setup.run, upload_size)
    privacy = statements(ALGORITHMS[config.algorithm].releases(setup.config), setup.config.dp_delta)
    records: list[RoundRecord] = []
    earlier = seconds = 0.0  # earlier sittings' time, and that of all rounds so far
    with _opened(out, setup, layout, resume) as folder, _computing(setup, tap) as hosts:
        if folder and folder.checkpoint():
            server, records, earlier = folder.load(server, hosts)
            seconds = earlier
        carrier, store = HostCarrier.of(server, hosts), NoStore()  # server and clients are saved together, below
        server = begin(server, carrier, store, setup.config.clients)
        for closed in rounds(server, carrier, store, seeded_coins):
            server = closed.server
            record = _measured(closed, hosts, carrier.take_traffic())
            _look_for_divergence(setup.config, record, untrained)
            records.append(record)
            seconds = earlier + time.monotonic() - began
            if folder:
                folder.save(server, hosts, record, seconds)
            if on_round:
                on_round(record)
        result = _finish(server, hosts, setup, records, layout.size, privacy, seconds)
        if folder:
            folder.finish(result)
    return result


def require_device(name: str) -> None:
    """Refuse a device that torch does not have here."""
    try:
        torch.zeros(1, device=torch.device(name)).item()  # on "meta" there is nothing to read
    except (RuntimeError, AssertionError, NotImplementedError):  # torch raises any of them, by kind of device
        raise ConfigError(f"device '{name}' is not available here: use --device cpu") from None


def _setup(config: RunConfig, task: Task, speed: Speed, parameters: int) -> HostSetup:
    given = dataclasses.replace(config.stored, dataset=task.dataset, model=task.model_name)
    config = resolved(with_norm_floor(given, task.model), parameters)
    require_hidden_start(config, task.model, parameters)
    data = dict(enumerate(split_among_clients(task, config)))
    run = hashlib.sha256(f"fedrp-run|{config.stored}".encode()).digest()[: wire.RUN_ID_BYTES]
    groups = grouped(config.clients, parameters)
    roster = simulated_roster(RunSeed(config.seed), config.clients)
    test = examples(task.test, "the test set")
    return HostSetup(config, speed, run, roster, task.model, task.loss, task.correct, groups, data, test)


@contextmanager
def _opened(out: str | Path | None, setup: HostSetup, layout: Layout, resume: bool) -> Iterator[RunFolder | None]:
    """The run folder, if one is asked for."""
    if out is None:
        yield None
        return
    task = Fingerprint.of(setup.data.values(), setup.test, layout)
    with RunFolder.open(Path(out), setup.config, task, resume) as folder:
        yield folder


@contextmanager
def _computing(setup: HostSetup, tap: Tap | None) -> Iterator[Hosts]:
    """The clients at work; after that, this process has as many threads as before."""
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(torch.set_num_threads, torch.get_num_threads())
        afterwards.callback(kernels.set_threads, kernels.get_threads())
        set_threads(setup.speed)
        hosts = Hosts(setup, tap)
        afterwards.callback(hosts.stop)
        yield hosts


def _measured(closed: ClosedRound, hosts: Hosts, traffic: Traffic) -> RoundRecord:
    """What is recorded of a round, with the scores of its models."""
    server, report = closed.server, closed.report
    if report.void:
        _log.warning("round %d was given up: %s", server.round, report.void)
    began = time.monotonic()
    return RoundRecord(
        round=server.round,
        participants=len(report.participants),
        evaluation=evaluate(server, hosts, all_clients=server.round == server.config.rounds),
        dropped=closed.cohort - len(report.participants),
        traffic=traffic,
        seconds=closed.seconds,
        evaluation_seconds=time.monotonic() - began,
        consensus_bound=report.consensus_bound,
    )


def _look_for_divergence(config: Resolved, record: RoundRecord, untrained: float) -> None:
    """Compare the loss after a round with that of an untrained model: within a round each client looks for itself.

    With noise a bad model may be all that can be had, so only one that is none is refused (it is made of noised sums,
    so this tells nothing more). With a ball a stop would tell of a client's data: it is only logged.
    """
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


def seeded_coins(server: Server) -> server_side.Coins:
    """What chooses participants; here it must be the same in every run with this seed."""
    return RunSeed(server.config.seed).generator("participants", server.round + 1).random(server.config.clients)


def evaluate(server: Server, hosts: Hosts, all_clients: bool) -> Evaluation:
    """Score the models of the last completed round: what would be delivered if the run ended now."""
    everyone = tuple(range(server.config.clients))
    chosen = delivering_client(server.config)
    if ALGORITHMS[server.config.algorithm].delivers == "consensus":
        delivered = hosts.score(dict(server_side.finish(server, (chosen,))))[chosen]
        same = delivered.accuracy
        return Evaluation(delivered, delivered, same, same, same)
    packets = dict(server_side.finish(server, everyone))
    scores = hosts.score(packets if all_clients else {chosen: packets[chosen]})
    average = hosts.score_model(hosts.average(packets))
    if not all_clients:
        return Evaluation(scores[chosen], average)
    accuracies = [score.accuracy for score in scores.values()]
    mean = sum(accuracies) / len(accuracies)
    return Evaluation(scores[chosen], average, mean, min(accuracies), max(accuracies))


def delivering_client(config: Resolved) -> int:
    """The client whose model is delivered where every client keeps its own: drawn at random, once per run."""
    return int(RunSeed(config.seed).generator("delivered").integers(config.clients))


def _finish(
    server: Server,
    hosts: Hosts,
    setup: HostSetup,
    rounds: list[RoundRecord],
    parameters: int,
    privacy: tuple[Guarantee, ...],
    seconds: float,
) -> RunResult:
    packets = dict(server_side.finish(server, tuple(range(server.config.clients))))
    chosen = delivering_client(server.config)
    model = hosts.final_models({chosen: packets[chosen]})[chosen]
    records = sum(len(data.y) for data in setup.data.values())
    return RunResult(
        config=setup.config,
        parameters=parameters,
        secret=server.algorithm.round_keys,
        records=tuple(rounds),
        last_traffic=Traffic.of(packets, {}),
        privacy=privacy,
        warnings=delta_warnings(privacy, setup.config.clients, records),
        model=model,
        seconds=seconds,
        images_per_round=records * setup.config.local_epochs * setup.config.participation,
        peak_rss_mb=hosts.peak_memory(),
        state=hosts.state(model),
    )
