"""Rules of the house that no single test of a module would notice."""

import ast
import importlib
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

import fedrp
from helpers import ROOT

sys.path.append(str(ROOT / "scripts"))
import rooms

SOURCE = ROOT / "src" / "fedrp"
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in FILES}
MODULES = sorted(module.name for module in pkgutil.walk_packages(fedrp.__path__, "fedrp."))
GRAPH = rooms.import_graph()
FRONT_DOOR = "fedrp"  # runs before every module; what it offers is no dependency of theirs


def users_of(package: str) -> set[str]:
    return {module.removeprefix("fedrp.") for module, used in GRAPH.items() if package in used}


def reached(start: str, *passing: str) -> dict[str, str]:
    return rooms.closure(GRAPH, f"fedrp.{start}", [FRONT_DOOR, *passing])


def in_room(*names: str) -> list[str]:
    return [module for module in GRAPH if rooms.room_of(module) in names]


def public_definitions(name: str) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes of a file, and the public methods of public classes."""
    for node in TREES[name].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_"))


# --- rooms -----------------------------------------------------------------------------------------------------------


def test_the_graph_knows_every_module_and_every_room() -> None:
    assert set(GRAPH) == {"fedrp", *MODULES}
    assert {rooms.room_of(module) for module in GRAPH} == {"", *rooms.ROOMS}


@pytest.mark.parametrize("module", sorted(GRAPH.keys() - {FRONT_DOOR}))
def test_a_room_imports_only_rooms_above_it(module: str) -> None:
    order = list(rooms.ROOMS)
    allowed = order[: order.index(rooms.room_of(module)) + 1]
    below = {name for name in rooms.within(GRAPH)[module] if rooms.room_of(name) not in allowed}
    assert not below, f"{module} imports {', '.join(below)}: below its room"
    assert FRONT_DOOR not in GRAPH[module] or rooms.room_of(module) == "cli", f"{module} imports the front door"


def test_simulation_and_flower_never_touch() -> None:
    """Neither imports the other; that no room between them does follows from the order of the rooms."""
    simulation, flower = set(in_room("simulation")), set(in_room("flower"))
    assert simulation
    assert flower
    assert not {module for module in simulation if GRAPH[module] & flower}
    assert not {module for module in flower if GRAPH[module] & simulation}


def test_the_page_shows_the_rooms_as_they_are() -> None:
    page = rooms.PAGE.read_text()
    assert page == rooms.with_diagram(page, GRAPH), "run: python scripts/rooms.py"


def test_every_module_that_the_pages_name_exists() -> None:
    """Files of rooms in code marks, such as `protocol/rounds.py`."""
    for name in ("docs/architecture.md", "CONTRIBUTING.md"):
        pattern = rf"`(?:src/fedrp/)?((?:{'|'.join(rooms.ROOMS)})/[a-z_]*(?:\.py)?)`"
        named = re.findall(pattern, (ROOT / name).read_text())
        assert named, name
        assert not [path for path in named if not (SOURCE / path).exists()], name


# --- what the server can reach ---------------------------------------------------------------------------------------


# All that the server may load of the rooms that make keys and matrices: numbers, sums of what it was sent.
HARMLESS = {f"fedrp.crypto{name}" for name in ("", ".epochs", ".sizes", ".secure_aggregation")}
HARMLESS |= {"fedrp.projection", "fedrp.projection.tags"}
SERVER_SIDE: dict[str, tuple[str, ...]] = {
    "protocol.server": (),
    "means": (),
    "mechanisms.quorum": (),
    "protocol.tally": (),
    "protocol.wire": (),
    "storage.server": (),
    # The driver is in one package with the app of the clients, and its settings are those of both apps.
    "flower.driver": ("fedrp.flower", "fedrp.flower.settings"),
}


@pytest.mark.parametrize("name", SERVER_SIDE)
def test_the_server_side_cannot_reach_a_key_a_model_or_a_matrix(name: str) -> None:
    asked = reached(name, *SERVER_SIDE[name])
    secret = {*in_room("crypto", "projection", "learning", "simulation"), "fedrp.protocol.client", "fedrp.storage.site"}
    found = asked.keys() & ((secret - HARMLESS) | {"torch", "cryptography"})
    assert not found, "; ".join(rooms.chain(asked, module) for module in sorted(found))


def test_nothing_of_the_server_side_takes_or_returns_a_secret() -> None:
    for module in SERVER_SIDE:
        tree = TREES[module.replace(".", "/") + ".py"]
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"SecretKey", "Identity", "SiteEntropy", "SimulatedEntropy", "make_projection"}


@pytest.mark.parametrize("name", ["observations", "inversion", "label_inference", "keysearch", "view"])
def test_attacks_cannot_reach_the_clients(name: str) -> None:
    """No attack can load what holds clients' data, states or the simulator's entropy."""
    asked = reached(f"attacks.{name}")
    truth = {*in_room("simulation", "storage", "flower", "auditing"), "fedrp.protocol.client"}
    truth |= {"fedrp.learning.task", "fedrp.learning.data", "fedrp.attacks.record", "fedrp.attacks.experiment"}
    found = asked.keys() & truth
    assert not found, "; ".join(rooms.chain(asked, module) for module in sorted(found))


# --- where foreign packages are used ---------------------------------------------------------------------------------


def test_flwr_lives_in_its_own_rooms() -> None:
    users = users_of("flwr")
    assert users
    assert {module.split(".")[0] for module in users} <= {"flower", "testing"}


def test_dp_accounting_lives_with_privacy() -> None:
    assert {module.split(".")[0] for module in users_of("dp_accounting")} == {"privacy"}


def test_cryptography_lives_in_few_named_files() -> None:
    assert users_of("cryptography") == {"crypto.secret", "crypto.sealing", "testing.loopback"}  # the last: certificates


@pytest.mark.parametrize("room", [rooms.GROUND, "crypto", "compression", "privacy"])
def test_the_upper_rooms_need_no_torch(room: str) -> None:
    for module in in_room(room):
        assert "torch" not in reached(module.removeprefix("fedrp.")), module


def test_only_simulations_know_entropy_that_repeats() -> None:
    users = {name for name in TREES if any(item == "SimulatedEntropy" for _, item in rooms.imports(TREES[name]))}
    assert {name.split("/")[0] for name in users} <= {"simulation", "auditing"}  # an audit is a simulation too


# --- size ------------------------------------------------------------------------------------------------------------


MOST_LAYERS, MOST_LINES, MOST_ROOT_FILES, MOST_ROOM_LINES = 18, 350, 9, 2000
LINES = {path.relative_to(SOURCE).as_posix(): len(path.read_text().splitlines()) for path in FILES}


def test_imports_form_few_layers_without_a_circle() -> None:
    assert len(rooms.layers(rooms.within(GRAPH))) <= MOST_LAYERS  # raises on a circle


@pytest.mark.parametrize("name", TREES)
def test_a_module_is_short(name: str) -> None:
    assert LINES[name] <= MOST_LINES, f"{name} has {LINES[name]} lines; cut it in two"


def test_the_rooms_and_the_hallway_are_small() -> None:
    lines: Counter[str] = Counter()
    for path in FILES:
        lines[rooms.room_of(rooms.module_of(path))] += LINES[path.relative_to(SOURCE).as_posix()]
    assert max(lines.values()) <= MOST_ROOM_LINES, lines.most_common(1)
    assert len([name for name in TREES if "/" not in name]) <= MOST_ROOT_FILES


# --- how the code is written -----------------------------------------------------------------------------------------


def test_no_public_function_swallows_unknown_keywords() -> None:
    for name in TREES:
        if name.startswith("cli/"):  # click hands its options over by name
            continue
        for node in public_definitions(name):
            if isinstance(node, ast.FunctionDef):
                assert node.args.kwarg is None, f"{name}: {node.name} takes **{node.args.kwarg.arg}"


@pytest.mark.parametrize("name", TREES)
def test_no_asserts(name: str) -> None:
    lines = [node.lineno for node in ast.walk(TREES[name]) if isinstance(node, ast.Assert)]
    assert not lines, f"{name}: assert in line {lines}; it is gone under python -O, raise instead"


@pytest.mark.parametrize("name", TREES)
def test_no_global_generators(name: str) -> None:
    """Randomness is always an argument: numpy's and Python's global generators are never drawn from."""
    allowed = {"Generator", "Philox", "SeedSequence", "BitGenerator", "PCG64", "default_rng"}
    modules = {module for module, _ in rooms.imports(TREES[name])}
    assert "random" not in modules
    assert "numpy.random" not in modules
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("np.random", "numpy.random"):
            assert node.attr in allowed, f"{name}:{node.lineno}: np.random.{node.attr}"
            unseeded = node.attr == "default_rng"
            assert not unseeded, f"{name}:{node.lineno}: take a generator from RunSeed"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.manual_seed", "torch.seed"):
            pytest.fail(f"{name}:{node.lineno}: reseeds torch for everyone")


@pytest.mark.parametrize("name", TREES)
def test_everything_public_is_documented_and_annotated(name: str) -> None:
    assert ast.get_docstring(TREES[name]), f"{name} has no docstring"
    for node in public_definitions(name):
        if not isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), f"{name}: {node.name} has no docstring"
            continue
        if not any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list):
            assert ast.get_docstring(node) or node.name == "forward", f"{name}: {node.name} has no docstring"
        assert node.returns is not None, f"{name}: {node.name} does not say what it returns"


@pytest.mark.parametrize("module", ["fedrp", *MODULES])
def test_every_exported_name_exists(module: str) -> None:
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "flwr":
            raise
        pytest.skip("flwr is not installed")
    exported = getattr(loaded, "__all__", [])
    assert len(set(exported)) == len(exported)
    assert not [name for name in exported if not hasattr(loaded, name)]


def test_the_front_door_is_small_and_complete() -> None:
    assert {"RunConfig", "Task", "simulate", "load_vector", "replace_batchnorm"} <= set(fedrp.__all__)
    assert len(fedrp.__all__) <= 20
    assert sorted(fedrp.__all__) == fedrp.__all__


# --- the tests themselves --------------------------------------------------------------------------------------------


class Collected:
    """A plugin that remembers which files pytest found tests in."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.files = {item.path.relative_to(ROOT).as_posix() for item in items}


def test_the_tests_mirror_the_rooms() -> None:
    """Beside the folder of a room stand those of what has no room of its own."""
    others = {"benchmarks", "contracts", "end_to_end", "support", "vectors"}
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    assert others <= folders
    assert folders - others <= set(rooms.ROOMS)


def test_every_test_file_is_collected_and_has_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    collected = Collected()
    assert pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist"], [collected]) == 0
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("*.py")}
    assert collected.files == {name for name, path in files.items() if path.name.startswith("test_")}
    for name in files.keys() - collected.files:  # a test that hides in a helper would never run
        assert "\ndef test_" not in files[name].read_text(), name
