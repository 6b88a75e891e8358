"""Neighbours are few, partly near, partly by chance, and never all chosen by others."""

from __future__ import annotations

import random

import pytest

from pulsenet import limits
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.node.neighbours import KNOWN_MAX, PUSHES_BURST, Link, choose_neighbours

HEAD = compute_digest(b"head")


def peer(index: int) -> PeerId:
    return PeerId(index.to_bytes(32, "big"))


def links_of(count: int, outbound: tuple[int, ...] = (), rtt: dict[int, float] | None = None) -> dict[PeerId, Link]:
    links = {peer(index): Link(peer(index), index in outbound) for index in range(count)}
    for index, seconds in (rtt or {}).items():
        links[peer(index)].rtt_seconds = seconds
    return links


def choose(links: dict[PeerId, Link], current: tuple[PeerId, ...] = (), seed: int = 1) -> tuple[PeerId, ...]:
    return choose_neighbours(links, current, 2, random.Random(seed).randrange)


def test_in_a_small_swarm_everybody_is_a_neighbour() -> None:
    links = links_of(limits.NEIGHBOURS_MAX)
    assert choose(links) == tuple(sorted(links))
    assert choose({}) == ()


@pytest.mark.parametrize("seed", range(5))
def test_in_a_large_swarm_there_are_as_many_as_allowed_and_two_are_outbound(seed: int) -> None:
    chosen = choose(links_of(100, outbound=(40, 41, 42)), seed=seed)
    assert len(chosen) == limits.NEIGHBOURS_MAX
    assert len(set(chosen)) == len(chosen)
    assert list(chosen) == sorted(chosen)
    assert len({peer(40), peer(41), peer(42)} & set(chosen)) >= 2


def test_the_nearest_are_among_them_and_the_rest_is_chance() -> None:
    links = links_of(100, outbound=(90, 91), rtt={index: 0.001 * index for index in range(1, 50)})
    first, second = (set(choose(links, seed=seed)) for seed in (1, 2))
    nearest = {peer(index) for index in range(1, limits.NEIGHBOURS_MIN - 1)}
    assert nearest | {peer(90), peer(91)} <= first & second
    assert first != second


def test_current_neighbours_stay_and_lost_ones_do_not() -> None:
    links = links_of(40)
    current = tuple(peer(index) for index in (3, 30, 99))
    chosen = choose(links, current)
    assert {peer(3), peer(30)} <= set(chosen)
    assert peer(99) not in chosen


def test_inbound_peers_that_fill_the_table_give_way_to_outbound_ones() -> None:
    links = links_of(20, outbound=(18, 19))
    current = tuple(peer(index) for index in range(limits.NEIGHBOURS_MAX))
    chosen = choose(links, current)
    assert len(chosen) == limits.NEIGHBOURS_MAX
    assert {peer(18), peer(19)} <= set(chosen)


def test_an_item_is_pushed_once() -> None:
    link = Link(peer(1), True)
    assert link.wants_at(HEAD, 5.0) == 5.0
    link.start_push(1, HEAD)
    assert link.wants_at(HEAD, 5.0) is None
    link.end_push(1)
    assert link.knows(HEAD)


def test_a_lost_push_is_repeated_later_each_time() -> None:
    link = Link(peer(1), True)
    waits = []
    for request_id in range(8):
        link.start_push(request_id, HEAD)
        link.fail_push(request_id, 10.0, lambda count: count - 1)
        wants_at = link.wants_at(HEAD, 10.0)
        assert wants_at is not None
        waits.append(wants_at - 10.0)
    assert waits == sorted(waits)
    assert waits[0] < 1.0
    assert waits[-1] <= limits.RETRY_SECONDS_MAX
    link.start_push(9, HEAD)
    link.end_push(9)
    other = compute_digest(b"other")
    link.start_push(10, other)
    link.fail_push(10, 100.0, lambda count: 0)
    assert link.wants_at(other, 100.0) == 100.0 + limits.RETRY_SECONDS_MIN / 2


def test_the_end_of_another_request_changes_nothing() -> None:
    link = Link(peer(1), True)
    link.end_push(5)
    link.fail_push(6, 1.0, lambda count: 0)
    assert link.wants_at(HEAD, 1.0) == 1.0


def test_pushes_are_capped() -> None:
    link = Link(peer(1), True)
    for _ in range(PUSHES_BURST):
        assert link.outgoing.take(1.0)
    wants_at = link.wants_at(HEAD, 1.0)
    assert wants_at is not None
    assert wants_at > 1.0


def test_what_a_peer_knows_is_bounded() -> None:
    link = Link(peer(1), True)
    digests = [Digest(compute_digest(bytes([index]))) for index in range(KNOWN_MAX + 1)]
    for digest in digests:
        link.note_known(digest)
    assert not link.knows(digests[0])
    assert all(link.knows(digest) for digest in digests[1:])
