"""The distinguishing game: runs of a mechanism as it is deployed, in two neighbouring worlds, seen by an adversary.

Clients and server are the real ones (`fedrp.protocol`), and an adversary sees what the bytes between them say. Only
local training is replaced: a canary's takes the worst step there is, the others' take none.

- Noise mechanisms: inside, the canary's gradient is long and points in a fixed direction; outside, it is zero.
- Shared noise for records: the canary is a record, whose gradient and clip are the real ones; outside, it is missing.
- Printed FedRP in a ball: inside, the canary moves straight away from the origin; outside, straight towards it.

What is broken on purpose (`Fault`) is broken in what runs, not in what is claimed.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.statements import releases_of
from fedrp.algorithms.table import ALGORITHMS, BASELINES, methods
from fedrp.auditing.carrier import BenchCarrier
from fedrp.auditing.lower_bounds import AuditBounds, FloatArray, audit_bounds
from fedrp.auditing.parties import CANARY, CURIOUS, CanaryTrainer, prepared, roster, site, stand_in
from fedrp.compression.coding import FULL, Coding
from fedrp.config.checks import require, require_choice
from fedrp.config.run import Resolved, RunConfig
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from fedrp.learning.initial import drawn_initial
from fedrp.learning.norm_floor import with_norm_floor
from fedrp.privacy.events import Adversary, Event
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.ledger import statements
from fedrp.projection.families import Projection, make_projection
from fedrp.projection.rotation import Rotation, make_rotation
from fedrp.protocol import server as server_side
from fedrp.protocol import wire
from fedrp.protocol.client_state import Client, Workbench
from fedrp.protocol.rounds import begin, rounds
from fedrp.protocol.server_state import hellos_matter, new_server
from fedrp.protocol.wire import Kind
from fedrp.rng import RunSeed
from fedrp.simulation.carrier import NoStore
from fedrp.types import Vector

_RUN = b"fedrp audit run."

# Whose claim is put to the test: the strongest adversary that has one.
_STRONGEST_FIRST = (Adversary.SERVER_AND_CLIENT, Adversary.SERVER, Adversary.CLIENTS, Adversary.MODEL_HOLDER)
_KNOW_THE_MATRIX = (Adversary.SERVER_AND_CLIENT, Adversary.CLIENTS, Adversary.MODEL_HOLDER)


class Fault(Enum):
    """What can be broken on purpose, to see whether the audit notices."""

    NONE = "none"
    NO_NOISE = "no-noise"
    HALF_NOISE = "half-noise"
    REUSED_KEY = "reused-key"  # all secrets are the same in every run


class Run(NamedTuple):
    """What was sent in one run, decoded from its bytes."""

    uploads: list[dict[int, Vector]]  # per round; where they are masked, what is under the masks
    aggregates: list[Vector]  # per round


@dataclass(frozen=True)
class AuditResult:
    """A claim and what the game proved against it."""

    claim: Guarantee
    bounds: AuditBounds
    trials: int  # runs in each of the two worlds
    fault: Fault

    @property
    def violated(self) -> bool:
        """Whether more was proved than was claimed."""
        return self.claim.epsilon is not None and self.bounds.epsilon > self.claim.epsilon

    @property
    def verdict(self) -> str:
        """The outcome in a few words."""
        if self.claim.epsilon is None:
            return "nothing is claimed"
        return "VIOLATED: more is leaked than claimed" if self.violated else "consistent with the claim"

    def as_json(self) -> dict[str, Any]:
        """The result as one JSON object."""
        family = self.bounds.family
        return {
            "claimed_epsilon": self.claim.epsilon,
            "delta": self.claim.delta,
            "adversary": self.claim.adversary.value,
            "adjacency": self.claim.adjacency.value,
            "lower_bound": self.bounds.epsilon,
            "lower_bound_any": self.bounds.any.epsilon,
            "lower_bound_family": family.epsilon if family else None,
            "confidence": self.bounds.confidence,
            "trials": self.trials,
            "broken": self.fault.value,
            "violated": self.violated,
            "verdict": self.verdict,
            "any": self.bounds.any._asdict(),
            "family": family._asdict() if family else None,
        }


def audit(
    config: RunConfig,
    trials: int,
    confidence: float = 0.95,
    fault: Fault = Fault.NONE,
    adversary: Adversary | None = None,
    parameters: int = 40,
    on_trial: Callable[[int], None] | None = None,
) -> AuditResult:
    """Play the game `trials` times in each world and compare what it proves with what the config claims.

    `adversary` is the one whose claim is tested, by default the strongest that has one (the server where none has).
    `parameters` is the size of the stand-in model. The seed of the config decides all randomness.
    """
    require_choice("algorithm", config.algorithm, methods())
    require(trials >= 4, "trials", trials, "a whole number of at least 4")
    require(0 < confidence < 1, "confidence", confidence, "a number between 0 and 1")
    require(parameters >= 1, "parameters", parameters, "a whole number of at least 1")
    if config.stored.clip_quantile is not None or config.participation != 1:
        raise ConfigError(
            "the audit is for full participation and a fixed clip: leave out participation, clip_quantile"
        )
    if config.algorithm in BASELINES:
        raise ConfigError(f"algorithm '{config.algorithm}' sends nothing: there is nothing to audit")
    claimed = _resolved(config, parameters)
    claim, event = _claim(claimed, adversary)
    mechanism = Mechanism(_broken(claimed, fault), parameters)
    scores: list[tuple[float, float]] = []
    for trial in range(trials):
        seed = RunSeed(config.seed).integer("audit", 0 if fault is Fault.REUSED_KEY else trial)
        scores.append(_scores(mechanism, claim.adversary, seed))
        if on_trial:
            on_trial(trial + 1)
    inside, outside = zip(*scores, strict=True)
    return AuditResult(claim, audit_bounds(inside, outside, claim.delta, confidence, event), trials, fault)


def _resolved(config: RunConfig, parameters: int) -> Resolved:
    given, factory = dataclasses.replace(config.stored, lr=1.0), functools.partial(stand_in, parameters)
    if given.algorithm == "fedrp" and given.rho is None:
        given = dataclasses.replace(given, rho=1e-9)  # the canary must not be held back
    return resolved(with_norm_floor(given, factory), parameters)


def _claim(config: Resolved, adversary: Adversary | None) -> tuple[Guarantee, Event]:
    releases = releases_of(config, [1])
    found = dict(zip(releases, statements(releases, config.dp_delta), strict=True))
    if adversary is None:
        proved = {statement.adversary for statement in found.values() if statement.epsilon}
        adversary = next((a for a in _STRONGEST_FIRST if a in proved), Adversary.SERVER)
    for release, statement in found.items():
        if release.adversary is adversary:
            return statement, release.event
    raise ConfigError(f"algorithm '{config.algorithm}' says nothing about {adversary.value} in this configuration")


def _broken(config: Resolved, fault: Fault) -> Resolved:
    """What runs in place of what was claimed."""
    if fault in (Fault.NONE, Fault.REUSED_KEY):
        return config
    if not (config.private or config.sums_records):
        raise ConfigError(f"broken={fault.value} is not valid: algorithm '{config.algorithm}' adds no noise here")
    share = {Fault.NO_NOISE: 0.0, Fault.HALF_NOISE: 0.5}[fault]
    return dataclasses.replace(config, noise_multiplier=share * config.noise_multiplier)


# --- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mechanism:
    """A resolved config, ready to be run many times."""

    config: Resolved
    parameters: int

    def run(self, inside: bool, seed: int) -> Run:
        """One run with the secrets of `seed`."""
        # Who is given a round key can take the rotation off, which keeps norms and noise alike.
        deliver = "client" if self.config.deliver else ""  # the rounds are audited, not what comes after them
        config = dataclasses.replace(self.config, rotation="none" if self.config.rotation else "", deliver=deliver)
        bench = self._bench(config, inside, seed)
        server = new_server(config, _RUN, self.parameters)
        sites = [site(seed, client, inside and client == CANARY, self.parameters) for client in range(config.clients)]
        states = [Client(client) for client in range(config.clients)]
        carrier, store = BenchCarrier(config.clients, 1, bench, sites, states, hellos_matter(server)), NoStore()
        # With the same secrets, what is under the masks is what would be sent without them.
        bare = dataclasses.replace(config, secure_aggregation=False, bits=FULL)
        run = Run(Mechanism(bare, self.parameters).run(inside, seed).uploads if config.secure_aggregation else [], [])
        server, up = begin(server, carrier, store, config.clients), server.pipeline.upload_coding(bench.upload_size)
        for closed in rounds(server, carrier, store, lambda _server: np.zeros(config.clients)):
            if not config.secure_aggregation:
                heard = carrier.heard
                run.uploads.append({client: _numbers(reply, Kind.UPLOAD, up) for client, reply in heard.items()})
            news = server_side.finish(closed.server, (CANARY,))[CANARY]
            made = _numbers(news, Kind.AGGREGATE, server.aggregate_coding(closed.server.round), closed.server.round)
            run.aggregates.append(server.pipeline.update_of(made))
        return run

    def _bench(self, config: Resolved, inside: bool, seed: int) -> Workbench:
        template, laws, public, model = prepared(self.parameters)

        @functools.lru_cache(maxsize=2)
        def project(key: SecretKey) -> Projection:
            return make_projection(config.projection, key, self.parameters, config.dim)

        def rotate(key: SecretKey) -> Rotation:
            return make_rotation(config.rotation, key, config.dim)

        def initial(key: SecretKey | None) -> Vector:
            return public if key is None else drawn_initial(template, laws, key)

        trainer = CanaryTrainer(model, inside, config.algorithm == "fedrp")
        return Workbench(config, _RUN, roster(seed, config.clients), trainer, project, rotate, initial)


def _numbers(packet: bytes, kind: Kind, coding: Coding, round_: int | None = None) -> Vector:
    messages = [m for m in wire.messages_of(wire.decode(packet), kind) if round_ in (None, m.round)]
    return wire.numbers(messages[-1], coding, _RUN)


# --- what an adversary makes of it ---------------------------------------------------------------------------------


def _scores(mechanism: Mechanism, adversary: Adversary, seed: int) -> tuple[float, float]:
    """Scores of a run inside and a run outside with the same secrets; every trial has secrets of its own."""
    config = mechanism.config
    runs = [mechanism.run(inside, seed) for inside in (True, False)]
    views = [_seen(config, adversary, run) for run in runs]
    if not ALGORITHMS[config.algorithm].server.round_keys or adversary in _KNOW_THE_MATRIX:
        # With the same secrets the noise is the same, so the difference of the two runs is what the canary sends. Who
        # knows the matrix knows that, and the likelihood ratio is a function of the part of the view along it.
        patterns = [views[0] - views[1]] * 2
    elif config.algorithm == "fedrp" and adversary is Adversary.SERVER and _sees_several(config):
        # All vectors are made with one matrix: along another client's, the canary's is longer or shorter.
        patterns = [_uploads_of(CURIOUS, run) for run in runs]
        views = [view - pattern for view, pattern in zip(views, patterns, strict=True)]
    else:
        patterns = views  # only lengths tell anything
    inside, outside = (float(np.vdot(view, pattern)) for view, pattern in zip(views, patterns, strict=True))
    return inside, outside


def _seen(config: Resolved, adversary: Adversary, run: Run) -> FloatArray:
    """What the adversary holds that depends on the canary, a row per round."""
    if _sees_uploads(config, adversary):
        return _uploads_of(CANARY, run)
    totals = _own_parts(config, run.aggregates) * config.expected_participants
    if config.clients > 1 and adversary in (Adversary.CLIENTS, Adversary.SERVER_AND_CLIENT):
        totals = totals - _uploads_of(CURIOUS, run)  # a curious client knows what it sent itself
    return totals


def _own_parts(config: Resolved, aggregates: list[Vector]) -> FloatArray:
    """What each round added to its aggregate; the rest follows from the aggregates before."""
    parts = np.stack(aggregates).astype(np.float64)
    for round_ in range(len(aggregates)):
        past = aggregates[max(0, round_ - 2) : round_][::-1]
        parts[round_] -= ALGORITHMS[config.algorithm].server.aggregate(config, past, np.zeros_like(aggregates[0]), 1.0)
    return parts


def _sees_uploads(config: Resolved, adversary: Adversary) -> bool:
    """Whether single uploads reach the adversary unmasked."""
    outsiders = (Adversary.CLIENTS, Adversary.MODEL_HOLDER)
    return adversary not in outsiders and not config.secure_aggregation


def _sees_several(config: Resolved) -> bool:
    """Whether the server has the vectors of several clients under one matrix."""
    return config.clients > 1 and not config.secure_aggregation


def _uploads_of(client: int, run: Run) -> FloatArray:
    return np.stack([uploads[client] for uploads in run.uploads]).astype(np.float64)
