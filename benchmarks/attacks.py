"""Every attack of docs/attacks.md: run it, keep it, draw it, render its tables.

    python benchmarks/attacks.py run                run what neither attacks.jsonl nor runs/attacks/ has yet
    python benchmarks/attacks.py run NAME ...       run these again ("all": everything, about half an hour)
    python benchmarks/attacks.py render             keep what was run, write figures and tables, print the others

What was run is kept in runs/attacks/ with its images. `render` puts it into benchmarks/results/attacks.jsonl, each
result with its own origin, and takes the rest from there; images are not kept there, so the figure of them is drawn
only where all that it shows was run.
"""

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kept
import numpy as np
import torch
from origin import origin_of
from page import placed, table

from fedrp.attacks.experiment import attack_angles, attack_images, attack_keys
from fedrp.attacks.figures import Strip, draw
from fedrp.attacks.inversion import Effort
from fedrp.attacks.membership import attack_membership
from fedrp.attacks.outcome import Outcome, Scenario
from fedrp.config import RunConfig
from fedrp.learning.data import load_dataset
from fedrp.learning.task import named_task
from fedrp.simulation.simulate import simulate

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "runs" / "attacks"
KEPT, TABLE = kept.FOLDER, "attacks"
COMMAND = "python benchmarks/attacks.py run"
PAGE = ROOT / "docs" / "attacks.md"
FIGURES = ROOT / "docs" / "figures"
SIZE = 1000
BUDGETS = (10, 50, 100, 200, 500, 1000, 5000, 10000)
SEEDS = (0, 1, 2)


class Case(NamedTuple):
    """An inversion attack and what the page calls it."""

    title: str
    scenario: Scenario
    effort: Effort = Effort()


BASE = Scenario(clients=10, targets=6, rounds=2)
SUBSPACE = dataclasses.replace(BASE, algorithm="fedrp-subspace")
PRINTED = dataclasses.replace(BASE, algorithm="fedrp")
PRIVATE = dataclasses.replace(BASE, algorithm="fedavg-dp", rounds=10)
BLIND = Effort(smoothness=0.1)  # what suits an attacker best who matches noise
NOISY = dataclasses.replace(SUBSPACE, dp_epsilon=10.0, rounds=10, projection="sign", targets=4)

