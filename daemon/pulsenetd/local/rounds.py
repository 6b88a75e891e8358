"""The session side of rounds: what a training process says on its connection, and the answers it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pulsenet.errors import RemoteProtocolError
from pulsenet.local import rounds_protocol as local
from pulsenet.local.mixing_protocol import MIXING_MESSAGE_TYPES
from pulsenet.local.protocol import LocalMessage
from pulsenet.node.events import ContributionStored
from pulsenetd.handlers.training import TrainingDesk
from pulsenetd.local.blobs import BlobTraffic
from pulsenetd.local.outer import OuterHook, OuterSession, read_real


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsHook(OuterHook):
    """What a node offers to the training process of its rounds."""

    desk: TrainingDesk
    on_residual: Callable[[float], None]
    """Told the norm of what the gate holds back."""


class RoundsSession(OuterSession[RoundsHook]):
    """One connection's part in the rounds."""

    opening = local.OpenRounds
    opened = local.RoundsOpened()
    foreign = MIXING_MESSAGE_TYPES
    refusal = ("no-mixing", "this run closes rounds: use pulsenet.join_rounds()")

    async def _take(self, message: LocalMessage, traffic: BlobTraffic) -> LocalMessage | None:
        desk = self._hook.desk
        match message:
            case local.AwaitOrder(timeout_ms):
                return await self._wait(desk.next_order, timeout_ms)
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
                await traffic.let_go()
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
                self._hook.on_residual(read_real(norm_bits))
            case _:
                raise RemoteProtocolError("message-unexpected", type(message).__name__)
        return None


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
