"""Summing a round by slice: which receipts ask for it, who owns what, and when to do without (SPEC section 6.14).

Every member sums one slice and serves it, so what a trainer receives does not grow with their number. An authority
that trains sums everything and signs the names of all slices: a blob that bears such a name is the right one, whoever
serves it. A slice that does not come is summed by whoever lacks it, and without a signed name everything is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pulsenet.chain.ledger import FinalReceipt, Ledger
from pulsenet.chain.outcome import listed_by
from pulsenet.chain.records import Aggregate, Descriptor, SliceName
from pulsenet.chain.round_settings import RoundSettings
from pulsenet.ids import Digest, PeerId
from pulsenet.node.gather import Gatherer, SliceWants
from pulsenet.node.list_fetch import SliceChoice

SLICED_MEMBERS_MIN: Final = 3
"""With fewer, everybody fetches no more of the others than by slice."""

DENSE_ALGORITHMS: Final = ("diloco", "ddp")

NAME_SECONDS: Final = 20.0
"""How long a trainer waits at least for an authority to name the slices before it fetches everything."""

OWNER_SECONDS: Final = 10.0
"""Without progress for at least so long, the slices that lack are summed here, from the contributions' own parts."""

LATE_SECONDS: Final = 2.0
"""Both waits in a round that others have left behind: whoever lags must not lag more."""

SUMMED_BYTES_PER_SECOND: Final = 5e7
"""Bytes of contributions that a slow node sums in a second: both waits grow with what there is to sum."""

SLICES_PER_ORDER_MAX: Final = 16
"""Slices that are summed at once, when many owners are gone."""

ASK_SECONDS: Final = 1.0
"""How often authorities are asked for the names of slices."""


def is_sliced(descriptor: Descriptor, final: FinalReceipt, ledger: Ledger) -> bool:
    """Say whether the members of a receipt sum by slice; all nodes find the same.

    Args:
        descriptor: The run's.
        final: The receipt.
        ledger: Knows every contribution that it lists.
    """
    members = final.receipt.members
    if len(members) < SLICED_MEMBERS_MIN:
        return False
    if descriptor.algorithm in DENSE_ALGORITHMS:
        return True
    entries = [ledger.contribution(digest) for digest in listed_by(final.receipt)]
    contributions = [entry.contribution for entry in entries if entry is not None]
    assert len(contributions) == len(members)
    # A ring all-reduce brings each of k trainers 2 (k - 1) / k dense copies; all blobs (k - 1) / k of their sizes.
    dense_size_bytes = 2.0 * 4 * contributions[0].element_count
    ratio_min = RoundSettings.of(descriptor).all_gather_ratio_min
    return dense_size_bytes < ratio_min * sum(each.encoded_size_bytes for each in contributions)


class Way(StrEnum):
    """How a trainer comes by the aggregate of one round."""

    WHOLE = "whole"
    """From every contribution."""
    SLICES = "slices"
    """From one blob for each slice."""


