"""Records of attacks on images and on membership: who attacks what, and what came of it."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedrp.attacks.inversion import Effort
from fedrp.attacks.metrics import Images, area, rate_at
from fedrp.attacks.target_models import SMOOTH
from fedrp.attacks.verdicts import image_verdict, membership_verdict
from fedrp.attacks.view import ADVERSARIES
from fedrp.config.checks import require, require_choice
from fedrp.errors import ConfigError

Losses = npt.NDArray[np.float64]

_FALSE_POSITIVES, _RARE_FALSE_POSITIVES = 0.01, 0.001


@dataclass(frozen=True)
class Scenario:
    """Who attacks what. Clients hold `images` images each and take one step on all of them in a round."""

    algorithm: str = "fedavg"
    adversary: str = "server"
    model: str = SMOOTH
    dataset: str = "mnist-mini"
    clients: int = 4
    images: int = 1
    targets: int = 4  # clients attacked; an adversary that sees aggregates attacks all others at once
    dim: int = 1000
    projection: str | None = None
    dp_epsilon: float | None = None  # noise in the run, for algorithms that can
    rounds: int = 10  # of the run; the noise depends on it
    round: int = 1  # that is attacked
    joined: int = 1  # rounds attacked at once: that one and those before it
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("adversary", self.adversary, ADVERSARIES)
        for name in ("clients", "images", "targets"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "a whole number of at least 1")
        if self.adversary != "server" and self.clients < 2:
            raise ConfigError(
                f"clients={self.clients} is not valid: '{self.adversary}' needs a second client to attack"
            )
        if not 1 <= self.round <= self.rounds:
            raise ConfigError(f"round={self.round} is not valid: the run has rounds 1 to {self.rounds}")
        if not 1 <= self.joined <= self.round:
            raise ConfigError(f"joined={self.joined} is not valid: rounds 1 to {self.round} can be attacked at once")


class Target(NamedTuple):
    """One attacked vector: the images behind it and what was made of it."""

    clients: tuple[int, ...]
    originals: Images
    found: Images  # in the order of the originals
    labels: tuple[int, ...]  # in the order of the originals, as is what was found
    labels_found: tuple[int, ...]
    psnr: tuple[float, ...]
    ssim: tuple[float, ...]
    mismatch: float


@dataclass(frozen=True)
class Outcome:
    """What an attack got."""

    scenario: Scenario
    effort: Effort
    parameters: int
    guessed: bool  # keys had to be guessed
    targets: tuple[Target, ...]
    mean_image: tuple[float, ...]  # PSNR of the mean of public images, per attacked image
    other_image: tuple[float, ...]  # and of a public image drawn at random
    prior: Images  # the mean of public images itself, (C, H, W)
    seconds: float

    @property
    def psnr(self) -> tuple[float, ...]:
        """Of all attacked images."""
        return tuple(value for target in self.targets for value in target.psnr)

    @property
    def label_rate(self) -> float:
        """The share of labels that were found."""
        right = sum((Counter(t.labels) & Counter(t.labels_found)).total() for t in self.targets)
        return right / sum(len(t.labels) for t in self.targets)

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        return image_verdict(self.psnr, self.mean_image, self.label_rate)

    def as_json(self) -> dict[str, Any]:
        """Everything but the images."""
        similarity = [value for target in self.targets for value in target.ssim]
        return {
            **dataclasses.asdict(self.scenario),
            **dataclasses.asdict(self.effort),
            "parameters": self.parameters,
            "keys_guessed": self.guessed,
            "psnr": mean(self.psnr),
            "psnr_each": [round(value, 2) for value in self.psnr],
            "ssim": mean(similarity),
            "label_rate": self.label_rate,
            "psnr_mean_image": mean(self.mean_image),
            "psnr_other_image": mean(self.other_image),
            "mismatch": [target.mismatch for target in self.targets],
            "seconds": round(self.seconds, 1),
            "verdict": self.verdict,
        }


def mean(values: Any) -> float:
    """The mean, as a number that JSON can hold."""
    return float(np.mean(values))


# --- membership ------------------------------------------------------------------------------------------------------


class Attack(NamedTuple):
    """Scores of members and of others, higher where the attack believes in a member."""

    members: Losses
    others: Losses


@dataclass(frozen=True, eq=False)
class Membership:
    """What came of the attacks on one model."""

    about: dict[str, Any]  # the run, and who its members are
    attacks: dict[str, Attack]

    def as_json(self) -> dict[str, Any]:
        """Everything but the scores."""
        found = {name: _scores(*attack) for name, attack in self.attacks.items()}
        return {**self.about, **found, "verdict": membership_verdict(found)}


def _scores(inside: Losses, beyond: Losses) -> dict[str, float]:
    found, rate = area(inside, beyond), rate_at(inside, beyond, _FALSE_POSITIVES)
    return {
        "auc": found.auc,
        "auc_low": found.low,
        "auc_high": found.high,
        "tpr_at_1_percent_fpr": rate.found,
        "tpr_low": rate.low,
        "fpr_high": rate.false_high,
        "tpr_at_1_per_mille_fpr": rate_at(inside, beyond, _RARE_FALSE_POSITIVES).found,
    }
