"""What the paper claims, beside what was measured: one sentence each, and whether it holds."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedrp.reproduction.plan import ALONE, FEDADMM, FEDAVG, PRINTED, SUBSPACE
from fedrp.reproduction.traffic import Sent

Curves = Sequence[tuple[str, dict[str, Any]]]  # of a panel: label and result

NEAR = 1.0  # points of accuracy that "as good as" may cost
_SLACK = 0.3  # points by which a larger m may be worse and still count as no worse: the spread over seeds
_UNITS = {"Byte": 1, "KB": 1024, "MB": 1024**2}


class Verdict(NamedTuple):
    """A claim, what was found, and whether it holds."""

    claim: str
    measured: str
    holds: bool


def about_bytes(lines: Sequence[Sent]) -> list[Verdict]:
    """Table 2: the paper's figures are payloads, in units of 1,024 bytes for models."""
    stated = [line for line in lines if line.paper]
    off = [line for line in stated if not _agrees(line)]
    measured = f"{len(stated) - len(off)} of {len(stated)} payloads agree to the digits given"
    if off:
        measured += "; not " + ", ".join(f"{line.what}: {line.payload:,} B" for line in off)
    framing = {line.message - line.payload for line in lines}
    measured += f". A message has {min(framing)} bytes more, which the paper leaves out."
    return [Verdict("A client sends 4m bytes instead of 4n.", measured, not off)]


def about_rounds(curves: Curves) -> list[Verdict]:
    """Figures 1 and 2: the claims about the curves that are there."""
    last = {label: result["accuracy"] for label, result in curves}
    noisy = {label: accuracy for label, accuracy in last.items() if "DP" in label}
    others = {label: last[label] for label in (FEDAVG, FEDADMM) if label in last}
    verdicts = _about_printed(last[PRINTED], others, noisy, last.get(ALONE)) if PRINTED in last else []
    if FEDAVG in last:
        sent = dict(curves)[FEDAVG]["bytes_up"]
        for label, ours in curves:
            if label.startswith(SUBSPACE):
                verdicts.append(_about_ours(label, ours, last[FEDAVG], sent))
    return verdicts


def _about_printed(
    printed: float, others: Mapping[str, float], noisy: Mapping[str, float], alone: float | None
) -> list[Verdict]:
    """`others` are methods without noise."""
    verdicts = []
    if others:
        ends = ", ".join(f"{label} at {accuracy:.1f} %" for label, accuracy in others.items())
        verdicts.append(
            Verdict(
                f"FedRP is as accurate as {' and '.join(others)}, with a fraction of the bytes.",
                f"As printed it ends at {printed:.1f} %, {ends}.",
                printed >= max(others.values()) - NEAR,
            )
        )
    if noisy:
        best = max(noisy, key=lambda label: noisy[label])
        verdicts.append(
            Verdict(
                "FedRP is more accurate than FedAvg with noise.",
                f"The best with noise is {best} at {noisy[best]:.1f} %; FedRP has no noise, so privacy is not equal.",
                printed > noisy[best],
            )
        )
    if alone is not None:
        verdicts.append(
            Verdict(
                "Clients that talk learn more than alone.",
                f"FedRP as printed {printed:.1f} %, alone {alone:.1f} %.",
                printed > alone,
            )
        )
    return verdicts


def _about_ours(label: str, ours: Mapping[str, Any], average: float, sent: float) -> Verdict:
    """`average` is FedAvg's accuracy, and `sent` what its clients send in a round."""
    share = sent / ours["bytes_up"]
    return Verdict(
        f"(Ours) {label} is as accurate as FedAvg.",
        f"It ends at {ours['accuracy']:.1f} % with {ours['bytes_up']:,} bytes a round, 1/{share:,.0f} of FedAvg's; "
        f"FedAvg at {average:.1f} %.",
        ours["accuracy"] >= average - NEAR,
    )


def about_m(curves: Curves) -> list[Verdict]:
    """Figure 3: the claim about each curve with two points at least."""
    verdicts = []
    for name in dict.fromkeys(label for label, _ in curves):
        points = sorted((result["dim"], result["accuracy"]) for label, result in curves if label == name)
        if len(points) < 2:
            continue
        (small, first), (large, last) = points[0], points[-1]
        grows = all(b >= a - _SLACK for (_, a), (_, b) in itertools.pairwise(points)) and last > first
        measured = f"{first:.1f} % with m = {small:,}, {last:.1f} % with m = {large:,}."
        verdicts.append(Verdict(f"{name}: accuracy grows with m.", measured, grows))
    return verdicts


def _agrees(line: Sent) -> bool:
    """Whether the payload is what the paper says, in its unit: cut off or rounded, and 4 KB for 4,000 bytes."""
    number, unit = (line.paper or "").split()
    decimal = {"KB": 1000, "MB": 1000**2}.get(unit, 1)
    return any(int(number) in (int(line.payload / by), round(line.payload / by)) for by in (_UNITS[unit], decimal))
