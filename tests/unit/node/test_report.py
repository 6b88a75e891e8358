"""Reports say what is known and no more."""

from __future__ import annotations

from dataclasses import replace

from pulsenet.chain.records import Head
from pulsenet.ids import Digest, RunId, Version
from pulsenet.node.effects import Effect, Report
from pulsenet.node.fetch import FetchProgress
from pulsenet.node.report import CONFIRMATIONS_MAX, REPORT_SECONDS, Reporter, Standing

VALID_MS = 300_000


def head(number: int, issued_at_ms: int = 0) -> Head:
    digest = Digest(b"d" * 32)
    return Head(
        RunId(b"r" * 32), 0, 0, Version(0, number), digest, digest, digest, None, issued_at_ms, issued_at_ms + VALID_MS
    )


def standing(applied: int | None, newest: Head | None, phase: str = "current", reason: str = "") -> Standing:
    version = None if applied is None else Version(0, applied)
    return Standing(phase, reason, version, version, newest, is_in_force=newest is not None, is_forked=False)


def progress() -> FetchProgress:
    return FetchProgress(100, 40, 2, 3, "no-source", 30, 10, "thin-upload")


def fields(effects: list[Effect]) -> dict[str, object]:
    (report,) = effects
    assert isinstance(report, Report)
    return dict(report.fields)


def tell(reporter: Reporter, where: Standing, now: float) -> dict[str, object]:
    return fields(reporter.report(where, progress, now, round(now * 1000)))


def test_nothing_known_is_reported_as_nothing() -> None:
    told = tell(Reporter("inferencer"), standing(None, None, "waiting"), 0.0)
    assert told["applied_version"] is None
    assert told["version_lag"] is None
    assert told["version_age_seconds"] is None
    assert told["publisher_seen"] is False
    assert told["stale"] is False
    assert (told["fetch_wanted_bytes"], told["fetch_held_bytes"]) == (100, 40)
    assert told["reason"] == "no-source"
    assert (told["fetch_publisher_bytes"], told["fetch_reader_bytes"]) == (30, 10)
    assert told["fetch_shortfall"] == "thin-upload"


def test_lag_and_age_are_measured_against_what_was_seen() -> None:
    """A-OBS-2: publisher v60, inferencer v57."""
    reporter = Reporter("inferencer")
    assert tell(reporter, standing(57, head(57)), 1.0)["version_age_seconds"] == 1.0
    told = tell(reporter, standing(57, head(60, 2000)), 10.0)
    assert (told["version_lag"], told["version_age_seconds"]) == (3, 10.0)
    told = tell(reporter, standing(57, head(60, 2000)), 400.0)
    assert (told["version_lag"], told["version_age_seconds"], told["publisher_seen"]) == (3, 400.0, False)
    assert told["stale"] is True


def test_a_head_whose_signer_was_revoked_is_stale_at_once_although_its_validity_goes_on() -> None:
    """A-AUTH-5: nobody in force says what is newest, however young the head is."""
    reporter = Reporter("inferencer")
    assert tell(reporter, standing(57, head(57)), 1.0)["stale"] is False
    told = tell(reporter, replace(standing(57, head(57)), is_in_force=False), 1.1)
    assert (told["stale"], told["publisher_seen"], told["version_lag"]) == (True, False, None)


def test_a_lag_of_zero_ends_with_the_heads_validity() -> None:
    """A-OBS-2: never 0 because nobody was heard."""
    reporter = Reporter("inferencer")
    assert tell(reporter, standing(57, head(57)), 299.0)["version_lag"] == 0
    assert tell(reporter, standing(57, head(57)), 301.0)["version_lag"] is None


def test_reports_are_made_on_change_or_once_a_second() -> None:
    reporter = Reporter("seed")
    assert reporter.next_wake(0.0) is None
    tell(reporter, standing(1, head(1)), 0.0)
    assert reporter.report(standing(1, head(1, 5)), progress, 0.5, 500) == []
    assert reporter.next_wake(0.5) == REPORT_SECONDS
    tell(reporter, standing(1, head(1)), REPORT_SECONDS)
    tell(reporter, standing(1, head(2)), REPORT_SECONDS + 0.1)
    assert tell(reporter, standing(1, head(2), "stalled", "no_anchor"), REPORT_SECONDS + 0.2)["reason"] == "no_anchor"


def test_an_overdue_report_is_due_at_once() -> None:
    reporter = Reporter("seed")
    tell(reporter, standing(1, head(1)), 0.0)
    wake = reporter.next_wake(100.0)
    assert wake is not None
    assert 100.0 < wake < 100.1


def test_confirmations_are_bounded() -> None:
    reporter = Reporter("inferencer")
    for number in range(1, CONFIRMATIONS_MAX + 3):
        told = tell(reporter, standing(1, head(number)), float(number))
    assert told["version_age_seconds"] is None
