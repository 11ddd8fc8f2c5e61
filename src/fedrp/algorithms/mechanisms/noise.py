"""Clip an update and add this client's share of the noise, on a grid that does not depend on it.

How much noise, and what it is worth, is in `fedrp.algorithms.client_dp`.
"""

import numpy as np

from fedrp.algorithms.client_dp import current_clip, grid_step, noise_shares
from fedrp.algorithms.client_side import Local, Participant
from fedrp.crypto.secret import SecretKey
from fedrp.privacy.sensitivity import clip_to_norm
from fedrp.types import Precise, Vector

_CHUNK = 1 << 20


def privatised(local: Local, client: Participant, update: Vector) -> Vector | Precise:
    """A client's update, clipped, with its noise, and with its vote on C where that adapts.

    Guarantees: before noise the norm is at most C; the noise is a function of the client's own secret of this round;
    the noises of the quorum suffice for the configured multiplier; which numbers can be sent does not depend on the
    update.
    """
    config = local.config
    clip = current_clip(config, client.previous)
    share, *vote_share = (clip * share for share in noise_shares(config, local.participants))
    step = grid_step(config, clip) if share else None  # without noise there is nothing to hide
    sent = _noised(clip_to_norm(update, clip), share, step, client.noise.derive("update"))
    if vote_share:
        below = float(np.linalg.norm(update) <= clip)
        vote = np.array([clip * (below - 0.5)])
        sent = np.append(sent, _noised(vote, vote_share[0], step, client.noise.derive("vote")))
    return sent if config.secure_aggregation else sent.astype(np.float32)


def _noised(values: Vector | Precise, deviation: float, step: float | None, key: SecretKey) -> Precise:
    """The values with noise, rounded to a grid that does not depend on them.

    Floating point has holes: a float32 times a deviation reaches only some float32 numbers, and a value that is added
    moves them, so that one number could tell whether anything was added (docs/privacy.md, section 5).
    """
    result = values.astype(np.float64)
    if deviation == 0:
        return result
    for start in range(0, result.size, _CHUNK):  # the intermediate values are larger: n may be 10^8
        part = result[start : start + _CHUNK]
        part += deviation * key.fine_normals(part.size, start)
        if step is not None:
            part[:] = np.rint(part / step) * step
    return result
