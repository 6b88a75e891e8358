"""What every authority does: it hears votes and terms, and answers for what was pushed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pulsenet.chain.ballot import Ballot
from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.errors import StorageError
from pulsenet.node.authority import Authority
from pulsenet.node.candidacy import BALLOT_KEY, LEASE_SECONDS, encode_ballot
from pulsenet.node.effects import Count, Effect, SaveState, SendRequest, StrikePeer
from pulsenet.node.events import Event, PeerConnected, ReceiptSeen, StoreFailed, TermSeen, TimerFired, VoteSeen
from pulsenet.wire.messages import PushTerm, PushVote


class Voter(Authority):
    """Stands whenever it may, and does nothing in its term."""

    def __init__(self, run: Any, key: Any, ballot: bytes | None = None) -> None:
        trust = run.trust()
        super().__init__(run.seat(key, trust, Ledger(trust)), ballot)

    def _take_more(self, event: Event, now: float) -> list[Effect]:
        return []

    def _go_on(self, now: float) -> list[Effect]:
        return self._candidacy.stand_if_due(now, is_ready=True)

    def _wakes(self, now: float) -> list[float | None]:
        return [self._candidacy.next_wake(now, is_ready=True)]


def sent(effects: list[Effect]) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, SendRequest)]


def test_whoever_connects_is_told_the_own_term(make_run: Callable[..., Any]) -> None:
    run = make_run()
    machine, peer_id = Voter(run, run.publisher), run.second.peer_id
    assert machine.term == 0
    assert not machine.is_leading(0.0)
    machine.handle(TimerFired(), 60.0, 0)
    assert (machine.term, machine.is_leading(60.0)) == (1, True)
    told = sent(machine.handle(PeerConnected(peer_id, (), outbound=True), 60.0, 0))
    assert [type(message) for message in told] == [PushTerm]


def test_a_candidate_is_given_a_vote_and_its_term_is_heard(make_run: Callable[..., Any]) -> None:
    run = make_run(authorities=(make_run.key(1), make_run.key(2)))  # type: ignore[attr-defined]
    voter, candidate = sorted((make_run.key(1), make_run.key(2)), key=lambda key: key.peer_id)  # type: ignore[attr-defined]
    machine = Voter(run, voter)
    vote = run.vote(candidate)
    effects = machine.handle(VoteSeen(vote, candidate.peer_id), 0.0, 0)
    (answer,) = sent(effects)
    assert isinstance(answer, PushVote)
    assert machine.verdicts.find(PushVote(vote)) == ""
    own = run.vote(candidate, term=2)
    assert machine.handle(VoteSeen(own, candidate.peer_id), 0.0, 0) != []
    effects = machine.handle(TermSeen((vote, answer.vote), candidate.peer_id), 0.0, 0)
    assert machine.term == 1
    assert LEDGER_KEY in [effect.key for effect in effects if isinstance(effect, SaveState)]


def test_a_vote_that_somebody_else_says_again_renews_nothing(make_run: Callable[..., Any]) -> None:
    keys = sorted((make_run.key(seed) for seed in range(1, 4)), key=lambda key: key.peer_id)  # type: ignore[attr-defined]
    gone, heir, voter = keys
    run = make_run(authorities=tuple(keys))
    machine, stranger, until = Voter(run, voter), run.stranger.peer_id, LEASE_SECONDS
    vote = run.vote(gone)
    assert sent(machine.handle(VoteSeen(vote, gone.peer_id), 0.0, 0))
    effects = machine.handle(VoteSeen(vote, stranger), until - 0.1, 0)
    assert sent(effects) == []
    assert Count("rejected", "untrusted") in effects
    assert machine.verdicts.find(PushVote(vote)) == "untrusted"
    assert sent(machine.handle(VoteSeen(run.vote(heir, term=2), heir.peer_id), until, 0)), "the lease is over"


def test_nobody_stays_in_office_by_votes_that_others_say_again(make_run: Callable[..., Any]) -> None:
    keys = sorted((make_run.key(seed) for seed in range(1, 3)), key=lambda key: key.peer_id)  # type: ignore[attr-defined]
    run = make_run(authorities=tuple(keys))
    machine = Voter(run, keys[0])
    machine.handle(TimerFired(), 60.0, 0)
    vote = run.vote(keys[0], voter=keys[1])
    machine.handle(VoteSeen(vote, keys[1].peer_id), 60.0, 0)
    assert machine.is_leading(60.0)
    machine.handle(VoteSeen(vote, run.stranger.peer_id), 60.0 + LEASE_SECONDS, 0)
    assert not machine.is_leading(60.0 + LEASE_SECONDS)


def test_rubbish_is_counted_and_answered_and_strikes_its_sender_once(make_run: Callable[..., Any]) -> None:
    run = make_run()
    machine = Voter(run, run.publisher)
    source = run.second.peer_id
    effects = machine.handle(VoteSeen(b"rubbish", source), 0.0, 0)
    assert Count("rejected", "schema") in effects
    assert StrikePeer(source, "schema") in effects
    assert machine.verdicts.find(PushVote(b"rubbish")) == "schema"
    for heard_by_others_too in (TermSeen((b"rubbish",), source), ReceiptSeen(b"rubbish", (), source)):
        effects = machine.handle(heard_by_others_too, 0.0, 0)
        assert StrikePeer(source, "schema") not in effects


def test_after_a_full_disk_the_ballot_is_stored_again(make_run: Callable[..., Any]) -> None:
    run = make_run()
    machine = Voter(run, run.publisher)
    machine.handle(TimerFired(), 0.0, 0)
    machine.handle(StoreFailed(None, "enospc"), 0.5, 0)
    effects = machine.handle(TimerFired(), 1.0, 0)
    assert [effect.key for effect in effects if isinstance(effect, SaveState)] == [BALLOT_KEY, LEDGER_KEY]


def test_a_damaged_ballot_votes_no_more(make_run: Callable[..., Any]) -> None:
    run = make_run()
    assert Voter(run, run.publisher, encode_ballot(Ballot(3, None, None))).term == 0
    with pytest.raises(StorageError, match="ballot is damaged"):
        Voter(run, run.publisher, b"rubbish")
