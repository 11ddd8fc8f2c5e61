"""The tables of docs/results.md: what differs between runs is in the columns, the rest in a command below."""

import functools
import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import kept
from comparison import ALGORITHMS, SETTINGS, Method, Setting, best_of, default_of, methods_in
from experiments import BUDGETS, EPSILONS, EXPERIMENTS, PRIVATE
from kept_runs import Options, Point, Run, kept_results, parsed, points, written
from page import command, filled, remark, shell, table
from paper import PAPER_TABLES
from robust import RULES, STUDIES

COMPRESSION = (
    "python benchmarks/compression.py --dataset mnist --clients 100 --rounds 30 --budget 4000 --lr 0.2 "
    "--methods topk,randomk,qsgd-sparse,sketch --workers 2"
)
FRAMING = 100  # bytes by which the two ways may differ where one number is shown for both
NOTHING = "-"
STAR = "*"

Results = list[dict[str, Any]]


class Shown(NamedTuple):
    """A table: the kept runs of experiments; the options whose values are columns."""

    experiments: tuple[str, ...]
    across: tuple[str, ...] = ()
    title: str = ""


class Line(NamedTuple):
    """A run with all its options, and what was kept of its seeds."""

    options: Options
    results: Results

    def at(self, names: Iterable[str]) -> tuple[str | None, ...]:
        """The values of these options; None for one that is not given."""
        return tuple(self.options.get(name) for name in names)


# --- any experiments -------------------------------------------------------------------------------------------------


def show(shown: Shown) -> str:
    """Accuracies by what differs between the runs."""
    lines = [line for group in _grouped(_lines(shown), ["algorithm"]).values() for line in group]
    title = shown.title or EXPERIMENTS[shown.experiments[0]].title
    if not lines:
        return filled(f"**{title}.** Nothing is kept yet.")
    names = list(dict.fromkeys(name for line in lines for name in line.options))
    differ = [name for name in names if len({line.options.get(name) for line in lines}) > 1]
    by_algorithm = _grouped(lines, ["algorithm"])
    own = [name for name in differ if all(len(_grouped(group, [name])) == 1 for group in by_algorithm.values())]
    keys = [name for name in differ if name not in shown.across and (name == "algorithm" or name not in own)]
    common = _common_seeds(lines)
    bytes_by_algorithm = all(len({_bytes(line.results) for line in group}) == 1 for group in by_algorithm.values())
    header, body = _body(lines, keys, shown.across, common, with_bytes=not bytes_by_algorithm)
    told = {name: value for name, value in lines[0].options.items() if name not in differ}
    algorithms = [
        _algorithm(group, [n for n in own if n not in shown.across], bytes_by_algorithm, len(by_algorithm) == 1)
        for group in by_algorithm.values()
    ]
    return "\n\n".join(
        [
            filled(f"**{title}.** Accuracy %; {_seeds(common)}{_footnote(body)}."),
            table(header, body),
            shell(
                _commits(line["origin"]["commit"] for group in lines for line in group.results),
                command(f"fedrp run {written(told)} --seed SEED" + (" ..." if differ else "")),
                *(remark(text) for text in algorithms if text),
            ),
        ]
    )


def _lines(shown: Shown) -> list[Line]:
    found: dict[tuple[tuple[str, str], ...], Line] = {}
    for name in shown.experiments:
        for run, own in EXPERIMENTS[name].runs.items():
            options, results = parsed(f"{EXPERIMENTS[name].base} {own}"), kept_results(name, run)
            if results:
                found[tuple(sorted(options.items()))] = Line(options, results)
    return list(found.values())


