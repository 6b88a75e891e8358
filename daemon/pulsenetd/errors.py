"""Failures of the node itself, and the exit code of every error (docs: exit codes)."""

from __future__ import annotations

from typing import Final

from pulsenet.errors import (
    ConfigError,
    IntegrityError,
    PulsenetError,
    StorageError,
    UnavailableError,
    UsageError,
)


class NoBootstrapError(UnavailableError):
    """None of the bootstraps could be reached; the message has one line per address."""


class AddressInUseError(PulsenetError):
    """Another process listens where this node should."""


class DirectoryLockedError(StorageError):
    """Another process owns the data directory."""


class P2pdError(PulsenetError):
    """p2pd is missing, cannot run here, or keeps dying."""


EXIT_CODES: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (UsageError, 2),
    (ConfigError, 78),
    (NoBootstrapError, 3),
    (AddressInUseError, 4),
    (DirectoryLockedError, 4),
    (IntegrityError, 5),
    (StorageError, 6),
    (P2pdError, 7),
    (PulsenetError, 1),
)
"""First matching type wins, so subclasses come before their bases."""


EXIT_MEANINGS: Final = {
    0: "done",
    1: "failed at run time; doctor: something fails",
    2: "wrong command line",
    3: "no bootstrap reachable",
    4: "address in use, or data directory locked",
    5: "trust or verification failed",
    6: "storage; scrub: something was damaged",
    7: "p2pd cannot run",
    78: "wrong configuration",
    130: "stopped by SIGINT",
    143: "stopped by SIGTERM",
}
"""What a code says, in the manual page; docs/operating.md adds what to do."""


def exit_code(error: BaseException) -> int:
    """Return the documented exit code of an error."""
    for error_type, code in EXIT_CODES:
        if isinstance(error, error_type):
            return code
    return 1


def first_cause(group: BaseException) -> BaseException:
    """Return the first cause in a group of errors: a node has one reason to die, and the operator wants that one."""
    error = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
