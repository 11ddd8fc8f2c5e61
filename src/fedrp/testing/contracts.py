"""What every algorithm promises, as checks that can be run on one's own.

    fedrp.register("my-fedprox", FEDPROX)
    fedrp.testing.check_algorithm("my-fedprox")

A contract is a function that raises `AssertionError` where the promise is broken. Problems are tiny: a contract takes
a second at most.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedrp.algorithms.client_side import Local, Participant, Step, Upload, own_normals, own_words
from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS, BASELINES, methods
from fedrp.config.checks import require_choice
from fedrp.config.run import Resolved, RunConfig
from fedrp.crypto.secret import SecretKey
from fedrp.engines.choice import make_trainer
from fedrp.learning.initial import public_initial
from fedrp.learning.layout import layout_of
from fedrp.learning.objective import Examples, LocalSGD, Objective, Stack
from fedrp.learning.task import Task, split_among_clients
from fedrp.means import weighted_sum
from fedrp.mechanisms.base import AtClient
from fedrp.privacy.events import Adversary
from fedrp.projection.families import Projection, make_projection
from fedrp.projection.rotation import Rotation, make_rotation
from fedrp.rng import RunSeed
from fedrp.simulation.simulate import simulate
from fedrp.testing.problems import TinyNet, blobs
from fedrp.types import Vector

KEYS = [SecretKey(bytes([number]) * 32) for number in range(5)]  # of rounds 0 to 3; the last one is for noise
Settings = Mapping[str, Any]
NONE: Settings = {}

PARAMETERS = layout_of(TinyNet()).size
DATA = [Examples(*blobs(size, seed)) for seed, size in enumerate((20, 11, 16))]  # of each client


def small_config(algorithm: str, settings: Settings = NONE) -> RunConfig:
    """A run of a second; `settings` are changes."""
    base = RunConfig(algorithm=algorithm, clients=len(DATA), rounds=3, batch_size=8, dim=12, lr=0.05, grad_clip=0.0)
    return dataclasses.replace(base, **settings)


def require(holds: bool, broken: str) -> None:
    """Say how a promise is broken, if it is."""
    if not holds:
        raise AssertionError(broken)


# --- algorithms ------------------------------------------------------------------------------------------------------


def _refuse(text: str) -> None:
    raise AssertionError(text)


class Round:
    """Rounds of some clients, without a network; remembers the weights that training ended with."""

    def __init__(self, config: Resolved, clients: Sequence[int] = range(len(DATA))) -> None:
        self.config, self.clients = config, clients
        self.algorithm = ALGORITHMS[config.algorithm]
        self.pipeline = Pipeline.of(config, self.algorithm.server)
        self.secret = self.algorithm.server.round_keys
        self.trainer = make_trainer(TinyNet, nn.functional.cross_entropy, torch.device("cpu"), RunSeed(0))
        self.weights: Stack = np.zeros((0, PARAMETERS), np.float32)
        self.past: list[Vector] = []  # aggregates, latest first

    def local(self, round_: int) -> Local:
        """What the clients have at hand in a round."""

        def train(start: Stack, objective: Objective) -> Stack:
            c = self.config
            sgd = LocalSGD(c.lr, c.momentum, c.batch_size, c.local_epochs, c.grad_clip)
            data = [DATA[client] for client in self.clients]
            reached = self.trainer.train(start, data, list(self.clients), round_, sgd, objective)
            chart = objective.weights
            self.weights = chart(torch.from_numpy(reached), slice(None)).numpy() if chart else reached.copy()
            return reached

        def project(key: SecretKey) -> Projection:
            return make_projection(self.config.projection, key, PARAMETERS, self.config.dim)

        def rotate(key: SecretKey) -> Rotation:
            return make_rotation(self.config.rotation, key, self.config.dim)

        key = KEYS[round_] if self.secret else None
        return Local(config=self.config, key=key, project=project, rotate=rotate, train=train)

    def newcomers(self) -> list[Participant]:
        """The clients before the first round."""
        state = self.algorithm.client.init(self.config, public_initial(TinyNet, RunSeed(0)))
        step = Step(KEYS[0] if self.secret else None, None)
        return [Participant(state, [step]) for _ in self.clients]

    def upload(self, participants: list[Participant], round_: int = 1) -> list[Upload]:
        """What the clients send in a round."""
        uploads = self.algorithm.client.round(self.local(round_), participants)
        return [
            upload._replace(vector=self.pipeline.sent(upload.vector, self.context(client)))
            for client, upload in zip(self.clients, uploads, strict=True)
        ]

    def context(self, client: int) -> AtClient:
        """What mechanisms know at a client."""
        previous = self.past[0] if self.past else None

        def noise() -> SecretKey:
            return KEYS[-1].derive(f"noise {client}")

        return AtClient(previous, len(self.clients), own_normals(noise), own_words(noise), warn=_refuse)

    def aggregate(self, uploads: list[Upload]) -> Vector:
        """What the server makes of uploads, all of weight 1."""
        weight = float(len(uploads))
        vectors, weights = [upload.vector.astype(np.float32) for upload in uploads], [1.0] * len(uploads)
        return self.pipeline.aggregate(
            self.past[:2], weighted_sum(vectors, weights, self.pipeline.divisor or weight), weight
        )

    def returning(self, uploads: list[Upload], round_: int = 1) -> list[Participant]:
        """The clients after a round, with the aggregate of what they sent."""
        self.past.insert(0, self.aggregate(uploads))
        step = Step(KEYS[round_] if self.secret else None, self.pipeline.update_of(self.past[0]))
        return [Participant(upload.state, [step]) for upload in uploads]


def _arrays(participants: list[Participant]) -> list[Vector]:
    history = [step.aggregate for one in participants for step in one.history if step.aggregate is not None]
    return [array for one in participants for array in one.state] + history


def inputs_are_not_changed(name: str, settings: Settings = NONE) -> None:
    """No function of either side writes to what it is given."""
    run = Round(resolved(small_config(name, settings), PARAMETERS))
    first = run.newcomers()
    second = run.returning(run.upload(first))
    copies = [array.copy() for array in _arrays(second)]
    for array in _arrays(second):
        array.setflags(write=False)
    uploads = run.upload(second, 2)
    for participant in second:
        run.algorithm.client.finish(run.local(2), participant)
    for upload in uploads:
        upload.vector.setflags(write=False)
    run.aggregate(uploads)
    for array, before in zip(_arrays(second), copies, strict=True):
        np.testing.assert_array_equal(array, before)


def rounds_are_deterministic(name: str, settings: Settings = NONE) -> None:
    """State, keys and data decide an upload to the bit."""
    run = Round(resolved(small_config(name, settings), PARAMETERS))
    first, again = run.upload(run.newcomers()), run.upload(run.newcomers())
    for one, other in zip(first, again, strict=True):
        require(one.vector.tobytes() == other.vector.tobytes(), "the same round gave another upload")
        require([a.tobytes() for a in one.state] == [a.tobytes() for a in other.state], "and another state")


def uploads_are_finite_float32_of_the_stated_size(name: str, settings: Settings = NONE) -> None:
    """As `Pipeline.upload_size` says."""
    run = Round(resolved(small_config(name, settings), PARAMETERS))
    size = run.pipeline.upload_size(PARAMETERS)
    for upload in run.upload(run.newcomers()):
        found = str(upload.vector.dtype), upload.vector.shape
        require(found == ("float32", (size,)), f"an upload is {found}, stated: {size} numbers of float32")
        require(bool(np.isfinite(upload.vector).all()), "an upload is not finite")


def one_client_gets_what_its_training_gave(name: str, settings: Settings = NONE) -> None:
    """With one client and no server momentum, the delivered model is what local training gives."""
    still = {"server_momentum": 0.0} if "server_momentum" in ALGORITHMS[name].settings else {}
    run = Round(resolved(small_config(name, {**settings, "clients": 1, **still}), PARAMETERS), clients=[0])
    participants = run.newcomers()
    for round_ in (1, 2, 3):
        participants = run.returning(run.upload(participants, round_), round_)
        delivered = run.algorithm.client.finish(run.local(round_), participants[0])
        np.testing.assert_allclose(delivered.model, run.weights[0], atol=1e-6)


def a_lone_client_gets_what_its_training_gave(name: str, settings: Settings = NONE) -> None:
    """A simulation of one client delivers, to the bit, what rounds of local training give."""
    config = resolved(small_config(name, {**settings, "clients": 1}), PARAMETERS)
    trainer = make_trainer(TinyNet, nn.functional.cross_entropy, torch.device("cpu"), RunSeed(config.seed))
    data, model = blobs(40, 1), public_initial(TinyNet, RunSeed(config.seed))[None]
    (whole,) = split_among_clients(Task(TinyNet, data, data), config)
    sgd = LocalSGD(config.lr, config.momentum, config.batch_size, config.local_epochs, config.grad_clip)
    for round_ in range(1, config.rounds + 1):
        model = trainer.train(model, [whole], [0], round_, sgd)
    delivered = simulate(config, Task(TinyNet, data, data)).model
    require(delivered.tobytes() == model[0].tobytes(), "another model is delivered than local training gives")


def a_consensus_is_the_same_bits_everywhere(name: str, settings: Settings = NONE) -> None:
    """Where one common model is delivered, all clients hold it."""
    run = Round(resolved(small_config(name, settings), PARAMETERS))
    if run.algorithm.delivers != "consensus":
        return
    first = run.newcomers()
    second = run.returning(run.upload(first))
    models = {run.algorithm.client.finish(run.local(1), one).model.tobytes() for one in second}
    require(len(models) == 1, f"{len(second)} clients hold {len(models)} different models")


def it_learns(name: str, settings: Settings = NONE) -> None:
    """Six rounds of the simulator on an easy task are far better than guessing, which gives 33 %."""
    config = small_config(name, {**settings, "clients": 4, "rounds": 6, "dim": 30})
    accuracy = simulate(config, Task(TinyNet, blobs(80, 1), blobs(60, 2))).accuracy
    require(accuracy > 60, f"accuracy is {accuracy:.1f} % where guessing gives 33 %")


def resolving_twice_changes_nothing(name: str, settings: Settings = NONE) -> None:
    """Defaults are filled in once."""
    config = resolved(small_config(name, {**settings, "lr": None}), PARAMETERS)
    require(resolved(config, PARAMETERS) == config, "a resolved config resolves to another one")
    require(Resolved.of(config.stored) == config, "what is stored of a resolved config is another one")


def it_says_who_learns_what(name: str, settings: Settings = NONE) -> None:
    """Each real adversary that is named is named once, among them the server and who gets the model."""
    releases = methods()[name].releases(resolved(small_config(name, settings), PARAMETERS))
    named = {release.adversary for release in releases}
    missing = {Adversary.SERVER, Adversary.MODEL_HOLDER} - named
    require(not missing, f"nothing is said of {' and '.join(sorted(adversary.name for adversary in missing))}")


Contract = Callable[[str, Settings], None]
_METHOD_CONTRACTS: tuple[Contract, ...] = (it_learns, resolving_twice_changes_nothing, it_says_who_learns_what)
ALGORITHM_CONTRACTS: tuple[Contract, ...] = (
    inputs_are_not_changed,
    rounds_are_deterministic,
    uploads_are_finite_float32_of_the_stated_size,
    one_client_gets_what_its_training_gave,
    a_consensus_is_the_same_bits_everywhere,
    *_METHOD_CONTRACTS,
)
BASELINE_CONTRACTS: tuple[Contract, ...] = (a_lone_client_gets_what_its_training_gave, *_METHOD_CONTRACTS)


def contracts_of(name: str) -> tuple[Contract, ...]:
    """Those that an entry of the tables has to keep."""
    return BASELINE_CONTRACTS if name in BASELINES else ALGORITHM_CONTRACTS


def check_algorithm(name: str, settings: Settings = NONE) -> None:
    """Run every contract on an algorithm of the tables; `settings` are those that it cannot do without.

    One with noise is checked without: `{"noise_multiplier": 0.0, "clip": 1e6}`.

    Raises:
        AssertionError: a promise is broken.
    """
    require_choice("algorithm", name, methods())
    for contract in contracts_of(name):
        contract(name, settings)
