"""Whose turn it is to publish, and under which number: the rules of a run with rounds (SPEC section 6.13).

Every authority that trains holds the same weights after a round, so a version's number follows from its round and
from nothing else: whoever publishes it, in whichever term, gives it the same root. The coordinator announces; the
other authorities keep what it announces ready, on their own disks and by their own records, and say nothing.
"""

from __future__ import annotations

from typing import Protocol

from pulsenet.chain.records import EpochRecord, SignedRecord
from pulsenet.chain.signing import decode_signed
from pulsenet.chain.trust import Trust
from pulsenet.ids import Digest, Version
from pulsenet.node.effects import Count, Effect, Log
from pulsenet.node.events import Event, SnapshotOffered, StateLost, StateReached
from pulsenet.node.published import PublishedState
from pulsenet.node.succession import Succession
from pulsenet.wire.schema import decode_value

FIRST_NUMBER = 1
"""Number of the start of the rounds in epoch 0; later epochs name theirs."""


class Leadership(Protocol):
    """What a publisher asks of this node's :class:`pulsenet.node.coordinator.Coordinator`."""

    @property
    def term(self) -> int:
        """The newest term whose coordinator is known here; 0 before the first."""
        ...

    def is_leading(self, now: float) -> bool:
        """Say whether that term is this node's, and its votes are fresh."""
        ...


class Turns:
    """What a publisher of a run with rounds may do, and when.

    Args:
        trust: The run's rules.
        leadership: Says whether this node coordinates.
        succession: What is known of other publishers; it signs epochs.
    """

    def __init__(self, trust: Trust, leadership: Leadership, succession: Succession) -> None:
        self._trust = trust
        self._leadership = leadership
        self._succession = succession
        self._round_index: int | None = None
        self._compared: tuple[object, ...] = ()
        self.starts_over = False
        """Whether what is committed may neither be announced nor gone on from."""

    @property
    def term(self) -> int:
        """The term in force, for everything that is signed."""
        return self._leadership.term

    def is_leading(self, now: float) -> bool:
        """Say whether this node may announce now."""
        return self._leadership.is_leading(now)

    def note(self, event: Event) -> None:
        """Learn from the node's other machines which round its trainer is in."""
        if isinstance(event, StateReached):
            self._round_index = event.round_index
        elif isinstance(event, StateLost):
            self._round_index = None

    def is_misnumbered(self, snapshot: SnapshotOffered) -> bool:
        """Say whether a snapshot that is offered now says it is of another round than the trainer is in."""
        reached = self._round_index
        # The trainer's own word may overtake that of the machine that follows it, by one round at most.
        return reached is not None and snapshot.trainer_step not in (reached, reached + 1)

    def is_behind(self, state: PublishedState | None, snapshot: SnapshotOffered) -> bool:
        """Say whether a version of the snapshot's round or a later one is committed."""
        if state is None or self._trust.epoch > state.version.epoch:
            return False
        return _find_first_number(state.epoch_record) + snapshot.trainer_step <= state.version.number

    def may_open(self, state: PublishedState | None, now: float) -> bool:
        """Whether the epoch that is due can be entered, or opened here and now."""
        if self._find_epoch_to_enter(state) is not None:
            return True
        return self.is_leading(now) and self._succession.may_open_epochs

    def choose_version(
        self, state: PublishedState | None, reason: str, round_index: int
    ) -> tuple[Version, SignedRecord | None]:
        """Return the version of a round and, if it lies in another epoch than ``state``, that epoch's record."""
        if not reason:
            epoch, record = (0, None) if state is None else (state.version.epoch, state.epoch_record)
            return Version(epoch, _find_first_number(record) + round_index), None
        entered = self._find_epoch_to_enter(state)
        if entered is not None:
            record_in_force = self._trust.epoch_record
            assert record_in_force is not None
            return Version(record_in_force.epoch, record_in_force.first_number + round_index), entered
        first, opened = self._succession.open_epoch(state, reason)
        return Version(first.epoch, first.number + round_index), opened

    def contradicts(self, version: Version, root: Digest) -> bool:
        """Say whether an authority gave this version another root."""
        return self._trust.root_of(version) not in (None, root)

    def find_divergence(self, state: PublishedState) -> Version | None:
        """Return a version that is kept here with other bits than an authority announced; asked anew after news."""
        seen = (self._trust.head_record, self._trust.catalogue_record, state)
        if len(self._compared) == len(seen) and all(a is b for a, b in zip(seen, self._compared, strict=True)):
            return None
        self._compared = seen
        kept = {item.entry.version: item.entry.root for item in state.retained}
        kept[state.version] = state.root
        return max((version for version, root in kept.items() if self.contradicts(version, root)), default=None)

    def diverge(self, version: Version, now: float) -> list[Effect]:
        """Keep nothing that goes on from other weights than the run's; the next version stands on its own.

        An authority that is its own majority goes on with the weights it has, in a new epoch.
        """
        self.starts_over = True
        if self.is_leading(now) and self._succession.may_open_epochs:
            self._succession.require_epoch("divergence")
        text = (
            f"version {version} has other bits here than an authority announced, so nothing is published from it. The "
            "next round's weights start over with an anchor; if this comes back, compare how the trainers publish"
        )
        return [Count("rejected", "diverged"), Log("error", text)]

    def _find_epoch_to_enter(self, state: PublishedState | None) -> SignedRecord | None:
        """Return the record of an epoch that is in force and in which nothing is committed here."""
        return self._succession.find_open_epoch(0 if state is None else state.version.epoch)


def _find_first_number(epoch_record: bytes | None) -> int:
    """Return the number of round 0 in the epoch of this encoded record."""
    if epoch_record is None:
        return FIRST_NUMBER
    return decode_value(EpochRecord, decode_signed(epoch_record).payload).first_number
