"""Standing, voting and leases, on the voter's own clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pulsenet.chain.ballot import Ballot, Place, Stored
from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import Vote
from pulsenet.chain.signing import decode_signed, encode_signed
from pulsenet.errors import StorageError
from pulsenet.ids import compute_digest
from pulsenet.node.candidacy import (
    BALLOT_KEY,
    LEASE_SECONDS,
    RANK_SECONDS,
    RENEW_SECONDS,
    TERM_STEP_MAX,
    Candidacy,
    decode_ballot,
    encode_ballot,
    name_of,
)
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Count, Effect, SaveState, SendRequest, ShowToMachines
from pulsenet.wire.messages import PushTerm, PushVote

NAME = compute_digest(b"name")
OLD, NEW = Stored(Place(1, 1), NAME, NAME), Stored(Place(2, 1), NAME, NAME)


class Bench:
    """Three authorities by rank; the candidacy under test is one of them."""

    def __init__(self, make_run: Callable[..., Any], rank: int, count: int = 3, ballot: Ballot | None = None) -> None:
        keys = [make_run.key(seed) for seed in range(2, 2 + count)]  # type: ignore[attr-defined]
        self.keys = sorted(keys, key=lambda key: key.peer_id)
        self.run = make_run(authorities=tuple(keys))
        self.trust = self.run.trust()
        self.ledger = Ledger(self.trust)
        self.courier = Courier()
        self.courier.connected |= {key.peer_id for index, key in enumerate(self.keys) if index != rank}
        self.me = self.keys[rank]
        seat = self.run.seat(self.me, self.trust, self.ledger)
        self.candidacy = Candidacy(seat, self.courier, ballot or Ballot())
        self.candidacy.begin(0.0)

    def ask(self, rank: int, term: int, now: float, newest: Stored | None = None) -> tuple[list[Effect], str]:
        """Let an authority ask for a vote."""
        key = self.keys[rank]
        vote = Vote(self.run.run_id, 0, term, key.peer_id, name_of(newest))
        return self.candidacy.take_vote(vote, key.peer_id, b"", now)

    def give(self, rank: int, term: int, now: float) -> list[Effect]:
        """Let an authority vote for the one under test."""
        key = self.keys[rank]
        vote = Vote(self.run.run_id, 0, term, self.me.peer_id, None)
        record = encode_signed(self.run.seal(vote, key))
        return self.candidacy.take_vote(vote, key.peer_id, record, now)[0]

    def stand(self, now: float) -> list[Effect]:
        return self.candidacy.stand_if_due(now, is_ready=True)


def pushes(effects: list[Effect], kind: type) -> list[Any]:
    return [
        effect.message for effect in effects if isinstance(effect, SendRequest) and isinstance(effect.message, kind)
    ]


def test_a_ballot_is_saved_before_anything_is_said(make_run: Callable[..., Any]) -> None:
    effects, refusal = Bench(make_run, 1).ask(0, 1, 0.0)
    assert refusal == ""
    assert isinstance(effects[0], SaveState)
    assert effects[0].key == BALLOT_KEY
    (push,) = pushes(effects, PushVote)
    assert decode_signed(push.vote).type == "vote"


def test_a_saved_ballot_comes_back(make_run: Callable[..., Any]) -> None:
    for ballot in (Ballot(), Ballot(3, make_run().publisher.peer_id, NEW)):
        assert decode_ballot(encode_ballot(ballot)) == ballot
    assert decode_ballot(None) == Ballot()
    with pytest.raises(StorageError, match="damaged"):
        decode_ballot(b"\xc0")


def test_the_vote_of_a_key_that_was_revoked_keeps_nobody_in_office(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0)
    bench.stand(LEASE_SECONDS)
    bench.give(1, 1, LEASE_SECONDS)
    assert bench.candidacy.is_leading(LEASE_SECONDS)
    left = tuple(bench.keys[rank].peer_id for rank in (0, 2))
    bench.trust.accept_descriptor(bench.run.revise(authorities=left))
    assert not bench.candidacy.is_leading(LEASE_SECONDS)


def test_nobody_else_gets_a_vote_before_the_lease_ends(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 2)
    assert bench.ask(0, 1, 0.0)[1] == ""
    assert bench.ask(1, 2, LEASE_SECONDS - 0.1)[1] == "lease"
    assert bench.ask(0, 1, LEASE_SECONDS - 0.1)[1] == ""
    assert bench.ask(1, 2, LEASE_SECONDS + 0.1)[1] == "lease", "the renewal counts"
    assert bench.ask(1, 2, 2 * LEASE_SECONDS)[1] == ""


def test_a_lease_is_counted_anew_after_a_restart(make_run: Callable[..., Any]) -> None:
    other = Bench(make_run, 2).keys[0].peer_id
    bench = Bench(make_run, 2, ballot=Ballot(4, other))
    assert bench.ask(1, 5, LEASE_SECONDS - 0.1)[1] == "lease"
    assert bench.ask(1, 5, LEASE_SECONDS)[1] == ""


def test_a_candidate_behind_is_refused(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 2, ballot=Ballot(1, None, NEW))
    assert bench.ask(0, 2, 0.0, OLD)[1] == "stale"
    assert bench.ask(1, 2, 0.0, NEW)[1] == ""


def test_rank_orders_who_stands_first(make_run: Callable[..., Any]) -> None:
    for rank in range(3):
        bench = Bench(make_run, rank)
        assert rank == 0 or bench.stand(rank * RANK_SECONDS - 0.1) == []
        assert pushes(bench.stand(rank * RANK_SECONDS), PushVote) != []


def test_only_a_trainer_with_the_current_state_stands(make_run: Callable[..., Any]) -> None:
    assert Bench(make_run, 0).candidacy.stand_if_due(1e6, is_ready=False) == []


def test_most_votes_make_a_coordinator_until_they_are_not_renewed(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0)
    bench.stand(0.0)
    assert not bench.candidacy.is_leading(0.0)
    effects = bench.give(1, 1, 0.1)
    assert [effect for effect in effects if isinstance(effect, ShowToMachines)]
    assert len(pushes(effects, PushTerm)) == 2
    assert bench.candidacy.is_leading(0.1)
    assert bench.candidacy.renew_if_due(0.2) == []
    renewal = bench.candidacy.renew_if_due(RENEW_SECONDS)
    assert len(pushes(renewal, PushVote)) == 2
    assert not bench.candidacy.is_leading(LEASE_SECONDS)
    bench.give(2, 1, LEASE_SECONDS)
    assert bench.candidacy.is_leading(LEASE_SECONDS)


def test_votes_of_another_term_do_not_count(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0)
    bench.stand(0.0)
    assert bench.give(1, 7, 0.1) == []
    assert not bench.candidacy.is_leading(0.1)


def test_one_authority_is_its_own_majority(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0, count=1)
    bench.stand(0.0)
    assert bench.candidacy.is_leading(1e6)


def test_the_second_of_two_never_stands(make_run: Callable[..., Any]) -> None:
    assert Bench(make_run, 1, count=2).stand(1e6) == []


def test_a_sign_of_the_coordinator_puts_standing_off(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0)
    bench.candidacy.note_coordinator(10.0)
    assert bench.stand(10.0 + LEASE_SECONDS - 0.1) == []
    assert bench.stand(10.0 + LEASE_SECONDS) != []


def test_a_candidate_names_what_it_was_shown_and_takes_a_later_term(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0)
    bench.candidacy.shown = Stored(Place(1, 6), NAME, NAME)
    bench.ask(1, 4, 0.0, None)
    (push, _) = pushes(bench.stand(0.0 + 2 * LEASE_SECONDS), PushVote)
    vote = bench.trust.accept_vote(decode_signed(push.vote))
    assert vote.term == 7
    assert vote.newest is not None
    assert vote.newest.term == 6


def test_the_next_wake_is_when_something_is_due(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 1)
    assert bench.candidacy.next_wake(0.0, is_ready=True) == RANK_SECONDS
    assert bench.candidacy.next_wake(0.0, is_ready=False) is None


def test_one_key_cannot_use_up_all_terms(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0)
    last = (1 << 63) - 1
    effects, refusal = bench.ask(1, last, 1.0)
    assert (effects, refusal) == ([Count("votes", "term")], "term")
    assert bench.candidacy.ballot == Ballot()
    assert bench.ask(1, TERM_STEP_MAX, 1.0)[1] == ""
    bench.stand(100.0)
    assert bench.candidacy.ballot.term == TERM_STEP_MAX + 1


def test_whoever_hears_of_a_later_term_leads_no_more(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0)
    bench.stand(0.0)
    bench.give(1, 1, 0.1)
    assert bench.candidacy.is_leading(0.1)
    votes = [Vote(bench.run.run_id, 0, 2, bench.keys[1].peer_id, None)] * 2
    bench.ledger.accept_mandate(
        tuple(encode_signed(bench.run.seal(vote, key)) for vote, key in zip(votes, bench.keys[1:], strict=True))
    )
    assert not bench.candidacy.is_leading(0.2)


def test_a_vote_of_one_authority_for_another_asks_nothing_of_a_third(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0)
    vote = Vote(bench.run.run_id, 0, 1, bench.keys[1].peer_id, None)
    assert bench.candidacy.take_vote(vote, bench.keys[2].peer_id, b"", 0.0) == ([], "")
    assert bench.candidacy.ballot == Ballot()


def test_a_leader_nobody_renews_asks_on_but_lets_others_stand(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0)
    bench.stand(0.0)
    bench.give(1, 1, 0.1)
    assert pushes(bench.candidacy.renew_if_due(RENEW_SECONDS), PushVote)
    put_off_to = bench.candidacy.next_wake(RENEW_SECONDS + LEASE_SECONDS / 2, is_ready=True)
    late = LEASE_SECONDS + 1.0
    assert not bench.candidacy.is_leading(late)
    assert pushes(bench.candidacy.renew_if_due(late), PushVote)
    assert bench.stand(late + RENEW_SECONDS) != [], "its own next term may come as soon as before"
    assert put_off_to is not None
    assert put_off_to <= late + RENEW_SECONDS


def test_a_renewed_vote_names_no_receipt_of_a_later_term(make_run: Callable[..., Any]) -> None:
    """It would break the rules of votes; the one that is named needs no more than what this authority stored."""
    bench = Bench(make_run, 0)
    bench.stand(0.0)
    bench.give(1, 1, 0.1)
    bench.candidacy.shown = Stored(Place(1, 6), NAME, NAME)
    (push, _) = pushes(bench.candidacy.renew_if_due(RENEW_SECONDS), PushVote)
    vote = bench.trust.accept_vote(decode_signed(push.vote))
    assert (vote.term, vote.newest) == (1, None)


def test_whose_term_rests_on_a_key_that_was_revoked_is_elected_anew(make_run: Callable[..., Any]) -> None:
    """Newcomers believe no vote of it, so nobody could prove to them who coordinates."""
    bench = Bench(make_run, 0)
    now = LEASE_SECONDS + RANK_SECONDS
    bench.stand(now)
    bench.give(1, 1, now)
    bench.give(2, 1, now)
    bench.trust.accept_descriptor(bench.run.revise(authorities=tuple(bench.keys[rank].peer_id for rank in (0, 2))))
    assert not bench.candidacy.is_leading(now)
    now += LEASE_SECONDS
    bench.stand(now)
    bench.give(2, 2, now)
    assert bench.candidacy.is_leading(now)
    assert bench.ledger.mandate is not None
    assert Ledger(bench.trust).accept_mandate(bench.ledger.mandate.votes).term == 2


def test_the_vote_of_a_key_that_was_revoked_brings_nobody_into_office(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 0, count=5)
    bench.stand(LEASE_SECONDS)
    bench.give(1, 1, LEASE_SECONDS)
    bench.trust.accept_descriptor(
        bench.run.revise(authorities=tuple(bench.keys[rank].peer_id for rank in (0, 2, 3, 4)))
    )
    bench.give(2, 1, LEASE_SECONDS)
    assert not bench.candidacy.is_leading(LEASE_SECONDS)
    bench.give(3, 1, LEASE_SECONDS)
    assert bench.candidacy.is_leading(LEASE_SECONDS)