def _grouped(lines: Iterable[Line], names: Sequence[str]) -> dict[tuple[str | None, ...], list[Line]]:
    groups: dict[tuple[str | None, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(line.at(names), []).append(line)
    return groups


def _body(
    lines: list[Line], keys: Sequence[str], across: Sequence[str], common: tuple[int, ...], *, with_bytes: bool
) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one for each set of values of `keys`, with a column for each of `across`."""
    columns = sorted(_grouped(lines, across), key=_by_number)
    own_models = not across and any(
        result["accuracy_client_min"] < result["accuracy_client_max"] for line in lines for result in line.results
    )
    header = [*keys, *(_heading(across, column) for column in columns)]
    header += ["clients' mean (min..max)", "average"] if own_models else []
    body = []
    for values, group in _grouped(lines, keys).items():
        cells = {line.at(across): line.results for line in group}
        row = [value or NOTHING for value in values]
        row += [_accuracy(cells[column], common) if column in cells else NOTHING for column in columns]
        if own_models:
            (results,) = cells.values()
            row += [clients_mean(results), spread(results, "accuracy_average")]
        body.append([*row, ", ".join(dict.fromkeys(map(_bytes, cells.values())))] if with_bytes else row)
    way = "B sent / received" if any(" / " in _bytes(line.results) for line in lines) else "B each way"
    return [*header, *([way] if with_bytes else [])], body


def _by_number(values: tuple[str | None, ...]) -> tuple[float, ...]:
    """Numbers by size, what is not given before them; all else stays as it came."""
    return tuple(float(value) if value and _is_number(value) else -1.0 for value in values)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[\d.]+", text) is not None


def _heading(names: Sequence[str], values: Sequence[str | None]) -> str:
    if not names:
        return "accuracy %"
    return " ".join(
        f"default {name}" if value is None else f"{name} {value}" if _is_number(value) else value
        for name, value in zip(names, values, strict=True)
    )


def _algorithm(group: list[Line], own: Sequence[str], bytes_by_algorithm: bool, alone: bool) -> str:
    """What the lines of an algorithm share, and the bytes if all send as many."""
    told = {name: group[0].options[name] for name in ("algorithm", *own) if name in group[0].options}
    parts = [] if alone else [written(told)]
    if bytes_by_algorithm:
        size = _bytes(group[0].results)
        parts.append(f"{size} B {'sent / received' if ' / ' in size else 'each way'}")
    return ": ".join(parts)


def _bytes(results: Results) -> str:
    """Bytes of a client and round; both ways where they differ by more than framing."""
    up, down = (results[0][f"bytes_{way}"] for way in ("up", "down"))
    return f"{up:,.0f}" if abs(up - down) <= FRAMING else f"{up:,.0f} / {down:,.0f}"


def _common_seeds(lines: Iterable[Line]) -> tuple[int, ...]:
    return max((tuple(result["seed"] for result in line.results) for line in lines), key=len)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _accuracy(results: Results, common: tuple[int, ...], key: str = "accuracy") -> str:
    """With a star where it is the first seed alone."""
    seeds = tuple(result["seed"] for result in results)
    mark = "" if seeds == common else STAR if seeds == common[:1] else f" ({_seeds(seeds)})"
    return spread(results, key) + mark


def _footnote(rows: Iterable[Iterable[str]]) -> str:
    return f"; \\{STAR}: one seed" if any(cell.endswith(STAR) for row in rows for cell in row) else ""


def _commits(commits: Iterable[str]) -> str:
    return remark(f"commits {', '.join(sorted(set(commits)))}")


def spread(results: Iterable[dict[str, Any]], key: str) -> str:
    """Mean and standard deviation of the seeds."""
    numbers = [result[key] for result in results]
    mean = statistics.mean(numbers)
    return f"{mean:.2f}" if len(numbers) == 1 else f"{mean:.2f} ± {statistics.stdev(numbers):.2f}"


def clients_mean(results: Results) -> str:
    """The clients' own models."""
    low = min(result["accuracy_client_min"] for result in results)
    high = max(result["accuracy_client_max"] for result in results)
    return f"{spread(results, 'accuracy_client_mean')} ({low:.1f}..{high:.1f})"


# --- tables with a shape of their own --------------------------------------------------------------------------------


def comparison_table() -> str:
    """Every algorithm on every task, with its defaults and with the best of what was kept."""
    rows = [
        [algorithm, kind, *(_compared(of(setting, algorithm)) for setting in SETTINGS)]
        for algorithm in ALGORITHMS
        for kind, of in (("default", default_of), ("best", best_of))
    ]
    return "\n\n".join(
        [
            table(["", "", *(setting.title for setting in SETTINGS)], rows),
            shell(*(part for setting in SETTINGS for part in _setting(setting))),
        ]
    )


def _compared(method: Method | None) -> str:
    return _accuracy(method.results, (0, 1, 2), "accuracy_client_mean") if method else NOTHING


def _setting(setting: Setting) -> Iterator[str]:
    """The command of a task, and what the defaults and the best of each algorithm are; commits are in other tables."""
    yield command(f"fedrp run {setting.base} --algorithm ... --seed SEED")
    for algorithm in ALGORITHMS:
        default, best = default_of(setting, algorithm), best_of(setting, algorithm)
        told = []
        if default:
            told.append(" ".join(["default", *written(default.options).split(), f"({_bytes(default.results)} B)"]))
        if best and best != default:
            count = len(methods_in(setting, algorithm))
            told.append(f"best of {count} {written(best.options)} ({_bytes(best.results)} B)")
        if told:
            yield remark(f"{algorithm}: {'; '.join(told)}")


def budget_table() -> str:
    """A line for each m: the subspace mode and printed FedRP."""
    rows, everything = [], []
    by_momentum: dict[str, list[str]] = {}
    for m in BUDGETS:
        ours, printed = (kept_results("budget", f"{name}-{m}") for name in ("fedrp-subspace", "fedrp"))
        momentum = parsed(EXPERIMENTS["budget"].runs[f"fedrp-subspace-{m}"])["server-momentum"]
        by_momentum.setdefault(momentum, []).append(f"{m:,}")
        rows.append([f"{m:,}", _bytes(ours), spread(ours, "accuracy"), spread(printed, "accuracy")])
        rows[-1] += [clients_mean(printed), spread(printed, "accuracy_average")]
        rows[-1].append(f"{Point('', '', ours).total / 1000:,.0f}")
        everything += [*ours, *printed]
    seeds = sorted({result["seed"] for result in everything})
    header = ["m", "B each way", "subspace", "printed: one client", "mean (min..max)", "average", "kB"]
    return "\n\n".join(
        [
            filled(f"**{EXPERIMENTS['budget'].title}.** Accuracy %; {_seeds(seeds)}."),
            table(header, rows),
            shell(
                _commits(result["origin"]["commit"] for result in everything),
                command(f"fedrp run {EXPERIMENTS['budget'].base} --projection sign --dim m --seed SEED ..."),
                *(
                    remark(f"--algorithm fedrp-subspace --lr 0.2 --server-momentum {momentum}: m = {', '.join(own)}")
                    for momentum, own in by_momentum.items()
                ),
                remark("--algorithm fedrp"),
            ),
        ]
    )


def total_table() -> str:
    """Bytes of a client and round, and all of them in the run; without what the table of m has."""
    found = [point for point in sorted(points(), key=lambda point: point.total) if "float32" not in point.family]
    rows = [
        [
            *(point.family.replace("FedRP-Subspace", "subspace").removesuffix(", 2 and 4 bits"), point.name),
            _accuracy(point.results, (0, 1, 2), point.key),
            *(f"{point.results[0][f'bytes_{way}']:,.0f}" for way in ("up", "down")),
            *(f"{point.keys:,}", f"{point.total / 1000:,.0f}"),
        ]
        for point in found
    ]
    base = f"fedrp run {EXPERIMENTS['bits'].base}"
    return "\n\n".join(
        [
            filled(f"**{EXPERIMENTS['bits'].title}.** Accuracy %; seeds 0, 1, 2{_footnote(rows)}."),
            table(["method", "", "accuracy %", "sent B", "received B", "keys B", "kB"], rows),
            shell(
                _commits(result["origin"]["commit"] for point in found for result in point.results),
                command(f"{base} --algorithm fedrp-subspace --dim m --bits BITS --bits-down BITS --seed SEED"),
                remark("masked: --secure-aggregation"),
                command(f"{base} --algorithm fedavg --lr 0.4 --bits BITS --seed SEED"),
                remark("FedAvg without bits, top-k and QSGD: see their own tables"),
            ),
        ]
    )


def grids_table() -> str:
    """Grids of clips and learning rates: a line for each method, with and without momentum."""
    names = [f"private-{epsilon}" for epsilon in EPSILONS]
    everything = [result for name in names for run in EXPERIMENTS[name].runs for result in kept_results(name, run)]
    return "\n\n".join(
        [
            *map(_grid, names),
            shell(
                _commits(result["origin"]["commit"] for result in everything),
                command(f"fedrp run {PRIVATE} --dp-epsilon EPSILON --clip C --lr R --server-momentum M --seed 0 ..."),
                remark("--algorithm fedavg-dp"),
                remark("--algorithm fedrp-subspace --projection sign --dim m"),
            ),
        ]
    )


def _grid(name: str) -> str:
    accuracies: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for run_name in EXPERIMENTS[name].runs:
        method, clip, rate, momentum = re.split("-clip|-lr|-momentum", run_name)
        for result in kept_results(name, run_name):
            accuracies.setdefault((method, momentum), {})[clip, rate] = f"{result['accuracy']:.1f}"
    columns = sorted({column for line in accuracies.values() for column in line})
    rows = [[*line, *(cells.get(column, NOTHING) for column in columns)] for line, cells in accuracies.items()]
    title = filled(f"**{EXPERIMENTS[name].title}.** Accuracy %; seed 0; columns: C, R.")
    return f"{title}\n\n{table(['method', 'M', *(f'{clip}, {rate}' for clip, rate in columns)], rows)}"


def compression_table() -> str:
    """What `benchmarks/compression.py` kept, next to FedRP-Subspace at the same bytes up."""
    outcomes = list(kept.read("compression").values())
    ours = [Run("subspace", "fedrp-subspace-1000", outcome["seed"]).result() or {} for outcome in outcomes]
    rows = {"fedrp-subspace, m = 1,000": ours}
    seeds = [outcome["seed"] for outcome in outcomes]
    rows |= {f"`{method}`": [outcome["methods"][method] for outcome in outcomes] for method in outcomes[0]["methods"]}
    return "\n\n".join(
        [
            filled(f"**4 kB up, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1.** Accuracy %; {_seeds(seeds)}."),
            table(
                ["method", "accuracy %", "sent B", "received B"],
                [
                    [name, spread(results, "accuracy"), *(_mean(results, way) for way in ("bytes_up", "bytes_down"))]
                    for name, results in rows.items()
                ],
            ),
            shell(
                _commits(outcome["origin"]["commit"] for outcome in outcomes),
                command(f"{COMPRESSION} --seed SEED --out FILE"),
            ),
        ]
    )


def _mean(results: Iterable[dict[str, Any]], key: str) -> str:
    return f"{statistics.mean(result[key] for result in results):,.0f}"


def rounds_table() -> str:
    """What `benchmarks/rounds.py` kept."""
    (measured,) = kept.read("rounds").values()
    origin = measured["origin"]
    rows = [
        [
            name,
            ", ".join(f"{value:.1f}" for value in seconds),
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})",
        ]
        for name, seconds in measured["seconds"].items()
        for ratios in [measured["ratios"][name]]
    ]
    return "\n\n".join(
        [
            table(["method", "seconds of each repeat", "of FedAvg's, median (range)"], rows),
            shell(
                remark(f"commit {origin['commit']}, load before it {origin['load_average_before']:.1f}"),
                command(origin["command"]),
            ),
        ]
    )


