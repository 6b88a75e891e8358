"""What is final stays final, and what does not fit what is known is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Contribution, Member, Receipt, SignedRecord, StateAnchor, Vote
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.state_anchors import ANCHORS_KEPT
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, StorageError, TrustError
from pulsenet.ids import Digest, compute_digest
from pulsenet.wire.messages import RoundsReply
from pulsenet.wire.schema import decode_value, encode_value


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
        outcome = changes.pop("outcome", None if before is None else outcome_of(before))
        signed: SignedRecord = self.run.sign(self.run.state_anchor(round_index, outcome, **changes), self.run.publisher)
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


def test_an_older_term_is_no_news_and_a_newer_one_is(rounds: Rounds) -> None:
    ledger = rounds.ledger
    assert ledger.term_newest == 0
    newer = ledger.accept_mandate(rounds.votes(term=3))
    assert ledger.accept_mandate(rounds.votes(term=2)) is newer
    newest = ledger.accept_mandate(rounds.votes(term=4, candidate=rounds.run.second))
    assert (newest.term, newest.coordinator) == (4, rounds.run.second.peer_id)
    assert ledger.mandate is newest
    assert ledger.term_newest == 4


def test_only_an_authority_is_voted_for(rounds: Rounds) -> None:
    vote = decode_signed(rounds.vote(rounds.run.publisher, candidate=rounds.run.stranger))
    assert code_of(lambda: rounds.trust.accept_vote(vote)) == "untrusted"


def test_a_contribution_is_its_signers_own_and_of_a_revision_that_is_known(rounds: Rounds) -> None:
    run = rounds.run
    own = decode_value(Contribution, rounds.contribution(0).payload)
    for changes, code in (({"revision": 1}, "revision-unknown"), ({"peer_id": run.second.peer_id}, "untrusted")):
        signed = run.sign(replace(own, **changes), run.trainer)
        assert code_of(lambda signed=signed: rounds.ledger.accept_contribution(signed)) == code  # type: ignore[misc]


def test_a_receipt_bears_the_signature_of_its_coordinator(rounds: Rounds) -> None:
    signed = rounds.run.sign(rounds.receipt(0), rounds.run.second)
    assert code_of(lambda: rounds.trust.accept_receipt(signed)) == "untrusted"


def test_a_receipt_is_final_with_most_signatures(rounds: Rounds) -> None:
    alone = rounds.run.sign(rounds.receipt(0), rounds.run.publisher)
    assert code_of(lambda: rounds.ledger.accept_final(alone)) == "untrusted"
    assert rounds.ledger.accept_final(rounds.final(0))
    assert rounds.ledger.accept_final(rounds.final(0)) is False
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


def test_an_anchor_that_no_receipt_leads_to_moves_nothing_and_forgets_nothing(rounds: Rounds) -> None:
    """One authority signs an anchor: a key that leaked must not take everybody to a round that nobody reaches."""
    for index in range(3):
        rounds.ledger.accept_final(rounds.final(index))
    assert rounds.ledger.accept_anchor(rounds.anchor(2))
    rounds.ledger.save()
    for index in (1 << 62, (1 << 62) + 1):
        assert not rounds.ledger.accept_anchor(rounds.anchor(index, outcome=digest("nothing")))
    assert not rounds.ledger.is_changed
    assert rounds.ledger.next_round_index == 3
    assert rounds.ledger.forget_old(3) is None
    assert rounds.ledger.final(0) is not None
    assert rounds.ledger.accept_final(rounds.final(3))


def test_a_newcomer_that_was_shown_such_an_anchor_first_goes_by_receipts_as_they_come(rounds: Rounds) -> None:
    for index in range(4):
        rounds.receipt(index)
    assert rounds.ledger.accept_anchor(rounds.anchor(1 << 62, outcome=digest("nothing")))
    assert rounds.ledger.accept_final(rounds.final(2))
    assert rounds.ledger.accept_anchor(rounds.anchor(3))
    assert rounds.ledger.next_round_index == 3
    assert [anchor.round_index for anchor in rounds.ledger.anchors] == [3]


def test_of_anchors_that_no_receipt_leads_to_the_newest_says_which_round_is_due(rounds: Rounds) -> None:
    rounds.ledger.accept_final(rounds.final(3, previous=digest("2")))
    rounds.ledger.accept_anchor(rounds.anchor(2, outcome=digest("1")))
    assert rounds.ledger.next_round_index == 4
    rounds.ledger.accept_anchor(rounds.anchor(6, outcome=digest("5")))
    assert rounds.ledger.next_round_index == 6


def test_an_anchor_of_a_key_that_was_revoked_says_nothing(rounds: Rounds) -> None:
    run = rounds.run
    rounds.ledger.accept_anchor(rounds.anchor(5, outcome=digest("4")))
    assert rounds.ledger.next_round_index == 5
    rounds.trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=(run.second.peer_id,)))
    assert rounds.ledger.next_round_index == 0
    assert rounds.ledger.reply(0).state_anchor is None


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
    assert rounds.ledger.final(2) is not None
    assert rounds.ledger.forget_old(6) is None
    assert rounds.ledger.accept_final(rounds.final(1)) is False, "an anchor replaced it long ago"


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
    assert ledger.mandate is None
    assert ledger.reply(0).votes == (), "nobody would believe them"
    assert code_of(lambda: ledger.accept_mandate(rounds.votes())) == "untrusted"
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


def saved(ledger: Ledger) -> Ledger:
    """Let what changed be saved, so that the next change shows."""
    assert ledger.is_changed
    ledger.save()
    assert not ledger.is_changed
    return ledger


def test_what_changes_the_ledger_is_to_be_saved_and_what_is_no_news_is_not(rounds: Rounds) -> None:
    ledger = rounds.ledger
    assert not ledger.is_changed
    for change in (
        lambda: ledger.accept_mandate(rounds.votes()),
        lambda: ledger.accept_contribution(rounds.contribution(0)),
        lambda: ledger.accept_listed(rounds.contribution(0, rounds.run.stranger)),
        lambda: ledger.accept_final(rounds.final(0)),
        lambda: ledger.accept_final(rounds.final(1)),
        lambda: ledger.accept_anchor(rounds.anchor(1)),
        lambda: ledger.accept_anchor(rounds.anchor(2)),
        lambda: ledger.forget_old(2),
    ):
        change()
        saved(ledger)
        change()
        assert not ledger.is_changed
    assert code_of(lambda: ledger.accept_final(rounds.final(1, base_state_root=digest("x")))) == "fork"
    saved(ledger)


def test_before_the_genesis_nothing_of_rounds_is_believed(run: Any, real_verify: Any) -> None:
    rounds, nothing = Rounds(run), Ledger(Trust(run.run_id, real_verify))
    assert code_of(lambda: nothing.accept_contribution(rounds.contribution(0))) == "revision-unknown"
    assert code_of(lambda: nothing.accept_mandate(())) == "untrusted"
    assert nothing.authority_count == 0
    assert rounds.ledger.authority_count == 2


def test_the_same_votes_prove_a_term_again_without_being_read(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    mandate = rounds.ledger.accept_mandate(rounds.votes())
    monkeypatch.setattr("pulsenet.chain.ledger.decode_signed", None)
    assert rounds.ledger.accept_mandate(rounds.votes()) is mandate


def test_a_term_is_over_once_its_votes_are_those_of_most_no_more(rounds: Rounds) -> None:
    run, ledger = rounds.run, rounds.ledger
    ledger.accept_mandate(rounds.votes(term=7))
    more = (run.publisher.peer_id, run.second.peer_id, run.trainer.peer_id, run.stranger.peer_id)
    rounds.trust.accept_descriptor(run.revise(run.genesis, run.descriptor, authorities=tuple(sorted(more))))
    assert ledger.mandate is None
    assert ledger.reply(0).votes == ()
    assert ledger.term_newest == 7


def test_other_votes_for_a_term_that_is_proved_are_no_news(rounds: Rounds) -> None:
    mandate = rounds.ledger.accept_mandate(rounds.votes())
    rounds.ledger.save()
    assert rounds.ledger.accept_mandate(rounds.votes()[::-1]) is mandate
    assert not rounds.ledger.is_changed


def test_an_anchor_vouches_for_the_receipt_before_it_alone(rounds: Rounds) -> None:
    run, ledger = rounds.run, rounds.ledger
    receipts = [rounds.receipt(index) for index in range(4)]
    by_stranger = [run.sign(receipt, run.stranger) for receipt in receipts]
    ledger.accept_anchor(rounds.anchor(1))
    ledger.accept_anchor(rounds.anchor(3))
    for index in (1, 3):
        assert code_of(lambda index=index: ledger.accept_final(by_stranger[index])) == "untrusted"  # type: ignore[misc]
    assert ledger.accept_final(by_stranger[2])


def test_a_receipt_that_is_vouched_for_keeps_the_rules_of_receipts(rounds: Rounds) -> None:
    """Its outcome says nothing of its term, so whoever passes it on could write anything there."""
    first = rounds.receipt(0)
    rounds.ledger.accept_final(rounds.final(1))
    signed = rounds.run.sign(first, rounds.run.publisher)
    forged = replace(signed, payload=encode_value(replace(first, term=0)))
    assert code_of(lambda: rounds.ledger.accept_final(forged)) == "schema"
    assert rounds.ledger.final(0) is None


def test_only_strangers_take_up_the_open_places_of_a_round(make_run: Callable[..., Any]) -> None:
    rounds = Rounds(make_run(open_trainers_max=1))
    run = rounds.run
    rounds.ledger.accept_contribution(rounds.contribution(0, run.trainer))
    rounds.ledger.accept_contribution(rounds.contribution(0, run.stranger))
    assert code_of(lambda: rounds.ledger.accept_contribution(rounds.contribution(0, run.inferencer))) == "untrusted"


def test_a_contribution_is_found_by_its_digest_and_listed_once(rounds: Rounds) -> None:
    signed = rounds.contribution(0, rounds.run.stranger)
    assert rounds.ledger.contribution(record_digest(signed)) is None
    entry = rounds.ledger.accept_listed(signed)
    assert rounds.ledger.contribution(record_digest(signed)) is entry
    assert rounds.ledger.accept_listed(signed) is entry


def test_an_older_anchor_than_the_two_that_are_kept_is_no_news(rounds: Rounds) -> None:
    for index in range(8):
        rounds.receipt(index)
    for index in (6, 4):
        assert rounds.ledger.accept_anchor(rounds.anchor(index))
    assert [anchor.round_index for anchor in rounds.ledger.anchors] == [4, 6]
    assert not rounds.ledger.accept_anchor(rounds.anchor(2))
    assert rounds.ledger.forget_old(9) is None, "what was never kept is not given up"
    assert rounds.ledger.accept_anchor(rounds.anchor(5))
    assert [anchor.round_index for anchor in rounds.ledger.anchors] == [5, 6]
    assert rounds.ledger.next_round_index == 6
    assert rounds.ledger.anchor_signer(rounds.ledger.anchors[1]) == rounds.run.publisher.peer_id
    assert rounds.ledger.anchor_signer(decode_value(StateAnchor, rounds.anchor(7).payload)) is None


def test_each_anchor_knows_its_own_signer(rounds: Rounds) -> None:
    rounds.ledger.accept_anchor(rounds.anchor(0))
    rounds.receipt(0)
    second = rounds.run.sign(decode_value(StateAnchor, rounds.anchor(1).payload), rounds.run.second)
    rounds.ledger.accept_anchor(second)
    signers = [rounds.ledger.anchor_signer(anchor) for anchor in rounds.ledger.anchors]
    assert signers == [rounds.run.publisher.peer_id, rounds.run.second.peer_id]


def test_the_first_round_follows_nothing(rounds: Rounds) -> None:
    assert rounds.ledger.knows_round_before(0)
    assert not rounds.ledger.knows_round_before(1)
    rounds.ledger.accept_final(rounds.final(3, previous=digest("2")))
    assert rounds.ledger.next_round_index == 4


def test_a_reply_is_a_mandate_receipts_and_the_newest_anchor_as_far_as_there_are_any(rounds: Rounds) -> None:
    ledger = rounds.ledger
    assert ledger.reply(0) == RoundsReply(round_index=0, votes=(), receipts=(), state_anchor=None)
    ledger.accept_final(rounds.final(0))
    ledger.accept_final(rounds.final(1))
    for index in (1, 2):
        ledger.accept_anchor(rounds.anchor(index))
    reply = ledger.reply(1)
    assert reply.receipts == (encode_signed(rounds.final(1)),)
    assert reply.state_anchor == encode_signed(rounds.anchor(2))


def test_a_reply_holds_as_many_receipts_as_a_frame_has_room_for(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(5):
        rounds.ledger.accept_final(rounds.final(index))
    sizes = [len(encode_signed(rounds.final(index))) for index in range(5)]
    for room_bytes, count in ((sum(sizes[:3]), 3), (sum(sizes[:3]) - 1, 2), (sum(sizes), 5)):
        monkeypatch.setattr("pulsenet.chain.ledger.REPLY_SIZE_BYTES_MAX", room_bytes)
        assert len(rounds.ledger.reply(0).receipts) == count
    monkeypatch.setattr("pulsenet.limits.ROUND_RECEIPTS_PER_REPLY_MAX", 4)
    assert len(rounds.ledger.reply(0).receipts) == 4


def test_what_a_store_needs_after_its_disk_was_full_is_every_record(rounds: Rounds) -> None:
    ledger = rounds.ledger
    records = [rounds.anchor(0), rounds.contribution(0), rounds.final(0)]
    ledger.accept_anchor(records[0])
    ledger.accept_contribution(records[1])
    ledger.accept_final(records[2])
    assert list(ledger.records()) == records
    other = rounds.final(0, base_state_root=digest("other"))
    with pytest.raises(TrustError, match="fork"):
        ledger.accept_final(other)
    assert list(ledger.records()) == [*records, records[2], other]


def test_a_blob_that_something_kept_names_is_not_given_up(rounds: Rounds) -> None:
    """Two trainers that gate everything contribute the same empty blob, and so may one trainer in two rounds."""
    ledger = rounds.ledger
    for index in range(4):
        ledger.accept_final(rounds.final(index))
    for index, name in ((0, "same"), (3, "same"), (1, "anchored")):
        signed = rounds.contribution(index)
        record = replace(decode_value(Contribution, signed.payload), blob_id=digest(name))
        ledger.accept_contribution(rounds.run.sign(record, rounds.run.trainer))
    ledger.accept_anchor(rounds.anchor(2))
    ledger.accept_anchor(rounds.anchor(3, blob_id=digest("anchored")))
    gone = ledger.forget_old(9)
    assert gone is not None
    assert gone.blob_ids == ()
    assert len(gone.record_digests) == 4


@pytest.mark.parametrize("kind", ["contribution", "anchor"])
def test_whatever_of_a_round_is_left_is_forgotten_and_named_in_order(rounds: Rounds, kind: str) -> None:
    """Receipts may be gone, or never have been here."""
    for index in range(9):
        rounds.receipt(index)
    if kind == "contribution":
        for index in (0, 1):
            rounds.ledger.accept_contribution(rounds.contribution(index))
    for index in (2, 3, 4, 5) if kind == "anchor" else (4, 5):
        rounds.ledger.accept_anchor(rounds.anchor(index))
    gone = rounds.ledger.forget_old(9)
    names = ("anchor 2", "anchor 3") if kind == "anchor" else ("blob 0", "blob 1")
    assert gone is not None
    assert list(gone.blob_ids) == sorted(digest(name) for name in names)


def test_what_is_wrong_with_a_stored_ledger_has_a_stable_code(rounds: Rounds) -> None:
    rounds.ledger.accept_final(rounds.final(0))
    data = rounds.ledger.save()
    for stored, read in ((data, lambda digest: None), (data, lambda digest: b"rubbish"), (b"", lambda digest: None)):
        with pytest.raises(StorageError) as caught:
            Ledger.restore(rounds.trust, stored, read)
        assert caught.value.reason == "damaged"
