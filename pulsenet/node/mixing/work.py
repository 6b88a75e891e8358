"""What the two kinds of jobs have in common: the own vector, how long anybody waits, and what is shown to others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from pulsenet.chain.records import Share, ShareKind, SliceName
from pulsenet.chain.rosters import KnownRoster
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Count, Effect
from pulsenet.node.events import Event
from pulsenet.node.mixing.blobs import Blobs
from pulsenet.node.mixing.effects import MixedSlice, MixReady
from pulsenet.node.mixing.events import PartFailed, PartSlice, PartStored
from pulsenet.node.mixing.inbox import Inbox
from pulsenet.node.mixing.journal import Journal
from pulsenet.node.mixing.outbox import Outbox, Outcome
from pulsenet.node.mixing.reach import Reach
from pulsenet.outer.mixing.settings import Job

Wants = dict[Digest, tuple[SliceName, PeerId]]


@dataclass(frozen=True, slots=True)
class Bench:
    """What a job of a round works with; all but the round's own facts is its machine's."""

    peer_id: PeerId
    round_index: int
    known: KnownRoster
    """The roster by which the round is mixed."""
    inbox: Inbox
    outbox: Outbox
    blobs: Blobs
    journal: Journal
    reach: Reach
    """Who can be reached."""
    seal: Callable[[ShareKind, Bench, SlicePlace, PartSlice, bytes, Digest | None], tuple[Digest, bytes]]
    """Signs a share; returns its digest and its encoding."""
    take_number: Callable[[], int]
    """Returns a number that no order had before."""


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """Which slice of which job."""

    job: int
    """1 or 2, or 0 for a state."""
    slice_index: int
    slice_count: int


def name_of(part: PartSlice | Share) -> SliceName:
    """Return a slice's blob as the fetcher and the shell know it."""
    return SliceName(part.blob_id, part.encoded_size_bytes)


def part_of(share: Share) -> PartSlice:
    """Return the slice that a share is of."""
    return PartSlice(share.blob_id, share.encoded_size_bytes, share.element_count, share.norm_bits)


class Work(ABC):
    """One job of the open round.

    Args:
        bench: What it works with.
        job: Which.
        slice_count: Slices of its vector.
        subset: Tensors it is of; empty for all.
        wait_seconds: How long its result is waited for.
    """

    def __init__(self, bench: Bench, job: Job, slice_count: int, subset: tuple[int, ...], wait_seconds: float) -> None:
        self.bench = bench
        self.job = job
        self.slice_count = slice_count
        self.subset = subset
        self.wait_seconds = wait_seconds
        self.own: tuple[PartSlice, ...] = ()
        self.mixed_root: Digest | None = None
        self.wanted_at: float | None = None
        self.result: MixReady | None = None
        """Set once, when nothing of this job can change any more for this node's vector."""
        self.shown: dict[tuple[ShareKind, int], tuple[Digest, bytes]] = {}
        """What this node signed in this job: never two of one kind and slice."""
        self._pushed: set[tuple[PeerId, Digest]] = set()

    # What happens

    def take_part(self, event: PartStored, now: float) -> list[Effect]:
        """Take in the own vector; a second one is ignored, since the first may have been shown."""
        if self.own or self.result is not None or len(event.slices) != self.slice_count:
            return []
        self.own, self.mixed_root = event.slices, event.mixed_root
        return []

    def fail_part(self, event: PartFailed) -> list[Effect]:
        """There is no vector: this node takes nothing and gives nothing."""
        if self.own or self.result is not None:
            return []
        return self.end((), "part")

    def want(self, now: float) -> None:
        """The training process waits for the result from now on."""
        if self.wanted_at is None:
            self.wanted_at = now

    def note_outcome(self, outcome: Outcome, now: float) -> list[Effect]:
        """A receiver judged what this job showed it."""
        return []

    @abstractmethod
    def take_answer(self, event: Event, now: float) -> list[Effect]:
        """Take in the answer to an order of this job; anything else is ignored."""

    @abstractmethod
    def update(self, now: float) -> list[Effect]:
        """Do whatever can be done now."""

    @abstractmethod
    def wants(self) -> Wants:
        """Return the blobs this job needs now, each with the member that shared it."""

    @abstractmethod
    def order_again(self) -> list[Effect]:
        """Return the orders that are not answered."""

    @abstractmethod
    def missing(self) -> list[PeerId]:
        """Return the members of whom something is awaited that they may have said already."""

    def count_other_roots(self) -> int:
        """Return how many members' parts came that tell of another common mean than this node holds."""
        return 0

    @abstractmethod
    def judge(self, share: Share) -> str:
        """Return why a share of this job comes too late, or nothing."""

    def next_wake(self, now: float) -> float | None:
        """Return the next time at which waiting ends."""
        return None if self.result is not None else self.deadline

    # Tools of both kinds

    @property
    def deadline(self) -> float | None:
        """When the result is due; ``None`` while nobody waits for it."""
        return None if self.wanted_at is None else self.wanted_at + self.wait_seconds

    def is_due(self, now: float) -> bool:
        """Say whether the wait is over."""
        return self.deadline is not None and now >= self.deadline

    def show(
        self, kind: ShareKind, slice_index: int, part: PartSlice, contributors: bytes = b"", root: Digest | None = None
    ) -> tuple[Digest, bytes]:
        """Return the one share of this kind and slice, signed at the first call."""
        key = (kind, slice_index)
        if key not in self.shown:
            place = SlicePlace(int(self.job), slice_index, self.slice_count)
            root = self.mixed_root if kind in (ShareKind.PART, ShareKind.HINT) else root
            self.shown[key] = self.bench.seal(kind, self.bench, place, part, contributors, root)
        return self.shown[key]

    def push(self, receiver: PeerId, share: tuple[Digest, bytes], now: float) -> None:
        """Have a share pushed to a member, once; the outbox goes on until it was judged there."""
        if (receiver, share[0]) in self._pushed:
            return
        self._pushed.add((receiver, share[0]))
        self.bench.outbox.add(receiver, share[0], share[1], self.bench.round_index, now)

    def end(self, slices: tuple[MixedSlice, ...], reason: str) -> list[Effect]:
        """Settle what came of the job."""
        self.result = MixReady(self.bench.round_index, self.job, slices, reason)
        return [Count("mixes", f"{self.job.name.lower()}-{reason or 'mixed'}")]
