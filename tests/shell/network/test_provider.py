"""Rules of the answering side; the streams themselves are tested with the transport."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest, PeerId, RunId
from pulsenet.wire.framing import FrameDecoder, encode_message
from pulsenet.wire.messages import (
    Ack,
    ChunkReply,
    GetChunks,
    GetHead,
    GetRecords,
    HeadReply,
    Hello,
    Message,
    PushHead,
    PushReply,
    RecordsReply,
    Refusal,
)
from pulsenetd.identity import to_libp2p_bytes
from pulsenetd.network import admission
from pulsenetd.network.admission import REQUESTS_BURST, STREAMS_ACCEPTED_PER_PEER_MAX
from pulsenetd.network.pacing import RETRY_MS, UploadDesk
from pulsenetd.network.provider import (
    REPLY_TYPES,
    Provider,
    check_hello,
    negotiate_version,
)
from pulsenetd.network.streams import Deadlines, Traffic

RUN = RunId(bytes(32))
PEER = PeerId(bytes(range(32)))
QUICK = Deadlines(0.3, 0.3, 0.3, 0.3, 0.3)


def hello(first: int = 1, last: int = 1, run_id: RunId = RUN) -> Hello:
    return Hello(run_id, first, last, "seed", "test")


def test_two_nodes_speak_the_newest_version_both_know() -> None:
    assert negotiate_version(hello(1, 3), hello(2, 5)) == 3
    assert negotiate_version(hello(1, 1), hello(1, 1)) == 1
    assert negotiate_version(hello(1, 1), hello(2, 3)) is None
    assert negotiate_version(hello(4, 5), hello(1, 3)) is None


def test_hello_is_refused_for_another_run_or_version_and_anything_else_is_a_violation() -> None:
    assert check_hello(hello(), hello()) is None
    other_run = check_hello(hello(), hello(run_id=RunId(bytes([1]) * 32)))
    assert other_run is not None
    assert other_run.code == "wrong-run"
    newer = check_hello(hello(), hello(2, 2))
    assert newer is not None
    assert newer.code == "wire-version"
    with pytest.raises(RemoteProtocolError, match="unexpected-message"):
        check_hello(hello(), GetHead())


def test_every_message_is_a_request_or_a_reply_or_frames_them() -> None:
    answers = set(REPLY_TYPES.values())
    others = {Hello, Ack, Refusal}
    assert set(REPLY_TYPES) | answers | others == set(Message.__args__)
    assert not set(REPLY_TYPES) & (answers | others)


async def converse(provider: Any, *sent: Message, peer: bytes = to_libp2p_bytes(PEER)) -> list[Message]:
    """Serve one stream over a socket pair; send the messages, return what came back until the end."""
    done = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await provider.serve_stream(peer, reader, writer)
        finally:
            done.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    for message in sent:
        writer.write(encode_message(message))
    decoder = FrameDecoder()
    received = []
    with contextlib.suppress(ConnectionResetError):  # how the end looks when something we sent was not read
        while data := await asyncio.wait_for(reader.read(1 << 16), 5):
            received += decoder.feed(data)
    await asyncio.wait_for(done.wait(), 5)
    writer.close()
    server.close()
    return received


async def serve(
    *sent: Message, handler: Any = None, peer: bytes = to_libp2p_bytes(PEER)
) -> tuple[list[Message], Provider]:
    provider = Provider(hello(), QUICK, Traffic())
    provider.handler = handler
    return await converse(provider, *sent, peer=peer), provider


async def test_a_stream_of_a_key_that_is_not_ed25519_is_dropped() -> None:
    received, provider = await serve(hello(), peer=b"\x12\x20" + bytes(32))
    assert received == []
    assert provider._traffic.rejected == {"peer-id": 1}
    assert provider.doorkeeper.peers == frozenset()


async def test_a_disk_failure_is_told_as_a_refusal() -> None:
    async def fail(_peer: PeerId, _message: Message) -> list[Message]:
        raise StorageError("disk full", "enospc")

    received, _ = await serve(hello(), GetHead(), handler=fail)
    assert received[0] == hello()
    assert isinstance(received[1], Refusal)
    assert received[1].code == "storage"


async def test_a_requester_that_never_acknowledges_loses_its_place() -> None:
    async def answer(_peer: PeerId, _message: Message) -> list[Message]:
        return [ChunkReply(Digest(bytes(32)), b"x")]

    received, provider = await serve(hello(), GetChunks((Digest(bytes(32)),)), handler=answer)
    assert [type(message) for message in received] == [Hello, ChunkReply]
    assert provider.doorkeeper.peers == frozenset()
    received, provider = await serve(hello(), GetChunks((Digest(bytes(32)),)), GetHead(), handler=answer)
    assert provider._traffic.rejected == {"unexpected-message": 1}


async def test_a_request_for_no_chunks_is_answered_by_none() -> None:
    async def answer(_peer: PeerId, message: Message) -> list[Message]:
        return [] if isinstance(message, GetChunks) else [HeadReply(None)]

    received, provider = await serve(hello(), GetChunks(()), Ack(), GetHead(), handler=answer)
    assert [type(message) for message in received] == [Hello, HeadReply]
    assert provider._traffic.rejected == {}


async def test_a_request_before_the_chunks_are_acknowledged_is_not_served_twice() -> None:
    async def answer(_peer: PeerId, message: Message) -> list[Message]:
        return [HeadReply(None)] if isinstance(message, GetHead) else [Refusal("busy", "", 0)]

    received, _ = await serve(hello(), GetChunks((Digest(bytes(32)),)), GetHead(), handler=answer)
    assert [type(message) for message in received] == [Hello, Refusal, HeadReply]


async def test_more_streams_than_a_peer_may_keep_are_refused() -> None:
    provider = Provider(hello(), QUICK, Traffic())
    with contextlib.ExitStack() as others:
        for _ in range(STREAMS_ACCEPTED_PER_PEER_MAX):
            assert others.enter_context(provider.doorkeeper.enter(PEER)) is None
        received = await converse(provider, hello())
    assert isinstance(received[0], Refusal)
    assert received[0].code == "too-many-streams"


class Rules:
    """A run whose members may be taken off its list."""

    def __init__(self, *members: PeerId, is_private: bool = True) -> None:
        self.members = set(members)
        self._is_private = is_private

    def admits(self, peer_id: PeerId) -> bool:
        return not self._is_private or peer_id in self.members

    def is_member(self, peer_id: PeerId) -> bool:
        return peer_id in self.members


async def test_a_peer_that_is_revoked_is_refused_on_the_stream_it_has_before_any_work() -> None:
    rules, asked = Rules(PEER), []

    async def answer(peer: PeerId, message: Message) -> list[Message]:
        asked.append(message)
        rules.members.remove(peer)
        return [HeadReply(None)]

    provider = Provider(hello(), QUICK, Traffic())
    provider.handler, provider.doorkeeper.rules = answer, rules
    received = await converse(provider, hello(), GetHead(), GetChunks((Digest(bytes(32)),)), GetHead())
    assert [getattr(message, "code", None) for message in received] == [None, None, "not-admitted"]
    assert asked == [GetHead()]


async def test_a_peer_that_struck_out_is_refused_with_the_time_it_has_to_wait() -> None:
    provider = Provider(hello(), QUICK, Traffic())
    codes: list[str] = []

    def strike(peer: PeerId, code: str) -> None:
        codes.append(code)
        provider.doorkeeper.standing.strike(peer, time.monotonic())

    provider.on_violation = strike
    for _ in range(5):
        await converse(provider, hello(), HeadReply(None))
    other = to_libp2p_bytes(PeerId(b"o" * 32))
    refused, served = await converse(provider, hello()), await converse(provider, hello(), peer=other)
    assert codes == ["unexpected-message"] * 5
    assert isinstance(refused[0], Refusal)
    assert refused[0].code == "struck-out"
    assert 50_000 < refused[0].retry_after_ms <= 60_001
    assert served == [hello()]


async def test_a_first_frame_larger_than_any_hello_is_refused_before_it_is_read() -> None:
    provider = Provider(hello(), QUICK, Traffic())
    server = await asyncio.start_server(
        lambda reader, writer: provider.serve_stream(to_libp2p_bytes(PEER), reader, writer), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write((limits.HELLO_SIZE_BYTES_MAX + 1).to_bytes(4, "little") + b"\x01")
    data = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    server.close()
    assert data == b""
    assert provider._traffic.rejected == {"framing": 1}


async def test_a_flood_of_requests_is_answered_at_its_rate_and_no_more() -> None:
    now = 0.0
    answered: list[Message] = []

    async def answer(_peer: PeerId, message: Message) -> list[Message]:
        answered.append(message)
        return [HeadReply(None)]

    provider = Provider(hello(), QUICK, Traffic(), clock=lambda: now)
    provider.handler = answer
    received = await converse(provider, hello(), *[GetHead()] * (REQUESTS_BURST + 3))
    assert len(answered) == REQUESTS_BURST
    assert received[-3:] == [Refusal("busy", "too many requests of this peer", 1_000)] * 3


async def test_readers_that_take_nothing_hold_no_place_that_others_wait_for(tmp_path: Path) -> None:
    """A-PEER-1: as many of them as requests are served at once, each with a reply larger than any buffer."""
    large = RecordsReply((bytes(limits.RECORD_SIZE_BYTES_MAX),) * 4)

    async def answer(_peer: PeerId, message: Message) -> list[Message]:
        return [HeadReply(None)] if isinstance(message, GetHead) else [large]

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await provider.serve_stream(to_libp2p_bytes(PeerId(bytes([next(numbers)]) * 32)), reader, writer)

    async def converse_once() -> list[Message]:
        received: list[Message] = []
        server = await asyncio.start_server(
            lambda reader, writer: provider.serve_stream(to_libp2p_bytes(PEER), reader, writer), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(encode_message(hello()) + encode_message(GetHead()))
        decoder = FrameDecoder()
        while len(received) < 2:
            received += decoder.feed(await reader.read(1 << 16))
        writer.transport.abort()
        server.close()
        return received

    provider = Provider(hello(), Deadlines(), Traffic())
    provider.handler = answer
    numbers = itertools.count(1)
    # As p2pd does: a Unix socket, whose buffers hold no whole reply.
    server = await asyncio.start_unix_server(accept, tmp_path / "socket")
    writers = []
    for _ in range(2 * limits.SERVED_REQUESTS_MAX):
        _, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        writer.transport.pause_reading()
        writer.write(encode_message(hello()) + encode_message(GetRecords(())))
        writers.append(writer)
    await until(lambda: provider.doorkeeper.buffered_size_bytes >= len(writers) << 20)
    assert await asyncio.wait_for(converse_once(), 5) == [hello(), HeadReply(None)]
    for writer in writers:
        writer.transport.abort()
    await provider.close()
    assert provider.doorkeeper.buffered_size_bytes == 0
    server.close()


async def test_frames_that_are_never_whole_are_dropped_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many keys that nobody listed begin large frames; a listed one is still heard."""
    monkeypatch.setattr(admission, "UNLISTED_BUFFERED_SIZE_BYTES_MAX", 1 << 20)

    async def answer(_peer: PeerId, _message: Message) -> list[Message]:
        return [PushReply(True, "")]

    provider = Provider(hello(), Deadlines(), Traffic())
    provider.handler, provider.doorkeeper.rules = answer, Rules(PEER, is_private=False)
    numbers = itertools.count(1)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await provider.serve_stream(to_libp2p_bytes(PeerId(bytes([next(numbers)]) * 32)), reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    ends, writers = [], []
    for _ in range(20):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writers.append(writer)
        writer.write(encode_message(hello()) + (1 << 20).to_bytes(4, "little") + bytes(200_000))
        ends.append(asyncio.create_task(_read_to_end(reader)))
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await until(lambda: sum(end.done() for end in ends) >= 15)
    assert 0 < provider.doorkeeper.buffered_size_bytes <= 1 << 20
    pushed = PushHead(bytes(limits.RECORD_SIZE_BYTES_MAX - 10))
    received = await converse(Quick(provider), hello(), pushed)
    await provider.close()
    server.close()
    for writer in writers:
        writer.close()
    assert sum(end.done() for end in ends) >= 15
    assert received == [hello(), PushReply(True, "")]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come to that")


async def _read_to_end(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionResetError):
        while await reader.read(1 << 16):
            pass


class Quick:
    """A provider's streams, with the short deadlines under which a conversation ends by itself."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    async def serve_stream(self, peer: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._provider._deadlines = QUICK
        await self._provider.serve_stream(peer, reader, writer)


async def test_closing_ends_streams_that_are_being_served() -> None:
    provider = Provider(hello(), Deadlines(), Traffic())
    started = asyncio.Event()

    async def wait(_peer: PeerId, _message: Message) -> list[Message]:
        started.set()
        await asyncio.sleep(60)
        return []

    provider.handler = wait
    conversation = asyncio.create_task(converse(provider, hello(), GetHead()))
    await asyncio.wait_for(started.wait(), 5)
    await provider.close()
    assert provider.doorkeeper.peers == frozenset()
    assert await conversation == [hello()]


async def test_a_reader_without_an_upload_slot_is_sent_elsewhere_and_keeps_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest, blob_id = Digest(bytes(32)), Digest(bytes([7]) * 32)
    asked: list[GetChunks] = []

    async def find_kind(request: GetChunks) -> str:
        asked.append(request)
        return "patch"

    async def answer(_peer: PeerId, _message: Message) -> list[Message]:
        return [ChunkReply(digest, b"data")]

    desk = UploadDesk()
    provider = Provider(hello(), QUICK, Traffic(), desk)
    provider.handler, provider.find_kind = answer, find_kind
    take = desk._uploads.ask
    answers = iter([False, True])
    monkeypatch.setattr(desk._uploads, "ask", lambda *given: next(answers) and take(*given))
    request = GetChunks((digest,), blob_id)
    received = await converse(provider, hello(), request, request, Ack())
    assert received[1:] == [Refusal("busy", "every upload slot is taken", RETRY_MS), ChunkReply(digest, b"data")]
    assert asked == [GetChunks((digest,), blob_id)] * 2
    assert provider._traffic.blob_bytes == {("sent", "patch"): 4}
    assert [dict(counted) for counted in provider._traffic.peer_bytes.values()] == [{"sent": 4}]


async def test_fifty_peers_that_send_a_byte_now_and_then_are_dropped_and_hold_nobody_up() -> None:
    """A-PEER-1: more of them than requests are served at once."""
    request = encode_message(GetChunks(tuple(Digest(bytes([number]) * 32) for number in range(4))))
    ends: list[str] = []

    async def answer(_peer: PeerId, _message: Message) -> list[Message]:
        ends.append("answered")
        return [HeadReply(None)]

    async def drip(provider: Provider, number: int, greeted: asyncio.Semaphore) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await provider.serve_stream(to_libp2p_bytes(PeerId(bytes([number]) * 32)), reader, writer)
            ends.append("dropped")

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(encode_message(hello()) + request[:8])
        await reader.read(1 << 16)
        greeted.release()
        end = asyncio.create_task(reader.read())
        for byte in request[8:]:
            if (await asyncio.wait([end], timeout=0.2))[0]:
                break
            writer.write(bytes([byte]))
        with contextlib.suppress(ConnectionResetError):
            assert await end == b""
        writer.close()
        server.close()

    provider = Provider(hello(), Deadlines(5.0, 5.0, write_stall_seconds=2.0, provider_idle_seconds=1.0), Traffic())
    provider.handler = answer
    greeted = asyncio.Semaphore(0)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for number in range(1, 51):
            tasks.create_task(drip(provider, number, greeted))
        for _ in range(50):
            await greeted.acquire()
        received = await converse(provider, hello(), *[GetHead()] * 100)
        assert received == [hello(), *[HeadReply(None)] * 100]
    assert ends == [*["answered"] * 100, *["dropped"] * 50]
    assert provider.doorkeeper.peers == frozenset()
