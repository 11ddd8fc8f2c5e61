"""The simulator: real rounds on one machine. It carries bytes between the two halves, measures, and keeps a run folder.

A run folder holds `config.json`, `metrics.jsonl` (a line per round), `checkpoint/` (the last complete round),
`result.json` and `model.safetensors` (the delivered model); and `lock`, held while a run goes on.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrp.algorithms.given_start import require_hidden_start
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.statements import stated
from fedrp.algorithms.table import ALGORITHMS, BASELINES
from fedrp.backends.choice import open_backend
from fedrp.backends.workers import Backend
from fedrp.config.checks import require_choice
from fedrp.config.run import RunConfig
from fedrp.config.speed import Speed, chosen_workers
from fedrp.engines.augment import require_images
from fedrp.engines.calibration import Workload, choose_engine
from fedrp.errors import ConfigError
from fedrp.learning.layout import Layout, built, layout_of
from fedrp.learning.norm_floor import initial_norm_floor, with_norm_floor
from fedrp.learning.preflight import preflight, require_device
from fedrp.learning.task import Task, examples, split_already, split_among_clients
from fedrp.mechanisms.outlook import Outlook, outlook_of
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.ledger import delta_warnings
from fedrp.projection import kernels
from fedrp.records.preflight import preflight_records
from fedrp.records.promise import site_plans
from fedrp.reporting.progress import Show, asked_for
from fedrp.reporting.records import Delivery, RoundRecord, Traffic
from fedrp.simulation.alone import LoneClients
from fedrp.simulation.arguments import require_arguments
from fedrp.simulation.clients import Tap
from fedrp.simulation.courses import Alone, Federated
from fedrp.simulation.identities import simulated_run_id
from fedrp.simulation.kept_engine import keep_engine, kept_engine
from fedrp.simulation.measures import (
    KEEPS,
    Best,
    Course,
    OnRound,
    RoundModel,
    Stop,
    better_of,
    delivered_model,
    delivering_client,
    evaluate,
    headline_of,
    look_for_divergence,
    measured,
    model_of,
    require_callback,
)
from fedrp.simulation.population import End, ShardSetup, grouped, set_threads
from fedrp.simulation.result import RunResult
from fedrp.simulation.runfolder import RESUME, Fingerprint, RunFolder

_log = logging.getLogger(__name__)


def simulate(
    config: RunConfig,
    task: Task,
    speed: Speed | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    tap: Tap | None = None,
    backend: Backend | None = None,
    keep: str = "last",
    progress: bool | Show = False,
) -> RunResult:
    """Train a task with the configured algorithm and return what came of it.

    Args:
        config: everything that decides the outcome.
        task: what is learned.
        speed: how it is computed.
        out: folder to keep the run in.
        resume: go on with the run in `out`. It may be given more rounds, unless a promise was made for those it had.
        on_round: called after each round with its record and its model, which is built if it is called: `model()`. The
            run ends where it returns `fedrp.Stop`.
        tap: on the wire, see `Tap`.
        backend: one that is open already (`fedrp.backends.choice.open_backend`), to share its workers among runs.
        keep: which model is delivered: that of the last round, or of the best by the headline of the task.
        progress: show how far the run is; or what shows it, from `fedrp.reporting.progress.showing`.

    Guarantees: the result is a function of `config`, `task` and the engine alone, whatever the number and kind of
    workers, and whether or not the run was killed and resumed in between. Engines differ in the last digits.
    """
    speed = speed or Speed()
    require_arguments(config, task, speed, out, resume, {"on_round": on_round, "tap": tap})
    require_choice("keep", keep, KEEPS)
    require_callback(on_round)
    require_device(speed.device)
    began = time.monotonic()
    layout = layout_of(built(task.model))
    setup = _setup(config, task, speed, layout.size)
    parts, owners = list(setup.data.values()), list(split_already(task))
    device, finite = torch.device(speed.device), not setup.config.tolerant
    require_images(setup.config.augment, parts, owners)
    untrained = preflight(task.model, task.loss, task.metrics, parts, setup.test, device, owners, finite)
    if setup.config.record_private:
        preflight_records(task.model, task.loss, parts[0], device)
    privacy = stated(setup.config, [len(part.y) for part in parts], simulated=True)
    outlook = outlook_of(setup.config, layout.size, initial_norm_floor(task.model)) if setup.config.private else None
    if outlook:
        _log.warning("%s", outlook)
    records: list[RoundRecord] = []
    best: Best | None = None
    earlier = seconds = 0.0  # earlier sittings' time, and that of all rounds so far
    with (
        _opened(out, setup, layout, resume) as folder,
        _computing(setup, layout.size, folder, tap, backend) as course,
        asked_for(progress, setup.config.algorithm, setup.config.rounds) as show,
    ):
        if folder and folder.checkpoint():
            checkpoint, records, earlier = course.take_up(folder)
            seconds, best = earlier, Best.read(checkpoint, setup.run)
            keep = _kept_so_far(folder, keep, best, records)
        for trained in course.rounds():
            record = measured(setup, trained, course)
            look_for_divergence(setup.config, record, untrained)
            records.append(record)
            if keep == "best":
                best = better_of(best, record, task, functools.partial(delivered_model, setup.config, course))
            seconds = earlier + time.monotonic() - began
            if folder:
                course.keep(folder, record, seconds, best.files(setup.run) if best else {})
            show(setup.config.algorithm, record.as_json())
            if on_round and _stopped(on_round, record, setup, course):
                break
        if records[-1].round < setup.config.rounds:  # it was stopped, and measured as one of many rounds
            records[-1] = records[-1]._replace(evaluation=evaluate(setup.config, course, all_clients=True))
        delivery = course.deliver()
        result = _finish(course, setup, task, records, delivery, layout.size, privacy, outlook, seconds, best)
        if folder:
            folder.finish(result, best is not None)
    return result


def _kept_so_far(folder: RunFolder, keep: str, best: Best | None, records: Sequence[RoundRecord]) -> str:
    """A run goes on keeping what it began to keep."""
    if keep == "best" and best is None and any(record.evaluation for record in records):
        raise ConfigError(f"{folder.root} was started with keep='last', its earlier models are gone: {RESUME}")
    return "best" if best else keep


def _stopped(on_round: OnRound, record: RoundRecord, setup: ShardSetup, course: Course[End]) -> bool:
    """Whether the callback asks for the end."""

    def build() -> nn.Module:
        module = built(setup.factory)
        module.load_state_dict(course.clients.state(delivered_model(setup.config, course)))
        return module

    model = RoundModel(record.round, setup.config, build)
    try:
        return on_round(record, model) is Stop
    finally:
        model.close()


def _setup(config: RunConfig, task: Task, speed: Speed, parameters: int) -> ShardSetup:
    given = dataclasses.replace(config.stored, dataset=task.dataset, model=task.model_name)
    config = resolved(with_norm_floor(given, task.model), parameters)
    if config.algorithm in ALGORITHMS:
        require_hidden_start(config, task.model, parameters)
    data = dict(enumerate(split_among_clients(task, config)))
    run = simulated_run_id(config)
    groups = grouped(config.clients, parameters)
    work = sum(len(part.y) for part in data.values()) * config.local_epochs * config.rounds * config.participation
    speed = dataclasses.replace(speed, workers=chosen_workers(speed, round(work * parameters)))
    test = examples(task.test, "the test set")
    return ShardSetup(config, speed, run, task.model, task.loss, dict(task.metrics), groups, data, test)


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
) -> Iterator[Course[Any]]:
    """The clients at work; after that, this process has as many threads as before."""
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(torch.set_num_threads, torch.get_num_threads())
        afterwards.callback(kernels.set_threads, kernels.get_threads())
        set_threads(setup.speed)
        setup = _with_engine(setup, folder)
        backend = given or afterwards.enter_context(open_backend(setup.speed))
        try:
            if setup.config.algorithm in BASELINES:
                yield Alone(setup, LoneClients(setup, backend), backend, tap)
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


def _finish(
    course: Course[End],
    setup: ShardSetup,
    task: Task,
    records: list[RoundRecord],
    delivery: Delivery | None,
    parameters: int,
    privacy: tuple[Guarantee, ...],
    outlook: Outlook | None,
    seconds: float,
    best: Best | None,
) -> RunResult:
    last = records[-1].round
    scored = next(record.evaluation for record in reversed(records) if record.evaluation)
    made = model_of(course, delivering_client(setup.config)) if delivery else delivered_model(setup.config, course)
    behind = best is not None and best.round != last
    model = best.model if best and behind else made
    state = course.clients.state(model)
    if delivery and not behind:
        delivery = delivery._replace(score=course.clients.score_model(model))
    examples_held = sum(len(data.y) for data in setup.data.values())
    return RunResult(
        config=setup.config,
        parameters=parameters,
        secret=course.secret,
        records=tuple(records),
        last_traffic=Traffic() if delivery else course.last_traffic(),
        privacy=privacy,
        sites=tuple(site_plans(setup.config, [len(part.y) for part in setup.data.values()])),
        warnings=delta_warnings(privacy, setup.config.clients, examples_held),
        outlook=outlook,
        model=model,
        seconds=seconds,
        images_per_round=examples_held * setup.config.local_epochs * setup.config.participation,
        peak_rss_mb=course.clients.peak_memory(),
        state=state,
        headline=headline_of(task, scored.delivered),
        delivered_round=best.round if best else last,
        last_state=course.clients.state(made) if behind else state,
        delivery=delivery,
    )
