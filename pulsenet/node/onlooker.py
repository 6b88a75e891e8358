"""A node that trains nothing, beside the rounds: it keeps informed, answers who asks, and lets go of what is over.

Authorities that only vote need this to let old contributions go; the others, to show operators how far the run is.
"""

from __future__ import annotations

from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.chain.signing import decode_signed
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import (
    Count,
    Effect,
    Release,
    Report,
    SaveState,
    SetTimer,
    StoreRecord,
    StrikePeer,
)
from pulsenet.node.events import Event, PeerConnected, PeerLost, ReceiptSeen, ReplyReceived, StoreFailed, TermSeen
from pulsenet.node.machine import Draw, sooner
from pulsenet.node.rounds_contact import Contact
from pulsenet.node.rounds_news import store_learnt, take_rounds
from pulsenet.wire.messages import RoundsReply

STORE_RETRY_SECONDS = 5.0
"""Wait after the disk refused, before everything is stored again."""


class Onlooker:
    """The machine of a node without a trainer's part.

    Args:
        trust: The run's rules; shared with the node's other machines.
        ledger: The rounds; shared likewise.
        peer_id: This node's key.
        draw: Chance.
    """

    def __init__(self, trust: Trust, ledger: Ledger, peer_id: PeerId, draw: Draw) -> None:
        self._trust = trust
        self._ledger = ledger
        self._courier = Courier()
        self._contact = Contact(ledger, peer_id, draw, self._courier)
        self._is_unsaved = False
        self._timer_at: float | None = None
        self._told: Report | None = None

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        if self._timer_at is not None and now >= self._timer_at:
            self._timer_at = None
        if isinstance(event, StoreFailed):
            # Nothing may be said that is not stored: whatever comes next begins with storing all of it again.
            self._is_unsaved = True
            self._timer_at = sooner(self._timer_at, now + STORE_RETRY_SECONDS)
            return [Count("rejected", event.reason), SetTimer(self._timer_at)]
        effects: list[Effect] = []
        try:
            effects += self._take(event, now)
        except (RemoteProtocolError, TrustError) as error:
            effects += [*store_learnt(self._ledger), Count("rejected", error.code)]
            source = getattr(event, "source", None) or getattr(event, "peer_id", None)
            if isinstance(error, RemoteProtocolError) and source is not None:
                effects.append(StrikePeer(source, error.code))
        return effects + self._go_on(now)

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PeerConnected(peer_id):
                self._courier.connected.add(peer_id)
                self._contact.poll_soon(now)
            case PeerLost(peer_id):
                self._courier.connected.discard(peer_id)
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
        if gone is not None:
            effects.append(Release(gone.blob_ids, gone.record_digests))
        if self._is_unsaved:
            self._is_unsaved = False
            effects += [StoreRecord(signed) for signed in self._ledger.records()]
            effects.append(SaveState(LEDGER_KEY, self._ledger.save()))
        if self._ledger.is_changed:
            effects.append(SaveState(LEDGER_KEY, self._ledger.save()))
        return effects + self._report(due) + self._set_timer(now)

    def _report(self, due: int) -> list[Effect]:
        final = self._ledger.final(due - 1)
        report = Report(
            (
                ("rounds_phase", "watching"),
                ("round_index", due),
                ("round_contributors", 0 if final is None else len(final.receipt.members)),
            )
        )
        if report == self._told:
            return []
        self._told = report
        return [report]

    def _set_timer(self, now: float) -> list[Effect]:
        at = self._contact.next_wake(now)
        if at is None or at == self._timer_at:
            return []
        self._timer_at = at
        return [SetTimer(at)]
