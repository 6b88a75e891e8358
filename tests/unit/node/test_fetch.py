"""Blobs arrive whole from unreliable sources: loss, damage, silence, lies and restarts."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from pulsenet import limits
from pulsenet.chain.records import Have, Kind, Manifest
from pulsenet.ids import Digest, PeerId, RunId, Version, compute_digest
from pulsenet.node.effects import CancelRequest, Count, Effect, SendRequest, StoreChunk, StoreChunkList, StrikePeer
from pulsenet.node.events import ChunkStored, Event, ReplyReceived, RequestDone, RequestFailed, StoreFailed
from pulsenet.node.fetch import CHUNKS_IN_FLIGHT_MAX, HEDGES_MAX, UNAVAILABLE_SECONDS, Fetcher
from pulsenet.node.holdings import make_holdings_reply
from pulsenet.node.list_fetch import BlobWant, SliceChoice
from pulsenet.node.sources import FAILURES_MAX, Sources
from pulsenet.node.transfers import STALL_SECONDS_MIN
from pulsenet.wire.chunks import ChunkCutter, ChunkList
from pulsenet.wire.messages import (
    ChunkListReply,
    ChunkReply,
    GetChunkList,
    GetChunks,
    GetHoldings,
    HeadReply,
    HoldingsReply,
    Message,
    Refusal,
)

RUN_ID = RunId(b"r" * 32)
PUBLISHER = PeerId(b"p" * 32)
LIMIT_SECONDS = 3600.0


@dataclass
class Blob:
    chunk_list: ChunkList
    chunks: dict[Digest, bytes]
    manifest: Manifest

    @property
    def blob_id(self) -> Digest:
        return self.chunk_list.blob_id

    @property
    def want(self) -> BlobWant:
        return BlobWant(self.manifest, PUBLISHER)


def make_blob(data: bytes, chunk_size_bytes: int = limits.CHUNK_SIZE_BYTES, number: int = 57) -> Blob:
    cutter = ChunkCutter(chunk_size_bytes)
    chunks = dict([*cutter.feed(data), *cutter.finish()])
    manifest = Manifest(
        run_id=RUN_ID,
        revision=0,
        term=0,
        kind=Kind.PATCH,
        base_version=Version(0, number - 1),
        version=Version(0, number),
        base_root=Digest(b"b" * 32),
        root=Digest(b"t" * 32),
        table_digest=Digest(b"x" * 32),
        blob_id=cutter.chunk_list.blob_id,
        raw_size_bytes=1 << 30,
        encoded_size_bytes=len(data),
        changed_count=0,
        element_count=1 << 29,
        codec_id=1,
        trainer_step=0,
        previous=None,
    )
    return Blob(cutter.chunk_list, chunks, manifest)


def payload(size_bytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@dataclass
class Index:
    chunks: dict[Digest, bytes] = field(default_factory=dict)
    lists: dict[Digest, bytes] = field(default_factory=dict)

    def has_chunk(self, digest: Digest) -> bool:
        return digest in self.chunks

    def chunk_list(self, blob_id: Digest) -> bytes | None:
        return self.lists.get(blob_id)

    def record(self, digest: Digest) -> bytes | None:
        return None


Answer = list[tuple[float, Message | str]]
"""Replies with the delay of each; a string is a failure reason, and ends the request."""


@dataclass
class Provider:
    blobs: dict[Digest, Blob] = field(default_factory=dict)
    seconds: float = 0.01
    change: Callable[[Answer], Answer] = lambda answer: answer
    requests: list[Message] = field(default_factory=list)
    given: set[Digest] = field(default_factory=set)

    def answer(self, message: Message) -> Answer:
        self.requests.append(message)
        return self.change([(self.seconds * (i + 1), reply) for i, reply in enumerate(self._replies(message))])

    def _replies(self, message: Message) -> list[Message]:
        if isinstance(message, GetChunkList):
            blob = self.blobs.get(message.blob_id)
            if blob is None:
                return [Refusal("not-found", "", 0)]
            data = blob.chunk_list.encode()
            page = data[message.offset : message.offset + limits.CHUNK_SIZE_BYTES_MAX]
            return [ChunkListReply(message.blob_id, len(data), page)]
        if isinstance(message, GetHoldings):
            return [self._tell(message.blob_id)]
        assert isinstance(message, GetChunks)
        self.given.update(message.digests)
        held = ChainMap(*(blob.chunks for blob in self.blobs.values()))
        return [ChunkReply(digest, held.get(digest)) for digest in message.digests]

    def _tell(self, blob_id: Digest) -> Message:
        blob = self.blobs.get(blob_id)
        if blob is None:
            return Refusal("not-found", "", 0)
        encoded = blob.chunk_list.encode()
        return make_holdings_reply(blob_id, encoded, blob.chunks.__contains__, self.given.__contains__)


class Bench:
    """Runs one fetcher against scripted providers on a virtual clock."""

    def __init__(self, providers: dict[PeerId, Provider], index: Index | None = None, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.index = index or Index()
        self.providers = providers
        self.sources = Sources(self.random.randrange)
        ids = itertools.count()
        self.fetcher = Fetcher(self.sources, lambda: next(ids), self.index)
        self.now = 0.0
        self.queue: list[tuple[float, int, Event]] = []
        self.order = itertools.count()
        self.log: list[Effect] = []
        self.received_size_bytes = 0
        self.store_fails: list[str] = []
        self.list_fails: list[str] = []
        for peer_id in providers:
            self.sources.connect(peer_id)

    def want(self, *blobs: Blob) -> None:
        self.execute(self.fetcher.set_wants([blob.want for blob in blobs]))
        self.execute(self.fetcher.pump(self.now))

    def execute(self, effects: list[Effect]) -> None:
        self.log += effects
        for effect in effects:
            if isinstance(effect, SendRequest):
                self.send(effect)
            elif isinstance(effect, StoreChunkList):
                if self.list_fails:
                    # As the driver does: what comes after it in the call is given up as well.
                    self.push(0.001, StoreFailed(None, self.list_fails.pop()))
                    return
                self.index.lists[effect.blob_id] = effect.data
            elif isinstance(effect, StoreChunk):
                if self.store_fails:
                    self.push(0.001, StoreFailed(effect.digest, self.store_fails.pop()))
                    continue
                assert compute_digest(effect.data) == effect.digest
                self.index.chunks[effect.digest] = effect.data
                self.push(0.001, ChunkStored(effect.digest))

    def send(self, effect: SendRequest) -> None:
        last = 0.0
        for delay, reply in self.providers[effect.peer_id].answer(effect.message):
            if isinstance(reply, str):
                self.push(delay, RequestFailed(effect.request_id, effect.peer_id, reply))
                return
            self.push(delay, ReplyReceived(effect.request_id, effect.peer_id, reply))
            last = max(last, delay)
        if isinstance(effect.message, GetChunks):
            self.push(last, RequestDone(effect.request_id, effect.peer_id))

    def push(self, delay: float, event: Event) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.order), event))

    def step(self) -> bool:
        wake = self.fetcher.next_wake(self.now)
        if self.queue and (wake is None or self.queue[0][0] <= wake):
            self.now, _, event = heapq.heappop(self.queue)
            if isinstance(event, ReplyReceived) and isinstance(event.reply, ChunkReply) and event.reply.data:
                self.received_size_bytes += len(event.reply.data)
            self.execute(self.fetcher.handle(event, self.now))
        elif wake is None:
            return False
        else:
            assert wake > self.now
            self.now = wake
        self.execute(self.fetcher.pump(self.now))
        return True

    def run(self, blob: Blob, limit_seconds: float = LIMIT_SECONDS) -> None:
        while not self.fetcher.is_whole(blob.blob_id) and self.now < limit_seconds and self.step():
            pass

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end and self.step():
            pass

    def data(self, blob: Blob) -> bytes:
        return b"".join(self.index.chunks[digest] for _, digest in blob.chunk_list.entries)

    def count(self, name: str, label: str) -> int:
        return sum(
            1 for effect in self.log if isinstance(effect, Count) and (effect.name, effect.label) == (name, label)
        )

    def strikes(self) -> list[StrikePeer]:
        return [effect for effect in self.log if isinstance(effect, StrikePeer)]


def peers(count: int) -> list[PeerId]:
    return [PeerId(bytes([i + 1]) * 32) for i in range(count)]


def chunk_requests(provider: Provider) -> list[GetChunks]:
    return [request for request in provider.requests if isinstance(request, GetChunks)]


@pytest.mark.parametrize("size_bytes", [0, 1, 1023, 1024, 1025, 3 * 1024])
def test_sizes_at_the_edge_arrive_whole(size_bytes: int) -> None:
    """A-CHK-2: 0 bytes is the empty patch, not a missing one."""
    data = payload(size_bytes)
    blob = make_blob(data, 1024)
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob})})
    bench.want(blob)
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert bench.data(blob) == data
    assert bench.index.lists[blob.blob_id] == blob.chunk_list.encode()


def test_an_empty_patch_needs_no_source() -> None:
    blob = make_blob(b"")
    bench = Bench({})
    bench.want(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert not bench.fetcher.is_arriving(blob.blob_id)


def test_a_blob_is_arriving_from_its_list_to_its_last_chunk() -> None:
    blob = make_blob(payload(5 * 1024), 1024)
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob})})
    assert not bench.fetcher.is_arriving(blob.blob_id)
    bench.want(blob)
    seen = [bench.fetcher.is_arriving(blob.blob_id)]
    while not bench.fetcher.is_whole(blob.blob_id):
        assert bench.step()
        seen.append(bench.fetcher.is_arriving(blob.blob_id))
    assert (seen[0], seen[-1]) == (False, False)
    assert seen == [*sorted(seen[:-1]), False]
    assert True in seen


def test_an_empty_blob_under_a_false_name_is_refused_at_once() -> None:
    blob = make_blob(payload(10))
    empty = make_blob(b"")
    manifest = empty.manifest
    false = Manifest(**{**{name: getattr(manifest, name) for name in manifest.__slots__}, "blob_id": blob.blob_id})
    bench = Bench({})
    bench.execute(bench.fetcher.set_wants([BlobWant(false, PUBLISHER)]))
    assert bench.fetcher.refusal_of(blob.blob_id) == "chunk-list"
    assert not bench.fetcher.is_whole(blob.blob_id)


@pytest.mark.unmeasured
def test_noisy_delivery_completes_with_little_waste() -> None:
    """A-CHK-1: 10,000 chunks, 10 % lost, 1 % corrupted, 5 % duplicated, reordered in a window of 64."""
    data = payload(10_000 * 64)
    blob = make_blob(data, 64)
    chance = random.Random(7)
    corrupted = 0

    def noise(answer: Answer) -> Answer:
        nonlocal corrupted
        if isinstance(answer[0][1], ChunkListReply | HoldingsReply):
            return answer
        noisy: Answer = []
        lost = False
        for delay, reply in answer:
            assert isinstance(reply, ChunkReply)
            assert reply.data is not None
            if chance.random() < 0.10:
                lost = True
                continue
            sent = reply
            if chance.random() < 0.01:
                corrupted += 1
                sent = ChunkReply(reply.digest, bytes([reply.data[0] ^ 1]) + reply.data[1:])
            delay += chance.random() * 0.1
            noisy.append((delay, sent))
            if chance.random() < 0.05:
                noisy.append((delay + chance.random() * 0.1, sent))
        return [*sorted(noisy, key=lambda item: item[0]), *([(1.0, "timeout")] if lost else [])]

    providers = {peer: Provider({blob.blob_id: blob}, change=noise) for peer in [PUBLISHER, *peers(7)]}
    bench = Bench(providers)
    bench.want(blob)
    bench.run(blob)
    assert bench.data(blob) == data
    assert corrupted > 50
    # A damaged chunk sent twice is refused once: the second copy answers nothing any more.
    assert bench.count("rejected", "bad-chunk") == corrupted
    assert bench.received_size_bytes <= 1.25 * len(data)


def test_a_chunk_of_another_version_is_rejected_and_a_good_copy_fetched() -> None:
    """A-CHK-3: the data of another blob's chunk under the digest asked for, then under its own digest."""
    blob = make_blob(payload(4096), 1024)
    other = make_blob(payload(4096, seed=2), 1024)
    foreign = next(iter(other.chunks))

    def swap_data(answer: Answer) -> Answer:
        return [(d, ChunkReply(r.digest, other.chunks[foreign]) if isinstance(r, ChunkReply) else r) for d, r in answer]

    def swap_digest(answer: Answer) -> Answer:
        return [(d, ChunkReply(foreign, other.chunks[foreign]) if isinstance(r, ChunkReply) else r) for d, r in answer]

    bad_data, bad_digest, good = peers(3)
    bench = Bench(
        {
            bad_data: Provider({blob.blob_id: blob}, change=swap_data),
            bad_digest: Provider({blob.blob_id: blob}, change=swap_digest),
            good: Provider({blob.blob_id: blob}, seconds=0.2),
        }
    )
    bench.want(blob)
    bench.run(blob)
    assert bench.data(blob) == payload(4096)
    assert foreign not in bench.index.chunks
    assert {strike.peer_id for strike in bench.strikes()} <= {bad_data, bad_digest}
    assert bench.strikes()


