"""Which of the connected trainers a round waits for."""

from __future__ import annotations

from pulsenet.ids import PeerId
from pulsenet.node.patience import MISSED_MAX, Patience

ONE, TWO = (PeerId(bytes([number]) * 32) for number in (1, 2))


def test_a_silent_one_is_waited_for_seldom_after_eight_rounds_and_never_given_up() -> None:
    patience = Patience()
    awaited = []
    for round_index in range(50):
        if patience.awaits(ONE):
            awaited.append(round_index)
        assert patience.awaits(TWO)
        patience.note_closed((ONE, TWO), (TWO,))
    assert awaited == [0, 1, 2, 3, 4, 5, 6, 7, 16, 32, 48]


def test_whoever_came_late_or_in_time_or_was_away_is_waited_for_as_ever() -> None:
    patience = Patience()
    patience.note_late(ONE)
    for again in (
        lambda: patience.note_late(ONE),
        lambda: patience.note_closed((ONE,), (ONE,)),
        lambda: patience.note_closed((), ()),
    ):
        for _ in range(MISSED_MAX):
            patience.note_closed((ONE,), ())
        assert not patience.awaits(ONE)
        again()
        assert patience.awaits(ONE)
