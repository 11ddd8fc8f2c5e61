"""A whole federation on this machine: SuperLink with TLS and node authentication, SuperNodes, certificates, keys.

For the demo, the tests and measurements; docs/deploy.md does the same by hand on real machines. Listens on 127.0.0.1
only, and ends every process that it started.
"""

import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedrp.errors import FedRPError
from fedrp.flower.relay import Relay
from fedrp.roster import entry_of, load_identity, merged, new_identity, write_roster
from fedrp.status import statuses

CONNECTION = "loopback"
_HOST = "127.0.0.1"
_PATIENCE = 120.0  # seconds until a process must be up, on a busy machine


def quiet_environment(home: Path) -> dict[str, str]:
    """The environment of every Flower process that we start: it reports nothing home, fetches and installs nothing."""
    programs = str(Path(sys.executable).parent)  # Flower's programs start each other by name
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps Ray's sockets on 127.0.0.1
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    }


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


# --- certificates and keys -------------------------------------------------------------------------------------------


class Certificates(NamedTuple):
    """Files of a server's TLS."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """A certificate authority of one day and a server certificate for localhost."""
    files = Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    root, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedrp loopback CA")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(_HOST))]
    authority = _certificate(issuer, issuer, root.public_key(), authority=True).sign(root, hashes.SHA256())
    builder = _certificate(issuer, subject, server.public_key(), authority=False)
    certificate = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(root, hashes.SHA256())
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(files.key, _pem(server, serialization.PrivateFormat.PKCS8))
    return files


def _certificate(
    issuer: x509.Name, subject: x509.Name, public: ec.EllipticCurvePublicKey, authority: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )


def make_node_key(path: Path) -> None:
    """A key that a SuperNode proves itself with: `path`, and `path`.pub for the SuperLink."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(path, _pem(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(public)