def robust_table(names: Iterable[str] = tuple(STUDIES)) -> str:
    """What `benchmarks/robust.py` kept: for each of these studies, a line for each algorithm and rule."""
    everything = [line for line in kept.read("robust").values() if line["study"] in names]
    parts = []
    for name in names:
        study = STUDIES[name]
        parts.append(filled(f"**{study.title}.** Accuracy %; {_seeds(study.seeds)}."))
        rows = []
        for algorithm, rule in itertools.product(study.algorithms, RULES):
            lines = [line for line in everything if line["study"] == name]
            lines = [line for line in lines if _is_of(line["config"], algorithm=algorithm, aggregation=rule)]
            cells = [_outcome([line for line in lines if line["attack"] == attack]) for attack in study.attacks]
            rows.append([f"`{algorithm}`", f"`{rule}`", *cells])
        parts.append(table(["algorithm", "aggregation", *study.attacks], rows))
    commits = _commits(line["origin"]["commit"] for line in everything)
    return "\n\n".join([*parts, shell(commits, "python benchmarks/robust.py --out FILE")])


def _is_of(config: dict[str, Any], **settings: str) -> bool:
    return all(config[name] == value for name, value in settings.items())


def _outcome(lines: list[dict[str, Any]]) -> str:
    """The accuracies of the seeds; and in how many of them training diverged."""
    good = [line for line in lines if line["diverged"] is None]
    shown = [spread(good, "accuracy_client_mean")] if good else []
    lost = len(lines) - len(good)
    return ", ".join([*shown, *([f"diverged ({lost} of {len(lines)})"] if lost else [])])


