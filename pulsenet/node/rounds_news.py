"""What a peer answers about the rounds goes into the ledger, and onto the disk, the same way in every machine."""

from __future__ import annotations

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.signing import decode_signed
from pulsenet.errors import TrustError
from pulsenet.ids import PeerId
from pulsenet.node.blame import blame
from pulsenet.node.effects import Effect, ShowToMachines, StoreRecord
from pulsenet.node.events import ReceiptSeen
from pulsenet.wire.messages import RoundsReply


def take_rounds(ledger: Ledger, reply: RoundsReply, source: PeerId) -> list[Effect]:
    """Take the votes, the state anchor and the final receipts of a reply; return what to store and to show.

    Votes and an anchor that are refused, as those of a key that was revoked since, keep no receipts away.

    Raises:
        TrustError: A receipt is refused; what came before it is in the ledger: see :func:`store_learnt`.
        RemoteProtocolError: Anything is what no honest peer sends; likewise.
    """
    effects: list[Effect] = []
    try:
        if reply.votes:
            ledger.accept_mandate(reply.votes)
    except TrustError as error:
        effects += blame(error, source)
    of_anchor = _take_anchor(ledger, reply.state_anchor, source)
    effects += of_anchor
    learnt_before = len(effects)
    # Newest first: each vouches for the one before it.
    for record in reversed(reply.receipts):
        signed = decode_signed(record)
        if ledger.accept_final(signed):
            effects += [StoreRecord(signed), ShowToMachines(ReceiptSeen(record, (), None))]
    if not of_anchor and len(effects) > learnt_before:
        # What nothing proved before, these may.
        effects += _take_anchor(ledger, reply.state_anchor, source)
    return effects


def _take_anchor(ledger: Ledger, record: bytes | None, source: PeerId) -> list[Effect]:
    try:
        if record is not None and ledger.accept_anchor(anchor := decode_signed(record)):
            return [StoreRecord(anchor)]
    except TrustError as error:
        return blame(error, source)
    return []


def store_learnt(ledger: Ledger) -> list[Effect]:
    """Return what to store after a refusal: what was learnt before it, and a fork, which is itself a refusal.

    The saved ledger names its records by digest and would be damaged without them.
    """
    return [StoreRecord(signed) for signed in ledger.records()] if ledger.is_changed else []
