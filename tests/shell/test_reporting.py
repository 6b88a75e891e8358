"""Reports, counters and log lines reach the status object and the metrics."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from pulsenet.node.effects import Count, Log, Report
from pulsenetd.handlers.reporting import REPEAT_SECONDS, VERSIONS_REMEMBERED, WARNINGS_REMEMBERED, Ledger
from pulsenetd.metrics import Metrics


class Scene:
    def __init__(self, hands: Any) -> None:
        self.now = 10.0
        self.metrics = Metrics()
        self.ledger = Ledger(self.metrics, lambda: self.now)
        self.hands = hands

    def execute(self, effect: Any) -> None:
        assert self.hands.execute(self.ledger.table(), effect) == []

    def report(self, **fields: Any) -> None:
        self.execute(Report(tuple(fields.items())))

    def gauge(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"pulsenet_{name}", labels)


@pytest.fixture
def scene(hands: Any) -> Scene:
    return Scene(hands)


def test_before_the_first_report_nothing_is_claimed(scene: Scene) -> None:
    assert scene.gauge("applied_version") == -1.0
    assert scene.gauge("latest_seen_version") == -1.0
    assert math.isnan(scene.gauge("version_lag") or 0.0)
    assert scene.gauge("publisher_seen") == 0.0


def test_reports_show_and_unknown_fields_stay_unknown(scene: Scene) -> None:
    scene.report(applied_version=3, latest_seen_version=5, version_lag=2, stale=False, fork=True, phase="fetching")
    assert scene.gauge("applied_version") == 3.0
    assert scene.gauge("version_lag") == 2.0
    assert (scene.gauge("stale"), scene.gauge("fork")) == (0.0, 1.0)
    assert scene.ledger.fields["phase"] == "fetching"
    scene.report(version_lag=None)
    assert math.isnan(scene.gauge("version_lag") or 0.0)
    assert scene.gauge("applied_version") == 3.0, "a report adds to the ones before"


def test_reports_of_the_mesh_count_peers_by_kind(scene: Scene) -> None:
    scene.report(peers_connected=4, peers_neighbour=3)
    assert scene.gauge("peers", kind="connected") == 4.0
    assert scene.gauge("peers", kind="neighbour") == 3.0
    assert scene.gauge("peers", kind="known") is None


def test_what_the_shell_knows_itself_is_noted(scene: Scene) -> None:
    scene.ledger.note(revision=7)
    assert scene.ledger.fields["revision"] == 7


def test_counts_reach_their_series(scene: Scene) -> None:
    scene.execute(Count("rejected", "fork"))
    scene.execute(Count("wasted_bytes", "duplicate", 100.0))
    assert scene.gauge("rejected_total", reason="fork") == 1.0
    assert scene.gauge("wasted_bytes_total", reason="duplicate") == 100.0


@pytest.mark.parametrize(("level", "number"), [("info", 20), ("warning", 30), ("error", 40)])
def test_log_lines_keep_their_level_and_are_never_formats(
    scene: Scene, level: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scene.execute(Log(level, "100 %s done"))
    assert caplog.record_tuples == [("pulsenet", number, "100 %s done")]


def test_the_engine_is_timed_from_the_first_news_of_its_version(scene: Scene) -> None:
    scene.report(latest_seen_version=1)
    scene.now = 12.0
    scene.report(latest_seen_version=1)
    scene.now = 15.0
    scene.ledger.note_version(1, kind="patch")
    scene.ledger.note_engine(1)
    scene.ledger.note_engine(9)
    assert list(scene.ledger.versions.values()) == [{"version": 1, "kind": "patch", "engine_seconds": 5.0}]
    assert scene.ledger.fields["engine_version"] == 9, "a version whose news came before the start has no time"


def test_only_the_last_versions_are_remembered(scene: Scene) -> None:
    for number in range(VERSIONS_REMEMBERED + 5):
        scene.report(latest_seen_version=number)
        scene.ledger.note_version(number, kind="patch")
    assert list(scene.ledger.versions) == list(range(5, VERSIONS_REMEMBERED + 5))
    assert scene.ledger.seconds_since_seen(4, scene.now) is None
    assert scene.ledger.seconds_since_seen(5, scene.now) == 0.0


def test_the_state_of_the_rounds_reaches_the_gauges(scene: Scene) -> None:
    assert scene.gauge("round_index") == -1.0
    assert math.isnan(scene.gauge("residual_norm") or 0.0)
    scene.report(rounds_phase="pending", round_index=4, round_contributors=3, rounds_behind=1)
    assert (scene.gauge("round_index"), scene.gauge("round_contributors")) == (4.0, 3.0)
    assert scene.gauge("rounds_behind") == 1.0
    scene.ledger.note(residual_norm=0.5)
    assert scene.gauge("residual_norm") == 0.5


def test_a_warning_in_the_same_words_is_said_once_and_counted(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that is full refuses every few seconds."""
    caplog.set_level(logging.INFO, "pulsenet")
    full = Log("warning", "round 3 was not applied: enospc")
    for _ in range(5):
        scene.execute(full)
        scene.execute(Log("info", "an ordinary line"))
    scene.execute(Log("error", "something else"))
    texts = [record.getMessage() for record in caplog.records]
    assert texts.count(full.text) == 1
    assert texts.count("an ordinary line") == 5
    assert texts.count("something else") == 1
    scene.now += REPEAT_SECONDS
    scene.execute(full)
    assert caplog.records[-1].getMessage() == f"{full.text} (and 4 times since this was said last)"


def test_only_so_many_warnings_are_remembered(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for index in range(WARNINGS_REMEMBERED + 1):
        scene.execute(Log("warning", f"trouble {index}"))
    for index in (0, WARNINGS_REMEMBERED):
        scene.execute(Log("warning", f"trouble {index}"))
    texts = [record.getMessage() for record in caplog.records]
    assert (texts.count("trouble 0"), texts.count(f"trouble {WARNINGS_REMEMBERED}")) == (2, 1)
