"""Records of rounds: who took part, scores, and encoded bytes: of vectors, of what frames them, and of keys."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedrp.learning.evaluate import Evaluation, Score
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind

_KEY_KINDS = frozenset({Kind.HELLO, Kind.DEAL_REQUEST, Kind.DEAL, Kind.SEALED, Kind.COMPLAINT, Kind.MASK_KEYS})
_VECTOR_KINDS = frozenset({Kind.UPLOAD, Kind.AGGREGATE, Kind.CORRECTION})


class Traffic(NamedTuple):
    """Encoded bytes of all clients together: training messages, and apart from them the set-up and all keys."""

    up: int = 0
    down: int = 0
    keys_up: int = 0
    keys_down: int = 0
    framing_up: int = 0  # of the training messages: all that is no vector
    framing_down: int = 0

    @classmethod
    def of(cls, packets: Mapping[int, bytes], replies: Mapping[int, bytes]) -> "Traffic":
        """The traffic of one exchange, measured on its bytes."""
        up, keys_up, framing_up = _measure(replies)
        down, keys_down, framing_down = _measure(packets)
        return cls(up, down, keys_up, keys_down, framing_up, framing_down)

    def plus(self, other: "Traffic") -> "Traffic":
        """The sum of two."""
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))

    def per_client(self, pairs: int) -> dict[str, int]:
        """Bytes of a client in a round, by name; payload and framing add up to the training messages."""
        sizes = {f"bytes_{name}": round(value / pairs) for name, value in self._asdict().items()}
        ways = ("up", "down")
        payloads = {f"bytes_payload_{way}": sizes[f"bytes_{way}"] - sizes[f"bytes_framing_{way}"] for way in ways}
        return sizes | payloads


def _measure(packets: Mapping[int, bytes]) -> tuple[int, int, int]:
    """Bytes of training messages, of keys, and of the training messages what is framing."""
    vectors, keys, framing = 0, 0, 0
    for packet in packets.values():
        for kind, (headers, payloads) in wire.sizes(packet).items():
            if kind in _KEY_KINDS:
                keys += headers + payloads
            elif kind in _VECTOR_KINDS:
                framing += headers
                vectors += payloads
            else:
                framing += headers + payloads
    return vectors + framing, keys, framing


class Trained(NamedTuple):
    """A round that is over, before its models are scored."""

    round: int
    participants: int  # whose training counts
    dropped: int  # who were asked, and whose does not
    traffic: Traffic
    seconds: float
    consensus_bound: float | None = None


class Delivery(NamedTuple):
    """The exchange of models after the last round."""

    participants: int  # whose models make the mean; 0 where it was given up, and clients end with their own
    traffic: Traffic  # with the packets that end the run
    seconds: float
    score: Score | None = None  # of the mean, if it is what the run delivers


class RoundRecord(NamedTuple):
    """One round, as measured."""

    round: int
    participants: int  # whose uploads were used
    dropped: int  # who were asked, and whose were not
    evaluation: Evaluation | None  # None where it was not this round's turn
    traffic: Traffic
    seconds: float
    evaluation_seconds: float
    consensus_bound: float | None = None  # on the distance of any two clients' models, from the uploads

    def as_json(self) -> dict[str, Any]:
        """The record as a line of `metrics.jsonl`."""
        return {
            "round": self.round,
            "participants": self.participants,
            "dropped": self.dropped,
            **(self.evaluation.as_json() if self.evaluation else {}),
            **{f"bytes_{name}_total": value for name, value in self.traffic._asdict().items()},
            "seconds": self.seconds,
            "evaluation_seconds": self.evaluation_seconds,
            "consensus_bound": self.consensus_bound,
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "RoundRecord":
        """The inverse of `as_json`."""
        counts = line["round"], line["participants"], line["dropped"]
        traffic = Traffic(*(line[f"bytes_{name}_total"] for name in Traffic._fields))
        times = line["seconds"], line["evaluation_seconds"]
        return cls(*counts, Evaluation.from_json(line), traffic, *times, line["consensus_bound"])