def test_a_restart_resumes_from_what_is_durable() -> None:
    """A-CHK-4: killed half way, the second life fetches only the rest."""
    data = payload(100 * 1024)
    blob = make_blob(data, 1024)
    first = Bench({PUBLISHER: Provider({blob.blob_id: blob})})
    first.want(blob)
    while len(first.index.chunks) < 50:
        first.step()
    second = Bench({PUBLISHER: Provider({blob.blob_id: blob})}, index=first.index)
    second.want(blob)
    second.run(blob)
    assert second.data(blob) == data
    assert first.received_size_bytes + second.received_size_bytes <= 1.05 * len(data)
    assert not [r for r in second.providers[PUBLISHER].requests if isinstance(r, GetChunkList)]


def test_a_damaged_stored_list_is_fetched_again() -> None:
    blob = make_blob(payload(4096), 1024)
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob})}, index=Index(lists={blob.blob_id: b"damaged"}))
    bench.want(blob)
    bench.run(blob)
    assert bench.index.lists[blob.blob_id] == blob.chunk_list.encode()


def test_a_source_that_goes_silent_is_replaced_within_ten_seconds() -> None:
    """A-CHK-5: one of four sources dies at 30 % without closing its streams."""
    data = payload(200 * 1024)
    blob = make_blob(data, 1024)
    served = itertools.count()

    def die(answer: Answer) -> Answer:
        if next(served) < 6:
            return answer
        return [(30.0, "timeout")]

    dying, *others = peers(4)
    providers = {peer: Provider({blob.blob_id: blob}, seconds=0.05) for peer in others}
    providers[dying] = Provider({blob.blob_id: blob}, seconds=0.05, change=die)
    bench = Bench(providers)
    bench.want(blob)
    bench.run(blob)
    assert bench.data(blob) == data
    assert bench.now < STALL_SECONDS_MIN + 10.0


