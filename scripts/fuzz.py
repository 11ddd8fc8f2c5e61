"""Fuzz the decoder and both state machines of the protocol, guided by coverage (atheris, which is libFuzzer).

    python scripts/fuzz.py [--seconds 60] [--target wire|client|server] [--keep]

Begins with the corpus of the repository, `tests/protocol/corpus/TARGET.txt` (an input per line, in hex), and shares the
time among the targets. With --keep, inputs that reach new code are added to it. An input that breaks a rule is
printed, and the exit code is 1: add it to the corpus as a line, mend the code, and `tests/protocol/test_fuzz.py` keeps
it mended.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "tests" / "protocol" / "corpus"
TARGETS = ("wire", "client", "server")
LONGEST = {"wire": 4096, "client": 160, "server": 160}  # bytes of an input
_RSS_MB = 2048  # of the whole process, with torch in it


def main() -> None:
    asked = _arguments()
    if asked.run:
        _run(asked.target, asked.folder, asked.seconds)
        return
    try:
        import atheris  # noqa: F401 - installed only for this
    except ImportError:
        sys.exit("atheris is not installed: pip install 'fedrp[fuzz]' (Linux on x86-64, Python 3.11 to 3.13)")
    targets = (asked.target,) if asked.target else TARGETS
    broken = [target for target in targets if not _fuzzed(target, asked.seconds // len(targets), asked.keep)]
    sys.exit(1 if broken else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="how long, all targets together")
    parser.add_argument("--target", choices=TARGETS, help="one target only")
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new code to the corpus")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _fuzzed(target: str, seconds: int, keep: bool) -> bool:
    """Fuzz one target in a process of its own; whether no rule was broken."""
    kept = CORPUS / f"{target}.txt"
    lines = kept.read_text().splitlines() if kept.exists() else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        for number, line in enumerate(lines):
            (folder / "corpus" / f"{number:04d}").write_bytes(bytes.fromhex(line))
        command = [sys.executable, __file__, "--run", "--target", target, "--folder", name, "--seconds", str(seconds)]
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, errors="replace")  # noqa: S603 - own
        told = done.stderr.splitlines()
        print(f"{target}:", next((line for line in reversed(told) if " cov: " in line), "nothing was run"))
        if done.returncode:
            print(*told[-40:], sep="\n", file=sys.stderr)
        for path in sorted(folder.glob("broken-*")):
            print(f"{target}: {path.read_bytes().hex()} breaks a rule, see above", file=sys.stderr)
        found = {path.read_bytes().hex() for path in (folder / "corpus").iterdir()}
    print(f"{target}: {len(found) - len(set(lines))} inputs beside the corpus reach code that it does not")
    if keep:
        CORPUS.mkdir(exist_ok=True)
        kept.write_text("".join(f"{line}\n" for line in sorted(found)))
    return done.returncode == 0


def _run(target: str, folder: Path, seconds: int) -> None:
    """Fuzz in this process, with the corpus in `folder`."""
    import atheris

    sys.path[:0] = [str(ROOT / "tests" / part) for part in ("support", "protocol")]
    # Numba compiles the kernels from their bytecode, which must be as it was.
    with atheris.instrument_imports(include=["fedrp"], exclude=["fedrp.projection.kernels"]):
        import fuzz_targets

    logging.disable(logging.CRITICAL)
    tracemalloc.start()
    fuzz_targets.ready()
    chosen = fuzz_targets.TARGETS[target]
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST[target]}",
        f"-artifact_prefix={folder}/broken-",
        f"-rss_limit_mb={_RSS_MB}",
        "-timeout=20",
        "-len_control=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(folder / "corpus")], lambda data: fuzz_targets.checked(chosen, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
