"""A node that trains nothing, beside the rounds: it keeps informed, answers who asks, and lets go of what is over.

Authorities that only vote need this to let old contributions go; the others, to show operators how far the run is.
"""

from __future__ import annotations

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.signing import decode_signed
from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId
from pulsenet.node.effects import Effect, Release, Report, StoreRecord
from pulsenet.node.events import Event, PeerConnected, ReceiptSeen, ReplyReceived, TermSeen
from pulsenet.node.ledger_machine import LedgerMachine
from pulsenet.node.machine import Draw
from pulsenet.node.rounds_contact import Contact
from pulsenet.node.rounds_news import take_rounds
from pulsenet.wire.messages import RoundsReply


class Onlooker(LedgerMachine):
    """The machine of a node without a trainer's part.

    Args:
        trust: The run's rules; shared with the node's other machines.
        ledger: The rounds; shared likewise.
        peer_id: This node's key.
        draw: Chance.
    """

    def __init__(self, trust: Trust, ledger: Ledger, peer_id: PeerId, draw: Draw) -> None:
        super().__init__(trust, ledger)
        self._contact = Contact(ledger, peer_id, draw, self._courier)
        self._told: Report | None = None

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PeerConnected():
                self._contact.poll_soon(now)
            case TermSeen(votes, _):
                self._ledger.accept_mandate(votes)
            case ReceiptSeen(record, _, _):
                signed = decode_signed(record)
                self._trust.accept_receipt(signed)
                if self._trust.is_final(signed) and self._ledger.accept_final(signed):
                    return [StoreRecord(signed)]
            case ReplyReceived(_, _, RoundsReply() as reply):
                return take_rounds(self._ledger, reply)
            case ReplyReceived():
                self._contact.take_reply(event, now)
            case _:
                pass
        return []

    def _go_on(self, now: float) -> list[Effect]:
        due = self._ledger.next_round_index
        effects = self._contact.poll(now, from_round_index=due, is_waiting=False)
        gone = self._ledger.forget_old(due)
        return effects if gone is None else [*effects, Release(gone.blob_ids, gone.record_digests)]

    def _report(self, now: float) -> list[Effect]:
        due = self._ledger.next_round_index
        final = self._ledger.final(due - 1)
        report = Report(
            (
                ("rounds_phase", "watching"),
                ("round_index", due),
                ("round_contributors", 0 if final is None else len(final.receipt.members)),
            )
        )
        told, self._told = self._told, report
        return [] if report == told else [report]

    def _wakes(self, now: float) -> list[float | None]:
        return [self._contact.next_wake(now)]