def test_a_closed_source_is_replaced_at_once_and_tried_a_bounded_number_of_times() -> None:
    """A-CHK-5: the dead source is not retried more than the limit."""
    blob = make_blob(payload(400 * 1024), 1024)
    dead, *others = peers(4)
    providers = {peer: Provider({blob.blob_id: blob}, seconds=2.0) for peer in others}
    providers[dead] = Provider({blob.blob_id: blob}, change=lambda answer: [(0.01, "closed")])
    bench = Bench(providers)
    bench.want(blob)
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert len(providers[dead].requests) <= FAILURES_MAX + limits.STREAMS_PER_PEER_MAX


def test_one_slow_source_is_waited_for_without_asking_it_twice() -> None:
    blob = make_blob(payload(8 * 1024), 1024)
    provider = Provider({blob.blob_id: blob}, seconds=12.0)
    bench = Bench({PUBLISHER: provider})
    bench.want(blob)
    bench.run(blob)
    asked = [digest for request in chunk_requests(provider) for digest in request.digests]
    assert sorted(asked) == sorted(blob.chunks)


def test_all_sources_dead_backs_off_and_recovers_when_one_returns() -> None:
    """A-PEER-3: ten minutes of nobody; attempts per source stay bounded."""
    blob = make_blob(payload(4096), 1024)
    dead = {peer: Provider({}, change=lambda answer: [(0.01, "closed")]) for peer in peers(3)}
    bench = Bench(dict(dead))
    bench.want(blob)
    bench.run_for(600.0)
    assert all(len(provider.requests) <= FAILURES_MAX + 3 for provider in dead.values())
    assert bench.fetcher.progress().reason == "no-source"
    back = peers(1)[0]
    bench.providers[back] = Provider({blob.blob_id: blob})
    bench.sources.connect(back)
    bench.execute(bench.fetcher.pump(bench.now))
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert bench.fetcher.progress().reason == ""


