"""What must hold after every event of mixing, whatever the network does and whoever dies.

The checker keeps its own books of every pair's exchange: who took the mean, who owes a difference, who settled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pulsenet import limits
from pulsenet.chain.records import Roster, ShareKind
from pulsenet.ids import Digest, PeerId
from pulsenet.node.events import Event
from pulsenet.node.mixing.effects import CombineParts, MixReady
from pulsenet.node.mixing.events import PartsCombined
from pulsenet.node.mixing.journal import BLOBS_MAX, DEBTS_MAX, TAKEN_MAX, Stand
from pulsenet.node.mixing.pair import PairWork
from pulsenet.outer.floats import fp32_from_bits
from pulsenet.outer.mixing.settings import Job, MixingSettings
from pulsenet.outer.mixing.subset import CALM_RATIO
from pulsenet.testing.checkers import SimulationError
from pulsenet.testing.toy_mixing import Values, read_values

if TYPE_CHECKING:
    from pulsenet.testing.mixing_node import MixingNode

TOLERANCE = 1e-9
TOLERANCE_FP32 = 1e-5
"""Of sums of vectors of about 1 in FP64, and in FP32."""

WAIT_SLACK_SECONDS = 1.0
"""What a result may come late by: hand-overs take time."""

Place = tuple[int, int]


@dataclass(slots=True)
class _Side:
    """One side of an exchange."""

    own: Values
    mean: Values
    has_taken: bool = False
    settled_by: int | None = None
    """Number of the life of the training process that was given the difference."""


class MixingChecker:
    """Looks at every member after one event.

    Args:
        seed: Named in errors.
        tolerance: Of what an exchange may move in all.
    """

    def __init__(self, seed: int, tolerance: float = TOLERANCE) -> None:
        self._seed = seed
        self._tolerance = tolerance
        self._books: dict[tuple[int, int, PeerId, PeerId], dict[PeerId, _Side]] = {}
        """What each side did in each exchange: its round and job, and the two keys, ascending."""
        self._means: dict[tuple[Digest, int, Job, int, int], Digest] = {}
        self._settled: dict[PeerId, tuple[int, int]] = {}
        self._rosters: dict[tuple[int, int], Roster] = {}
        self.exchange_count = 0
        """Exchanges both sides took."""
        self.settled_count = 0
        """Debts that were added to vectors."""
        self.dishonest: set[PeerId] = set()
        """Members of which nothing is asked."""

    def check(self, members: Sequence[MixingNode], touched: set[PeerId], now: float) -> None:
        """Raise :class:`SimulationError` if a rule is broken.

        Args:
            members: Everybody.
            touched: Who was told something since the last call.
            now: Virtual time.
        """
        honest = [member for member in members if member.peer_id not in self.dishonest]
        for member in honest:
            works = {} if member.mixing is None else member.mixing.works
            for job, work in works.items():
                if isinstance(work, PairWork) and member.peer_id in touched:
                    self._note_pair(member, job, work)
                if member.is_up and work.wanted_at is not None and work.result is None:
                    late = now - work.wanted_at - work.wait_seconds
                    if late > WAIT_SLACK_SECONDS and not member.is_full:
                        raise SimulationError(self._seed, f"{member.name} waits {late} s longer than it should")
            if member.peer_id in touched:
                self._check_bounds(member)
                self._check_subset(member)
                self._note_settled(member)
        self._check_conserved({member.peer_id: member for member in honest}, touched)

    def _check_subset(self, member: MixingNode) -> None:
        """Check that this member mixes the tensors that the roster names, and that rosters follow what was measured."""
        settings = member.settings
        for job, work in ({} if member.mixing is None else member.mixing.works).items():
            due = work.bench.known.roster.subset if job is Job.MIX2 and settings.variant.mixes_subset else ()
            if work.subset != due:
                raise SimulationError(self._seed, f"{member.name} mixes {work.subset}, its roster says {due}")
        for known in member.rosters.known:
            place = known.roster.term, known.roster.number
            if place in self._rosters:
                continue
            self._rosters[place] = known.roster
            before = self._rosters.get((place[0], place[1] - 1))
            if before is not None and before.subset != known.roster.subset:
                self._check_change(before, known.roster, settings)

    def _check_change(self, before: Roster, after: Roster, settings: MixingSettings) -> None:
        distance = None if after.distance_bits is None else float(fp32_from_bits(after.distance_bits))
        is_wider = len(after.subset) > len(before.subset)
        is_far = distance is not None and distance > settings.disagreement_max
        is_near = distance is not None and distance < CALM_RATIO * settings.disagreement_max
        if not settings.disagreement_max or not (is_far if is_wider else is_near):
            raise SimulationError(
                self._seed, f"{before.subset} became {after.subset} where trainers are {distance} apart"
            )

    def note_combined(self, member: MixingNode, order: CombineParts, answer: Event) -> None:
        """Check that what was combined are verified parts of members, and that the mean is their mean."""
        if not isinstance(answer, PartsCombined) or member.peer_id in self.dishonest:
            return
        assert member.mixing is not None
        work = member.mixing.works.get(order.job)
        if work is None:
            # The training process died meanwhile, and the round with it: nobody takes this mean.
            return
        parts = []
        if order.job is Job.MIX2 and order.subset != work.bench.known.roster.subset:
            raise SimulationError(self._seed, f"{member.name} combines {order.subset}, which its roster does not say")
        for part in order.parts:
            if part.peer_id != member.peer_id:
                place = 0 if order.slice_count == 1 else order.slice_index
                kinds = (ShareKind.PART, ShareKind.HINT)
                place_of = (order.round_index, order.job)
                found = [work.bench.inbox.find(*place_of, kind, place, part.peer_id) for kind in kinds]
                if all(share is None or share[0].blob_id != part.part.blob_id for share in found):
                    raise SimulationError(self._seed, f"{member.name} combines what nobody signed")
            if part.peer_id not in work.bench.known.members:
                raise SimulationError(self._seed, f"{member.name} combines a stranger's part")
            parts.append(read_values(member.store, part.part).astype(np.float64))
        mean_blob = b"".join(member.store.read_blob(answer.blob_id))
        if not parts or len(mean_blob) != answer.encoded_size_bytes:
            raise SimulationError(self._seed, f"{member.name} made a mean of nothing")
        for values in parts:
            if not np.isfinite(values).all():
                raise SimulationError(self._seed, f"{member.name} combined what is not finite")

    def note_result(self, member: MixingNode, ready: MixReady, seconds: float, settings: MixingSettings) -> None:
        """Check a result that a training process was given."""
        if member.peer_id in self.dishonest:
            return
        assert member.mixing is not None
        for place, piece in enumerate(ready.slices):
            if piece.mean is None:
                continue
            values = read_values(member.store, piece.mean)
            if not np.isfinite(values).all():
                raise SimulationError(self._seed, f"{member.name} was given what is not finite")
            work = member.mixing.works.get(ready.job)
            if work is None or isinstance(work, PairWork):
                continue
            key = (work.bench.known.digest, ready.round_index, ready.job, len(ready.slices), place)
            if self._means.setdefault(key, piece.mean.blob_id) != piece.mean.blob_id:
                raise SimulationError(self._seed, f"two means of slice {place} in round {ready.round_index}")

    # The books of pairs

    def _note_pair(self, member: MixingNode, job: Job, work: PairWork) -> None:
        round_index = work.bench.round_index
        lower, upper = sorted((member.peer_id, work.partner))
        key = (round_index, int(job), lower, upper)
        agreed = work.bench.journal.exchange(round_index, job)
        mean = work.result.slices[0].mean if work.result is not None and work.result.slices else None
        if agreed is None and mean is None:
            return
        sides = self._books.setdefault(key, {})
        side = sides.get(member.peer_id)
        if side is None:
            if agreed is None:
                raise SimulationError(self._seed, f"{member.name} took a mean that it never stored its part in")
            own, there = read_values(member.store, agreed.own), read_values(member.store, agreed.mean)
            side = sides[member.peer_id] = _Side(own.astype(np.float64), there.astype(np.float64))
        durable = member.durable_stands.get((round_index, int(job)))
        # Taken in memory is not taken yet: what the disk refuses is neither said nor handed over.
        is_durable = durable is Stand.TAKEN if member.peer_id == lower else durable is None
        if mean is not None and is_durable and not side.has_taken:
            side.has_taken = True
            other = sides.get(work.partner)
            if member.peer_id == upper and work.partner not in self.dishonest and not (other and other.has_taken):
                raise SimulationError(self._seed, f"{member.name} took a mean before the lower key of its pair did")
            self.exchange_count += member.peer_id == upper

    def _note_settled(self, member: MixingNode) -> None:
        if member.toy is None:
            return
        life, known = self._settled.get(member.peer_id, (0, 0))
        known = known if life == member.toy_count else 0
        for name, _ in member.toy.settled[known:]:
            for (round_index, job, _, upper), sides in self._books.items():
                if (round_index, job, upper) == (name.round_index, int(name.job), member.peer_id):
                    side = sides[member.peer_id]
                    # What a training process was given and lost with its life, the next may be given.
                    if side.settled_by == member.toy_count or side.has_taken:
                        raise SimulationError(self._seed, f"{member.name} settles a debt of round {round_index} twice")
                    side.settled_by = member.toy_count
                    self.settled_count += 1
        self._settled[member.peer_id] = (member.toy_count, len(member.toy.settled))

    def _check_conserved(self, members: dict[PeerId, MixingNode], touched: set[PeerId]) -> None:
        """Whatever exchanges and settled debts moved, and what is open, adds up to nothing."""
        for key, sides in list(self._books.items()):
            round_index, job, lower, upper = key
            if lower not in members or upper not in members or not {lower, upper} & touched:
                continue
            first, second = sides.get(lower), sides.get(upper)
            total = np.zeros_like((first or second or _NOBODY).own)
            if first is not None and first.has_taken:
                total = total + (first.mean - first.own)
            is_open = False
            if second is not None:
                has_part = second.has_taken or second.settled_by is not None
                is_open = (round_index, job) in members[upper].durable_stands
                has_part |= is_open and first is not None and first.has_taken
                total = total + (second.mean - second.own) * float(has_part)
            if np.abs(total).max() > self._tolerance and not self._is_forgotten(members, upper):
                raise SimulationError(self._seed, f"the exchange of round {round_index}, job {job} moved {total}")
            is_over = not is_open and all(
                member.mixing is None or (member.mixing.round_index or 0) > round_index + 1
                for member in (members[lower], members[upper])
            )
            if is_over:
                del self._books[key]

    def _is_forgotten(self, members: dict[PeerId, MixingNode], upper: PeerId) -> bool:
        return members[upper].counts.get(("debts", "forgotten"), 0) > 0

    def _check_bounds(self, member: MixingNode) -> None:
        mixing = member.mixing
        if mixing is None or not member.is_up:
            return
        member_count = len(mixing_members(member))
        per_round = 6 * max(member_count, 2) + 4
        if member.convener is not None and member.convener.measuring.kept_count > 3 * limits.PROBERS_MAX:
            raise SimulationError(self._seed, f"{member.name} keeps {member.convener.measuring.kept_count} answers")
        if mixing.kept_count > 6 * per_round + 4 * (DEBTS_MAX + TAKEN_MAX) or mixing.kept_count > BLOBS_MAX:
            raise SimulationError(self._seed, f"{member.name} keeps {mixing.kept_count} things of others")
        blob_count = len(member.store.lists)
        if blob_count > 6 * per_round + 4 * DEBTS_MAX:
            raise SimulationError(self._seed, f"{member.name} stores {blob_count} blobs")


_NOBODY = _Side(np.zeros(1), np.zeros(1))


def mixing_members(member: MixingNode) -> tuple[PeerId, ...]:
    """Return the members of the newest roster a node knows."""
    newest = member.rosters.newest
    return () if newest is None else newest.members
