"""Times of issue of what a node signs again and again."""

from __future__ import annotations

from pulsenet.chain.trust import FUTURE_MS_MAX


def choose_issue_ms(now_ms: int, *earlier_ms: int) -> int:
    """Return a time of issue: now, or above every earlier one where the clock was set back.

    What was issued so far ahead of this clock that nobody takes it does not count. A clock that was a day ahead for a
    moment would else keep everything that is signed from then on from counting anywhere for a day.
    """
    return max([now_ms, *(at_ms + 1 for at_ms in earlier_ms if at_ms < now_ms + FUTURE_MS_MAX)])
