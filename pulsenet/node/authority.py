"""What every authority does, whatever the outer algorithm: it votes, stands, and knows whose term it is."""

from __future__ import annotations

from abc import abstractmethod

from pulsenet.chain.signing import decode_signed
from pulsenet.errors import TrustError
from pulsenet.ids import PeerId, short
from pulsenet.node.blame import Refused, blame
from pulsenet.node.candidacy import Candidacy, decode_ballot
from pulsenet.node.effects import Effect
from pulsenet.node.events import Event, PeerConnected, ReceiptSeen, TermSeen, VoteSeen
from pulsenet.node.ledger_machine import LedgerMachine
from pulsenet.node.machine import Seat
from pulsenet.node.verdicts import Verdicts
from pulsenet.wire.messages import PushTerm


class Authority(LedgerMachine):
    """The machine of an authority; what it does in its own term is its subclass's.

    Args:
        seat: The node's; machines of one node share its rules and its ledger.
        ballot: What was last saved under ``BALLOT_KEY``.

    Raises:
        StorageError: the ballot is damaged: this key must not vote.
    """

    def __init__(self, seat: Seat, ballot: bytes | None) -> None:
        super().__init__(seat)
        self._candidacy = Candidacy(seat, self._courier, decode_ballot(ballot))
        self.verdicts = Verdicts()
        """What became of items that were pushed here."""

    @property
    def term(self) -> int:
        """The newest term whose coordinator is known here; 0 before the first."""
        return 0 if self._ledger.mandate is None else self._ledger.mandate.term

    def is_leading(self, now: float) -> bool:
        """Say whether this node is the coordinator now: only then may it publish versions of the run."""
        return self._candidacy.is_leading(now)

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        self._candidacy.begin(now)
        return super().handle(event, now, now_ms)

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PeerConnected(peer_id):
                mandate = self._ledger.mandate if self.is_leading(now) else None
                return [] if mandate is None else [self._courier.send(peer_id, PushTerm(mandate.votes))]
            case VoteSeen():
                return self._take_vote(event, now)
            case TermSeen(votes, source):
                self._take_term(votes, source, now)
            case _:
                return self._take_more(event, now)
        return []

    @abstractmethod
    def _take_more(self, event: Event, now: float) -> list[Effect]:
        """Take in an event that is not about votes and terms; see :meth:`_take`."""

    def _take_vote(self, event: VoteSeen, now: float) -> list[Effect]:
        signed = decode_signed(event.record)
        given, voter = self._trust.accept_vote(signed), signed.signers[0]
        if event.source != voter:
            # The votes of a term are public: said again by others, they would renew leases of whoever is gone.
            raise TrustError("untrusted", f"{short(event.source)} says a vote of {short(voter)} again")
        effects, refusal = self._candidacy.take_vote(given, voter, event.record, now)
        self.verdicts.note(event, refusal)
        return effects + self._explain(refusal, event.source)

    def _explain(self, refusal: str, candidate: PeerId) -> list[Effect]:
        """Tell a candidate what it lacks, if that is why it was refused a vote."""
        return []

    def _take_term(self, votes: tuple[bytes, ...], source: PeerId | None, now: float) -> None:
        if source == self._ledger.accept_mandate(votes).coordinator:
            self._candidacy.note_coordinator(now)

    def _note_refusal(self, event: Event, error: Refused) -> list[Effect]:
        self.verdicts.note(event, error.code)
        # Terms and receipts are taken by the node's other machine too, which strikes whoever they came from.
        is_heard_twice = isinstance(event, TermSeen | ReceiptSeen)
        return blame(error, None) if is_heard_twice else super()._note_refusal(event, error)

    def _store_again(self) -> list[Effect]:
        return [self._candidacy.save()]
