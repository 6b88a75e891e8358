"""The session side of mixing: what a training process says on its connection, and the answers it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pulsenet.errors import RemoteProtocolError
from pulsenet.local import mixing_protocol as local
from pulsenet.local import rounds_protocol as rounds
from pulsenet.local.protocol import LocalMessage
from pulsenetd.handlers.mixing import MixingDesk, as_job
from pulsenetd.local.blobs import BlobTraffic
from pulsenetd.local.outer import OuterHook, OuterSession, read_real


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

    async def _take(self, message: LocalMessage, traffic: BlobTraffic) -> LocalMessage | None:
        desk = self._hook.desk
        match message:
            case local.Locate(at):
                return await self._wait(lambda most: desk.locate(at, most), message.timeout_ms)
            case local.RefuseState(reason):
                return await self._wait(lambda most: desk.refuse_state(reason, most), message.timeout_ms)
            case local.WantRound(wanted):
                opened = await self._wait(lambda most: desk.want_round(wanted, most), message.timeout_ms)
                await traffic.let_go()
                return opened
            case local.AwaitMix(index, number):
                job = as_job(number)
                return await self._wait(lambda most: desk.await_mix(index, job, most), message.timeout_ms)
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
        return None

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
    for one in bits:
        read_real(one)
