"""Times of issue rise, and fall again after a clock that ran ahead too far for anybody to take them."""

from __future__ import annotations

from pulsenet.chain.trust import FUTURE_MS_MAX
from pulsenet.node.issuing import choose_issue_ms

NOW_MS = 1_000_000_000


def test_time_is_now_or_above_what_was_issued_before() -> None:
    assert choose_issue_ms(NOW_MS) == NOW_MS
    assert choose_issue_ms(NOW_MS, NOW_MS - 5, 0) == NOW_MS
    assert choose_issue_ms(NOW_MS, 0, NOW_MS + 60_000) == NOW_MS + 60_001


def test_what_is_too_far_ahead_for_anybody_does_not_count() -> None:
    day_ms = 24 * 3_600_000
    assert choose_issue_ms(NOW_MS, NOW_MS + day_ms, NOW_MS + 7) == NOW_MS + 8
    assert choose_issue_ms(NOW_MS, NOW_MS + FUTURE_MS_MAX) == NOW_MS, "one more would be refused"
    assert choose_issue_ms(NOW_MS, NOW_MS + FUTURE_MS_MAX - 1) == NOW_MS + FUTURE_MS_MAX
