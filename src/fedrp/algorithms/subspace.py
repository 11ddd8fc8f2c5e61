"""FedRP-Subspace: train inside the secret subspace that the clients share. The recommended mode.

Every client holds the same w. In round t, with the round's secret A:

    theta_i <- argmin f_i(w + A' theta) + mu/2 (n/m) ||theta||^2      (local SGD with momentum on theta, gradient A g)
    send z_i = Q theta_i with the round's secret rotation Q; the server returns zbar = mean z_i
    v <- beta v + A' Q' zbar;  w <- w + v                             (every client alike, so consensus is exact)

mu is `proximal` (||A' theta||^2 is about (n/m) ||theta||^2), beta is `server_momentum`. A client that missed rounds
applies the missed (key, zbar) pairs in order. With privacy asked for, z_i is clipped and noised in its m dimensions
(`fedrp.mechanisms`): the rotation keeps norms, and noise has no direction.
"""

import dataclasses
import functools
import hashlib
import hmac
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fedrp.algorithms import servers
from fedrp.algorithms.base import AVERAGING_SETTINGS, Algorithm
from fedrp.algorithms.client_dp import PRIVACY_SETTINGS, releases, resolve_privacy
from fedrp.algorithms.client_side import NOTHING, ClientSide, ClientState, Local, Participant, Upload, stacked
from fedrp.algorithms.shared import averages_released, papers_size, resolve_projection
from fedrp.compression.coding import FULL, Size
from fedrp.config.run import Resolved, RunConfig
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError, ProtocolError
from fedrp.learning.objective import Objective, Rows, Stack, on_device
from fedrp.privacy.events import Adjacency, Adversary, Event, NonPrivate, Release, Unsupported
from fedrp.projection.families import FAMILIES, Projection, make_projection
from fedrp.records.defaults import SERVER_MOMENTUM
from fedrp.records.promise import BOTH_SETTINGS, resolve_records, resolve_sums, step_of
from fedrp.types import FINGERPRINT_BYTES, Precise, Vector

# A step of length s in theta moves w by up to ||A|| s, mostly in directions that have nothing to do with the gradient.
# Steps may be this many times as long as they would be without a projection, and a round with many steps may move w as
# far as one with this many; see docs/algorithms.md.
_LONGEST_STEP = 8.0
_FREE_STEPS = 15

# Many clients differ more than few, and each has less data: there the mean of a round is worth carrying on. With few
# clients and many local steps it overshoots, and where ||A|| is large (sqrt(n/m)) it carries on mostly what has nothing
# to do with the gradient (docs/results.md).
_CROWD = 50
_CROWD_MOMENTUM = 0.5

_ONLY_WITH_NOISE = {"clip": (None,), "clip_quantile": (None,), "dp_noise": (None, "shared")}

# One bit for each of as many numbers as a sixteenth of the model has parameters, but at least 512 bytes of them.
_SHARE = 16
_FEWEST = 4064
_BITS_OF_ALL = 8.0  # where all parameters are fewer than that

# Up to here a uniform rotation, of cost m^2, takes less than a second; see docs/performance.md.
_HAAR_SIZE = 20_000

_SKETCH_NUMBERS = 4
_SKETCH_GRID = 2.0**-7


def _resolve(config: RunConfig, parameters: int) -> Resolved:
    config = resolve_projection(config, parameters, "sign", _default_rotation(config))
    if config.server_momentum is None:
        config = dataclasses.replace(config, server_momentum=_default_momentum(config, parameters))
    config = resolve_records(config, summable=True)
    if config.sums_records:
        _require_not_turned(config)
        return resolve_sums(config)
    if config.private:
        return resolve_privacy(config)
    if config.record_private:
        return Resolved.of(config)
    idle = next((name for name, none in _ONLY_WITH_NOISE.items() if getattr(config, name) not in none), None)
    if idle is not None:
        raise ConfigError(
            f"{idle}={getattr(config, idle)} does nothing without noise: add dp_epsilon=..., or noise_multiplier=0 "
            "to clip only"
        )
    return Resolved.of(config)


def _default_rotation(config: RunConfig) -> str:
    if config.sums_records:
        return "none"
    return "haar" if (config.dim or 0) <= _HAAR_SIZE else "hadamard"


