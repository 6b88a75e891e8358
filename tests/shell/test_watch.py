"""A round that does not end is said once, and a node that stands still ends itself."""

from __future__ import annotations

import logging
import threading

import pytest

from pulsenetd.handlers.reporting import Ledger
from pulsenetd.metrics import Metrics
from pulsenetd.watch import STUCK_CODE, RoundWatch, Watchdog


class Scene:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.ledger = Ledger(self.metrics, lambda: 0.0)
        self.watch = RoundWatch(self.ledger, 100.0)

    def look(self, now: float, index: int | None, phase: str | None) -> float | None:
        self.ledger.fields.update(round_index=index, rounds_phase=phase)
        self.watch.look(now)
        return self.metrics.registry.get_sample_value("pulsenet_round_stuck")


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_round_that_does_not_end_is_said_once_and_taken_back_when_it_does(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    scene.ledger.fields["rounds_reason"] = "no-source"
    assert scene.look(0.0, 3, "pending") == 0.0
    assert scene.look(100.0, 3, "gathering") == 0.0
    assert caplog.records == []
    assert scene.look(101.0, 3, "gathering") == 1.0
    assert scene.look(200.0, 3, "gathering") == 1.0
    (record,) = caplog.records
    assert "round 3 did not end within 100 s (gathering, no-source)" in record.getMessage()
    assert scene.look(201.0, 4, "training") == 0.0
    assert scene.look(300.0, 4, "training") == 0.0


@pytest.mark.parametrize("phase", [None, "idle", "watching"])
def test_where_no_round_is_due_none_is_stuck(scene: Scene, phase: str | None) -> None:
    scene.look(0.0, 3, phase)
    assert scene.look(10_000.0, 3, phase) == 0.0


def test_a_loop_that_stands_still_ends_the_node_with_a_code_that_is_started_again() -> None:
    ended: list[int] = []
    now = 0.0
    watchdog = Watchdog(lambda: 5.0, lambda: now, 10.0, end=ended.append)
    now = 15.0
    assert watchdog.look()
    assert ended == []
    now = 15.1
    assert not watchdog.look()
    assert ended == [STUCK_CODE]


def test_the_watch_is_kept_by_a_thread_until_it_is_stopped() -> None:
    ended = threading.Event()
    watchdog = Watchdog(lambda: 0.0, lambda: 1.0, 0.04, end=lambda code: ended.set())
    watchdog.start()
    assert ended.wait(10)
    calm = Watchdog(lambda: 0.0, lambda: 0.0, 0.04, end=lambda code: pytest.fail("it turned"))
    calm.start()
    calm.stop()
    calm._thread.join(10)
    assert not calm._thread.is_alive()
