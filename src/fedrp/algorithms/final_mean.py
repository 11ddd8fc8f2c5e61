"""What clients do after the last round, where models are averaged: send the model, get the mean."""

from collections.abc import Sequence

from fedrp.algorithms.client_side import ClientSide, ClientState, Local, Participant, Upload
from fedrp.config.run import Resolved
from fedrp.types import Vector


def _start(_config: Resolved, initial: Vector) -> ClientState:
    return ClientState(initial)


def _round(_local: Local, clients: Sequence[Participant]) -> list[Upload]:
    return [Upload(client.state, client.state.model) for client in clients]


def _finish(_local: Local, client: Participant) -> ClientState:
    latest = client.history[-1].aggregate
    return client.state if latest is None else ClientState(latest)


def final_mean(rounds: ClientSide | None) -> ClientSide:
    """The client's side of the exchange of models after rounds; None where nothing is sent in these."""
    return ClientSide(rounds.init if rounds else _start, _round, _finish)
