"""The chunks of one request come over several streams where they are free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from networks import HELLO, PEER, open_line

from pulsenet import limits
from pulsenet.errors import UnavailableError
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.wire.messages import ChunkReply, GetChunks, Message
from pulsenetd.network.pacing import Gate, UploadDesk
from pulsenetd.network.provider import Provider
from pulsenetd.network.requester import Requester, split_chunks
from pulsenetd.network.streams import Deadlines, PeerRefusedError, Traffic

CHUNKS = [bytes([number]) * 10 for number in range(limits.CHUNKS_PER_REQUEST_MAX)]
DIGESTS = tuple(map(compute_digest, CHUNKS))
BULK_STREAMS = limits.STREAMS_PER_PEER_MAX - 1
PARTS = min(BULK_STREAMS, len(DIGESTS))

Answer = Callable[[PeerId, GetChunks], Awaitable[list[Message]]]


@contextlib.asynccontextmanager
async def connected(
    answer: Any, *, desk: UploadDesk | None = None, gate: Gate | None = None, served: Traffic | None = None
) -> AsyncIterator[tuple[Requester, Traffic]]:
    """A requester of a provider over loopback TCP instead of libp2p."""
    provider = Provider(HELLO, Deadlines(), served or Traffic(), desk)
    provider.handler = answer

    traffic = Traffic()
    make = partial(Requester, HELLO, deadlines=Deadlines(), traffic=traffic, gate=gate)
    async with open_line(provider, make) as requester:
        yield requester, traffic


def replies_to(digests: tuple[Digest, ...]) -> list[Message]:
    return [ChunkReply(digest, CHUNKS[DIGESTS.index(digest)]) for digest in digests]


async def test_chunks_are_asked_for_over_every_free_stream_and_returned_in_order() -> None:
    asked: list[tuple[Digest, ...]] = []
    all_asked = asyncio.Event()

    async def answer(_peer: PeerId, message: GetChunks) -> list[Message]:
        asked.append(message.digests)
        if len(asked) == PARTS:
            all_asked.set()
        await all_asked.wait()
        return replies_to(message.digests)

    async with connected(answer) as (requester, traffic):
        told: list[Message] = []
        replies = await requester.request(PEER, GetChunks(DIGESTS), 10, told.append)
        assert replies == replies_to(DIGESTS)
        assert sorted(map(repr, told)) == sorted(map(repr, replies))
        assert sorted(digest for part in asked for digest in part) == sorted(DIGESTS)
        assert traffic.streams_opened["outbound"] == PARTS


async def test_what_one_stream_brings_counts_although_another_fails() -> None:
    lost = DIGESTS[-1]

    async def answer(_peer: PeerId, message: GetChunks) -> list[Message]:
        if lost in message.digests:
            raise UnavailableError("gone")
        return replies_to(message.digests)

    async with connected(answer) as (requester, _):
        told: list[Message] = []
        with pytest.raises(PeerRefusedError, match="gone"):
            await requester.request(PEER, GetChunks(DIGESTS), 10, told.append)
        brought = {reply.digest for reply in told if isinstance(reply, ChunkReply)}
        assert brought == {digest for part in split_chunks(GetChunks(DIGESTS), PARTS)[:-1] for digest in part.digests}


async def test_a_request_is_not_split_where_one_stream_is_left() -> None:
    counts: list[int] = []
    changed = asyncio.Condition()
    release = asyncio.Event()

    async def answer(_peer: PeerId, message: GetChunks) -> list[Message]:
        async with changed:
            counts.append(len(message.digests))
            changed.notify_all()
        await release.wait()
        return replies_to(message.digests)

    async def wait_asked(count: int) -> None:
        async with changed:
            await changed.wait_for(lambda: len(counts) == count)

    async with connected(answer) as (requester, _):
        one = GetChunks(DIGESTS[:1])
        held = [asyncio.create_task(requester.request(PEER, one, 10)) for _ in range(BULK_STREAMS - 1)]
        await wait_asked(BULK_STREAMS - 1)
        last = asyncio.create_task(requester.request(PEER, GetChunks(DIGESTS), 10))
        await wait_asked(BULK_STREAMS)
        assert counts[-1] == len(DIGESTS)
        release.set()
        assert await last == replies_to(DIGESTS)
        await asyncio.gather(*held)


@pytest.mark.parametrize("part_count", [0, 1, 2, 3, 4, 9])
def test_a_split_keeps_every_chunk_and_their_order(part_count: int) -> None:
    parts = split_chunks(GetChunks(DIGESTS), part_count)
    assert tuple(digest for part in parts for digest in part.digests) == DIGESTS
    assert len(parts) == max(1, min(part_count, len(DIGESTS)))
    assert max(len(part.digests) for part in parts) - min(len(part.digests) for part in parts) <= 1
    assert split_chunks(GetChunks(()), part_count) == [GetChunks(())]


async def test_a_request_that_is_called_back_frees_the_providers_slots() -> None:
    """Its reader takes a chunk now and then, so that the provider cannot get rid of the rest."""

    async def answer(_peer: PeerId, message: GetChunks) -> list[Message]:
        return [ChunkReply(digest, bytes(limits.CHUNK_SIZE_BYTES)) for digest in message.digests]

    desk, first = UploadDesk(), asyncio.Event()
    async with connected(answer, desk=desk, gate=Gate(1_000)) as (requester, _):
        download = asyncio.create_task(
            requester.request(PEER, GetChunks(DIGESTS + DIGESTS), 100, lambda _: first.set())
        )
        await first.wait()
        assert desk.serving_count > 0
        download.cancel()
        with pytest.raises(asyncio.CancelledError):
            await download
        for _ in range(1_000):
            if not desk.serving_count:
                break
            await asyncio.sleep(0.01)
        assert desk.serving_count == 0


async def test_both_ends_learn_what_their_link_carries() -> None:
    chunks = [bytes([number]) * limits.CHUNK_SIZE_BYTES_MAX for number in range(2)]
    digests = tuple(map(compute_digest, chunks))
    served = Traffic()

    async def answer(_peer: PeerId, request: GetChunks) -> list[Message]:
        return [ChunkReply(digest, chunks[digests.index(digest)]) for digest in request.digests]

    async with connected(answer, served=served) as (requester, traffic):
        assert traffic.meters["received"].mbps is None
        await requester.request(PEER, GetChunks(digests), 10.0)
    received, sent = traffic.meters["received"].mbps, served.meters["sent"].mbps
    assert received is not None
    assert sent is not None
    assert min(received, sent) > 1.0
    assert traffic.meters["sent"].mbps is None, "of what it serves itself"
