"""The daemon's end of the hand-off: a private Unix socket for training loops and engines.

The server speaks the protocol, checks who calls and what memory they hand over, and asks its
:class:`LocalHooks` for everything else. Bad input costs the caller its connection, never the daemon.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pulsenet import limits
from pulsenet.errors import PulsenetError, RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.local import protocol
from pulsenet.local.changed_parts import compute_size_bytes_max
from pulsenet.local.framing import Frame
from pulsenet.local.mixing_protocol import MIXING_MESSAGE_TYPES
from pulsenet.local.protocol import PublishDone, PublishStatus
from pulsenet.local.rounds_protocol import ROUNDS_MESSAGE_TYPES, as_code
from pulsenet.local.shared_memory import Region
from pulsenet.local.sockets import read_peer_uid, socket_path, use_address
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.schema import cut_text
from pulsenetd.local.link import FRAME_SECONDS_MAX, Link, wait_readable
from pulsenetd.local.mixing import MixingHook, MixingSession
from pulsenetd.local.rounds import RoundsHook, RoundsSession
from pulsenetd.local.tasks import TasksHook, answer_tasks
from pulsenetd.logs import logger
from pulsenetd.storage.disk import Disk, describe_os_error, make_directory
from pulsenetd.storage.parts import PartQueue
from pulsenetd.storage.staging import StagedUpdate

CONNECTIONS_MAX: Final = 64
"""Training ranks, engines and commands at one time."""

ACCEPT_PAUSE_SECONDS: Final = 1.0
"""Until the next try where the system refuses a connection."""


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """Weights that a training process hands over, part by part: immutable, and not yet looked at."""

    generation: int
    trainer_step: int
    parts: PartQueue
    """Owned by whoever takes the offer; parts go on coming in."""
    consensus: bool = True


@dataclass(frozen=True, slots=True)
class EngineConfirmation:
    """What became of a hand-over."""

    version: Version
    """What was handed over."""
    ok: bool
    held: Version | None
    """What the engine serves now, if known."""
    reason: str


@dataclass(frozen=True, slots=True)
class LocalHooks:
    """What the node does for local processes. All run in the event loop and must not block it."""

    on_snapshot: Callable[[SnapshotOffer], Awaitable[asyncio.Future[PublishDone]]]
    """Take an offer; the future resolves once its outcome is known, at once if the node may not publish."""
    on_engine_request: Callable[[Version | None, Digest | None, float], Coroutine[Any, Any, StagedUpdate | None]]
    """Wait up to so many seconds for weights newer than the engine's, of which version and root may be known, and stage
    them; cancelled if the engine goes."""
    on_confirm: Callable[[EngineConfirmation], Awaitable[None]]
    on_rollouts: Callable[[protocol.SubmitRollouts], Awaitable[protocol.RolloutsTaken]]
    on_take_rollouts: Callable[[int, float], Coroutine[Any, Any, tuple[protocol.SignedBatch, ...]]]
    """Up to so many batches, waiting up to so many seconds for the first; cancelled if the process goes."""
    on_rollouts_settled: Callable[[Sequence[protocol.SignedBatch], bool], Awaitable[None]]
    """Whether batches that were taken reached the process."""
    on_checks: Callable[[PeerId, int, int], None]
    """Of so many samples of a key that the process recomputed, so many did not match."""
    on_status: Callable[[], Awaitable[Mapping[str, Any]]]
    tasks: TasksHook | None = None
    """``None`` on a node that neither trains nor serves."""
    rounds: RoundsHook | MixingHook | None = None
    """For a training process that takes part in rounds; ``None`` on a node that does not train."""


class LocalServer:
    """Listens in ``<data directory>/local``; call :meth:`listen`, then run :meth:`serve` as a task."""

    def __init__(
        self,
        data_directory: Path,
        hooks: LocalHooks,
        *,
        role: str,
        allowed_uids: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            data_directory: The node's, locked by this process.
            hooks: What the node does.
            role: Told to every process that attaches.
            allowed_uids: User ids that may attach besides our own.
        """
        self.path = socket_path(data_directory)
        self._hooks = hooks
        self._role = role
        self._allowed_uids = allowed_uids | {os.getuid()}
        self._is_private = self._allowed_uids == {os.getuid()}
        self._listener: socket.socket | None = None
        self._connection_count = 0
        self._generations = itertools.count(1)
        self._last_table: tuple[bytes, ParameterTable] | None = None
        self.refused_count = 0
        """Connections closed because of who called or what they sent."""

    def listen(self) -> None:
        """Bind the socket, replacing one a crash left: the lock on the data directory says it is ours.

        Raises:
            StorageError: The directory cannot be made private, or the socket not bound.
        """
        make_directory(Disk(), self.path.parent)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            # Other users, if allowed, may pass through to the socket but list nothing.
            self.path.parent.chmod(0o700 if self._is_private else 0o711)
            self.path.unlink(missing_ok=True)
            use_address(self.path, listener.bind)
            self.path.chmod(0o600 if self._is_private else 0o666)
            listener.listen(CONNECTIONS_MAX)
        except OSError as error:
            listener.close()
            raise describe_os_error("listen at", self.path, error) from error
        self._listener = listener

    async def serve(self) -> None:
        """Serve until cancelled; then every connection and the socket file are gone."""
        assert self._listener is not None
        listener = self._listener
        try:
            async with asyncio.TaskGroup() as connections:
                while True:
                    await wait_readable(listener)
                    try:
                        connection, _ = listener.accept()
                    except (BlockingIOError, ConnectionAbortedError):
                        continue
                    except OSError as error:
                        # Too many files are open: whoever is attached goes on, and whoever waits comes in later.
                        logger.warning("no further process can attach at the moment: %s", error.strerror)
                        await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                        continue
                    connection.setblocking(False)
                    connections.create_task(self._serve_connection(connection))
        finally:
            listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)

    async def _serve_connection(self, connection: socket.socket) -> None:
        self._connection_count += 1
        link = Link(connection)
        session = _Session(self, link)
        try:
            if self._connection_count > CONNECTIONS_MAX:
                raise RemoteProtocolError("busy", f"{CONNECTIONS_MAX} processes are attached already")
            uid = read_peer_uid(connection)
            if uid not in self._allowed_uids:
                raise RemoteProtocolError("user", f"user {uid} may not attach to this node")
            await session.run()
        except (UnavailableError, OSError):
            pass  # the process went away; what it left open is given back below
        except PulsenetError as error:
            self.refused_count += 1
            code, detail = (
                (error.code, error.detail) if isinstance(error, RemoteProtocolError) else ("failed", str(error))
            )
            # They may be gone, or not read: the refusal is a courtesy.
            with suppress(OSError, UnavailableError):
                await link.send(protocol.LocalRefusal(as_code(code), cut_text(detail, 1000)))
        finally:
            self._connection_count -= 1
            link.close()
            await session.close()

    async def _decode_table(self, data: bytes) -> ParameterTable:
        """Decode a table off the loop; the same process sends the same one at every step."""
        if self._last_table is not None and self._last_table[0] == data:
            return self._last_table[1]
        table = await asyncio.to_thread(ParameterTable.decode, data)
        self._last_table = (data, table)
        return table


