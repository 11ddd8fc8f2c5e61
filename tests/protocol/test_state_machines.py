"""The protocol in any order: messages that are late, doubled or lost, processes that end, servers that lie.

Hypothesis draws sequences of steps against the real code; `views.View` holds what a server has got, and says after
each step whether that is too much. Each invariant is shown to fail: broken code is found by the same machines.
"""

import contextlib
import dataclasses
import functools
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from fedrp.crypto.secure_aggregation import Cohort
from fedrp.crypto.sizes import ENVELOPE_BYTES, split
from fedrp.errors import FedRPError, QuorumError
from fedrp.mechanisms import quorum
from fedrp.protocol import client as client_side
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.client_state import Client
from fedrp.protocol.tally import Tally, outstanding, take_correction, take_upload
from fedrp.protocol.wire import Kind, Message
from fedrp.rng import RunSeed
from fedrp.simulation.identities import SimulatedEntropy
from fedrp.storage import server_state
from fedrp.storage.server import ServerFolder
from helpers import Federation, tiny_config, tiny_task
from views import DeployedNoise, View, contents, restarted, server_contents, watched

CLIENTS, ROUNDS = 5, 4
EVERYONE = tuple(range(CLIENTS))


class Case(NamedTuple):
    algorithm: str
    masked: bool
    bits: float = 32.0
    deliver: str | None = None

    @property
    def last(self) -> int:
        """The last round. Where models are averaged it is that of the models, and comes soon."""
        return 2 if self.deliver == "average" else ROUNDS

    def masked_in(self, round_: int) -> bool:
        """Whether uploads of a round are masked: models are, whatever the rounds before had."""
        return self.masked or (self.deliver == "average" and round_ == self.last)


# One of each kind of memory: the last aggregate, state of one's own, the history of all rounds and keys.
CASES = [Case(name, masked) for name in ("fedavg-dp", "fedadmm", "fedrp-subspace") for masked in (True, False)]
CASES.append(Case("fedrp-subspace", True, bits=1.0))
MASKED = [case for case in CASES if case.masked]
CASES += [Case("fedrp", masked, deliver="average") for masked in (True, False)]


@functools.lru_cache(maxsize=len(CASES))
def set_up(case: Case) -> Federation:
    """A federation before its first round."""
    more: dict[str, Any] = {"secure_aggregation": True} if case.masked else {}
    if case.algorithm == "fedrp-subspace":
        more |= {"key_epoch": 2}  # both rounds that begin an epoch, and others
    rounds = case.last - (case.deliver == "average")
    more |= {"deliver": case.deliver, "bits": case.bits}
    config = tiny_config(case.algorithm, clients=CLIENTS, rounds=rounds, quorum=0.6, **more)
    run = Federation(config, tiny_task(3 * CLIENTS))
    for client, site in run.sites.items():
        entropy = DeployedNoise(SimulatedEntropy(RunSeed(config.seed), client), site.identity)
        run.sites[client] = dataclasses.replace(site, entropy=entropy)
    return run


def started(case: Case) -> Federation:
    """A federation of one's own; states and keys are shared, because nothing may change them in place."""
    run = set_up(case)
    mine = object.__new__(Federation)
    mine.__dict__ |= {**run.__dict__, "clients": dict(run.clients), "sites": dict(run.sites), "received": []}
    return mine


