"""A pair's exchange, three messages: offer, answer, taken; and a hint, so that both fetch at once (SPEC section 6.15).

The lower key offers and is the first to take; the other one answers once it has both parts and the mean of them, and
takes when it hears that the lower one did. Whoever's wait is over keeps its own values. The only doubt there can be is
the answering side's, whether the other took after all: that is kept in the journal as a debt until it is known.

The answering side hints at its part before it can answer. That promises nothing and is not in the journal: the lower
key fetches, checks and combines on it, and takes nothing until the answer is there, of the same part.
"""

from __future__ import annotations

from pulsenet.chain.records import Share, ShareKind
from pulsenet.ids import PeerId
from pulsenet.node.effects import Count, Effect, StrikePeer
from pulsenet.node.events import Event
from pulsenet.node.mixing.effects import CombinePart, CombineParts, MixedSlice
from pulsenet.node.mixing.events import CombineFailed, PartsCombined, PartSlice
from pulsenet.node.mixing.journal import Exchange, Stand
from pulsenet.node.mixing.outbox import Outcome
from pulsenet.node.mixing.work import Bench, Wants, Work, name_of, part_of
from pulsenet.outer.mixing.settings import Job


class PairWork(Work):
    """One pair's job, at one of the two.

    Args:
        partner: The other one.
        base: As for :class:`Work`.
    """

    def __init__(
        self, bench: Bench, job: Job, partner: PeerId, *, subset: tuple[int, ...], wait_seconds: float
    ) -> None:
        super().__init__(bench, job, 1, subset, wait_seconds)
        self.partner = partner
        self._offers = bench.peer_id < partner
        self._order: CombineParts | None = None
        self._mean: PartSlice | None = None
        self._source: PartSlice | None = None
        """The partner's part that was ordered to be combined last: of a hint, until there is an answer."""

    # What happens

    def note_outcome(self, outcome: Outcome, now: float) -> list[Effect]:
        """The partner refused what it was shown: its round is over, or it cannot use it."""
        hint = self.shown.get((ShareKind.HINT, 0))
        is_hint = hint is not None and hint[0] == outcome.digest and outcome.receiver == self.partner
        if is_hint and outcome.code == "round" and self._agreed() is None and self.result is None:
            # Whoever was not answered cannot take any more; after the answer, what is said of that counts.
            return self._keep("over")
        shown = self.shown.get((ShareKind.PART, 0))
        is_part = shown is not None and shown[0] == outcome.digest and outcome.receiver == self.partner
        if not is_part or not outcome.code or outcome.code in ("roster", "early"):
            return []
        if self._offers:
            return self._keep("over") if self.result is None else []
        agreed = self._agreed()
        if outcome.code == "round" and agreed is not None and agreed.stand is Stand.ANSWERED:
            # Said by the one side that can take first: it did not, and will not.
            self.bench.journal.drop(self.bench.round_index, self.job)
            return self._keep("over") if self.result is None else []
        return []

    def take_answer(self, event: Event, now: float) -> list[Effect]:
        """Take in the mean of both parts, or why there is none."""
        order = self._order
        if order is None or not isinstance(event, PartsCombined | CombineFailed) or event.number != order.number:
            return []
        self._order = None
        if self.result is not None:
            return []
        if isinstance(event, CombineFailed):
            blamed = self._blame(event.bad)
            return blamed + self._keep("refused" if event.bad else "store")
        self._mean = PartSlice(event.blob_id, event.encoded_size_bytes, self.own[0].element_count, event.norm_bits)
        return []

    def _blame(self, bad: tuple[tuple[PeerId, str], ...]) -> list[Effect]:
        effects: list[Effect] = []
        for peer_id, reason in bad:
            effects.append(Count("rejected", reason))
            if peer_id != self.bench.peer_id:
                effects.append(StrikePeer(peer_id, reason))
        return effects

    # What can be done

    def update(self, now: float) -> list[Effect]:
        """Offer or hint, combine, answer or take, whatever is due; or keep the own values."""
        if self.result is not None:
            return self._hear_late(now)
        effects: list[Effect] = []
        if self.own:
            if self._offers:
                self.push(self.partner, self.show(ShareKind.PART, 0, self.own[0]), now)
            elif self._agreed() is None:
                self.push(self.partner, self.show(ShareKind.HINT, 0, self.own[0]), now)
            effects += self._drop_other_mean()
            effects += self._combine()
            if self._mean is not None and self.result is None:
                effects += self._agree(now)
        if self.result is None and self.wanted_at is not None:
            if self.bench.reach.is_lost(self.partner, now, self.wanted_at):
                effects += self._keep("lost")
            elif self.is_due(now):
                effects += self._keep("late")
        return effects

    def _drop_other_mean(self) -> list[Effect]:
        """Begin again if the answer is of another part than its hint was: the answer counts."""
        answer = self._find(ShareKind.PART)
        if not self._offers or self._mean is None or answer is None or part_of(answer) == self._source:
            return []
        self._mean = None
        return [Count("rejected", "mismatch")]

    def _combine(self) -> list[Effect]:
        theirs = self._theirs()
        if theirs is None or self._order is not None or self._mean is not None:
            return []
        if theirs.element_count != self.own[0].element_count:
            return [*self._blame(((self.partner, "shape"),)), *self._keep("refused")]
        refusal = self.bench.blobs.refusal_of(theirs.blob_id)
        if refusal:
            return [*self._blame(((self.partner, refusal),)), *self._keep("refused")]
        if not self.bench.blobs.is_whole(theirs.blob_id):
            return []
        parts = [CombinePart(self.bench.peer_id, self.own[0]), CombinePart(self.partner, part_of(theirs))]
        parts.sort(key=lambda part: part.peer_id)
        bench = self.bench
        order = CombineParts(bench.take_number(), bench.round_index, self.job, 0, 1, self.subset, tuple(parts))
        self._order, self._source = order, part_of(theirs)
        return [order]

    def _agree(self, now: float) -> list[Effect]:
        """Both parts and their mean are here."""
        if self._offers:
            return [] if self._find(ShareKind.PART) is None else self._take(now)
        effects: list[Effect] = []
        if self._agreed() is None:
            share = self.show(ShareKind.PART, 0, self.own[0])
            effects += self._note(Stand.ANSWERED, share[1])
        # Stored in the same breath, before it is sent.
        self.push(self.partner, self.show(ShareKind.PART, 0, self.own[0]), now)
        return effects + (self._take(now) if self._is_taken_there() else [])

    def _take(self, now: float) -> list[Effect]:
        assert self._mean is not None
        effects: list[Effect] = []
        if self._offers:
            share = self.show(ShareKind.TAKEN, 0, self._mean)
            effects += self._note(Stand.TAKEN, share[1])
            self.push(self.partner, share, now)
        else:
            self.bench.journal.drop(self.bench.round_index, self.job)
        return effects + self.end((MixedSlice(name_of(self._mean), 2),), "")

    def _keep(self, reason: str) -> list[Effect]:
        """Keep the own values, for good."""
        return self.end((MixedSlice(None, 1),), reason)

    def _hear_late(self, now: float) -> list[Effect]:
        """The partner took what this side did not take any more."""
        agreed = self._agreed()
        if agreed is not None and agreed.stand is Stand.ANSWERED and self._is_taken_there():
            self.bench.journal.turn(agreed, Stand.OWED)
            return [Count("debts", "owed")]
        return []

    # What is known

    def wants(self) -> Wants:
        """Return the partner's part, hinted at or shown, once it is known to be of the right size."""
        theirs = self._theirs()
        if self.result is not None or theirs is None or not self.own or self._mean is not None:
            return {}
        if theirs.element_count != self.own[0].element_count:
            return {}
        self.bench.journal.track(self.bench.round_index, theirs.blob_id)
        return {theirs.blob_id: (name_of(theirs), self.partner)}

    def order_again(self) -> list[Effect]:
        """Return the order that is not answered."""
        return [] if self._order is None else [self._order]

    def missing(self) -> list[PeerId]:
        """Return the partner, until it said all it has to say."""
        last = ShareKind.PART if self._offers else ShareKind.TAKEN
        return [self.partner] if self._find(last) is None else []

    def judge(self, share: Share) -> str:
        """A part or hint comes too late for whoever kept its own values; for whoever took, it comes twice."""
        if share.kind is ShareKind.TAKEN or self.result is None:
            return ""
        agreed = self._agreed()
        is_agreed = bool(self.result.slices) and self.result.slices[0].mean is not None
        return "" if is_agreed or (agreed is not None and not self._offers) else "round"

    def _theirs(self) -> Share | None:
        return self._find(ShareKind.PART) or self._find(ShareKind.HINT)

    def _is_taken_there(self) -> bool:
        return self._find(ShareKind.TAKEN) is not None

    def _find(self, kind: ShareKind) -> Share | None:
        found = self.bench.inbox.find(self.bench.round_index, self.job, kind, 0, self.partner)
        return None if found is None else found[0]

    def _agreed(self) -> Exchange | None:
        return self.bench.journal.exchange(self.bench.round_index, self.job)

    def _note(self, stand: Stand, share: bytes) -> list[Effect]:
        assert self._mean is not None
        bench = self.bench
        place = (bench.round_index, int(self.job), self.partner, stand)
        gone = bench.journal.note(Exchange(*place, self.own[0], self._mean, self.subset, share))
        return [Count("debts", "forgotten", float(len(gone)))] if gone else []


def is_for_me(share: Share, me: PeerId, partner: PeerId | None) -> bool:
    """Say whether a share of a pair's job is for this node: its partner's part, or a word that only that side says."""
    if share.slice_count != 1 or share.peer_id != partner:
        return False
    is_hint, is_taken = share.kind is ShareKind.HINT, share.kind is ShareKind.TAKEN
    return share.kind is ShareKind.PART or (is_hint and me < share.peer_id) or (is_taken and share.peer_id < me)
