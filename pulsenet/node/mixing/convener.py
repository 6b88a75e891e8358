"""An authority's part in mixing: voting, and in its own term saying who mixes (SPEC section 6.15).

Terms are those of the rounds (``Candidacy``); nothing is ever final, so nothing but the ballot is promised. A roster
is signed for rounds that most trainers have not begun, and only where the one before ends or does not fit any more.
"""

from __future__ import annotations

from typing import Final

from pulsenet import limits
from pulsenet.chain.records import Roster
from pulsenet.chain.rosters import Rosters
from pulsenet.chain.signing import encode_signed, seal
from pulsenet.ids import PeerId
from pulsenet.node.authority import Authority
from pulsenet.node.effects import Count, Effect, Log, ShowToMachines
from pulsenet.node.events import Event
from pulsenet.node.machine import Seat
from pulsenet.node.mixing.events import (
    MastersTold,
    PresenceEnded,
    PresenceSeen,
    ProbesCompared,
    ProbeSeen,
    RosterSeen,
)
from pulsenet.node.mixing.measuring import Measuring
from pulsenet.outer.mixing.settings import MixingSettings

PRESENT_SECONDS: Final = 30.0
"""A trainer that was not heard of for so long is not listed any more."""

LEAD_ROUNDS: Final = 2
"""How far above the round that most trainers are in a roster begins that replaces another one early."""

FIND_SECONDS: Final = 10.0
"""How long a new coordinator waits for trainers it did not hear of, before it signs the first roster without them."""

SETTLE_SECONDS: Final = 2.0
"""How long a change lasts before a roster follows it."""

ROUND_STEP_MAX: Final = 1 << 32
"""A trainer that tells of a round further above the own one and every roster is not believed: else one of two could
have rosters signed for the last rounds there are, and beyond."""