CASES: dict[str, Case] = {
    "fedavg-server": Case("FedAvg, server", BASE),
    "fedavg-dp-server": Case("FedAvg+DP (epsilon 10), server", PRIVATE, BLIND),
    "fedrp-server": Case("FedRP as printed, m = 1,000, server", PRINTED, BLIND),
    "subspace-server": Case("Subspace, m = 1,000, server", SUBSPACE, BLIND),
    "subspace-server-dp": Case("Subspace with noise (epsilon 10), m = 1,000, server", NOISY, BLIND),
    "fedavg-dp-insider": Case(
        "FedAvg+DP (epsilon 10), server + client",
        dataclasses.replace(PRIVATE, adversary="server+client", targets=4),
        BLIND,
    ),
    "fedrp-insider": Case(
        "FedRP as printed, m = 1,000, server + client",
        dataclasses.replace(PRINTED, adversary="server+client", targets=4),
    ),
    **{
        f"subspace-insider-{m}": Case(
            f"Subspace, m = {m:,}, server + client",
            dataclasses.replace(SUBSPACE, adversary="server+client", dim=m, projection="sign", targets=4),
        )
        for m in BUDGETS
    },
    "subspace-insider-gaussian": Case(
        "Subspace, m = 1,000, gaussian, server + client",
        dataclasses.replace(SUBSPACE, adversary="server+client", targets=2),
    ),
    "subspace-insider-dp": Case(
        "Subspace with noise (epsilon 10), m = 1,000, server + client",
        dataclasses.replace(NOISY, adversary="server+client"),
        BLIND,
    ),
    "fedavg-client-2": Case("FedAvg, other client, K = 2", dataclasses.replace(BASE, adversary="client", clients=2)),
    "fedavg-client-10": Case("FedAvg, other client, K = 10", dataclasses.replace(BASE, adversary="client")),
    "subspace-client-2": Case(
        "Subspace, m = 1,000, other client, K = 2",
        dataclasses.replace(SUBSPACE, adversary="client", clients=2, projection="sign"),
    ),
    "subspace-client-10": Case(
        "Subspace, m = 1,000, other client, K = 10",
        dataclasses.replace(SUBSPACE, adversary="client", projection="sign"),
    ),
    "fedavg-dp-client-2": Case(
        "FedAvg+DP (epsilon 10), other client, K = 2",
        dataclasses.replace(PRIVATE, adversary="client", clients=2),
        BLIND,
    ),
    "fedavg-dp-client-10": Case(
        "FedAvg+DP (epsilon 10), other client, K = 10", dataclasses.replace(PRIVATE, adversary="client"), BLIND
    ),
    "fedrp-client-2": Case(
        "FedRP as printed, m = 1,000, other client, K = 2", dataclasses.replace(PRINTED, adversary="client", clients=2)
    ),
    "fedrp-client-10": Case(
        "FedRP as printed, m = 1,000, other client, K = 10", dataclasses.replace(PRINTED, adversary="client")
    ),
    "subspace-client-2-dp": Case(
        "Subspace with noise (epsilon 10), m = 1,000, other client, K = 2",
        dataclasses.replace(NOISY, adversary="client", clients=2),
        BLIND,
    ),
    "subspace-client-10-dp": Case(
        "Subspace with noise (epsilon 10), m = 1,000, other client, K = 10",
        dataclasses.replace(NOISY, adversary="client"),
        BLIND,
    ),
    "fedavg-batch-4": Case("FedAvg, server, 4 images a step", dataclasses.replace(BASE, images=4, targets=2)),
    "fedavg-round-3": Case("FedAvg, server, round 3", dataclasses.replace(BASE, rounds=3, round=3, targets=4)),
    **{
        f"fedrp-round-{last}": Case(
            f"FedRP as printed, m = 1,000, server + client, round {last}",
            dataclasses.replace(PRINTED, adversary="server+client", rounds=last + 1, round=last, targets=2),
        )
        for last in (2, 5)
    },
    **{
        f"subspace-joined-{last}": Case(
            f"Subspace, m = {m}, server + client, rounds 1 to {last} at once",
            dataclasses.replace(
                dataclasses.replace(SUBSPACE, adversary="server+client", dim=m, projection="sign", targets=2),
                rounds=last + 1,
                round=last,
                joined=last,
            ),
        )
        for m, last in ((200, 4), (100, 8))
    },
    "fedavg-known-step": Case(
        "FedAvg, server, stated learning rate (DLM)", dataclasses.replace(BASE, targets=4), Effort(known_step=True)
    ),
    "fedavg-adam": Case("FedAvg, server, Adam and angles", dataclasses.replace(BASE, targets=4), Effort("adam", 400)),
    "fedavg-lenet5-lbfgs": Case(
        "FedAvg, server, LeNet-5 (ReLU, max-pooling), L-BFGS", dataclasses.replace(BASE, model="lenet5", targets=2)
    ),
    "fedavg-lenet5": Case(
        "FedAvg, server, LeNet-5 (ReLU, max-pooling), Adam",
        dataclasses.replace(BASE, model="lenet5", targets=2),
        Effort("adam", 1000, smoothness=1e-2),
    ),
}

LINKS: dict[str, tuple[str, Scenario]] = {
    **{
        f"links-subspace-{seed}": (
            "Subspace, m = 1,000, gaussian",
            dataclasses.replace(SUBSPACE, clients=40, seed=seed),
        )
        for seed in SEEDS
    },
    "links-subspace-10": ("Subspace, m = 10, gaussian", dataclasses.replace(SUBSPACE, clients=40, dim=10)),
    "links-fedrp": ("FedRP as printed, m = 1,000, gaussian", dataclasses.replace(PRINTED, clients=40)),
    "links-lenet5": (
        "Subspace, LeNet-5, m = 1,000, sign",
        dataclasses.replace(SUBSPACE, clients=40, model="lenet5", projection="sign"),
    ),
}

# Labels alone, on many clients: a handful of images cannot tell a leak from luck.
NO_SEARCH = Effort(iterations=1)
LABELS: dict[str, list[Scenario]] = {
    "labels-subspace": [
        dataclasses.replace(SUBSPACE, clients=40, targets=40, projection="sign", seed=seed) for seed in range(8)
    ],
    "labels-fedrp": [
        dataclasses.replace(PRINTED, clients=40, targets=40, projection="sign", seed=seed) for seed in range(8)
    ],
    "labels-fedavg-dp": [dataclasses.replace(PRIVATE, targets=10, seed=seed) for seed in range(8)],
}

MEMBERSHIP = {
    "membership-fedavg": RunConfig("fedavg"),
    "membership-fedavg-dp": RunConfig("fedavg-dp", clip=1.0),
    "membership-fedrp": RunConfig("fedrp", dim=1000, deliver="client"),
    "membership-subspace": RunConfig("fedrp-subspace", projection="sign", dim=1000),
    "membership-subspace-dp": RunConfig("fedrp-subspace", projection="sign", dim=1000, dp_epsilon=10.0, clip=1.0),
    "membership-fwc": RunConfig("fwc"),
}


