"""The session side of rounds: what a training process says on its connection, and the answers it gets."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest
from pulsenet.local import rounds_protocol as local
from pulsenet.local.protocol import Frame, LocalMessage
from pulsenet.local.shared_memory import Region
from pulsenet.node.events import ContributionStored
from pulsenet.outer.floats import fp32_from_bits
from pulsenet.outer.inner_state import compute_slots_size_max
from pulsenet.tensors.params import ParameterTable
from pulsenetd.handlers.training import TrainingDesk
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.storage.round_blobs import ReadPart, RoundBlobs

WAIT_SECONDS_MAX: Final = 300.0
"""Longest wait an order may be asked for with; the process asks again."""

Result = TypeVar("Result")


class Link(Protocol):
    """The connection of the process, as a session uses it."""

    async def send(self, message: LocalMessage, *, descriptor: int | None = None) -> None:
        """Send a frame."""

    async def unless_closed(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work that is cancelled if the process goes away."""


@dataclass(frozen=True, slots=True)
class RoundsHook:
    """What a node offers to the training process of its rounds."""

    desk: TrainingDesk
    settings: Callable[[], Awaitable[local.RoundSettingsReply]]
    """What the run says, or a refusal: ``no-rounds``."""
    check_masters: Callable[[ParameterTable, Digest], Awaitable[None]]
    """Refuse masters (``table``) or arithmetic (``self-test``) that the run does not have."""
    make_blobs: Callable[[], RoundBlobs]
    on_damage: Callable[[], None]
    """Told that a blob of a round lost chunks, which are to be fetched again."""
    on_residual: Callable[[float], None]
    """Told the norm of what the gate holds back."""
    threads: Executor
    """Where blobs are written and read."""
    metrics: Metrics


