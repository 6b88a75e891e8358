"""The engine is swapped once per catch-up, again after it was busy, and retried when it fails."""

from __future__ import annotations

import pytest

from pulsenet.ids import Version
from pulsenet.node.effects import Count, Log
from pulsenet.node.engine_swap import SWAP_SECONDS_MAX, EngineSwap
from pulsenet.node.events import EngineApplied, EngineFailed


def v(number: int) -> Version:
    return Version(0, number)


def make(version: Version | None = None) -> EngineSwap:
    swap = EngineSwap(lambda attempt: 2.0**attempt)
    if version is not None:
        swap.handle(EngineApplied(version), 0.0)
    return swap


def test_versions_on_the_way_are_not_handed_over() -> None:
    swap = make(v(50))
    swap.set_goal(v(57))
    assert all(swap.due(v(number), is_done=False, now=0.0) is None for number in range(50, 57))
    assert swap.due(v(57), is_done=True, now=0.0) == v(57)
    assert swap.due(v(57), is_done=True, now=0.0) is None


def test_a_goal_stays_while_newer_versions_keep_coming() -> None:
    swap = make(v(50))
    swap.set_goal(v(57))
    swap.set_goal(v(60))
    assert swap.due(v(57), is_done=False, now=0.0) == v(57)


def test_nothing_is_handed_over_without_a_goal_before_the_end() -> None:
    assert make(v(50)).due(v(57), is_done=False, now=0.0) is None


def test_an_unknown_engine_gets_what_the_mirror_holds() -> None:
    assert make().due(v(3), is_done=True, now=0.0) == v(3)


def test_a_version_applied_while_the_engine_was_busy_follows() -> None:
    swap = make(v(1))
    assert swap.due(v(2), is_done=True, now=0.0) == v(2)
    assert swap.due(v(3), is_done=True, now=0.0) is None
    assert swap.handle(EngineApplied(v(2)), 1.0) == []
    assert swap.due(v(3), is_done=True, now=1.0) == v(3)
    swap.handle(EngineApplied(v(3)), 2.0)
    assert swap.due(v(3), is_done=True, now=2.0) is None
    assert swap.version == v(3)


def test_a_mirror_behind_the_engine_is_never_handed_over() -> None:
    swap = make(v(52))
    swap.set_goal(v(50))
    assert swap.due(v(50), is_done=True, now=0.0) is None


def test_a_failing_engine_is_seen_and_tried_again_later_each_time() -> None:
    """A-APP-3: the version stays, the counter moves, the next try resends."""
    swap = make(v(1))
    assert swap.due(v(2), is_done=True, now=0.0) == v(2)
    effects = swap.handle(EngineFailed(v(1), "checksum"), 0.0)
    assert Count("rejected", "engine") in effects
    assert any(isinstance(effect, Log) and "checksum" in effect.text for effect in effects)
    assert swap.version == v(1)
    assert swap.next_wake(0.0) == 2.0
    assert swap.due(v(2), is_done=True, now=1.9) is None
    assert swap.due(v(2), is_done=True, now=2.0) == v(2)
    swap.handle(EngineFailed(None, "restarted"), 2.0)
    assert swap.next_wake(2.0) == 6.0
    assert swap.due(v(2), is_done=True, now=6.0) == v(2)
    swap.handle(EngineApplied(v(2)), 7.0)
    assert swap.next_wake(7.0) is None


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("read_back: 3 of 8 positions", "read_back"),
        ("base_mismatch: records lead from 0.1", "base_mismatch"),
        ("vLLM was started again", "engine"),
        ("invented: by a process of this machine", "engine"),
    ],
)
def test_why_an_engine_failed_is_counted(reason: str, code: str) -> None:
    assert Count("rejected", code) in make(v(1)).handle(EngineFailed(None, reason), 0.0)


def test_an_engine_that_never_answers_is_asked_again() -> None:
    swap = make(v(1))
    assert swap.due(v(2), is_done=True, now=0.0) == v(2)
    assert swap.next_wake(0.0) == SWAP_SECONDS_MAX
    assert swap.due(v(2), is_done=True, now=SWAP_SECONDS_MAX) == v(2)