class Members(NamedTuple):
    """A run whose members are looked for. By default few examples and many epochs: a model learns them by heart."""

    config: RunConfig
    clients: int = 10
    examples: int = 1000
    epochs: int = 5
    rounds: int = 20


SHADOWS = 16  # runs for each of the following: four to ten minutes of one core
SITES = {"clients": 5, "examples": 5000, "epochs": 1}  # enough for noise for records to leave a useful model
SHADOWED = {
    "shadows-fedavg": Members(MEMBERSHIP["membership-fedavg"]),
    "shadows-sites": Members(RunConfig("fedrp-subspace"), **SITES),
    "shadows-records": Members(RunConfig("fedrp-subspace", dp_unit="record", dp_epsilon=3.0), **SITES),
}


def inversion(name: str) -> dict[str, Any]:
    case = CASES[name]
    outcome = attack_images(case.scenario, case.effort)
    np.savez_compressed(WORK / f"{name}.npz", **images_of(outcome))
    return outcome.as_json()


def images_of(outcome: Outcome) -> dict[str, Any]:
    return {
        "originals": np.concatenate([target.originals for target in outcome.targets]),
        "found": np.concatenate([target.found for target in outcome.targets]),
    }


def links(name: str) -> dict[str, Any]:
    found = attack_angles(LINKS[name][1])
    return {**dataclasses.asdict(LINKS[name][1]), **found._asdict(), "same_class": found.same_class._asdict()}


def shadows(name: str) -> dict[str, Any]:
    """The likelihood ratio, from runs that had half of the examples each."""
    run = SHADOWED[name]
    folder, accuracy = member_run(name, run)
    found = attack_membership(folder, references=0, shadows=SHADOWS).as_json()
    return {**found, "local_epochs": run.epochs, "accuracy": accuracy}


def membership(name: str) -> dict[str, Any]:
    run = Members(MEMBERSHIP[name])
    folder, accuracy = member_run(name, run)
    return {**attack_membership(folder).as_json(), "local_epochs": run.epochs, "accuracy": accuracy}


def member_run(name: str, run: Members) -> tuple[Path, float]:
    """The folder and the accuracy of a run with the first examples of the bundled images."""
    mini = load_dataset("mnist-mini")
    data = WORK / f"{run.examples}.npz"
    np.savez_compressed(
        data,
        x_train=mini.train_x[: run.examples, 0],
        y_train=mini.train_y[: run.examples],
        x_test=mini.test_x[:, 0],
        y_test=mini.test_y,
    )
    config = dataclasses.replace(
        run.config, dataset=f"npz:{data}", clients=run.clients, rounds=run.rounds, local_epochs=run.epochs
    )
    folder = WORK / f"{name}-run"
    shutil.rmtree(folder, ignore_errors=True)
    return folder, float(simulate(config, named_task(config), out=folder).as_json()["accuracy"])


def labels(name: str) -> dict[str, Any]:
    rates = [attack_images(scenario, NO_SEARCH).label_rate for scenario in LABELS[name]]
    first = LABELS[name][0]
    shape = {"clients": first.clients, "rounds": first.rounds, "dim": first.dim, "projection": first.projection}
    return {
        "algorithm": first.algorithm,
        **shape,
        "seeds": len(rates),
        "label_rate": float(np.mean(rates)),
        "rates": rates,
    }


def keys(_name: str) -> dict[str, Any]:
    return attack_keys(16)


JOBS: dict[str, Callable[[str], dict[str, Any]]] = {
    **dict.fromkeys(CASES, inversion),
    **dict.fromkeys(LINKS, links),
    **dict.fromkeys(LABELS, labels),
    **dict.fromkeys(MEMBERSHIP, membership),
    **dict.fromkeys(SHADOWED, shadows),
    "keys": keys,
}


def run(names: Sequence[str]) -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    known = kept.read(TABLE, KEPT)
    lacking = [name for name in JOBS if command_of(name) not in known and not path_of(name).exists()]
    origin = origin_of(COMMAND)  # once: commits made from here on are not what is run
    for name in JOBS if "all" in names else names or lacking:
        print(name, flush=True)
        own = {**origin, "command": command_of(name)}
        path_of(name).write_text(json.dumps({"origin": own, **JOBS[name](name)}, indent=1))


def command_of(name: str) -> str:
    return f"{COMMAND} {name}"


def path_of(name: str) -> Path:
    return WORK / f"{name}.json"


