"""One framed stream: messages in, messages out, every wait with a deadline, every buffer with a bound."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import PeerId
from pulsenet.wire.framing import FrameDecoder, encode_message
from pulsenet.wire.messages import (
    ChunkListReply,
    ChunkReply,
    ExchangeHave,
    HaveReply,
    HeadReply,
    Message,
    PushHead,
    PushRollouts,
    RecordsReply,
    Refusal,
    TasksReply,
)
from pulsenetd.network.link_meter import LinkMeter

READ_SIZE_BYTES: Final = 256 << 10
"""Bytes asked of the stream at a time."""

KINDS: Final[dict[type[Message], str]] = {
    ChunkReply: "chunk",
    ChunkListReply: "chunk-list",
    RecordsReply: "record",
    HeadReply: "head",
    PushHead: "head",
    ExchangeHave: "have",
    HaveReply: "have",
    PushRollouts: "rollouts",
    TasksReply: "tasks",
}
"""What a message's bytes are counted as; anything else is ``other``."""


class PeerUnavailableError(UnavailableError):
    """A peer did not answer.

    Args:
        reason: Stable code: ``timeout``, ``closed``, ``unreachable``, ``refused`` or ``struck-out``.
        detail: What happened, for a person.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class PeerRefusedError(PeerUnavailableError):
    """A peer answered that it will not serve; ``refusal`` says why and when to come back."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__("refused", f"{refusal.code}: {refusal.detail}" if refusal.detail else refusal.code)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each step of a stream may take, in seconds."""

    open_seconds: float = limits.REQUEST_OPEN_SECONDS_MAX
    """Opening a stream, and the Hello exchange."""
    read_stall_seconds: float = limits.READ_STALL_SECONDS_MAX
    """Without a byte arriving."""
    write_stall_seconds: float = limits.WRITE_STALL_SECONDS_MAX
    """For one frame to leave, for one request frame to arrive whole, and for the final acknowledgement."""
    requester_idle_seconds: float = 60.0
    """A requester closes a stream it has not used for so long."""
    provider_idle_seconds: float = 120.0
    """A provider waits longer than the requester, so the requester is the one who closes."""


PEERS_COUNTED_MAX: Final = 256
"""Peers whose bytes are told apart; the one that moved none for longest is forgotten beyond."""


class Traffic:
    """Counts what crossed all streams of one node."""

    __slots__ = ("blob_bytes", "bytes", "meters", "peer_bytes", "rejected", "streams_opened")

    def __init__(self) -> None:
        self.meters = {"sent": LinkMeter(), "received": LinkMeter()}
        """How fast chunks moved, by direction."""
        self.bytes: Counter[tuple[str, str]] = Counter()
        """Frame bytes by (``sent`` or ``received``, kind)."""
        self.blob_bytes: Counter[tuple[str, str]] = Counter()
        """Bytes of chunks by (``sent`` or ``received``, kind of blob)."""
        self.peer_bytes: OrderedDict[PeerId, Counter[str]] = OrderedDict()
        """Bytes of chunks by ``sent`` and ``received``, for the peers that moved some lately."""
        self.rejected: Counter[str] = Counter()
        """Refused inputs by reason."""
        self.streams_opened: Counter[str] = Counter()
        """Streams by ``inbound`` and ``outbound``."""

    def note_chunk(self, peer_id: PeerId, direction: str, kind: str, size_bytes: int) -> None:
        """Count the bytes of one chunk that went to a peer or came from it."""
        self.blob_bytes[direction, kind] += size_bytes
        self.meters[direction].note(size_bytes)
        self.peer_bytes.setdefault(peer_id, Counter())[direction] += size_bytes
        self.peer_bytes.move_to_end(peer_id)
        while len(self.peer_bytes) > PEERS_COUNTED_MAX:
            self.peer_bytes.popitem(last=False)


class Budget(Protocol):
    """Where the bytes that a stream holds are counted."""

    def note_arriving(self, size_bytes: int) -> bool:
        """So much has arrived that was not looked at yet; ``False`` if there is no room for it."""
        ...

    def note_leaving(self, size_bytes: int) -> bool:
        """So much of a frame waits for the peer to read it; ``False`` if there is no room for it."""
        ...


