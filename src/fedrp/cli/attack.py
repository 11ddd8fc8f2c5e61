"""Commands that attack what a run gives away."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from fedrp.cli.common import ListedOption, cli, counting, projection_names, users_of


@cli.group()
def attack() -> None:
    """Attack what a run gives away: recorded bytes, or the final model. See docs/attacks.md."""


def _attacked() -> Iterable[str]:
    from fedrp.attacks.observations import UPDATES

    return UPDATES


def _attackers() -> Iterable[str]:
    from fedrp.attacks.view import ADVERSARIES

    return ADVERSARIES


def _targets() -> Iterable[str]:
    from fedrp.attacks.target_models import target_models

    return target_models()


def _methods() -> Iterable[str]:
    from fedrp.attacks.inversion import METHODS

    return METHODS


@attack.command("inversion")
@click.option("--algorithm", default="fedavg", show_default=True, help="{names}", cls=ListedOption, names=_attacked)
@click.option("--adversary", default="server", show_default=True, help="{names}", cls=ListedOption, names=_attackers)
@click.option("--targets", default=4, show_default=True, help="clients to attack")
@click.option("--clients", default=10, show_default=True, help="number of clients K")
@click.option("--images-per-client", "images", default=1, show_default=True, help="all in one step")
@click.option("--dim", default=1000, show_default=True, help="projection dimension m")
@click.option("--projection", help="{names}  [default: by size]", cls=ListedOption, names=projection_names)
@click.option("--model", default="lenet-sigmoid", show_default=True, help="{names}", cls=ListedOption, names=_targets)
@click.option("--dataset", default="mnist-mini", show_default=True, help="a data set of grey images")
@click.option("--dp-epsilon", type=float, help="of the run ({names})", cls=ListedOption, names=users_of("dp_epsilon"))
@click.option("--rounds", default=10, show_default=True, help="rounds of the run, which decide the noise")
@click.option("--round", default=1, show_default=True, help="round that is attacked")
@click.option("--method", default="lbfgs", show_default=True, help="{names}", cls=ListedOption, names=_methods)
@click.option("--iterations", default=200, show_default=True, help="steps of the search")
@click.option("--restarts", default=1, show_default=True, help="searches from different starts; the best one counts")
@click.option("--smoothness", default=1e-3, show_default=True, help="weight of total variation")
@click.option("--known-step", is_flag=True, help="match lengths too, trusting the stated learning rate")
@click.option("--seed", default=0, show_default=True, help="images, run and guesses")
@click.option("--data-dir", type=click.Path(path_type=Path), help="data folder (also FEDRP_DATA)")
@click.option("--out", type=click.Path(path_type=Path), help="folder for images.png and result.json")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def attack_inversion(data_dir: Path | None, out: Path | None, as_json: bool, **given: Any) -> None:
    """Reconstruct clients' images from what one adversary sees of a run."""
    from fedrp.attacks.experiment import attack_images
    from fedrp.attacks.figures import write
    from fedrp.attacks.inversion import Effort
    from fedrp.attacks.outcome import Scenario

    effort = Effort(**{field.name: given.pop(field.name) for field in dataclasses.fields(Effort)})
    scenario = Scenario(**given)
    with counting(f"{scenario.algorithm}, {scenario.adversary}") as on_step:
        outcome = attack_images(scenario, effort, data_dir, on_step)
    if out:
        write(outcome, out)
    _print_object(outcome.as_json(), as_json)


@attack.command("membership")
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.option("--references", default=2, show_default=True, help="reference models to train, for the calibrated loss")
@click.option("--shadows", default=0, show_default=True, help="runs like this one to train, for the likelihood ratio")
@click.option("--data-dir", type=click.Path(path_type=Path), help="data folder (also FEDRP_DATA)")
@click.option("--out", type=click.Path(path_type=Path), help="folder for roc.png and result.json")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def attack_membership_of(
    run_folder: Path, references: int, shadows: int, data_dir: Path | None, out: Path | None, as_json: bool
) -> None:
    """Tell members of the training set from others by the final model in RUN_FOLDER."""
    from fedrp.attacks.figures import write_membership
    from fedrp.attacks.membership import attack_membership

    with counting("shadow runs") as on_shadow:
        outcome = attack_membership(run_folder, references, data_dir, shadows, on_shadow)
    if out:
        write_membership(outcome, out)
    _print_object(outcome.as_json(), as_json)


@attack.command("key-search")
@click.option("--bits", default=16, show_default=True, help="size of the seed to find")
@click.option("--seed", default=0, show_default=True, help="what the secret seed is drawn from")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def attack_key_search(bits: int, seed: int, as_json: bool) -> None:
    """Find the seed of a matrix made as in common practice; then try as long for a real key."""
    from fedrp.attacks.experiment import attack_keys

    with counting("seeds") as on_step:
        found = attack_keys(bits, seed, lambda tried: on_step(tried, 2**bits))
    _print_object(found, as_json)


def _print_object(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in parts:
            print(f"{f'{name} {part}':<28} {f'{number:.4g}' if isinstance(number, float) else number}")