def test_an_only_donor_that_dies_at_seventy_percent_is_replaced_and_nothing_short_is_whole() -> None:
    """A-CHK-6, second half."""
    blob = make_blob(payload(20 * 1024), 1024)
    donor, other = peers(2)
    left = 14

    def die(answer: Answer) -> Answer:
        nonlocal left
        if not isinstance(answer[0][1], ChunkReply):
            return answer
        served, left = answer[:left], max(left - len(answer), 0)
        return served if len(served) == len(answer) else [*served, (1.0, "closed")]

    bench = Bench({donor: Provider({blob.blob_id: blob}, change=die)})
    bench.want(blob)
    bench.run_for(60.0)
    assert len(bench.index.chunks) == 14
    assert not bench.fetcher.is_whole(blob.blob_id)
    assert bench.fetcher.progress().reason == "no-source"
    bench.providers[other] = Provider({blob.blob_id: blob})
    bench.sources.connect(other)
    bench.execute(bench.fetcher.pump(bench.now))
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert sum(len(request.digests) for request in chunk_requests(bench.providers[other])) == 6


def have(first: int, last: int, issued_at_ms: int = 1) -> Have:
    return Have(RUN_ID, "inferencer", 0, first, last, (), (), issued_at_ms)


def test_a_source_that_claimed_and_answers_not_found_is_not_asked_again_for_that_version() -> None:
    """A-PEER-4: one of three sources lies."""
    blob = make_blob(payload(100 * 1024), 1024)
    liar, *others = peers(3)
    providers = {peer: Provider({blob.blob_id: blob}, seconds=0.1) for peer in others}
    empty = Blob(blob.chunk_list, {}, blob.manifest)
    providers[liar] = Provider({blob.blob_id: empty})
    bench = Bench(providers)
    for peer in providers:
        bench.sources.note_have(peer, have(40, 57))
    bench.want(blob)
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert len(chunk_requests(providers[liar])) <= limits.STREAMS_PER_PEER_MAX


def test_a_reader_that_knows_nothing_of_a_blob_is_asked_for_none_of_it() -> None:
    blob = make_blob(payload(40 * 1024), 1024)
    reader = peers(1)[0]
    providers = {PUBLISHER: Provider({blob.blob_id: blob}, seconds=1.0), reader: Provider({})}
    bench = Bench(providers, Index(lists={blob.blob_id: blob.chunk_list.encode()}))
    bench.want(blob)
    bench.run(blob)
    assert bench.data(blob) == payload(40 * 1024)
    assert set(providers[reader].requests) == {GetHoldings(blob.blob_id)}
    assert bench.strikes() == []


def test_a_newer_have_makes_a_source_worth_asking_again() -> None:
    blob = make_blob(payload(1024), 1024)
    peer = peers(1)[0]
    provider = Provider({})
    bench = Bench({peer: provider})
    bench.sources.note_have(peer, have(40, 57))
    bench.want(blob)
    bench.run_for(100.0)
    assert len(provider.requests) == 1
    provider.blobs[blob.blob_id] = blob
    bench.sources.note_have(peer, have(40, 57, issued_at_ms=2))
    bench.execute(bench.fetcher.pump(bench.now))
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)


def test_a_blob_nobody_holds_is_called_unavailable_but_still_tried() -> None:
    """A-CHAIN-2: the chunks of one patch are nowhere."""
    blob = make_blob(payload(2048), 1024)
    providers = {peer: Provider({}) for peer in peers(3)}
    bench = Bench(dict(providers))
    bench.want(blob)
    assert not bench.fetcher.is_unavailable(blob.blob_id, bench.now)
    bench.run_for(UNAVAILABLE_SECONDS + 1.0)
    assert bench.fetcher.is_unavailable(blob.blob_id, bench.now)
    providers[peers(1)[0]].blobs[blob.blob_id] = blob
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert not bench.fetcher.is_unavailable(blob.blob_id, bench.now)


def test_without_any_source_nothing_is_called_unavailable() -> None:
    blob = make_blob(payload(2048), 1024)
    bench = Bench({})
    bench.want(blob)
    assert not bench.fetcher.is_unavailable(blob.blob_id, 1e6)
    assert not bench.fetcher.is_unavailable(Digest(b"?" * 32), 1e6)
    assert bench.fetcher.next_wake(bench.now) is None


@pytest.mark.unmeasured
def test_requests_stay_within_the_limits() -> None:
    blob = make_blob(payload(2000 * 64), 64)
    bench = Bench({peer: Provider({blob.blob_id: blob}, seconds=0.5) for peer in peers(8)})
    bench.want(blob)
    while not bench.fetcher.is_whole(blob.blob_id):
        bench.step()
        assert sum(source.chunks_in_flight for source in bench.sources) <= CHUNKS_IN_FLIGHT_MAX
        assert all(source.requests_in_flight <= limits.STREAMS_PER_PEER_MAX for source in bench.sources)
    assert all(len(request.digests) <= 4 for p in bench.providers.values() for request in chunk_requests(p))
    assert all(source.requests_in_flight == 0 and source.chunks_in_flight == 0 for source in bench.sources)