# --- rendering -----------------------------------------------------------------------------------------------------


def keep_all() -> dict[str, kept.Result]:
    """Keep what was run here; the results of all jobs, for the rest as they were kept before."""
    ran = {command_of(name): json.loads(path_of(name).read_text()) for name in JOBS if path_of(name).exists()}
    old = [command.split()[-1] for command, result in ran.items() if "psnr_mean_picture" in result]
    if old:
        raise SystemExit(f"{WORK} has results from before 'picture' became 'image': run {' '.join(old)} again")
    missing = [name for name in JOBS if command_of(name) not in ran | kept.read(TABLE, KEPT)]
    if missing:
        raise SystemExit(f"not run yet: {', '.join(missing)}")
    kept.keep(TABLE, ran, KEPT)
    results = kept.read(TABLE, KEPT)
    return {name: results[command_of(name)] for name in JOBS}


def in_short(title: str) -> str:
    """A title for a column; the page says what all rows share."""
    for long, short in (
        ("+DP (epsilon 10)", "-DP"),
        (" with noise (epsilon 10)", ", noise"),
        (" as printed", ""),
        (" at once", ""),
    ):
        title = title.replace(long, short)
    return title


def inversion_table(results: dict[str, Any], names: Sequence[str]) -> str:
    lines = []
    for name in names:
        r = results[name]
        each = r["psnr_each"]
        lines.append(
            [
                *(in_short(CASES[name].title), str(len(each)), f"{r['psnr']:.1f} ({min(each):.1f}..{max(each):.1f})"),
                *(f"{r['psnr_mean_image']:.1f}", f"{r['ssim']:.2f}", f"{100 * r['label_rate']:.0f}"),
            ]
        )
    return table(["attack", "images", "PSNR dB (range)", "mean image", "SSIM", "labels %"], lines)


def links_table(results: dict[str, Any]) -> str:
    lines = []
    for name, (title, scenario) in LINKS.items():
        r = results[name]
        same = r["same_class"]
        lines.append(
            [
                *(f"{title}, seed {scenario.seed}", f"{same['auc']:.3f}"),
                *(f"{100 * r['label_rate']:.0f} %", f"{r['psnr']:.1f}", f"{r['psnr_mean_image']:.1f}"),
            ]
        )
    return table(["run", "same class, AUC", "classes named", "PSNR dB", "mean image dB"], lines)


def labels_table(results: dict[str, Any]) -> str:
    lines = []
    for name in LABELS:
        r = results[name]
        each = ", ".join(f"{100 * rate:.0f}" for rate in r["rates"])
        lines.append([r["algorithm"], f"{r['seeds']} x {r['clients']}", f"{100 * r['label_rate']:.1f} %", each])
    return table(["algorithm", "runs x clients", "labels found", "by run, %"], lines)


def membership_table(results: dict[str, Any]) -> str:
    def cells(scores: dict[str, float]) -> list[str]:
        interval = f"{scores['auc']:.3f} ({scores['auc_low']:.3f}..{scores['auc_high']:.3f})"
        return [interval, f"{100 * scores['tpr_at_1_percent_fpr']:.1f}"]

    def title(name: str) -> str:
        config = MEMBERSHIP[name]
        return config.algorithm if config.dp_epsilon is None else f"{config.algorithm}, noise"

    lines = [
        [title(name), f"{r['accuracy']:.1f}", f"{r['members']:,}", *cells(r["loss"]), *cells(r["calibrated"])]
        for name, r in ((name, results[name]) for name in MEMBERSHIP)
    ]
    header = ["algorithm", "test %", "members", "loss, AUC (95 %)", "found %", "calibrated, AUC (95 %)", "found %"]
    return table(header, lines)


def shadows_table(results: dict[str, Any]) -> str:
    """One attack a line, on the same pairs as far as that can be."""
    lines = []
    for name, run in SHADOWED.items():
        r, noise = results[name], run.config.dp_epsilon
        about = f"{run.config.algorithm}, {run.clients} sites" + (f", epsilon {noise:g} a record" if noise else "")
        for attack, title in (("loss", "loss"), ("likelihood_ratio", "likelihood ratio")):
            own = r[attack]
            lines.append(
                [
                    *(about, f"{r['accuracy']:.1f}", title),
                    f"{own['auc']:.3f} ({own['auc_low']:.3f}..{own['auc_high']:.3f})",
                    *(f"{100 * own[f'tpr_at_1_{rate}_fpr']:.1f}" for rate in ("percent", "per_mille")),
                ]
            )
    return table(["run", "test %", "attack", "AUC (95 %)", "found % at 1 %", "at 0.1 %"], lines)


