"""Sources back off one by one, are forgiven when heard, and are asked in the right order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pulsenet import limits
from pulsenet.chain.records import Have, Kind, Manifest
from pulsenet.chain.trust import FUTURE_MS_MAX
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.node.sources import (
    BANNED_SECONDS,
    BANS_MAX,
    FAILURES_MAX,
    MISSES_MAX,
    PARKED_SECONDS,
    SOURCES_MAX,
    STRIKES_MAX,
    UNREACHED_MAX,
    UNREACHED_SECONDS,
    Claim,
    Source,
    Sources,
    claim_of,
)
from pulsenet.node.windows import WINDOW_CHUNKS_START

A, B, C = (PeerId(bytes([i]) * 32) for i in (1, 2, 3))
KEY = Digest(b"k" * 32)
RUN_ID = RunId(b"r" * 32)


def make(*peer_ids: PeerId, draw_value: int = 0) -> Sources:
    sources = Sources(lambda count: min(draw_value, count - 1))
    for peer_id in peer_ids:
        assert sources.connect(peer_id)
    return sources


def order(sources: Sources, now: float = 0.0, claims: dict[PeerId, Claim] | None = None) -> list[PeerId]:
    known = claims or {}
    found = sources.candidates(KEY, now, lambda source: known.get(source.peer_id, Claim.UNKNOWN))
    return [source.peer_id for source in found]


def have(first: int = 40, last: int = 57, anchors: tuple[int, ...] = (), epoch: int = 0, at_ms: int = 1) -> Have:
    return Have(RUN_ID, "seed", epoch, first, last, anchors, (), at_ms)


def test_claims_come_before_unknown_and_denials_last() -> None:
    sources = make(A, B, C)
    claims = {A: Claim.DENIES, B: Claim.HOLDS, C: Claim.UNKNOWN}
    assert order(sources, claims=claims) == [B, C, A]


def test_a_false_claim_moves_a_source_to_the_end_for_everything() -> None:
    sources = make(A, B)
    sources.note_miss(A, Digest(b"o" * 32), 0.0, claimed=True)
    assert order(sources, claims={A: Claim.HOLDS}) == [B, A]


def test_a_false_claim_bars_the_source_from_that_key() -> None:
    sources = make(A, B)
    sources.note_miss(A, KEY, 0.0, claimed=True)
    assert order(sources, now=1e9) == [B]


def test_an_honest_miss_waits_longer_each_time() -> None:
    sources = make(A)
    waits = []
    for _ in range(8):
        sources.note_miss(A, KEY, 0.0, claimed=False)
        retry_at = sources.next_retry_at(0.0)
        assert retry_at is not None
        waits.append(retry_at)
        assert order(sources, now=retry_at - 0.001) == []
        assert order(sources, now=retry_at) == [A]
    assert waits == sorted(waits)
    assert waits[-1] <= limits.RETRY_SECONDS_MAX


@pytest.mark.parametrize("draw_value", [0, 1023])
def test_back_off_doubles_within_its_bounds_whatever_the_draw(draw_value: int) -> None:
    sources = make(draw_value=draw_value)
    waits = [sources.backoff_seconds(attempt) for attempt in range(1, 30)]
    assert waits == sorted(waits)
    assert waits[0] >= limits.RETRY_SECONDS_MIN / 2
    assert waits[-1] <= limits.RETRY_SECONDS_MAX


def test_failures_in_a_row_park_a_source_until_it_is_heard_again() -> None:
    sources = make(A)
    for _ in range(FAILURES_MAX):
        sources.note_failure(A, 0.0)
    assert sources.next_retry_at(0.0) == PARKED_SECONDS
    assert order(sources, now=PARKED_SECONDS - 1) == []
    sources.note_heard(A)
    assert order(sources) == [A]
    sources.note_failure(A, 0.0)
    assert order(sources, now=1.0) == []
    sources.note_have(A, have())
    assert order(sources) == [A]


def test_a_claim_that_lies_too_far_before_the_one_known_shows_that_a_clock_was_set_back() -> None:
    sources, day_ms = make(A), 24 * 3_600_000
    source = sources.get(A)
    assert source is not None
    for at_ms, last, held in (
        (day_ms, 57, 57),
        (day_ms - 2 * FUTURE_MS_MAX, 58, 57),
        (day_ms - 2 * FUTURE_MS_MAX - 1, 59, 59),
        (day_ms - 2 * FUTURE_MS_MAX - 2, 60, 59),
    ):
        sources.note_have(A, have(last=last, at_ms=at_ms))
        assert source.have is not None
        assert source.have.version_last == held


def test_a_source_that_asks_for_time_gets_it_within_bounds() -> None:
    sources = make(A, B)
    sources.note_failure(A, 0.0, wait_seconds=20.0)
    sources.note_failure(B, 0.0, wait_seconds=1e9)
    assert order(sources, now=20.0) == [A]
    assert set(order(sources, now=PARKED_SECONDS)) == {A, B}


def test_success_forgives_and_failure_halves_the_window() -> None:
    sources = make(A)
    sources.note_failure(A, 0.0)
    source = sources.get(A)
    assert source is not None
    assert source.window.chunks == WINDOW_CHUNKS_START // 2
    sources.note_success(A, 0.0)
    assert source.failure_count == 0
    for _ in range(10):
        sources.note_failure(A, 0.0)
    assert source.window.chunks == 1


def test_room_is_bounded_by_window_request_and_streams() -> None:
    source = Source(A)
    source.window.chunks = 6
    assert source.room_chunks == limits.CHUNKS_PER_REQUEST_MAX
    source.chunks_in_flight = 3
    assert source.room_chunks == 3
    source.chunks_in_flight = 4
    assert source.room_chunks == 2
    source.chunks_in_flight = 7
    assert source.room_chunks == 0
    source.window.chunks, source.chunks_in_flight = 16, 13
    assert source.room_chunks == 0  # a place is not wasted on less than a request's part of a window
    source.chunks_in_flight = 12
    assert source.room_chunks == limits.CHUNKS_PER_REQUEST_MAX
    source.window.chunks = 32  # a quarter of it is more than one request can be for
    assert source.room_chunks == limits.CHUNKS_PER_REQUEST_MAX
    source.chunks_in_flight = 0
    source.requests_in_flight = limits.STREAMS_PER_PEER_MAX
    assert source.room_chunks == 0


def test_a_source_that_keeps_sending_bad_chunks_is_banned_even_if_it_reconnects() -> None:
    sources = make(A, B)
    for step in range(int(STRIKES_MAX)):
        assert A in order(sources, now=100.0 * step)
        sources.note_strike(A, 100.0 * step)
    now = 100.0 * (STRIKES_MAX - 1)
    sources.note_heard(A)
    sources.disconnect(A)
    sources.connect(A)
    assert order(sources, now=now + BANNED_SECONDS - 1.0) == [B]
    assert set(order(sources, now=now + BANNED_SECONDS)) == {A, B}
    sources.note_strike(A, now + BANNED_SECONDS)
    assert order(sources, now=now + BANNED_SECONDS + 30.0) == [B]


def test_an_answer_that_was_under_way_lifts_no_ban() -> None:
    """Whoever is asked several things at once could end each ban with one of them."""
    sources = make(A, B)
    for _ in range(int(STRIKES_MAX)):
        sources.note_strike(A, 0.0)
    sources.note_success(A, 1.0)
    assert order(sources, now=BANNED_SECONDS - 1.0) == [B]
    assert set(order(sources, now=BANNED_SECONDS)) == {A, B}
    sources.note_success(A, BANNED_SECONDS)
    sources.note_failure(A, BANNED_SECONDS)
    assert set(order(sources, now=BANNED_SECONDS + limits.RETRY_SECONDS_MAX)) == {A, B}


def test_good_chunks_wear_strikes_off() -> None:
    sources = make(A)
    for step in range(100):
        sources.note_strike(A, 100.0 * step)
        sources.note_success(A, 100.0 * step)
        for _ in range(20):
            sources.note_chunk(A, 100.0 * step)
    assert order(sources, now=1e6) == [A]
    source = sources.get(A)
    assert source is not None
    assert not source.is_banned


def test_strikes_of_peers_that_left_are_bounded() -> None:
    sources = make()
    for index in range(BANS_MAX + 1):
        peer_id = PeerId(index.to_bytes(32, "big"))
        sources.connect(peer_id)
        for _ in range(int(STRIKES_MAX)):
            sources.note_strike(peer_id, 0.0)
        sources.disconnect(peer_id)
    sources.connect(PeerId(bytes(32)))
    sources.connect(PeerId((1).to_bytes(32, "big")))
    assert order(sources) == [PeerId(bytes(32))]


def test_a_busy_source_is_left_alone_for_a_while_and_not_blamed() -> None:
    sources = make(A, B, draw_value=1023)
    for _ in range(2 * FAILURES_MAX):
        sources.note_busy(A, 0.0, wait_seconds=4.0)
    source = sources.get(A)
    assert source is not None
    assert not source.is_parked
    assert 4.0 < source.retry_at <= 5.0
    sources.note_busy(PeerId(bytes(32)), 0.0, wait_seconds=1.0)
    assert order(sources) == [B]


def test_who_would_deliver_soonest_comes_first() -> None:
    sources = make(A, B)
    fast, slow = sources.get(A), sources.get(B)
    assert fast is not None
    assert slow is not None
    fast.window.chunks_per_second, slow.window.chunks_per_second = 10.0, 1.0
    assert order(sources) == [A, B]
    fast.chunks_in_flight = 12
    assert order(sources) == [B, A]


def test_a_loaded_source_is_no_candidate_and_the_less_loaded_comes_first() -> None:
    sources = make(A, B)
    first, second = sources.get(A), sources.get(B)
    assert first is not None
    assert second is not None
    first.chunks_in_flight = 1
    assert order(sources) == [B, A]
    second.requests_in_flight = limits.STREAMS_PER_PEER_MAX
    assert order(sources) == [A]


def test_only_a_newer_have_counts_and_clears_misses() -> None:
    sources = make(A)
    sources.note_have(A, have(at_ms=5))
    sources.note_miss(A, KEY, 0.0, claimed=True)
    sources.note_have(A, have(at_ms=5))
    assert order(sources) == []
    sources.note_have(A, have(at_ms=6))
    assert order(sources) == [A]


def test_reconnecting_forgives() -> None:
    sources = make(A)
    sources.note_failure(A, 0.0)
    sources.note_miss(A, KEY, 0.0, claimed=True)
    assert sources.connect(A)
    assert order(sources) == [A]
    assert len(sources) == 1


def test_the_table_and_the_misses_are_bounded() -> None:
    sources = make()
    for index in range(SOURCES_MAX):
        assert sources.connect(PeerId(index.to_bytes(32, "big")))
    assert not sources.connect(A)
    peer_id = PeerId(bytes(32))
    for index in range(MISSES_MAX + 10):
        sources.note_miss(peer_id, Digest(index.to_bytes(32, "big")), 0.0, claimed=False)
    source = sources.get(peer_id)
    assert source is not None
    assert len(source.misses) == MISSES_MAX


def test_strangers_who_fill_the_table_keep_nobody_out_whom_this_node_looks_for() -> None:
    sources = make()
    strangers = [PeerId(index.to_bytes(32, "big")) for index in range(SOURCES_MAX)]
    for peer_id in strangers:
        assert sources.connect(peer_id)
    busy = sources.get(strangers[-1])
    assert busy is not None
    busy.requests_in_flight = 1
    assert sources.connect(A, sought=True)
    assert len(sources) == SOURCES_MAX
    assert sources.get(strangers[-1]) is not None, "it still owes something"
    assert sources.get(strangers[-2]) is None
    assert not sources.connect(B), "who only comes here waits for a place"


def test_those_this_node_looks_for_keep_their_places() -> None:
    sources = make()
    for index in range(SOURCES_MAX):
        assert sources.connect(PeerId(index.to_bytes(32, "big")), sought=True)
    assert not sources.connect(A, sought=True)


def test_strangers_change_nothing() -> None:
    sources = make()
    sources.note_success(A, 0.0)
    sources.note_failure(A, 0.0)
    sources.note_miss(A, KEY, 0.0, claimed=True)
    sources.note_have(A, have())
    sources.note_heard(A)
    sources.disconnect(A)
    assert list(sources) == []
    assert sources.next_retry_at(0.0) is None


MANIFEST = Manifest(
    run_id=RUN_ID,
    revision=0,
    term=0,
    kind=Kind.PATCH,
    base_version=Version(0, 56),
    version=Version(0, 57),
    base_root=KEY,
    root=KEY,
    table_digest=KEY,
    blob_id=KEY,
    raw_size_bytes=1,
    encoded_size_bytes=1,
    changed_count=0,
    element_count=1,
    codec_id=1,
    trainer_step=0,
    previous=None,
)
ANCHOR = replace(MANIFEST, kind=Kind.ANCHOR, base_version=None, base_root=None)


@pytest.mark.parametrize(
    ("record", "manifest", "claim"),
    [
        (None, MANIFEST, Claim.UNKNOWN),
        (have(40, 57), MANIFEST, Claim.HOLDS),
        (have(40, 56), MANIFEST, Claim.DENIES),
        (have(58, 60), MANIFEST, Claim.DENIES),
        (have(0, 0), MANIFEST, Claim.DENIES),
        (have(40, 57, epoch=1), MANIFEST, Claim.DENIES),
        (have(40, 57), ANCHOR, Claim.DENIES),
        (have(0, 0, anchors=(57,)), ANCHOR, Claim.HOLDS),
        (have(40, 57), replace(MANIFEST, kind=Kind.SKIP, base_version=Version(0, 49)), Claim.UNKNOWN),
    ],
)
def test_a_have_record_says_what_its_sender_holds(record: Have | None, manifest: Manifest, claim: Claim) -> None:
    assert claim_of(Source(A, have=record), manifest, publisher=B) is claim


def test_the_signer_of_a_manifest_holds_its_blob() -> None:
    assert claim_of(Source(A, have=have(1, 2)), MANIFEST, publisher=A) is Claim.HOLDS


def test_misses_of_what_nobody_wants_are_forgotten() -> None:
    sources = make(A)
    other = Digest(b"o" * 32)
    sources.note_miss(A, KEY, 0.0, claimed=False)
    sources.note_miss(A, other, 0.0, claimed=False)
    sources.keep_misses({other})
    source = sources.get(A)
    assert source is not None
    assert set(source.misses) == {other}


def test_readers_that_told_of_themselves_and_are_not_connected_are_counted_for_a_while() -> None:
    sources = make()
    readers = [PeerId(bytes([7, number % 256, number // 256]) + bytes(29)) for number in range(UNREACHED_MAX + 3)]
    sources.note_have(readers[0], replace(have(), role="trainer"))
    assert sources.unreached_count == 0
    for at_ms, peer_id in enumerate(readers):
        sources.note_have(peer_id, have(at_ms=at_ms))
    assert sources.unreached_count == UNREACHED_MAX
    sources.connect(readers[-1])
    assert sources.unreached_count == UNREACHED_MAX - 1
    sources.note_have(readers[-1], have(at_ms=int(UNREACHED_SECONDS * 1000) + 5_000))
    assert sources.unreached_count == 0


def test_what_comes_late_of_a_source_that_left_changes_nothing() -> None:
    sources = make(A)
    sources.note_chunk(B, 1.0)
    sources.note_strike(B, 1.0)
    assert sources.get(B) is None
    assert order(sources) == [A]
    assert sources.connect(B), "it is not banned when it comes back"
