"""A whole federation on this machine: SuperLink with TLS and node authentication, sites, certificates, keys.

For the demo, the tests and measurements; docs/deploy.md does the same by hand on real machines. Listens on 127.0.0.1
only, and ends every process that it started.
"""

import dataclasses
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
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

from fedrp.crypto.roster import entry_of, load_identity, merged, new_identity, write_roster
from fedrp.errors import FedRPError
from fedrp.files import write_atomically
from fedrp.flower.environment import LOOPBACK, free_port, quiet_environment
from fedrp.flower.settings import Pacing
from fedrp.storage.status import statuses
from fedrp.testing.relay import Relay

CONNECTION = "loopback"
_PATIENCE = 120.0  # seconds until a process must be up, on a busy machine


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
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(LOOPBACK))]
    authority = _certificate(issuer, issuer, root.public_key(), authority=True).sign(root, hashes.SHA256())
    builder = _certificate(issuer, subject, server.public_key(), authority=False)
    certificate = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(root, hashes.SHA256())
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    write_atomically(files.key, _pem(server, serialization.PrivateFormat.PKCS8))
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
    write_atomically(path, _pem(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(public)


def _pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


# --- the federation --------------------------------------------------------------------------------------------------


class Loopback:
    """A SuperLink and one `fedrp site` per site, below one folder; a context manager that ends them.

    Args:
        root: folder of all that is made.
        names: of the sites.
        app: folder of the Flower app that the sites have installed.
    """

    def __init__(self, root: Path, names: Sequence[str], app: Path) -> None:
        self.root, self.names, self.app = root, list(names), app
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
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
            make_node_key(self.node_key(name))
            new_identity(self.site_key(name), name)
        self.agree({})
        write_roster(self.roster, merged(entry_of(load_identity(self.site_key(name))) for name in self.names))
        self._port = free_port()
        address = f"{LOOPBACK}:{self._port}"
        (self._home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n'
            f'root-certificates = "{self.certificates.authority.resolve()}"\n'
        )
        self.start_superlink()
        self.cables = {name: Relay(self._port) for name in self.names}
        registrations = [self.flwr("supernode", "register", f"{self.node_key(n)}.pub", CONNECTION) for n in self.names]
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
        arguments += ["--enable-supernode-auth", "--host", LOOPBACK, "--port", self._port]
        arguments += ["--database", self.root / "superlink.db", "--disable-runtime-dependency-installation"]
        process = self._spawn("superlink", "flower-superlink", *arguments)
        end = time.monotonic() + _PATIENCE
        while not _listens(self._port):
            if process.poll() is not None or time.monotonic() > end:
                raise FedRPError(f"the SuperLink did not start: see {self.log_file('superlink')}")
            time.sleep(0.2)

    def start_site(self, name: str) -> None:
        """Start a site."""
        path = self.root / f"{name}.toml"
        path.write_text(_toml(self.site_settings(name)))
        self._spawn(name, "fedrp", "site", path)

    def site_settings(self, name: str) -> dict[str, object]:
        """What the TOML file of a site says."""
        app = tomllib.loads((self.app / "pyproject.toml").read_text())
        paths = {
            "root_certificates": self.certificates.authority,
            "node_key": self.node_key(name),
            "key": self.site_key(name),
            "roster": self.roster,
            "agreed": self.agreed,
            "state": self.site_state(name),
        }
        return {
            "app": app["tool"]["flwr"]["app"]["components"]["clientapp"],
            "superlink": f"{LOOPBACK}:{self.cables[name].port}",
            **{setting: str(path.absolute()) for setting, path in paths.items()},
        }

    def agree(self, settings: Mapping[str, object]) -> None:
        """Have all sites agree to a run of their app with these settings, and to no other."""
        app = tomllib.loads((self.app / "pyproject.toml").read_text())
        asked = {**app["tool"]["flwr"]["app"]["config"], **settings}
        pacing = {item.name for item in dataclasses.fields(Pacing)}
        self.agreed.write_text(_toml({k: v for k, v in asked.items() if k.replace("-", "_") not in pacing}))

    @contextmanager
    def running(self, settings: Mapping[str, object], app: Path | None = None) -> Iterator[Iterator[str]]:
        """Submit the sites' app, with settings that they agree to, or another one, without asking them.

        Gives the lines of the run's log as they come, until the run ends.
        """
        if app is None:
            self.agree(settings)
        overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        options = ["--run-config", overrides] if overrides else []
        process = self.flwr("run", str(app or self.app), CONNECTION, "--stream", *options)
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
        return subprocess.Popen(  # noqa: S603 - a program of this environment
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

    @property
    def agreed(self) -> Path:
        """The file of settings that the sites agree to."""
        return self.root / "agreed.toml"

    def node_key(self, name: str) -> Path:
        """The private key file that Flower knows a site's node by."""
        return self.root / f"node-{name}"

    def log_file(self, name: str) -> Path:
        """What a process printed."""
        return self.root / "logs" / f"{name}.log"

    @property
    def _home(self) -> Path:
        return self.root / "flwr"

    def _spawn(self, name: str, program: str, *arguments: object) -> "subprocess.Popen[bytes]":
        command = [_program(program), *map(str, arguments)]
        if before := self._processes.pop(name, None):
            before.wait()
        home = self._home / name  # every machine has a Flower folder of its own
        home.mkdir(parents=True, exist_ok=True)
        installed = os.pathsep.join(filter(None, [str(self.app.absolute()), os.environ.get("PYTHONPATH", "")]))
        threads = str(max(1, (os.cpu_count() or 1) // len(self.names)))  # the sites share this machine
        with self.log_file(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(  # noqa: S603 - as above
                command,
                env={"OMP_NUM_THREADS": threads, **quiet_environment(home), "PYTHONPATH": installed},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._processes[name]


def _toml(settings: Mapping[str, object]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def _program(name: str) -> str:
    """A program of this Python's environment, whether or not that is activated."""
    return str(Path(sys.executable).parent / name)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0


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
