"""Every failure has its documented exit code."""

from __future__ import annotations

import pytest

from pulsenet import errors
from pulsenetd import errors as node_errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("x"), 2),
        (errors.ConfigError("x"), 78),
        (node_errors.NoBootstrapError("x"), 3),
        (node_errors.AddressInUseError("x"), 4),
        (node_errors.DirectoryLockedError("x", "locked"), 4),
        (errors.PatchMismatchError("x"), 5),
        (errors.TrustError("fork"), 5),
        (errors.StorageError("x"), 6),
        (node_errors.P2pdError("x"), 7),
        (errors.RemoteProtocolError("decode"), 1),
        (errors.UnavailableError("x"), 1),
        (RuntimeError("x"), 1),
    ],
)
def test_exit_codes_are_the_documented_ones(error: Exception, code: int) -> None:
    assert node_errors.exit_code(error) == code


def test_of_a_group_within_a_group_the_first_cause_counts() -> None:
    cause = errors.StorageError("full")
    group = BaseExceptionGroup("tasks", [BaseExceptionGroup("more", [cause, KeyError("x")]), RuntimeError("y")])
    assert node_errors.first_cause(group) is cause
    assert node_errors.first_cause(cause) is cause
