"""What a deployment is made of: units, image, locked versions."""

import configparser
import dataclasses
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from helpers import ROOT

UNITS = sorted((ROOT / "deploy").glob("*.service"))
EXPOSURE = 3.0  # of 10, as systemd counts; lower is better
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text()

DIRECTIVES = {
    **{"LimitCORE": "0", "UMask": "0077", "CapabilityBoundingSet": "", "NoNewPrivileges": "yes", "PrivateTmp": "yes"},
    **{"PrivateDevices": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "RestrictNamespaces": "yes"},
    **{"RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX", "SystemCallArchitectures": "native"},
}


def directives(unit: Path) -> list[tuple[str, str]]:
    """Every setting of a unit's [Service], in order."""
    text = unit.read_text().replace("\\\n", " ").split("[Service]")[1].split("[Install]")[0]
    lines = [line.strip() for line in text.splitlines()]
    return [(line.split("=", 1)[0], line.split("=", 1)[1]) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_may_do_little(unit: Path) -> None:
    given = directives(unit)
    assert DIRECTIVES.items() <= dict(given).items()
    assert re.fullmatch(r"\d+G", dict(given)["MemoryMax"])
    assert dict(given)["User"] not in ("", "root")
    assert [value for name, value in given if name == "SystemCallFilter"] == ["@system-service", "~@privileged"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_a_unit_hardly_exposed(unit: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here: only the directives were checked")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= EXPOSURE, done.stdout


def test_the_site_unit_starts_a_site_and_ends_it_in_order() -> None:
    given = dict(directives(ROOT / "deploy" / "fedrp-site.service"))
    assert given["ExecStart"] == "/opt/fedrp/bin/fedrp site /etc/fedrp/site.toml"
    assert (given["KillMode"], given["Restart"]) == ("mixed", "always")
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(ROOT / "deploy" / "fedrp-site.service")
    assert set(parser.sections()) == {"Unit", "Service", "Install"}


def test_the_sites_file_has_every_key_and_the_paths_of_the_unit() -> None:
    from fedrp.flower.site import SiteConfig, read_site

    path = ROOT / "deploy" / "site.toml"
    given = tomllib.loads(path.read_text())
    assert {name.replace("-", "_") for name in given} == {field.name for field in dataclasses.fields(SiteConfig)}
    assert read_site(path).state.is_relative_to("/var/lib/fedrp")  # the unit's StateDirectory


# --- the image -------------------------------------------------------------------------------------------------------


def stages() -> list[str]:
    return re.split(r"^FROM ", CONTAINER, flags=re.MULTILINE)[1:]


def test_the_image_has_two_stages_and_a_user_without_rights() -> None:
    build, final = stages()
    assert build.startswith("${BASE} AS build\n")
    assert final.startswith("${BASE}\n")
    assert "--require-hashes" in build
    assert "pip" not in final
    assert "COPY --from=build" in final
    assert re.search(r"^USER 10001$", final, re.MULTILINE)
    assert 'CMD ["fedrp", "site", "/etc/fedrp/site.toml"]' in final


DIGEST = f"docker.io/library/python:3.11-slim@sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("base", "good"), [(DIGEST, True), ("python:3.11-slim", False), (DIGEST[:-1], False), ("", False)]
)
def test_a_base_image_without_a_digest_is_refused(base: str, good: bool) -> None:
    """The line of the build that checks it, run here: there may be no container tool and no registry."""
    (check,) = re.findall(r"^RUN (printf .*)$", CONTAINER, re.MULTILINE)
    done = subprocess.run(["sh", "-c", check], env={"BASE": base, "PATH": "/usr/bin:/bin"}, capture_output=True)
    assert (done.returncode == 0) == good
    assert good or f"BASE={base} has no digest" in done.stderr.decode()


def test_the_image_is_built_from_listed_files_only() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    admitted = {line[1:] for line in lines if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--from)(.*)$", CONTAINER, re.MULTILINE)
    copied = {name for line in copies for name in line.split()[:-1]}
    assert admitted == copied
    assert all((ROOT / name).exists() for name in copied)


# --- locked versions -------------------------------------------------------------------------------------------------


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", text, re.MULTILINE)
    assert len({normal(name) for name, _ in found}) == len(found)
    return {normal(name): version for name, version in found}


def test_the_lock_has_the_tested_versions_and_a_hash_for_each() -> None:
    tested = pinned((ROOT / "constraints.txt").read_text())
    text = (ROOT / "requirements.lock").read_text()
    locked = pinned(text)
    # PyPI's torch for Linux brings CUDA; the tests ran with the CPU build, which does not.
    brought = {n for n in locked.keys() - tested.keys() if not n.startswith(("nvidia-", "cuda-"))}
    assert brought <= {"triton", "setuptools"}
    assert {name: locked[name] for name in locked.keys() & tested.keys()} == {
        name: tested[name] for name in locked.keys() & tested.keys()
    }
    for block in re.split(r"\n(?=[a-z])", text)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block.splitlines()[0]


def test_the_lock_has_all_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["flower"]]
    names = {normal(re.match(r"[A-Za-z0-9._-]+", line)[0]) for line in asked}
    assert names <= pinned((ROOT / "requirements.lock").read_text()).keys()
