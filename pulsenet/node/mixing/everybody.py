"""A global mean by slices: everybody shows each owner its part, and takes what the owners made (SPEC section 6.15).

Nobody waits for anybody for longer than its own wait. An owner that combines leaves out who did not come; a slice
whose owner does not come leaves own values there. All who get a slice get the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pulsenet.chain.records import Share, ShareKind
from pulsenet.chain.signing import decode_signed
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Count, Effect, StrikePeer
from pulsenet.node.events import Event
from pulsenet.node.mixing.effects import CheckMean, CombinePart, CombineParts, MixedSlice
from pulsenet.node.mixing.events import CombineFailed, MeanChecked, PartsCombined, PartSlice, PartStored
from pulsenet.node.mixing.work import Bench, Wants, Work, name_of, part_of
from pulsenet.outer.mixing.pairing import count_slices, find_owner
from pulsenet.outer.mixing.settings import Job
from pulsenet.wire.schema import decode_value

OWNER_RATIO = 0.5
"""Share of its wait after which an owner makes do with the parts it has."""

PATIENCE_SECONDS = 30.0
"""While nobody waits, how long an owner hopes for a part of somebody who cannot be reached."""

OTHER_BASE = "mixing-header"
"""Code of a blob that is relative to another mean: no fault of its sender's."""


@dataclass(slots=True)
class _Duty:
    """A slice that this node owns."""

    refused: set[PeerId] = field(default_factory=set)
    """Whose part cannot be used."""
    order: CombineParts | None = None
    is_made: bool = False
    is_given_up: bool = False

    @property
    def is_open(self) -> bool:
        """Whether parts of it are still used."""
        return not (self.is_made or self.is_given_up)


@dataclass(slots=True)
class _Slice:
    """A slice of the result, at this node."""

    piece: MixedSlice | None = None
    """What became of it, once that is settled."""
    order: CheckMean | None = None
    share: Share | None = None


