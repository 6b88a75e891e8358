"""Asking a peer to dial back: the only way to learn whether others can reach this node (proto/spec-dial-back.md).

A stream of its own carries one request and one reply. The peer knocks at the address it sees the asker come from,
at the ports the asker names, and nowhere else, so nobody can be made to scan a third machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Final

from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import PeerId, RunId, short
from pulsenet.wire.schema import CountMax, SizeMax, decode_value, encode_value
from pulsenetd.identity import from_libp2p_bytes
from pulsenetd.network.knock import CLOSED, knock
from pulsenetd.network.p2pd import RawStream
from pulsenetd.network.streams import stall_deadline

logger: Final = logging.getLogger("pulsenet.dial-back")

STREAM_NAME: Final = "/pulsenet/dial-back/1"
OPEN: Final = "open"

PORTS_MAX: Final = 4
MESSAGE_SIZE_BYTES_MAX: Final = 1_024
KNOCK_SECONDS: Final = 5.0
READ_SECONDS: Final = 5.0
ASK_SECONDS: Final = 15.0
"""Longer than a peer may take: it reads, knocks at all ports at once, answers."""

AGAIN_SECONDS: Final = 5.0
"""A peer that asks more often is told ``busy``."""
SIMULTANEOUS_MAX: Final = 4
ASKERS_MAX: Final = 1_024

GREETING: Final = b"\x13/multistream/1.0.0\n"
"""What a libp2p listener says first; a router's own web page does not."""


@dataclass(frozen=True, slots=True)
class DialBackRequest:
    """Ask to be dialled back."""

    run_id: RunId
    ports: Annotated[tuple[int, ...], CountMax(PORTS_MAX)]
    """TCP ports the asker listens on or announces."""


@dataclass(frozen=True, slots=True)
class DialBackReply:
    """What came of it."""

    host: Annotated[str, SizeMax(64)]
    """IP address the asker's connection comes from; empty if the peer cannot tell or will not."""
    outcomes: Annotated[tuple[Annotated[str, SizeMax(16)], ...], CountMax(PORTS_MAX)]
    """For each port ``open``, or why not: ``refused``, ``timed-out``, ``unreachable``. Or one word for all of them:
    ``busy``, ``other-run``, ``unknown``."""


class DialBackServer:
    """Dials back those who ask.

    Args:
        run_id: Askers of other runs are refused.
        find_host: Returns ``ip4/<address>`` or ``ip6/<address>`` a connected peer comes from, or ``None``.
        clock: Monotonic seconds.
    """

    def __init__(
        self, run_id: RunId, find_host: Callable[[PeerId], Awaitable[str | None]], clock: Callable[[], float]
    ) -> None:
        self._run_id = run_id
        self._find_host = find_host
        self._clock = clock
        self._asked_at: dict[PeerId, float] = {}
        self._under_way = 0

    async def serve_stream(self, libp2p_id: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one incoming stream."""
        try:
            peer_id = from_libp2p_bytes(libp2p_id)
            request = decode_value(DialBackRequest, await _read(reader, READ_SECONDS))
            await _write(writer, encode_value(await self._answer(peer_id, request)))
            writer.close()
        except (RemoteProtocolError, UnavailableError) as error:
            logger.debug("a request to dial back failed: %s", error)
            writer.transport.abort()

    async def _answer(self, peer_id: PeerId, request: DialBackRequest) -> DialBackReply:
        if request.run_id != self._run_id:
            return DialBackReply("", ("other-run",))
        now = self._clock()
        is_early = now - self._asked_at.pop(peer_id, float("-inf")) < AGAIN_SECONDS
        self._asked_at[peer_id] = now
        if len(self._asked_at) > ASKERS_MAX:
            del self._asked_at[next(iter(self._asked_at))]
        if is_early or self._under_way >= SIMULTANEOUS_MAX:
            return DialBackReply("", ("busy",))
        self._under_way += 1
        try:
            host = await self._find_host(peer_id)
            if host is None:
                return DialBackReply("", ("unknown",))
            ports = [port for port in request.ports if 0 < port < 65_536]
            answers = await asyncio.gather(
                *(knock(f"/{host}/tcp/{port}", KNOCK_SECONDS, greeting=GREETING) for port in ports)
            )
        finally:
            self._under_way -= 1
        return DialBackReply(host.partition("/")[2], tuple(answer or OPEN for answer in answers))


async def ask(
    open_stream: Callable[[PeerId, str, float], Awaitable[RawStream]], peer_id: PeerId, request: DialBackRequest
) -> DialBackReply:
    """Ask one peer.

    Args:
        open_stream: Opens a raw stream to a peer's handler of that name, within so many seconds.
        peer_id: A connected peer.
        request: This node's run and ports.

    Raises:
        UnavailableError: it does not answer, or knows no such request.
        RemoteProtocolError: what it answers is no reply, or one of no address.
    """
    reader, writer = await open_stream(peer_id, STREAM_NAME, READ_SECONDS)
    try:
        await _write(writer, encode_value(request))
        reply = decode_value(DialBackReply, await _read(reader, ASK_SECONDS))
        _check_reply(reply)
        return reply
    except RemoteProtocolError:
        logger.debug("%s sent no reply to a request to dial back", short(peer_id))
        raise
    finally:
        writer.transport.abort()


def _check_reply(reply: DialBackReply) -> None:
    """Check that a reply says an address and known words: people read them, and paste them into a shell.

    Raises:
        RemoteProtocolError: ``schema``.
    """
    if not reply.host:
        return
    try:
        ipaddress.ip_address(reply.host)
    except ValueError as error:
        raise RemoteProtocolError("schema", f"{reply.host!r} is no IP address") from error
    # A zone (``fe80::1%eth0``) may be any text at all.
    if "%" in reply.host or not all(outcome == OPEN or outcome in CLOSED for outcome in reply.outcomes):
        raise RemoteProtocolError("schema", f"{reply.host!r} with {reply.outcomes!r} is no answer")


async def _write(writer: asyncio.StreamWriter, body: bytes) -> None:
    async with stall_deadline(READ_SECONDS, "the peer stopped reading"):
        try:
            writer.write(struct.pack("<H", len(body)) + body)
            await writer.drain()
        except OSError as error:
            raise UnavailableError(f"the stream broke off: {error}") from error


async def _read(reader: asyncio.StreamReader, seconds: float) -> bytes:
    async with stall_deadline(seconds, "the peer sent nothing"):
        try:
            (size_bytes,) = struct.unpack("<H", await reader.readexactly(2))
            if size_bytes > MESSAGE_SIZE_BYTES_MAX:
                raise RemoteProtocolError("framing", f"{size_bytes} bytes announced")
            return await reader.readexactly(size_bytes)
        except (OSError, EOFError) as error:
            raise UnavailableError(f"the stream broke off: {error}") from error
