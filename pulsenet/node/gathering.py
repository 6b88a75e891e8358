"""Everything a final receipt needs before its outer step: what it lists, whole or by slice (SPEC section 6.10, 6.14).

The trainer's machine says which round it is in; this part of it fetches, lets slices be summed, signs what they are
called where that is this node's part, and in the end says what the outer step is to read.
"""

from __future__ import annotations

from pulsenet.chain.ledger import LEDGER_KEY, FinalReceipt
from pulsenet.chain.outcome import listed_by
from pulsenet.chain.records import Aggregate, Contribution, Member, SliceName, StateAnchor
from pulsenet.chain.signing import decode_signed, seal
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, PeerId, short
from pulsenet.node.blame import blame
from pulsenet.node.courier import Courier
from pulsenet.node.effects import (
    Count,
    Effect,
    Fate,
    Log,
    Release,
    SaveState,
    StepState,
    StoreRecord,
    SumSlices,
)
from pulsenet.node.events import (
    Event,
    PeerConnected,
    PeerLost,
    ReplyReceived,
    SlicesSummed,
    StoreFailed,
    SumFailed,
    TrainingAttached,
)
from pulsenet.node.fetch import FetchProgress, StoreIndex
from pulsenet.node.gather import Gatherer
from pulsenet.node.machine import Seat
from pulsenet.node.slices import ASK_SECONDS, SliceRound, Way, is_sliced
from pulsenet.wire.messages import AggregatesReply, GetAggregates
from pulsenet.wire.sections import find_slice_range

GATHER_SECONDS_MAX = 30.0
"""Without progress for so long, what a receipt lists counts as gone, if a later state anchor is there instead."""


