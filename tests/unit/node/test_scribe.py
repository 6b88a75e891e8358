"""What the publisher signs verifies and rises in time, and one of several authorities opens no epoch."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.chain.records import EpochRecord, Head
from pulsenet.chain.signing import decode_signed, open_record
from pulsenet.chain.trust import Trust
from pulsenet.ids import Version
from pulsenet.node.published import PublishedState
from pulsenet.node.scribe import Scribe


@pytest.fixture
def state(run: Any) -> PublishedState:
    digest = run.digest("x")
    return PublishedState(Version(0, 1), digest, digest, digest, digest, None, 1, 10, 5, 1, (), (digest,))


def open_head(run: Any, signed: Any) -> Head:
    return open_record(Head, signed, run.verify, run_id=run.run_id)


def test_heads_rise_in_time_even_when_the_clock_was_set_back(run: Any, state: PublishedState) -> None:
    scribe = Scribe(run.trust(), run.publisher.peer_id, run.publisher.sign)
    first = open_head(run, scribe.issue_head(state, run.start_ms))
    second = open_head(run, scribe.issue_head(state, run.start_ms - 60_000))
    assert second.issued_at_ms == first.issued_at_ms + 1
    assert second.valid_until_ms == second.issued_at_ms + 300_000


def test_a_clock_that_was_a_day_ahead_keeps_no_later_head_from_counting(run: Any, state: PublishedState) -> None:
    """Neither the own rules, which took the head of that day, nor those of others, which refused it."""
    day_ms = 24 * 3_600_000
    own, other = run.trust(), run.trust()
    scribe = Scribe(own, run.publisher.peer_id, run.publisher.sign)
    own.accept_head(scribe.issue_head(state, run.start_ms + day_ms), run.start_ms + day_ms)
    signed = scribe.issue_head(state, run.start_ms)
    assert open_head(run, signed).issued_at_ms == run.start_ms
    assert own.accept_head(signed, run.start_ms) == other.accept_head(signed, run.start_ms) == open_head(run, signed)
    assert own.head == open_head(run, signed)


def test_a_head_is_signed_in_its_term_and_after_what_is_known(run: Any, state: PublishedState) -> None:
    trust = run.trust()
    trust.accept_head(decode_signed(run.head(Version(0, 1), issued_at_ms=run.start_ms + 500)), run.start_ms)
    scribe = Scribe(trust, run.publisher.peer_id, run.publisher.sign)
    head = open_head(run, scribe.issue_head(state, run.start_ms, term=6))
    assert (head.term, head.issued_at_ms) == (6, run.start_ms + 501)
    assert (head.version, head.root, head.revision) == (state.version, state.root, 0)
    assert (head.manifest_digest, head.catalogue_digest) == (state.manifest_digest, state.catalogue_digests[-1])


def test_one_authority_is_its_own_majority(run: Any) -> None:
    trust = run.trust()
    scribe = Scribe(trust, run.publisher.peer_id, run.publisher.sign)
    signed = scribe.open_epoch(epoch=1, first_number=8, kept_version=None, kept_root=None, reason="restart")
    assert signed.signers == (run.publisher.peer_id,)
    assert trust.accept_epoch(signed) == EpochRecord(run.run_id, 0, 1, None, None, 8, "restart")


def test_one_of_two_authorities_cannot_open_an_epoch(make_run: Any) -> None:
    run = make_run(authorities=(make_run.publisher, make_run.second))
    assert not Scribe(run.trust(), run.publisher.peer_id, run.publisher.sign).may_open_epochs


def test_without_a_descriptor_nothing_can_be_opened(run: Any) -> None:
    scribe = Scribe(Trust(run.run_id, run.verify), run.publisher.peer_id, run.publisher.sign)
    assert not scribe.may_open_epochs


def test_a_record_carries_the_publishers_signature(run: Any) -> None:
    scribe = Scribe(run.trust(), run.publisher.peer_id, run.publisher.sign)
    record = EpochRecord(run.run_id, 0, 1, None, None, 1, "x")
    signed = scribe.seal(record)
    assert open_record(EpochRecord, signed, run.verify, run_id=run.run_id) == record