# --- by name ---------------------------------------------------------------------------------------------------------

_SHAPES = {
    "fedavg-grid": Shown(("fedavg-grid",), across=("lr",)),
    "five-epochs": Shown(("five-epochs", "five-epochs-grid")),
    "few-clients": Shown(("few-clients",), across=("lr",)),
    "fashion": Shown(("fashion",), across=("lr",)),
    "non-iid": Shown(("non-iid",), across=("partition",)),
    "non-iid-options": Shown(("non-iid-options",), across=("partition",)),
    "private-default": Shown(("private-default",), across=("clip",)),
    "private-best": Shown(
        tuple(f"private-best-{epsilon}" for epsilon in EPSILONS),
        across=("dp-epsilon",),
        title="Client-level (10, 1e-5) and (5, 1e-5): the best of each grid again, with seeds that did not choose it",
    ),
    "private-full": Shown(
        tuple(f"private-full-{epsilon}" for epsilon in EPSILONS),
        across=("dp-epsilon",),
        title="Client-level (10, 1e-5) and (5, 1e-5) with all of MNIST, 600 images a client, 20 rounds, clip 0.3",
    ),
    "private-slow": Shown(("private-slow",), across=("clip",)),
    "private-1000": Shown(("private-1000",), across=("clip",)),
    "private-few": Shown(("private-few",), across=("algorithm", "clip")),
}
TABLES: dict[str, Callable[[], str]] = {
    **{name: functools.partial(show, _SHAPES.get(name, Shown((name,)))) for name in {**EXPERIMENTS, **_SHAPES}},
    "budget": budget_table,
    "comparison": comparison_table,
    "compression": compression_table,
    "private-grids": grids_table,
    "robust": robust_table,
    "robust-even": functools.partial(robust_table, ("mnist-mini",)),
    "rounds": rounds_table,
    "total": total_table,
    **PAPER_TABLES,
}
