"""Noise for records: the part of `fedrp privacy` that plans it, and that of `fedrp audit` that tries to refute it."""

import json
import math
from pathlib import Path
from typing import Any

from fedrp.cli.common import Settings, counting, leaks_more, tell_audit
from fedrp.errors import ConfigError

_SHOWN = ("algorithm", "dataset", "clients", "rounds", "headline", "sites")
_RECORDS = 8  # of the site that is audited
_NEAR = 1.5  # a kept run is near if its epsilon is at most so many times larger or smaller


def print_plan(
    records: str,
    delta: float,
    rounds: int,
    batch_size: int | None,
    local_epochs: int,
    dp_epsilon: float | None,
    noise_multiplier: float | None,
    results: Path | None,
    as_json: bool,
) -> None:
    """The noise and the epsilon of sites with so many records each, and what kept runs reached near that.

    Raises:
        ConfigError: not one of target and noise is given, or the numbers of records are none.
    """
    from fedrp.config.checks import require
    from fedrp.records.defaults import BATCH_SIZE
    from fedrp.records.steps import LocalSteps, plan

    require(dp_epsilon is None or dp_epsilon > 0, "dp_epsilon", dp_epsilon, "a number above 0")
    if (dp_epsilon is None) == (noise_multiplier is None):
        raise ConfigError("with --records give either --dp-epsilon or --noise-multiplier: the other one follows")
    try:
        sizes = [int(part) for part in records.split(",")]
    except ValueError:
        raise ConfigError(f"records={records} is not valid: give whole numbers, as 6000 or 6000,800") from None
    steps = [LocalSteps(size, BATCH_SIZE if batch_size is None else batch_size, local_epochs, rounds) for size in sizes]
    plans = [plan(own, delta, dp_epsilon, noise_multiplier) for own in steps]
    worst = max(math.inf if item["epsilon"] is None else float(item["epsilon"]) for item in plans)
    near = [] if results is None else _near(results, worst)
    if as_json:
        print(json.dumps({"sites": plans, "kept": near}))
        return
    for item in plans:
        reached = "none" if item["epsilon"] is None else f"{item['epsilon']:.4g}"
        print(
            f"{item['records']} records: sampling rate {item['sampling_rate']:.4g}, {item['steps']} steps, "
            f"noise multiplier {item['noise_multiplier']:.4g}, epsilon {reached} at delta {delta:g} for each record"
        )
    for kept in near:
        print(
            f"kept run {kept['folder']}: {kept['algorithm']} on {kept['dataset']}, {kept['clients']} clients, "
            f"{kept['rounds']} rounds, epsilon {kept['epsilon']:.3g}: {kept['headline']} {kept['value']:.4g}"
        )
    if results is not None and not near:
        print(f"no run below {results} protects records with an epsilon near {worst:.3g}")


def print_audit(
    given: Settings,
    records: int | None,
    trials: int,
    canary: str | None,
    canaries: int | None,
    confidence: float,
    broken: str | None,
    as_json: bool,
) -> None:
    """Try to refute what the local steps of a site with so many records claim.

    Raises:
        PrivacyError: more is leaked than is claimed.
    """
    from fedrp.auditing.examples import audit_example
    from fedrp.auditing.records import RecordFault, audit_records
    from fedrp.config.checks import require, require_choice
    from fedrp.records.defaults import BATCH_SIZE
    from fedrp.records.promise import DEFAULT_EPSILON
    from fedrp.records.steps import LocalSteps

    fault = broken or RecordFault.NONE.value
    require_choice("broken", fault, [known.value for known in RecordFault])
    values = {name: value for name, value in given.items() if value is not None}
    usual = {"batch_size": BATCH_SIZE, "local_epochs": 1, "rounds": 1}
    records = _RECORDS if records is None else records
    steps = LocalSteps(records, *(values.get(name, number) for name, number in usual.items()))
    delta, noise = values.get("dp_delta", 1e-5), values.get("noise_multiplier")
    require(noise is None or noise > 0, "noise_multiplier", noise, "a number above 0: without noise nothing is claimed")
    if canary == "example" and canaries is not None:
        raise ConfigError("--canaries is for --canary gradient: an image is played one at a time")
    if noise is None:
        noise = steps.noise_for(values.get("dp_epsilon", DEFAULT_EPSILON), delta)
    with counting("trials") as on_step:
        seed, kind = values.get("seed", 0), RecordFault(fault)
        claim = (steps, noise, delta, trials)
        last = (confidence, kind, seed, lambda done: on_step(done, trials))
        found = (
            audit_example(*claim, *last) if canary == "example" else audit_records(*claim, canaries or records, *last)
        )
    mechanism = f"{steps.of_the_run} steps, rate {steps.rate:.4g}, noise multiplier {noise:.4g}"
    claimed = f"{found.claimed:.4g} at delta {delta:g}, whoever looks"
    tell_audit(found.as_json(), mechanism, claimed, f"confidence {confidence:g}, {trials} runs a world", as_json)
    if found.violated:
        raise leaks_more(found.lower_bound, found.claimed)


def _near(folder: Path, epsilon: float) -> list[dict[str, Any]]:
    """What finished runs below a folder reached, with an epsilon for records near the given one."""
    found = []
    for path in sorted(folder.rglob("result.json")):
        try:
            result = json.loads(path.read_text())
            stated = result["epsilon_by_unit"]["record"]
            value, names = (
                result[result["headline"]],
                ("algorithm", "dataset", "clients", "rounds", "headline", "sites"),
            )
            kept = {name: result[name] for name in names}
        except (OSError, ValueError, KeyError, TypeError):  # no result, one of before, or one without such noise
            continue
        if stated and epsilon / _NEAR <= stated <= epsilon * _NEAR:
            found.append({"folder": str(path.parent), "epsilon": stated, "value": value, **kept})
    return found
