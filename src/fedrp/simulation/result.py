"""What a run gives back: records of its rounds and the one JSON object that the command line prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedrp.config.run import Resolved
from fedrp.errors import ConfigError
from fedrp.learning.evaluate import Evaluation, Headline
from fedrp.learning.layout import State
from fedrp.mechanisms.outlook import Outlook
from fedrp.privacy.guarantee import Guarantee
from fedrp.privacy.ledger import by_unit, headline
from fedrp.reporting.notebook import result_html
from fedrp.reporting.records import Delivery, Traffic
from fedrp.reporting.records import RoundRecord as RoundRecord
from fedrp.types import Vector

if TYPE_CHECKING:
    import pandas


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
    last_traffic: Traffic  # of the packets that end the run, unless they are a part of `delivery`
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
    delivery: Delivery | None = None  # where the models of all clients were averaged

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
        """Of the round whose model is delivered, which always has one; models that were averaged count as they are."""
        found = (record.evaluation for record in self.records if record.round == self.delivered_round)
        evaluation = next(evaluation for evaluation in found if evaluation)
        score = self.delivery.score if self.delivery else None
        return evaluation._replace(delivered=score) if score else evaluation

    def as_json(self) -> dict[str, Any]:
        """The result as one JSON object; bytes are per client that took part and round, unless said otherwise.

        Those of the exchange of models after the last round are apart (`bytes_delivery_...`): per client, once.
        """
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
            "deliver": config.deliver,
            "batch_size": config.batch_size,
            "lr": config.lr,
            "momentum": config.momentum,
            "rho": config.rho,
            "seed": config.seed,
            "headline": self.headline.name,
            "goal": self.headline.goal,
            "delivered_round": self.delivered_round,
            **self._scored.as_json(),
            **traffic.per_client(pairs),
            **self._delivered_by(),
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

    def _delivered_by(self) -> dict[str, int | None]:
        """What the exchange of models took."""
        names = [f"bytes_delivery_{name}" for name in Traffic._fields]
        if self.delivery is None:
            return {"delivery_participants": None, **dict.fromkeys(names)}
        sizes = (round(value / self.config.clients) for value in self.delivery.traffic)
        return {"delivery_participants": self.delivery.participants, **dict(zip(names, sizes, strict=True))}