class FramedStream:
    """Messages over a raw stream. Any error ends it: call :meth:`abort` then."""

    __slots__ = (
        "_budget",
        "_deadlines",
        "_decoder",
        "_reader",
        "_traffic",
        "_writer",
        "features",
        "idle_since",
        "on_bytes",
    )

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        deadlines: Deadlines,
        traffic: Traffic,
        budget: Budget | None = None,
    ) -> None:
        self._budget = budget
        self._reader = reader
        self._writer = writer
        self._deadlines = deadlines
        self._traffic = traffic
        self._decoder = FrameDecoder()
        self.idle_since = 0.0
        """Set by the pool that keeps the stream."""
        self.on_bytes: Callable[[], None] = _do_nothing
        """Called whenever something arrives; set by whoever watches the peer."""
        self.features: tuple[str, ...] = ()
        """What the other side's Hello says it knows; set by whoever read it."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing has arrived that nobody asked for and the other side has not closed."""
        return not self._decoder.buffered_size_bytes and not self._reader.at_eof()

    def limit_frames(self, size_bytes_max: int) -> None:
        """Take no longer frame from now on."""
        self._decoder.size_bytes_max = size_bytes_max

    async def send(self, message: Message) -> None:
        """Write one message; returns when the stream has taken it.

        Raises:
            PeerUnavailableError: ``timeout`` or ``closed``; also where too much waits for slow readers already.
        """
        frame = encode_message(message)
        if self._budget is not None and not self._budget.note_leaving(len(frame)):
            raise PeerUnavailableError("closed", "no memory left for frames that slow readers do not take")
        async with stall_deadline(self._deadlines.write_stall_seconds, "the peer stopped reading"):
            try:
                self._writer.write(frame)
                await self._writer.drain()
            except OSError as error:
                raise PeerUnavailableError("closed", f"while sending {type(message).__name__}") from error
        if self._budget is not None:
            self._budget.note_leaving(0)
        self._traffic.bytes["sent", KINDS.get(type(message), "other")] += len(frame)

    async def receive(
        self, *, first_byte_seconds: float | None = None, message_seconds: float | None = None
    ) -> Message | None:
        """Return the next message, or ``None`` if the stream ended between two messages.

        Args:
            first_byte_seconds: How long the peer may stay silent before the message begins; a read
                stall by default.
            message_seconds: How long the message may take from its first byte to its last; unlimited by
                default, for callers with a deadline of their own.

        Raises:
            PeerUnavailableError: ``timeout``, or ``closed`` inside a message; also where too much is held already.
            RemoteProtocolError: ``framing``, ``message-unknown``, ``decode`` or ``schema``.
        """
        loop = asyncio.get_running_loop()
        stall_seconds = self._deadlines.read_stall_seconds if first_byte_seconds is None else first_byte_seconds
        give_up_at: float | None = None
        while (message := self._take_message()) is None:
            async with stall_deadline(stall_seconds, "the peer stopped sending"):
                try:
                    data = await self._reader.read(READ_SIZE_BYTES)
                except OSError as error:
                    raise PeerUnavailableError("closed", "the stream broke off") from error
            if not data:
                self._check_end()
                return None
            self.on_bytes()
            self._decoder.push(data)
            stall_seconds = self._deadlines.read_stall_seconds
            if message_seconds is not None:
                give_up_at = loop.time() + message_seconds if give_up_at is None else give_up_at
                # a peer that sends a byte now and then makes progress, but holds a place others wait for
                stall_seconds = min(stall_seconds, max(0.0, give_up_at - loop.time()))
        return message

    def close(self) -> None:
        """Close the stream after what was written; only right when the peer acknowledged everything."""
        self._writer.close()

    def abort(self) -> None:
        """Drop the stream at once."""
        self._writer.transport.abort()

    def _take_message(self) -> Message | None:
        """Decode the next message that is whole, and no other: a peer may send thousands at once."""
        held_size_bytes = self._decoder.buffered_size_bytes
        kind = "other"
        try:
            message = self._decoder.next_message()
            kind = "other" if message is None else KINDS.get(type(message), "other")
        finally:
            self._traffic.bytes["received", kind] += held_size_bytes - self._decoder.buffered_size_bytes
        if self._budget is not None and not self._budget.note_arriving(self._decoder.buffered_size_bytes):
            raise PeerUnavailableError("closed", "no memory left for frames that are not whole")
        return message

    def _check_end(self) -> None:
        try:
            self._decoder.eof()
        except RemoteProtocolError as error:
            # a lost link looks the same as a peer that cut its frame, so this costs no strike
            self._traffic.rejected[error.code] += 1
            raise PeerUnavailableError("closed", error.detail) from error


@contextlib.asynccontextmanager
async def stall_deadline(seconds: float, detail: str) -> AsyncIterator[None]:
    """Limit the block to ``seconds``; PeerUnavailableError ``timeout`` beyond."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise PeerUnavailableError("timeout", f"{detail} for {seconds:g} s") from error


def _do_nothing() -> None:
    pass
