"""Optional parts: whether they are installed, and in a version that was tested."""

from importlib import metadata

from fedrp.errors import ConfigError

FLOWER_FROM, FLOWER_BELOW = (1, 41), (1, 43)  # as in pyproject.toml


def require_flower() -> None:
    """Refuse a Flower whose inner workings are not those that `fedrp.flower.executor` was tested with.

    Raises:
        ConfigError: flwr is not installed, or in another version.
    """
    wanted = f"flwr>={_text(FLOWER_FROM)},<{_text(FLOWER_BELOW)}"
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise ConfigError("flwr is not installed: pip install 'fedrp[flower]'") from None
    if not FLOWER_FROM <= _numbers(version) < FLOWER_BELOW:
        raise ConfigError(f"flwr {version} is not a version that this fedrp was tested with: pip install '{wanted}'")


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number; a version that has none sorts below all others."""
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
