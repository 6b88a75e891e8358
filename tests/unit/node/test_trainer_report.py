"""A publisher's report never claims more than is known."""

from __future__ import annotations

from typing import Any

from pulsenet.chain.records import Head
from pulsenet.chain.signing import decode_signed, open_record
from pulsenet.ids import Version
from pulsenet.node.published import PublishedState
from pulsenet.node.trainer_phase import Phase
from pulsenet.node.trainer_report import make_report


def fields_of(run: Any, *, own: int | None, seen: int | None, is_seen: bool = True) -> dict[str, Any]:
    name = run.digest("x")
    state = None
    if own is not None:
        state = PublishedState(Version(0, own), name, name, name, name, None, 1, 10, 5, 40, (), (name,))
    newest = None
    if seen is not None:
        newest = open_record(Head, decode_signed(run.head(Version(0, seen))), run.verify, run_id=run.run_id)
    report = make_report(
        phase=Phase.IDLE, reason="", state=state, newest=newest, patch=None, is_seen=is_seen, is_forked=False
    )
    return dict(report.fields)


def test_before_the_first_publish_nothing_is_claimed(run: Any) -> None:
    fields = fields_of(run, own=None, seen=None, is_seen=False)
    assert fields["applied_version"] is None
    assert fields["version_lag"] is None
    assert fields["stale"] is False
    assert "root" not in fields
    assert "patch_kind" not in fields


def test_lag_is_what_was_seen_minus_what_is_committed(run: Any) -> None:
    """A-OBS-2."""
    assert fields_of(run, own=57, seen=60)["version_lag"] == 3
    assert fields_of(run, own=57, seen=57)["version_lag"] == 0


def test_lag_is_never_0_because_nobody_was_heard(run: Any) -> None:
    """A-OBS-2."""
    fields = fields_of(run, own=57, seen=57, is_seen=False)
    assert fields["version_lag"] is None
    assert fields["stale"] is True
    assert fields_of(run, own=57, seen=60, is_seen=False)["version_lag"] == 3
