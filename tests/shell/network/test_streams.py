"""One framed stream: bounds and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.wire.framing import encode_message
from pulsenet.wire.messages import ChunkReply, GetHead, HeadReply, Message, Refusal
from pulsenetd.network.streams import (
    PEERS_COUNTED_MAX,
    Deadlines,
    FramedStream,
    PeerRefusedError,
    PeerUnavailableError,
    Traffic,
)

QUICK = Deadlines(0.3, 0.3, 0.3, 0.3, 0.3)


@contextlib.asynccontextmanager
async def pair(deadlines: Deadlines = QUICK) -> AsyncIterator[tuple[FramedStream, asyncio.StreamWriter, Traffic]]:
    """A framed stream and the raw writer of its other end."""
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(lambda *ends: accepted.put_nowait(ends), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    _, raw_writer = await accepted.get()
    traffic = Traffic()
    stream = FramedStream(reader, writer, deadlines, traffic)
    try:
        yield stream, raw_writer, traffic
    finally:
        stream.abort()
        raw_writer.close()
        server.close()


async def send_many(stream: FramedStream, message: Message, count: int) -> None:
    for _ in range(count):
        await stream.send(message)
        await asyncio.sleep(0.01)


async def test_messages_arrive_however_they_are_split() -> None:
    async with pair() as (stream, raw, traffic):
        data = encode_message(HeadReply(b"abc"))
        for byte in data:
            raw.write(bytes([byte]))
            await raw.drain()
            await asyncio.sleep(0)
        assert await stream.receive() == HeadReply(b"abc")
        raw.write(data + data)
        assert await stream.receive() == HeadReply(b"abc")
        assert not stream.is_quiet
        assert await stream.receive() == HeadReply(b"abc")
        assert stream.is_quiet
        assert traffic.bytes["received", "head"] == 3 * len(data)
        raw.close()
        assert await stream.receive() is None
        assert not stream.is_quiet


async def test_silence_ends_at_the_stall_deadline() -> None:
    async with pair() as (stream, raw, _):
        with pytest.raises(PeerUnavailableError, match="stopped sending") as caught:
            await stream.receive()
        assert caught.value.reason == "timeout"
        with pytest.raises(PeerUnavailableError, match=r"0\.05 s"):
            await stream.receive(first_byte_seconds=0.05)
        raw.write(encode_message(GetHead()))
        assert await stream.receive() == GetHead()


async def test_a_byte_now_and_then_does_not_hold_a_place_for_ever() -> None:
    """A-PEER-1: the whole message has a limit too."""
    async with pair() as (stream, raw, _):

        async def drip() -> None:
            for byte in encode_message(HeadReply(bytes(100))):
                raw.write(bytes([byte]))
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        with pytest.raises(PeerUnavailableError) as caught:
            await stream.receive(message_seconds=0.5)
        assert caught.value.reason == "timeout"
        dripping.cancel()


async def test_a_peer_that_does_not_read_is_given_up() -> None:
    """A-PEER-1 the other way round."""
    async with pair() as (stream, _, traffic):
        chunk = ChunkReply(Digest(bytes(32)), os.urandom(limits.CHUNK_SIZE_BYTES))
        with pytest.raises(PeerUnavailableError, match="stopped reading"):
            await send_many(stream, chunk, 64)
        assert traffic.bytes["sent", "chunk"] < 64 << 20


async def test_a_stream_cut_in_mid_frame_is_closed_and_counted_without_a_strike() -> None:
    """A-CHK-7."""
    async with pair() as (stream, raw, traffic):
        raw.write(encode_message(HeadReply(b"abc"))[:-1])
        raw.close()
        with pytest.raises(PeerUnavailableError) as caught:
            await stream.receive()
        assert caught.value.reason == "closed"
        assert traffic.rejected == {"framing": 1}


async def test_a_huge_length_is_refused_before_it_is_awaited() -> None:
    async with pair() as (stream, raw, traffic):
        raw.write(b"\xff\xff\xff\x7f")
        with pytest.raises(RemoteProtocolError, match="framing"):
            await stream.receive()
        assert traffic.bytes["received", "other"] == 4


async def test_a_whole_chunk_passes() -> None:
    async with pair() as (stream, raw, _):
        data = os.urandom(limits.CHUNK_SIZE_BYTES)
        raw.write(encode_message(ChunkReply(compute_digest(data), data)))
        assert await stream.receive() == ChunkReply(compute_digest(data), data)


async def test_sending_on_a_lost_connection_is_closed() -> None:
    async with pair() as (stream, raw, _):
        raw.transport.abort()
        with pytest.raises(PeerUnavailableError) as caught:
            await send_many(stream, HeadReply(bytes(1000)), 20)
        assert caught.value.reason == "closed"


def test_a_refusal_names_its_code() -> None:
    assert str(PeerRefusedError(Refusal("busy", "", 5))) == "refused: busy"
    assert PeerRefusedError(Refusal("busy", "later", 5)).refusal.retry_after_ms == 5


def test_strangers_cannot_make_the_count_of_bytes_by_peer_grow() -> None:
    traffic = Traffic()
    first, *others = (PeerId(number.to_bytes(32)) for number in range(PEERS_COUNTED_MAX + 2))
    for peer_id in others:
        traffic.note_chunk(peer_id, "sent", "patch", 1)
        traffic.note_chunk(first, "received", "patch", 1)  # who goes on moving bytes is not forgotten
    assert len(traffic.peer_bytes) == PEERS_COUNTED_MAX
    assert traffic.peer_bytes[first] == {"received": PEERS_COUNTED_MAX + 1}
    assert others[0] not in traffic.peer_bytes
    assert traffic.blob_bytes == {
        ("sent", "patch"): PEERS_COUNTED_MAX + 1,
        ("received", "patch"): PEERS_COUNTED_MAX + 1,
    }
