"""What can go wrong, by kind. Each kind has one exit code, so scripts can tell them apart."""

INTERRUPTED = 130  # exit code of what Ctrl-C ended


class FedRPError(Exception):
    """Base of every error that a user can cause or must hear of; printed as one line, never as a traceback."""

    exit_code = 1


class ConfigError(FedRPError):
    """A setting is unknown, of the wrong type, or out of range."""

    exit_code = 2


class DataError(FedRPError):
    """A data set is missing, corrupt, mis-shaped, or cannot be split as asked."""

    exit_code = 3


class WireError(FedRPError):
    """Bytes that are not a valid message of this version. Deliberately says little: the sender may be hostile."""

    exit_code = 4


class ProtocolError(FedRPError):
    """A valid message at the wrong time, from the wrong sender, or a key that does not open."""

    exit_code = 5


class QuorumError(ProtocolError):
    """Too few clients answered in a round; nothing is lost, the round can be repeated."""


class DivergenceError(FedRPError):
    """Training produced a value that is not finite."""

    exit_code = 6


class PrivacyError(FedRPError):
    """A promise about privacy cannot be kept, or was measured not to hold."""

    exit_code = 7


class SiteError(FedRPError):
    """A folder cannot be written (a full disk), or a party's own not be read: damaged, foreign, another process."""

    exit_code = 8


def first_line(error: BaseException) -> str:
    """What an error of another library says, for a line of our own; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