class Convener(Authority):
    """The machine of an authority in a run that mixes.

    Args:
        seat: The node's; machines of one node share its rules and its ledger.
        rosters: By which rounds are mixed; shared likewise.
        settings: Of the run.
        ballot: What was last saved under ``BALLOT_KEY``.

    Raises:
        StorageError: the ballot is damaged: this key must not vote.
    """

    def __init__(self, seat: Seat, rosters: Rosters, settings: MixingSettings, *, ballot: bytes | None = None) -> None:
        super().__init__(seat, ballot)
        self._rosters = rosters
        self._settings = settings
        self._present: dict[PeerId, tuple[int, float]] = {}
        self._is_joining = False
        """Whether the training process here looks for a state. Others offer theirs under a roster only, so whoever
        waited for one before it convened them might wait for ever."""
        self.measuring = Measuring(seat.trust, rosters, settings, self.is_leading)
        """What it knows of how far apart trainers are."""
        self._led_term = 0
        self._led_since = 0.0
        self._number = 0
        self._signed: bytes | None = None
        """A roster that nobody may know yet: the disk may still refuse the vote that makes this node coordinator, and
        another life of it would sign another roster of the same number."""
        self._changed_at: float | None = None

    def _take_more(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PresenceSeen(peer_id, round_index):
                if peer_id == self._peer_id:
                    self._is_joining = round_index is None
                if round_index is not None:
                    self._note_present(peer_id, round_index, now)
            case RosterSeen(record) if record == self._signed:
                self._signed = None
                self._rosters.accept(record)
            case PresenceEnded():
                self._is_joining = False
                self._present.pop(self._peer_id, None)
            case MastersTold(table):
                self.measuring.table = table
            case ProbeSeen(record, _):
                self.verdicts.note(event, self.measuring.take(record, self._find_front(), now))
            case ProbesCompared():
                return self.measuring.take_comparison(event)
            case _:
                pass
        return []

    def _note_present(self, peer_id: PeerId, round_index: int, now: float) -> None:
        descriptor = self._trust.descriptor
        assert descriptor is not None
        listed = descriptor.trainers
        # First come, first served: so many strangers are let in as the run allows.
        has_room = sum(key not in listed for key in self._present) < descriptor.open_trainers_max
        if peer_id not in self._present and peer_id not in listed and not has_room:
            return
        if peer_id in self._present or len(self._present) < limits.ROSTER_MEMBERS_MAX:
            self._present[peer_id] = (round_index, now)

    def _store_again(self) -> list[Effect]:
        self._signed = None
        return super()._store_again()

    # What follows

    def _go_on(self, now: float) -> list[Effect]:
        for peer_id in [key for key, (_, at) in self._present.items() if now - at > PRESENT_SECONDS]:
            del self._present[peer_id]
        effects = self._candidacy.stand_if_due(now, is_ready=self._is_ready)
        if self._is_ready:
            # Whoever renews keeps others from standing: a training process may be gone for good.
            effects += self._candidacy.renew_if_due(now)
            if self.is_leading(now):
                effects += self._convene(now)
        return effects + self.measuring.update(now)

    @property
    def _is_ready(self) -> bool:
        return self._is_joining or self._peer_id in self._present

    def _convene(self, now: float) -> list[Effect]:
        """Sign a roster, if one is due."""
        descriptor, term = self._trust.descriptor, self._candidacy.ballot.term
        assert descriptor is not None
        if self._signed is not None:
            return []
        if self._led_term != term:
            self._led_term, self._led_since, self._number = term, now, 0
            self.measuring.begin_term()
        if not self._present:
            # The others are not late yet: nobody has begun.
            self._led_since = now
        if now < self._led_since + FIND_SECONDS and not set(descriptor.trainers) <= set(self._present):
            return []
        subset, members = self.measuring.find_subset(), self._choose_members()
        if subset is None or not members:
            return []
        front = self._find_front()
        first_round = self._find_first_round(members, subset, front, now)
        if first_round is None:
            return []
        self._number, self._changed_at = self._number + 1, None
        probe_round, distance_bits = self._rosters.measured or (None, None)
        roster = Roster(
            run_id=self._trust.run_id,
            revision=descriptor.revision,
            term=self._led_term,
            number=self._number,
            first_round=first_round,
            round_count=min(self._settings.roster_rounds, limits.ROSTER_ROUNDS_MAX),
            members=members,
            subset=subset,
            probe_round=probe_round,
            distance_bits=distance_bits,
        )
        self._signed = encode_signed(seal(roster, self._sign, self._peer_id))
        text = f"{len(members)} trainers mix in rounds {roster.first_round} to {roster.end_round - 1}"
        return [ShowToMachines(RosterSeen(self._signed)), Count("rosters", "signed"), Log("info", text)]

    def _find_first_round(
        self, members: tuple[PeerId, ...], subset: tuple[int, ...], front: int, now: float
    ) -> int | None:
        """Return where the next roster begins, or ``None`` while the ones there are will do."""
        newest = self._rosters.newest
        if newest is None or self._rosters.find(front) is None:
            return front
        if front + LEAD_ROUNDS >= newest.roster.end_round:
            return newest.roster.end_round
        if (members, subset) == (newest.members, newest.roster.subset):
            self._changed_at = None
            return None
        if self._changed_at is None:
            self._changed_at = now
        if now < self._changed_at + SETTLE_SECONDS:
            return None
        return max(front + LEAD_ROUNDS, newest.roster.first_round)

    def _choose_members(self) -> tuple[PeerId, ...]:
        """Return who is there and still let in: the owner may have revoked a key since it was first heard of."""
        descriptor = self._trust.descriptor
        assert descriptor is not None
        listed = [key for key in self._present if key in descriptor.trainers]
        others = [key for key in self._present if key not in descriptor.trainers]
        return tuple(sorted((*listed, *others[: descriptor.open_trainers_max])))

    def _find_front(self) -> int:
        """Return the round that most trainers are in: the upper median, which a few that lie do not move far."""
        own_round, _ = self._present.get(self._peer_id, (0, 0.0))
        round_max = max(own_round, self._rosters.end_round) + ROUND_STEP_MAX
        told = sorted(round_index for round_index, _ in self._present.values() if round_index <= round_max)
        return told[len(told) // 2] if told else 0

    def _wakes(self, now: float) -> list[float | None]:
        times = [self._candidacy.next_wake(now, is_ready=self._is_ready), self.measuring.next_wake()]
        times += [at + PRESENT_SECONDS + 0.001 for _, at in self._present.values()]
        if self._is_ready and self.is_leading(now):
            times.append(self._led_since + FIND_SECONDS)
            times.append(None if self._changed_at is None else self._changed_at + SETTLE_SECONDS)
        return times