def test_a_full_disk_pauses_the_fetch_and_loses_no_chunk() -> None:
    blob = make_blob(payload(16 * 1024), 1024)
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob})})
    bench.store_fails = ["enospc"] * 5
    bench.want(blob)
    while not bench.fetcher.progress().reason:
        bench.step()
    assert bench.fetcher.progress().reason == "enospc"
    bench.run(blob)
    assert bench.data(blob) == payload(16 * 1024)
    assert bench.fetcher.progress().reason == ""


@pytest.mark.parametrize("size_bytes", [0, 1024, 16 * 1024])
def test_a_list_the_full_disk_refused_is_stored_once_there_is_room(size_bytes: int) -> None:
    blob = make_blob(payload(size_bytes), 1024)
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob})})
    bench.list_fails = ["enospc"] * 3
    bench.want(blob)
    while bench.list_fails:
        bench.step()
    bench.run_for(0.01)
    bench.run(blob)
    assert bench.index.lists[blob.blob_id] == blob.chunk_list.encode()
    assert bench.data(blob) == payload(size_bytes)
    assert bench.fetcher.progress().reason == ""


def test_a_store_failure_without_a_chunk_pauses_too() -> None:
    blob = make_blob(payload(1024), 1024)
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob})})
    bench.execute(bench.fetcher.handle(StoreFailed(None, "eio"), 0.0))
    bench.want(blob)
    assert bench.log == []
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)


def test_replanning_keeps_what_is_still_wanted() -> None:
    old, kept, new = (make_blob(payload(20 * 1024, seed), 1024, number) for seed, number in ((1, 55), (2, 56), (3, 57)))
    provider = Provider({blob.blob_id: blob for blob in (old, kept, new)})
    bench = Bench({PUBLISHER: provider})
    bench.want(old, kept)
    while len(bench.index.chunks) < 25:
        bench.step()
    before = set(bench.index.chunks) & set(kept.chunks)
    assert before
    bench.want(kept, new)
    bench.run(kept)
    bench.run(new)
    asked = [digest for request in chunk_requests(provider) for digest in request.digests]
    assert all(asked.count(digest) == 1 for digest in kept.chunks)
    progress = bench.fetcher.progress()
    assert progress.held_size_bytes == progress.wanted_size_bytes == 40 * 1024


def test_a_chunk_shared_by_two_blobs_is_fetched_once() -> None:
    shared = payload(4096)
    first = make_blob(shared + payload(1024, 8), 1024, 56)
    second = make_blob(shared + payload(1024, 9), 1024, 57)
    provider = Provider({blob.blob_id: blob for blob in (first, second)})
    bench = Bench({PUBLISHER: provider})
    bench.want(first, second)
    bench.run(first)
    bench.run(second)
    asked = [digest for request in chunk_requests(provider) for digest in request.digests]
    assert len(asked) == len(set(asked)) == 6


def test_a_list_that_does_not_match_its_name_costs_a_strike_and_another_source_is_used() -> None:
    blob = make_blob(payload(4096), 1024)
    false = make_blob(payload(4096, seed=5), 1024)
    liar, honest = peers(2)

    def lie(answer: Answer) -> Answer:
        data = false.chunk_list.encode()
        return [
            (d, ChunkListReply(blob.blob_id, len(data), data) if isinstance(r, ChunkListReply) else r)
            for d, r in answer
        ]

    bench = Bench(
        {
            liar: Provider({blob.blob_id: blob}, change=lie),
            honest: Provider({blob.blob_id: blob}, change=lambda a: [(5.0 + d, r) for d, r in a]),
        }
    )
    bench.sources.note_have(liar, have(40, 57))
    bench.want(blob)
    bench.run(blob)
    assert bench.data(blob) == payload(4096)
    assert StrikePeer(liar, "chunk-list") in bench.strikes()


@pytest.mark.parametrize(
    "reply",
    [
        ChunkListReply(Digest(b"o" * 32), 100, b"x" * 100),
        ChunkListReply(Digest(b"o" * 32), 100, b""),
        HeadReply(None),
    ],
)
def test_a_reply_of_another_kind_to_a_list_costs_a_strike(reply: Message) -> None:
    blob = make_blob(payload(4096), 1024)
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob}, change=lambda answer: [(0.1, reply)])})
    bench.want(blob)
    bench.run_for(0.2)
    assert bench.strikes() == [StrikePeer(PUBLISHER, "chunk-list")]


def test_a_list_longer_than_the_signed_size_allows_is_cut_off() -> None:
    blob = make_blob(payload(10), 1024)
    huge = ChunkListReply(blob.blob_id, 1 << 25, b"x" * 4096)
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob}, change=lambda answer: [(0.1, huge)])})
    bench.want(blob)
    bench.run_for(0.2)
    assert bench.strikes() == [StrikePeer(PUBLISHER, "chunk-list")]


