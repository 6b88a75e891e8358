"""Fetching what members share, each blob from the one member that has it."""

from __future__ import annotations

import itertools

import pytest

from pulsenet import limits
from pulsenet.chain.records import SliceName
from pulsenet.ids import PeerId, compute_digest
from pulsenet.node.effects import SendRequest, StoreChunk
from pulsenet.node.events import ChunkStored, PeerConnected, PeerLost, ReplyReceived, RequestDone
from pulsenet.node.mixing.blobs import Blobs
from pulsenet.node.sources import SOURCES_MAX
from pulsenet.testing.fakes import Chance, FakeStore
from pulsenet.wire.chunks import ChunkCutter
from pulsenet.wire.messages import ChunkListReply, ChunkReply, GetChunkList, GetChunks

MEMBER = PeerId(b"m" * 32)
CHUNK_COUNT = 24


@pytest.mark.parametrize("chunk_seconds", [0.1, 4.2, 9.0])
def test_a_member_on_a_thin_line_is_kept_busy_however_slow_it_looks(chunk_seconds: float) -> None:
    """Asked for a second's worth, one of a pair would fall silent while requests wait behind the other's chunks."""
    cutter, size = ChunkCutter(), limits.CHUNK_SIZE_BYTES
    content = [bytes([place]) * size for place in range(CHUNK_COUNT)]
    cut = [chunk for piece in content for chunk in cutter.feed(piece)] + cutter.finish()
    chunks = {compute_digest(data): bytes(data) for _, data in cut}
    name = SliceName(cutter.chunk_list.blob_id, CHUNK_COUNT * size)
    blobs = Blobs(Chance(1), FakeStore(), itertools.count(1).__next__)
    blobs.handle(PeerConnected(MEMBER, (), outbound=True), 0.0)
    effects = [*blobs.set_wants({name.blob_id: (name, MEMBER)}), *blobs.pump(0.0)]
    now, owed, least_owed = 0.0, [], []
    while not blobs.is_whole(name.blob_id):
        following = []
        for effect in effects:
            if isinstance(effect, SendRequest) and isinstance(effect.message, GetChunkList):
                encoded = cutter.chunk_list.encode()
                reply = ChunkListReply(name.blob_id, len(encoded), encoded)
                following += blobs.handle(ReplyReceived(effect.request_id, MEMBER, reply), now)
                following += blobs.handle(RequestDone(effect.request_id, MEMBER), now)
            elif isinstance(effect, SendRequest) and isinstance(effect.message, GetChunks):
                owed += [(effect.request_id, digest) for digest in effect.message.digests]
            elif isinstance(effect, StoreChunk):
                following += blobs.handle(ChunkStored(effect.digest), now)
        if not following and owed:
            # One chunk after another, in the order in which they were asked for.
            now += chunk_seconds
            request_id, digest = owed.pop(0)
            following += blobs.handle(ReplyReceived(request_id, MEMBER, ChunkReply(digest, chunks[digest])), now)
            if request_id not in {other for other, _ in owed}:
                following += blobs.handle(RequestDone(request_id, MEMBER), now)
            least_owed.append(len(owed))
        effects = [*following, *blobs.pump(now)]
    assert len(least_owed) == CHUNK_COUNT
    # Whenever a chunk came another was already asked for, but at the beginning and at the end.
    assert min(least_owed[1:-4]) >= 1
    assert max(least_owed) >= 3


@pytest.mark.parametrize("comes_first", [True, False])
def test_readers_who_came_first_keep_no_member_out(comes_first: bool) -> None:
    name = SliceName(compute_digest(b"list"), 1_000)
    blobs = Blobs(Chance(1), FakeStore(), itertools.count(1).__next__)
    for number in range(SOURCES_MAX):
        blobs.handle(PeerConnected(PeerId(number.to_bytes(32, "big")), (), outbound=False), 0.0)
    if comes_first:
        blobs.handle(PeerConnected(MEMBER, (), outbound=False), 0.0)
    effects = [*blobs.set_wants({name.blob_id: (name, MEMBER)}), *blobs.pump(0.0)]
    if not comes_first:
        blobs.handle(PeerConnected(MEMBER, (), outbound=False), 0.0)
        effects += blobs.pump(0.0)
    assert [effect.peer_id for effect in effects if isinstance(effect, SendRequest)] == [MEMBER]


def test_a_member_that_is_gone_is_not_taken_for_here() -> None:
    name = SliceName(compute_digest(b"list"), 1_000)
    blobs = Blobs(Chance(1), FakeStore(), itertools.count(1).__next__)
    blobs.handle(PeerConnected(MEMBER, (), outbound=True), 0.0)
    blobs.handle(PeerLost(MEMBER, "closed"), 0.0)
    assert not [*blobs.set_wants({name.blob_id: (name, MEMBER)}), *blobs.pump(0.0)]
