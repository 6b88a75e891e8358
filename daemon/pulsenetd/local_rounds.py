"""The session side of rounds: what a training process says on its connection, and the answers it gets."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.local import rounds_protocol as local
from pulsenet.local.mixing_protocol import MIXING_MESSAGE_TYPES
from pulsenet.local.protocol import Frame, LocalMessage
from pulsenet.node.events import ContributionStored
from pulsenet.outer.floats import fp32_from_bits
from pulsenet.outer.inner_state import compute_slots_size_max
from pulsenet.tensors.params import ParameterTable
from pulsenetd.handlers.training import TrainingDesk
from pulsenetd.local_blobs import BlobTraffic, Link
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.storage.round_blobs import RoundBlobs

WAIT_SECONDS_MAX: Final = 300.0
"""Longest wait an order may be asked for with; the process asks again."""


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
        self._traffic: BlobTraffic | None = None

    async def answer(self, frame: Frame) -> None:
        """Answer one message of :mod:`pulsenet.local.rounds_protocol`.

        Raises:
            RemoteProtocolError: It is refused; the connection closes.
        """
        hook = self._hook
        if hook is None:
            raise RemoteProtocolError("not-trainer", "this node trains nothing: attach to one with the role trainer")
        message = frame.message
        if isinstance(message, MIXING_MESSAGE_TYPES):
            raise RemoteProtocolError("no-mixing", "this run closes rounds: use pulsenet.join_rounds()")
        if isinstance(message, local.GetRoundSettings):
            await self._link.send(await hook.settings())
        elif isinstance(message, local.OpenRounds):
            await self._open(hook, message)
        elif self._table is None or self._traffic is None:
            raise RemoteProtocolError("message-unexpected", f"{type(message).__name__} before the rounds are open")
        elif isinstance(message, local.PutBlobPart):
            await self._traffic.put(message, frame)
        elif isinstance(message, local.FetchBlobPart):
            await self._traffic.fetch(message)
        elif isinstance(message, local.AwaitOrder):
            seconds = min(max(message.timeout_ms, 0) / 1000, WAIT_SECONDS_MAX)
            order = await self._link.unless_closed(hook.desk.next_order(seconds))
            await self._link.send(local.NoOrder() if order is None else order)
        else:
            await self._take(hook, self._traffic, message)
            await self._link.send(local.Waiting())

    async def close(self) -> None:
        """The connection is gone: so is the process, as far as rounds go."""
        if self._hook is None or self._traffic is None:
            return
        traffic, self._traffic, self._table = self._traffic, None, None
        self._hook.desk.close(self)
        await traffic.run(traffic.blobs.close)
        logger.info("the training process left the rounds")

    async def _open(self, hook: RoundsHook, message: local.OpenRounds) -> None:
        settings = await hook.settings()
        table = await self._decode_table(message.table)
        hook.desk.open(self)
        # From here on, closing the connection gives the place up again.
        self._table = table
        self._traffic = BlobTraffic(
            self._link,
            hook.make_blobs(),
            hook.threads,
            hook.metrics,
            size_bytes_max=_compute_blob_size_bytes_max(table, settings.algorithm),
            on_damage=hook.on_damage,
        )
        await hook.check_masters(table, message.self_test)
        logger.info("a training process takes part in the rounds")
        await self._link.send(local.RoundsOpened())

    async def _take(self, hook: RoundsHook, traffic: BlobTraffic, message: LocalMessage) -> None:
        desk = hook.desk
        match message:
            case local.HoldState(round_index, state_root):
                if (round_index is None) != (state_root is None) or (round_index or 0) < 0:
                    raise RemoteProtocolError("schema", "a state has both a round and a root")
                await desk.hold(round_index, state_root)
            case local.OfferContribution():
                traffic.check_put(message.blob_id, message.encoded_size_bytes)
                desk.offer(_as_stored(message))
            case local.AbstainRound(round_index, reason):
                desk.abstain(round_index, reason)
            case local.Checked():
                desk.finish_check(message)
            case local.Summed():
                stored = desk.stored_slices()
                for each in message.slices:
                    if each.slice_index in stored:
                        traffic.check_put(each.blob_id, each.encoded_size_bytes)
                desk.finish_sum(message)
            case local.SumRefused():
                desk.refuse_sum(message)
            case local.Stepped():
                desk.finish_step(message)
                await traffic.run(traffic.blobs.let_go)
            case local.StepFailed():
                desk.fail_step(message)
            case local.Restored():
                desk.finish_restore(message)
            case local.RestoreRefused():
                desk.refuse_restore(message)
            case local.AnchorStored():
                traffic.check_put(message.blob_id, message.encoded_size_bytes)
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
