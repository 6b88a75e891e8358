"""The answering side of streams: who is let in, what is asked, and how it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from pulsenet import limits
from pulsenet.errors import PulsenetError, RemoteProtocolError, StorageError
from pulsenet.ids import PeerId, short
from pulsenet.wire.messages import (
    Ack,
    AggregatesReply,
    ChunkListReply,
    ChunkReply,
    ExchangeHave,
    GetAggregates,
    GetChunkList,
    GetChunks,
    GetDescriptors,
    GetEpochs,
    GetHead,
    GetHoldings,
    GetRecords,
    GetRoster,
    GetRounds,
    GetShares,
    GetTasks,
    HaveReply,
    HeadReply,
    Hello,
    HoldingsReply,
    Message,
    PushContribution,
    PushForkProof,
    PushHead,
    PushProbe,
    PushReceipt,
    PushReply,
    PushRollouts,
    PushShare,
    PushTerm,
    PushVote,
    RecordsReply,
    Refusal,
    RosterReply,
    RoundsReply,
    SharesReply,
    TasksReply,
)
from pulsenet.wire.schema import cut_text
from pulsenetd.identity import from_libp2p_bytes
from pulsenetd.network.admission import Doorkeeper
from pulsenetd.network.lanes import Lanes
from pulsenetd.network.pacing import RETRY_MS, UPLOAD_SLOTS_MAX, FindKind, NoSlotError, UploadDesk, find_no_kind
from pulsenetd.network.streams import Deadlines, FramedStream, PeerUnavailableError, Traffic

logger: Final = logging.getLogger("pulsenet.provider")

Handler = Callable[[PeerId, Message], Awaitable[list[Message]]]
"""Answers one request; a ``PulsenetError`` becomes a :class:`Refusal`."""

ViolationHandler = Callable[[PeerId, str], None]
"""Told that a peer broke the specification, and how."""

REPLY_TYPES: Final[dict[type[Message], type[Message]]] = {
    GetHead: HeadReply,
    GetRecords: RecordsReply,
    GetDescriptors: RecordsReply,
    GetEpochs: RecordsReply,
    GetChunkList: ChunkListReply,
    GetChunks: ChunkReply,
    PushHead: PushReply,
    PushForkProof: PushReply,
    PushRollouts: PushReply,
    ExchangeHave: HaveReply,
    PushVote: PushReply,
    PushTerm: PushReply,
    PushContribution: PushReply,
    PushReceipt: PushReply,
    GetRounds: RoundsReply,
    GetAggregates: AggregatesReply,
    GetTasks: TasksReply,
    GetHoldings: HoldingsReply,
    GetRoster: RosterReply,
    PushShare: PushReply,
    PushProbe: PushReply,
    GetShares: SharesReply,
}
"""Every request, and what answers it; a :class:`Refusal` may answer any."""

BULK_TYPES: Final = (GetChunks, GetChunkList)
"""Requests answered by megabytes."""

_BUSY_RETRY_MS: Final = 1_000

_REFUSAL_SECONDS: Final = 0.1
"""A request beyond a peer's rate is refused after so long: refusing quickly would cost what the rate is to save."""


