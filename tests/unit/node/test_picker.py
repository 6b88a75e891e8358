"""Which chunks to ask of whom: rare ones of readers, and of the publisher only what is this node's turn."""

from __future__ import annotations

import random

import pytest

from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.node.holdings import pack_flags
from pulsenet.node.picker import GIVEN_SECONDS, TURN_SECONDS_MAX, TURN_SECONDS_MIN, TURNS_MAX, Picker, check_reply
from pulsenet.wire.messages import HeadReply, HoldingsReply

BLOB = Digest(b"B" * 32)
PUBLISHER, OWN, *READERS = (PeerId(compute_digest(bytes([number]))) for number in range(12))
DIGESTS = [compute_digest(f"chunk {number}".encode()) for number in range(20)]


def make(own_id: PeerId | None = OWN, count: int = 20, seed: int = 1) -> Picker:
    digests = DIGESTS[:count]
    picker = Picker(digests, range(count), count, own_id=own_id, draw=random.Random(seed).randrange)
    picker.open(digests)
    picker.begin(0.0)
    return picker


def tell(picker: Picker, peer_id: PeerId, *held: int, given: tuple[int, ...] = ()) -> bool:
    places = range(picker.entry_count)
    flags = [pack_flags(place in told for place in places) for told in (held, given)]
    return picker.note(peer_id, HoldingsReply(BLOB, *flags))


def choose(picker: Picker, room: int, peer_id: PeerId | None = None, *, in_order: bool = False) -> list[int]:
    allowed = None if peer_id is None else picker.held_by(peer_id)
    return [DIGESTS.index(digest) for digest in picker.choose(allowed, room, in_order=in_order, skip=())]


def lonely(picker: Picker, now: float, *, holders: list[PeerId], turn_seconds: float = 1.0) -> set[int]:
    flags = picker.at_publisher(PUBLISHER, holders, READERS[:3], turn_seconds, now)
    return {int(place) for place in flags.nonzero()[0]}


def test_the_rarest_chunks_come_first() -> None:
    picker = make()
    tell(picker, READERS[0], *range(20))
    tell(picker, READERS[1], *range(17))
    tell(picker, READERS[2], *range(14))
    assert set(choose(picker, 3, READERS[0])) == {17, 18, 19}
    assert set(choose(picker, 3, READERS[0])) == {14, 15, 16}
    assert len(picker) == 14


def test_equal_chunks_are_drawn_so_that_readers_come_to_hold_different_ones() -> None:
    picks = [tuple(choose(make(seed=seed), 4)) for seed in range(8)]
    assert len(set(picks)) == 8
    assert choose(make(), 4, in_order=True) == [0, 1, 2, 3]


def test_only_what_a_peer_told_of_is_asked_of_it_and_nothing_twice() -> None:
    picker = make()
    tell(picker, READERS[0], 3, 5)
    assert set(choose(picker, 4, READERS[0])) == {3, 5}
    assert choose(picker, 4, READERS[0]) == []
    picker.open([DIGESTS[3], compute_digest(b"another blob's")])
    assert picker.choose(picker.held_by(READERS[0]), 4, in_order=False, skip={DIGESTS[3]}) == []
    assert choose(picker, 4, READERS[0]) == [3]


def test_news_is_what_differs_from_what_was_told_before() -> None:
    picker = make()
    assert not picker.knows(READERS[0])
    assert tell(picker, READERS[0], 1)
    assert not tell(picker, READERS[0], 1)
    assert tell(picker, READERS[0], 1, given=(1,))
    assert tell(picker, READERS[0], *range(20))
    assert picker.is_whole_at(READERS[0])
    picker.forget(READERS[0])
    assert not picker.knows(READERS[0])
    assert not picker.is_whole_at(READERS[0])
    assert not picker.may_help(READERS[0])


