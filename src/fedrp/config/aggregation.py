"""Rules of aggregation by name: `mean`, `median` and `trimmed:F`."""

SMALLEST_SHARE = 1e-6
_SHARES = {"mean": 0.0, "median": 0.5}  # of a round's uploads, cut off at each end
_TRIMMED = "trimmed:"


def share_of(aggregation: str) -> float | None:
    """The share of uploads that a rule cuts off at each end, or None if there is no such rule."""
    if not aggregation.startswith(_TRIMMED):
        return _SHARES.get(aggregation)
    try:
        share = float(aggregation.removeprefix(_TRIMMED))
    except ValueError:
        return None
    return share if SMALLEST_SHARE <= share < _SHARES["median"] else None
