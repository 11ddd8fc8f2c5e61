"""What a run gives back: records of its rounds and the one JSON object that the command line prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fedrp.algorithms.outlook import Outlook
from fedrp.config.run import Resolved
from fedrp.errors import ConfigError
from fedrp.learning.evaluate import Evaluation, Headline
from fedrp.learning.layout import State
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.ledger import by_unit, headline
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind
from fedrp.reporting.notebook import result_html
from fedrp.types import Vector

if TYPE_CHECKING:
    import pandas

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


def _per_client(traffic: Traffic, pairs: int) -> dict[str, int]:
    """Bytes of a client in a round, by name; payload and framing add up to the training messages."""
    sizes = {f"bytes_{name}": round(value / pairs) for name, value in traffic._asdict().items()}
    payloads = {f"bytes_payload_{way}": sizes[f"bytes_{way}"] - sizes[f"bytes_framing_{way}"] for way in ("up", "down")}
    return sizes | payloads


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


@dataclass(frozen=True, eq=False, repr=False)
class RunResult:
    """A finished run. It delivers the model of the last round, or of the best one if that was to be kept.

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
    sites: tuple[Mapping[str, Any], ...]  # noise and epsilon by the number of records, where noise protects these
    outlook: Outlook | None  # what noise lets it learn, as said before round 1
    model: Vector
    seconds: float
    images_per_round: float
    peak_rss_mb: float
    state: State
    headline: Headline  # what the run is judged by
    delivered_round: int  # whose model this is
    last_state: State  # of the last round, as `state`

    def __repr__(self) -> str:
        shown = [self.headline.text(self._scored.delivered), f"{len(self.records)} of {self.config.rounds} rounds"]
        if self.delivered_round != self.records[-1].round:
            shown.append(f"best in round {self.delivered_round}")
        shown.append(f"{self.as_json()['bytes_up']:,} bytes sent per client and round")
        return f"<RunResult {self.config.algorithm} on {self.config.dataset}: {', '.join(shown)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return result_html(self.as_json(), vars(self.config.stored))

    @property
    def accuracy(self) -> float:
        """Test accuracy in percent of the delivered model.

        Raises:
            NoAccuracyError: targets are no classes. It is an AttributeError, too.
        """
        return self._scored.delivered.accuracy

    @property
    def loss(self) -> float:
        """Mean test loss of the delivered model."""
        return self._scored.delivered.loss

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the delivered model on the test set, by name; accuracy among them where targets are classes."""
        return self._scored.delivered.metrics

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was measured, a dict per round. A round that was not scored (`eval_every`) has no scores in it."""
        return [record.as_json() for record in self.records]

    def frame(self) -> "pandas.DataFrame":
        """The history as a pandas table, a row per round.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError(
                "result.frame() needs pandas: pip install 'fedrp[frame]', or use result.history"
            ) from None
        return pandas.DataFrame(self.history).set_index("round")

    @property
    def _scored(self) -> Evaluation:
        """Of the round whose model is delivered, which always has one."""
        found = (record.evaluation for record in self.records if record.round == self.delivered_round)
        return next(evaluation for evaluation in found if evaluation)

    def as_json(self) -> dict[str, Any]:
        """The result as one JSON object; bytes are per client that took part and round, unless said otherwise."""
        config = self.config.stored
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
            "rounds_done": len(self.records),
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
            "headline": self.headline.name,
            "goal": self.headline.goal,
            "delivered_round": self.delivered_round,
            **self._scored.as_json(),
            **_per_client(traffic, pairs),
            "bytes_keys_per_client": (traffic.keys_up + traffic.keys_down) / (config.clients * len(self.records)),
            "epsilon": quoted.epsilon if quoted else None,
            "delta": quoted.delta if quoted else None,
            "adversary": quoted.adversary.value if quoted else None,
            "adjacency": quoted.adjacency.value if quoted else None,
            "dp_unit": config.dp_unit,
            "epsilon_by_unit": by_unit(self.privacy),
            "sites": list(self.sites),
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
            "history": self.history,
        }