@dataclass(slots=True)
class SliceRound:
    """The slices of one round, at one trainer."""

    round_index: int
    outcome: Digest
    owners: tuple[PeerId, ...]
    """Members, ascending: the one at place i owns slice i."""
    is_newest: bool
    """Whether others step this round now, too."""
    duty: frozenset[int]
    """Slices that this node sums in any case: its own, if it is not on the disk."""
    started_at: float
    size_bytes: int
    """Of all contributions."""
    way: Way = Way.SLICES
    why: str = ""
    """Why everything is fetched after all; a stable code."""
    summed: dict[int, SliceName] = field(default_factory=dict)
    """Summed and stored here."""
    ordered: frozenset[int] = frozenset()
    """What the training process sums now."""
    lacking: frozenset[int] = frozenset()
    """What does not come from its owner, and is summed here."""
    progress: tuple[object, ...] = ()
    progress_at: float = 0.0
    aggregate: Aggregate | None = None

    def give_up(self, why: str) -> None:
        """Fetch everything after all."""
        self.way, self.why = Way.WHOLE, why

    def _patience(self, seconds: float, size_bytes: float) -> float:
        return seconds + size_bytes / SUMMED_BYTES_PER_SECOND if self.is_newest else LATE_SECONDS

    @property
    def _name_at(self) -> float:
        return self.started_at + self._patience(NAME_SECONDS, self.size_bytes)

    @property
    def _owner_at(self) -> float:
        return self.progress_at + self._patience(OWNER_SECONDS, self.size_bytes / len(self.owners))

    @property
    def wanted_parts(self) -> frozenset[int]:
        """Slices whose parts are fetched from all contributions."""
        return (self.duty | self.lacking) - frozenset(self.summed)

    def find_unnamed(self, aggregate: Aggregate | None) -> tuple[Digest, ...]:
        """Return the blobs summed here that ``aggregate`` does not name, so that nobody asks for them."""
        named = set() if aggregate is None else {name.blob_id for name in aggregate.slices}
        return tuple(name.blob_id for name in self.summed.values() if name.blob_id not in named)

    def update(self, ledger: Ledger, gatherer: Gatherer, now: float) -> None:
        """Look at what has come, and decide whether to go on like this."""
        if self.way is Way.WHOLE:
            return
        self.is_newest = ledger.next_round_index == self.round_index + 1
        self.aggregate = ledger.aggregate(self.round_index)
        if ledger.is_disputed(self.round_index):
            self.give_up("disputed")
        elif self.aggregate is None:
            if now >= self._name_at:
                self.give_up("unnamed")
        elif any(self.aggregate.slices[place] != name for place, name in self.summed.items()):
            # Its signer summed wrongly, or this machine did; what the receipt lists decides.
            self.give_up("mismatch")
        else:
            self._watch(gatherer, now)

    def _watch(self, gatherer: Gatherer, now: float) -> None:
        missing = frozenset(place for place, name in self.missing() if not gatherer.is_whole(name.blob_id))
        self.duty, self.lacking = self.duty & missing, self.lacking & missing
        progress = (len(missing), gatherer.progress().held_size_bytes, frozenset(self.summed), self.ordered)
        if progress != self.progress:
            self.progress, self.progress_at = progress, now
        if missing and not self.ordered and now >= self._owner_at:
            self.lacking |= missing

    def missing(self) -> list[tuple[int, SliceName]]:
        """Return the named slices that were not summed here."""
        assert self.aggregate is not None
        return [(place, name) for place, name in enumerate(self.aggregate.slices) if place not in self.summed]

    def wants(self, whole: frozenset[Digest]) -> SliceWants:
        """Return what to fetch.

        Args:
            whole: Contributions of which everything is needed: the own one, to settle the residual.
        """
        named: tuple[tuple[SliceName, PeerId, bool], ...] = ()
        if self.aggregate is not None:
            # What an owner does not serve, somebody may have summed as well, or have got in time.
            named = tuple(
                (name, self.owners[place], self.is_newest and place not in self.lacking)
                for place, name in self.missing()
            )
        return SliceWants(SliceChoice(self.wanted_parts, len(self.owners)), whole, named)

    def find_due(self, gatherer: Gatherer, digests: tuple[Digest, ...]) -> tuple[int, ...]:
        """Return the slices that can be summed here now."""
        if self.way is Way.WHOLE or self.ordered or not self.wanted_parts or not gatherer.holds_contributions(digests):
            return ()
        return tuple(sorted(self.wanted_parts)[:SLICES_PER_ORDER_MAX])

    def is_whole(self, gatherer: Gatherer) -> bool:
        """Say whether all slices are here, and bear the names that were signed."""
        if self.way is Way.WHOLE or self.aggregate is None or self.wanted_parts:
            return False
        return all(gatherer.is_whole(name.blob_id) for _, name in self.missing())

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which :meth:`update` may decide otherwise."""
        if self.way is Way.WHOLE:
            return None
        at = self._name_at if self.aggregate is None else self._owner_at
        return at if at > now else None