def test_peers_together_may_cover_what_none_of_them_holds_alone() -> None:
    picker = make()
    tell(picker, READERS[0], *range(12))
    tell(picker, READERS[1], *range(8, 19))
    assert picker.covers(READERS[:2], DIGESTS[:19])
    assert not picker.covers(READERS[:3], DIGESTS)
    assert picker.may_help(READERS[0])
    choose(picker, 12, READERS[0])
    assert not picker.may_help(READERS[0])


def test_readers_that_know_each_other_take_different_chunks_from_the_publisher() -> None:
    party = [OWN, *READERS[:3]]
    turns: list[set[int]] = []
    for own_id in party:
        picker = make(own_id)
        others = [peer_id for peer_id in party if peer_id != own_id]
        turns.append({int(p) for p in picker.at_publisher(PUBLISHER, others, others, 1.0, 0.0).nonzero()[0]})
    assert set().union(*turns) == set(range(20))
    assert sum(map(len, turns)) == 20
    assert all(turns)


def test_a_chunk_that_is_anothers_turn_is_taken_once_its_time_has_passed() -> None:
    picker = make()
    first = lonely(picker, 0.0, holders=[])
    assert first < lonely(picker, TURN_SECONDS_MIN, holders=[], turn_seconds=0.0)
    assert lonely(picker, TURNS_MAX * TURN_SECONDS_MIN, holders=[], turn_seconds=0.0) == set(range(20))
    assert lonely(picker, TURN_SECONDS_MIN, holders=[], turn_seconds=TURN_SECONDS_MAX) == first


def test_what_a_reader_holds_is_not_asked_of_the_publisher_until_that_reader_is_gone() -> None:
    picker = make()
    tell(picker, READERS[0], *range(10))
    late = 100.0
    assert lonely(picker, late, holders=READERS[:1]) == set(range(10, 20))
    assert lonely(picker, late, holders=[]) & set(range(10)) == lonely(make(), 0.0, holders=[]) & set(range(10))
    assert lonely(picker, late + TURNS_MAX, holders=[]) == set(range(20))


def test_what_the_publisher_gave_to_somebody_gets_time_to_come_around() -> None:
    picker = make()
    tell(picker, PUBLISHER, *range(20), given=tuple(range(5)))
    assert lonely(picker, GIVEN_SECONDS - 0.1, holders=[]) == set(range(5, 20))
    assert lonely(picker, GIVEN_SECONDS, holders=[]) == set(range(20))


def test_time_counts_from_when_somebody_last_held_everything() -> None:
    picker = make()
    picker.note_held(50.0)
    assert lonely(picker, 50.0, holders=[]) == lonely(make(), 0.0, holders=[])


def test_equal_chunks_of_a_blob_stand_at_their_first_place() -> None:
    picker = Picker(DIGESTS[:2], [0, 2], 3, own_id=None, draw=lambda count: 0)
    picker.open(DIGESTS[:2])
    picker.note(READERS[0], HoldingsReply(BLOB, b"\x20", b"\x00"))
    assert picker.choose(picker.held_by(READERS[0]), 4, in_order=True, skip=()) == [DIGESTS[1]]


def test_a_blob_without_chunks_has_nothing_to_choose() -> None:
    picker = Picker((), (), 0, own_id=OWN, draw=lambda count: 0)
    assert picker.choose(None, 4, in_order=True, skip=()) == []


@pytest.mark.parametrize("held", [b"", b"\xff\xff\xff\xff", b"\xff\xff\xff"])
def test_flags_of_another_size_are_refused_and_change_nothing(held: bytes) -> None:
    picker = make()
    with pytest.raises(RemoteProtocolError, match="schema"):
        picker.note(READERS[0], HoldingsReply(BLOB, held, bytes(3)))
    assert not picker.knows(READERS[0])


def test_another_reply_is_refused() -> None:
    reply = HoldingsReply(BLOB, b"", b"")
    assert check_reply(reply, BLOB) is reply
    for other in (HeadReply(None), HoldingsReply(Digest(bytes(32)), b"", b"")):
        with pytest.raises(RemoteProtocolError, match="unexpected"):
            check_reply(other, BLOB)
