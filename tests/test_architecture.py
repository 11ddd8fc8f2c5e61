"""Rules of the house that no single test of a module would notice."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest

import fedrp
from helpers import ROOT

SOURCE = ROOT / "src" / "fedrp"
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in FILES}
MODULES = sorted(module.name for module in pkgutil.walk_packages(fedrp.__path__, "fedrp."))


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import, also those inside functions; the name is empty for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def imported_modules(tree: ast.AST) -> set[str]:
    found = {(module, f"{module}.{item}") for module, item in imports(tree)}
    return {whole if whole in MODULES else module for module, whole in found}


def users_of(package: str) -> set[str]:
    return {
        name
        for name in TREES
        if any(m == package or m.startswith(f"{package}.") for m in imported_modules(TREES[name]))
    }


def public_definitions(name: str) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes of a file, and the public methods of public classes."""
    for node in TREES[name].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_"))


# --- who may import what -------------------------------------------------------------------------------------------


SERVER_SIDE = ["coordinator.py", "aggregate.py", "secure_sum.py", "wire.py", "serverfolder.py", "flower/driver.py"]


@pytest.mark.parametrize("name", SERVER_SIDE)
def test_the_server_side_imports_nothing_that_makes_a_key_a_model_or_a_matrix(name: str) -> None:
    forbidden = {
        f"fedrp.{module}"
        for module in ("secret", "models", "training", "silo", "host", "kernels", "data", "task", "roster", "masks")
    }
    assert not imported_modules(TREES[name]) & (forbidden | {"torch"})
    harmless = {"projection_tag", "ENVELOPE_BYTES", "MASK_KEY_BYTES", "split"}
    taken = {
        item for module, item in imports(TREES[name]) if module in ("fedrp.projection.families", "fedrp.crypto.sealing")
    }
    assert taken <= harmless


def test_nothing_of_the_server_side_takes_or_returns_a_secret() -> None:
    for name in SERVER_SIDE:
        names = {node.id for node in ast.walk(TREES[name]) if isinstance(node, ast.Name)}
        assert not names & {"SecretKey", "Identity", "SiteEntropy", "SimulatedEntropy", "make_projection"}


def test_flwr_lives_in_its_own_files() -> None:
    users = users_of("flwr")
    assert users
    assert all(name.startswith("flower/") for name in users)


def test_dp_accounting_lives_with_privacy() -> None:
    users = users_of("dp_accounting")
    assert users
    assert all(name.startswith("privacy/") for name in users)


def test_cryptography_lives_in_few_named_files() -> None:
    assert users_of("cryptography") == {"secret.py", "sealing.py", "flower/loopback.py"}  # the last: certificates


def test_only_the_simulator_knows_entropy_that_repeats() -> None:
    users = {name for name in TREES if any(item == "SimulatedEntropy" for _, item in imports(TREES[name]))}
    assert not users - {"simulate.py", "game.py"}  # the game is a simulation too


@pytest.mark.parametrize(
    "ground", ["errors.py", "config.py", "rng.py", "secret.py", "wire.py", "sealing.py", "roster.py"]
)
def test_the_ground_floor_needs_no_torch(ground: str) -> None:
    assert ground not in users_of("torch")


def test_imports_form_layers_without_a_circle() -> None:
    def module_name(file: str) -> str:
        return "fedrp." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    graph = {}
    for file, tree in TREES.items():
        if file == "__init__.py":
            continue
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        graph[module_name(file)] = imported_modules(top) & set(MODULES)
    list(TopologicalSorter(graph).static_order())  # raises CycleError


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
    modules = {module for module, _ in imports(TREES[name])}
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


def test_every_test_file_is_collected_and_has_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    collected = Collected()
    assert pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist"], [collected]) == 0
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("*.py")}
    assert collected.files == {name for name, path in files.items() if path.name.startswith("test_")}
    for name in files.keys() - collected.files:  # a test that hides in a helper would never run
        assert "\ndef test_" not in files[name].read_text(), name
