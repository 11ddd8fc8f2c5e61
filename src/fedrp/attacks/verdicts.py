"""What an attack amounts to, in one line. A failed attack proves nothing, and the line says so."""

from collections.abc import Mapping, Sequence
from typing import Any

READ = 25.0  # dB: reconstructions from here on show the image itself (docs/attacks.md)
HINT = 3.0  # dB above the mean public image, which costs no attack
# By how much the area may differ from a half because training and test set differ: for untrained models on MNIST, 5,000
# examples of each, up to 0.014 (docs/attacks.md).
SHIFT = 0.02
_BETTER_MAY_EXIST = "a better attack may exist"


def image_verdict(psnr: Sequence[float], mean_image: Sequence[float], label_rate: float) -> str:
    """Of a reconstruction of images, each held against the mean of public images."""
    read = sum(value >= READ for value in psnr)
    hinted = sum(value < READ and value >= base + HINT for value, base in zip(psnr, mean_image, strict=True))
    labels = f"{label_rate:.0%} of labels found"
    if read:
        partly = f", {hinted} more in part" if hinted else ""
        return f"IMAGES READ: {read} of {len(psnr)} at {READ:g} dB or more{partly}; {labels}"
    if hinted:
        return f"IMAGES READ IN PART: {hinted} of {len(psnr)} are {HINT:g} dB above the mean public image; {labels}"
    return f"no image read: none is {HINT:g} dB above the mean public image; {labels}; {_BETTER_MAY_EXIST}"


def membership_verdict(attacks: Mapping[str, Mapping[str, float]]) -> str:
    """Of the attacks that were tried, by name: the one with the largest area under its curve.

    Or, where no area tells, the one that names most members at few false alarms: a leak may be of few members.
    """
    name, best = max(attacks.items(), key=lambda item: item[1]["auc"])
    sharp, sharpest = max(attacks.items(), key=lambda item: item[1]["tpr_low"] - item[1]["fpr_high"])
    some = sharpest["tpr_low"] > sharpest["fpr_high"] + SHIFT
    if some and best["auc_low"] <= 0.5 + SHIFT:
        name, best = sharp, sharpest
    found = f"AUC {best['auc']:.3f} ({best['auc_low']:.3f} to {best['auc_high']:.3f}, {name})"
    rate = (
        f"{best['tpr_at_1_percent_fpr']:.1%} of members named at 1 % false alarms, "
        f"{best['tpr_at_1_per_mille_fpr']:.1%} at 0.1 %"
    )
    if best["auc_low"] > 0.5 + SHIFT:
        return f"MEMBERS TOLD FROM OTHERS: {found}; {rate}"
    if some:
        return f"SOME MEMBERS TOLD FROM OTHERS: {rate}; {found}"
    if best["auc_low"] > 0.5:
        return f"members hardly told from others, training and test set may just differ: {found}; {rate}"
    return f"members not told from others: {found}, 0.5 is guessing; {rate}; {_BETTER_MAY_EXIST}"


def key_verdict(found: Mapping[str, Any]) -> str:
    """Of a search for a seed, and for a real key."""
    seed = f"SEED FOUND after {found['seeds_tried']:,} tries" if found["seed_found"] else "seed not found"
    key = "KEY FOUND" if found["key_found"] else "key not found"
    return f"{seed}; {key} after {found['keys_tried']:,}, all would take 2^{found['log2_years_for_all_keys']:.0f} years"