def test_a_list_whose_size_is_not_the_signed_one_is_refused_for_good() -> None:
    blob = make_blob(payload(4096), 1024)
    manifest = blob.manifest
    fields = {name: getattr(manifest, name) for name in manifest.__slots__}
    lying = Blob(blob.chunk_list, blob.chunks, Manifest(**{**fields, "encoded_size_bytes": 4097}))
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob})})
    bench.want(lying)
    bench.run_for(1.0)
    assert bench.fetcher.refusal_of(blob.blob_id) == "chunk-list"
    assert bench.fetcher.refusal_of(Digest(b"?" * 32)) == ""
    again = Bench(
        {PUBLISHER: Provider({blob.blob_id: blob})}, index=Index(lists={blob.blob_id: blob.chunk_list.encode()})
    )
    again.want(lying)
    assert again.fetcher.refusal_of(blob.blob_id) == "chunk-list"


def test_a_list_of_several_pages_is_assembled() -> None:
    data = payload(40_000)
    blob = make_blob(data, 1)
    assert len(blob.chunk_list.encode()) > limits.CHUNK_SIZE_BYTES_MAX
    provider = Provider({blob.blob_id: blob})
    bench = Bench({PUBLISHER: provider})
    bench.want(blob)
    bench.run_for(0.05)
    pages = [request for request in provider.requests if isinstance(request, GetChunkList)]
    assert [page.offset for page in pages] == [0, limits.CHUNK_SIZE_BYTES_MAX]
    assert blob.blob_id in bench.index.lists


def test_a_refusal_with_a_time_is_respected() -> None:
    blob = make_blob(payload(4096), 1024)
    first = itertools.count()

    def busy(answer: Answer) -> Answer:
        return [(0.01, Refusal("busy", "", 20_000))] if next(first) in (0, 2) else answer

    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob}, change=busy)})
    bench.want(blob)
    bench.run(blob)
    assert 40.0 <= bench.now <= 51.0  # and a little longer each time, by chance
    assert bench.count("retries", "refused") == 2


def test_a_refused_chunk_request_that_names_not_found_is_a_miss() -> None:
    blob = make_blob(payload(4096), 1024)
    first = itertools.count()

    def forget(answer: Answer) -> Answer:
        return [(0.01, Refusal("not-found", "", 0))] if next(first) == 1 else answer

    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob}, change=forget)})
    bench.want(blob)
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert bench.strikes() == []


def test_a_request_that_ends_without_all_its_chunks_is_asked_again() -> None:
    blob = make_blob(payload(4096), 1024)
    first = itertools.count()

    def cut(answer: Answer) -> Answer:
        return answer[:1] if next(first) == 1 else answer

    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob}, change=cut)})
    bench.want(blob)
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)


def test_a_shell_that_never_answers_is_given_up_on() -> None:
    blob = make_blob(payload(4096), 1024)
    provider = Provider({blob.blob_id: blob}, change=lambda answer: [(1e9, "late")])
    bench = Bench({PUBLISHER: provider})
    bench.want(blob)
    bench.run_for(60.0)
    provider.change = lambda answer: answer
    bench.run_for(60.0)
    assert blob.blob_id in bench.index.lists
    provider.change = lambda answer: [(1e9, "late")]
    assert bench.fetcher.is_whole(blob.blob_id)


def test_silent_chunks_are_given_up_on_after_their_deadline() -> None:
    blob = make_blob(payload(4096), 1024)
    first = itertools.count()
    provider = Provider({blob.blob_id: blob}, change=lambda a: [(1e9, "late")] if next(first) == 1 else a)
    bench = Bench({PUBLISHER: provider})
    bench.want(blob)
    bench.run(blob, limit_seconds=200.0)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert bench.count("retries", "timeout") == 2


def test_a_lost_peer_frees_its_requests() -> None:
    blob = make_blob(payload(64 * 1024), 1024)
    gone, left = peers(2)
    providers = {
        gone: Provider({blob.blob_id: blob}, change=lambda answer: [(1e9, "late")]),
        left: Provider({blob.blob_id: blob}),
    }
    bench = Bench(providers)
    bench.sources.note_have(gone, have(40, 57))
    bench.want(blob)
    bench.sources.disconnect(gone)
    bench.execute(bench.fetcher.lose_peer(gone, bench.now))
    bench.execute(bench.fetcher.pump(bench.now))
    bench.run(blob, limit_seconds=7.0)
    assert bench.fetcher.is_whole(blob.blob_id)


def test_chunks_in_flight_to_a_lost_peer_are_asked_of_another() -> None:
    blob = make_blob(payload(64 * 1024), 1024)
    gone = PUBLISHER
    bench = Bench({gone: Provider({blob.blob_id: blob})}, index=Index(lists={blob.blob_id: blob.chunk_list.encode()}))
    bench.providers[gone].change = lambda answer: [(1e9, "late")]
    bench.want(blob)
    assert bench.fetcher.progress().requests_in_flight == 1
    bench.sources.disconnect(gone)
    effects = bench.fetcher.lose_peer(gone, bench.now)
    # Otherwise it would be sent again over the next connection, and all of it arrive twice.
    (asked,) = [effect for effect in bench.log if isinstance(effect, SendRequest)]
    assert CancelRequest(asked.request_id, gone, blob.blob_id) in effects
    bench.execute(effects)
    assert bench.fetcher.progress().requests_in_flight == 0
    other = peers(1)[0]
    bench.providers[other] = Provider({blob.blob_id: blob})
    bench.sources.connect(other)
    bench.execute(bench.fetcher.pump(bench.now))
    bench.run(blob, limit_seconds=7.0)
    assert bench.fetcher.is_whole(blob.blob_id)


