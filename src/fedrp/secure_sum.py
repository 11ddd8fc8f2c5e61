"""Secure aggregation, the public part: who is summed, and numbers as integers whose sum cannot overflow.

**The scheme.** The clients P of a cohort take part in a round. Each has a mask key of its own for the run, signed by
its identity. Any two of them, i < j, share a key that nobody else has. It gives a mask, uniform modulo 2^32, which i
adds to its upload and j subtracts. If all uploads come, the masks cancel in the sum: one exchange. If not, the server
names the clients E that are left out, and each of the others, S = P - E, answers with the sum of its masks towards E,
itself masked by fresh pairwise masks within S: one recovery exchange.

**The rules that every client keeps**, whatever the server says, in memory that outlives its process:

1. One list P per round, of pinned clients with pinned mask keys, itself among them. Asked again, it sends the same
   bytes. Masks depend on P, on the round key, and on a *transcript*: a digest of everything but its data and its own
   randomness that the upload is made from. What that is depends on what an algorithm remembers (`Algorithm.memory`):
   - "aggregate" (FedAvg, FedAvg-DP): the aggregate that training starts from;
   - "history" (FedRP-Subspace): every aggregate and every round key since the set-up, in order;
   - "own" (FedADMM, printed FedRP; they keep dual variables): the rounds that the client itself took part in, and
     what it applied in each.
   It begins with a digest of the settings of the run: with a learning rate of zero a client's upload is known.
   A client never vouches for a round that it did not apply. So whoever is summed has been brought to the same state by
   the same messages: nobody can be prepared differently from the others. With "own", a client that missed a round has
   another transcript than the rest and is not summed with them again.
2. One set E per round. Asked again, it sends the same bytes. The masks of the recovery depend on E.
3. |E| >= 2, |S| >= 3, |S| > |P| / 2, and S is not below the quorum of the configured cohort.

**What a server can learn of one round**, even one that lies and keeps late uploads: sums over disjoint sets of at least
two clients (three for S). So it never has two sums that differ by one client.

*Proof.* What it sees depends on the data only through combinations sum a_i y_i + sum b_i r_i of uploads y_i and
recovery answers r_i (coefficients modulo 2^32) in which every mask cancels; all else is uniform. Take those who were
given one list P. (i) The masks of a recovery join all pairs of its S, so the b_i are one number b, which is 0 unless
all of S answered for the same E. Each client answers for one E, and two sets of more than half of P meet: at most one E
has b != 0. (ii) A mask within S, or within E, forces equal a_i at its two ends: a on S, a' on E. One between S and E
forces a + b = a'. That leaves sum_S, and sum_E if all of E did upload. (iii) Who was given another list, or has another
transcript, shares no mask with these, as if it had not uploaded. Each client has one list and one transcript, so sets
of different ones are disjoint. QED

Why each rule: without the transcript a server could bring all clients but one to an upload that it knows, and would
find the upload of the one in the sum. With |E| = 1 the late upload of the one left out would be exposed, so where one
is missing, one more is left out. Without masks within S, a server could tell the survivors in pairs "your partner and k
are missing"; the answers would add up to the masks of k alone. With |S| <= |P| / 2, two recoveries could single out who
is in neither.

**What a server can still do.** Choose who takes part, send all of them the same false aggregate (within what honest
clients can produce, `Algorithm.reach`), and stop the run. With c clients on its side it learns these sums less the
vectors of the c, so |E| >= c + 2 and |S| > (|P| + c) / 2 would be needed for the same statement. Vectors of different
rounds are different vectors: what their sums tell together is a matter of differential privacy. A client that is set
back to an older state breaks rules 1 and 2: a site that has lost its state sits the run out.

**Numbers.** A client's number, cut off at +-bound, times its weight, is rounded to a multiple of the grid step

    step = 2^4 bound * W / (2^31 - 1 - |P|),    W the sum of the weights,

so no honest sum takes more than 1/16 of the range of 32 bits. Words that no client encoded (a client that sends
garbage, masks that do not cancel) spread over all of it, and are found: d numbers all fall into what is honest with
probability 2^-4d. (With noise the step follows from the noise, and garbage is far longer than an honest sum.) The mean
is off by at most |S| step / (2 W_S), W_S the weight of S: 2.4e-5 for 100 clients of equal weight and bound 64.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.aggregate import least_uploads
from fedrp.config import DEFAULT_QUORUM, RunConfig
from fedrp.errors import ProtocolError, QuorumError, WireError

Vector = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

MIN_SUMMED = 3  # with two, each would find the other's vector in the average that it gets
MIN_LEFT_OUT = 2  # see above: two known sums must not differ by one client
HEADROOM = 16  # honest sums take 1/16 of the range of 32 bits; see above
_CHUNK = 1 << 20


class Call(NamedTuple):
    """Who takes part in a round, and with which weight: every participant is told the same."""

    clients: tuple[int, ...]
    weights: tuple[int, ...]

    def payload(self) -> Words:
        """As it is sent."""
        return np.array([*self.clients, *self.weights], np.uint32)

    @classmethod
    def of(cls, payload: npt.NDArray[np.generic]) -> "Call":
        """The inverse of `payload`."""
        numbers = clients_of(payload)
        half = len(numbers) // 2
        return cls(numbers[:half], numbers[half:])

    def weight_of(self, clients: Iterable[int]) -> int:
        """The total weight of some participants."""
        chosen = set(clients)
        return sum(weight for client, weight in zip(self.clients, self.weights, strict=True) if client in chosen)


class Scale(NamedTuple):
    """How the numbers of an upload become whole ones."""

    bound: float  # larger numbers are cut off
    step: float  # the distance between two numbers that can be sent


def least_participants(config: RunConfig) -> int:
    """How many clients a round is opened with, at least: where coins choose fewer, some are added."""
    return MIN_SUMMED if config.secure_aggregation else least_uploads(config.trimmed_share)


def needed(config: RunConfig, participants: int) -> int:
    """How many uploads a round must have, at least: of a cohort that is smaller than configured, no fewer."""
    cohort = participants if config.sampling == "poisson" else config.expected_participants
    quorum = max(least_uploads(config.trimmed_share), math.ceil(cohort * (config.quorum or DEFAULT_QUORUM)))
    return max(quorum, MIN_SUMMED, cohort // 2 + 1) if config.secure_aggregation else quorum


# --- what a client checks --------------------------------------------------------------------------------------------


def require_call(config: RunConfig, call: Call, client: int, weight: int) -> None:
    """Refuse a list of participants that could expose this client."""
    clients, weights = call
    if len(clients) != len(weights) or not _increasing(clients) or not clients or clients[-1] >= config.clients:
        raise ProtocolError("the list of participants is not valid: expected increasing numbers of silos, and weights")
    if client not in clients:
        raise ProtocolError(f"client {client} is not in the list of participants that it was sent")
    if len(clients) < MIN_SUMMED:
        raise ProtocolError(f"{len(clients)} participants: secure aggregation needs at least {MIN_SUMMED}")
    if config.sampling == "fixed":
        least, most = needed(config, config.expected_participants), config.expected_participants
        if not least <= len(clients) <= most:
            raise ProtocolError(f"{len(clients)} participants announced, the config says {least} to {most}")
    if (
        weights[clients.index(client)] != weight
        or min(weights) < 1
        or (config.weighting == "uniform" and max(weights) > 1)
    ):
        raise ProtocolError(f"the announced weights are not valid: client {client} has weight {weight}")


def require_left_out(config: RunConfig, call: Call, left_out: tuple[int, ...], client: int) -> None:
    """Refuse a recovery that could expose someone."""
    if not _increasing(left_out) or not set(left_out) <= set(call.clients) or client in left_out:
        raise ProtocolError("the list of clients left out is not valid: expected other participants, in order")
    if len(left_out) < MIN_LEFT_OUT:
        raise ProtocolError("a recovery that leaves out a single client would expose it: refused")
    rest, least = len(call.clients) - len(left_out), needed(config, len(call.clients))
    if rest < least:
        raise ProtocolError(f"a recovery would sum {rest} of {len(call.clients)} clients, {least} needed: refused")


# --- what the server chooses -----------------------------------------------------------------------------------------


def choose_left_out(config: RunConfig, call: Call, missing: Iterable[int]) -> tuple[int, ...]:
    """Who is left out of a sum if some are missing: they, and one more if it is only one, the next in order."""
    left_out = set(missing)
    if len(left_out) == 1:
        (only,) = left_out
        place = call.clients.index(only)
        left_out.add(call.clients[(place + 1) % len(call.clients)])
    rest, least = len(call.clients) - len(left_out), needed(config, len(call.clients))
    if rest < least:
        raise QuorumError(f"{rest} of {len(call.clients)} clients would be summed, {least} needed")
    return tuple(sorted(left_out))


# --- numbers ---------------------------------------------------------------------------------------------------------


def digest(aggregate: Vector) -> bytes:
    """What stands for an aggregate where only its identity matters."""
    return hashlib.sha256(np.ascontiguousarray(aggregate, "<f4").data).digest()


def finest(bound: float, call: Call, headroom: int = 1) -> Scale:
    """The smallest steps with which no sum of the cohort's numbers takes more than its share of the range."""
    return Scale(bound, headroom * bound * sum(call.weights) / (2**31 - 1 - len(call.clients)))


