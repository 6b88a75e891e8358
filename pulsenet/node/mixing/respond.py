"""The serving rule of messages 32 to 37 (SPEC section 3): what was pushed is shown to the machines first."""

from __future__ import annotations

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.rosters import Rosters
from pulsenet.ids import PeerId
from pulsenet.node.mixing.convener import Convener
from pulsenet.node.mixing.events import PresenceSeen, ProbeSeen, ShareSeen
from pulsenet.node.mixing.machine import Mixing
from pulsenet.node.mixing.serving import reply_roster
from pulsenet.wire.messages import GetRoster, GetShares, Message, PushProbe, PushReply, PushShare, SharesReply

MIXING_REQUESTS = (GetRoster, PushShare, GetShares, PushProbe)
"""Requests this module answers."""

MixingRequest = GetRoster | PushShare | GetShares | PushProbe


def event_of(request: MixingRequest, source: PeerId) -> PresenceSeen | ShareSeen | ProbeSeen | None:
    """Return what to show the machines before a request is answered, if anything."""
    match request:
        case GetRoster(round_index) if round_index is not None:
            return PresenceSeen(source, round_index)
        case PushShare(share):
            return ShareSeen(share, source)
        case PushProbe(probe):
            return ProbeSeen(probe, source)
    return None


def respond_to_mixing(
    request: MixingRequest,
    asker: PeerId,
    ledger: Ledger,
    rosters: Rosters,
    mixing: Mixing | None,
    convener: Convener | None = None,
) -> Message:
    """Return the reply to one request.

    Args:
        request: What is asked.
        asker: Who asks.
        ledger: Whose term it is.
        rosters: Who mixes.
        mixing: The node's machine; ``None`` where the node trains nothing.
        convener: Likewise; ``None`` where the node's key is no authority.
    """
    match request:
        case GetRoster():
            return reply_roster(ledger, rosters)
        case PushShare():
            reason = "unexpected" if mixing is None else mixing.verdicts.find(request)
            return PushReply(accepted=not reason, reason=reason)
        case PushProbe():
            reason = "unexpected" if convener is None else convener.verdicts.find(request)
            return PushReply(accepted=not reason, reason=reason)
        case _:
            if mixing is None:
                return SharesReply(None, 0, False, ())
            return mixing.reply_shares(request, asker)
