"""An authority's part in mixing: voting, and in its own term saying who mixes (SPEC section 6.15).

Terms are those of the rounds (``Candidacy``); nothing is ever final, so nothing but the ballot is promised. A roster
is signed for rounds that most trainers have not begun, and only where the one before ends or does not fit any more.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from pulsenet import limits
from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.chain.records import Roster
from pulsenet.chain.rosters import Rosters
from pulsenet.chain.signing import Sign, decode_signed, encode_signed, seal
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import PeerId
from pulsenet.node.candidacy import Candidacy, decode_ballot
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Count, Effect, Log, SaveState, SetTimer, ShowToMachines
from pulsenet.node.events import Event, PeerConnected, PeerLost, StoreFailed, TermSeen, VoteSeen
from pulsenet.node.machine import Draw, sooner
from pulsenet.node.mixing.events import (
    MastersTold,
    PresenceEnded,
    PresenceSeen,
    ProbesCompared,
    ProbeSeen,
    RosterSeen,
)
from pulsenet.node.mixing.measuring import Measuring
from pulsenet.node.verdicts import Verdicts
from pulsenet.outer.mixing.settings import MixingSettings
from pulsenet.wire.messages import PushTerm

PRESENT_SECONDS: Final = 30.0
"""A trainer that was not heard of for so long is not listed any more."""

LEAD_ROUNDS: Final = 2
"""How far above the round that most trainers are in a roster begins that replaces another one early."""

FIND_SECONDS: Final = 10.0
"""How long a new coordinator waits for trainers it did not hear of, before it signs the first roster without them."""

SETTLE_SECONDS: Final = 2.0
"""How long a change lasts before a roster follows it."""

STORE_RETRY_SECONDS: Final = 5.0


class Convener:
    """The machine of an authority.

    Args:
        trust: The run's rules; shared with the node's other machines.
        ledger: Whose term it is; shared likewise.
        rosters: Shared likewise.
        settings: Of the run.
        peer_id: This node's key.
        sign: Signs with that key.
        draw: Chance.
        ballot: What was last saved under ``BALLOT_KEY``.

    Raises:
        StorageError: the ballot is damaged: this key must not vote.
    """

    def __init__(
        self,
        trust: Trust,
        ledger: Ledger,
        rosters: Rosters,
        settings: MixingSettings,
        peer_id: PeerId,
        sign: Sign,
        draw: Draw,
        *,
        ballot: bytes | None = None,
    ) -> None:
        self._trust = trust
        self._ledger = ledger
        self._rosters = rosters
        self._settings = settings
        self._peer_id = peer_id
        self._sign = sign
        self._draw = draw
        self._courier = Courier()
        self._ballot = decode_ballot(ballot)
        self._candidacy: Candidacy | None = None
        self._present: dict[PeerId, tuple[int, float]] = {}
        self.measuring = Measuring(trust, rosters, settings, self.is_leading)
        """What it knows of how far apart trainers are."""
        self._led_term = 0
        self._led_since = 0.0
        self._number = 0
        self._changed_at: float | None = None
        self._is_unsaved = False
        self._timer_at: float | None = None
        self.verdicts = Verdicts()
        """What became of items that were pushed here."""

    @property
    def term(self) -> int:
        """The newest term whose coordinator is known here; 0 before the first."""
        return 0 if self._ledger.mandate is None else self._ledger.mandate.term

    def is_leading(self, now: float) -> bool:
        """Say whether this node is the coordinator now: only then may it publish versions of the run."""
        return self._candidacy is not None and self._candidacy.is_leading(now)

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        candidacy = self._candidacy
        if candidacy is None:
            common = (self._trust, self._ledger, self._peer_id, self._sign, self._draw, self._courier)
            candidacy = self._candidacy = Candidacy(*common, ballot=self._ballot, now=now)
        if self._timer_at is not None and now >= self._timer_at:
            self._timer_at = None
        if isinstance(event, StoreFailed):
            # Nothing may be said that is not stored: whatever comes next begins with storing all of it again.
            self._is_unsaved = True
            self._timer_at = sooner(self._timer_at, now + STORE_RETRY_SECONDS)
            return [Count("rejected", event.reason), SetTimer(self._timer_at)]
        effects: list[Effect] = []
        try:
            effects += self._take(candidacy, event, now)
        except (RemoteProtocolError, TrustError) as error:
            effects.append(Count("rejected", error.code))
            self.verdicts.note(event, error.code)
        return effects + self._go_on(candidacy, now)

    def _take(self, candidacy: Candidacy, event: Event, now: float) -> list[Effect]:
        match event:
            case PeerConnected(peer_id):
                self._courier.connected.add(peer_id)
                if candidacy.is_leading(now) and self._ledger.mandate is not None:
                    return [self._courier.send(peer_id, PushTerm(self._ledger.mandate.votes))]
            case PeerLost(peer_id):
                self._courier.connected.discard(peer_id)
            case VoteSeen(record, _):
                signed = decode_signed(record)
                given = self._trust.accept_vote(signed)
                effects, refusal = candidacy.take_vote(given, signed.signers[0], record, now)
                self.verdicts.note(event, refusal)
                return effects
            case TermSeen(votes, source):
                if source == self._ledger.accept_mandate(votes).coordinator:
                    candidacy.note_coordinator(now)
            case PresenceSeen(peer_id, round_index):
                self._note_present(peer_id, round_index, now)
            case PresenceEnded():
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

    # What follows

    def _go_on(self, candidacy: Candidacy, now: float) -> list[Effect]:
        effects: list[Effect] = []
        descriptor = self._trust.descriptor
        assert descriptor is not None
        for peer_id in [key for key, (_, at) in self._present.items() if now - at > PRESENT_SECONDS]:
            del self._present[peer_id]
        is_ready = self._peer_id in self._present
        effects += candidacy.stand_if_due(now, is_ready=is_ready)
        if is_ready:
            # Whoever renews keeps others from standing: a training process may be gone for good.
            effects += candidacy.renew_if_due(now)
            if candidacy.is_leading(now):
                effects += self._convene(candidacy, set(descriptor.trainers), now)
        if self._is_unsaved:
            self._is_unsaved = False
            effects += [candidacy.save(), SaveState(LEDGER_KEY, self._ledger.save())]
        if self._ledger.is_changed:
            effects.append(SaveState(LEDGER_KEY, self._ledger.save()))
        effects += self.measuring.update(now)
        return effects + self._set_timer(candidacy, now, is_ready=is_ready)

    def _convene(self, candidacy: Candidacy, listed: Set[PeerId], now: float) -> list[Effect]:
        """Sign a roster, if one is due."""
        if self._led_term != candidacy.ballot.term:
            self._led_term, self._led_since, self._number = candidacy.ballot.term, now, 0
            self.measuring.begin_term()
        if now < self._led_since + FIND_SECONDS and not listed <= set(self._present):
            return []
        subset = self.measuring.find_subset()
        if subset is None or not self._choose_members():
            return []
        members = self._choose_members()
        front = self._find_front()
        first_round = self._find_first_round(members, subset, front, now)
        if first_round is None:
            return []
        assert self._trust.descriptor is not None
        self._number, self._changed_at = self._number + 1, None
        probe_round, distance_bits = self._rosters.measured or (None, None)
        roster = Roster(
            run_id=self._trust.run_id,
            revision=self._trust.descriptor.revision,
            term=self._led_term,
            number=self._number,
            first_round=first_round,
            round_count=min(self._settings.roster_rounds, limits.ROSTER_ROUNDS_MAX),
            members=members,
            subset=subset,
            probe_round=probe_round,
            distance_bits=distance_bits,
        )
        record = encode_signed(seal(roster, self._sign, self._peer_id))
        self._rosters.accept(record)
        text = f"{len(members)} trainers mix in rounds {roster.first_round} to {roster.end_round - 1}"
        return [ShowToMachines(RosterSeen(record)), Count("rosters", "signed"), Log("info", text)]

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
        told = sorted(round_index for round_index, _ in self._present.values())
        return told[len(told) // 2] if told else 0

    def _set_timer(self, candidacy: Candidacy, now: float, *, is_ready: bool) -> list[Effect]:
        times = [candidacy.next_wake(now, is_ready=is_ready)]
        times.append(self.measuring.next_wake())
        times += [at + PRESENT_SECONDS + 0.001 for _, at in self._present.values()]
        if is_ready and candidacy.is_leading(now):
            times.append(self._led_since + FIND_SECONDS)
            times.append(None if self._changed_at is None else self._changed_at + SETTLE_SECONDS)
        at = min((time for time in times if time is not None and time > now), default=None)
        if at is None or at == self._timer_at:
            return []
        self._timer_at = at
        return [SetTimer(at)]