class Gathering:
    """Pure part of the trainer's machine.

    Args:
        seat: The node's.
        index: What the store holds.
        courier: Numbers requests, and knows who can be reached.
    """

    def __init__(self, seat: Seat, index: StoreIndex, courier: Courier) -> None:
        self._trust = seat.trust
        self._ledger = seat.ledger
        self._peer_id = seat.peer_id
        self._sign = seat.sign
        self._draw = seat.draw
        self._courier = courier
        self._gatherer = Gatherer(seat.ledger, seat.draw, index, courier.take_request_id)
        self._slices: SliceRound | None = None
        self._naming = False
        """Whether the training process sums everything, for this node to sign."""
        self._has_named = False
        self._ask_at = 0.0
        self._distrusted_before = 0
        """Rounds below are stepped from every contribution: this node went astray once."""
        self._sliced_round_index: int | None = None
        """The last round that was stepped by slices."""
        self._gathered: tuple[object, ...] = ()
        self._gathered_at = 0.0

    # What happens

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event about peers, our requests, chunks or sums; anything else is ignored."""
        effects = self._gatherer.handle(event, now)
        match event:
            case PeerConnected() | PeerLost():
                self._ask_at = min(self._ask_at, now)
            case TrainingAttached():
                # It begins anew, with another state perhaps: what was ordered of it before is void.
                effects += self._leave()
            case StoreFailed(None):
                # What the training process summed may not be on disk.
                self._slices = None
            case ReplyReceived(_, peer_id, AggregatesReply(aggregates)):
                effects += self._take_aggregates(peer_id, aggregates)
            case SlicesSummed(round_index, slices) if self._is_in(round_index):
                effects += self._take_sums(dict(slices))
            case SumFailed(round_index, reason) if self._is_in(round_index):
                assert self._slices is not None
                self._naming = False
                self._slices.ordered = frozenset()
                self._slices.give_up(reason)
                effects += [Count("slices", "failed"), Log("warning", f"slices were not summed: {reason}")]
        return effects

    def _is_in(self, round_index: int) -> bool:
        return self._slices is not None and self._slices.round_index == round_index

    def _take_aggregates(self, peer_id: PeerId, records: tuple[bytes, ...]) -> list[Effect]:
        effects: list[Effect] = []
        for record in records:
            try:
                signed = decode_signed(record)
                if self._ledger.accept_aggregate(signed):
                    effects.append(StoreRecord(signed))
            except (RemoteProtocolError, TrustError) as error:
                effects += blame(error, peer_id)
        return effects

    def _take_sums(self, slices: dict[int, SliceName]) -> list[Effect]:
        assert self._slices is not None
        self._slices.ordered = frozenset()
        if not self._naming:
            self._slices.summed |= slices
            return [Count("slices", "summed", float(len(slices)))]
        self._naming, self._has_named = False, True
        # Of the others only the names are known here.
        self._slices.summed |= {place: slices[place] for place in self._slices.duty}
        descriptor = self._trust.descriptor
        assert descriptor is not None
        aggregate = Aggregate(
            run_id=self._trust.run_id,
            revision=descriptor.revision,
            round_index=self._slices.round_index,
            outcome=self._slices.outcome,
            slices=tuple(slices[place] for place in range(len(slices))),
        )
        signed = seal(aggregate, self._sign, self._peer_id)
        return [StoreRecord(signed)] if self._ledger.accept_aggregate(signed) else []

    # What is wanted

    def update(self, now: float, *, final: FinalReceipt | None, anchor: StateAnchor | None) -> list[Effect]:
        """Say what is needed now.

        Args:
            now: Monotonic time.
            final: The receipt that is due to be stepped; ``None`` while nothing is gathered.
            anchor: A state anchor to fetch.
        """
        if final is None:
            effects = self._leave()
            return effects + self._gatherer.set_wants({}, anchor)
        digests = listed_by(final.receipt)
        wanted: dict[Digest, PeerId | None] = dict.fromkeys(digests, final.receipt.coordinator)
        if not self._gatherer.knows_contributions(digests):
            # Their records say whether to go by slice; nothing but them is needed for that.
            effects = self._gatherer.set_wants(wanted, anchor)
        else:
            effects = self._enter(final, now)
            assert self._slices is not None
            self._slices.update(self._ledger, self._gatherer, now)
            is_sliced_now = self._slices.way is Way.SLICES
            slices = self._slices.wants(frozenset(self._own_of(final))) if is_sliced_now else None
            effects += self._gatherer.set_wants(wanted, anchor, slices)
            effects += self._order_sums(final) + self._ask(now)
        self._note_gathered(final.receipt.round_index, now)
        return effects

    def _enter(self, final: FinalReceipt, now: float) -> list[Effect]:
        receipt = final.receipt
        if self._is_in(receipt.round_index):
            return []
        descriptor = self._trust.descriptor
        assert descriptor is not None
        owners = tuple(member.peer_id for member in receipt.members)
        is_newest = self._ledger.next_round_index == receipt.round_index + 1
        # In an old round, too: what this node did not sum then, perhaps nobody did.
        duty = frozenset([owners.index(self._peer_id)]) if self._peer_id in owners else frozenset[int]()
        entries = [self._ledger.contribution(digest) for digest in listed_by(receipt)]
        size_bytes = sum(entry.contribution.encoded_size_bytes for entry in entries if entry is not None)
        self._slices = slices = SliceRound(receipt.round_index, final.outcome, owners, is_newest, duty, now, size_bytes)
        self._naming, self._has_named, self._ask_at = False, not is_newest, now
        if not is_sliced(descriptor, final, self._ledger):
            self._has_named = True
            slices.give_up("few")
        elif self._peer_id in descriptor.authorities:
            # It holds everything, because it countersigned: its word is the one that others trust.
            slices.give_up("authority")
        elif receipt.round_index < self._distrusted_before:
            slices.give_up("astray")
        return []

    def _leave(self) -> list[Effect]:
        slices, self._slices = self._slices, None
        self._naming, self._gathered = False, ()
        if slices is None:
            return []
        unnamed = slices.find_unnamed(self._ledger.aggregate(slices.round_index))
        return [Release(unnamed, ())] if unnamed else []

    def _order_sums(self, final: FinalReceipt) -> list[Effect]:
        slices = self._slices
        assert slices is not None
        digests = listed_by(final.receipt)
        if slices.way is Way.SLICES:
            due = slices.find_due(self._gatherer, digests)
            if not due:
                return []
            slices.ordered = frozenset(due)
            return [SumSlices(slices.round_index, self._members(final), due, due, self._find_ranges(final, due))]
        is_due = slices.why == "authority" and not self._has_named and not self._naming
        if not is_due or not self._gatherer.holds_contributions(digests):
            return []
        self._naming = True
        every = tuple(range(len(slices.owners)))
        return [SumSlices(slices.round_index, self._members(final), every, tuple(sorted(slices.duty)))]

    def _find_ranges(self, final: FinalReceipt, due: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
        count = len(final.receipt.members)
        ranges = []
        for _, contribution in self._members(final):
            chunk_list = self._gatherer.list_of(contribution.blob_id)
            assert chunk_list is not None
            ranges.append(tuple(find_slice_range(chunk_list, place, count) for place in due))
        return tuple(ranges)

    def _ask(self, now: float) -> list[Effect]:
        slices, descriptor = self._slices, self._trust.descriptor
        assert slices is not None
        assert descriptor is not None
        is_due = slices.way is Way.SLICES and slices.aggregate is None and now >= self._ask_at
        connected = sorted(self._courier.connected)
        if not is_due or not connected:
            return []
        self._ask_at = now + ASK_SECONDS
        peers = [peer_id for peer_id in connected if peer_id in descriptor.authorities] or connected
        return [self._courier.send(peers[self._draw(len(peers))], GetAggregates(slices.round_index))]

    def pump(self, now: float) -> list[Effect]:
        """Ask for everything that may be asked for now."""
        return self._gatherer.pump(now)

    # What is here

    def is_whole(self, final: FinalReceipt) -> bool:
        """Say whether the outer step of this receipt has everything it needs."""
        digests = listed_by(final.receipt)
        if self._naming or not self._gatherer.knows_contributions(digests) or self._slices is None:
            return False
        if self._slices.way is Way.SLICES:
            # The own contribution is here too: it is what settles the residual.
            is_own_here = self._gatherer.holds_contributions(self._own_of(final))
            return is_own_here and self._slices.is_whole(self._gatherer)
        is_naming_due = self._slices.why == "authority" and not self._has_named
        return not is_naming_due and self._gatherer.holds_contributions(digests)

    def holds_anchor(self, anchor: StateAnchor) -> bool:
        """Say whether this wanted state anchor's blob is whole."""
        return self._gatherer.is_whole(anchor.blob_id)

    def order(self, final: FinalReceipt, fate: Fate) -> list[Effect]:
        """Return the order to do the outer step, with what it rests on.

        That is stored in the same breath, so a full disk holds the step back as well.
        """
        kept: list[Effect] = [StoreRecord(final.signed), SaveState(LEDGER_KEY, self._ledger.save())]
        names: tuple[SliceName, ...] = ()
        self._gathered = ()
        slices = self._slices
        if slices is not None and slices.way is Way.SLICES and slices.aggregate is not None:
            names, self._sliced_round_index = slices.aggregate.slices, slices.round_index
        return [*kept, StepState(final.receipt.round_index, self._members(final), fate, names)]

    def note_failed(self, reason: str) -> None:
        """The outer step was not done: the next try reads every contribution."""
        if self._slices is not None and self._slices.way is Way.SLICES:
            self._slices.give_up(reason)

    def note_astray(self, round_index: int) -> list[Effect]:
        """The state after ``round_index`` rounds is not everybody's: replay them from every contribution.

        If slices led to it, whoever signed their names is the first to blame: what bears a signed name is that blob.
        """
        self._distrusted_before = self._ledger.next_round_index
        signer = self._ledger.aggregate_signer(round_index - 1)
        if self._sliced_round_index != round_index - 1 or signer is None:
            return []
        text = f"the slices of round {round_index - 1} led astray; their names were signed by {short(signer)}"
        return [Count("slices", "astray"), Log("error", text)]

    def _own_of(self, final: FinalReceipt) -> list[Digest]:
        return [m.contribution_digest for m in final.receipt.members if m.peer_id == self._peer_id]

    def _members(self, final: FinalReceipt) -> tuple[tuple[Member, Contribution], ...]:
        members = []
        for member in final.receipt.members:
            entry = self._ledger.contribution(member.contribution_digest)
            assert entry is not None
            members.append((member, entry.contribution))
        return tuple(members)

    # Time

    def _note_gathered(self, round_index: int, now: float) -> None:
        slices = self._slices
        is_summing = self._naming or (slices is not None and bool(slices.ordered))
        way = None if slices is None else (slices.way, slices.aggregate is None, slices.wanted_parts)
        gathered = (round_index, self._gatherer.progress().held_size_bytes, way)
        if gathered != self._gathered or is_summing:
            self._gathered, self._gathered_at = gathered, now

    def is_stalled(self, now: float) -> bool:
        """Say whether nothing more comes of what a receipt lists: everybody may have let it go."""
        return bool(self._gathered) and now >= self._gathered_at + GATHER_SECONDS_MAX

    def progress(self) -> FetchProgress:
        """Return how far the wanted blobs are."""
        return self._gatherer.progress()

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which something may be due."""
        times = [self._gatherer.next_wake(now)]
        if self._gathered:
            times.append(self._gathered_at + GATHER_SECONDS_MAX)
        if self._slices is not None:
            times.append(self._slices.next_wake(now))
            if self._slices.way is Way.SLICES and self._slices.aggregate is None and self._courier.connected:
                times.append(self._ask_at)
        return min((at for at in times if at is not None and at > now), default=None)
