"""What is final stays final, and what does not fit what is known is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pulsenet.chain.ledger import ANCHORS_KEPT, Ledger
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Contribution, Member, Receipt, SignedRecord, StateAnchor, Vote
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.errors import RemoteProtocolError, StorageError, TrustError
from pulsenet.ids import Digest, compute_digest


def digest(text: str) -> Digest:
    return compute_digest(text.encode())


class Rounds:
    """Records of a run with two authorities (both must sign) and one trainer."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.trust = run.trust()
        self.ledger = Ledger(self.trust)
        self.receipts: dict[int, Receipt] = {}

    def vote(self, voter: Any, term: int = 1, candidate: Any = None) -> bytes:
        key = (candidate or self.run.publisher).peer_id
        return encode_signed(self.run.sign(Vote(self.run.run_id, 0, term, key, None), voter))

    def votes(self, term: int = 1, candidate: Any = None) -> tuple[bytes, ...]:
        return tuple(self.vote(voter, term, candidate) for voter in (self.run.publisher, self.run.second))

    def contribution(self, round_index: int, key: Any = None, blob: str = "blob") -> SignedRecord:
        record = Contribution(
            run_id=self.run.run_id,
            revision=0,
            peer_id=(key or self.run.trainer).peer_id,
            round_index=round_index,
            base_state_root=digest(f"state {round_index}"),
            blob_id=digest(f"{blob} {round_index}"),
            encoded_size_bytes=8,
            entry_count=1,
            element_count=10,
            norm_bits=0,
            codec_id=1,
        )
        signed: SignedRecord = self.run.sign(record, key or self.run.trainer)
        return signed

    def receipt(self, round_index: int, **changes: Any) -> Receipt:
        before = self.receipts.get(round_index - 1)
        fields: dict[str, Any] = {
            "run_id": self.run.run_id,
            "revision": 0,
            "term": 1,
            "coordinator": self.run.publisher.peer_id,
            "round_index": round_index,
            "base_state_root": digest(f"state {round_index}"),
            "previous": None if before is None else outcome_of(before),
            "members": (Member(self.run.trainer.peer_id, record_digest(self.contribution(round_index)), 0x3F80_0000),),
            "rejected": (),
        }
        receipt = Receipt(**{**fields, **changes})
        self.receipts.setdefault(round_index, receipt)
        return receipt

    def final(self, round_index: int, **changes: Any) -> SignedRecord:
        signed: SignedRecord = self.run.sign(self.receipt(round_index, **changes), self.run.publisher, self.run.second)
        return signed

    def anchor(self, round_index: int, **changes: Any) -> SignedRecord:
        before = self.receipts.get(round_index - 1)
        fields: dict[str, Any] = {
            "run_id": self.run.run_id,
            "revision": 0,
            "round_index": round_index,
            "state_root": digest(f"state {round_index}"),
            "outcome": None if before is None else outcome_of(before),
            "blob_id": digest(f"anchor {round_index}"),
            "encoded_size_bytes": 80,
        }
        signed: SignedRecord = self.run.sign(StateAnchor(**{**fields, **changes}), self.run.publisher)
        return signed


@pytest.fixture
def rounds(run: Any) -> Rounds:
    return Rounds(run)


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises((TrustError, RemoteProtocolError)) as caught:
        call()
    assert isinstance(caught.value, TrustError | RemoteProtocolError)
    return caught.value.code


def test_most_votes_prove_a_term_and_fewer_do_not(rounds: Rounds) -> None:
    run, ledger = rounds.run, rounds.ledger
    assert code_of(lambda: ledger.accept_mandate((rounds.vote(run.publisher),))) == "untrusted"
    assert code_of(lambda: ledger.accept_mandate((rounds.vote(run.publisher),) * 2)) == "untrusted"
    mixed = (rounds.vote(run.publisher), rounds.vote(run.second, candidate=run.second))
    assert code_of(lambda: ledger.accept_mandate(mixed)) == "untrusted"
    assert code_of(lambda: ledger.accept_mandate((rounds.vote(run.trainer),))) == "untrusted"
    assert ledger.mandate is None
    mandate = ledger.accept_mandate(rounds.votes())
    assert (mandate.term, mandate.coordinator) == (1, run.publisher.peer_id)
    assert ledger.accept_mandate(rounds.votes()) is mandate


def test_an_older_term_is_no_news(rounds: Rounds) -> None:
    newer = rounds.ledger.accept_mandate(rounds.votes(term=3))
    assert rounds.ledger.accept_mandate(rounds.votes(term=2)) is newer


def test_a_receipt_is_final_with_most_signatures(rounds: Rounds) -> None:
    alone = rounds.run.sign(rounds.receipt(0), rounds.run.publisher)
    assert code_of(lambda: rounds.ledger.accept_final(alone)) == "untrusted"
    assert rounds.ledger.accept_final(rounds.final(0))
    assert not rounds.ledger.accept_final(rounds.final(0))
    assert rounds.ledger.next_round_index == 1
    assert rounds.ledger.final(0) is not None


