"""Where a measured result comes from; kept with it."""

import datetime
import platform
import subprocess
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parents[1]


def origin_of(command: str) -> dict[str, str]:
    """Ask before measuring: it is about the code that this process has loaded, whatever is edited while it runs."""
    return {
        "command": command,
        "commit": _git("rev-parse", "--short", "HEAD") + ("-dirty" if _git("status", "--porcelain", "src") else ""),
        "date": datetime.date.today().isoformat(),
        "machine": f"{_processor()}, Python {platform.python_version()}",
    }


def _processor() -> str:
    """Its name and vector instructions: ratios between programs depend on both."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in told:
        return platform.processor() or platform.machine()
    family = f"family {told['cpu family']}, " if "cpu family" in told else ""
    return f"{told['model name']} ({family}{torch.backends.cpu.get_cpu_capability()})"


def _git(*arguments: str) -> str:
    command = ["git", *arguments]  # of this file alone
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603 - see above