class _Session:
    """One attached process."""

    def __init__(self, server: LocalServer, link: Link) -> None:
        self._server = server
        self._hooks = server._hooks
        self._link = link
        self._staged: tuple[int, StagedUpdate] | None = None
        self._publish: _Publish | None = None
        self._outer: RoundsSession | MixingSession | None = None
        if isinstance(self._hooks.rounds, MixingHook):
            self._outer = MixingSession(self._hooks.rounds, link, server._decode_table)
        elif self._hooks.rounds is not None:
            self._outer = RoundsSession(self._hooks.rounds, link, server._decode_table)

    async def run(self) -> None:
        first = await self._link.receive(FRAME_SECONDS_MAX)
        attach = first.message
        first.close()
        if not isinstance(attach, protocol.Attach):
            raise RemoteProtocolError("message-unexpected", type(attach).__name__)
        if attach.protocol_version != protocol.PROTOCOL_VERSION:
            text = f"the daemon speaks version {protocol.PROTOCOL_VERSION}, the library {attach.protocol_version}"
            raise RemoteProtocolError("version", f"{text}: install the same pulsenet on both sides")
        await self._link.send(protocol.Attached(protocol.PROTOCOL_VERSION, self._server._role))
        while True:
            frame = await self._link.receive(None)
            try:
                await self._answer(frame)
            finally:
                frame.close()

    async def _answer(self, frame: Frame) -> None:
        match frame.message:
            case protocol.OfferSnapshot() as offer:
                await self._take_offer(offer)
            case protocol.SnapshotPart() | protocol.ChangedPart() as part:
                await self._take_part(part, frame)
            case protocol.RequestUpdate() as request:
                await self._send_update(request)
            case protocol.ConfirmUpdate() as confirm:
                await self._confirm(confirm)
            case protocol.SubmitRollouts() as rollouts:
                await self._link.send(await self._hooks.on_rollouts(rollouts))
            case protocol.TakeRollouts() as request:
                await self._give_rollouts(request)
            case protocol.TellChecks() as told:
                _check_counts(told)
                self._hooks.on_checks(told.peer_id, told.checked_count, told.mismatched_count)
                await self._link.send(protocol.ChecksNoted())
            case protocol.SendTasks() | protocol.TakeTasks() as asked:
                await answer_tasks(self._hooks.tasks, self._link, asked)
            case protocol.GetStatus():
                status = dict(await self._hooks.on_status())
                await self._link.send(protocol.StatusReply(json.dumps(status, default=str)))
            case message if isinstance(message, (*ROUNDS_MESSAGE_TYPES, *MIXING_MESSAGE_TYPES)):
                if self._outer is None:
                    text = "this node trains nothing: attach to one with the role trainer"
                    raise RemoteProtocolError("not-trainer", text)
                await self._outer.answer(frame)
            case _:
                raise RemoteProtocolError("message-unexpected", type(frame.message).__name__)

    async def _take_offer(self, offer: protocol.OfferSnapshot) -> None:
        if self._publish is not None:
            raise RemoteProtocolError("message-unexpected", "an offer inside another")
        table = await self._server._decode_table(offer.table)
        generation = next(self._server._generations)
        self._publish = publish = _Publish(generation, table, offer)
        taken = SnapshotOffer(generation, offer.trainer_step, publish.parts, offer.consensus)
        publish.follow(await self._hooks.on_snapshot(taken))
        await self._go_on(publish)

    async def _take_part(self, message: protocol.SnapshotPart | protocol.ChangedPart, frame: Frame) -> None:
        publish = self._publish
        if publish is None:
            raise RemoteProtocolError("message-unexpected", "a part of nothing")
        layout = publish.parts.next_layout(message.tensor_count)
        size_bytes = layout.size_bytes
        if isinstance(message, protocol.ChangedPart):
            size_bytes = message.size_bytes
            if size_bytes > compute_size_bytes_max(layout):
                raise RemoteProtocolError("handoff-size", f"{size_bytes} bytes for {layout.count} changed tensors")
        try:
            region = Region.open_snapshot(frame.take_descriptor(), size_bytes)
        except StorageError as error:
            raise RemoteProtocolError("memory", str(error)) from error
        if isinstance(message, protocol.ChangedPart):
            publish.parts.put_changed(layout, region)
        else:
            publish.parts.put(layout, region)
        await self._go_on(publish)

    async def _go_on(self, publish: _Publish) -> None:
        """Ask for the next part once it may come, or say what became of the publish."""
        if publish.is_blocking and not publish.parts.is_whole:
            await self._link.unless_closed(publish.wait_for_room())
        if not publish.is_over:
            await self._link.send(protocol.PartWanted(publish.generation, publish.parts.base_number))
            return
        outcome = publish.outcome
        self._publish = None
        if publish.wait or outcome.done():
            # Shielded: a publish that is whole goes on when the process that asked for it dies.
            await self._link.send(await asyncio.shield(outcome))
        else:
            await self._link.send(PublishDone(PublishStatus.QUEUED, None, 0, 0, 0, 0, ""))

    async def _send_update(self, request: protocol.RequestUpdate) -> None:
        await self._give_back("superseded")
        ask = partial(self._hooks.on_engine_request, request.engine_version, request.engine_root)
        staged = await self._link.wait_for(ask, request.timeout_ms)
        if staged is None:
            await self._link.send(protocol.NoUpdate())
            return
        generation = next(self._server._generations)
        self._staged = (generation, staged)
        reply = protocol.UpdateReply(
            generation=generation,
            kind=staged.kind,
            base_version=staged.base_version,
            version=staged.version,
            root=staged.root,
            table=staged.table.encode(),
            size_bytes=staged.size_bytes,
        )
        await self._link.send(reply, descriptor=staged.descriptor)
        staged.close()

    async def _confirm(self, confirm: protocol.ConfirmUpdate) -> None:
        if self._staged is None or self._staged[0] != confirm.generation:
            await self._link.send(protocol.Confirmed(False, "this hand-over is not open"))
            return
        (_, staged), self._staged = self._staged, None
        accepted = staged.finish()
        ok = confirm.ok and accepted
        held = confirm.held if accepted else None
        is_said = accepted or confirm.reason == protocol.COPIED
        reason = confirm.reason if is_said else "withdrawn: the engine took too long"
        await self._hooks.on_confirm(EngineConfirmation(staged.version, ok, held, reason))
        await self._link.send(protocol.Confirmed(accepted, "" if accepted else reason))

    async def _give_rollouts(self, request: protocol.TakeRollouts) -> None:
        ask = partial(self._hooks.on_take_rollouts, request.count_max)
        batches = await self._link.wait_for(ask, request.timeout_ms)
        is_delivered = False
        try:
            await self._link.send(protocol.RolloutsReply(batches))
            is_delivered = True
        finally:
            await self._hooks.on_rollouts_settled(batches, is_delivered)

    async def close(self) -> None:
        """The connection is gone: give up what was under way on it."""
        if self._publish is not None:
            self._publish.parts.cut("cut_short")
        if self._outer is not None:
            await self._outer.close()
        await self._give_back("engine_lost")

    async def _give_back(self, reason: str) -> None:
        """End a hand-over the engine did not confirm: what it holds is not known."""
        if self._staged is not None:
            (_, staged), self._staged = self._staged, None
            staged.close()
            staged.finish()
            await self._hooks.on_confirm(EngineConfirmation(staged.version, False, None, reason))


