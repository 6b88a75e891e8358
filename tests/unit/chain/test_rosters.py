"""Which rosters are believed and kept, and which of them a round is mixed by."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import Roster, Vote
from pulsenet.chain.rosters import Rosters
from pulsenet.chain.signing import encode_signed
from pulsenet.errors import StorageError, TrustError


class Hall:
    """A run with one trainer and two authorities in turn."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.trust = self.run.trust()
        self.ledger = Ledger(self.trust)
        self.rosters = Rosters(self.trust, self.ledger)

    def elect(self, term: int) -> None:
        vote = Vote(self.run.run_id, 0, term, self.run.publisher.peer_id, None)
        self.ledger.accept_mandate((encode_signed(self.run.sign(vote, self.run.publisher)),))

    def roster(self, first_round: int, number: int = 1, term: int = 1, count: int = 8, **changes: Any) -> bytes:
        fields = {
            "run_id": self.run.run_id,
            "revision": 0,
            "term": term,
            "number": number,
            "first_round": first_round,
            "round_count": count,
            "members": (self.run.publisher.peer_id,),
            "subset": (),
            **changes,
        }
        return encode_signed(self.run.sign(Roster(**fields), changes.pop("key", self.run.publisher)))


@pytest.fixture
def hall(run: Any) -> Hall:
    return Hall(type(run)(trainers=(run.publisher.peer_id,), authorities=(run.publisher.peer_id,), algorithm="gossip"))


def refuse(hall: Hall, record: bytes) -> str:
    with pytest.raises(TrustError) as caught:
        hall.rosters.accept(record)
    return str(caught.value.code)


def test_without_a_proved_term_no_roster_is_believed(hall: Hall) -> None:
    assert refuse(hall, hall.roster(0)) == "untrusted"
    assert hall.rosters.newest is None
    assert hall.rosters.end_round == 0


def test_of_the_rosters_that_cover_a_round_the_newest_counts(hall: Hall) -> None:
    hall.elect(1)
    assert hall.rosters.accept(hall.roster(0))
    assert hall.rosters.accept(hall.roster(4, number=2))
    assert not hall.rosters.accept(hall.roster(4, number=2))
    found = [hall.rosters.find(index) for index in (3, 4, 11, 12)]
    assert [known and known.roster.number for known in found] == [1, 2, 2, None]
    assert hall.rosters.end_round == 12
    newest = hall.rosters.newest
    assert newest is not None
    assert hall.rosters.get(newest.digest) == newest
    assert newest.members == (hall.run.publisher.peer_id,)


def test_a_roster_that_takes_over_every_round_of_another_replaces_it(hall: Hall) -> None:
    hall.elect(1)
    for number, first_round in enumerate((0, 5, 5, 5), 1):
        assert hall.rosters.accept(hall.roster(first_round, number=number))
    assert len(hall.rosters.records()) == 2
    for number, first_round in enumerate((6, 7), 5):
        hall.rosters.accept(hall.roster(first_round, number=number))
    assert len(hall.rosters.records()) == 3
    assert hall.rosters.find(0) is None


def test_a_second_roster_of_one_number_is_refused(hall: Hall) -> None:
    hall.elect(1)
    hall.rosters.accept(hall.roster(0))
    assert refuse(hall, hall.roster(1)) == "conflict"


def test_rosters_of_a_later_term_count_above_any_number_and_of_earlier_ones_nothing(hall: Hall) -> None:
    hall.elect(1)
    hall.rosters.accept(hall.roster(0, number=9))
    assert refuse(hall, hall.roster(0, term=2)) == "term"
    hall.elect(2)
    assert hall.rosters.accept(hall.roster(2, term=2))
    assert not hall.rosters.accept(hall.roster(3, number=10))
    newest = hall.rosters.newest
    assert newest is not None
    assert newest.roster.term == 2


def test_only_members_that_the_run_lets_in_are_listed(hall: Hall) -> None:
    hall.elect(1)
    assert refuse(hall, hall.roster(0, members=(hall.run.stranger.peer_id,))) == "untrusted"


def test_rosters_outlive_a_restart(hall: Hall) -> None:
    hall.elect(1)
    hall.rosters.accept(hall.roster(0))
    hall.rosters.accept(hall.roster(4, number=2))
    after = Rosters(hall.trust, hall.ledger)
    after.restore(hall.rosters.records())
    assert after.records() == hall.rosters.records()
    with pytest.raises(StorageError) as caught:
        after.restore((b"rubbish",))
    assert caught.value.reason == "damaged"


def test_the_newest_probe_is_known_from_rosters_and_from_the_own_coordinator(hall: Hall) -> None:
    hall.elect(1)
    assert hall.rosters.measured is None
    hall.rosters.accept(hall.roster(0))
    assert hall.rosters.measured is None, "a roster of a run that measured nothing"
    hall.rosters.accept(hall.roster(8, number=2, probe_round=4, distance_bits=7))
    assert hall.rosters.measured == (4, 7)
    hall.rosters.note_measured(2, 9)
    assert hall.rosters.measured == (4, 7), "an older one"
    hall.rosters.note_measured(6, 5)
    assert hall.rosters.measured == (6, 5)
    assert [known.roster.number for known in hall.rosters.known] == [1, 2]


def test_rosters_count_by_their_numbers_in_whatever_order_they_come(hall: Hall) -> None:
    hall.elect(1)
    for number, first_round, numbers in ((3, 6, [3]), (2, 1, [2, 3]), (1, 4, [2, 3]), (4, 9, [2, 3, 4])):
        hall.rosters.accept(hall.roster(first_round, number=number))
        assert [known.roster.number for known in hall.rosters.known] == numbers
        newest = hall.rosters.newest
        assert newest is not None
        assert newest.roster.number == numbers[-1]


def test_a_record_of_another_kind_is_no_roster(hall: Hall) -> None:
    hall.elect(1)
    assert refuse(hall, encode_signed(hall.run.signed_head(1))) == "wrong-type"
