"""The ClientApp: a packet in, a packet out, and in between the state of the site, read from disk and written back.

Every message may find a new process, so no state lives in memory between two; the data of a run may. The new state is
on the disk before the reply leaves: a client that is killed at any moment does no round twice, and sends the reply that
it has already made. Whatever goes wrong, the server is told a bare code; the site's own log has the rest.
"""

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedrp.algorithms.given_start import require_hidden_start
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.statements import stated
from fedrp.config.speed import Speed
from fedrp.crypto.roster import Roster, load_identity
from fedrp.crypto.sealing import Entropy, Identity, SiteEntropy
from fedrp.engines.augment import require_images
from fedrp.errors import ConfigError, FedRPError, SiteError
from fedrp.flower.messages import HELLO, ROUND, answer, packet_of, refusal, run_of
from fedrp.flower.settings import Values, require_agreed, run_settings
from fedrp.flower.task import ClientContext, Load, LoadError, LocalTask
from fedrp.learning.evaluate import score
from fedrp.learning.layout import built, layout_of
from fedrp.learning.norm_floor import with_norm_floor
from fedrp.learning.objective import Examples
from fedrp.learning.preflight import preflight
from fedrp.learning.task import examples
from fedrp.mechanisms.delivery import masked_at_all
from fedrp.privacy.ledger import delta_warnings
from fedrp.protocol import wire
from fedrp.protocol.client import begun, finished, hello, respond
from fedrp.protocol.client_state import Site, Workbench, make_workbench, weight_of
from fedrp.protocol.wire import Kind
from fedrp.records.preflight import preflight_records, zeros_like
from fedrp.storage.ledger import Caps, begin, read_caps
from fedrp.storage.site import DEFAULT_DATA, SiteFolder, Terms
from fedrp.storage.status import FAILURES, append_line
from fedrp.types import Vector

_LONGEST_NAME = 200


def client_app(load: Load) -> ClientApp:
    """A ClientApp for the task that `load` gives at each site. Its secrets come from the operating system."""
    return make_client_app(load, lambda _, identity: SiteEntropy(identity))


Source = Callable[[ClientContext, Identity], Entropy]


def make_client_app(load: Load, entropy: Source) -> ClientApp:
    """A ClientApp with a given source of secrets.

    For tests that compare with the simulator, whose secrets derive from a public seed. Nothing in a run config or node
    config leads here: a deployed app says `client_app`.
    """
    app = ClientApp()
    loaded = _keeping(load)

    def reply_to(question: Message, context: Context) -> Message:
        greeted = question.metadata.message_type == HELLO
        try:
            packet = _reply(question, context, loaded, entropy)
            return answer(packet, question, _site_name(context.node_config) if greeted else "")
        except Exception as error:  # its text must not reach the server, which Flower would send it to
            _log_failure(error, context.node_config)
            return refusal(_code(error), question, _site_name(context.node_config))

    app.query()(reply_to)
    app.train()(reply_to)
    app.evaluate()(reply_to)
    return app


_Loaded = Callable[[bytes, ClientContext], tuple[LocalTask, Examples]]


def _keeping(load: Load) -> _Loaded:
    """The task of a run and its training examples, loaded at the first message of the run in this process.

    A process that stays (`fedrp site`) need not read its data for every message. As in the simulator, the examples of
    a run then stay as they were at its beginning.
    """
    kept: dict[bytes, tuple[ClientContext, LocalTask, Examples]] = {}

    def loaded(run: bytes, context: ClientContext) -> tuple[LocalTask, Examples]:
        if run not in kept or kept[run][0] != context:
            kept.clear()  # before another takes its place in memory
            task = _loaded(load, context)
            kept[run] = context, task, examples(task.train, "the site's training set")
        return kept[run][1:]

    return loaded


def _loaded(load: Load, context: ClientContext) -> LocalTask:
    try:
        task = load(context)
    except Exception as error:  # the site's own code: anything
        raise LoadError("load failed") from error
    if not isinstance(task, LocalTask):
        raise LoadError(f"load gave a {type(task).__name__}: expected a LocalTask")
    return task


@dataclass(frozen=True)
class _Desk:
    """A client at work on one message."""

    context: ClientContext
    task: LocalTask
    bench: Workbench
    site: Site
    folder: SiteFolder
    caps: Caps


def _reply(question: Message, context: Context, load: _Loaded, entropy: Source) -> bytes:
    packet = packet_of(question)
    desk = _desk(run_of(question), context, load, entropy)
    kind = question.metadata.message_type
    if kind == HELLO:
        _preflight(desk)
    weight, records = weight_of(desk.bench, desk.site), len(desk.site.data.y)
    terms = Terms.of(desk.bench.config, weight, _data_name(context.node_config), records)
    begin(desk.folder, desk.context.index, terms, desk.caps)
    with desk.folder.lock():
        _state_privacy(desk)
        if masked_at_all(desk.bench.config):
            mask_key = desk.folder.mask_key(desk.site.entropy.secret("mask"))
            desk = dataclasses.replace(desk, site=dataclasses.replace(desk.site, mask_key=mask_key))
        if kind == HELLO:
            return hello(desk.bench, desk.context.index, desk.site)
        return _round(desk, packet) if kind == ROUND else _finish(desk, packet)