def _check_counts(told: protocol.TellChecks) -> None:
    if not told.mismatched_count <= told.checked_count <= limits.ROLLOUT_SAMPLES_MAX:
        raise RemoteProtocolError("schema", f"{told.mismatched_count} of {told.checked_count} samples do not match")


class _Publish:
    """A publish whose parts are coming in."""

    outcome: asyncio.Future[PublishDone]

    def __init__(self, generation: int, table: ParameterTable, offer: protocol.OfferSnapshot) -> None:
        self.generation = generation
        self.is_blocking = offer.is_blocking
        self.wait = offer.wait
        self.parts = PartQueue(table, self._note_taken, offer.origin)
        self._has_moved = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def is_over(self) -> bool:
        """Whether no further part is wanted."""
        return self.parts.is_whole or self.outcome.done()

    def follow(self, outcome: asyncio.Future[PublishDone]) -> None:
        """Learn where the outcome will be."""
        self.outcome = outcome
        outcome.add_done_callback(lambda _: self._has_moved.set())

    def _note_taken(self) -> None:
        # Called by the encoder's thread, which at shutdown may outlast the loop.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._has_moved.set)

    async def wait_for_room(self) -> None:
        """Wait until every part that came is in work or done with, or the publish ended."""
        while self.parts.waiting_count and not self.outcome.done():
            self._has_moved.clear()
            if self.parts.waiting_count:
                await self._has_moved.wait()
