"""What a run gives back: records of its rounds and the one JSON object that the command line prints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedrp.algorithms.outlook import Outlook
from fedrp.config.run import Resolved
from fedrp.learning.evaluate import Evaluation, Score
from fedrp.learning.layout import State
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.ledger import headline
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind
from fedrp.types import Vector

_KEY_KINDS = frozenset({Kind.HELLO, Kind.DEAL_REQUEST, Kind.DEAL, Kind.SEALED})


class Traffic(NamedTuple):
    """Encoded bytes of all clients together: training messages, and apart from them the dealing of round keys."""

    up: int = 0
    down: int = 0
    keys_up: int = 0
    keys_down: int = 0

    @classmethod
    def of(cls, packets: Mapping[int, bytes], replies: Mapping[int, bytes]) -> "Traffic":
        """The traffic of one exchange, measured on its bytes."""
        up, keys_up = _measure(replies)
        down, keys_down = _measure(packets)
        return cls(up, down, keys_up, keys_down)

    def plus(self, other: "Traffic") -> "Traffic":
        """The sum of two."""
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


def _measure(packets: Mapping[int, bytes]) -> tuple[int, int]:
    model, keys = 0, 0
    for packet in packets.values():
        for kind, size in wire.sizes(packet).items():
            if kind in _KEY_KINDS:
                keys += size
            else:
                model += size
    return model, keys


def _finite(loss: float) -> float | None:
    """A loss as JSON has it, which knows neither NaN nor infinity."""
    return loss if math.isfinite(loss) else None


def _loss(value: float | None) -> float:
    return math.nan if value is None else value


class Trained(NamedTuple):
    """A round that is over, before its models are scored."""

    round: int
    participants: int  # whose training counts
    dropped: int  # who were asked, and whose does not
    traffic: Traffic
    seconds: float
    consensus_bound: float | None = None


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
        e = self.evaluation
        return {
            "round": self.round,
            "participants": self.participants,
            "dropped": self.dropped,
            "accuracy": e and e.delivered.accuracy,
            "loss": e and _finite(e.delivered.loss),
            "accuracy_average": e and e.average.accuracy,
            "loss_average": e and _finite(e.average.loss),
            "accuracy_client_mean": e and e.client_mean,
            "accuracy_client_min": e and e.client_min,
            "accuracy_client_max": e and e.client_max,
            **{f"bytes_{name}_total": value for name, value in self.traffic._asdict().items()},
            "seconds": self.seconds,
            "evaluation_seconds": self.evaluation_seconds,
            "consensus_bound": self.consensus_bound,
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "RoundRecord":
        """The inverse of `as_json`."""
        evaluation = None
        if line["accuracy"] is not None:
            delivered = Score(line["accuracy"], _loss(line["loss"]))
            average = Score(line["accuracy_average"], _loss(line["loss_average"]))
            clients = [line[f"accuracy_client_{name}"] for name in ("mean", "min", "max")]
            evaluation = Evaluation(delivered, average, *clients)
        traffic = Traffic(*(line[f"bytes_{name}_total"] for name in Traffic._fields))
        times = line["seconds"], line["evaluation_seconds"]
        return cls(
            line["round"], line["participants"], line["dropped"], evaluation, traffic, *times, line["consensus_bound"]
        )


@dataclass(frozen=True, eq=False)
class RunResult:
    """A finished run.

    `state` is the whole delivered model: `module.load_state_dict(result.state)`. `model` is one vector of its trainable
    parameters: `fedrp.load_vector(module, result.model)` does where nothing is frozen and no buffer is random.
    """

    config: Resolved
    parameters: int
    secret: bool
    records: tuple[RoundRecord, ...]
    last_traffic: Traffic  # of the packets that end the run
    privacy: tuple[Guarantee, ...]
    warnings: tuple[str, ...]  # about what the statements are worth
    outlook: Outlook | None  # what noise lets it learn, as said before round 1
    model: Vector
    seconds: float
    images_per_round: float
    peak_rss_mb: float
    state: State = field(repr=False)

    @property
    def accuracy(self) -> float:
        """Test accuracy in percent of the delivered model."""
        return self._evaluation.delivered.accuracy

    @property
    def _evaluation(self) -> Evaluation:
        """Of the last round, which always has one."""
        return next(record.evaluation for record in reversed(self.records) if record.evaluation)

    def as_json(self) -> dict[str, Any]:
        """The result as one JSON object; bytes are per client and round."""
        config, last = self.config.stored, self._evaluation
        used = sum(record.participants for record in self.records)
        pairs = used or sum(record.dropped for record in self.records) or 1  # where every round was given up
        traffic = self.last_traffic
        for record in self.records:
            traffic = traffic.plus(record.traffic)
        training = sum(record.seconds for record in self.records)
        quoted = headline(self.privacy)
        return {
            "algorithm": config.algorithm,
            "dataset": config.dataset,
            "model": config.model,
            "clients": config.clients,
            "rounds": config.rounds,
            "local_epochs": config.local_epochs,
            "parameters": self.parameters,
            "dim": config.dim if self.secret else None,
            "projection": config.projection if self.secret else None,
            "train_examples": config.train_examples,
            "partition": config.partition,
            "participation": config.participation,
            "secure_aggregation": config.secure_aggregation,
            "aggregation": config.aggregation,
            "batch_size": config.batch_size,
            "lr": config.lr,
            "momentum": config.momentum,
            "rho": config.rho,
            "seed": config.seed,
            "accuracy": last.delivered.accuracy,
            "accuracy_client_mean": last.client_mean,
            "accuracy_client_min": last.client_min,
            "accuracy_client_max": last.client_max,
            "accuracy_average": last.average.accuracy,
            **{f"bytes_{name}": round(value / pairs) for name, value in traffic._asdict().items()},
            "epsilon": quoted.epsilon if quoted else None,
            "delta": quoted.delta if quoted else None,
            "adversary": quoted.adversary.value if quoted else None,
            "adjacency": quoted.adjacency.value if quoted else None,
            "privacy": [statement.as_json() for statement in self.privacy],
            "warnings": list(self.warnings),
            "signal_to_noise": self.outlook and self.outlook.signal_to_noise,
            "outlook": self.outlook and self.outlook.expectation.value,
            "noise_multiplier": config.noise_multiplier,
            "clip": config.clip,
            "ball": config.ball,
            "consensus_bound": self.records[-1].consensus_bound,
            "seconds": self.seconds,
            "seconds_per_round": training / len(self.records),
            "images_per_second": self.images_per_round * len(self.records) / training,
            "peak_rss_mb": self.peak_rss_mb,
            "history": [record.as_json() for record in self.records],
        }