def _desk(run: bytes, context: Context, load: _Loaded, entropy: Source) -> _Desk:
    """All that the client needs to work on a message of a run."""
    node = context.node_config
    caps = Caps()
    if "agreed" in node:
        require_agreed(_path(node, "agreed"), context.run_config)
        caps = read_caps(_path(node, "agreed"))
    config, _ = run_settings(context.run_config)
    identity, roster = load_identity(_path(node, "key")), Roster.load(_path(node, "roster"))
    about = ClientContext(identity.name, roster.place_of(identity), config, node, context.run_config)
    task, data = load(run, about)
    parameters = layout_of(built(task.model)).size
    config = resolved(with_norm_floor(config, task.model), parameters)
    require_hidden_start(config, task.model, parameters)
    device = torch.device(str(node.get("device", "cpu")))
    bench = make_workbench(config, run, roster, task.model, task.loss, device, Speed().projection_memory * 2**20)
    folder = SiteFolder(_path(node, "state"), run)
    return _Desk(about, task, bench, Site(identity, entropy(about, identity), data), folder, caps)


def _path(node: Values, name: str) -> Path:
    value = node.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"the node config has no {name}: give it with --node-config '{name}=\"PATH\" ...'")
    return Path(value)


def _site_name(node: Values) -> str:
    """What the site is called in the roster; nothing where its key cannot be read."""
    try:
        return load_identity(_path(node, "key")).name
    except (FedRPError, OSError):
        return ""


def _data_name(node: Values) -> str:
    """What the site calls its data set: the account that runs are charged to."""
    name = node.get("data", DEFAULT_DATA)
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ConfigError(f'data={name!r} in the node config is not valid: expected a name, as data="cohort-2024"')
    return name


def _state_privacy(desk: _Desk) -> None:
    """Tell the site, before it contributes anything, against whom which epsilon holds: once, settings do not change."""
    if "privacy" not in desk.folder.status():
        config = desk.bench.config
        found = stated(config, [len(desk.site.data.y)])
        warnings = delta_warnings(found, config.clients, len(desk.site.data.y))
        desk.folder.report({"privacy": [*map(str, found), *(f"warning: {text}" for text in warnings)]})


def _round(desk: _Desk, packet: bytes) -> bytes:
    """Take part in a round, or deal a key. The new state is kept before the reply leaves."""
    began = time.monotonic()
    client = before = desk.folder.load(desk.context.index)
    if desk.bench.config.record_private:  # whether training ends may tell of a record: the round counts beforehand
        client = begun(desk.bench, before, desk.site, packet)
        if client is not before:
            desk.folder.save(client)
    ((client, reply),) = respond(desk.bench, [client], [desk.site], [packet])
    desk.folder.save(client)
    calls = wire.messages_of(wire.decode(packet, desk.bench.limits), Kind.ROUND)
    rounds = desk.bench.config.rounds
    event = "delivery" if client.round > rounds else "round"  # which is the exchange of models after the last round
    changes = {"round": min(client.round, rounds), **({"participants": calls[-1].weight} if calls else {})}
    _note(desk, event, packet, reply, {**changes, "seconds": round(time.monotonic() - began, 3)})
    return reply


def _finish(desk: _Desk, packet: bytes) -> bytes:
    """Keep the delivered model and its score. The state stays: the last packet may come again."""
    client = desk.folder.load(desk.context.index)
    model = finished(desk.bench, client, desk.site, packet).model
    path = desk.folder.deliver(desk.bench.trainer.model.state(model))
    desk.folder.erase_mask_key()
    _note(desk, "finish", packet, b"", {"finished": True, "model": str(path), **_score(desk, model)})
    return b""


def _preflight(desk: _Desk) -> None:
    """Find a mistake in the task before the site joins the run."""
    task, device = desk.task, desk.bench.trainer.model.device
    config = desk.bench.config
    require_images(config.augment, [desk.site.data])
    data, finite = desk.site.data, not config.tolerant
    if config.record_private:  # a refusal would tell of records
        data = zeros_like(data)
        preflight_records(task.model, task.loss, data, device)
    preflight(task.model, task.loss, task.metrics, [data], _test_set(task), device, finite=finite)


def _test_set(task: LocalTask) -> Examples | None:
    return None if task.test is None else examples(task.test, "the site's test set")


def _score(desk: _Desk, model: Vector) -> dict[str, object]:
    test = _test_set(desk.task)
    if test is None:
        return {}
    return dict(score(desk.bench.trainer.model, model, test, desk.task.metrics).as_json())


def _note(desk: _Desk, event: str, packet: bytes, reply: bytes, changes: dict[str, object]) -> None:
    """Bring status and log up to date. A courtesy: a full disk must not cost the reply that is already made."""
    with contextlib.suppress(SiteError):
        before = desk.folder.status()
        totals = {
            "bytes_down": before.get("bytes_down", 0) + len(packet),
            "bytes_up": before.get("bytes_up", 0) + len(reply),
        }
        config = desk.bench.config
        about = {"role": "client", "name": desk.context.name, "client": desk.context.index, "run": desk.bench.run.hex()}
        plan = {"algorithm": config.algorithm, "rounds": config.rounds, "finished": False}
        desk.folder.report({**plan, **about, **changes, **totals})
        desk.folder.log(event, {**changes, "bytes_down": len(packet), "bytes_up": len(reply)})


# --- when something goes wrong ---------------------------------------------------------------------------------------


def _code(error: Exception) -> str:
    """What the server is told: the kind of error, and of foreign errors not even that."""
    return type(error).__name__ if isinstance(error, FedRPError) else "Failure"


def _log_failure(error: Exception, node: Values) -> None:
    """Keep the reason at the site."""
    kind = type(error).__name__
    error = error.__cause__ if isinstance(error, LoadError) and isinstance(error.__cause__, Exception) else error
    state = node.get("state")
    if isinstance(state, str) and state:
        where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
        details = {"error": kind, "reason": str(error), "where": where[-5:]}
        with contextlib.suppress(OSError):
            Path(state).mkdir(mode=0o700, parents=True, exist_ok=True)
        append_line(Path(state) / FAILURES, {"event": "failure", **details})
