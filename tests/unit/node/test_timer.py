"""A machine's timer: a time is ordered once, and what is put off puts off nothing that is due before."""

from __future__ import annotations

from pulsenet.node.effects import SetTimer
from pulsenet.node.timer import Timer


def test_the_first_time_ahead_is_ordered_once() -> None:
    timer = Timer()
    assert timer.wake_next([None, 1.0, 5.0, 3.0], now=1.0) == [SetTimer(3.0)]
    assert timer.wake_next([3.0], now=2.0) == []
    assert timer.wake_next([4.0], now=2.0) == [SetTimer(4.0)]


def test_nothing_ahead_leaves_what_was_ordered() -> None:
    timer = Timer()
    assert timer.wake_next([3.0], now=0.0) == [SetTimer(3.0)]
    assert timer.wake_next([None, 1.0], now=2.0) == []
    assert timer.wake_next([3.0], now=2.0) == []


def test_a_time_that_has_come_is_ordered_anew() -> None:
    timer = Timer()
    timer.note(0.0)
    assert timer.wake_at(3.0) == [SetTimer(3.0)]
    timer.note(2.9)
    assert timer.wake_at(3.0) == []
    timer.note(3.0)
    assert timer.wake_at(3.0) == [SetTimer(3.0)]


def test_waking_at_the_latest_keeps_what_is_due_before() -> None:
    timer = Timer()
    assert timer.wake_by(5.0) == [SetTimer(5.0)]
    assert timer.wake_by(7.0) == [SetTimer(5.0)]
    assert timer.wake_by(4.0) == [SetTimer(4.0)]
