"""A node that trains nothing, beside the rounds: it keeps informed, answers who asks, and lets go of what is over.

Authorities that only vote need this to let old contributions go; the others, to show operators how far the run is.
"""

from __future__ import annotations

from pulsenet.chain.signing import decode_signed
from pulsenet.node.effects import Effect, Release, Report, StoreRecord
from pulsenet.node.events import Event, PeerConnected, ReceiptSeen, ReplyReceived, TermSeen
from pulsenet.node.ledger_machine import LedgerMachine
from pulsenet.node.machine import Seat
from pulsenet.node.rounds_contact import Contact
from pulsenet.node.rounds_news import take_rounds
from pulsenet.wire.messages import RoundsReply


class Onlooker(LedgerMachine):
    """The machine of a node without a trainer's part.

    Args:
        seat: The node's; machines of one node share its rules and its ledger.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._contact = Contact(seat, self._courier)
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
                is_news = self._trust.is_final(signed) and self._ledger.accept_final(signed)
                return [StoreRecord(signed)] if is_news else []
            case ReplyReceived(_, peer_id, RoundsReply() as reply):
                return take_rounds(self._ledger, reply, peer_id)
            case ReplyReceived():
                self._contact.take_reply(event, now)
            case _:
                pass
        return []

    def _go_on(self, now: float) -> list[Effect]:
        due = self._ledger.next_round_index
        effects = self._contact.poll(now, from_round_index=due, is_waiting=False)
        gone = self._ledger.forget_old(due)
        if gone is None:
            return effects
        return [*effects, Release(gone.blob_ids, gone.record_digests, spares_versions=True)]

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
