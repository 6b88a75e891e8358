"""When an authority signs a roster, for whom, and from which round on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.chain.records import Roster, Vote
from pulsenet.chain.signing import encode_signed
from pulsenet.ids import Digest
from pulsenet.node.effects import Count, Effect, SaveState, SendRequest, ShowToMachines
from pulsenet.node.events import PeerConnected, PeerLost, StoreFailed, TermSeen, TimerFired, VoteSeen
from pulsenet.node.mixing.convener import FIND_SECONDS, PRESENT_SECONDS, SETTLE_SECONDS, Convener
from pulsenet.node.mixing.events import MastersTold, PresenceEnded, PresenceSeen, RosterSeen
from pulsenet.outer.mixing.settings import MixingVariant
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.testing.fakes import make_key
from pulsenet.wire.messages import PushTerm, PushVote
from pulsenet.wire.schema import INTEGER_MAX

TABLE = make_table([TensorSpec(name, "F32", (5,)) for name in ("embed", "h.0", "h.1", "h.2", "h.3")])
MakeDesk = Callable[..., Any]


class Office:
    """The coordinator among three trainers."""

    def __init__(self, make_desk: MakeDesk, variant: MixingVariant = MixingVariant.LOCAL_M1_M2) -> None:
        self.desk = make_desk(2, 3, variant)
        desk = self.desk
        self.me, self.others = desk.coordinator, desk.keys[:2]
        self.convener = Convener(desk.seat(self.me), desk.rosters, desk.settings)
        self.now = 0.0
        self.is_full = False
        """Whether the disk refuses what is to be saved."""
        self.effects: list[Effect] = []

    def tell(self, event: Any, after_seconds: float = 0.0) -> list[Effect]:
        self.now += after_seconds
        effects = self.convener.handle(event, self.now, 0)
        if self.is_full and any(isinstance(effect, SaveState) for effect in effects):
            return self.tell(StoreFailed(None, "enospc"))
        self.effects += effects
        for effect in effects:
            if isinstance(effect, ShowToMachines):
                self.tell(effect.event)
        return effects

    def see(self, *rounds: int) -> None:
        """Let each trainer tell its round, this node's own last."""
        for key, round_index in zip((*self.others, self.me), rounds, strict=False):
            self.tell(PresenceSeen(key, round_index))

    @property
    def roster(self) -> Roster:
        known = self.desk.rosters.newest
        assert known is not None
        found: Roster = known.roster
        return found