class Parties(RuleBasedStateMachine):
    """The clients of a run, a view of what they have sent, and the rules that hold whoever asks them."""

    case: ClassVar[Case]
    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.run = started(self.case)
        self.view = View()
        self.exits = contextlib.ExitStack()
        self.watch = self.exits.enter_context(watched(self.run.config))
        self.looked_at: dict[int, int] = {}

    def teardown(self) -> None:
        self.exits.close()

    def reach(self, what: str) -> None:
        self.reached[what] += 1

    def ask(self, client: int, packet: bytes) -> bytes | None:
        """What a client replies, None if it refuses: then it is as it was."""
        before = self.run.clients[client]
        kept = contents(before)
        self.watch.forget()
        reply: bytes | None
        try:
            reply = self.run.answer(client, packet)
        except FedRPError:
            reply = None
        assert contents(before) == kept, f"client {client} was changed in place"
        if reply is None:
            self.reach("a refusal")
            return None
        after = self.run.clients[client]
        assert after.round >= before.round, f"client {client} went back to round {after.round}"
        if before.reply == reply and reply:
            self.reach("the same upload again")
        self.view.take(client, reply, self.watch)
        taken = len([1 for _, sender in self.view.uploads if sender == client])
        assert after.taken == taken, f"client {client} counts {after.taken} rounds, it uploaded in {taken}"
        return reply

    def crashes_before_it_writes(self, client: int, packet: bytes) -> None:
        """The client works on a packet and dies: nothing was kept, so nothing left."""
        before = self.run.clients[client]
        with contextlib.suppress(FedRPError):
            self.run.answer(client, packet)
        self.run.clients[client] = before

    @rule(client=st.sampled_from(EVERYONE))
    def client_restarts(self, client: int) -> None:
        again = restarted(self.run.clients[client])
        assert contents(again) == contents(self.run.clients[client])
        self.run.clients[client] = again

    @invariant()
    def no_upload_is_singled_out(self) -> None:
        sizes = Counter(round_ for round_, _ in (*self.view.uploads, *self.view.corrections))
        for round_, size in sizes.items():
            if self.case.masked_in(round_) and self.looked_at.get(round_) != size:
                self.looked_at[round_] = size
                for known in self.view.require_sums_apart(round_, self.case.masked):
                    self.reach(f"a sum of {len(known.clients)}")


# --- a server that lies ----------------------------------------------------------------------------------------------


class Story(NamedTuple):
    """What a server tells a client, true or not."""

    round: int  # 0 stands for the next one
    cohort: tuple[int, ...]
    outcomes: tuple[str, ...]  # of rounds 1, 2, ...: one of two aggregates, or "void"
    dealers: tuple[int | None, ...]  # whose secret for rounds 0, 1, 2, ... if any
    rebuild: bool = False


OUTCOMES = ("first", "first", "first", "second", "void")
COHORTS = (EVERYONE, EVERYONE, EVERYONE, (0, 1, 2, 3), (1, 2, 3, 4), (0, 1, 2), (0, 1))
rounds = st.sampled_from((0, 0, 0, *range(1, ROUNDS + 1)))
stories = st.builds(
    Story,
    rounds,
    st.sampled_from(COHORTS),
    st.tuples(*[st.sampled_from(OUTCOMES)] * (ROUNDS - 1)),
    st.tuples(st.sampled_from((0, 0, 0, 0, 1)), *[st.sampled_from((0, 0, None, 0, 1))] * ROUNDS),
    st.sampled_from((False, False, False, True)),
)
changes = st.sampled_from(("round", "cohort", "outcomes", "dealers", "rebuild"))
Given = tuple[int | None, ...]  # which of two stories each client is told, if any
ALIKE: Given = (0,) * CLIENTS
given_to = st.one_of(
    st.just(ALIKE),
    st.builds(
        lambda odd, told: (*ALIKE[:odd], told, *ALIKE[odd + 1 :]), st.sampled_from(EVERYONE), st.sampled_from((1, None))
    ),
    st.tuples(*[st.sampled_from((0, 1, None))] * CLIENTS),
)
left_out = st.sampled_from(((3, 4), (3, 4), (0, 1), (2, 4), (4,), (4,), (2, 3, 4)))
beside = st.sampled_from(("", "", "rebuild", "void"))


def message(run: Federation, kind: Kind, round_: int, payload: wire.Payload = wire.EMPTY, weight: int = 0) -> Message:
    return Message(kind, run.bench.context, round_, wire.SERVER, payload, weight)


@functools.lru_cache(maxsize=len(CASES))
def stocked(case: Case) -> tuple[dict[int, Client], dict[tuple[int, int], list[bytes]]]:
    """Two clients that have been asked for a key of every round, and the envelopes by dealer and round."""
    run = started(case)
    if not run.bench.algorithm.server.round_keys:
        return {}, {}
    run.clients |= {dealer: Client(dealer) for dealer in (0, 1)}  # as if nobody had asked before
    envelopes = {}
    for dealer in (0, 1):
        for round_ in range(case.last + 1):
            (deal,) = wire.decode(run.answer(dealer, wire.encode([message(run, Kind.DEAL_REQUEST, round_)])))
            size = ENVELOPE_BYTES["x25519"]
            envelopes[dealer, round_] = split(deal.payload.tobytes(), size, CLIENTS, "envelopes")
    return {dealer: run.clients[dealer] for dealer in (0, 1)}, envelopes