class Provider:
    """Serves every incoming stream of one node."""

    def __init__(
        self,
        hello: Hello,
        deadlines: Deadlines,
        traffic: Traffic,
        desk: UploadDesk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.doorkeeper = Doorkeeper(clock)
        self._desk = desk or UploadDesk()
        self._hello = hello
        self._deadlines = deadlines
        self._traffic = traffic
        self._lanes = Lanes(limits.SERVED_REQUESTS_MAX, UPLOAD_SLOTS_MAX)
        self._tasks: set[asyncio.Task[object]] = set()
        self.handler: Handler | None = None
        """``None`` until the node can answer; requests are refused as ``starting`` before."""
        self.find_kind: FindKind = find_no_kind
        """Says what kind of blob chunks are asked of: patches go before anchors."""
        self.on_violation: ViolationHandler = lambda _peer, _code: None

    async def serve_stream(self, libp2p_id: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one incoming stream to its end; never raises but when cancelled."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer_id: PeerId | None = None
        try:
            peer_id = from_libp2p_bytes(libp2p_id)
            self._traffic.streams_opened["inbound"] += 1
            with (
                self.doorkeeper.enter(peer_id) as refusal,
                contextlib.closing(self.doorkeeper.open_account(peer_id)) as account,
            ):
                stream = FramedStream(reader, writer, self._deadlines, self._traffic, account)
                await self._serve_peer(peer_id, stream, refusal)
        except RemoteProtocolError as error:
            self._traffic.rejected[error.code] += 1
            logger.debug("stream of %s closed: %s", short(peer_id or b""), error)
            if peer_id is not None:
                self.on_violation(peer_id, error.code)
        except PeerUnavailableError as error:
            logger.debug("stream of %s ended: %s", short(peer_id or b""), error)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def close(self) -> None:
        """End every stream being served."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve_peer(self, peer_id: PeerId, stream: FramedStream, refusal: Refusal | None) -> None:
        stream.limit_frames(limits.HELLO_SIZE_BYTES_MAX)
        refusal = refusal or await self._greet(stream)
        if refusal is not None:
            await self._refuse_and_wait(stream, refusal)
            return
        stream.limit_frames(limits.FRAME_SIZE_BYTES_MAX)
        await stream.send(self._hello)
        while True:
            request = await stream.receive(
                first_byte_seconds=self._deadlines.provider_idle_seconds,
                message_seconds=self._deadlines.write_stall_seconds,
            )
            if request is None:
                return
            if type(request) not in REPLY_TYPES:
                raise RemoteProtocolError("unexpected-message", f"{type(request).__name__} is no request")
            # Asked again: the run's rules and the peer's standing may have changed since it came.
            refusal = self.doorkeeper.refuse_peer(peer_id)
            if refusal is not None:
                await self._refuse_and_wait(stream, refusal)
                return
            refusal = self.doorkeeper.refuse_request(peer_id, request)
            if refusal is None:
                await self._answer(peer_id, stream, request)
            else:
                self._traffic.rejected["rate"] += 1
                await asyncio.sleep(_REFUSAL_SECONDS)
                await stream.send(refusal)

    async def _greet(self, stream: FramedStream) -> Refusal | None:
        """Take the peer's Hello; return why the stream cannot be served, if so."""
        open_seconds = self._deadlines.open_seconds
        theirs = await stream.receive(first_byte_seconds=open_seconds, message_seconds=open_seconds)
        if theirs is None:
            raise PeerUnavailableError("closed", "before its Hello")
        return check_hello(self._hello, theirs)

    async def _refuse_and_wait(self, stream: FramedStream, refusal: Refusal) -> None:
        """Send the refusal and let the peer close first: the tail of a stream we close may be lost."""
        self._traffic.rejected[refusal.code] += 1
        await stream.send(refusal)
        with contextlib.suppress(PeerUnavailableError):
            await stream.receive(message_seconds=self._deadlines.open_seconds)

    async def _answer(self, peer_id: PeerId, stream: FramedStream, request: Message) -> None:
        if isinstance(request, GetChunks):
            await self._answer_chunks(peer_id, stream, request)
            return
        async with self._lanes.enter(bulk=isinstance(request, BULK_TYPES)):
            replies = await self._ask_handler(peer_id, request)
        # Outside the lane: a peer that reads slowly, or nothing, keeps no place that others wait for.
        for reply in replies:
            await stream.send(reply)

    async def _answer_chunks(self, peer_id: PeerId, stream: FramedStream, request: GetChunks) -> None:
        """Send chunks as fast as the caps allow, once there is a slot; a reader without one is sent elsewhere."""
        kind = await self.find_kind(request)
        try:
            async with self._desk.enter(peer_id, kind) as upload:
                replies = await self._ask_handler(peer_id, request)
                with self._traffic.meters["sent"].moving():
                    for reply in replies:
                        size_bytes = len(reply.data or b"") if isinstance(reply, ChunkReply) else 0
                        await upload.pace(size_bytes)
                        await stream.send(reply)
                        upload.note_sent(size_bytes)
                        self._traffic.note_chunk(peer_id, "sent", kind, size_bytes)
                    if any(isinstance(reply, Refusal) for reply in replies):
                        return
                    # the slot is held until the chunks have arrived, so that 28 means 28 transfers
                    ack = await stream.receive(first_byte_seconds=self._deadlines.write_stall_seconds)
                if ack is None:
                    raise PeerUnavailableError("closed", "before its Ack")
                if not isinstance(ack, Ack):
                    raise RemoteProtocolError("unexpected-message", f"{type(ack).__name__} instead of Ack")
        except NoSlotError:
            await stream.send(Refusal("busy", "every upload slot is taken", RETRY_MS))

    async def _ask_handler(self, peer_id: PeerId, request: Message) -> list[Message]:
        if self.handler is None:
            return [Refusal("starting", "this node is not ready yet", _BUSY_RETRY_MS)]
        try:
            replies = await self.handler(peer_id, request)
        except RemoteProtocolError:
            raise
        except StorageError as error:
            logger.warning("cannot answer %s: %s", type(request).__name__, error)
            return [Refusal("storage", "the disk of this node failed", _BUSY_RETRY_MS)]
        except PulsenetError as error:
            logger.debug("cannot answer %s: %s", type(request).__name__, error)
            return [Refusal("unavailable", cut_text(str(error), 100), _BUSY_RETRY_MS)]
        assert replies or isinstance(request, GetChunks)  # of no digests
        return replies


def check_hello(ours: Hello, theirs: Message) -> Refusal | None:
    """Return why two nodes cannot talk, or ``None`` if they can.

    Raises:
        RemoteProtocolError: ``unexpected-message``; it is no Hello.
    """
    if not isinstance(theirs, Hello):
        raise RemoteProtocolError("unexpected-message", f"{type(theirs).__name__} instead of Hello")
    if theirs.run_id != ours.run_id:
        return Refusal("wrong-run", f"this node serves run {short(ours.run_id)}", 0)
    if negotiate_version(ours, theirs) is None:
        return Refusal("wire-version", f"this node speaks {ours.wire_version_min} to {ours.wire_version_max}", 0)
    return None


def negotiate_version(ours: Hello, theirs: Hello) -> int | None:
    """Return the newest wire version both speak, or ``None``."""
    newest = min(ours.wire_version_max, theirs.wire_version_max)
    return newest if newest >= max(ours.wire_version_min, theirs.wire_version_min) else None
