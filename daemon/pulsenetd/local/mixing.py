"""The session side of mixing: what a training process says on its connection, and the answers it gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pulsenet.errors import RemoteProtocolError
from pulsenet.local import mixing_protocol as local
from pulsenet.local import rounds_protocol as rounds
from pulsenet.local.framing import Frame
from pulsenet.local.protocol import LocalMessage
from pulsenet.outer.floats import fp32_from_bits
from pulsenetd.handlers.mixing import MixingDesk, as_job
from pulsenetd.local.blobs import BlobTraffic
from pulsenetd.local.outer import OuterHook, OuterSession

WAIT_SECONDS_MAX: Final = 120.0
"""Longest wait an answer may be asked for with; the process asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingHook(OuterHook):
    """What a node offers to the training process that mixes through it."""

    desk: MixingDesk
    on_round: Callable[[local.TellRound], None]
    """Told what a round did."""


class MixingSession(OuterSession[MixingHook]):
    """One connection's part in mixing."""

    opening = local.OpenMixing
    opened = local.MixingOpened()
    foreign = (rounds.OpenRounds,)
    refusal = ("no-rounds", "this run mixes: use pulsenet.join_mixing()")

    async def _answer(self, frame: Frame, traffic: BlobTraffic) -> None:
        message = frame.message
        if isinstance(message, local.Locate | local.RefuseState | local.WantRound | local.AwaitMix):
            await self._wait_for(message, traffic)
        else:
            await self._take(message, traffic)
            await self._link.send(rounds.Waiting())

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
                await traffic.let_go()
            case local.AwaitMix(round_index, job):
                found = await self._link.unless_closed(desk.await_mix(round_index, as_job(job), seconds))
        await self._link.send(rounds.NoOrder() if found is None else found)

    async def _take(self, message: LocalMessage, traffic: BlobTraffic) -> None:
        desk = self._hook.desk
        match message:
            case local.StorePart():
                await self._keep(traffic, message.slices)
                desk.store_part(message)
            case local.FailPart():
                desk.fail_part(message)
            case local.StoreIterate():
                await self._keep(traffic, (message.part,))
                desk.store_iterate(message)
            case local.StoreProbe():
                desk.store_probe(message)
            case local.TellRound():
                _check_reals(message)
                self._hook.on_round(message)
            case _:
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