def _require_not_turned(config: RunConfig) -> None:
    """Refuse a rotation where sums must stay exact until noise is added: one record may change how all is rounded."""
    if config.rotation != "none":
        raise ConfigError(
            f"rotation={config.rotation} rounds what one record must move by at most clip, so it does not go with "
            "dp_unit=record and dp_noise=shared: leave it out, or leave out dp_noise"
        )


def _default_size(config: RunConfig, parameters: int) -> Size:
    """What is sent if nothing is said: one bit a number, as few numbers as the rotation of is proved to hide.

    With noise the paper's number: noise is the louder the more numbers carry it. Weighted sums under masks are exact.
    """
    if config.private or config.sums_records or (config.secure_aggregation and config.weighting != "uniform"):
        return papers_size(config, parameters)
    numbers = min(parameters, _HAAR_SIZE, max(_FEWEST, parameters // _SHARE))
    bits = _BITS_OF_ALL if numbers == parameters else 1.0
    return Size(numbers, bits, bits)


def _default_momentum(config: RunConfig, parameters: int) -> float:
    if config.record_private:
        return SERVER_MOMENTUM
    many, wide = config.expected_participants >= _CROWD, parameters <= _LONGEST_STEP**2 * (config.dim or 0)
    return _CROWD_MOMENTUM if many and wide else 0.0


def step_size(lr: float, momentum: float, norm_bound: float, steps: int) -> float:
    """The learning rate on theta: `lr`, or less where ||A|| is large or a client takes many steps in a round.

    So both a step and a round move w by a bounded distance, whatever m is and however much data a client has.
    """
    share = min(1.0, _path(_FREE_STEPS, momentum) / _path(steps, momentum))
    return lr * min(1.0, share * _LONGEST_STEP / norm_bound)


def _step_size(config: Resolved, projection: Projection) -> Callable[[int], float]:
    """The learning rate on theta in a round of so many steps."""
    long = projection.norm_bound * coarseness(config.bits_down)
    return functools.partial(step_size, config.lr, config.momentum, long)


def coarseness(bits: float) -> float:
    """By how much shorter the longest steps are where the server sends its mean with so many bits a number: 1.6 for 1.

    The code adds an error of 0.38 of the mean's square for 1 bit; others add 1.15 times what is possible at best,
    1 / (4^b - 1). Where steps are as long as they may be, shorter ones then learn more (docs/results.md).
    """
    error = 1.15 / (4**bits - 1) if bits >= 1 else 1.38 / bits - 1
    return float((1 + error) ** 1.5)


def _path(steps: int, momentum: float) -> float:
    """How far SGD with momentum comes with gradients that are all the same, of length 1, and learning rate 1."""
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def _start(config: Resolved, initial: Vector) -> ClientState:
    return ClientState(initial, np.zeros_like(initial) if config.server_momentum else NOTHING)


def _consensus(local: Local, clients: Sequence[Participant]) -> list[ClientState]:
    """Each client's state with the aggregates that it has not yet applied; computed once for clients that agree."""
    known: dict[tuple[int, int], ClientState] = {}
    states = []
    for client in clients:
        group = (id(client.state.model), len(client.history))
        if group not in known:
            known[group] = _finish(local, client)
        states.append(known[group])
    return states


def _finish(local: Local, client: Participant) -> ClientState:
    model, velocity = client.state
    beta = np.float32(local.config.server_momentum)
    for key, aggregate, round_ in client.history:
        if aggregate is not None and key is not None:
            projection = local.project(key)
            step = projection.adjoint(local.rotate(key).adjoint(aggregate))
            if local.config.sums_records:
                step = np.float32(step_of(local.config, _step_size(local.config, projection)(1), round_)) * step
            if beta:
                velocity = step = beta * velocity + step
            model = model + step
    return ClientState(model, velocity)


def _round(local: Local, clients: Sequence[Participant]) -> list[Upload]:
    config, key = local.config, local.key
    if key is None:
        raise ProtocolError("FedRP-Subspace needs round keys")
    projection = local.project(key)
    matrix = projection.on(local.device)
    states = _consensus(local, clients)
    base = on_device(stacked([state.model for state in states]), local.device)
    pull = config.proximal * projection.columns / projection.rows

    def weights(theta: torch.Tensor, rows: Rows) -> torch.Tensor:
        return matrix.adjoint(theta).add_(base[rows])

    def gradient(theta: torch.Tensor, gradients: torch.Tensor, _rows: Rows) -> torch.Tensor:
        return gradients + pull * theta

    start = np.zeros((len(clients), config.dim), np.float32)
    rate = _step_size(config, projection)
    objective = Objective(gradient, weights, rate, at_once=True, project=matrix.forward)
    marks = {id(state): fingerprint(config.projection, key, state.model) for state in states}
    if config.sums_records:  # learning rate and momentum come with the aggregate
        sent: Stack | Precise = local.sums(start, objective)
    else:
        sent = local.rotate(key).forward(local.train(start, objective))
    return [Upload(state, vector, marks[id(state)]) for state, vector in zip(states, sent, strict=True)]


def fingerprint(family: str, key: SecretKey, model: Vector) -> bytes:
    """A keyed mark of a model, for the server to compare and nothing else.

    `gaussian` sums are not bit-identical on all machines, so there (and in families alike) the mark is of four numbers
    on a coarse, secretly shifted grid: equal for copies that differ by rounding (but for about one in a thousand),
    different for others.
    """
    secret = key.derive("fingerprint")
    if not FAMILIES[family].same_bits:
        sketch = make_projection("sign", secret, model.size, min(_SKETCH_NUMBERS, model.size)).forward(model)
        shift = secret.derive("shift").keystream(4 * sketch.size).view("<u4") * 2.0**-32
        steps = np.clip(sketch.astype(np.float64) / _SKETCH_GRID, -(2.0**62), 2.0**62)
        data = np.floor(steps + shift).astype("<i8").tobytes()
    else:
        data = model.astype("<f4", copy=False).tobytes()
    # A key of its own: `secret` is one for HKDF, which is HMAC inside, and no key serves two purposes.
    return hmac.new(secret.derive("mac").reveal(), data, hashlib.sha256).digest()[:FINGERPRINT_BYTES]


_KEYS = ("the round keys are secret", "HKDF and AES are as good as ideal")


def _seen_by_the_server(config: Resolved) -> Event:
    """What uploads without noise tell who does not know the round keys; docs/privacy-proofs.md, "Rotation"."""
    learnt = "the inner products of the clients' steps of a round"
    if config.secure_aggregation and config.bits == FULL:
        learnt = "the norm of the mean step of a round"
    elif config.secure_aggregation:  # rounding errors depend on single steps, if by their inner products only
        learnt = f"the norm of the mean step, the mean of the steps' norms and no more than {learnt}"
    if config.rotation == "haar":
        more = "nothing else"
    elif config.rotation == "none" and config.projection == "gaussian":
        more = "as local training is SGD with momentum, nothing else"
    elif config.rotation == "none":
        more = f"what else the uploads tell under a '{config.projection}' matrix without a rotation is not known"
    else:
        more = f"that a '{config.rotation}' rotation, which is not a uniformly random one, hides all else is not proved"
    return Unsupported(f"the server learns {learnt}, and {more}; no differential privacy is claimed")


def _releases(config: Resolved) -> list[Release]:
    if config.private:
        return releases(config)
    known: Event = NonPrivate("who knows the matrix can read each client's step in the subspace")
    if config.secure_aggregation:
        known = Unsupported("who knows the matrix can read the mean step, which is released without noise")
    return [
        Release(Adversary.SERVER, Adjacency.CLIENT_ADD_REMOVE, _seen_by_the_server(config), _KEYS),
        Release(Adversary.SERVER_AND_CLIENT, Adjacency.CLIENT_ADD_REMOVE, known),
        *averages_released(),
    ]


SUBSPACE = Algorithm(
    summary="train inside the shared secret subspace: exact consensus, the recommended mode",
    settings=AVERAGING_SETTINGS
    | PRIVACY_SETTINGS
    | BOTH_SETTINGS
    | {"projection", "rotation", "bits_down", "bytes", "sealing", "key_epoch", "proximal"},
    delivers="consensus",
    resolve=_resolve,
    default_size=_default_size,
    client=ClientSide(_start, _round, _finish),
    server=servers.SUBSPACE,  # clients carry momentum themselves, in n dimensions
    releases=_releases,
    lr_factor=2.0,
)
