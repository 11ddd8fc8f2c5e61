"""A site in one command: its SuperNode, and the executor that answers with the client app that the site installed.

    fedrp site site.toml

What the server's side submits is settings and messages; its code is never opened here. The settings are checked against
the site's `agreed` file for every message, as in every deployment (`fedrp.flower.settings`).

One process to watch: it starts the SuperNode as its child, and the two end together. Nothing is lost by ending them at
any moment, since the state of the site is on the disk before a reply leaves; a service manager starts them again.
"""

import dataclasses
import importlib
import os
import re
import secrets
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedrp.config.checks import require, require_types
from fedrp.config.toml import from_settings, read_toml
from fedrp.crypto.roster import Roster, load_identity
from fedrp.errors import ConfigError, SiteError, first_line
from fedrp.files import locked, read_private, write_atomically
from fedrp.flower import executor
from fedrp.flower.environment import LOOPBACK, free_port, quiet_environment
from fedrp.flower.settings import Values
from fedrp.storage.site import DEFAULT_DATA

Say = Callable[[str], None]

_FILES = ("root_certificates", "node_key", "key", "roster", "agreed")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):(\d{1,5})")
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_GRACE = 10.0  # seconds that the SuperNode has to say goodbye to the SuperLink


@dataclass(frozen=True)
class SiteConfig:
    """What a site's TOML file says."""

    app: str  # the installed client app, "module:name"
    superlink: str  # address of the server's SuperLink, "host:port"
    root_certificates: Path  # of the authority that signed the SuperLink's certificate
    node_key: Path  # private key that Flower knows the node by
    key: Path  # private key that the other sites know this one by
    roster: Path
    state: Path  # folder of the site's state
    agreed: Path  # settings that the site agrees to
    data: str = DEFAULT_DATA  # name of the data set whose budget runs are charged to
    device: str = "cpu"  # torch device of local training
    poll: float = 1.0  # seconds between two looks for messages at the SuperLink
    port: int = 0  # of the SuperNode's runtime API on 127.0.0.1; 0: any that is free
    node: dict[str, Any] = field(default_factory=dict)  # values of the app's own, for its `load` function

    def __post_init__(self) -> None:
        require_types(self)
        require(bool(_REFERENCE.fullmatch(self.app)), "app", self.app, "'module:name' of an installed client app")
        address = _ADDRESS.fullmatch(self.superlink)
        known = address is not None and 0 < int(address[2]) < 2**16
        require(known, "superlink", self.superlink, "'host:port', without https://")
        require(0.1 <= self.poll <= 60, "poll", self.poll, "0.1 to 60 seconds")
        require(0 <= self.port < 2**16, "port", self.port, "0 to 65535")
        for name, value in self.node.items():
            plain = isinstance(value, bool | float | int | str)
            require(plain, f"node.{name}", value, "text, a number, true or false")
            require(name not in self._shared, f"node.{name}", value, f"another name: '{name}' stands above")

    @property
    def _shared(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in ("key", "roster", "state", "agreed", "data", "device")}

    @property
    def node_config(self) -> Values:
        """What the client app finds in `Context.node_config`."""
        return {**self.node, **self._shared}


def read_site(path: Path) -> SiteConfig:
    """The settings in a site's TOML file. Relative paths start at the file's folder.

    Raises:
        ConfigError: a key is missing, unknown or of the wrong type, or a value makes no sense.
    """
    fields = {item.name: item for item in dataclasses.fields(SiteConfig)}
    settings = read_toml(path, fields)
    for name, item in fields.items():
        needed = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if needed and name not in settings:
            raise ConfigError(f"{path} has no '{name}': add {name} = ...")
        if item.type is Path and name in settings:
            value = settings[name]
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{path}: {name}={value!r} is not valid: expected a path")
            settings[name] = path.parent.absolute() / Path(value).expanduser()
    try:
        return from_settings(SiteConfig, settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def check_site(config: SiteConfig) -> tuple[ClientApp, str]:
    """The site's client app, and one line that says who this site is; everything but the network has been looked at.

    Raises:
        ConfigError: something is not as the settings say.
    """
    for name in _FILES:
        path: Path = getattr(config, name)
        try:
            read_private(path) if name == "node_key" else path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from None
    identity, roster = load_identity(config.key), Roster.load(config.roster)
    place = roster.place_of(identity)
    try:
        torch.empty(1, device=torch.device(config.device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={config.device} cannot be used here: {first_line(error)}") from None
    app = load_app(config.app)
    return app, f"site {identity.name} (client {place} of roster {roster.fingerprint}) with {config.app}"


def load_app(reference: str) -> ClientApp:
    """The client app that a site installed.

    Raises:
        ConfigError: it is not there, fails when it is imported, or is no client app.
    """
    module, _, name = reference.partition(":")
    try:
        app = getattr(importlib.import_module(module), name)
    except Exception as error:  # the site's own code: anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        why = f"{type(error).__name__}: {first_line(error)} ({where})"
        raise ConfigError(f"cannot load app={reference}: {why}; install the app at this site") from error
    if not isinstance(app, ClientApp):
        raise ConfigError(f"app={reference} is a {type(app).__name__}: expected what fedrp.flower.client_app returns")
    return app


def run_site(config: SiteConfig, say: Say) -> None:
    """Take part until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: something is not as the settings say.
        SiteError: the SuperNode ended, or another process works for this site.
        SystemExit: after SIGTERM.
    """
    signal.signal(signal.SIGTERM, _stop)
    app, about = check_site(config)
    home = config.state / "flwr"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SiteError(f"cannot use the state folder {config.state}: {error.strerror}") from None
    with locked(config.state / "site.lock", patience=0.0), _supernode(config, home) as (address, secret, watch):
        say(about)
        executor.work(address, secret, _answering(app, config.node_config), watch)


def _stop(_number: int, _frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise SystemExit(0)


def _answering(app: ClientApp, node_config: Values) -> executor.Answer:
    def answer(message: Message, context: Context) -> Message:
        context.node_config = dict(node_config)
        return app(message, context)

    return answer


@contextmanager
def _supernode(config: SiteConfig, home: Path) -> Iterator[tuple[str, bytes, Callable[[], None]]]:
    """A SuperNode of this process: where it gives out tasks, the secret that it asks for, what looks after it."""
    port, secret, proof = config.port or free_port(), secrets.token_bytes(32), home / "executor.secret"
    write_atomically(proof, secret)
    program = [sys.executable, "-P", str(Path(__file__).with_name("supernode.py")), str(os.getpid()), str(config.poll)]
    options = ["--isolation", "process", "--host", LOOPBACK, "--port", str(port), "--superlink", config.superlink]
    options += ["--root-certificates", str(config.root_certificates)]
    options += ["--auth-supernode-private-key", str(config.node_key), "--superexec-auth-secret-file", str(proof)]
    # In a session of its own: Ctrl-C is for this process, which then ends the child in good order.
    child = subprocess.Popen(  # noqa: S603 - our own program; the options come from the site's own file
        [*program, *options], env=quiet_environment(home), stdin=subprocess.DEVNULL, start_new_session=True
    )

    def watch() -> None:
        if (code := child.poll()) is not None:
            raise SiteError(f"the SuperNode has ended with code {code}: see what it says above, then start again")

    try:
        yield f"{LOOPBACK}:{port}", secret, watch
    finally:
        child.terminate()
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        proof.unlink(missing_ok=True)
