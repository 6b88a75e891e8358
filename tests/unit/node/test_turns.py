"""A version's number follows from its round, so whoever publishes it gives it one root."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pulsenet.chain.records import Catalogue, CatalogueEntry, EpochRecord, Kind
from pulsenet.chain.signing import decode_signed, encode_signed, open_record, record_digest
from pulsenet.ids import Digest, Version
from pulsenet.node.effects import Count, Log
from pulsenet.node.events import SnapshotOffered, StateLost, StateReached, TimerFired
from pulsenet.node.published import PublishedState, Retained
from pulsenet.node.scribe import Scribe
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


def make_turns(run: Any, trust: Any, *, leads: bool = True) -> Turns:
    succession = Succession(trust, run.verify, Scribe(trust, run.publisher.peer_id, run.publisher.sign))
    return Turns(trust, Leadership(leads=leads), succession)


def state_at(run: Any, version: Version, root: str | None = None, epoch_record: Any = None) -> PublishedState:
    """A committed state with nothing else retained."""
    name = run.digest(root or f"root {version}")
    record = None if epoch_record is None else encode_signed(epoch_record)
    return PublishedState(version, name, TABLE, name, name, record, version.number, 10, 5, 1, (), (name,))


def offered(round_index: int) -> SnapshotOffered:
    return SnapshotOffered(1, round_index, TABLE)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(round_index=st.integers(0, 10_000), committed=st.integers(1, 10_000), term=st.integers(1, 9))
def test_the_number_of_a_round_depends_on_nothing_that_was_committed(
    run: Any, round_index: int, committed: int, term: int
) -> None:
    turns = make_turns(run, run.trust())
    turns._leadership.term = term
    for state in (None, state_at(run, Version(0, committed))):
        assert turns.choose_version(state, "", round_index) == (Version(0, 1 + round_index), None)


def test_the_start_of_the_rounds_is_version_1(run: Any) -> None:
    turns = make_turns(run, run.trust())
    assert turns.choose_version(None, "", 0) == (Version(0, 1), None)
    assert turns.term == 3


# Epochs


def test_in_an_epoch_that_was_opened_numbers_start_at_its_first(run: Any) -> None:
    trust = run.trust()
    opened = run.epoch(2, 50, Version(0, 9))
    trust.accept_epoch(opened)
    turns = make_turns(run, trust, leads=False)
    before = state_at(run, Version(0, 9))
    assert turns.may_open(before, 0.0), "it is entered, whoever leads"
    assert turns.choose_version(before, "opened", 12) == (Version(2, 62), opened)
    assert turns.choose_version(None, "opened", 12) == (Version(2, 62), opened)
    inside = state_at(run, Version(2, 62), epoch_record=opened)
    assert turns.choose_version(inside, "", 13) == (Version(2, 63), None)


def test_an_epoch_in_which_another_authority_published_is_entered_too(run: Any) -> None:
    trust = run.trust()
    opened = run.epoch(1, 20, Version(0, 9))
    trust.accept_epoch(opened)
    head = run.head(Version(1, 30), epoch_digest=record_digest(opened))
    trust.accept_head(decode_signed(head), run.start_ms)
    turns = make_turns(run, trust)
    assert turns.choose_version(state_at(run, Version(0, 9)), "opened", 11) == (Version(1, 31), opened)


def test_whoever_opens_an_epoch_counts_from_its_first_number(run: Any) -> None:
    turns = make_turns(run, run.trust())
    version, signed = turns.choose_version(state_at(run, Version(0, 9)), "table", 8)
    assert signed is not None
    record = open_record(EpochRecord, signed, run.verify, run_id=run.run_id)
    assert (record.first_number, record.kept_version) == (10, Version(0, 9))
    assert version == Version(1, 18)


def test_only_a_coordinator_with_most_keys_opens_an_epoch(run: Any, make_run: Any) -> None:
    state = state_at(run, Version(0, 9))
    assert make_turns(run, run.trust()).may_open(state, 0.0)
    assert not make_turns(run, run.trust(), leads=False).may_open(state, 0.0)
    three = make_run(authorities=(make_run.publisher, make_run.second, make_run.third))
    assert not make_turns(three, three.trust()).may_open(state, 0.0)


# Snapshots


@pytest.mark.parametrize(("round_index", "expected"), [(3, True), (4, False), (5, False), (6, True), (40, True)])
def test_a_snapshot_is_of_the_round_the_trainer_is_in(run: Any, round_index: int, expected: bool) -> None:
    turns = make_turns(run, run.trust())
    assert not turns.is_misnumbered(offered(round_index)), "nobody said where the trainer is"
    turns.note(TimerFired())
    turns.note(StateReached(4, TABLE))
    assert turns.is_misnumbered(offered(round_index)) is expected
    turns.note(StateLost())
    assert not turns.is_misnumbered(offered(round_index))


def test_a_round_whose_version_is_committed_is_behind(run: Any) -> None:
    trust = run.trust()
    turns = make_turns(run, trust)
    state = state_at(run, Version(0, 9))
    assert not turns.is_behind(None, offered(0))
    assert [turns.is_behind(state, offered(round_index)) for round_index in (7, 8, 9)] == [True, True, False]
    trust.accept_epoch(run.epoch(1, 10, Version(0, 9)))
    assert not turns.is_behind(state, offered(8)), "in the epoch that is due it has another number"


# Divergence


def with_retained(run: Any, state: PublishedState, *versions: Version, root: str | None = None) -> PublishedState:
    def entry(version: Version) -> Retained:
        digest = run.digest(root or f"root {version}")
        return Retained(CatalogueEntry(Kind.ANCHOR, None, version, digest, TABLE, 1), TABLE)

    return replace(state, retained=tuple(entry(version) for version in versions))


def test_other_bits_than_an_authority_announced_are_noticed_once(run: Any) -> None:
    trust = run.trust()
    turns = make_turns(run, trust)
    ours = state_at(run, Version(0, 5), "ours")
    assert turns.find_divergence(ours) is None
    trust.accept_head(decode_signed(run.head(Version(0, 5))), run.start_ms)
    assert turns.contradicts(Version(0, 5), ours.root)
    assert not turns.contradicts(Version(0, 4), ours.root)
    assert turns.find_divergence(ours) == Version(0, 5)
    assert turns.find_divergence(ours) is None, "until there is news"
    assert turns.find_divergence(state_at(run, Version(0, 5))) is None


def test_an_older_version_that_differs_is_noticed_by_the_catalogue(run: Any) -> None:
    trust = run.trust()
    turns = make_turns(run, trust)
    manifest = run.digest("manifest")
    entries = tuple(
        CatalogueEntry(Kind.ANCHOR, None, Version(0, number), run.digest(f"root 0.{number}"), manifest, 1)
        for number in (4, 5)
    )
    catalogue = run.seal(
        Catalogue(run.run_id, 0, (replace(entries[0], manifest_digest=TABLE), entries[1])), run.publisher
    )
    head = run.head(Version(0, 5), catalogue_digest=record_digest(catalogue), manifest_digest=manifest)
    trust.accept_head(decode_signed(head), run.start_ms)
    ours = with_retained(run, state_at(run, Version(0, 5)), Version(0, 4), root="ours")
    assert turns.find_divergence(ours) is None
    trust.accept_catalogue(catalogue)
    assert turns.find_divergence(ours) == Version(0, 4)


@pytest.mark.parametrize(("leads", "reason"), [(True, "divergence"), (False, "")])
def test_only_its_own_majority_goes_on_with_weights_of_its_own(run: Any, leads: bool, reason: str) -> None:
    turns = make_turns(run, run.trust(), leads=leads)
    effects = turns.diverge(Version(0, 5), 0.0)
    assert effects[0] == Count("rejected", "diverged")
    assert isinstance(effects[1], Log)
    assert "0.5" in effects[1].text
    assert turns.starts_over
    assert turns._succession.find_epoch_reason(state_at(run, Version(0, 5)), TABLE) == reason