def encode(vector: Vector | npt.NDArray[np.float64], scale: Scale, weight: int) -> tuple[Words, int]:
    """`weight * vector` in steps modulo 2^32, and how many numbers had to be cut off at +-bound."""
    bound, step = scale
    words = np.empty(vector.size, np.uint32)
    cut = 0
    for start in range(0, vector.size, _CHUNK):
        part = vector[start : start + _CHUNK].astype(np.float64)
        if not np.isfinite(part).all():
            raise WireError("payload holds values that are not finite")
        cut += int((np.abs(part) > bound).sum())
        steps = np.rint(np.clip(part, -bound, bound) * (weight / step)).astype(np.int64)
        words[start : start + _CHUNK] = steps.astype(np.uint32)  # two's complement: modulo 2^32
    return words, cut


def decode(total: Words, divisor: float, step: float) -> Vector:
    """The sum of encoded vectors by `divisor`: their weighted mean, if that is the sum of their weights."""
    result = np.empty(total.size, np.float32)
    for start in range(0, total.size, _CHUNK):
        part = total[start : start + _CHUNK].view(np.int32)
        result[start : start + _CHUNK] = part * step / divisor
    return result


def clients_of(payload: npt.NDArray[np.generic]) -> tuple[int, ...]:
    """A list of clients (or other whole numbers), as it was sent."""
    if payload.dtype != np.dtype("<u4"):
        raise WireError(f"expected whole numbers, got {payload.dtype}")
    return tuple(int(number) for number in payload.view(np.uint32))


def _increasing(numbers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))
