"""A publisher says what is committed: in time, in its turn, and nothing its own rules would refuse."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet import limits
from pulsenet.chain.records import Head
from pulsenet.chain.signing import decode_signed, encode_signed, open_record
from pulsenet.ids import Digest, Version
from pulsenet.node.effects import AnnounceHead, Count, Effect, Log
from pulsenet.node.published import PublishedState
from pulsenet.node.scribe import Scribe
from pulsenet.node.speaker import TURN_SECONDS, Speaker
from pulsenet.node.succession import Succession
from pulsenet.node.turns import Turns

TABLE = Digest(b"t" * 32)


class Leadership:
    """A coordinator that leads when the test says so."""

    def __init__(self, *, leads: bool = True) -> None:
        self.term = 3
        self.leads = leads

    def is_leading(self, now: float) -> bool:
        return self.leads


class Desk:
    """A speaker with a state of its own choosing."""

    def __init__(self, run: Any, leadership: Leadership | None = None, *, trust: Any = None, key: Any = None) -> None:
        self.run = run
        self.trust = trust or run.trust()
        signer = key or run.publisher
        self.scribe = Scribe(self.trust, signer.peer_id, signer.sign)
        self.succession = Succession(self.trust, run.verify, self.scribe)
        self.turns = None if leadership is None else Turns(self.trust, leadership, self.succession)
        self.speaker = Speaker(self.trust, signer.peer_id, self.scribe, self.succession, self.turns, lambda count: 0)
        self.now = 0.0

    def state(self, version: Version, epoch_record: Any = None) -> PublishedState:
        name = self.run.digest(f"root {version}")
        record = None if epoch_record is None else encode_signed(epoch_record)
        return PublishedState(version, name, TABLE, name, name, record, 1, 10, 5, 1, (), (name,))

    def go_on(self, state: PublishedState | None, *, is_committing: bool = False) -> list[Effect]:
        now_ms = self.run.start_ms + round(self.now * 1000)
        return self.speaker.go_on(state, self.now, now_ms, is_committing=is_committing)

    def announce(self, state: PublishedState) -> list[Effect]:
        now_ms = self.run.start_ms + round(self.now * 1000)
        return self.speaker.announce(self.scribe.issue_head(state, now_ms), state, self.now, now_ms)

    def head(self, effects: list[Effect]) -> Head:
        (effect,) = effects
        assert isinstance(effect, AnnounceHead)
        return open_record(Head, effect.record, self.run.verify, run_id=self.run.run_id)


# Without rounds


def test_what_was_announced_is_signed_again_every_40_seconds_but_not_amid_a_commit(run: Any) -> None:
    desk = Desk(run)
    state = desk.state(Version(0, 1))
    assert desk.go_on(state) == [], "nothing was announced yet"
    assert desk.speaker.next_wake is None
    first = desk.head(desk.announce(state))
    assert desk.speaker.is_speaking
    assert desk.speaker.next_wake == limits.HEAD_RESIGN_SECONDS
    desk.now = limits.HEAD_RESIGN_SECONDS
    assert desk.go_on(state, is_committing=True) == []
    second = desk.head(desk.go_on(state))
    assert (second.version, second.term) == (first.version, 0)
    assert second.issued_at_ms == first.issued_at_ms + 40_000


def test_a_key_that_was_revoked_says_nothing_again(run: Any) -> None:
    desk = Desk(run)
    state = desk.state(Version(0, 1))
    desk.announce(state)
    desk.trust.accept_descriptor(run.revise(authorities=(run.second.peer_id,)))
    desk.now = limits.HEAD_RESIGN_SECONDS
    assert desk.go_on(state) == []
    assert desk.speaker.next_wake is None


def test_a_head_its_own_rules_refuse_makes_an_epoch_due(run: Any) -> None:
    desk = Desk(run)
    desk.trust.accept_head(decode_signed(run.head(Version(0, 9))), run.start_ms)
    (effect,) = desk.announce(desk.state(Version(0, 1)))
    assert isinstance(effect, Log)
    assert "opens a new epoch" in effect.text
    assert desk.succession.find_epoch_reason(desk.state(Version(0, 1)), TABLE) == "restart"


def test_an_epoch_is_believed_before_its_first_head(run: Any) -> None:
    desk = Desk(run)
    desk.announce(desk.state(Version(1, 5), run.epoch(1, 5)))
    assert (desk.trust.epoch, desk.trust.head) == (1, desk.trust.head)
    assert desk.trust.head.version == Version(1, 5)


# In turns


def test_only_in_its_turn_and_at_once_when_that_comes(run: Any) -> None:
    leadership = Leadership(leads=False)
    desk = Desk(run, leadership)
    state = desk.state(Version(0, 4))
    assert desk.go_on(None) == []
    assert desk.go_on(state) == []
    assert not desk.speaker.is_speaking
    assert desk.speaker.next_wake == TURN_SECONDS
    leadership.leads = True
    desk.now = TURN_SECONDS
    head = desk.head(desk.go_on(state))
    assert (head.version, head.term) == (Version(0, 4), 3)
    assert desk.go_on(state) == [], "once is enough"
    assert desk.speaker.is_speaking
    desk.now += limits.HEAD_RESIGN_SECONDS
    assert desk.head(desk.go_on(state)).issued_at_ms > head.issued_at_ms


def test_a_new_term_a_new_version_and_a_new_catalogue_are_said(run: Any) -> None:
    leadership = Leadership()
    desk = Desk(run, leadership)
    desk.go_on(desk.state(Version(0, 4)))
    leadership.term = 5
    assert desk.head(desk.go_on(desk.state(Version(0, 4)))).term == 5
    later = desk.state(Version(0, 5))
    assert desk.head(desk.go_on(later)).version == Version(0, 5)
    with_extra = PublishedState(
        **{
            **{name: getattr(later, name) for name in PublishedState.__dataclass_fields__},
            "catalogue_digests": (*later.catalogue_digests, TABLE),
        }
    )
    assert desk.head(desk.go_on(with_extra)).catalogue_digest == TABLE


@pytest.mark.parametrize("why", ["behind", "revoked", "epoch"])
def test_in_its_turn_it_says_nothing_that_others_would_refuse(run: Any, why: str) -> None:
    desk = Desk(run, Leadership())
    if why == "behind":
        desk.trust.accept_head(decode_signed(run.head(Version(0, 9))), run.start_ms)
    elif why == "revoked":
        desk.trust.accept_descriptor(run.revise(authorities=(run.second.peer_id,)))
    else:
        desk.trust.accept_epoch(run.epoch(1, 50))
    assert desk.go_on(desk.state(Version(0, 4))) == []
    assert not desk.speaker.is_speaking


def test_a_head_of_a_later_term_silences_a_coordinator_that_does_not_know(make_run: Any) -> None:
    run = make_run(authorities=(make_run.publisher, make_run.second))
    desk = Desk(run, Leadership())
    desk.trust.accept_head(decode_signed(run.head(Version(0, 4), key=run.second, term=4)), run.start_ms)
    effects = desk.go_on(desk.state(Version(0, 4)))
    assert effects[0] == Count("rejected", "term")
    assert desk.turns is not None
    assert not desk.turns.starts_over, "what is committed here is right all the same"
    assert desk.go_on(desk.state(Version(0, 4))) == [], "said once"


def test_a_state_beside_the_history_is_not_gone_on_from(run: Any) -> None:
    desk = Desk(run, Leadership())
    desk.trust.accept_head(decode_signed(run.head(Version(0, 9))), run.start_ms)
    effects = desk.go_on(desk.state(Version(1, 7), run.epoch(1, 5)))
    assert effects[0] == Count("rejected", "rollback")
    assert desk.turns is not None
    assert desk.turns.starts_over


def test_a_coordinator_whose_clock_is_behind_is_news_all_the_same(make_run: Any) -> None:
    """The one before signed the same version a minute ahead."""
    run = make_run(authorities=(make_run.publisher, make_run.second))
    desk = Desk(run, Leadership())
    earlier = run.head(Version(0, 4), key=run.second, term=2, issued_at_ms=run.start_ms + 60_000)
    desk.trust.accept_head(decode_signed(earlier), run.start_ms)
    head = desk.head(desk.go_on(desk.state(Version(0, 4))))
    assert head.issued_at_ms == run.start_ms + 60_001
    assert desk.trust.head == head