def test_events_about_other_requests_are_ignored() -> None:
    bench = Bench({})
    peer = peers(1)[0]
    for event in (
        ReplyReceived(99, peer, HeadReply(None)),
        RequestDone(99, peer),
        RequestFailed(99, peer, "closed"),
        ChunkStored(Digest(b"?" * 32)),
        StoreFailed(Digest(b"?" * 32), "eio"),
    ):
        assert bench.fetcher.handle(event, 0.0) == []


def test_late_pages_and_chunks_of_a_blob_no_longer_wanted_are_dropped() -> None:
    blob = make_blob(payload(8 * 1024), 1024)
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob})})
    bench.want(blob)
    bench.execute(bench.fetcher.set_wants([]))
    bench.run_for(1.0)
    assert bench.index.lists == {}
    bench.index.lists[blob.blob_id] = blob.chunk_list.encode()
    bench.want(blob)
    bench.execute(bench.fetcher.set_wants([]))
    bench.run_for(1.0)
    assert bench.index.chunks == {}
    assert bench.count("wasted_bytes", "duplicate") == 4


@pytest.mark.parametrize("is_held", [True, False])
def test_what_one_request_is_answered_twice_is_taken_once(is_held: bool) -> None:
    """Held and not: the second copy is counted as waste, of as many bytes as came, and is nobody's fault."""
    blob = make_blob(payload(8 * 1024), 1024)

    def say_twice(answer: Answer) -> Answer:
        twice = [item for item in answer for _ in range(2 if isinstance(item[1], ChunkReply) else 1)]
        return [(d, r if is_held or not isinstance(r, ChunkReply) else ChunkReply(r.digest, None)) for d, r in twice]

    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob}, change=say_twice)})
    bench.want(blob)
    bench.run_for(1.0)
    assert bench.fetcher.is_whole(blob.blob_id) == is_held
    wasted = [e.value for e in bench.log if isinstance(e, Count) and (e.name, e.label) == ("wasted_bytes", "duplicate")]
    assert set(wasted) == {1024.0 if is_held else 0.0}
    assert bench.strikes() == []


def make_parts(*parts: bytes) -> Blob:
    """A blob of which every part has a chunk of its own, as the sections of a contribution have."""
    cutter = ChunkCutter()
    chunks: dict[Digest, bytes] = {}
    for part in parts:
        chunks.update([*cutter.feed(part), *cutter.boundary()])
    cutter.finish()
    blob = make_blob(b"")
    manifest = replace(
        blob.manifest, blob_id=cutter.chunk_list.blob_id, encoded_size_bytes=sum(map(len, parts)), codec_id=1
    )
    return Blob(cutter.chunk_list, chunks, manifest)


def test_a_part_of_a_blob_is_fetched_alone_and_the_rest_when_it_is_wanted() -> None:
    blob = make_parts(b"head", b"first", b"second", b"third", b"fourth")
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob})})

    def want(choice: SliceChoice | None) -> None:
        bench.execute(bench.fetcher.set_wants([BlobWant(blob.manifest, PUBLISHER, choice)]))
        bench.execute(bench.fetcher.pump(bench.now))
        bench.run(blob)

    want(SliceChoice(frozenset([1]), 4))
    assert set(bench.index.chunks.values()) == {b"head", b"second"}
    assert bench.fetcher.is_whole(blob.blob_id)
    assert bench.fetcher.list_of(blob.blob_id) == blob.chunk_list
    want(SliceChoice(frozenset([0, 1]), 2))
    assert set(bench.index.chunks.values()) == set(blob.chunks.values())
    want(None)
    assert bench.data(blob) == b"headfirstsecondthirdfourth"
    assert bench.received_size_bytes == 26
    assert bench.fetcher.list_of(Digest(b"?" * 32)) is None


def test_a_blob_without_parts_has_none_to_fetch_but_may_be_fetched_whole() -> None:
    blob = make_blob(payload(limits.CHUNK_SIZE_BYTES))
    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob})})
    part = BlobWant(blob.manifest, PUBLISHER, SliceChoice(frozenset([0]), 2))
    bench.execute(bench.fetcher.set_wants([part]))
    bench.execute(bench.fetcher.pump(bench.now))
    bench.run_for(5.0)
    assert bench.fetcher.refusal_of(blob.blob_id) == "chunk-list"
    assert not bench.fetcher.is_whole(blob.blob_id)
    bench.want(blob)
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)


def test_what_others_want_from_one_is_asked_of_that_one_alone() -> None:
    blob, other = make_blob(payload(40_000)), PeerId(b"o" * 32)
    providers = {PUBLISHER: Provider(seconds=1.0), other: Provider({blob.blob_id: blob})}
    bench = Bench(providers)
    want = BlobWant(blob.manifest, PUBLISHER, None, is_exclusive=True)
    bench.execute(bench.fetcher.set_wants([want]))
    bench.execute(bench.fetcher.pump(bench.now))
    bench.run_for(5.0)
    assert providers[PUBLISHER].requests
    assert not providers[other].requests
    providers[PUBLISHER].blobs[blob.blob_id] = blob
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert not providers[other].requests


def test_the_last_chunks_of_a_blob_wait_for_no_slow_provider() -> None:
    blob = make_blob(payload(40 * 1024), 1024)
    slow, fast = peers(2)
    providers = {
        slow: Provider(
            {blob.blob_id: blob}, change=lambda a: [(d + (60.0 if isinstance(r, ChunkReply) else 0.0), r) for d, r in a]
        ),
        fast: Provider({blob.blob_id: blob}, seconds=0.05),
    }
    bench = Bench(providers)
    bench.want(blob)
    bench.run(blob)
    assert bench.data(blob) == payload(40 * 1024)
    assert bench.now < STALL_SECONDS_MIN
    assert bench.count("retries", "hedge") == 1
    assert len([digest for request in chunk_requests(providers[fast]) for digest in request.digests]) <= 42


