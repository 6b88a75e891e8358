"""Whom a round waits for although the run does not list it."""

from __future__ import annotations

from pulsenet.ids import PeerId
from pulsenet.node.strangers import SEEN_MAX, Strangers

ONE, TWO, THREE = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))
ALL = {ONE, TWO, THREE}


def expect(strangers: Strangers, round_index: int, places: int = 8, **changes: object) -> set[PeerId]:
    fields = {"counted": (), "reachable": ALL, "here": (), **changes}
    return strangers.expect(round_index, places=places, **fields)  # type: ignore[arg-type]


def test_who_contributed_lately_is_waited_for() -> None:
    strangers = Strangers()
    assert expect(strangers, 4) == set()
    assert expect(strangers, 4, counted=(ONE,)) == {ONE}
    strangers.note(TWO, 3)
    assert expect(strangers, 4) == {TWO}
    assert expect(strangers, 5) == set(), "not for ever"
    strangers.note(TWO, 5)
    assert expect(strangers, 5, counted=(ONE, TWO)) == {ONE, TWO}
    assert expect(strangers, 5, reachable={ONE}) == set()


def test_no_more_are_waited_for_than_a_round_takes() -> None:
    strangers = Strangers()
    strangers.note(THREE, 3)
    assert expect(strangers, 4, places=0) == set()
    assert expect(strangers, 4, places=1, counted=(ONE,)) == {ONE}
    assert expect(strangers, 4, places=2, counted=(ONE, TWO), here=(ONE,)) == {TWO}
    assert expect(strangers, 4, places=1, counted=(ONE,), here=(TWO, THREE)) == set()
    assert expect(strangers, 4, places=1, counted=(ONE,), reachable={THREE}) == {THREE}


def test_the_one_seen_longest_ago_is_forgotten() -> None:
    strangers = Strangers()
    keys = [PeerId(number.to_bytes(32, "big")) for number in range(SEEN_MAX + 1)]
    for key in (*keys[:-1], keys[0], keys[-1]):
        strangers.note(key, 0)
    found = expect(strangers, 0, places=SEEN_MAX + 1, reachable=set(keys))
    assert found == set(keys) - {keys[1]}