def read_contributors(share: Share, members: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """Return whose parts are in a mean."""
    bits = share.contributors
    return tuple(key for place, key in enumerate(members) if bits[place // 8] & (0x80 >> place % 8))


def write_contributors(contributors: set[PeerId], members: tuple[PeerId, ...]) -> bytes:
    """Return how a share says whose parts are in a mean."""
    bits = bytearray(-(-len(members) // 8))
    for place, key in enumerate(members):
        if key in contributors:
            bits[place // 8] |= 0x80 >> place % 8
    return bytes(bits)


class EverybodyWork(Work):
    """One global job, at one of its members.

    Args:
        is_relative: Whether parts are relative to the last common mean: then only parts of one root are combined.
        base: As for :class:`Work`.
    """

    def __init__(
        self, bench: Bench, job: Job, *, subset: tuple[int, ...], wait_seconds: float, is_relative: bool
    ) -> None:
        super().__init__(bench, job, count_slices(len(bench.known.members)), subset, wait_seconds)
        self._members = bench.known.members
        self._is_relative = is_relative
        self._owners = [find_owner(place, self._members) for place in range(self.slice_count)]
        self._duties = {place: _Duty() for place, owner in enumerate(self._owners) if owner == bench.peer_id}
        self._slices = [_Slice() for _ in self._owners]
        self._stored_at = 0.0

    # What happens

    def take_part(self, event: PartStored, now: float) -> list[Effect]:
        """Take in the own vector."""
        had = bool(self.own)
        effects = super().take_part(event, now)
        if self.own and not had:
            self._stored_at = now
        return effects

    def take_answer(self, event: Event, now: float) -> list[Effect]:
        """Take in the mean of the own slice, or whether another's may be taken."""
        match event:
            case PartsCombined(number) if (place := self._find_duty(number)) is not None:
                return self._sign_mean(place, event)
            case CombineFailed(number) if (place := self._find_duty(number)) is not None:
                return self._take_failure(self._duties[place], event)
            case MeanChecked(number, reason):
                for place, piece in enumerate(self._slices):
                    if piece.order is not None and piece.order.number == number:
                        piece.order = None
                        return self._take_check(place, reason)
        return []

    def _find_duty(self, number: int) -> int | None:
        """Return the slice whose mean was ordered under a number."""
        found = (
            place for place, duty in self._duties.items() if duty.order is not None and duty.order.number == number
        )
        return next(found, None)

    def _sign_mean(self, place: int, event: PartsCombined) -> list[Effect]:
        duty = self._duties[place]
        order, duty.order, duty.is_made = duty.order, None, True
        assert order is not None
        part = PartSlice(event.blob_id, event.encoded_size_bytes, self.own[place].element_count, event.norm_bits)
        contributors = write_contributors({each.peer_id for each in order.parts}, self._members)
        _, record = self.show(ShareKind.MEAN, place, part, contributors, order.mixed_root)
        share = decode_value(Share, decode_signed(record).payload)
        piece = self._slices[place]
        piece.share = share
        is_mine = not self._is_relative or share.mixed_root == self.mixed_root
        piece.piece = self._piece_of(share) if is_mine else MixedSlice(None, 1)
        return [
            Count("mixing_slices", "combined"),
            Count("mixed_parts", self.job.name.lower(), float(len(order.parts))),
        ]

    def _take_failure(self, duty: _Duty, event: CombineFailed) -> list[Effect]:
        duty.order = None
        effects: list[Effect] = []
        for peer_id, reason in event.bad:
            duty.refused.add(peer_id)
            effects += self._blame(peer_id, reason)
        if not event.bad or self.bench.peer_id in duty.refused:
            duty.is_given_up = True
        return effects

    def _take_check(self, place: int, reason: str) -> list[Effect]:
        piece = self._slices[place]
        assert piece.piece is None
        assert piece.share is not None
        if not reason:
            piece.piece = self._piece_of(piece.share)
            return [Count("mixing_slices", "taken")]
        piece.piece = MixedSlice(None, 1)
        return [Count("mixing_slices", "refused"), *self._blame(self._owners[place], reason)]

    def _piece_of(self, share: Share) -> MixedSlice:
        return MixedSlice(name_of(share), len(read_contributors(share, self._members)))

    def _blame(self, peer_id: PeerId, reason: str) -> list[Effect]:
        counted: list[Effect] = [Count("rejected", reason)]
        is_fault = reason != OTHER_BASE and peer_id != self.bench.peer_id
        return [*counted, StrikePeer(peer_id, reason)] if is_fault else counted

    # What can be done

    def update(self, now: float) -> list[Effect]:
        """Show parts, combine the own slice, and take what others made, as far as it goes."""
        effects: list[Effect] = []
        if self.own:
            for place, owner in enumerate(self._owners):
                if owner != self.bench.peer_id:
                    self.push(owner, self.show(ShareKind.PART, place, self.own[place]), now)
            for place in self._duties:
                effects += self._combine(place, now)
                self._push_mean(place, now)
            if self.result is None:
                effects += self._check_means()
        if self.result is None and self.wanted_at is not None:
            effects += self._settle(now)
        return effects

    def _combine(self, place: int, now: float) -> list[Effect]:
        """Order the mean of an own slice once everybody's part is here, or it is time."""
        duty, bench = self._duties[place], self.bench
        if not duty.is_open or duty.order is not None:
            return []
        effects: list[Effect] = []
        usable: dict[PeerId, Share] = {}
        is_awaited = False
        for member in self._members:
            if member == bench.peer_id or member in duty.refused:
                continue
            share = self._part_of(member, place)
            refusal = "" if share is None else self._refusal_of(share, place)
            if refusal:
                duty.refused.add(member)
                effects += self._blame(member, refusal)
            elif share is not None and bench.blobs.is_whole(share.blob_id):
                usable[member] = share
            else:
                is_awaited |= not self._is_given_up(member, now)
        if is_awaited and not self._is_owner_due(now):
            return effects
        parts = [CombinePart(member, part_of(share)) for member, share in usable.items()]
        roots: dict[PeerId, Digest | None] = {member: share.mixed_root for member, share in usable.items()}
        parts.append(CombinePart(bench.peer_id, self.own[place]))
        roots[bench.peer_id] = self.mixed_root
        root = self._choose_root(roots) if self._is_relative else None
        chosen = [part for part in parts if not self._is_relative or roots[part.peer_id] == root]
        if len(chosen) < 2:
            # A mean of one would make its owner's values everybody's.
            duty.is_given_up = is_awaited is False or self._is_owner_due(now)
            return effects
        chosen.sort(key=lambda part: part.peer_id)
        duty.order = CombineParts(
            number=bench.take_number(),
            round_index=bench.round_index,
            job=self.job,
            slice_index=place,
            slice_count=self.slice_count,
            subset=self.subset,
            parts=tuple(chosen),
            mixed_root=root,
        )
        return [*effects, duty.order]

    def _choose_root(self, roots: dict[PeerId, Digest | None]) -> Digest | None:
        """Return the root that most parts are relative to; of equally many the own one, then the smallest."""
        counts: dict[Digest | None, int] = {}
        for root in roots.values():
            counts[root] = counts.get(root, 0) + 1
        return max(counts, key=lambda root: (counts[root], root == self.mixed_root, [-b for b in root or b""]))

    def _is_given_up(self, member: PeerId, now: float) -> bool:
        reach = self.bench.reach
        if self.wanted_at is not None:
            return reach.is_lost(member, now, self.wanted_at)
        return not reach.is_here(member) and now >= self._stored_at + PATIENCE_SECONDS

    def _is_owner_due(self, now: float) -> bool:
        return self.wanted_at is not None and now >= self.wanted_at + OWNER_RATIO * self.wait_seconds

    def _push_mean(self, place: int, now: float) -> None:
        shown = self.shown.get((ShareKind.MEAN, place))
        if shown is not None:
            for member in self._members:
                if member != self.bench.peer_id:
                    self.push(member, shown, now)

    def _check_means(self) -> list[Effect]:
        effects: list[Effect] = []
        for place, piece in enumerate(self._slices):
            share = self._mean_of(place)
            if share is None or piece.piece is not None or piece.order is not None:
                continue
            refusal = self._refusal_of(share, place)
            if refusal:
                piece.piece = MixedSlice(None, 1)
                effects += [Count("mixing_slices", "refused"), *self._blame(self._owners[place], refusal)]
            elif self._is_relative and share.mixed_root != self.mixed_root:
                piece.piece = MixedSlice(None, 1)
                effects.append(Count("mixing_slices", "other-base"))
            elif self.bench.blobs.is_whole(share.blob_id):
                effects.append(self._order_check(place, share))
        return effects

    def _order_check(self, place: int, share: Share) -> CheckMean:
        bench, piece = self.bench, self._slices[place]
        piece.share = share
        piece.order = CheckMean(
            number=bench.take_number(),
            round_index=bench.round_index,
            job=self.job,
            slice_index=place,
            slice_count=self.slice_count,
            subset=self.subset,
            contributor_count=len(read_contributors(share, self._members)),
            mean=part_of(share),
            mixed_root=share.mixed_root if self._is_relative else None,
        )
        return piece.order

    def _settle(self, now: float) -> list[Effect]:
        """End the job once every slice is settled, or the wait is over."""
        assert self.wanted_at is not None
        is_due, is_lost = self.is_due(now), False
        if not self.own:
            return self.end((), "part") if is_due else []
        for place, piece in enumerate(self._slices):
            if piece.piece is not None:
                continue
            duty = self._duties.get(place)
            if duty is not None:
                is_gone = duty.is_given_up
            else:
                is_gone = self.bench.reach.is_lost(self._owners[place], now, self.wanted_at)
            if not is_due and (not is_gone or piece.order is not None):
                return []
            is_lost |= is_gone
        pieces = tuple(piece.piece or MixedSlice(None, 1) for piece in self._slices)
        is_whole = all(piece.mean is not None for piece in pieces)
        return self.end(pieces, "" if is_whole else "lost" if is_lost else "late")

    # What is known

    def wants(self) -> Wants:
        """Return parts of own slices that are not summed, then means while the result is open, earlier slices first.

        Parts come first because others wait for what is made of them.
        """
        wanted: Wants = {}
        if not self.own:
            return wanted
        for place, duty in self._duties.items():
            for member in self._members if duty.is_open else ():
                share = None if member in duty.refused else self._part_of(member, place)
                if share is not None and self._fits(share, place):
                    wanted[share.blob_id] = (name_of(share), member)
        for place, owner in enumerate(self._owners if self.result is None else ()):
            share = self._mean_of(place)
            if share is not None and self._slices[place].piece is None and self._fits(share, place):
                wanted[share.blob_id] = (name_of(share), owner)
        for blob_id in wanted:
            self.bench.journal.track(self.bench.round_index, blob_id)
        return wanted

    def order_again(self) -> list[Effect]:
        """Return the orders that are not answered."""
        orders: list[Effect] = [duty.order for duty in self._duties.values() if duty.order is not None]
        return orders + [piece.order for piece in self._slices if piece.order is not None]

    def count_other_roots(self) -> int:
        """Return how many members' parts came that tell of another common mean than this node holds."""
        first = min(self._duties)
        shares = [self._part_of(member, first) for member in self._members]
        roots = [share.mixed_root for share in shares if share is not None]
        return sum(root not in (None, self.mixed_root) for root in roots) if self.mixed_root is not None else 0

    def judge(self, share: Share) -> str:
        """A part comes too late once its slice was given up."""
        return "round" if share.kind is ShareKind.PART and self._duties[share.slice_index].is_given_up else ""

    def means(self) -> tuple[bytes, ...]:
        """Return the shares of all slices' means, if this node knows all of them; else nothing."""
        records = []
        for place, owner in enumerate(self._owners):
            if place in self._duties:
                shown = self.shown.get((ShareKind.MEAN, place))
                if shown is not None:
                    records.append(shown[1])
            else:
                found = self.bench.inbox.find(self.bench.round_index, self.job, ShareKind.MEAN, place, owner)
                piece = self._slices[place].piece
                if found is not None and piece is not None and piece.mean is not None:
                    records.append(found[1])
        return tuple(records) if len(records) == self.slice_count else ()

    def parts_for(self, owner: PeerId) -> list[bytes]:
        """Return what this node showed one owner of its slices."""
        shown = [self.shown.get((ShareKind.PART, place)) for place, each in enumerate(self._owners) if each == owner]
        return [share[1] for share in shown if share is not None]

    def missing(self) -> list[PeerId]:
        """Return the members whose part of an own slice, or whose mean, did not come."""
        late = {
            owner
            for place, owner in enumerate(self._owners)
            if place not in self._duties and self._slices[place].piece is None and self._mean_of(place) is None
        }
        for place, duty in self._duties.items():
            if duty.is_open:
                others = set(self._members) - {self.bench.peer_id} - duty.refused
                late |= {member for member in others if self._part_of(member, place) is None}
        return sorted(late)

    def next_wake(self, now: float) -> float | None:
        """Return the next time at which waiting for somebody ends."""
        times = []
        if self.wanted_at is not None:
            times += [self.wanted_at + OWNER_RATIO * self.wait_seconds, self.wanted_at + self.wait_seconds]
            away = [member for member in self._members if not self.bench.reach.is_here(member)]
            times += [self.bench.reach.lost_at(member, self.wanted_at) for member in away]
        elif self.own:
            times.append(self._stored_at + PATIENCE_SECONDS)
        return min((at for at in times if at > now), default=None)

    def _part_of(self, member: PeerId, place: int) -> Share | None:
        found = self.bench.inbox.find(self.bench.round_index, self.job, ShareKind.PART, place, member)
        return None if found is None else found[0]

    def _mean_of(self, place: int) -> Share | None:
        if place in self._duties:
            return None
        found = self.bench.inbox.find(self.bench.round_index, self.job, ShareKind.MEAN, place, self._owners[place])
        return None if found is None else found[0]

    def _fits(self, share: Share, place: int) -> bool:
        return share.element_count == self.own[place].element_count

    def _refusal_of(self, share: Share, place: int) -> str:
        return self.bench.blobs.refusal_of(share.blob_id) if self._fits(share, place) else "shape"


def is_for_me(share: Share, me: PeerId, members: tuple[PeerId, ...]) -> bool:
    """Say whether a share of a global job is for this node: parts of its own slices, and every owner's means."""
    if share.slice_count != count_slices(len(members)) or share.kind not in (ShareKind.PART, ShareKind.MEAN):
        return False
    owner = find_owner(share.slice_index, members)
    return owner == me if share.kind is ShareKind.PART else owner == share.peer_id
