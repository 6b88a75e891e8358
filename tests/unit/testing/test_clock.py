"""Virtual time passes only when something happens, in an order that nothing but the caller decides."""

from __future__ import annotations

from pulsenet.testing.clock import VirtualClock


def test_things_happen_at_their_moments_and_equal_moments_in_order() -> None:
    clock = VirtualClock()
    seen: list[tuple[str, float]] = []

    def note(name: str) -> None:
        seen.append((name, clock.now))

    clock.after(2.0, lambda: note("late"))
    clock.at(1.0, lambda: note("first"))
    clock.at(1.0, lambda: note("second"))
    assert len(clock) == 3
    while clock.step(5.0):
        pass
    assert seen == [("first", 1.0), ("second", 1.0), ("late", 2.0)]
    assert clock.now == 2.0


def test_nothing_happens_after_the_end_and_nothing_in_the_past() -> None:
    clock = VirtualClock()
    clock.at(3.0, lambda: None)
    assert not clock.step(2.9)
    assert clock.step(3.0)
    clock.at(1.0, lambda: None)
    assert clock.step(3.0)
    assert clock.now == 3.0


def test_what_turns_out_to_be_nothing_is_no_event() -> None:
    clock = VirtualClock()
    clock.at(1.0, lambda: False)
    assert not clock.step(10.0)
    clock.at(2.0, lambda: False)
    clock.at(3.0, lambda: True)
    assert clock.step(10.0)
    assert clock.now == 3.0