def test_a_receipt_proposed_again_says_the_same(rounds: Rounds) -> None:
    rounds.ledger.accept_final(rounds.final(0))
    again = rounds.final(0, term=4, coordinator=rounds.run.second.peer_id)
    assert not rounds.ledger.accept_final(again)
    assert rounds.ledger.fork is None


def test_two_outcomes_of_one_round_stop_everything(rounds: Rounds) -> None:
    rounds.ledger.accept_final(rounds.final(0))
    other = rounds.final(0, base_state_root=digest("other"))
    assert code_of(lambda: rounds.ledger.accept_final(other)) == "fork"
    assert rounds.ledger.fork is not None
    assert code_of(lambda: rounds.ledger.accept_final(rounds.final(1))) == "fork"


def test_a_receipt_follows_the_round_before(rounds: Rounds) -> None:
    rounds.ledger.accept_final(rounds.final(0))
    stray = rounds.final(1, previous=digest("other"))
    assert code_of(lambda: rounds.ledger.accept_final(stray)) == "mismatch"


def test_receipts_of_former_authorities_are_vouched_for_by_the_next(rounds: Rounds) -> None:
    """A joiner that knows only the newest authorities still replays what the former ones signed."""
    first, second = rounds.receipt(0), rounds.final(1)
    by_stranger = rounds.run.sign(first, rounds.run.stranger)
    assert code_of(lambda: rounds.ledger.accept_final(by_stranger)) == "untrusted"
    rounds.ledger.accept_final(second)
    assert rounds.ledger.accept_final(by_stranger)
    forged = rounds.run.sign(rounds.receipt(0, base_state_root=digest("x")), rounds.run.stranger)
    assert code_of(lambda: Ledger(rounds.trust).accept_final(forged)) == "untrusted"


def test_a_key_contributes_once_a_round(rounds: Rounds) -> None:
    entry = rounds.ledger.accept_contribution(rounds.contribution(0))
    assert rounds.ledger.accept_contribution(rounds.contribution(0)) is entry
    assert code_of(lambda: rounds.ledger.accept_contribution(rounds.contribution(0, blob="x"))) == "duplicate"
    rounds.ledger.accept_contribution(rounds.contribution(1))
    assert set(rounds.ledger.contributions_to(0)) == {rounds.run.trainer.peer_id}


def test_strangers_contribute_up_to_the_open_places_of_a_round(make_run: Callable[..., Any]) -> None:
    rounds = Rounds(make_run(open_trainers_max=1))
    run = rounds.run
    rounds.ledger.accept_contribution(rounds.contribution(0, run.stranger))
    assert code_of(lambda: rounds.ledger.accept_contribution(rounds.contribution(0, run.inferencer))) == "untrusted"
    rounds.ledger.accept_contribution(rounds.contribution(1, run.inferencer))
    rounds.ledger.accept_contribution(rounds.contribution(0, run.trainer))


def test_what_a_receipt_lists_is_taken_whoever_made_it(rounds: Rounds) -> None:
    signed = rounds.contribution(0, rounds.run.stranger)
    assert code_of(lambda: rounds.ledger.accept_contribution(signed)) == "untrusted"
    assert rounds.ledger.accept_listed(signed).peer_id == rounds.run.stranger.peer_id


def test_an_anchor_fits_the_receipts_around_it(rounds: Rounds) -> None:
    rounds.ledger.accept_final(rounds.final(0))
    rounds.ledger.accept_final(rounds.final(1))
    assert code_of(lambda: rounds.ledger.accept_anchor(rounds.anchor(1, state_root=digest("x")))) == "mismatch"
    assert code_of(lambda: rounds.ledger.accept_anchor(rounds.anchor(1, outcome=digest("x")))) == "mismatch"
    assert rounds.ledger.accept_anchor(rounds.anchor(1))
    assert not rounds.ledger.accept_anchor(rounds.anchor(1))
    assert rounds.ledger.accept_anchor(rounds.anchor(2))
    assert code_of(lambda: rounds.ledger.accept_anchor(rounds.anchor(2, state_root=digest("x")))) == "mismatch"
    assert rounds.ledger.anchor_signer(rounds.ledger.anchors[0]) == rounds.run.publisher.peer_id


def test_an_anchor_alone_says_which_round_is_due(rounds: Rounds) -> None:
    rounds.receipt(0)
    rounds.receipt(1)
    rounds.ledger.accept_anchor(rounds.anchor(2))
    assert rounds.ledger.next_round_index == 2
    assert rounds.ledger.knows_round_before(2)
    assert not rounds.ledger.knows_round_before(1)
    assert rounds.ledger.accept_final(rounds.final(2))