def test_everybody_that_is_there_is_listed_from_the_round_most_are_in(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.see(0, 0)
    assert office.desk.rosters.newest is None
    office.tell(PresenceSeen(office.me, 0))
    assert office.convener.is_leading(office.now)
    assert office.convener.term == 1
    assert office.roster.members == tuple(office.desk.keys)
    assert (office.roster.first_round, office.roster.end_round) == (0, 8)
    assert [e.event for e in office.effects if isinstance(e, ShowToMachines) and isinstance(e.event, RosterSeen)]


def test_a_first_roster_waits_for_those_who_are_not_there_yet(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.tell(PresenceSeen(office.me, 4))
    office.tell(TimerFired(), FIND_SECONDS / 2)
    assert office.desk.rosters.newest is None
    office.tell(TimerFired(), FIND_SECONDS / 2)
    assert office.roster.members == (office.me,)
    assert office.roster.first_round == 4


def test_the_next_roster_is_signed_before_one_ends(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.see(0, 0, 0)
    office.see(5, 5, 5)
    assert office.roster.first_round == 0
    office.see(6, 6, 5)
    assert office.roster.first_round == 8
    office.see(40, 40, 40)
    assert office.roster.first_round == 40


def test_one_that_lies_about_its_round_carries_nobody_with_it(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.see(0, 0, 0)
    office.tell(PresenceSeen(office.others[0], 1 << 40))
    office.tell(TimerFired(), 5.0)
    assert office.roster.first_round == 0


def test_a_round_beyond_every_number_is_nobodys(make_desk: MakeDesk) -> None:
    """Of two that are there the one that is further counts, but no roster can be signed for the last round there is."""
    office = Office(make_desk)
    office.tell(PresenceSeen(office.me, 4))
    office.tell(PresenceSeen(office.others[0], INTEGER_MAX))
    office.tell(TimerFired(), FIND_SECONDS)
    assert office.roster.members == tuple(sorted((office.me, office.others[0])))
    assert office.roster.first_round == 4
    office.tell(PresenceSeen(office.others[0], 1 << 32))
    assert office.roster.first_round == 1 << 32


def test_a_change_takes_effect_two_rounds_on_and_only_if_it_lasts(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.see(0, 0, 0)
    office.tell(TimerFired(), PRESENT_SECONDS - 1.0)
    for key in (office.others[0], office.me):
        office.tell(PresenceSeen(key, 3))
    office.tell(TimerFired(), 2.0)
    assert len(office.roster.members) == 3
    office.tell(PresenceSeen(office.others[1], 3))
    office.tell(TimerFired(), PRESENT_SECONDS - 2.0)
    for key in (office.others[0], office.me):
        office.tell(PresenceSeen(key, 3))
    office.tell(TimerFired(), 3.0)
    office.tell(TimerFired(), SETTLE_SECONDS)
    assert office.roster.members == tuple(sorted((office.others[0], office.me)))
    assert office.roster.first_round == 5


def test_strangers_are_listed_only_where_the_run_is_open(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.tell(PresenceSeen(office.desk.stranger, 0))
    office.see(0, 0, 0)
    assert office.desk.stranger not in office.roster.members


def test_in_an_open_run_no_more_are_listed_than_a_roster_holds(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ROSTER_MEMBERS_MAX", 2)
    office = Office(make_desk)
    office.see(0, 0, 0)
    assert not office.convener.is_leading(office.now), "its own trainer came last, and found no room"
    office.tell(PresenceEnded(), PRESENT_SECONDS + 1.0)
    office.tell(PresenceSeen(office.me, 3))
    office.tell(TimerFired(), FIND_SECONDS)
    assert office.roster.members == (office.me,)


def test_who_is_ready_but_lacks_votes_signs_nothing(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    desk = office.desk
    revised = replace(desk.descriptor, revision=1, previous=Digest(desk.run_id), authorities=tuple(sorted(desk.keys)))
    desk.trust.accept_descriptor(desk.sign(revised, make_key("owner")))
    office.see(0, 0, 0)
    office.tell(TimerFired(), 15.0)
    assert [effect for effect in office.effects if isinstance(effect, Count) and effect.label == "stood"]
    assert not office.convener.is_leading(office.now)
    assert desk.rosters.newest is None


def test_a_subset_is_awaited_obeyed_and_kept(make_desk: MakeDesk) -> None:
    office = Office(make_desk, MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET)
    office.see(0, 0, 0)
    assert office.desk.rosters.newest is None
    office.tell(MastersTold(TABLE))
    assert office.roster.subset == (0, 1), "43 % of the elements, by name"
    office.convener.measuring._decided = (0, 1, 2)
    office.tell(TimerFired())
    office.tell(TimerFired(), SETTLE_SECONDS)
    assert (office.roster.subset, office.roster.first_round) == ((0, 1, 2), 2)
    again = Office.__new__(Office)
    again.__dict__ = {**office.__dict__, "effects": []}
    desk = office.desk
    again.convener = Convener(desk.seat(office.me), desk.rosters, desk.settings)
    again.see(9, 9, 9)
    again.tell(TimerFired(), FIND_SECONDS)
    assert again.roster.subset == (0, 1, 2)


def test_a_roster_is_known_to_nobody_before_the_disk_took_the_vote(make_desk: MakeDesk) -> None:
    """Otherwise a coordinator that starts again signs another roster of the same number and term."""
    office = Office(make_desk)
    office.is_full = True
    office.see(0, 0, 0)
    assert office.desk.rosters.newest is None
    office.tell(TimerFired(), 5.0)
    assert office.desk.rosters.newest is None
    office.is_full = False
    office.tell(TimerFired(), 5.0)
    assert office.roster.term == 1


def test_without_its_own_training_process_an_authority_neither_stands_nor_renews(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.see(0, 0)
    office.tell(TimerFired(), 60.0)
    assert not office.convener.is_leading(office.now)
    office.tell(PresenceSeen(office.me, 0))
    office.tell(PeerConnected(office.others[0], (), outbound=True))
    assert [e for e in office.effects if isinstance(e, SendRequest) and isinstance(e.message, PushTerm)]
    office.tell(PresenceEnded())
    office.effects = []
    office.tell(TimerFired(), 5.0)
    assert not [e for e in office.effects if isinstance(e, SendRequest)]
    office.tell(PeerLost(office.others[0], "closed"))


def test_one_whose_training_process_looks_for_a_state_lists_the_others(make_desk: MakeDesk) -> None:
    """Only under a roster can they offer theirs; it would wait for one for ever."""
    office = Office(make_desk)
    office.tell(PresenceSeen(office.me, None))
    assert office.convener.is_leading(office.now)
    office.tell(TimerFired(), 60.0)
    assert office.desk.rosters.newest is None, "nobody is in a round"
    office.see(7, 7)
    office.tell(TimerFired(), FIND_SECONDS / 2)
    assert office.desk.rosters.newest is None, "it may begin with them, and be listed at once"
    office.see(7, 7)
    office.tell(TimerFired(), FIND_SECONDS / 2)
    assert office.roster.members == tuple(sorted(office.others))
    assert office.roster.first_round == 7
    office.see(9, 9, 9)
    office.tell(TimerFired(), SETTLE_SECONDS)
    assert office.roster.members == tuple(office.desk.keys)
    office.tell(PresenceEnded())
    assert not office.convener._is_ready


def test_votes_and_terms_are_heard_and_rubbish_is_counted(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    desk = office.desk
    vote = encode_signed(desk.sign(Vote(desk.run_id, 0, 3, office.me, None), office.me))
    office.tell(TermSeen((vote,), office.me))
    assert office.convener.term == 3
    office.tell(VoteSeen(vote, office.others[0]))
    office.tell(VoteSeen(b"rubbish", office.others[0]))
    assert office.convener.verdicts.find(PushVote(b"rubbish")) == "schema"


def test_what_the_disk_refused_is_stored_again_before_anything_is_said(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    office.see(0, 0, 0)
    office.effects = []
    office.tell(StoreFailed(None, "enospc"))
    assert not [e for e in office.effects if isinstance(e, SaveState)]
    office.tell(TimerFired(), 5.0)
    assert len([e for e in office.effects if isinstance(e, SaveState)]) >= 2


def test_a_trainer_that_was_revoked_is_listed_no_more(make_desk: MakeDesk) -> None:
    office = Office(make_desk)
    desk = office.desk
    office.see(0, 0, 0)
    gone = office.others[0]
    left = tuple(key for key in desk.keys if key != gone)
    revised = replace(desk.descriptor, revision=1, previous=Digest(desk.run_id), trainers=left)
    desk.trust.accept_descriptor(desk.sign(revised, make_key("owner")))
    office.see(3, 3, 3)
    office.tell(TimerFired(), SETTLE_SECONDS)
    assert office.roster.members == left
