"""A proposed receipt gathers countersignatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import Receipt, Rejection, SignedRecord
from pulsenet.ids import compute_digest
from pulsenet.node.courier import Courier
from pulsenet.node.effects import SendRequest
from pulsenet.node.proposal import RESEND_SECONDS, Proposal

NAME = compute_digest(b"name")


def sealed(run: Any, *keys: Any, round_index: int = 0) -> SignedRecord:
    rejected = (Rejection(run.stranger.peer_id, NAME, "finite"),)
    previous = NAME if round_index else None
    receipt = Receipt(run.run_id, 0, 1, run.publisher.peer_id, round_index, NAME, previous, (), rejected)
    signed: SignedRecord = run.seal(receipt, *keys)
    return signed


def test_signatures_are_gathered_in_order_and_once(make_run: Callable[..., Any]) -> None:
    run = make_run(authorities=(make_run.publisher, make_run.second, make_run.third))  # type: ignore[attr-defined]
    proposal = Proposal(sealed(run, run.publisher), 0.0)
    for _ in range(2):
        proposal.merge(sealed(run, run.publisher, run.third))
    assert proposal.signed == sealed(run, run.publisher, run.third)
    assert run.trust().is_final(proposal.signed)
    assert not proposal.is_copy(sealed(run, run.publisher, round_index=1))


def test_only_those_who_did_not_answer_are_shown_it_again(make_run: Callable[..., Any]) -> None:
    keys = (make_run.publisher, make_run.second, make_run.third)  # type: ignore[attr-defined]
    run = make_run(authorities=keys)
    trust = run.trust()
    courier = Courier()
    courier.connected |= {run.second.peer_id, run.third.peer_id, run.stranger.peer_id}
    proposal = Proposal(sealed(run, run.publisher), 5.0)
    assert proposal.shown_again_at == 5.0 + RESEND_SECONDS
    proposal.merge(sealed(run, run.publisher, run.third))
    effects = proposal.show(courier, Ledger(trust), trust.descriptor.authorities, 9.0)
    assert [effect.peer_id for effect in effects if isinstance(effect, SendRequest)] == [run.second.peer_id]
    assert proposal.shown_again_at == 9.0 + RESEND_SECONDS
