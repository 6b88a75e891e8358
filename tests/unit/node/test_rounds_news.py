"""What a peer answers about the rounds reaches ledger and disk together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Member, Receipt, SignedRecord, StateAnchor
from pulsenet.chain.signing import encode_signed
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, compute_digest
from pulsenet.node.effects import Count, ShowToMachines, StoreRecord
from pulsenet.node.rounds_news import store_learnt, take_rounds
from pulsenet.wire.messages import RoundsReply


def make_reply(run: Any, *receipts: SignedRecord) -> RoundsReply:
    return RoundsReply(1, (run.vote(run.publisher),), tuple(encode_signed(signed) for signed in receipts), None)


def make_final(run: Any) -> Receipt:
    member = Member(run.second.peer_id, compute_digest(b"contribution"), 0x3F80_0000)
    return Receipt(run.run_id, 0, 1, run.publisher.peer_id, 0, compute_digest(b"state"), None, (member,), ())


def make_anchor(run: Any, round_index: int, outcome: Digest | None) -> StateAnchor:
    blob_id = compute_digest(b"blob %d" % round_index)
    return StateAnchor(run.run_id, 0, round_index, compute_digest(b"state"), outcome, blob_id, 80)


def test_news_is_stored_and_shown_once(run: Any) -> None:
    ledger, signed = Ledger(run.trust()), run.seal(make_final(run), run.publisher)
    effects = take_rounds(ledger, make_reply(run, signed), run.second.peer_id)
    assert [type(effect) for effect in effects] == [StoreRecord, ShowToMachines]
    assert take_rounds(ledger, make_reply(run, signed), run.second.peer_id) == []


def test_after_a_refusal_what_the_ledger_names_is_stored(run: Any) -> None:
    ledger, signed = Ledger(run.trust()), run.seal(make_final(run), run.publisher)
    forged = run.seal(make_final(run), run.stranger)
    with pytest.raises(TrustError):
        take_rounds(ledger, make_reply(run, forged, signed), run.second.peer_id)
    assert store_learnt(ledger) == [StoreRecord(signed)]
    ledger.save()
    assert store_learnt(ledger) == []


def test_an_anchor_or_votes_of_a_key_that_was_revoked_keep_no_receipts_away(run: Any) -> None:
    """A peer that is behind still tells what the key said; receipts after it are signed by others."""
    ledger, signed = Ledger(run.trust()), run.seal(make_final(run), run.publisher)
    gone = encode_signed(run.seal(make_anchor(run, 0, None), run.stranger))
    votes = (run.vote(run.stranger),)
    effects = take_rounds(ledger, RoundsReply(1, votes, (encode_signed(signed),), gone), run.second.peer_id)
    assert [effect for effect in effects if isinstance(effect, Count)] == [Count("rejected", "untrusted")] * 2
    assert StoreRecord(signed) in effects
    assert ledger.final(0) is not None


def test_receipts_may_prove_the_anchor_that_came_with_them(run: Any) -> None:
    """Whoever was away for long knows of anchors that are proved, and takes no other on its signature alone."""
    ledger = Ledger(run.trust())
    first = run.seal(make_final(run), run.publisher)
    ledger.accept_final(first)
    ledger.accept_anchor(run.seal(make_anchor(run, 1, outcome_of(make_final(run))), run.publisher))
    late = replace(make_final(run), round_index=90, previous=compute_digest(b"outcome 89"))
    anchor = run.seal(make_anchor(run, 91, outcome_of(late)), run.publisher)
    effects = take_rounds(
        ledger,
        RoundsReply(91, (), (encode_signed(run.seal(late, run.publisher)),), encode_signed(anchor)),
        run.second.peer_id,
    )
    assert effects[-1] == StoreRecord(anchor)
    assert [known.round_index for known in ledger.anchors] == [1, 91]
