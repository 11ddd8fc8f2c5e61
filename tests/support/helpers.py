"""Small problems, and a run that can be watched message by message. At the top level, so that workers can import it."""

import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedrp import RunConfig, Task, simulate
from fedrp.algorithms.client_side import own_normals, own_words
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.table import ALGORITHMS
from fedrp.config import Resolved
from fedrp.crypto.schedule import round_key
from fedrp.crypto.secret import SecretKey
from fedrp.learning.layout import layout_of
from fedrp.learning.task import split_among_clients
from fedrp.mechanisms.base import AtClient
from fedrp.protocol import server as server_side
from fedrp.protocol.client import finished, hello, respond
from fedrp.protocol.client_state import Client, Site, make_workbench
from fedrp.protocol.server_state import Reply, Server, new_server, read
from fedrp.protocol.tally import Tally, take_correction, take_upload
from fedrp.rng import RunSeed
from fedrp.simulation.identities import SimulatedEntropy, simulated_roster, simulated_site
from fedrp.testing.problems import CLASSES, FEATURES, TinyNet, blobs

ROOT = Path(__file__).parents[2]
NOISY = [name for name, algorithm in ALGORITHMS.items() if "dp_epsilon" in algorithm.settings]


class DropoutNet(TinyNet):
    """Draws random numbers while it trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(nn.functional.dropout(torch.tanh(self.hidden(x)), training=self.training))


class FrozenNet(TinyNet):
    """As many trainable parameters; and a random buffer, a random frozen layer, and a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.register_buffer("mix", torch.randn(FEATURES, FEATURES))
        self.again = self.output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.mix + self.frozen(x))


def tiny_task(examples: int = 80) -> Task:
    return Task(TinyNet, blobs(examples, 1), blobs(60, 2))


def tiny_config(algorithm: str = "fedrp", /, **changes: object) -> RunConfig:
    """Few clients and rounds, a secret dealt for each. Privacy, unless asked for otherwise, costs no calibration."""
    base = RunConfig(algorithm=algorithm, clients=4, rounds=3, batch_size=8, dim=12, lr=0.05, grad_clip=0.0)
    if algorithm == "fedavg-dp":
        changes = {"noise_multiplier": 0.5, "clip": 1.0, **changes}
    if algorithm in ALGORITHMS and ALGORITHMS[algorithm].server.round_keys:
        changes = {"key_epoch": 1, **changes}
    if algorithm == "fedrp":  # its rounds alone; tests of what follows them ask for it
        changes = {"deliver": "client", **changes}
    return dataclasses.replace(base, **changes)


def clipped_and_noised(
    config: Resolved, update: np.ndarray, noise: SecretKey, participants: int, previous: np.ndarray | None = None
) -> np.ndarray:
    """An update as the mechanisms of its algorithm leave it, before masks."""
    context = AtClient(previous, participants, own_normals(lambda: noise), own_words(lambda: noise), warn=pytest.fail)
    for mechanism in ALGORITHMS[config.algorithm].server.mechanisms(config):
        update = mechanism.client(update, context)
    return update


def client_batches(config: RunConfig, round_: int, client: int, size: int) -> list[torch.Tensor]:
    """The batches of a client in a round, as its named stream gives them."""
    rng = RunSeed(config.seed).generator("batches", round_, client)
    orders = [torch.from_numpy(rng.permutation(size)) for _ in range(config.local_epochs)]
    return [batch for order in orders for batch in order.split(config.batch_size)]


def round_keys(config: RunConfig) -> list[SecretKey]:
    """The round keys of a simulation with full participation: dealers take turns."""
    epochs = range(config.key_epoch + 1, config.rounds + 1, config.key_epoch)  # whose secrets are dealt a round before
    dealers = {0: 0} | {first: (first - 1) % config.clients for first in epochs}
    secrets = {r: SimulatedEntropy(RunSeed(config.seed), d).secret("epoch", r) for r, d in dealers.items()}
    firsts = [max(first for first in secrets if first <= round_) for round_ in range(config.rounds + 1)]
    return [round_key(secrets[0], first, secrets[first], round_) for round_, first in enumerate(firsts)]


def tallied(server: Server, replies: Mapping[int, bytes]) -> Tally:
    """The open round of a server once these replies have come, in their order."""
    tally = Tally.of(server)
    for client, packet in replies.items():
        take_upload(server, tally, client, packet)
    return tally