class LyingServer(Parties):
    """Tells every client a story of its own and keeps all that it gets."""

    def __init__(self) -> None:
        super().__init__()
        size = self.run.server.upload_size
        rng = np.random.default_rng(7)
        self.aggregates = {name: rng.normal(0, 0.01, size).astype(np.float32) for name in ("first", "second")}
        dealers, self.envelopes = stocked(self.case)
        self.run.clients |= dealers
        self.packets: list[tuple[int, bytes]] = []

    def _outcomes(self, story: Story) -> list[Message]:
        """Aggregates and rounds given up; where clients do not replay, the latest aggregate only."""
        past = dict(enumerate(story.outcomes[: story.round - 1], start=1))
        told = {round_: name for round_, name in past.items() if name != "void"}
        if self.run.bench.algorithm.server.memory != "history":
            told = dict(list(told.items())[-1:])
        void = [message(self.run, Kind.VOID, round_) for round_, name in past.items() if name == "void"]
        return [
            *void,
            *(message(self.run, Kind.AGGREGATE, round_, self.aggregates[name]) for round_, name in told.items()),
        ]

    def _packet(self, client: int, story: Story) -> bytes:
        keys = wire.messages_of(wire.decode(self.run.open()[client]), Kind.MASK_KEYS)
        rebuild = [message(self.run, Kind.REBUILD, story.round)] if story.rebuild else []
        sealed = [
            dataclasses.replace(
                message(self.run, Kind.SEALED, round_, wire.raw(self.envelopes[dealer, round_][client])), sender=dealer
            )
            for round_, dealer in enumerate(story.dealers[: story.round + 1])
            if (dealer, round_) in self.envelopes
        ]
        cohort = (
            Cohort(story.cohort, (1,) * len(story.cohort)).payload() if self.case.masked_in(story.round) else wire.EMPTY
        )
        call = message(self.run, Kind.ROUND, story.round, cohort, len(story.cohort))
        return wire.encode([*rebuild, *keys, *sealed, *self._outcomes(story), call])

    def _settled(self, story: Story) -> Story:
        return story._replace(round=story.round or min(self.case.last, self._latest + 1))

    @property
    def _latest(self) -> int:
        return max((round_ for round_, _ in self.view.uploads), default=0)

    @rule(story=stories, other=stories, change=changes, given=given_to)
    def tells(self, story: Story, other: Story, change: str, given: Given) -> None:
        """Most clients are told one story, some another that differs in one respect, some nothing."""
        told = [self._settled(s) for s in (story, story._replace(**{change: getattr(other, change)}))]
        for client, which in enumerate(given):
            if which is not None:
                packet = self._packet(client, told[which])
                self.packets.append((client, packet))
                self.ask(client, packet)

    @rule(round_=rounds, sets=st.tuples(left_out, left_out), given=given_to, also=beside)
    def asks_to_recover(self, round_: int, sets: tuple[tuple[int, ...], ...], given: Given, also: str) -> None:
        """Most clients are told of one set that is left out, some of another; perhaps with news beside it."""
        round_ = round_ or self._latest
        for client, which in enumerate(given):
            if which is None:
                continue
            news = []
            if also == "rebuild" and (0, round_) in self.envelopes:
                sealed = wire.raw(self.envelopes[0, round_][client])
                key = dataclasses.replace(message(self.run, Kind.SEALED, round_, sealed), sender=0)
                news = [message(self.run, Kind.REBUILD, round_), key]
            elif also == "void":
                news = [message(self.run, Kind.VOID, past) for past in range(1, round_ + 1)]
            request = message(self.run, Kind.RECOVER, round_, np.array(sets[which], np.uint32))
            packet = wire.encode([*news, request])
            self.packets.append((client, packet))
            if self.ask(client, packet):
                self.reach("an answer to a recovery")

    @rule(story=stories, sets=st.tuples(left_out, left_out), given=st.one_of(st.just(ALIKE), given_to), also=beside)
    def tells_and_asks_to_recover(
        self, story: Story, sets: tuple[tuple[int, ...], ...], given: Given, also: str
    ) -> None:
        """As honest as it can be, up to the recovery."""
        self.tells(story._replace(round=0), story, "rebuild", ALIKE)
        self.asks_to_recover(0, sets, given, also)

    @rule(back=st.integers(0, 20), client=st.sampled_from((None, None, *EVERYONE)), dies=st.booleans())
    def replays(self, back: int, client: int | None, dies: bool) -> None:
        """A packet from before comes again, to whom it was sent or to another; the client may die of it."""
        if not self.packets:
            return
        addressee, packet = self.packets[-1 - back % len(self.packets)]
        client = addressee if client is None else client
        if dies:
            self.crashes_before_it_writes(client, packet)
        else:
            self.ask(client, packet)

    @rule(story=stories, client=st.sampled_from(EVERYONE))
    def asks_and_the_client_dies(self, story: Story, client: int) -> None:
        packet = self._packet(client, self._settled(story))
        self.packets.append((client, packet))
        self.crashes_before_it_writes(client, packet)

    @rule(client=st.sampled_from(EVERYONE), round_=st.integers(0, ROUNDS + 1))
    def asks_for_a_key(self, client: int, round_: int) -> None:
        self.ask(client, wire.encode([message(self.run, Kind.DEAL_REQUEST, round_)]))


