"""What each adversary gets to see of a run: recorded bytes, and an insider's private key. All attacks start from here.

`Recording.view` hands out one adversary's share of what was recorded. Attacks take a `View`; neither images, nor
models, nor matrices, nor opened keys can be reached from it except through what the adversary really has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fedrp.config.run import Resolved
from fedrp.crypto.sealing import Identity
from fedrp.errors import ConfigError
from fedrp.learning.layout import ModelFactory
from fedrp.learning.objective import Loss
from fedrp.learning.zoo import InputShape
from fedrp.privacy.events import Adversary
from fedrp.protocol import wire
from fedrp.protocol.wire import Kind, Message

ADVERSARIES = {
    "server": Adversary.SERVER,
    "server+client": Adversary.SERVER_AND_CLIENT,
    "client": Adversary.CLIENTS,
}


class Packet(NamedTuple):
    """Bytes on the line between the server and one client."""

    client: int
    data: bytes


@dataclass(frozen=True)
class Public:
    """What everybody knows: the settings, the run's id, the architecture, how images are scaled."""

    config: Resolved
    run: bytes
    model: ModelFactory
    loss: Loss
    shape: InputShape  # of an image
    classes: int
    low: float  # the value of a black pixel
    high: float  # and of a white one


@dataclass(frozen=True)
class Insider:
    """A client that looks, alone or together with the server. Its key opens the envelopes that were sent to it."""

    client: int
    identity: Identity


@dataclass(frozen=True)
class View:
    """All that an adversary has: public facts, the packets that pass by it, and, if a client takes part, its key."""

    public: Public
    packets: tuple[Packet, ...]
    insider: Insider | None
    sees_all: bool  # the server's side of every line, or one client's line only

    def messages(self, kind: Kind) -> list[tuple[int, Message]]:
        """Messages of one kind, each with the client at the other end of the line, in the order of the recording."""
        return [
            (packet.client, message)
            for packet in self.packets
            for message in wire.messages_of(wire.decode(packet.data), kind)
        ]


@dataclass(frozen=True)
class Recording:
    """Everything that was sent in a run, and a way to the clients' private keys."""

    public: Public
    packets: tuple[Packet, ...]
    identity: Callable[[int], Identity]

    def view(self, adversary: Adversary, insider: int = 0) -> View:
        """One adversary's share; `insider` is the client that colludes or looks."""
        clients = self.public.config.clients
        if not 0 <= insider < clients:
            raise ConfigError(f"insider={insider} is not valid: the clients are 0 to {clients - 1}")
        if adversary is Adversary.SERVER:
            return View(self.public, self.packets, None, sees_all=True)
        known = Insider(insider, self.identity(insider))
        if adversary is Adversary.SERVER_AND_CLIENT:
            return View(self.public, self.packets, known, sees_all=True)
        if adversary is Adversary.CLIENTS:
            own = tuple(packet for packet in self.packets if packet.client == insider)
            return View(self.public, own, known, sees_all=False)
        raise ConfigError(f"adversary '{adversary.name}' sees no packets: use 'fedrp attack membership'")