class Federation:
    """Server and clients of one run; each client on its own, as if deployed, and every packet at hand."""

    run = b"a run of tests.."

    def __init__(self, config: RunConfig, task: Task | None = None) -> None:
        task = task or tiny_task()
        parameters = layout_of(task.model()).size
        self.config = resolved(config, parameters)
        self.roster = simulated_roster(RunSeed(config.seed), config.clients)
        device = torch.device("cpu")
        self.bench = make_workbench(self.config, self.run, self.roster, task.model, task.loss, device, 2**20)
        self.server = new_server(self.config, self.run, parameters)
        self.sites: dict[int, Site] = {}
        self.received: list[bytes] = []  # all that has reached the server
        for client, data in enumerate(split_among_clients(task, config)):
            self.sites[client] = simulated_site(RunSeed(config.seed), client, data)
        self.clients = {client: Client(client) for client in self.sites}
        self._set_up()

    def _set_up(self) -> None:
        hellos = {client: hello(self.bench, client, site) for client, site in self.sites.items()}
        self.received += hellos.values()
        self.server = server_side.welcome(self.server, self.read(hellos))
        self.take_keys(self.deliver(server_side.request_key(self.server, 0)))

    def read(self, packets: dict[int, bytes]) -> dict[int, Reply]:
        """Packets as the server reads them."""
        return read(self.server, packets)

    def take_keys(self, packets: dict[int, bytes]) -> None:
        self.server = server_side.take_keys(self.server, self.read(packets))

    def open(self) -> dict[int, bytes]:
        """The packets that start the next round."""
        coins = np.random.default_rng([self.config.seed, self.server.round]).random(self.config.clients)
        self.server, packets = server_side.open_round(self.server, coins)
        return dict(packets)

    def answer(self, client: int, packet: bytes) -> bytes:
        """What a client replies; its state moves on."""
        ((client_state, reply),) = respond(self.bench, [self.clients[client]], [self.sites[client]], [packet])
        self.clients[client] = client_state
        return reply

    def deliver(self, packets: Mapping[int, bytes]) -> dict[int, bytes]:
        """All replies to the server's packets."""
        replies = {client: self.answer(client, packet) for client, packet in packets.items()}
        self.received += replies.values()
        return replies

    def tallied(self, replies: Mapping[int, bytes], corrections: Mapping[int, bytes] | None = None) -> Tally:
        """The open round with these replies."""
        tally = tallied(self.server, replies)
        for client, packet in (corrections or {}).items():
            take_correction(self.server, tally, client, packet)
        return tally

    def close(self, replies: Mapping[int, bytes]) -> server_side.RoundReport:
        tally = self.tallied(replies)
        self.server, requests = server_side.recover(self.server, tally)
        for client, packet in self.deliver(requests).items():
            take_correction(self.server, tally, client, packet)
        self.server, report = server_side.close_round(self.server, tally)
        return report

    def round(self) -> server_side.RoundReport:
        return self.close(self.deliver(self.open()))

    def final_models(self) -> dict[int, np.ndarray]:
        packets = server_side.finish(self.server, tuple(self.clients))
        return {c: finished(self.bench, self.clients[c], self.sites[c], packet).model for c, packet in packets.items()}


def image_file(path: Path, train: int = 60, test: int = 30) -> Path:
    """A small data set in the format of the command line: 28 x 28 images of three classes."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", train), ("test", test)):
        y = np.arange(count) % CLASSES
        x = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        for number, label in enumerate(y):
            x[number, 8 * label : 8 * label + 8] += 150
        arrays |= {f"x_{part}": x, f"y_{part}": y}
    np.savez_compressed(path, **arrays)
    return path


def command(*arguments: object) -> list[str]:
    """The command line in a process of its own."""
    return [sys.executable, "-m", "fedrp", *map(str, arguments)]


def environment() -> dict[str, str]:
    """One thread per process: the tests share their machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As on a full disk, for any user: no file of this process or its children grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # Python ignores the signal that comes with it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


SHORT = tiny_config("fedrp", rounds=2)


def run_and_die(operation: int, out: Path) -> None:
    """A short run that kills its process at its n-th change to the run folder."""
    left = operation

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        changes = event in {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}
        writes = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
        if (changes or writes) and str(out) in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    simulate(SHORT, tiny_task(), out=out, resume=True)


def windows(data: bytes, size: int = 16) -> set[bytes]:
    """All runs of `size` bytes, at any offset."""
    return {data[start : start + size] for start in range(len(data) - size + 1)}


def all_windows(parts: Iterable[bytes]) -> set[bytes]:
    return set().union(*map(windows, parts))


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own, which is soon full."""
    folder.mkdir(parents=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