def test_one_chunk_is_asked_of_no_more_than_two_slow_providers() -> None:
    blob = make_blob(payload(1024), 1024)
    providers = {peer_id: Provider({blob.blob_id: blob}, change=delay_chunks) for peer_id in peers(4)}
    bench = Bench(dict(providers))
    bench.want(blob)
    while bench.count("retries", "hedge") < 2:
        bench.step()
    assert sum(len(chunk_requests(provider)) for provider in providers.values()) == HEDGES_MAX
    bench.run(blob)
    assert bench.data(blob) == payload(1024)


def test_a_link_below_the_least_rate_finishes_with_more_patience() -> None:
    """A chunk that takes longer than a request for it is allowed at first."""
    blob = make_blob(payload(2 * 1024), 1024)
    limits_seen: list[float] = []

    class Slow(Bench):
        def send(self, effect: SendRequest) -> None:
            if isinstance(effect.message, GetChunks):
                limits_seen.append(effect.timeout_seconds)
                if effect.timeout_seconds < 150.0:
                    self.push(effect.timeout_seconds, RequestFailed(effect.request_id, effect.peer_id, "timeout"))
                    return
            super().send(effect)

    bench = Slow({PUBLISHER: Provider({blob.blob_id: blob})})
    bench.want(blob)
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert limits_seen == sorted(limits_seen)


def test_readers_that_fetch_the_same_blob_take_chunks_of_one_another() -> None:
    """The publisher is asked for what the other reader lacks, not for what it holds."""
    blob = make_blob(payload(40 * 1024), 1024)
    half = Blob(blob.chunk_list, dict(list(blob.chunks.items())[:20]), blob.manifest)
    reader = peers(1)[0]
    providers = {PUBLISHER: Provider({blob.blob_id: blob}), reader: Provider({blob.blob_id: half})}
    bench = Bench(providers)
    bench.want(blob)
    bench.run(blob)
    assert bench.data(blob) == payload(40 * 1024)
    asked = [digest for request in chunk_requests(providers[PUBLISHER]) for digest in request.digests]
    assert not set(asked) & set(half.chunks)
    progress = bench.fetcher.progress()
    assert (progress.publisher_size_bytes, progress.reader_size_bytes) == (20 * 1024, 20 * 1024)


def test_what_slow_readers_owe_is_called_back_where_the_publisher_is_quick() -> None:
    blob = make_blob(payload(40 * 1024), 1024)
    slow = peers(3)
    providers = {PUBLISHER: Provider({blob.blob_id: blob})}
    providers |= {peer_id: Provider({blob.blob_id: blob}, change=delay_chunks) for peer_id in slow}
    bench = Bench(providers)
    bench.want(blob)
    bench.run(blob)
    assert bench.fetcher.is_whole(blob.blob_id)
    assert bench.now <= 15.0
    cancelled = [effect for effect in bench.log if isinstance(effect, CancelRequest)]
    assert {effect.peer_id for effect in cancelled} == set(slow)
    assert {effect.blob_id for effect in cancelled} == {blob.blob_id}
    assert bench.count("retries", "thin-upload") == len(cancelled)
    bench.run_for(100.0)
    assert bench.fetcher.chunks_in_flight == 0, "what comes late is ignored"
    assert bench.strikes() == []


def delay_chunks(answer: Answer) -> Answer:
    """Let every chunk take a minute, as if over a thin uplink."""
    return [(delay + 60.0 if isinstance(reply, ChunkReply) else delay, reply) for delay, reply in answer]


@pytest.mark.parametrize("change", ["unwanted", "gone"])
def test_a_miss_of_what_nobody_wants_or_of_who_has_left_is_held_against_nobody(change: str) -> None:
    blob = make_blob(payload(2048), 1024)

    def refuse(answer: Answer) -> Answer:
        is_list = isinstance(answer[0][1], ChunkListReply)
        return answer if is_list else [(1.0, Refusal("not-found", "", 0))]

    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob}, change=refuse)})
    bench.want(blob)
    while not chunk_requests(bench.providers[PUBLISHER]):
        bench.step()
    if change == "unwanted":
        bench.execute(bench.fetcher.set_wants([]))
    else:
        bench.sources.disconnect(PUBLISHER)
    bench.run_for(5.0)
    assert bench.strikes() == []
    bench.providers[PUBLISHER].change = lambda answer: answer
    bench.sources.connect(PUBLISHER)
    bench.want(blob)
    bench.run(blob)
    assert bench.data(blob) == payload(2048)


def test_a_source_that_refuses_is_put_off_as_long_as_it_asks() -> None:
    blob = make_blob(payload(2048), 1024)
    first = itertools.count()

    def refuse(answer: Answer) -> Answer:
        if isinstance(answer[0][1], ChunkReply) and next(first) == 0:
            return [(0.01, Refusal("rate", "", 30_000))]
        return answer

    bench = Bench({PUBLISHER: Provider({blob.blob_id: blob}, change=refuse)})
    bench.want(blob)
    bench.run(blob)
    assert bench.data(blob) == payload(2048)
    assert bench.count("retries", "refused") == 1
    assert bench.now >= 30.0
