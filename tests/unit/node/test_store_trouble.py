"""A disk that refuses is counted each time, told now and then, and asked again (A-DSK-1)."""

from __future__ import annotations

from pulsenet.node.effects import Count, Log
from pulsenet.node.store_trouble import STORE_RETRY_SECONDS, TELL_SECONDS, StoreTrouble


def test_every_refusal_is_counted_and_the_first_of_a_minute_is_told() -> None:
    trouble = StoreTrouble()
    first = trouble.note("enospc", 10.0, is_state=True)
    assert [type(effect) for effect in first] == [Count, Log]
    assert first[0] == Count("rejected", "enospc")
    assert trouble.note("enospc", 11.0, is_state=True) == [Count("rejected", "enospc")]
    assert len(trouble.note("enospc", 10.0 + TELL_SECONDS, is_state=True)) == 2


def test_state_that_was_refused_is_due_once_after_a_pause() -> None:
    trouble = StoreTrouble()
    assert not trouble.take_due(0.0)
    trouble.note("enospc", 10.0, is_state=True)
    trouble.note("enospc", 12.0, is_state=True)
    due_at = 10.0 + STORE_RETRY_SECONDS
    assert trouble.next_wake(12.0) == due_at
    assert not trouble.take_due(due_at - 0.1)
    assert trouble.take_due(due_at)
    assert not trouble.take_due(due_at)
    assert trouble.next_wake(due_at) is None


def test_a_refused_chunk_asks_for_no_state() -> None:
    trouble = StoreTrouble()
    trouble.note("enospc", 10.0, is_state=False)
    assert trouble.next_wake(10.0) is None
