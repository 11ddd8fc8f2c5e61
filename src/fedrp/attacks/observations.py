"""From recorded bytes to equations: what an adversary knows about the step that a client's images made.

An `Observation` says: projection (update of the model at `model`) = `update`, for one client or for the mean of
several. Where the keys are missing, the adversary can only guess them: model and projection are then drawn from random
keys.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.algorithms.client_side import Local, Participant, Step
from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.servers import wire_tag
from fedrp.algorithms.table import ALGORITHMS
from fedrp.attacks.view import View
from fedrp.config.checks import require_choice
from fedrp.crypto.epochs import covering
from fedrp.crypto.schedule import round_key
from fedrp.crypto.sealing import Place
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.sizes import KEY_BYTES
from fedrp.errors import ConfigError, ProtocolError
from fedrp.learning.initial import public_initial, secret_initial
from fedrp.learning.layout import built, layout_of
from fedrp.learning.objective import Objective, Stack
from fedrp.projection.families import Projection, make_projection
from fedrp.projection.rotation import Rotation, make_rotation
from fedrp.protocol.wire import Kind
from fedrp.rng import RunSeed
from fedrp.types import Vector

Update = npt.NDArray[np.float64]
Keys = Mapping[int, SecretKey]


class Observation(NamedTuple):
    """An equation about the images of some clients."""

    clients: tuple[int, ...]  # whose mean update it is
    update: Update  # (n,), or (m,) behind a projection
    model: Vector  # (n,) where the step began
    projection: Projection | None  # None: the update is seen as it is
    guessed: bool  # model and projection come from random keys


def find_observations(view: View, guess: RunSeed, round_: int = 1) -> list[Observation]:
    """One observation per client whose upload is seen; for a client that sees aggregates only, one about all others.

    In printed FedRP every client keeps its own model, which the adversary does not have. After round 1 the first model,
    common to all, stands in for it: the observation is then the sum of all steps so far, as if taken there.

    Raises:
        ConfigError: the algorithm sends nothing that this attack could use, or the round's aggregate was not recorded.
    """
    config = view.public.config
    require_choice("algorithm to attack", config.algorithm, UPDATES)
    keys = opened_keys(view) if view.insider else _guessed_keys(view, guess)
    model = _model(view, keys, round_)
    secret = ALGORITHMS[config.algorithm].server.round_keys
    projection = _project(view, model.size)(keys[round_]) if secret else None
    difference = UPDATES[config.algorithm]
    vectors = _vectors(view, round_)
    if secret:
        rotation = _rotate(view)(keys[round_])
        vectors = {clients: _turned_back(rotation, vector) for clients, vector in vectors.items()}
    return [
        Observation(clients, difference(vector, model, projection), model, projection, secret and view.insider is None)
        for clients, vector in vectors.items()
    ]


def opened_keys(view: View) -> Keys:
    """The round keys that an insider's own envelopes hold."""
    insider = view.insider
    if insider is None:
        return {}
    hellos = [message.payload.tobytes() for client, message in view.messages(Kind.HELLO) if client == insider.client]
    secrets = {}
    for client, message in view.messages(Kind.SEALED):
        if client == insider.client:
            place = Place(
                *(view.public.run, message.round, message.sender, client, wire_tag(view.public.config)),
                *(hellos[0], view.public.config.sealing),  # it said hello with the digest of its roster
            )
            secrets[message.round] = insider.identity.open(message.payload.tobytes(), place)
    first_of = {r: covering(secrets, r) for r in range(view.public.config.rounds + 1)}
    return {r: round_key(secrets[0], first, secrets[first], r) for r, first in first_of.items() if first is not None}


def angles(view: View, round_: int = 1) -> npt.NDArray[np.float64]:
    """Cosines between the clients' vectors of a round: with lengths, all that a secret rotation leaves."""
    vectors = np.stack(list(uploads(view, round_).values()))
    if ALGORITHMS[view.public.config.algorithm].delivers == "client":
        vectors -= vectors.mean(axis=0)  # models are uploaded, not steps: all clients' models point the same way
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors @ vectors.T


def uploads(view: View, round_: int) -> dict[int, Update]:
    """The vectors of a round that are seen on their way to the server, by client."""
    return {
        message.sender: message.payload.astype(np.float64)
        for _, message in view.messages(Kind.UPLOAD)
        if message.round == round_
    }


