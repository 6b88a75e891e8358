"""Which contributions a round counts, and when it ends."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsenet.chain.ledger import ContributionEntry
from pulsenet.chain.records import Contribution
from pulsenet.chain.round_settings import RoundSettings
from pulsenet.chain.rules import FP32_ONE_BITS
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.node.closing import REFUSED_WAITS, REJECTIONS_MAX, Collection, choose_scales
from pulsenet.outer.floats import fp32_from_bits, fp32_to_bits

STATE = compute_digest(b"state")
SETTINGS = RoundSettings(contributions_min=2, contribution_wait_seconds=30)


def key(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def name(number: int) -> Digest:
    return compute_digest(b"contribution %d" % number)


def entry(run: Any, number: int, norm: float = 1.0, state: Digest = STATE) -> ContributionEntry:
    record = Contribution(
        run_id=run.run_id,
        revision=0,
        peer_id=key(number),
        round_index=3,
        base_state_root=state,
        blob_id=name(number),
        encoded_size_bytes=8,
        entry_count=1,
        element_count=10,
        norm_bits=fp32_to_bits(norm),
        codec_id=1,
    )
    return ContributionEntry(record, run.genesis, key(number))


@pytest.fixture
def collection(run: Any) -> Collection:
    found = Collection(3, STATE)
    for number in (2, 1, 3):
        found.add(key(number), name(number), entry(run, number, norm=float(number)))
    return found


def test_bits_and_numbers_are_the_same() -> None:
    assert fp32_to_bits(1.0) == FP32_ONE_BITS
    assert fp32_from_bits(fp32_to_bits(0.5)) == 0.5


def test_everybody_expected_and_checked_ends_the_round(collection: Collection) -> None:
    expected = {key(1), key(2), key(3)}
    for number in (1, 2):
        collection.decide(name(number), "")
        assert not collection.is_complete(expected, SETTINGS, 0.0)
    collection.decide(name(3), "finite")
    assert collection.is_complete(expected, SETTINGS, 0.0)
    assert [member.peer_id for member in collection.members(0.0)] == [key(1), key(2)]
    assert [(item.peer_id, item.reason) for item in collection.rejected()] == [(key(3), "finite")]


def test_another_number_of_elements_is_rejected_without_a_look(collection: Collection) -> None:
    collection.decide(name(1), "")
    collection.refuse_other_shapes(10)
    assert set(collection.undecided()) == {key(2), key(3)}
    collection.refuse_other_shapes(11)
    assert not collection.undecided()
    assert [item.reason for item in collection.rejected()] == ["shape", "shape"]
    assert collection.counted == [key(1)]


def test_others_are_waited_for_and_then_left_out(collection: Collection) -> None:
    expected = {key(number) for number in range(1, 9)}
    for number in (1, 2):
        collection.decide(name(number), "")
    assert not collection.is_complete(expected, SETTINGS, 100.0)
    assert not collection.is_complete(expected, SETTINGS, 129.9)
    assert collection.is_complete(expected, SETTINGS, 130.0)
    assert [member.peer_id for member in collection.members(0.0)] == [key(1), key(2)]


def test_too_few_end_no_round_however_long_it_takes(collection: Collection) -> None:
    collection.decide(name(1), "")
    assert not collection.is_complete({key(1), key(4)}, SETTINGS, 0.0)
    assert not collection.is_complete({key(1), key(4)}, SETTINGS, 1e9)


def test_a_round_of_rejected_content_ends_and_counts_nobody(collection: Collection) -> None:
    for number in (1, 2, 3):
        collection.decide(name(number), "norm")
    assert collection.is_complete({key(1)}, SETTINGS, 0.0)
    assert collection.members(0.0) == ()
    assert len(collection.rejected()) == 3


def test_where_some_were_rejected_and_too_few_are_left_the_round_ends_without_moving_the_state(
    collection: Collection, run: Any
) -> None:
    """They contribute once a round, so it would never end: others are waited for, and then the next one begins."""
    everybody = {key(number) for number in (1, 2, 3)}
    for number, reason in ((1, ""), (2, "base"), (3, "finite")):
        collection.decide(name(number), reason)
    assert not collection.is_complete(everybody, SETTINGS, 100.0)
    assert collection.ends_at(SETTINGS) == 130.0
    assert not collection.is_complete(everybody, SETTINGS, 129.9)
    assert collection.is_complete(everybody, SETTINGS, 130.0)
    assert collection.members(0.0, SETTINGS.contributions_min) == ()
    assert len(collection.rejected()) == 2
    collection.add(key(4), name(4), entry(run, 4))
    collection.decide(name(4), "")
    assert collection.is_complete({*everybody, key(4)}, SETTINGS, 110.0), "somebody else came in time"
    assert [member.peer_id for member in collection.members(0.0, SETTINGS.contributions_min)] == [key(1), key(4)]
    assert collection.ends_at(SETTINGS) == 140.0


def test_where_some_were_rejected_whoever_is_silent_is_not_waited_for_without_end(collection: Collection) -> None:
    everybody = {key(number) for number in (1, 2, 3, 4)}
    for number, reason in ((1, ""), (2, "base")):
        collection.decide(name(number), reason)
    assert not collection.is_complete(everybody, SETTINGS, 100.0)
    assert collection.ends_at(SETTINGS) == 100.0 + 30.0 * REFUSED_WAITS
    assert not collection.is_complete(everybody, SETTINGS, 399.9)
    assert collection.is_complete(everybody, SETTINGS, 400.0)
    assert collection.members(0.0, SETTINGS.contributions_min) == ()


def test_a_round_without_any_contribution_does_not_end(run: Any) -> None:
    assert not Collection(3, STATE).is_complete(set(), SETTINGS, 1e9)


def test_inner_steps_from_another_state_are_refused_without_a_look(run: Any) -> None:
    collection = Collection(3, STATE)
    collection.add(key(1), name(1), entry(run, 1, state=compute_digest(b"other")))
    assert collection.reasons == {key(1): "base"}
    collection.decide(name(1), "")
    assert collection.reasons == {key(1): "base"}


def test_the_first_contribution_of_a_key_counts(collection: Collection, run: Any) -> None:
    collection.add(key(1), name(9), entry(run, 9))
    assert collection.found[key(1)][0] == name(1)


def test_rejections_stay_within_a_receipt(run: Any) -> None:
    collection = Collection(3, STATE)
    for number in range(REJECTIONS_MAX + 5):
        collection.add(key(number), name(number), entry(run, number, state=compute_digest(b"other")))
    assert len(collection.rejected()) == REJECTIONS_MAX


def test_norms_above_a_multiple_of_the_median_are_scaled_down() -> None:
    scales = choose_scales({key(1): 1.0, key(2): 2.0, key(3): 16.0}, 2.0)
    assert [fp32_from_bits(scales[key(number)]) for number in (1, 2, 3)] == [1.0, 1.0, 0.25]


def test_the_median_is_the_one_that_the_specification_names() -> None:
    """Of an even number the mean of the middle two; where most send nothing, whoever sends is not cut."""
    scales = choose_scales({key(1): 1.0, key(2): 8.0}, 1.0)
    assert [fp32_from_bits(scales[key(number)]) for number in (1, 2)] == [1.0, 0.5625]
    assert set(choose_scales({key(1): 0.0, key(2): 0.0, key(3): 4.0}, 2.0).values()) == {FP32_ONE_BITS}


def test_no_ratio_scales_nothing() -> None:
    assert choose_scales({key(1): 1.0, key(2): 1e30}, 0.0) == {key(1): FP32_ONE_BITS, key(2): FP32_ONE_BITS}
    assert choose_scales({}, 2.0) == {}


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=9), st.floats(1.0, 16.0, width=32))
def test_every_scale_may_stand_in_a_receipt_and_bounds_its_norm(norms: list[float], ratio: float) -> None:
    given_norms = {key(number): norm for number, norm in enumerate(norms)}
    median = statistics.median(norms)
    for peer_id, bits in choose_scales(given_norms, ratio).items():
        assert 0 < bits <= FP32_ONE_BITS
        if median:
            assert fp32_from_bits(bits) * given_norms[peer_id] <= ratio * median * (1 + 1e-6) + 2.0**-40