# --- an honest server, and bad weather -------------------------------------------------------------------------------


some = st.one_of(st.just(frozenset()), st.frozensets(st.sampled_from(EVERYONE), max_size=2))


class Weather(Parties):
    """An honest server whose packets and replies are late, doubled or lost, and whose process ends now and then."""

    def __init__(self) -> None:
        super().__init__()
        folder = Path(self.exits.enter_context(tempfile.TemporaryDirectory()))
        self.store = self.exits.enter_context(ServerFolder.open(folder, self.run.config))
        self.store = dataclasses.replace(self.store, run=self.run.run)
        self.new_server = self.run.server
        self.post: dict[int, list[bytes]] = {client: [] for client in EVERYONE}
        self.arrived: dict[int, bytes] = {}
        self.tally: Tally | None = None  # of the open round
        self._save()

    def _save(self) -> None:
        """As a deployed server does before anything leaves that rests on it."""
        self.store.save(self.run.server)

    def _take_again(self) -> None:
        """A tally is never saved: clients send the same bytes again."""
        self.tally = self.run.tallied(self.arrived) if self.run.server.participants else None

    @rule()
    def server_dies(self) -> None:
        """It goes on from what it saved last, which is all that anybody has heard of."""
        before = server_contents(self.run.server)
        self.run.server = self.store.load(self.new_server)
        assert server_contents(self.run.server) == before, "the server has forgotten something"
        self._take_again()

    @rule()
    def opens(self) -> None:
        if self.run.server.round >= self.case.last:
            return
        for attempt in range(CLIENTS):
            for client, packet in server_side.request_key(self.run.server, attempt).items():
                if reply := self.ask(client, packet):
                    self.run.take_keys({client: reply})
                    self._save()
        chosen = self.run.server.participants
        try:
            packets = self.run.open()
        except QuorumError:
            self.reach("too few who can be summed")
            return
        self._save()
        assert chosen in ((), self.run.server.participants), "whoever was chosen stays chosen"
        if not chosen:
            self.tally = Tally.of(self.run.server)
        for client, packet in packets.items():
            if self.post[client][-1:] != [packet]:
                self.post[client].append(packet)

    @rule(client=st.sampled_from(EVERYONE), back=st.integers(0, 4), arrives=st.booleans(), dies=st.booleans())
    def delivers(self, client: int, back: int, arrives: bool, dies: bool) -> None:
        """A packet comes, new or old; the client may die before it has written its answer, or the answer gets lost."""
        if not self.post[client]:
            return
        packet = self.post[client][-1 - back % len(self.post[client])]
        if dies:
            self.crashes_before_it_writes(client, packet)
            return
        reply = self.ask(client, packet)
        is_asked = client in self.run.server.participants and packet == self.post[client][-1]
        assert reply or not is_asked, f"client {client} refuses what an honest server asks"
        if reply and arrives:
            self.arrived[client] = reply
            if self.tally is not None:
                take_upload(self.run.server, self.tally, client, reply)

    @rule(but=some, lost=some)
    def delivers_to_all(self, but: frozenset[int], lost: frozenset[int]) -> None:
        for client in set(EVERYONE) - but:
            self.delivers(client, 0, client not in lost, False)

    @rule(silent=some, dies=st.booleans())
    def closes(self, silent: frozenset[int], dies: bool) -> None:
        """With what has arrived. Some may be silent in a recovery; the server may die before it has saved the end."""
        server, tally = self.run.server, self.tally
        if tally is None:
            return
        at_once = outstanding(server, self.run.tallied(self.arrived))
        assert outstanding(server, tally) == at_once, "one by one is not as at once"
        try:
            self.run.server, requests = server_side.recover(server, tally)
            self._save()
            answers = {c: self.ask(c, packet) for c, packet in requests.items() if c not in silent}
            assert None not in answers.values(), "a client refuses a recovery that an honest server asks for"
            for client, reply in answers.items():
                take_correction(self.run.server, tally, client, reply or b"")
            closed, report = server_side.close_round(self.run.server, tally)
        except QuorumError:
            self.reach("a round that stays open")
            return
        assert not report.void, report.void  # everybody is honest
        self.reach("a round with a recovery" if requests else "a round without a recovery")
        if self.case.masked_in(closed.round):
            sums = {known.clients for known in self.view.require_sums_apart(closed.round, self.case.masked)}
            assert report.participants in sums, f"{report.participants} were summed, masks cancel in {sums}"
        if not dies:
            self.run.server = closed
            self._save()
        self._take_again()

    @rule(but=some, lost=some, silent=some)
    def goes_through_a_round(self, but: frozenset[int], lost: frozenset[int], silent: frozenset[int]) -> None:
        self.opens()
        self.delivers_to_all(but, lost)
        self.closes(silent, False)
        self.server_dies()

    @rule()
    def ends(self) -> None:
        """Whoever is told now that the run is over has the same model, if models are not averaged later."""
        if self.run.server.aggregates:
            models = self.run.final_models().values()
            if self.case.deliver == "average" and self.run.server.round < self.case.last:
                return  # each has its own
            assert len({model.tobytes() for model in models}) == 1, "clients end with different models"
            self.reach("an end")