def _pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write_private(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


# --- the federation --------------------------------------------------------------------------------------------------


class Loopback:
    """A SuperLink and one SuperNode per site, below one folder; a context manager that ends them."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root, self.names = root, list(names)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        self.cables: dict[str, Relay] = {}  # between each site and the SuperLink

    def __enter__(self) -> "Loopback":
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        for folder in (self.root, self.root / "tls", self.root / "logs", self._home):
            folder.mkdir(parents=True, exist_ok=True)
        self.certificates = make_certificates(self.root / "tls")
        for name in self.names:
            make_node_key(self._node_key(name))
            new_identity(self.site_key(name), name)
        write_roster(self.roster, merged(entry_of(load_identity(self.site_key(name))) for name in self.names))
        self._ports = {name: free_port() for name in ("superlink", *self.names)}
        address = f"{_HOST}:{self._ports['superlink']}"
        (self._home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n'
            f'root-certificates = "{self.certificates.authority.resolve()}"\n'
        )
        self.start_superlink()
        self.cables = {name: Relay(self._ports["superlink"]) for name in self.names}
        registrations = [self.flwr("supernode", "register", f"{self._node_key(n)}.pub", CONNECTION) for n in self.names]
        for name, registration in zip(self.names, registrations, strict=True):
            output, _ = registration.communicate(timeout=_PATIENCE)
            if registration.returncode:
                raise FedRPError(f"could not register the node of {name}: {output.decode().strip()[-300:]}")
        for name in self.names:
            self.start_site(name)

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it listens."""
        tls = self.certificates
        arguments = ["--ssl-ca-certfile", tls.authority, "--ssl-certfile", tls.certificate, "--ssl-keyfile", tls.key]
        arguments += ["--enable-supernode-auth", "--host", _HOST, "--port", self._ports["superlink"]]
        arguments += ["--database", self.root / "superlink.db", "--disable-runtime-dependency-installation"]
        process = self._spawn("superlink", "flower-superlink", *arguments)
        end = time.monotonic() + _PATIENCE
        while not _listens(self._ports["superlink"]):
            if process.poll() is not None or time.monotonic() > end:
                raise FedRPError(f"the SuperLink did not start: see {self.log_file('superlink')}")
            time.sleep(0.2)

    def start_site(self, name: str, node_config: Mapping[str, object] | None = None) -> None:
        """Start the SuperNode of a site."""
        config = {**self.node_config(name), **(node_config or {})}
        arguments = ["--root-certificates", self.certificates.authority, "--superlink"]
        arguments += [f"{_HOST}:{self.cables[name].port}", "--host", _HOST, "--port", self._ports[name]]
        arguments += ["--auth-supernode-private-key", self._node_key(name), "--node-config"]
        arguments += [" ".join(f"{key}={json.dumps(value)}" for key, value in config.items())]
        self._spawn(name, "flower-supernode", *arguments)

    def node_config(self, name: str) -> dict[str, object]:
        """The settings of a site, as its SuperNode is given them."""
        return {
            "key": str(self.site_key(name)),
            "roster": str(self.roster),
            "state": str(self.site_state(name)),
        }

    @contextmanager
    def running(self, app: Path, settings: Mapping[str, object]) -> Iterator[Iterator[str]]:
        """Submit an app; the lines of its log as they come, until the run ends."""
        overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        process = self.flwr("run", str(app), CONNECTION, "--stream", "--run-config", overrides)
        self._processes["run"] = process
        with process:
            try:
                yield (line.decode(errors="replace").rstrip() for line in process.stdout or ())
            finally:
                if "run" in self._processes:
                    self.kill("run")

    def transport_bytes(self) -> tuple[int, int]:
        """What has passed between sites and SuperLink, up and down: TLS and HTTP, polling and heartbeats included."""
        cables = self.cables.values()
        return sum(cable.bytes_up for cable in cables), sum(cable.bytes_down for cable in cables)

    def flwr(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """A `flwr` command that talks to this SuperLink."""
        command = [_program("flwr"), *arguments]
        return subprocess.Popen(
            command,
            env=quiet_environment(self._home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def status(self, name: str) -> dict[str, Any]:
        """What a site's status file says of its latest run."""
        return statuses(self.site_state(name))[-1]

    def kill(self, name: str) -> None:
        """End a site or the SuperLink at once, with all that it started, as a power cut would."""
        process = self._processes.pop(name)
        _end(_family(process), signal.SIGKILL)
        process.wait()

    def alive(self, name: str) -> bool:
        """Whether a process is there."""
        return name in self._processes and self._processes[name].poll() is None

    def stop(self) -> None:
        """End everything."""
        family = [member for process in self._processes.values() for member in _family(process)]
        _end(family, signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=10)
        _end(left, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        for cable in self.cables.values():
            cable.close()

    def processes(self) -> dict[str, int]:
        """Process ids, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    def site_state(self, name: str) -> Path:
        """The state folder of a site."""
        return self.root / "sites" / name

    def site_key(self, name: str) -> Path:
        """The private key file of a site."""
        return self.root / f"{name}.key"

    @property
    def roster(self) -> Path:
        """The roster file of all sites."""
        return self.root / "roster.toml"

    def log_file(self, name: str) -> Path:
        """What a process printed."""
        return self.root / "logs" / f"{name}.log"

    @property
    def _home(self) -> Path:
        return self.root / "flwr"

    def _node_key(self, name: str) -> Path:
        return self.root / f"node-{name}"

    def _spawn(self, name: str, program: str, *arguments: object) -> "subprocess.Popen[bytes]":
        command = [_program(program), *map(str, arguments)]
        home = self._home / name  # every machine has a Flower folder of its own
        home.mkdir(parents=True, exist_ok=True)
        with self.log_file(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                env=quiet_environment(home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._processes[name]


def _program(name: str) -> str:
    """A program of this Python's environment, whether or not that is activated."""
    return str(Path(sys.executable).parent / name)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((_HOST, port)) == 0


def _family(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """A process that we started and all that it started, also those that it detached."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(process.pid)
        return [first, *first.children(recursive=True)]
    return []


def _end(family: Sequence[psutil.Process], number: signal.Signals) -> None:
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.send_signal(number)
