"""The import graph of the package, and the diagram of its rooms in docs/architecture.md.

    python scripts/rooms.py          write the diagram into the page
    python scripts/rooms.py layers   show the layers of modules

Every import counts, also one inside a function. `tests/test_architecture.py` holds the code to this list of rooms.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = "fedrp"
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- rooms: python scripts/rooms.py -->", "<!-- end rooms -->"
GROUND = "ground"  # the modules at the root of the package, but the front door, and the packages among them
GROUND_PACKAGES = ("config",)
# A room imports only rooms above it in this list.
ROOMS = {
    GROUND: "settings, errors, randomness, files",
    "crypto": "keys, sealed envelopes, masks, secure sums",
    "projection": "A w from a key, matrix-free",
    "compression": "few bits per number",
    "privacy": "events, bounds, guarantees",
    "mechanisms": "an update on its way: clip, noise, whole numbers",
    "stacking": "many models computed as one",
    "learning": "one client's data and model",
    "engines": "local training, one client or several as one",
    "records": "one record's part in a local step",
    "algorithms": "what is computed and what is released",
    "protocol": "bytes in, bytes out",
    "storage": "what survives a crash",
    "reporting": "tables, plots, pages, read from run folders",
    "backends": "what runs simulated clients: processes or Ray",
    "simulation": "all parties on this machine or cluster",
    "exporting": "models for other programs: files and predictions",
    "flower": "real machines",
    "auditing": "try to refute a stated epsilon",
    "attacks": "try to read the data",
    "trackers": "what a run measures, for other tools",
    "benchmarking": "speed, as ratios measured in one run",
    "reproduction": "the paper's table and figures",
    "testing": "a federation on one machine, for tests and demos",
    "cli": "one file per group of commands",
}

Graph = Mapping[str, set[str]]


def module_of(path: Path, source: Path = SOURCE) -> str:
    """The dotted name of a file."""
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def module_files(source: Path = SOURCE) -> dict[str, Path]:
    """The modules of the package and their files."""
    return {module_of(path, source): path for path in sorted((source / PACKAGE).rglob("*.py"))}


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import; the name is empty for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"line {node.lineno}: relative import; write the whole name")
            yield from ((node.module or "", alias.name) for alias in node.names)


def import_graph(source: Path = SOURCE) -> dict[str, set[str]]:
    """What each module imports, foreign packages too (without what is inside them)."""
    files = module_files(source)
    graph = {}
    for module, path in files.items():
        found = {(base, f"{base}.{name}") for base, name in imports(ast.parse(path.read_text()))}
        named = {whole if whole in files else base for base, whole in found}
        graph[module] = {name if name in files else name.split(".")[0] for name in named} - {module}
    return graph


def within(graph: Graph) -> dict[str, set[str]]:
    """The graph of the rooms' modules: without foreign packages and without the front door, which only names them."""
    inside = graph.keys() - {PACKAGE}
    return {module: used & inside for module, used in graph.items() if module in inside}


def closure(graph: Graph, start: str, passing: Iterable[str] = ()) -> dict[str, str]:
    """Everything that is loaded or can be loaded with a module, and what asks for it first.

    To import a.b.c is to run the packages a and a.b too. `passing` names modules that are not looked into.
    """
    asked, queue = {start: ""}, [start]
    while queue:
        module = queue.pop(0)
        parents = [module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)]
        for name in sorted({*graph.get(module, ()), *parents} - asked.keys() - {*passing}):
            asked[name] = module
            queue.append(name)
    return asked


def chain(asked: Mapping[str, str], module: str) -> str:
    """How a closure comes to a module, for the message of a test."""
    names = [module]
    while asked[names[-1]]:
        names.append(asked[names[-1]])
    return " -> ".join(reversed(names))


def room_of(module: str) -> str:
    """The room that a module is in; empty for the front door, which is no room."""
    parts = module.split(".")
    if len(parts) == 1:
        return ""
    if parts[1] == "__main__":
        return "cli"
    is_room = (SOURCE / PACKAGE / parts[1]).is_dir() and parts[1] not in GROUND_PACKAGES
    return parts[1] if is_room else GROUND


def layers(graph: Graph) -> list[list[str]]:
    """Modules by the length of the longest chain of imports below them."""
    depth: dict[str, int] = {}

    def depth_of(module: str, above: tuple[str, ...] = ()) -> int:
        if module in above:
            raise ValueError(f"imports in a circle: {' -> '.join([*above, module])}")
        if module not in depth:
            depth[module] = max((1 + depth_of(used, (*above, module)) for used in graph[module]), default=0)
        return depth[module]

    for module in graph:
        depth_of(module)
    return [sorted(module for module in graph if depth[module] == level) for level in range(max(depth.values()) + 1)]


def room_graph(graph: Graph) -> dict[str, set[str]]:
    """Which rooms import which, the front door left out."""
    rooms: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, used in within(graph).items():
        rooms[room_of(module)].update({room_of(name) for name in used} - {room_of(module)})
    return rooms


def diagram(graph: Graph) -> str:
    """A Mermaid diagram of the rooms; arrows that follow from others, and to the ground floor, are left out."""
    rooms = room_graph(graph)
    lines = ["```mermaid", "flowchart BT"]
    lines += [f'    {room}["<b>{room}</b><br/>{sentence}"]' for room, sentence in ROOMS.items()]
    for room, used in rooms.items():
        indirect = set().union(*(closure(rooms, name).keys() - {name} for name in used))
        lines += [f"    {room} --> {name}" for name in ROOMS if name in used - indirect]
    return "\n".join([*lines, "```"])


def with_diagram(page: str, graph: Graph) -> str:
    """The page with today's diagram."""
    before, rest = page.split(START)
    return f"{before}{START}\n{diagram(graph)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    graph = import_graph()
    if sys.argv[1:] == ["layers"]:
        for number, modules in enumerate(layers(within(graph)), 1):
            print(number, *(module.removeprefix(f"{PACKAGE}.") for module in modules))
    elif sys.argv[1:]:
        raise SystemExit(f"unknown argument {sys.argv[1]}; usage: rooms.py [layers]")
    else:
        PAGE.write_text(with_diagram(PAGE.read_text(), graph))


if __name__ == "__main__":
    main()
