"""Requests in flight are accounted for once, and waited for in proportion."""

from __future__ import annotations

import pytest

from pulsenet.ids import Digest, PeerId
from pulsenet.node.sources import Sources
from pulsenet.node.transfers import (
    CHUNK_TIMEOUT_SECONDS,
    END_GAME_SECONDS_MIN,
    SLACK_MAX,
    STALL_RATIO,
    STALL_SECONDS_MIN,
    Patience,
    Transfer,
    Transfers,
)

A, B = PeerId(b"a" * 32), PeerId(b"b" * 32)
BLOB = Digest(b"B" * 32)
FIRST, SECOND, THIRD = (Digest(bytes([number]) * 32) for number in range(1, 4))


def make_transfer(peer_id: PeerId, *digests: Digest) -> Transfer:
    return Transfer(peer_id, BLOB, frozenset(digests), set(digests), began_at=0.0, progress_at=0.0, gives_up_at=9.0)


def make() -> tuple[Transfers, Sources]:
    sources = Sources(lambda count: 0)
    sources.connect(A)
    sources.connect(B)
    return Transfers(sources), sources


def loads(sources: Sources) -> list[tuple[int, int]]:
    return [(source.requests_in_flight, source.chunks_in_flight) for source in sources]


def test_a_request_counts_until_it_ends_and_its_chunks_until_they_come() -> None:
    transfers, sources = make()
    transfers.start(1, make_transfer(A, FIRST, SECOND))
    transfers.start(2, make_transfer(B, SECOND, THIRD))
    assert (len(transfers), transfers.chunk_count) == (2, 3)
    assert loads(sources) == [(1, 2), (1, 2)]
    transfers.stop_awaiting(transfers[1], FIRST)
    assert loads(sources) == [(1, 1), (1, 2)]
    transfer, missing = transfers.end(1)
    assert (transfer.peer_id, missing) == (A, (SECOND,))
    assert loads(sources) == [(0, 0), (1, 2)]
    assert 1 not in transfers
    assert [each.peer_id for each in transfers.of_chunk(SECOND)] == [B]
    assert transfers.of_chunk(FIRST) == []
    assert transfers.of_peer(B) == [2]
    assert [request_id for request_id, _ in transfers.items()] == [2]
    assert [each.peer_id for each in transfers] == [B]


def test_a_chunk_is_due_while_a_request_for_it_moves() -> None:
    transfers, _ = make()
    transfers.start(1, make_transfer(A, FIRST))
    assert transfers.is_due(FIRST)
    transfers[1].is_stalled = True
    assert not transfers.is_due(FIRST)
    assert not transfers.is_due(SECOND)


def test_a_source_that_left_is_no_longer_counted() -> None:
    transfers, sources = make()
    transfers.start(1, make_transfer(A, FIRST))
    sources.disconnect(A)
    assert transfers.end(1)[1] == (FIRST,)
    transfers.start(2, make_transfer(A, FIRST))
    transfers.stop_awaiting(transfers[2], FIRST)
    assert transfers.chunk_count == 0


def test_patience_follows_how_long_chunks_take() -> None:
    patience = Patience()
    assert patience.stall_seconds() == STALL_SECONDS_MIN
    assert patience.stall_seconds(is_end=True) == END_GAME_SECONDS_MIN
    for _ in range(100):
        patience.note_chunk(3.0, 9.0)
    assert patience.stall_seconds() == pytest.approx(18.0)
    assert patience.stall_seconds(is_end=True) == pytest.approx(18.0)
    for _ in range(100):
        patience.note_chunk(0.1, 0.2)
    assert patience.stall_seconds() == STALL_SECONDS_MIN
    assert patience.stall_seconds(is_end=True) == END_GAME_SECONDS_MIN


def test_a_link_below_the_least_rate_gets_more_time_after_each_failure() -> None:
    patience = Patience()
    usual = patience.timeout_seconds(4)
    assert usual >= 4 * CHUNK_TIMEOUT_SECONDS
    for _ in range(10):
        patience.note_timeout()
    assert patience.timeout_seconds(4) == SLACK_MAX * usual
    for _ in range(10):
        patience.note_success()
    assert patience.timeout_seconds(4) == usual


def test_what_a_provider_owes_already_counts_as_long_as_it_usually_takes() -> None:
    patience = Patience()
    alone = patience.timeout_seconds(2)
    assert patience.timeout_seconds(2, 6) == alone + 6 * CHUNK_TIMEOUT_SECONDS, "nothing came yet: as for its own"
    patience.note_chunk(0.1, 0.1)
    assert patience.timeout_seconds(2, 6) == pytest.approx(alone + 6 * STALL_RATIO * 0.1)
    patience.note_chunk(1e6, 1e6)
    assert patience.timeout_seconds(2, 6) == alone + 6 * CHUNK_TIMEOUT_SECONDS, "never more than for its own"
