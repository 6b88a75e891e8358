"""The user's end of the hand-off: a training loop or an engine talks to the daemon on its machine.

Everything here blocks and may be called from several threads. The daemon may go and come back at any time:
the client connects again by itself, and a call that cannot know its outcome says so.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from pulsenet.chain.records import RolloutBatch
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, UnavailableError
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.local import protocol
from pulsenet.local.handover import REPLY_SECONDS_MAX, PartSource, Reply, WholeParts, expect, hand_over
from pulsenet.local.handover import PublishResult as PublishResult
from pulsenet.local.parts import PartLayout, SealedPart
from pulsenet.local.protocol import LocalMessage, PublishStatus
from pulsenet.local.rollouts import ReceivedRollouts, unpack_rollouts
from pulsenet.local.shared_memory import check_snapshot
from pulsenet.local.sockets import Channel, socket_path
from pulsenet.local.tasks import Task, read_task
from pulsenet.local.update import Update
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.schema import INTEGER_MAX, cut_text, decode_value

SOFTWARE: Final = "pulsenet-python"

CONNECT_SECONDS_MAX: Final = 5.0
"""A Unix socket connects immediately, unless its owner is stopped."""

RECONNECT_SECONDS_MIN: Final = 0.05
RECONNECT_SECONDS_MAX: Final = 2.0
"""Back-off between tries to reach a daemon that is away, doubled each time."""


RoomReply = TypeVar("RoomReply", protocol.RolloutsTaken, protocol.TasksQueued)
"""What says when there may be room for what did not fit."""


class Client:
    """Talks to the daemon of one data directory."""

    def __init__(self, data_directory: Path | str, *, software: str = SOFTWARE) -> None:
        self.path = socket_path(Path(data_directory))
        self._software = software
        self._process_id = os.getpid()
        """Whose connections these are."""
        self._mutex = threading.Lock()
        self._idle: list[Channel] = []
        self._engine_mutex = threading.Lock()
        self._engine: Channel | None = None
        self._generation: int | None = None
        self._is_closed = False
        self.role = ""
        """The daemon's role, known after the first connection."""

    @classmethod
    def connect(cls, data_directory: Path | str, *, timeout_seconds: float = 10.0, software: str = SOFTWARE) -> Client:
        """Return a client whose daemon answered.

        Raises:
            UnavailableError: It did not within the time; the message names the socket.
        """
        client = cls(data_directory, software=software)
        client._put_back(client._open_channel(time.monotonic() + timeout_seconds))
        return client

    def close(self) -> None:
        """Close every connection; calls in other threads fail with ``UnavailableError``."""
        self._leave_to_parent()
        with self._mutex:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()
        # Not under its lock: this is what wakes a thread that waits for an update. That thread closes it then.
        engine = self._engine
        if engine is not None:
            engine.abort()
        if self._engine_mutex.acquire(blocking=False):
            try:
                self._drop_engine()
            finally:
                self._engine_mutex.release()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Training

    def publish(
        self,
        table: ParameterTable,
        descriptor: int,
        trainer_step: int,
        wait: bool = False,
        *,
        timeout_seconds: float | None = None,
    ) -> PublishResult:
        """Hand a sealed snapshot to the daemon; it stays the caller's to close.

        Trouble with the daemon is a result, not an exception: a training loop goes on.

        Args:
            table: The snapshot's tensors.
            descriptor: From :func:`pulsenet.local.shared_memory.write_snapshot`.
            trainer_step: Optimiser steps so far, shown to the operator.
            wait: Return only once the version is committed, replaced or given up; otherwise at ``queued``.
            timeout_seconds: With ``wait``, how long to wait for a daemon that is away, and for the outcome.

        Raises:
            LocalProtocolError: The snapshot is not sealed or does not fit the table.
        """
        try:
            check_snapshot(descriptor, table.layout_size_bytes)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"not a snapshot of this table: {error}") from error
        whole = PartLayout(table, 0, len(table.tensors))

        def make_parts() -> Generator[SealedPart]:
            part = SealedPart(whole, os.dup(descriptor))
            try:
                yield part
            finally:
                part.close()

        return self.publish_from(table, WholeParts(make_parts), trainer_step, wait, timeout_seconds=timeout_seconds)

    def publish_from(
        self,
        table: ParameterTable,
        source: PartSource,
        trainer_step: int,
        wait: bool = False,
        *,
        is_blocking: bool = False,
        is_repeatable: bool = True,
        timeout_seconds: float | None = None,
        consensus: bool = True,
    ) -> PublishResult:
        """Hand weights over part by part; the daemon encodes each while the next is made.

        Trouble with the daemon is a result, not an exception: a training loop goes on.

        Args:
            table: The tensors.
            source: Makes the parts, as :func:`pulsenet.local.shared_memory.write_parts` does; asked for them once the
                daemon wants them, and anew at each try.
            trainer_step: As in :meth:`publish`.
            wait: As there; implied by ``is_blocking``.
            is_blocking: Let the daemon take each part into work before the next but one is made: two parts are in
                memory at most, whatever the size of the model.
            is_repeatable: Whether the source may be asked a second time.
            timeout_seconds: When waiting, how long at most in all.
            consensus: Whether all members of a run that mixes hold these weights.
        """
        wait = wait or is_blocking
        now = time.monotonic()
        # Without ``wait`` one try has to do: the optimiser must not stand still because the daemon is away.
        give_up_at = now if not wait else float("inf") if timeout_seconds is None else now + timeout_seconds
        offer = protocol.OfferSnapshot(trainer_step, table.encode(), is_blocking, wait, consensus=consensus)
        try_count = 0

        def begin(base_number: int | None) -> Generator[SealedPart]:
            nonlocal try_count
            try_count += 1
            return source.make_parts(base_number)

        while True:
            try:
                with self._channel(give_up_at) as channel:
                    numbered = replace(offer, origin=source.begin())
                    return hand_over(channel, numbered, begin, len(table.tensors), give_up_at)
            except UnavailableError as error:
                is_over = try_count > 0 and not is_repeatable
                if self._is_closed or is_over or time.monotonic() >= give_up_at:
                    return PublishResult(PublishStatus.FAILED, reason=f"unreachable: {error}")
            except RemoteProtocolError as error:
                return PublishResult(PublishStatus.FAILED, reason=str(error))

    def take_rollouts(self, count_max: int = 64, timeout_seconds: float = 0.0) -> list[ReceivedRollouts]:
        """Return up to ``count_max`` verified batches, oldest first, waiting for the first one if there is none.

        Raises:
            UnavailableError: The daemon is away.
        """
        request = protocol.TakeRollouts(count_max, _milliseconds(timeout_seconds))
        reply = self._request(request, protocol.RolloutsReply, timeout_seconds)
        received = [
            unpack_rollouts(signed.peer_id, decode_value(RolloutBatch, signed.batch), signed.number_min)
            for signed in reply.batches
        ]
        return [batch for batch in received if batch.arrays.sample_count]

    def tell_checks(self, peer_id: PeerId, checked_count: int, mismatched_count: int) -> None:
        """Have the daemon count samples of a key whose logprobs were recomputed.

        Raises:
            UnavailableError: The daemon is away.
        """
        self._request(protocol.TellChecks(peer_id, checked_count, mismatched_count), protocol.ChecksNoted, 0.0)

    def send_tasks(
        self, contents: tuple[str, ...], lease_seconds: float, timeout_seconds: float = 0.0
    ) -> protocol.TasksQueued:
        """Hand tasks (see :func:`pulsenet.local.tasks.encode_tasks`) over, all or none, waiting so long for room.

        Raises:
            UnavailableError: The daemon is away.
        """
        request = protocol.SendTasks(contents, _milliseconds(lease_seconds))
        return self._ask_for_room(request, protocol.TasksQueued, timeout_seconds)

    # Serving

    def take_tasks(self, count_max: int, timeout_seconds: float = 0.0) -> list[Task]:
        """Return tasks leased to this node, all of one trainer; waits so long for the first.

        Raises:
            UnavailableError: The daemon is away.
        """
        request = protocol.TakeTasks(count_max, _milliseconds(timeout_seconds))
        reply = self._request(request, protocol.TasksGiven, timeout_seconds)
        return [task for given in reply.tasks if (task := read_task(given)) is not None]

    def next_update(
        self, engine_version: Version | None, timeout_seconds: float = 0.0, *, engine_root: Digest | None = None
    ) -> Update | None:
        """Wait for weights newer than ``engine_version``; ``None`` when the time is up.

        Args:
            engine_version: What the engine serves now, or ``None`` if it does not know.
            timeout_seconds: How long to wait, also for a daemon that is away.
            engine_root: Root of ``engine_version``, if it is known.

        Raises:
            UnavailableError: The daemon was away all the time.
        """
        self._leave_to_parent()
        give_up_at = time.monotonic() + timeout_seconds
        while True:
            with self._engine_turn():
                try:
                    return self._ask_for_update(engine_version, engine_root, give_up_at)
                except UnavailableError:
                    self._drop_engine()
                    if self._is_closed or time.monotonic() >= give_up_at:
                        raise
                except RemoteProtocolError:
                    self._drop_engine()
                    raise

    def _ask_for_update(
        self, engine_version: Version | None, engine_root: Digest | None, give_up_at: float
    ) -> Update | None:
        if self._engine is None:
            self._engine = self._open_channel(give_up_at)
            if self._is_closed:  # meanwhile, by a thread that found nothing to wake
                raise UnavailableError("this client is closed")
        rest_seconds = max(0.0, give_up_at - time.monotonic())
        request = protocol.RequestUpdate(engine_version, engine_root, _milliseconds(rest_seconds))
        self._engine.send(request, timeout_seconds=REPLY_SECONDS_MAX)
        frame = self._engine.receive(rest_seconds + REPLY_SECONDS_MAX)
        if isinstance(frame.message, protocol.NoUpdate):
            return None
        try:
            reply = expect(frame.message, protocol.UpdateReply)
            table = ParameterTable.decode(reply.table)
            update = Update(
                generation=reply.generation,
                kind=reply.kind,
                base_version=reply.base_version,
                version=reply.version,
                root=reply.root,
                table=table,
                size_bytes=reply.size_bytes,
                descriptor=frame.take_descriptor(),
            )
        finally:
            frame.close()
        self._generation = reply.generation
        return update

    def confirm(self, version: Version | None, ok: bool, reason: str = "") -> bool:
        """Tell the daemon what became of the last update.

        Args:
            version: What the engine serves now; ``None`` if its weights are unknown.
            ok: Whether the update was applied.
            reason: Why not, beginning with a stable code.

        Returns:
            False if the daemon withdrew the hand-over meanwhile: the weights must be loaded again.

        Raises:
            UnavailableError: The daemon went away; the next ``next_update`` tells it what the engine serves.
            LocalProtocolError: There is no update to confirm.
        """
        self._leave_to_parent()
        with self._engine_turn():
            if self._generation is None:
                raise LocalProtocolError("confirm without an update")
            if self._engine is None:
                self._generation = None
                raise UnavailableError("the daemon went away before the update was confirmed")
            request = protocol.ConfirmUpdate(self._generation, ok, version, cut_text(reason, 1000))
            self._generation = None
            try:
                self._engine.send(request, timeout_seconds=REPLY_SECONDS_MAX)
                reply = expect(self._engine.receive(REPLY_SECONDS_MAX).message, protocol.Confirmed)
            except (UnavailableError, RemoteProtocolError):
                self._drop_engine()
                raise
            return reply.accepted

    def submit_rollouts(
        self, rollouts: protocol.SubmitRollouts, timeout_seconds: float = 0.0
    ) -> protocol.RolloutsTaken:
        """Hand a batch (see :func:`pulsenet.local.rollouts.pack_rollouts`) over for signing and sending.

        Args:
            rollouts: The batch. Once it is accepted it is on the daemon's disk, and sent until a trainer has it.
            timeout_seconds: How long to wait for a daemon that is away, and for room where too many batches wait.

        Raises:
            UnavailableError: The daemon is away, or went away before it answered: it may have the batch.
        """
        return self._ask_for_room(rollouts, protocol.RolloutsTaken, timeout_seconds)

    def status(self) -> dict[str, Any]:
        """Return how the node is.

        Raises:
            UnavailableError: The daemon is away.
        """
        reply = self._request(protocol.GetStatus(), protocol.StatusReply, 0.0)
        try:
            return dict(json.loads(reply.status).items())
        except (ValueError, AttributeError, RecursionError) as error:
            raise RemoteProtocolError("schema", "the status is no JSON object") from error

    # Connections

    def open_channel(self, timeout_seconds: float) -> Channel:
        """Return an attached connection of the caller's own, waiting so long for a daemon that is away.

        Raises:
            UnavailableError: It did not come.
        """
        return self._open_channel(time.monotonic() + timeout_seconds)

    def _ask_for_room(self, message: LocalMessage, reply_type: type[RoomReply], timeout_seconds: float) -> RoomReply:
        """Ask again, as often as there is time, while the daemon says that it has no room yet."""
        give_up_at = time.monotonic() + timeout_seconds
        while True:
            reply = self._request(message, reply_type, max(0.0, give_up_at - time.monotonic()))
            pause_seconds = reply.retry_after_ms / 1000
            if not pause_seconds or time.monotonic() + pause_seconds > give_up_at:
                return reply
            time.sleep(pause_seconds)

    def _request(self, message: LocalMessage, reply_type: type[Reply], timeout_seconds: float) -> Reply:
        with self._channel(time.monotonic() + timeout_seconds) as channel:
            channel.send(message, timeout_seconds=REPLY_SECONDS_MAX)
            return expect(channel.receive(timeout_seconds + REPLY_SECONDS_MAX).message, reply_type)

    @contextmanager
    def _channel(self, give_up_at: float) -> Iterator[Channel]:
        """Lend a connection for one request; it is closed, not reused, if the request fails."""
        self._leave_to_parent()
        with self._mutex:
            channel = self._idle.pop() if self._idle else None
        if channel is None or not channel.is_open():
            if channel is not None:
                channel.close()
            channel = self._open_channel(give_up_at)
        try:
            yield channel
        except BaseException:
            channel.close()
            raise
        self._put_back(channel)

    @contextmanager
    def _engine_turn(self) -> Iterator[None]:
        """Speak for the engine, one thread at a time; the last to do so closes the connection of a closed client."""
        with self._engine_mutex:
            try:
                yield
            finally:
                if self._is_closed:
                    self._drop_engine()

    def _leave_to_parent(self) -> None:
        """In a process that was forked off, such as a data loader's worker, begin with connections of its own.

        The parent goes on speaking over those that were inherited, and its threads over the locks as they were.
        """
        if self._process_id == os.getpid():
            return
        inherited = [*self._idle, *([] if self._engine is None else [self._engine])]
        self._process_id, self._idle, self._engine, self._generation = os.getpid(), [], None, None
        self._mutex, self._engine_mutex = threading.Lock(), threading.Lock()
        for channel in inherited:
            channel.close()

    def _put_back(self, channel: Channel) -> None:
        with self._mutex:
            if not self._is_closed:
                self._idle.append(channel)
                return
        channel.close()

    def _open_channel(self, give_up_at: float) -> Channel:
        pause_seconds = RECONNECT_SECONDS_MIN
        while True:
            if self._is_closed:
                raise UnavailableError("this client is closed")
            try:
                return self._attach()
            except UnavailableError:
                rest_seconds = give_up_at - time.monotonic()
                if rest_seconds <= 0:
                    raise
                time.sleep(min(pause_seconds, rest_seconds))
                pause_seconds = min(pause_seconds * 2, RECONNECT_SECONDS_MAX)

    def _attach(self) -> Channel:
        channel = Channel(self.path, CONNECT_SECONDS_MAX)
        try:
            attach = protocol.Attach(protocol.PROTOCOL_VERSION, self._software)
            channel.send(attach, timeout_seconds=CONNECT_SECONDS_MAX)
            attached = expect(channel.receive(REPLY_SECONDS_MAX).message, protocol.Attached)
        except BaseException:
            channel.close()
            raise
        self.role = attached.role
        return channel

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _milliseconds(seconds: float) -> int:
    return max(0, int(min(seconds * 1000, INTEGER_MAX)))
