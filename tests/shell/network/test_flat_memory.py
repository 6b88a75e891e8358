"""A large blob to a slow reader goes through little memory: whoever is slow slows down everybody before it."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.ids import PeerId, RunId, compute_digest
from pulsenet.wire.messages import ChunkReply, GetChunks, Hello, Message
from pulsenetd.identity import to_libp2p_bytes
from pulsenetd.network.p2pd import RawStream
from pulsenetd.network.pacing import UPLOAD_SLOTS_MAX, Caps, UploadDesk
from pulsenetd.network.provider import Provider
from pulsenetd.network.requester import Requester
from pulsenetd.network.streams import Deadlines, PeerRefusedError, Traffic

REQUEST_COUNT = 64
DIGESTS = [compute_digest(bytes([number])) for number in range(REQUEST_COUNT * limits.CHUNKS_PER_REQUEST_MAX)]
TOTAL_SIZE_BYTES = len(DIGESTS) * limits.CHUNK_SIZE_BYTES
HELD_SIZE_BYTES_MAX = TOTAL_SIZE_BYTES // 4
"""What both ends together, or one p2pd, may hold of it: more than the requests under way, and far from all."""

SLOW = Caps(download=24 << 20)
"""Loopback brings ten times as much."""


def read_peak_size_bytes(process_id: int) -> int:
    """Return the most memory that a process ever had."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


async def answer(_peer: PeerId, message: Message) -> list[Message]:
    assert isinstance(message, GetChunks)
    return [ChunkReply(digest, bytes(limits.CHUNK_SIZE_BYTES)) for digest in message.digests]


async def test_a_large_blob_to_a_slow_reader_goes_through_little_memory(make_node: Any) -> None:
    async with make_node("provider") as provider, make_node("reader", caps=SLOW) as reader:
        provider.transport.serve(answer)
        await reader.meet(provider)
        arrived_size_bytes = 0

        def take(reply: Message) -> None:
            nonlocal arrived_size_bytes
            assert isinstance(reply, ChunkReply)
            arrived_size_bytes += len(reply.data or b"")

        async def fetch(number: int) -> None:
            first = number * limits.CHUNKS_PER_REQUEST_MAX
            digests = tuple(DIGESTS[first : first + limits.CHUNKS_PER_REQUEST_MAX])
            await reader.transport.request(provider.peer_id, GetChunks(digests), 100, take)

        await fetch(0)
        processes = [node.transport.p2pd.process_id for node in (provider, reader)]
        before = [read_peak_size_bytes(process_id) for process_id in processes]
        tracemalloc.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(1, REQUEST_COUNT):
                    tasks.create_task(fetch(number))
            _, held_size_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        after = [read_peak_size_bytes(process_id) for process_id in processes]
        assert arrived_size_bytes == TOTAL_SIZE_BYTES
        grown = [now - earlier for now, earlier in zip(after, before, strict=True)]
        print(f"held {held_size_bytes >> 20} MiB of {TOTAL_SIZE_BYTES >> 20}; p2pd grew by", [s >> 20 for s in grown])
        assert held_size_bytes < HELD_SIZE_BYTES_MAX
        assert max(grown) < HELD_SIZE_BYTES_MAX


READER_COUNT = 200


@pytest.mark.unmeasured
async def test_two_hundred_readers_at_once_are_served_in_the_memory_of_the_slots() -> None:
    """A-PEER-2: each asks for a chunk in the same moment; who finds no slot comes back."""
    hello = Hello(RunId(bytes(32)), 1, 1, "seed", "test")
    provider = Provider(hello, Deadlines(), Traffic(), UploadDesk(bytes_per_second=64 << 20))
    provider.handler = answer

    async def read(number: int) -> None:
        async def accept(stream_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await provider.serve_stream(to_libp2p_bytes(PeerId(number.to_bytes(32, "big"))), stream_reader, writer)

        async def open_raw_stream(_peer: PeerId, _timeout_seconds: float) -> RawStream:
            return await asyncio.open_connection(*server.sockets[0].getsockname())

        # One for each reader: a connection over TCP names nobody.
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        requester = Requester(hello, open_raw_stream, Deadlines(), Traffic())
        requester.open()
        while True:
            try:
                await requester.request(PeerId(bytes(32)), GetChunks((DIGESTS[0],)), 100)
            except PeerRefusedError as error:
                if error.refusal.code != "busy":
                    raise
                await asyncio.sleep(error.refusal.retry_after_ms / 1000)
            else:
                break
        requester.close()
        server.close()

    tracemalloc.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(READER_COUNT):
                tasks.create_task(read(number))
        _, held_size_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    await provider.close()
    print("MiB held", held_size_bytes >> 20, "of", READER_COUNT * limits.CHUNK_SIZE_BYTES >> 20)
    # Each slot holds a chunk and its frame, and both ends are this process.
    assert held_size_bytes < 4 * UPLOAD_SLOTS_MAX * limits.CHUNK_SIZE_BYTES