# --- the tests -------------------------------------------------------------------------------------------------------


QUICK = settings(max_examples=40, stateful_step_count=12)
LONG = settings(max_examples=150, stateful_step_count=25)
# Broken code is to be found, not explained: no shrinking.
HUNT = settings(max_examples=300, stateful_step_count=12, phases=(Phase.generate,), report_multiple_bugs=False)


def explored(kind: type[Parties], case: Case, how: settings) -> Counter[str]:
    """What a machine reached in one case, if no rule was broken."""
    chosen = type(kind.__name__, (kind,), {"case": case, "reached": Counter()})
    run_state_machine_as_test(chosen, settings=how)
    return chosen.reached


def require_reached(reached: Counter[str], *whats: str) -> None:
    """A machine that never comes to what it is to look at would pass whatever the code does."""
    assert not [what for what in whats if not reached[what]], reached


def lies(case: Case, how: settings) -> None:
    reached = explored(LyingServer, case, how)
    sums = {f"a sum of {count}" for count in (2, 3, 4, 5)} if case.masked else set()
    if how == LONG:
        require_reached(reached, "a refusal", "the same upload again", *sums)
    else:  # few sequences: which sums they come to is luck
        assert reached["a refusal"]
        assert not sums or sums & set(reached), reached


def bad_weather(case: Case, how: settings) -> None:
    reached = explored(Weather, case, how)
    masked = ["a sum of 3", "a sum of 5", "a round with a recovery"] if case.masked_in(case.last) else []
    require_reached(reached, "a round without a recovery", "a round that stays open", "an end", *masked)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_lying_server_gets_one_upload_a_round_and_no_sums_that_differ_by_one_client(case: Case) -> None:
    lies(case, QUICK)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_goes_on_whatever_is_late_lost_or_doubled_and_whoever_dies(case: Case) -> None:
    bad_weather(case, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("check", [lies, bad_weather])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_with_many_more_sequences(case: Case, check: Callable[[Case, settings], None]) -> None:
    check(case, LONG)


# --- broken code is found --------------------------------------------------------------------------------------------


def forgets(**fields: Any) -> Callable[[pytest.MonkeyPatch, str], None]:
    """Has a function of `fedrp.protocol.client` find a client that has forgotten something."""

    def broken(patch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(client_side, name)
        patch.setattr(
            client_side, name, lambda bench, client, *rest: real(bench, dataclasses.replace(client, **fields), *rest)
        )

    return broken


def constant_transcript(patch: pytest.MonkeyPatch, name: str) -> None:
    patch.setattr(client_side, name, lambda *_step: bytes(32))


def no_reply_kept(patch: pytest.MonkeyPatch, name: str) -> None:
    """A client that is asked again works again."""
    real = client_side._work
    patch.setattr(client_side, name, lambda *client: real(*client)._replace(answered=False))


def alone(patch: pytest.MonkeyPatch, name: str) -> None:
    patch.setattr(quorum, name, 1)


def in_place(patch: pytest.MonkeyPatch, name: str) -> None:
    """Keys are noted before the rest of a packet is looked at."""
    real = client_side.noted

    def noted(bench: Any, client: Client, site: Any, inbox: Any) -> Any:
        found, complaint = real(bench, client, site, inbox)
        client.envelopes.update(found.envelopes)  # type: ignore[attr-defined]
        return found, complaint

    patch.setattr(client_side, name, noted)


def unwritten(field: str) -> Callable[[pytest.MonkeyPatch, str], None]:
    """A server that does not write one of its fields."""

    def broken(patch: pytest.MonkeyPatch, name: str) -> None:
        fields = getattr(server_state, name)
        patch.setitem(fields, field, fields[field]._replace(pack=lambda _value: [], unpack=tuple))

    return broken


DP, ADMM, SUBSPACE, _FEW_BITS = MASKED
TWO_UPLOADS, TWO_ANSWERS = "two uploads of client|counts 2 rounds", "two answers of client"
BROKEN = [
    (LyingServer, ADMM, "extended", constant_transcript, "sums clients that were told different things"),
    (LyingServer, SUBSPACE, "extended", constant_transcript, "sums clients that were told different things"),
    (LyingServer, DP, "extended", constant_transcript, "sums clients that were told different things"),
    (LyingServer, DP, "_work", no_reply_kept, TWO_UPLOADS),
    (LyingServer, Case("fedadmm", False), "_work", no_reply_kept, TWO_UPLOADS),
    (LyingServer, DP, "_round_of", forgets(round=0, begun=0), "went back to round"),
    (LyingServer, DP, "_recovered", forgets(left_out=()), TWO_ANSWERS),
    (LyingServer, ADMM, "MIN_LEFT_OUT", alone, "tells the upload of a single client"),
    (LyingServer, SUBSPACE, "noted", in_place, "was changed in place"),
    (Weather, DP, "HEAD_FIELDS", unwritten("left_out"), "the server has forgotten something"),
    (Weather, Case("fedavg-dp", False), "HEAD_FIELDS", unwritten("participants"), "the server has forgotten"),
    (Weather, SUBSPACE, "_work", no_reply_kept, "refuses what|counts 2 rounds, it uploaded in 1"),
]


@pytest.mark.parametrize(("kind", "case", "name", "broken", "told"), BROKEN)
def test_a_rule_that_is_broken_is_found(
    kind: type[Parties], case: Case, name: str, broken: Callable[[pytest.MonkeyPatch, str], None], told: str
) -> None:
    started(case), stocked(case)  # with the rule in force
    with pytest.MonkeyPatch.context() as patch:
        broken(patch, name)
        with pytest.raises(AssertionError, match=told):
            explored(kind, case, HUNT)
