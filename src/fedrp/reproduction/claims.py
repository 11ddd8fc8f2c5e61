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
    """Table 2: the paper's figures are payloads, in units of 1,024 bytes for models; a message has framing, too."""
    stated = [line for line in lines if line.paper]
    off = [line for line in stated if not _agrees(line)]
    framing = min(line.message - line.payload for line in lines)
    measured = f"{len(stated) - len(off)} of {len(stated)} payloads agree"
    if off:
        measured += "; not " + ", ".join(f"{line.what}: {line.payload:,} B" for line in off)
    return [Verdict("A client sends 4m bytes, not 4n.", f"{measured}; a message has {framing} B more.", not off)]


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
    """Of FedRP as printed; `others` are methods without noise."""
    verdicts = []
    if others:
        ends = ", ".join(f"{label} {accuracy:.1f} %" for label, accuracy in others.items())
        claim, near = f"FedRP is as accurate as {' and '.join(others)}.", printed >= max(others.values()) - NEAR
        verdicts.append(Verdict(claim, f"{printed:.1f} %; {ends}.", near))
    if noisy:
        best = max(noisy.values())
        measured = f"{printed:.1f} %; with noise at best {best:.1f} %."
        verdicts.append(Verdict("FedRP is more accurate than FedAvg with noise.", measured, printed > best))
    if alone is not None:
        measured = f"{printed:.1f} %; alone {alone:.1f} %."
        verdicts.append(Verdict("Clients that talk learn more than alone.", measured, printed > alone))
    return verdicts


def _about_ours(label: str, ours: Mapping[str, Any], average: float, sent: float) -> Verdict:
    """`average` is FedAvg's accuracy, and `sent` what its clients send in a round."""
    share = sent / ours["bytes_up"]
    return Verdict(
        f"(Ours) {label.removeprefix('FedRP-')} is as accurate.",
        f"{ours['accuracy']:.1f} %; {FEDAVG} {average:.1f} % at {share:,.0f} times the bytes.",
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
