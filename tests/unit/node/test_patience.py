"""Which of the connected trainers a round waits for."""

from __future__ import annotations

from pulsenet.ids import PeerId
from pulsenet.node.closing import REFUSED_WAITS
from pulsenet.node.patience import DOUBLINGS_MAX, MISSED_MAX, Patience

ONE, TWO = (PeerId(bytes([number]) * 32) for number in (1, 2))


def test_a_silent_one_is_waited_for_seldom_after_eight_rounds_and_never_given_up() -> None:
    patience = Patience()
    awaited = []
    for round_index in range(50):
        if patience.awaits(ONE):
            awaited.append(round_index)
        assert patience.awaits(TWO)
        patience.note_closed((ONE, TWO), (TWO,), has_members=True)
    assert awaited == [0, 1, 2, 3, 4, 5, 6, 7, 16, 32, 48]


def test_whoever_came_late_or_in_time_or_was_away_is_waited_for_as_ever() -> None:
    patience = Patience()
    patience.note_late(ONE)
    for again in (
        lambda: patience.note_late(ONE),
        lambda: patience.note_closed((ONE,), (ONE,), has_members=True),
        lambda: patience.note_closed((), (), has_members=True),
    ):
        for _ in range(MISSED_MAX):
            patience.note_closed((ONE,), (), has_members=True)
        assert not patience.awaits(ONE)
        again()
        assert patience.awaits(ONE)


def test_a_round_that_moved_nothing_is_missed_by_nobody_and_the_next_one_waits_longer() -> None:
    patience = Patience()
    for _ in range(MISSED_MAX):
        patience.note_closed((ONE, TWO), (TWO,), has_members=False)
    assert patience.awaits(ONE)
    assert patience.refused_waits == REFUSED_WAITS << DOUBLINGS_MAX
    for steps in range(1, DOUBLINGS_MAX + 2):
        patience.note_closed((ONE, TWO), (ONE, TWO), has_members=True)
        assert patience.refused_waits == REFUSED_WAITS << max(DOUBLINGS_MAX - steps, 0)


def test_a_round_that_moved_nothing_and_waited_for_nobody_lets_no_other_wait_longer() -> None:
    patience = Patience()
    patience.note_closed((TWO,), (TWO,), has_members=False)
    for _ in range(MISSED_MAX):
        patience.note_closed((ONE,), (), has_members=True)
    patience.note_closed((ONE, TWO), (TWO,), has_members=False)
    assert not patience.awaits(ONE)
    assert patience.refused_waits == REFUSED_WAITS
