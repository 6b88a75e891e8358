"""Chunk lists arrive page by page from one source each, and are opened or refused exactly once."""

from __future__ import annotations

import itertools

from pulsenet.chain.records import Kind, Manifest
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import Count, Effect, SendRequest, StoreChunkList, StrikePeer
from pulsenet.node.events import ReplyReceived, RequestDone, RequestFailed
from pulsenet.node.list_fetch import (
    GRACE_SECONDS,
    LISTS_IN_FLIGHT_MAX,
    PAGE_TIMEOUT_SECONDS,
    PAGES_SPARE,
    BlobWant,
    ListFetcher,
    ListOutcome,
    open_list,
)
from pulsenet.node.sources import Sources
from pulsenet.testing.script import ScriptedPublisher, make_data
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.messages import ChunkListReply, GetChunkList, Message, Refusal

A, B = (PeerId(bytes([i]) * 32) for i in (1, 2))


class Bench:
    def __init__(self, blob_count: int = 1, peers: tuple[PeerId, ...] = (A,)) -> None:
        self.publisher = ScriptedPublisher()
        self.manifests: list[Manifest] = []
        for number in range(1, blob_count + 1):
            digest = self.publisher.add(Kind.ANCHOR, None, Version(0, number), make_data(f"{number}", 200))
            self.manifests.append(self.publisher.manifests[digest])
        self.sources = Sources(lambda count: 0)
        for peer_id in peers:
            self.sources.connect(peer_id)
        ids = itertools.count()
        self.fetcher = ListFetcher(self.sources, lambda: next(ids))
        self.fetcher.set_wants([BlobWant(manifest, None) for manifest in self.manifests])

    def pump(self, now: float = 0.0) -> list[SendRequest]:
        return [effect for effect in self.fetcher.pump(now) if isinstance(effect, SendRequest)]

    def reply(self, request: SendRequest, message: Message) -> tuple[list[Effect], ListOutcome | None]:
        return self.fetcher.handle(ReplyReceived(request.request_id, request.peer_id, message), 0.0)

    def page(self, request: SendRequest, size_bytes: int = 1 << 20) -> ChunkListReply:
        assert isinstance(request.message, GetChunkList)
        data = self.publisher.store.lists[request.message.blob_id]
        offset = request.message.offset
        return ChunkListReply(request.message.blob_id, len(data), data[offset : offset + size_bytes])


def test_a_list_is_stored_and_opened() -> None:
    bench = Bench()
    (request,) = bench.pump()
    effects, outcome = bench.reply(request, bench.page(request))
    blob_id = bench.manifests[0].blob_id
    data = bench.publisher.store.lists[blob_id]
    assert effects == [StoreChunkList(blob_id, data)]
    assert outcome == ListOutcome(blob_id, chunk_list=ChunkList.decode(data))
    assert bench.pump() == []


def test_pages_follow_one_another_from_one_source() -> None:
    bench = Bench(peers=(A, B))
    offsets, peers, outcome = [], set(), None
    while outcome is None:
        (request,) = bench.pump()
        assert isinstance(request.message, GetChunkList)
        offsets.append(request.message.offset)
        peers.add(request.peer_id)
        _, outcome = bench.reply(request, bench.page(request, size_bytes=50))
    assert offsets == [0, 50, 100, 150]
    assert len(peers) == 1


def test_a_source_that_fails_between_pages_is_replaced_from_the_start() -> None:
    bench = Bench(peers=(A, B))
    (request,) = bench.pump()
    bench.reply(request, bench.page(request, size_bytes=50))
    (second,) = bench.pump()
    bench.fetcher.handle(RequestFailed(second.request_id, second.peer_id, "closed"), 0.0)
    (third,) = bench.pump()
    assert third.peer_id != second.peer_id
    assert isinstance(third.message, GetChunkList)
    assert third.message.offset == 0


def test_a_source_that_gives_a_list_in_crumbs_is_left_for_another() -> None:
    bench = Bench(peers=(A, B))
    (request,) = bench.pump()
    first, crumb_count = request.peer_id, 0
    while request.peer_id == first:
        bench.reply(request, bench.page(request, size_bytes=1))
        crumb_count += 1
        assert crumb_count <= 2 + PAGES_SPARE
        (request,) = bench.pump()
    assert isinstance(request.message, GetChunkList)
    assert request.message.offset == 0
    _, outcome = bench.reply(request, bench.page(request))
    assert outcome is not None
    assert outcome.chunk_list is not None


def test_a_source_without_the_list_is_named() -> None:
    bench = Bench()
    (request,) = bench.pump()
    assert bench.reply(request, Refusal("not-found", "", 0)) == (
        [],
        ListOutcome(bench.manifests[0].blob_id, missed_by=A),
    )
    (request,) = bench.pump()
    assert bench.reply(request, Refusal("busy", "", 1000)) == ([Count("retries", "refused")], None)
    assert bench.pump() == []


def test_lists_in_flight_are_bounded() -> None:
    bench = Bench(blob_count=9, peers=(A, B))
    assert len(bench.pump()) == LISTS_IN_FLIGHT_MAX
    assert bench.fetcher.requests_in_flight == LISTS_IN_FLIGHT_MAX


def test_an_overdue_request_is_given_up() -> None:
    bench = Bench()
    bench.pump()
    wake = bench.fetcher.next_wake(0.0)
    assert wake == PAGE_TIMEOUT_SECONDS + GRACE_SECONDS
    assert Count("retries", "timeout") in bench.fetcher.pump(wake)
    assert bench.fetcher.next_wake(wake) is None


def test_a_request_that_ends_without_a_page_counts_as_closed() -> None:
    bench = Bench()
    (request,) = bench.pump()
    assert bench.fetcher.handle(RequestDone(request.request_id, A), 0.0) == ([Count("retries", "closed")], None)


def test_a_lost_peer_frees_its_request() -> None:
    bench = Bench(peers=(A, B))
    (request,) = bench.pump()
    assert bench.fetcher.lose_peer(request.peer_id, 0.0) == [Count("retries", "closed")]
    assert len(bench.pump()) == 1


def test_a_page_of_a_list_no_longer_wanted_is_dropped() -> None:
    bench = Bench()
    (request,) = bench.pump()
    bench.fetcher.set_wants([])
    assert bench.reply(request, bench.page(request)) == ([], None)


def test_a_page_asked_for_before_a_list_was_wanted_anew_spoils_nothing() -> None:
    bench = Bench()
    (early,) = bench.pump()
    wants = [BlobWant(bench.manifests[0], None)]
    bench.fetcher.set_wants([])
    bench.fetcher.set_wants(wants)
    (again,) = bench.pump()
    assert bench.reply(early, bench.page(early, 10)) == ([], None)
    effects, outcome = bench.reply(again, bench.page(again))
    assert outcome is not None
    assert not [effect for effect in effects if isinstance(effect, StrikePeer)]


def test_opening_blames_the_signer_of_a_list_that_is_authentic_and_wrong() -> None:
    bench = Bench()
    manifest = bench.manifests[0]
    data = bench.publisher.store.lists[manifest.blob_id]
    outcome, effects = open_list(manifest, data)
    assert outcome.chunk_list is not None
    assert effects == []
    other = bench.publisher.add(Kind.ANCHOR, None, Version(0, 9), b"x")
    outcome, effects = open_list(bench.publisher.manifests[other], data)
    assert (outcome.refused, effects) == ("chunk-list", [Count("rejected", "chunk-list")])
    assert outcome.blob_id != Digest(b"")