def _vectors(view: View, round_: int) -> dict[tuple[int, ...], Update]:
    """Vectors as uploaded, by the clients that made them."""
    vectors = uploads(view, round_)
    insider = view.insider.client if view.insider else None
    if view.sees_all:
        return {(client,): vector for client, vector in vectors.items() if client != insider}
    aggregates = _aggregates(view)
    if round_ not in aggregates or insider is None:
        raise ConfigError(f"the aggregate of round {round_} was not recorded: record one more round")
    config = view.public.config
    (count,) = {message.weight for _, message in view.messages(Kind.ROUND) if message.round == round_}
    if count < 2:
        raise ConfigError("clients=1: there is no other client to attack")
    total = aggregates[round_].astype(np.float64) * count
    past = [aggregates[earlier] for earlier in (round_ - 1, round_ - 2) if earlier in aggregates]
    carried = ALGORITHMS[config.algorithm].server.aggregate(config, past, np.zeros_like(aggregates[round_]), 1.0)
    total -= carried.astype(np.float64) * count
    others = tuple(client for client in range(config.clients) if client != insider)
    return {others: (total - vectors[insider]) / (count - 1)}


def _aggregates(view: View) -> dict[int, Vector]:
    messages = [message for _, message in view.messages(Kind.AGGREGATE)]
    return {message.round: message.payload.astype(np.float32) for message in messages}


def _guessed_keys(view: View, guess: RunSeed) -> Keys:
    if not ALGORITHMS[view.public.config.algorithm].server.round_keys:
        return {}
    rounds = range(view.public.config.rounds + 1)
    return {round_: SecretKey(guess.generator("guessed-key", round_).bytes(KEY_BYTES)) for round_ in rounds}


def _project(view: View, parameters: int) -> Callable[[SecretKey], Projection]:
    config = view.public.config

    def project(key: SecretKey) -> Projection:
        return make_projection(config.projection, key, parameters, config.dim)

    return project


def _rotate(view: View) -> Callable[[SecretKey], Rotation]:
    config = view.public.config

    def rotate(key: SecretKey) -> Rotation:
        return make_rotation(config.rotation, key, config.dim)

    return rotate


def _turned_back(rotation: Rotation, vector: Update) -> Update:
    """An upload as it was before the rotation; what follows it, the vote of an adaptive clip, is not turned."""
    turned = rotation.adjoint(vector[: rotation.size].astype(np.float32))
    return np.concatenate([turned.astype(np.float64), vector[rotation.size :]])


def _model(view: View, keys: Keys, round_: int) -> Vector:
    """The common model that a round starts from, made as a client makes it: from keys and aggregates."""
    public = view.public
    algorithm = ALGORITHMS[public.config.algorithm]
    seed = RunSeed(public.config.seed)
    initial = secret_initial(public.model, keys[0]) if keys else public_initial(public.model, seed)
    pipeline = Pipeline.of(public.config, algorithm.server)
    updates = {past: pipeline.update_of(aggregate) for past, aggregate in _aggregates(view).items()}
    history = [Step(keys.get(past), updates.get(past), past) for past in range(round_)]
    size = layout_of(built(public.model)).size
    local = Local(public.config, None, _project(view, size), _rotate(view), _no_training)
    start = Participant(algorithm.client.init(public.config, initial), history)
    return algorithm.client.finish(local, start).model


def _no_training(_start: Stack, _objective: Objective) -> Stack:
    raise ProtocolError("an adversary does not train")


def _model_difference(vector: Update, model: Vector, _projection: Projection | None) -> Update:
    return vector - model


def _projected_difference(vector: Update, model: Vector, projection: Projection | None) -> Update:
    return vector - projection.forward(model) if projection else vector


def _update_itself(vector: Update, model: Vector, projection: Projection | None) -> Update:
    return vector[: projection.rows if projection else model.size]  # without the vote of an adaptive clip


# How an upload becomes the update that training made, for each algorithm that can be attacked.
UPDATES: dict[str, Callable[[Update, Vector, Projection | None], Update]] = {
    "fedavg": _model_difference,
    "fedavg-dp": _update_itself,
    "fedrp": _projected_difference,
    "fedrp-subspace": _update_itself,
}