def keys_table(results: dict[str, Any]) -> str:
    r = results["keys"]
    days = r["hours_for_all_32_bit_seeds"] / 24
    return table(
        ["secret", "candidates", f"tried in {r['seconds']:.0f} s", "per second", "found", "all, on this core"],
        [
            [
                *(f"{r['seed_bits']}-bit seed, torch", f"2^{r['seed_bits']}", f"{r['seeds_tried']:,}"),
                *(f"{r['seeds_per_second']:,}", "yes" if r["seed_found"] else "no"),
                f"{2 ** r['seed_bits'] / r['seeds_per_second']:.0f} s; 2^32: {days:.0f} days",
            ],
            [
                *("round key of 32 bytes", f"2^{r['key_bits']}", f"{r['keys_tried']:,}"),
                *(f"{r['keys_per_second']:,}", "yes" if r["key_found"] else "no"),
                f"2^{r['log2_years_for_all_keys']:.0f} years",
            ],
        ],
    )


SHOWN = (
    *("fedavg-server", "fedavg-dp-server", "fedrp-server", "subspace-server", "subspace-insider-100"),
    *("subspace-insider-1000", "subspace-insider-10000", "subspace-client-2", "subspace-client-10"),
)


def draw_images(results: dict[str, Any]) -> None:
    missing = [name for name in SHOWN if not (WORK / f"{name}.npz").exists()]
    if missing:
        print(f"{FIGURES / 'attacks.png'} is left as it is: without images of {', '.join(missing)}")
        return
    stored = {name: np.load(WORK / f"{name}.npz") for name in SHOWN}
    originals = stored["fedavg-server"]["originals"]
    count = len(originals)
    mean = (load_dataset("mnist-mini").test_x / 255.0).mean(axis=0)
    strips = [Strip("original", originals)]
    for name in SHOWN:
        for shown, original in zip(stored[name]["originals"], originals, strict=False):
            if not np.array_equal(shown, original):
                raise SystemExit(f"{name} attacked other images")
        strips.append(Strip(f"{CASES[name].title}\n{results[name]['psnr']:.1f} dB", stored[name]["found"][:count]))
    baseline = results["fedavg-server"]["psnr_mean_image"]
    strips.append(Strip(f"mean of public images\n{baseline:.1f} dB", np.stack([mean] * count)))
    draw(strips, FIGURES / "attacks.png")


def draw_budgets(results: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    runs = [results[f"subspace-insider-{m}"] for m in BUDGETS]
    for m, r in zip(BUDGETS, runs, strict=True):
        axes.plot([m] * len(r["psnr_each"]), r["psnr_each"], ".", color="tab:blue", alpha=0.5)
    axes.plot(BUDGETS, [r["psnr"] for r in runs], "o-", color="tab:blue", label="Subspace, server + client: A is known")
    axes.axhline(results["fedavg-server"]["psnr"], color="tab:red", label="FedAvg, server")
    axes.axhline(results["subspace-server"]["psnr"], color="tab:green", label="Subspace, server alone (m = 1,000)")
    axes.axhline(runs[0]["psnr_mean_image"], color="black", linestyle=":", label="mean of public images")
    axes.set_xscale("log")
    axes.set_xlabel(f"numbers sent, m (the model has n = {runs[0]['parameters']:,} parameters; an image 784 pixels)")
    axes.set_ylabel("PSNR of the reconstruction, dB")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(FIGURES / "attacks_budget.png", dpi=110)


def tables(results: dict[str, Any]) -> dict[str, str]:
    first = list(CASES).index("fedavg-batch-4")
    other_sizes = [f"subspace-insider-{m}" for m in BUDGETS if m != SIZE]
    return {
        "inversion": inversion_table(results, [name for name in list(CASES)[:first] if name not in other_sizes]),
        "inversion-sizes": inversion_table(results, other_sizes),
        "variants": inversion_table(results, list(CASES)[first:]),
        "links": links_table(results),
        "labels": labels_table(results),
        "membership": membership_table(results),
        "shadows": shadows_table(results),
        "keys": keys_table(results),
    }


def render() -> None:
    """Draw the figures, write the tables that the page has, and print the others."""
    results = keep_all()
    draw_images(results)
    draw_budgets(results)
    for name, text in tables(results).items():
        placed(name, text, PAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "render"))
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in {*JOBS, "all"}]
    if unknown:
        raise SystemExit(f"unknown: {unknown[0]}; known: {', '.join(JOBS)}")
    if arguments.action == "run":
        run(arguments.names)
    else:
        render()


if __name__ == "__main__":
    main()
