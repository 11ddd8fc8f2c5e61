"""What Flower's programs find, wherever we start them: variables, a port."""

import os
import socket
import sys
from pathlib import Path

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


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
