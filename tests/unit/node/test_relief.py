"""The publisher helps where readers upload too little, and stays out of it where they do not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pulsenet.ids import PeerId, compute_digest
from pulsenet.node.relief import (
    CALL_BACK_SECONDS,
    RELIEF_SECONDS,
    RELIEF_TOLD_SECONDS,
    STILL_SECONDS,
    Help,
    Relief,
)
from pulsenet.node.sources import Source, Sources
from pulsenet.node.transfers import Transfer, Transfers

BLOB = compute_digest(b"blob")
DIGESTS = [compute_digest(bytes([number])) for number in range(100)]
PUBLISHER, READER = PeerId(b"p" * 32), PeerId(b"r" * 32)
NOW = 100.0


class Bench:
    def __init__(self) -> None:
        sources = Sources(random.Random(1).randrange)
        sources.connect(PUBLISHER)
        sources.connect(READER)
        publisher = sources.get(PUBLISHER)
        assert publisher is not None
        self.publisher: Source = publisher
        self.transfers = Transfers(sources)
        self.relief = Relief(self.transfers)
        self.count = 0

    def ask(self, peer_id: PeerId, at: float, chunks: int = 1) -> Transfer:
        digests = DIGESTS[self.count : self.count + chunks]
        transfer = Transfer(peer_id, BLOB, frozenset(digests), set(digests), at, at, at + 100.0)
        self.transfers.start(self.count, transfer)
        self.count += chunks
        return transfer

    def bring(self, transfer: Transfer, now: float) -> None:
        self.transfers.stop_awaiting(transfer, min(transfer.awaited))
        transfer.good_count += 1
        transfer.progress_at = now
        self.relief.note_chunk(transfer, self.publisher if transfer.peer_id == PUBLISHER else None, now)

    def feed(self, per_second: int, until: float) -> None:
        """Let readers bring so much for a long time."""
        for step in range(20 * per_second):
            at = until - 20.0 + (step + 1) / per_second
            self.relief.note_chunk(Transfer(READER, BLOB, frozenset(), set(), at - 1.0, at, at), None, at)

    def judge(self, now: float = NOW, **changes: Any) -> Help | None:
        given = {"open_seconds": RELIEF_SECONDS, "reader_count": 9, "open_count": 1_000, **changes}
        return self.relief.judge(self.publisher, now=now, **given)


def test_nobody_is_helped_in_the_first_seconds() -> None:
    bench = Bench()
    bench.publisher.peak.note(100.0, NOW)
    assert bench.judge(open_seconds=RELIEF_SECONDS - 0.1) is None
    assert bench.judge() is not None


def test_a_publisher_that_could_give_everybody_twice_as_much_is_asked_for_all_it_can_send() -> None:
    bench = Bench()
    bench.feed(1, NOW)
    bench.publisher.peak.note(30.0, NOW)
    help_ = bench.judge()
    assert help_ == Help(bench.publisher.room_chunks, is_beyond=True, seconds=pytest.approx(1_000 / 3.0))
    assert bench.judge(reader_count=19) is None, "so many share its upload"


def test_what_readers_bring_within_seconds_is_left_to_them() -> None:
    bench = Bench()
    bench.feed(1, NOW)
    bench.publisher.peak.note(100.0, NOW)
    bench.publisher.window.chunks_per_second = 100.0
    assert bench.judge(open_count=4) is None
    assert bench.judge(open_count=20) is not None


def test_a_reader_that_would_get_more_than_twice_as_much_of_the_publisher_gets_one_chunk_at_a_time() -> None:
    bench = Bench()
    bench.feed(1, NOW)
    bench.publisher.window.chunks_per_second = 1.0
    assert bench.judge() is None
    bench.publisher.window.chunks_per_second = 3.0
    assert bench.judge() == Help(1)
    bench.ask(PUBLISHER, NOW)
    assert bench.judge() is None


def test_a_reader_whose_requests_all_stalled_is_helped() -> None:
    bench = Bench()
    transfer = bench.ask(READER, NOW - 10.0, chunks=2)
    bench.feed(100, NOW)
    transfer.is_stalled = True
    assert bench.judge(open_count=1) is None, "something came just now"
    assert bench.judge(NOW + STILL_SECONDS, open_count=1) == Help(1)


def test_a_reader_that_stands_still_finds_out_what_the_publisher_could_do() -> None:
    bench = Bench()
    bench.ask(READER, NOW - 10.0, chunks=2)
    assert bench.judge() == Help(1, is_beyond=True)
    transfer = bench.ask(PUBLISHER, NOW)
    assert bench.judge() is None
    bench.bring(transfer, NOW + 0.1)
    help_ = bench.judge(NOW + 0.1)
    assert help_ is not None
    assert help_.seconds == pytest.approx(1_000.0)


def test_late_requests_are_called_back_as_far_as_the_publisher_has_room() -> None:
    bench = Bench()
    first, second = bench.ask(READER, NOW - 9.0, chunks=2), bench.ask(READER, NOW - 8.0, chunks=2)
    bench.ask(READER, NOW - CALL_BACK_SECONDS + 0.1, chunks=2)
    bench.ask(PUBLISHER, NOW - 9.0)
    ids = {id(transfer): request_id for request_id, transfer in bench.transfers.items()}

    def find(room: int, open_count: int, seconds: float | None = 1.0) -> list[int]:
        return bench.relief.find_late(bench.publisher, Help(room, seconds=seconds), open_count, NOW)

    assert find(8, 0) == [ids[id(first)], ids[id(second)]]
    assert find(2, 0) == [ids[id(first)]]
    assert find(8, 8) == []
    assert find(8, 0, seconds=8.5) == [ids[id(first)]], "the publisher would need longer"
    assert find(8, 0, seconds=None) == []


def test_help_is_told_for_a_while() -> None:
    relief = Bench().relief
    assert not relief.is_told(NOW)
    relief.note_helped(NOW)
    assert relief.is_told(NOW + RELIEF_TOLD_SECONDS - 0.1)
    assert not relief.is_told(NOW + RELIEF_TOLD_SECONDS)
