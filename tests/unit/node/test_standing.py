"""What strikes lead to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pulsenet.ids import PeerId
from pulsenet.node.standing import (
    FORGIVE_SECONDS,
    PEERS_MAX,
    SHUT_OUT_SECONDS_MAX,
    SHUT_OUT_SECONDS_MIN,
    STRIKES_MAX,
    Standing,
)

PEER, OTHER = PeerId(b"p" * 32), PeerId(b"o" * 32)


def shut_out(standing: Standing, now: float, peer_id: PeerId = PEER) -> int:
    """Strike until the peer is shut out; return how many it took."""
    count = 1
    while not standing.strike(peer_id, now):
        count += 1
    return count


def test_a_peer_is_shut_out_at_its_fifth_strike_and_only_it() -> None:
    standing = Standing()
    assert shut_out(standing, 10.0) == STRIKES_MAX
    assert standing.wait_seconds(PEER, 10.0) == SHUT_OUT_SECONDS_MIN
    assert standing.wait_seconds(PEER, 10.0 + SHUT_OUT_SECONDS_MIN) == 0.0
    assert standing.wait_seconds(OTHER, 10.0) == 0.0


def test_strikes_need_not_come_at_the_very_same_moment() -> None:
    standing = Standing()
    assert [standing.strike(PEER, float(second)) for second in range(6)] == [False] * 4 + [True, False]


def test_a_strike_now_and_then_shuts_nobody_out() -> None:
    standing = Standing()
    assert not any(standing.strike(PEER, FORGIVE_SECONDS * count) for count in range(1_000))


def test_who_goes_on_is_shut_out_again_at_once_and_longer_each_time() -> None:
    standing = Standing()
    now, waits = 0.0, []
    shut_out(standing, now)
    for _ in range(8):
        waits.append(standing.wait_seconds(PEER, now))
        now += waits[-1]
        assert standing.wait_seconds(PEER, now) == 0.0
        assert shut_out(standing, now) == 1
    assert waits[:4] == [60.0, 120.0, 240.0, 480.0]
    assert max(waits) == SHUT_OUT_SECONDS_MAX


def test_who_mends_its_ways_is_like_anybody_else() -> None:
    standing = Standing()
    shut_out(standing, 0.0)
    shut_out(standing, 60.0)
    now = 60.0 + 120.0 + STRIKES_MAX * FORGIVE_SECONDS
    assert shut_out(standing, now) == STRIKES_MAX
    assert standing.wait_seconds(PEER, now) == SHUT_OUT_SECONDS_MIN


def test_strikes_while_shut_out_make_it_no_longer() -> None:
    """Replies to what was asked before still arrive: they are no second offence."""
    standing = Standing()
    shut_out(standing, 0.0)
    assert not any(standing.strike(PEER, 1.0) for _ in range(50))
    assert standing.wait_seconds(PEER, 1.0) == SHUT_OUT_SECONDS_MIN - 1.0


def test_memory_is_bounded_and_those_shut_out_are_forgotten_last() -> None:
    standing = Standing()
    shut_out(standing, 0.0)
    for number in range(3 * PEERS_MAX):
        standing.strike(PeerId(number.to_bytes(32, "big")), 1.0)
        assert len(standing) <= PEERS_MAX
    assert standing.wait_seconds(PEER, 1.0) > 0.0
    for number in range(2 * PEERS_MAX):
        shut_out(standing, 2.0, PeerId(number.to_bytes(32, "big")))
    assert len(standing) == PEERS_MAX
    assert standing.wait_seconds(PEER, 2.0) == 0.0


@given(st.lists(st.floats(0.0, 10_000.0), max_size=60))
def test_nobody_is_shut_out_for_longer_than_the_limit(steps: list[float]) -> None:
    standing, now = Standing(), 0.0
    for step in steps:
        now += step / 100
        standing.strike(PEER, now)
        assert 0.0 <= standing.wait_seconds(PEER, now) <= SHUT_OUT_SECONDS_MAX
