"""Who simulated clients are, and who takes part: identities, secrets and coins that follow from the public seed."""

import dataclasses
import hashlib
from dataclasses import dataclass

from fedrp.config.run import RunConfig
from fedrp.crypto.roster import Entry, Roster
from fedrp.crypto.sealing import Identity, MaskKey
from fedrp.crypto.secret import SecretKey
from fedrp.learning.objective import Examples
from fedrp.mechanisms.cohort import Coins
from fedrp.protocol.client_state import Site
from fedrp.protocol.wire import RUN_ID_BYTES
from fedrp.rng import RunSeed


@dataclass(frozen=True)
class SimulatedEntropy:
    """Secrets of a simulated client, derived from the public run seed so that a simulation repeats exactly.

    They hide nothing from anyone who knows the seed. A deployment takes `crypto.sealing.SiteEntropy` and no other.
    """

    seed: RunSeed
    client: int

    def secret(self, purpose: str, *indices: int) -> SecretKey:
        """The same 32 bytes for the same seed, client and name."""
        name = "|".join(["fedrp-simulation", str(self.seed.value), str(self.client), purpose, *map(str, indices)])
        return SecretKey(hashlib.sha256(name.encode()).digest())

    def noise(self, run: bytes, round_: int, packet: bytes) -> SecretKey:  # noqa: ARG002 - sealed keys differ each time
        """The noise of a round, whatever was sent: packets hold envelopes, which no two runs have alike."""
        return self.secret("noise", round_)


def simulated_identity(seed: RunSeed, client: int) -> Identity:
    """The identity of a simulated client."""
    return Identity(SimulatedEntropy(seed, client).secret("identity"), f"client-{client}")


def simulated_site(seed: RunSeed, client: int, data: Examples) -> Site:
    """The premises of a simulated client."""
    entropy = SimulatedEntropy(seed, client)
    return Site(simulated_identity(seed, client), entropy, data, MaskKey(entropy.secret("mask")))


def simulated_roster(seed: RunSeed, clients: int) -> Roster:
    """The roster of a simulation, which every client has from the start."""
    identities = [simulated_identity(seed, client) for client in range(clients)]
    return Roster(tuple(Entry(identity.name, identity.public) for identity in identities))


def simulated_run_id(config: RunConfig) -> bytes:
    """The id of a simulated run: the same for the same settings, also if it is given more rounds later."""
    begun = dataclasses.replace(config.stored, rounds=1)
    return hashlib.sha256(f"fedrp-run|{begun}".encode()).digest()[:RUN_ID_BYTES]


def simulated_coins(config: RunConfig, round_: int) -> Coins:
    """What chooses the cohort of a round: the same in every run with this seed."""
    return RunSeed(config.seed).generator("participants", round_).random(config.clients)
