"""Each number of a key is taken once, in whatever order it comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsenet import limits
from pulsenet.chain.replay import ReplayWindow, Seen
from pulsenet.errors import StorageError

WINDOW = limits.ROLLOUT_WINDOW_COUNT


def test_a_number_is_new_once() -> None:
    window = ReplayWindow()
    assert window.look_up(0) is Seen.NEW
    window = window.take(0)
    assert window.look_up(0) is Seen.TAKEN
    assert window.look_up(1) is Seen.NEW


def test_a_number_that_was_skipped_may_come_later_but_not_too_late() -> None:
    window = ReplayWindow().take(10).take(12)
    assert (window.look_up(10), window.look_up(11), window.look_up(12)) == (Seen.TAKEN, Seen.NEW, Seen.TAKEN)
    window = window.take(11)
    assert window.look_up(11) is Seen.TAKEN
    window = window.take(12 + WINDOW)
    assert window.look_up(12) is Seen.TOO_OLD
    assert window.look_up(13) is Seen.NEW


def test_a_jump_forgets_all_before_it_and_takes_no_room() -> None:
    window = ReplayWindow().take(3).take(2**63 - 1)
    assert window == ReplayWindow(2**63 - 1, 1)
    assert window.look_up(3) is Seen.TOO_OLD


@given(st.lists(st.one_of(st.integers(0, 3 * WINDOW), st.integers(0, 2**63 - 1)), max_size=60))
def test_nothing_is_taken_twice_across_restarts(numbers: list[int]) -> None:
    window, taken = ReplayWindow(), set[int]()
    for number in numbers:
        window = ReplayWindow.decode(window.encode())
        seen = window.look_up(number)
        if number in taken:
            assert seen is not Seen.NEW
        elif number > max(taken, default=-1) - WINDOW:
            assert seen is Seen.NEW
        if seen is Seen.NEW:
            window = window.take(number)
            taken.add(number)
    assert window.bits < 1 << WINDOW


def test_a_damaged_window_is_refused() -> None:
    with pytest.raises(StorageError, match="3 bytes") as caught:
        ReplayWindow.decode(b"abc")
    assert caught.value.reason == "damaged"