class RoundsSession:
    """One connection's part in the rounds; made for every connection, used by those that speak of rounds.

    Args:
        hook: The node's offer; ``None`` on a node that does not train.
        link: The connection.
        decode_table: Decodes a parameter table off the event loop.
    """

    def __init__(
        self, hook: RoundsHook | None, link: Link, decode_table: Callable[[bytes], Awaitable[ParameterTable]]
    ) -> None:
        self._hook = hook
        self._link = link
        self._decode_table = decode_table
        self._table: ParameterTable | None = None
        self._blobs: RoundBlobs | None = None
        self._size_bytes_max = 0
        """Of a blob."""
        self._refused_count = 0
        """Parts that the disk refused since it took one."""

    async def answer(self, frame: Frame) -> None:
        """Answer one message of :mod:`pulsenet.local.rounds_protocol`.

        Raises:
            RemoteProtocolError: It is refused; the connection closes.
        """
        hook = self._hook
        if hook is None:
            raise RemoteProtocolError("not-trainer", "this node trains nothing: attach to one with the role trainer")
        message = frame.message
        if isinstance(message, local.GetRoundSettings):
            await self._link.send(await hook.settings())
        elif isinstance(message, local.OpenRounds):
            await self._open(hook, message)
        elif self._table is None or self._blobs is None:
            raise RemoteProtocolError("message-unexpected", f"{type(message).__name__} before the rounds are open")
        elif isinstance(message, local.PutBlobPart):
            await self._put(hook, self._blobs, message, frame)
        elif isinstance(message, local.FetchBlobPart):
            await self._fetch(hook, self._blobs, message)
        elif isinstance(message, local.AwaitOrder):
            seconds = min(max(message.timeout_ms, 0) / 1000, WAIT_SECONDS_MAX)
            order = await self._link.unless_closed(hook.desk.next_order(seconds))
            await self._link.send(local.NoOrder() if order is None else order)
        else:
            await self._take(hook, self._blobs, message)
            await self._link.send(local.Waiting())

    async def close(self) -> None:
        """The connection is gone: so is the process, as far as rounds go."""
        if self._hook is None or self._blobs is None:
            return
        blobs, self._blobs, self._table = self._blobs, None, None
        self._hook.desk.close(self)
        await self._run(self._hook, blobs.close)
        logger.info("the training process left the rounds")

    async def _open(self, hook: RoundsHook, message: local.OpenRounds) -> None:
        settings = await hook.settings()
        table = await self._decode_table(message.table)
        hook.desk.open(self)
        # From here on, closing the connection gives the place up again.
        self._table, self._blobs = table, hook.make_blobs()
        self._size_bytes_max = _compute_blob_size_bytes_max(table, settings.algorithm)
        await hook.check_masters(table, message.self_test)
        logger.info("a training process takes part in the rounds")
        await self._link.send(local.RoundsOpened())

    async def _take(self, hook: RoundsHook, blobs: RoundBlobs, message: LocalMessage) -> None:
        desk = hook.desk
        match message:
            case local.HoldState(round_index, state_root):
                if (round_index is None) != (state_root is None) or (round_index or 0) < 0:
                    raise RemoteProtocolError("schema", "a state has both a round and a root")
                await desk.hold(round_index, state_root)
            case local.OfferContribution():
                self._check_put(blobs, message.blob_id, message.encoded_size_bytes)
                desk.offer(_as_stored(message))
            case local.AbstainRound(round_index, reason):
                desk.abstain(round_index, reason)
            case local.Checked():
                desk.finish_check(message)
            case local.Summed():
                stored = desk.stored_slices()
                for each in message.slices:
                    if each.slice_index in stored:
                        self._check_put(blobs, each.blob_id, each.encoded_size_bytes)
                desk.finish_sum(message)
            case local.SumRefused():
                desk.refuse_sum(message)
            case local.Stepped():
                desk.finish_step(message)
                await self._run(hook, blobs.let_go)
            case local.StepFailed():
                desk.fail_step(message)
            case local.Restored():
                desk.finish_restore(message)
            case local.RestoreRefused():
                desk.refuse_restore(message)
            case local.AnchorStored():
                self._check_put(blobs, message.blob_id, message.encoded_size_bytes)
                desk.finish_anchor(message)
            case local.AnchorRefused():
                desk.refuse_anchor(message)
            case local.TellResidual(norm_bits):
                norm = fp32_from_bits(norm_bits) if norm_bits < 1 << 32 else -1.0
                if not 0.0 <= norm < math.inf:
                    raise RemoteProtocolError("schema", f"a norm of bits {norm_bits:#x}")
                hook.on_residual(float(norm))
            case _:
                raise RemoteProtocolError("message-unexpected", type(message).__name__)

    async def _put(self, hook: RoundsHook, blobs: RoundBlobs, message: local.PutBlobPart, frame: Frame) -> None:
        if not 1 <= message.size_bytes <= local.PART_SIZE_BYTES_MAX:
            raise RemoteProtocolError("handoff-size", f"a part of {message.size_bytes} bytes")
        region: Region | None = None
        try:
            region = opened = Region.open_snapshot(frame.take_descriptor(), message.size_bytes)
            blob_id, size_bytes = await self._run(
                hook,
                lambda: blobs.put_part(opened.bytes, is_last=message.is_last, size_bytes_max=self._size_bytes_max),
            )
        except StorageError as error:
            hook.metrics.count("rejected", error.reason)
            # The process tries again, for as long as the disk is full: said once, counted each time.
            if not self._refused_count:
                logger.warning("a blob of the training process was not taken: %s", error)
            self._refused_count += 1
            await self._link.send(local.BlobRefused(error.reason))
        else:
            if self._refused_count:
                logger.info("blobs are taken again, after %d that were not", self._refused_count)
                self._refused_count = 0
            await self._link.send(local.BlobTaken(blob_id, size_bytes))
        finally:
            if region is not None:
                region.close()

    async def _fetch(self, hook: RoundsHook, blobs: RoundBlobs, message: local.FetchBlobPart) -> None:
        if not 1 <= message.size_bytes_max <= local.PART_SIZE_BYTES_MAX:
            raise RemoteProtocolError("handoff-size", f"a part of {message.size_bytes_max} bytes is asked for")
        try:
            part: ReadPart = await self._run(
                hook, lambda: blobs.read_part(message.blob_id, message.offset_bytes, message.size_bytes_max)
            )
        except StorageError as error:
            hook.metrics.count("rejected", error.reason)
            if error.reason == "damaged":
                logger.warning("a blob of the rounds lost chunks on the disk: it is fetched again")
                hook.on_damage()
            await self._link.send(local.NoBlobPart(error.reason))
            return
        try:
            await self._link.send(local.BlobPart(part.size_bytes, part.is_last), descriptor=part.descriptor)
        finally:
            os.close(part.descriptor)

    def _check_put(self, blobs: RoundBlobs, blob_id: Digest, size_bytes: int) -> None:
        if blobs.made_size_bytes(blob_id) != size_bytes:
            raise RemoteProtocolError("not-found", f"no blob of {size_bytes} bytes with this id was put")

    async def _run(self, hook: RoundsHook, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(hook.threads, work)


def _compute_blob_size_bytes_max(table: ParameterTable, algorithm: str) -> int:
    """Return the most bytes that a contribution or a state anchor of these masters may have.

    An anchor holds two FP32 values an element, under ``ddp`` theta and whatever the inner optimizer keeps; a
    contribution a position and a value, grown by no more than a patch.
    """
    if algorithm == "ddp":
        inner = sum(compute_slots_size_max(spec.element_count) for spec in table.tensors)
        return inner + 4 * table.element_count + 64 * len(table.tensors) + limits.CHUNK_SIZE_BYTES_MAX
    return 3 * 4 * table.element_count + 64 * len(table.tensors) + limits.CHUNK_SIZE_BYTES_MAX


def _as_stored(offer: local.OfferContribution) -> ContributionStored:
    return ContributionStored(
        round_index=offer.round_index,
        base_state_root=offer.base_state_root,
        blob_id=offer.blob_id,
        encoded_size_bytes=offer.encoded_size_bytes,
        entry_count=offer.entry_count,
        element_count=offer.element_count,
        norm_bits=offer.norm_bits,
        codec_id=offer.codec_id,
    )
