"""Secure aggregation, the public part: who is summed, and why that exposes nobody. Numbers: `fedrp.compression.grid`.

**The scheme.** The clients P of a cohort take part in a round. Each has a mask key of its own for the run, signed by
its identity. Any two of them, i < j, share a key that nobody else has. It gives a mask, uniform modulo 2^32, which i
adds to its upload and j subtracts. If all uploads come, the masks cancel in the sum: one exchange. If not, the server
names the clients E that are left out, and each of the others, S = P - E, answers with the sum of its masks towards E,
itself masked by fresh pairwise masks within S: one recovery exchange. Where words have few bits, all of this is modulo
a smaller power of two: of words and masks only the lowest bits are sent. The proof is the same.

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
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.errors import WireError
from fedrp.types import Vector, Words

MIN_SUMMED = 3  # with two, each would find the other's vector in the average that it gets
MIN_LEFT_OUT = 2  # see above: two known sums must not differ by one client


class Cohort(NamedTuple):
    """Who takes part in a round, and with which weight: every participant is told the same."""

    clients: tuple[int, ...]
    weights: tuple[int, ...]

    def payload(self) -> Words:
        """As it is sent."""
        return np.array([*self.clients, *self.weights], np.uint32)

    @classmethod
    def of(cls, payload: npt.NDArray[np.generic]) -> "Cohort":
        """The inverse of `payload`."""
        numbers = clients_of(payload)
        half = len(numbers) // 2
        return cls(numbers[:half], numbers[half:])

    def weight_of(self, clients: Iterable[int]) -> int:
        """The total weight of some participants."""
        chosen = set(clients)
        return sum(weight for client, weight in zip(self.clients, self.weights, strict=True) if client in chosen)


def digest(aggregate: Vector) -> bytes:
    """What stands for an aggregate where only its identity matters."""
    return hashlib.sha256(np.ascontiguousarray(aggregate, "<f4").data).digest()


def clients_of(payload: npt.NDArray[np.generic]) -> tuple[int, ...]:
    """A list of clients (or other whole numbers), as it was sent."""
    if payload.dtype != np.dtype("<u4"):
        raise WireError(f"expected whole numbers, got {payload.dtype}")
    return tuple(int(number) for number in payload.view(np.uint32))
