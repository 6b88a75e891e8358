"""The session side of mixing: what a training process says on its connection, and the answers it gets."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.local import mixing_protocol as local
from pulsenet.local import rounds_protocol as rounds
from pulsenet.local.protocol import Frame
from pulsenet.outer.floats import fp32_from_bits
from pulsenet.tensors.params import ParameterTable
from pulsenetd.handlers.mixing import MixingDesk, as_job
from pulsenetd.local_blobs import BlobTraffic, Link
from pulsenetd.local_rounds import RoundsHook, RoundsSession
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.storage.round_blobs import RoundBlobs

WAIT_SECONDS_MAX: Final = 120.0
"""Longest wait an answer may be asked for with; the process asks again."""


@dataclass(frozen=True, slots=True)
class MixingHook:
    """What a node offers to the training process that mixes through it."""

    desk: MixingDesk
    settings: Callable[[], Awaitable[rounds.RoundSettingsReply]]
    check_masters: Callable[[ParameterTable, Digest], Awaitable[None]]
    """Refuse masters (``table``) or arithmetic (``self-test``) that the run does not have, and remember them."""
    make_blobs: Callable[[], RoundBlobs]
    on_round: Callable[[local.TellRound], None]
    """Told what a round did."""
    threads: Executor
    metrics: Metrics


class MixingSession:
    """One connection's part in mixing; made for every connection, used by those that speak of it.

    Args:
        hook: The node's offer.
        link: The connection.
        decode_table: Decodes a parameter table off the event loop.
    """

    def __init__(
        self, hook: MixingHook, link: Link, decode_table: Callable[[bytes], Awaitable[ParameterTable]]
    ) -> None:
        self._hook = hook
        self._link = link
        self._decode_table = decode_table
        self._traffic: BlobTraffic | None = None

    async def answer(self, frame: Frame) -> None:
        """Answer one message of :mod:`pulsenet.local.mixing_protocol`, or of those it shares with rounds.

        Raises:
            RemoteProtocolError: It is refused; the connection closes.
        """
        message, traffic = frame.message, self._traffic
        if isinstance(message, rounds.GetRoundSettings):
            await self._link.send(await self._hook.settings())
        elif isinstance(message, rounds.OpenRounds):
            raise RemoteProtocolError("no-rounds", "this run mixes: use pulsenet.join_mixing()")
        elif isinstance(message, local.OpenMixing):
            await self._open(message)
        elif traffic is None:
            raise RemoteProtocolError("message-unexpected", f"{type(message).__name__} before mixing is open")
        elif isinstance(message, rounds.PutBlobPart):
            await traffic.put(message, frame)
        elif isinstance(message, rounds.FetchBlobPart):
            await traffic.fetch(message)
        elif isinstance(message, local.Locate | local.RefuseState | local.WantRound | local.AwaitMix):
            await self._wait_for(message, traffic)
        else:
            await self._take(frame, traffic)
            await self._link.send(rounds.Waiting())

    async def close(self) -> None:
        """The connection is gone: so is the process, as far as mixing goes."""
        traffic, self._traffic = self._traffic, None
        if traffic is None:
            return
        self._hook.desk.close(self)
        await traffic.run(traffic.blobs.close)
        logger.info("the training process left the mixing")

    async def _open(self, message: local.OpenMixing) -> None:
        hook = self._hook
        table = await self._decode_table(message.table)
        hook.desk.open(self)
        # From here on, closing the connection gives the place up again.
        self._traffic = BlobTraffic(
            self._link,
            hook.make_blobs(),
            hook.threads,
            hook.metrics,
            size_bytes_max=3 * 4 * table.element_count + 64 * len(table.tensors) + limits.CHUNK_SIZE_BYTES_MAX,
            on_damage=lambda: None,
        )
        await hook.check_masters(table, message.self_test)
        hook.desk.masters = table
        logger.info("a training process mixes with others")
        await self._link.send(local.MixingOpened())

    async def _wait_for(
        self, message: local.Locate | local.RefuseState | local.WantRound | local.AwaitMix, traffic: BlobTraffic
    ) -> None:
        desk = self._hook.desk
        seconds = min(message.timeout_ms / 1000, WAIT_SECONDS_MAX)
        found: local.Begin | local.RoundOpened | local.MixDone | None
        match message:
            case local.Locate(round_index, open_round_index):
                found = await self._link.unless_closed(desk.locate(round_index, open_round_index, seconds))
            case local.RefuseState(reason):
                found = await self._link.unless_closed(desk.refuse_state(reason, seconds))
            case local.WantRound(round_index):
                found = await self._link.unless_closed(desk.want_round(round_index, seconds))
                await traffic.run(traffic.blobs.let_go)
            case local.AwaitMix(round_index, job):
                found = await self._link.unless_closed(desk.await_mix(round_index, as_job(job), seconds))
        await self._link.send(rounds.NoOrder() if found is None else found)

    async def _take(self, frame: Frame, traffic: BlobTraffic) -> None:
        desk = self._hook.desk
        match frame.message:
            case local.StorePart() as message:
                await self._keep(traffic, message.slices)
                desk.store_part(message)
            case local.FailPart() as message:
                desk.fail_part(message)
            case local.StoreIterate() as message:
                await self._keep(traffic, (message.part,))
                desk.store_iterate(message)
            case local.StoreProbe() as message:
                desk.store_probe(message)
            case local.TellRound() as message:
                _check_reals(message)
                self._hook.on_round(message)
            case message:
                raise RemoteProtocolError("message-unexpected", type(message).__name__)

    async def _keep(self, traffic: BlobTraffic, parts: tuple[local.PartBlob, ...]) -> None:
        """Let the machine decide how long the blobs of a vector stay."""
        for part in {part.blob_id: part for part in parts}.values():
            traffic.check_put(part.blob_id, part.encoded_size_bytes)
        for blob_id in {part.blob_id for part in parts}:
            await traffic.run(lambda blob_id=blob_id: traffic.blobs.hand_over(blob_id))  # type: ignore[misc]


def _check_reals(message: local.TellRound) -> None:
    bits = [message.inner_seconds_bits, message.blocked_seconds_bits, message.utilization_bits]
    bits += [message.delta_norm_bits, message.distance_bits or 0, message.start_square_bits or 0]
    bits += [message.end_square_bits or 0, message.noise_square_bits or 0]
    if any(one >= 1 << 32 or not 0.0 <= fp32_from_bits(one) < math.inf for one in bits):
        raise RemoteProtocolError("schema", "a number that is not finite")


def make_rounds_session(
    hook: RoundsHook | MixingHook | None, link: Link, decode_table: Callable[[bytes], Awaitable[ParameterTable]]
) -> RoundsSession | MixingSession:
    """Return what a connection speaks with about rounds, or about mixing where the run mixes."""
    if isinstance(hook, MixingHook):
        return MixingSession(hook, link, decode_table)
    return RoundsSession(hook, link, decode_table)
