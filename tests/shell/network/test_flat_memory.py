"""A large blob to a slow reader goes through little memory: whoever is slow slows down everybody before it."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

from pulsenet import limits
from pulsenet.ids import PeerId, compute_digest
from pulsenet.wire.messages import ChunkReply, GetChunks, Message
from pulsenetd.network.pacing import Caps

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


def test_a_large_blob_to_a_slow_reader_goes_through_little_memory(make_node: Any) -> None:
    async def main() -> None:
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
            print(
                f"held {held_size_bytes >> 20} MiB of {TOTAL_SIZE_BYTES >> 20}; p2pd grew by", [s >> 20 for s in grown]
            )
            assert held_size_bytes < HELD_SIZE_BYTES_MAX
            assert max(grown) < HELD_SIZE_BYTES_MAX

    asyncio.run(asyncio.wait_for(main(), 110))
