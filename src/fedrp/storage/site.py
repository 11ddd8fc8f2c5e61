"""The folder of a deployed client: all it keeps between two messages, in one file that is always complete.

    STATE/RUN/run.json            what the run began with: its settings, the site's weight in it, the data set's name
              state.safetensors   the client's state, see `fedrp.protocol.client_state.Client`; no opened key is in it
              status.json         how things are, for people and monitors
              log.jsonl           what happened, a line per event
              mask.key            the secret of the client's masks, erased once the run is over
              model.safetensors   the delivered model, once the run is over
              lock                held while a message is worked on

RUN is the run id: a client that meets an old run again still knows how far it went, and refuses to do a round twice,
or one with other settings than those that it was told of first: privacy is accounted for these. Both files are written
before the first reply leaves (`fedrp.storage.ledger.begin`); from then on, one that is gone means that the site has
forgotten what it sent, and it sits the run out.
"""

import contextlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save as packed

from fedrp.config.run import Resolved
from fedrp.crypto.sealing import MaskKey
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError, DataError, SiteError
from fedrp.files import erase, locked, read_private, refuse_link, write_atomically
from fedrp.learning.layout import State
from fedrp.protocol.client_state import Client
from fedrp.storage.begun import require_same_settings, settings_of
from fedrp.storage.client_state import packed_clients, read_clients
from fedrp.storage.codec import OtherVersionError
from fedrp.storage.status import append_line, read_status, write_status

DEFAULT_DATA = "default"  # what a site's data set is called if the site does not name it
_SIT_OUT = "let this site sit the run out, it can join the next (an older copy would make it send a round twice)"


class Terms(NamedTuple):
    """What a run begins with at a site, and keeps."""

    settings: Mapping[str, Any]  # of the resolved config, as JSON has them
    weight: int  # the site's, in the mean
    data: str  # the site's name for the data set that it trains on
    records: int = 1  # how many that has, which noise for records is made of

    @classmethod
    def of(cls, config: Resolved, weight: int, data: str, records: int = 1) -> "Terms":
        """The terms of a run with a resolved config; the number of records only counts where noise protects them."""
        return cls(settings_of(config), weight, data, records if config.record_private else 1)


@dataclass(frozen=True)
class SiteFolder:
    """One run at one site, below the site's state folder."""

    state: Path
    run: bytes

    @property
    def root(self) -> Path:
        """The folder of the run."""
        return self.state / self.run.hex()

    def lock(self, patience: float = 600.0) -> AbstractContextManager[None]:
        """Keep other processes away from this folder; waits for one that is at work."""
        return locked(self.root / "lock", patience)

    def begin(self, index: int, terms: Terms) -> None:
        """Make the folder, with the state of a client that has done nothing yet, and tie the run to its terms.

        Guarantees: after a crash at any step it can be called again. The state is written before the terms, so that
        terms without a state mean a loss.

        Raises:
            ConfigError, DataError, SiteError: the run was begun before, see `settle`.
        """
        if self._terms_file.exists():
            self.settle(terms)
            return
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SiteError(f"cannot use the state folder {self.state}: {error.strerror}") from None
        if not self._state_file.exists():
            self.save(Client(index))
        elif self.load(index).taken > 0:
            raise self._lost(self._terms_file)
        record = {"config": terms.settings, "weight": terms.weight, "data": terms.data, "records": terms.records}
        write_atomically(self._terms_file, json.dumps(record, indent=2).encode())

    def settle(self, terms: Terms) -> None:
        """Go on with a run that was begun here, on the same terms.

        Raises:
            ConfigError: it began with other settings, or on other data.
            DataError: it began with another weight.
            SiteError: its state or its terms are gone, or cannot be read.
        """
        for path in (self._terms_file, self._state_file):
            if not path.exists():
                raise self._lost(path)
        run, known = self.run.hex(), self.terms()
        way_out = "other settings need a run of their own, with another store"
        require_same_settings(known.settings, terms.settings, f"run {run}", way_out)
        if known.data != terms.data:
            raise ConfigError(
                f"run {run} began on data '{known.data}' here, not '{terms.data}': put data=\"{known.data}\" back into "
                "the node config until the run is over"
            )
        if known.records != terms.records:
            raise DataError(
                f"run {run} began with {known.records} records here, now there are {terms.records}: its noise was made "
                "for those, so they must stay the same to the end of the run, put them back"
            )
        if known.weight != terms.weight:
            raise DataError(
                f"run {run} began with {known.weight} examples here, now there are {terms.weight}: "
                "with weighting=samples they must stay the same to the end of the run, put them back"
            )

    def terms(self, unnamed: str = DEFAULT_DATA) -> Terms:
        """What the run began with; `unnamed` is the data set of one that is older than such names.

        Raises:
            SiteError: that cannot be read.
        """
        try:
            begun = json.loads(self._terms_file.read_text())
            settings, weight = dict(begun["config"]), int(begun["weight"])
            return Terms(settings, weight, str(begun.get("data", unnamed)), int(begun.get("records", 1)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SiteError(f"{self._terms_file} is damaged ({error!r}): {_SIT_OUT}") from None

    def load(self, index: int) -> Client:
        """The state of client `index`.

        Raises:
            SiteError: the file is gone or damaged, or belongs to another run or client.
        """
        refuse_link(self._state_file)
        if not self._state_file.exists():
            raise self._lost(self._state_file)
        try:
            (client,) = read_clients(self._state_file, self.run)
        except OtherVersionError:
            raise
        except SiteError as error:
            raise SiteError(f"{error}: {_SIT_OUT}") from None
        if client.index != index:
            raise SiteError(f"{self._state_file} belongs to client {client.index}, this is client {index}")
        return client

    def save(self, client: Client) -> None:
        """Write the state. Until this returns, the old one stands."""
        write_atomically(self._state_file, packed_clients(self.run, [client]))

    def mask_key(self, fresh: SecretKey) -> MaskKey | None:
        """The mask key of this run: a new one of the secret `fresh` at the first message, the kept one later.

        None once the run is over: what was recorded of it cannot be unmasked any more, not even here.
        """
        path = self.root / "mask.key"
        if not path.exists():
            if self.status().get("finished"):
                return None
            write_atomically(path, fresh.reveal())  # a kill leaves a whole key or none
        try:
            return MaskKey(SecretKey(read_private(path)))
        except (OSError, ValueError):
            raise SiteError(f"{path} is damaged: {_SIT_OUT}") from None

    def erase_mask_key(self) -> None:
        """Forget the mask key of this run."""
        with contextlib.suppress(FileNotFoundError):
            erase(self.root / "mask.key")

    def deliver(self, model: State) -> Path:
        """Write the delivered model, as its module's `state_dict` names it."""
        path = self.root / "model.safetensors"
        write_atomically(path, packed(model))
        return path

    def status(self) -> dict[str, Any]:
        """What `report` wrote last."""
        return read_status(self.root)

    def report(self, changes: Mapping[str, object]) -> None:
        """Bring the status file up to date."""
        write_status(self.root, {**self.status(), **changes})

    def log(self, event: str, details: Mapping[str, object]) -> None:
        """Add a line to the log."""
        append_line(self.root / "log.jsonl", {"event": event, **details})

    def _lost(self, path: Path) -> SiteError:
        return SiteError(f"run {self.run.hex()} was begun here, but {path} is gone: {_SIT_OUT}")

    @property
    def _terms_file(self) -> Path:
        return self.root / "run.json"

    @property
    def _state_file(self) -> Path:
        return self.root / "state.safetensors"