def test_what_lies_before_the_older_of_two_anchors_is_forgotten(rounds: Rounds) -> None:
    for index in range(6):
        rounds.ledger.accept_contribution(rounds.contribution(index))
        rounds.ledger.accept_final(rounds.final(index))
    assert rounds.ledger.forget_old(6) is None
    for index in (0, 2, 4):
        rounds.ledger.accept_anchor(rounds.anchor(index))
    assert [anchor.round_index for anchor in rounds.ledger.anchors] == [2, 4]
    assert len(rounds.ledger.anchors) == ANCHORS_KEPT
    gone = rounds.ledger.forget_old(6)
    assert gone is not None
    assert set(gone.blob_ids) == {digest("blob 0"), digest("blob 1"), digest("anchor 0")}
    assert len(gone.record_digests) == 5
    assert record_digest(rounds.anchor(0)) in gone.record_digests
    assert rounds.ledger.final(1) is None
    assert rounds.ledger.can_replay_from(2)
    assert not rounds.ledger.can_replay_from(1)
    assert rounds.ledger.forget_old(6) is None
    assert not rounds.ledger.accept_final(rounds.final(1)), "an anchor replaced it long ago"


def test_nothing_is_forgotten_that_the_own_trainer_still_needs(rounds: Rounds) -> None:
    for index in range(5):
        rounds.ledger.accept_final(rounds.final(index))
    for index in (2, 4):
        rounds.ledger.accept_anchor(rounds.anchor(index))
    rounds.ledger.forget_old(1)
    assert rounds.ledger.final(0) is None
    assert rounds.ledger.final(1) is not None


def test_a_reply_holds_receipts_without_a_gap(rounds: Rounds) -> None:
    for index in (0, 1, 3):
        if index:
            rounds.receipt(index - 1)
        rounds.ledger.accept_final(rounds.final(index))
    rounds.ledger.accept_mandate(rounds.votes())
    reply = rounds.ledger.reply(0)
    assert reply.round_index == 4
    assert reply.votes == rounds.votes()
    assert [record_digest(decode_signed(record)) for record in reply.receipts] == [
        record_digest(rounds.final(0)),
        record_digest(rounds.final(1)),
    ]
    assert reply.state_anchor is None
    assert rounds.ledger.reply(9).receipts == ()


def test_what_was_saved_comes_back(rounds: Rounds) -> None:
    ledger = rounds.ledger
    ledger.accept_mandate(rounds.votes())
    stored: dict[Digest, bytes] = {}
    for index in range(3):
        for signed in (rounds.contribution(index), rounds.final(index)):
            stored[record_digest(signed)] = encode_signed(signed)
        ledger.accept_contribution(rounds.contribution(index))
        ledger.accept_final(rounds.final(index))
    ledger.accept_anchor(rounds.anchor(2))
    stored[record_digest(rounds.anchor(2))] = encode_signed(rounds.anchor(2))
    assert ledger.is_changed
    data = ledger.save()
    assert [ledger.is_changed] == [False]
    again = Ledger.restore(rounds.trust, data, stored.get)
    assert again.reply(0) == ledger.reply(0)
    assert again.contributions_to(2) == ledger.contributions_to(2)
    assert not again.is_changed
    assert Ledger.restore(rounds.trust, None, stored.get).next_round_index == 0


def test_a_revoked_authority_takes_nothing_of_what_was_accepted_along(rounds: Rounds) -> None:
    run, ledger = rounds.run, rounds.ledger
    ledger.accept_mandate(rounds.votes())
    ledger.accept_contribution(rounds.contribution(1))
    ledger.accept_final(rounds.final(0))
    ledger.accept_anchor(rounds.anchor(1))
    records = [rounds.contribution(1), rounds.final(0), rounds.anchor(1)]
    stored = {record_digest(signed): encode_signed(signed) for signed in records}
    left = (run.second.peer_id,)
    rounds.trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=left, trainers=left))
    again = Ledger.restore(rounds.trust, ledger.save(), stored.get)
    assert again.mandate is None
    assert again.anchors == ledger.anchors
    assert again.final(0) == ledger.final(0)
    assert again.contributions_to(1) == ledger.contributions_to(1)


def test_a_proof_of_two_outcomes_outlives_a_restart(rounds: Rounds) -> None:
    first, second = rounds.final(0), rounds.final(0, base_state_root=digest("other"))
    rounds.ledger.accept_final(first)
    code_of(lambda: rounds.ledger.accept_final(second))
    stored = {record_digest(signed): encode_signed(signed) for signed in (first, second)}
    again = Ledger.restore(rounds.trust, rounds.ledger.save(), stored.get)
    assert again.fork == (first, second)


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x80"])
def test_a_damaged_ledger_is_said_to_be(rounds: Rounds, data: bytes) -> None:
    with pytest.raises(StorageError, match="damaged"):
        Ledger.restore(rounds.trust, data, lambda digest: None)


def test_a_record_that_is_gone_is_said_to_be(rounds: Rounds) -> None:
    rounds.ledger.accept_final(rounds.final(0))
    with pytest.raises(StorageError, match="gone"):
        Ledger.restore(rounds.trust, rounds.ledger.save(), lambda digest: None)


def test_a_contribution_is_no_receipt(rounds: Rounds) -> None:
    assert code_of(lambda: rounds.ledger.accept_final(rounds.contribution(0))) == "wrong-type"
