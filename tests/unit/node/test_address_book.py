"""Whom to dial: bootstraps first, those that answered stay, and failures back off."""

from __future__ import annotations

import pytest

from pulsenet import limits
from pulsenet.errors import StorageError
from pulsenet.ids import PeerId
from pulsenet.node.address_book import DIAL_SECONDS_MAX, REMEMBERED_MAX, AddressBook
from pulsenet.wire.messages import PeerAddress

ME = PeerId(b"m" * 32)
HERE = ("/ip4/10.0.0.1/tcp/1",)
THERE = ("/ip4/10.0.0.2/tcp/2",)


def peer(index: int) -> PeerId:
    return PeerId(index.to_bytes(32, "big"))


def book_of(*bootstraps: PeerId, saved: bytes | None = None) -> AddressBook:
    return AddressBook(ME, [PeerAddress(peer_id, HERE) for peer_id in bootstraps], saved, lambda count: 0)


def test_bootstraps_are_dialled_before_anybody_else() -> None:
    book = book_of(peer(9))
    book.learn(peer(1), HERE)
    assert book.choose((), 0.0) == peer(9)
    assert book.start_dial(peer(9), 0.0) == HERE
    assert book.choose((), 0.0) == peer(1)
    book.start_dial(peer(1), 0.0)
    assert book.choose((), 0.0) is None
    assert book.dialling_count == 2


def test_this_node_and_connected_peers_are_not_dialled() -> None:
    book = book_of(ME, peer(1))
    book.learn(ME, HERE)
    book.confirm(ME, HERE)
    assert len(book) == 1
    assert book.choose({peer(1)}, 0.0) is None
    assert book.next_dial_at({peer(1)}) is None


def test_failures_back_off_up_to_the_bound_and_an_answer_forgives_them() -> None:
    book = book_of(peer(1))
    now, waits = 100.0, []
    for _ in range(10):
        book.start_dial(peer(1), now)
        book.fail(peer(1), now)
        assert book.choose((), now) is None
        at = book.next_dial_at(())
        assert at is not None
        waits.append(at - now)
        now = at
        assert book.choose((), now) == peer(1)
    assert waits == sorted(waits)
    assert limits.RETRY_SECONDS_MAX / 2 <= waits[-1] <= limits.RETRY_SECONDS_MAX
    book.confirm(peer(1), ())
    assert book.choose((), now) == peer(1)
    assert book.addresses_of(peer(1)) == HERE


def test_those_that_failed_least_are_dialled_first() -> None:
    book = book_of()
    book.learn(peer(1), HERE)
    book.learn(peer(2), HERE)
    book.fail(peer(1), 0.0)
    assert book.choose((), 1_000.0) == peer(2)


def test_a_dial_without_an_answer_counts_as_failed() -> None:
    book = book_of(peer(1))
    book.start_dial(peer(1), 0.0)
    book.expire_dials(DIAL_SECONDS_MAX - 1)
    assert book.dialling_count == 1
    book.expire_dials(DIAL_SECONDS_MAX)
    assert book.dialling_count == 0


def test_hearsay_never_displaces_who_answered_nor_changes_their_address() -> None:
    book = book_of(peer(0))
    for index in range(1, REMEMBERED_MAX + 1):
        book.confirm(peer(index), HERE)
    book.learn(peer(500), HERE)
    book.learn(peer(1), THERE)
    book.learn(peer(0), THERE)
    assert book.addresses_of(peer(500)) == ()
    assert book.addresses_of(peer(1)) == HERE
    assert book.addresses_of(peer(0)) == HERE
    assert len(book) == REMEMBERED_MAX + 1


def test_hearsay_is_bounded_and_renews_itself() -> None:
    book = book_of()
    for index in range(1, REMEMBERED_MAX + 11):
        book.learn(peer(index), HERE)
    assert len(book) == REMEMBERED_MAX
    assert book.addresses_of(peer(1)) == ()
    book.learn(peer(50), THERE)
    assert book.addresses_of(peer(50)) == THERE
    book.learn(peer(50), ())
    assert book.addresses_of(peer(50)) == THERE


def test_a_peer_that_answers_takes_the_place_of_the_one_that_answered_longest_ago() -> None:
    book = book_of(peer(0))
    for index in range(1, REMEMBERED_MAX + 1):
        book.confirm(peer(index), HERE)
    book.confirm(peer(1), HERE)
    book.confirm(peer(500), THERE)
    assert book.addresses_of(peer(2)) == ()
    assert book.addresses_of(peer(1)) == HERE
    assert book.addresses_of(peer(500)) == THERE


def test_those_who_came_displace_one_another_and_nobody_whom_this_node_went_to() -> None:
    """A stranger may come with any number of keys; whom a node reached by itself finds the others after a partition."""
    book = book_of(peer(0))
    for index in range(1, REMEMBERED_MAX + 1):
        book.confirm(peer(index), HERE, is_sought=index > 2)
    for index in range(500, 600):
        book.confirm(peer(index), THERE, is_sought=False)
    assert [book.addresses_of(peer(index)) for index in (1, 2, 3)] == [(), (), HERE]
    assert [book.addresses_of(peer(index)) for index in (597, 598, 599)] == [(), THERE, THERE]
    book.confirm(peer(1), HERE)
    assert book.addresses_of(peer(1)) == HERE
    assert book.addresses_of(peer(598)) == ()
    book.confirm(peer(599), THERE)
    book.confirm(peer(700), THERE, is_sought=False)
    assert book.addresses_of(peer(700)) == ()
    assert len(book) == REMEMBERED_MAX + 1


def test_a_peer_that_cannot_be_dialled_is_not_remembered() -> None:
    book = book_of()
    book.confirm(peer(1), ())
    assert len(book) == 0


def test_who_answered_is_remembered_over_a_restart_and_hearsay_is_not() -> None:
    book = book_of(peer(0))
    book.confirm(peer(1), HERE)
    book.confirm(peer(2), THERE)
    book.learn(peer(3), HERE)
    again = book_of(saved=book.encode())
    assert [again.addresses_of(peer(index)) for index in range(4)] == [(), HERE, THERE, ()]
    assert again.encode() == book.encode()


def test_a_failure_of_somebody_unknown_is_nothing() -> None:
    book = book_of()
    book.fail(peer(1), 0.0)
    assert book.next_dial_at(()) is None


def test_a_damaged_list_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="list of peers"):
        book_of(saved=b"\xff")
