"""FedRP as printed (Algorithm 1 of the paper): consensus ADMM on secret projections.

In round t = 1, 2, ... with A = A^{t-1} and zbar = zbar^{t-1} (both from the round before; A^0 and w^0 come from the
shared initial secret, and zbar^0 = A^0 w^0 needs no exchange):

    w_i <- argmin f_i(w) + y_i'(A w - zbar) + rho/2 ||A w - zbar||^2    (local SGD)
    y_i <- y_i + rho (A w_i - zbar)
    send z_i = A^t w_i with the new secret A^t; the server returns zbar^t = mean z_i

With `rotation` (the paper has none) a client sends Q^t z_i and turns back what it receives.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from fedrp.algorithms import servers
from fedrp.algorithms.base import EXCHANGE_SETTINGS, Algorithm
from fedrp.algorithms.client_side import ClientSide, ClientState, Local, Participant, Upload, stacked
from fedrp.algorithms.projection_bounds import kept_in_bounds, projected_releases
from fedrp.algorithms.shared import (
    GAUSSIAN_ENTRIES,
    averages_released,
    mean_delivered,
    papers_size,
    resolve_projection,
)
from fedrp.config.run import Resolved, RunConfig
from fedrp.errors import ConfigError
from fedrp.learning.objective import Objective, Rows, on_device
from fedrp.mechanisms.delivery import averages, by_default
from fedrp.privacy.events import Adjacency, Adversary, Event, NonPrivate, Release, Unsupported
from fedrp.projection.families import FAMILIES, norm_bound
from fedrp.records.promise import RECORD_SETTINGS, resolve_records
from fedrp.types import Vector

# SGD on the penalty is stable for lr * rho * ||A||^2 < 2; the default stays at a quarter of that.
STABLE = 2.0
DEFAULT_SHARE = 0.25


def _resolve(config: RunConfig, parameters: int) -> Resolved:
    family = "gaussian" if (config.dim or 0) * parameters <= GAUSSIAN_ENTRIES else "sign"
    found = Resolved.of(resolve_records(resolve_projection(config, parameters, family, "none")))
    found = _delivering(found, parameters)
    curvature = found.lr * norm_bound(found.projection, parameters, found.dim) ** 2
    safe = DEFAULT_SHARE * STABLE / curvature
    if not found.rho:
        return dataclasses.replace(found, rho=safe)
    if found.rho * curvature >= STABLE:
        raise ConfigError(
            f"rho={found.rho:g} is not stable with lr={found.lr:g} and dim={found.dim}: lr * rho * ||A||^2 = "
            f"{found.rho * curvature:.3g} must stay below {STABLE:g}; use rho={safe:.3g}"
        )
    return found


def _delivering(config: Resolved, parameters: int) -> Resolved:
    """The config with what is delivered.

    The mean of the final models and that of their projections, both of which the server then has, can tell a secret
    matrix with few rows of its own, as a start that is given does (`fedrp.algorithms.given_start`); and with it m
    linear functions of each client's final model, where uploads are not masked.
    """
    least = FAMILIES[config.projection].hiding_ratio
    told = parameters < least * config.dim and config.rotation != "haar" and not config.secure_aggregation
    if told and averages(config):
        raise ConfigError(
            f"deliver=average is not safe for projection='{config.projection}' with dim={config.dim}: the mean of the "
            f"models could tell the server the secret matrix, as n/m = {parameters / config.dim:.3g} is below {least}; "
            "use deliver=client, rotation='haar', projection='gaussian' or secure_aggregation=True"
        )
    return dataclasses.replace(config, deliver=config.deliver or ("client" if told else by_default(config)))


def _start(config: Resolved, initial: Vector) -> ClientState:
    dual = np.zeros(config.dim, np.float32)
    return ClientState(initial, np.concatenate([dual, initial]) if config.ball else dual)


def _round(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    rho = np.float32(local.config.rho)
    last = clients[0].history[-1]  # the round before: the same key and aggregate for everyone
    if last.key is None or local.key is None:
        raise ConfigError("FedRP needs round keys")
    projection = local.project(last.key)
    matrix = projection.on(local.device)
    start = stacked([client.state.model for client in clients])
    duals = stacked([client.state.carry[: local.config.dim] for client in clients])
    origins = [client.state.carry[local.config.dim :] for client in clients]  # w^0, where a ball is kept around it
    told = last.aggregate
    target = projection.forward(start[0]) if told is None else local.rotate(last.key).adjoint(told)
    dual, goal = on_device(duals, local.device), on_device(target, local.device)

    def gradient(weights: torch.Tensor, gradients: torch.Tensor, rows: Rows) -> torch.Tensor:
        miss = matrix.forward(weights) - goal
        return matrix.adjoint(dual[rows] + float(rho) * miss).add_(gradients)

    models = local.train(start, Objective(gradient, at_once=True))
    if local.config.bounded:
        pairs = zip(models, origins, strict=True)
        models = stacked([kept_in_bounds(local.config, model, origin) for model, origin in pairs])
    duals = duals + rho * (projection.forward(models) - target)
    sent = local.rotate(local.key).forward(local.project(local.key).forward(models))
    return [
        Upload(ClientState(model, np.concatenate([dual, origin]) if origin.size else dual), vector)
        for model, dual, origin, vector in zip(models, duals, origins, sent, strict=True)
    ]


def _finish(_local: Local, client: Participant) -> ClientState:
    return client.state


def _releases(config: Resolved) -> list[Release]:
    """Who learns what. The mean of final models, where it is delivered, tells the server more than projections do."""
    known: Event = NonPrivate("who knows the matrices can read m linear functions of every client's model a round")
    if config.secure_aggregation:
        known = Unsupported("who knows the matrices can read m linear functions of the mean model a round")
    together = Release(Adversary.SERVER_AND_CLIENT, Adjacency.RECORD_REPLACE, known)
    if averages(config):
        return [*mean_delivered(config), together]
    return [*projected_releases(config), together, *averages_released()]


FEDRP = Algorithm(
    summary="consensus ADMM on secret projections, as printed in the paper",
    settings=EXCHANGE_SETTINGS
    | RECORD_SETTINGS
    | {"rho", "projection", "rotation", "bits_down", "bytes", "sealing", "key_epoch"}
    | {"ball", "sensitivity", "norm_floor", "deliver"},
    delivers="client",
    resolve=_resolve,
    default_size=papers_size,
    client=ClientSide(_start, _round, _finish),
    server=servers.FEDRP,
    releases=_releases,
)
