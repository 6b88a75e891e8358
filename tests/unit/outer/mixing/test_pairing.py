from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet import limits
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import PeerId, compute_digest
from pulsenet.outer.mixing.pairing import (
    choose_probers,
    count_slices,
    find_owner,
    find_partner,
    match_members,
    shuffle_members,
)
from pulsenet.outer.mixing.settings import Job

law = settings(derandomize=True, deadline=None, max_examples=60)
SEED = bytes(range(32))


def members(count: int) -> list[PeerId]:
    return [PeerId(compute_digest(bytes([number]))) for number in range(count)]


@law
@given(st.integers(1, 20), st.integers(0, 1 << 40), st.sampled_from(list(Job)), st.randoms(use_true_random=False))
def test_everyone_is_in_one_group_and_partners_name_each_other(count, round_index, job, random) -> None:  # type: ignore[no-untyped-def]
    listed = members(count)
    random.shuffle(listed)
    groups = match_members(SEED, round_index, job, listed)
    assert sorted(key for group in groups for key in group) == sorted(listed)
    assert sorted(len(group) for group in groups) == [1] * (count % 2) + [2] * (count // 2)
    for group in groups:
        assert list(group) == sorted(group)
        for me in group:
            other = find_partner(SEED, round_index, job, listed, me)
            assert other == (None if len(group) == 1 else next(key for key in group if key != me))


def test_the_order_of_the_members_does_not_matter() -> None:
    listed = members(5)
    found = {match_members(SEED, 3, Job.MIX1, order) for order in permutations(listed)}
    assert len(found) == 1


def test_seed_round_and_job_each_give_other_pairs() -> None:
    listed = members(10)
    base = shuffle_members(SEED, 3, Job.MIX1, listed)
    assert base != shuffle_members(SEED, 3, Job.MIX2, listed)
    assert base != shuffle_members(SEED, 4, Job.MIX1, listed)
    assert base != shuffle_members(SEED[:-1], 3, Job.MIX1, listed)


def test_a_seed_that_runs_into_the_round_is_another_seed() -> None:
    listed = members(12)
    assert shuffle_members(b"ab", 0, Job.MIX1, listed) != shuffle_members(b"ab\0", 0, Job.MIX1, listed)


def test_every_partner_is_as_likely_as_every_other() -> None:
    listed = members(6)
    rounds = 3_000
    met = Counter(find_partner(SEED, round_index, Job.MIX2, listed, listed[0]) for round_index in range(rounds))
    assert set(met) == set(listed[1:])
    # 5 standard deviations of a binomial of 1/5.
    assert all(abs(count - rounds / 5) < 5 * (rounds * 0.16) ** 0.5 for count in met.values())


def test_the_odd_one_out_changes() -> None:
    listed = members(5)
    alone = {group[0] for r in range(60) for group in match_members(SEED, r, Job.MIX1, listed) if len(group) == 1}
    assert alone == set(listed)


def test_a_stranger_has_no_partner() -> None:
    listed = members(4)
    stranger = PeerId(bytes(32))
    assert find_partner(SEED, 0, Job.MIX1, listed, stranger) is None


def test_nobody_and_twins_are_refused() -> None:
    with pytest.raises(LocalProtocolError):
        match_members(SEED, 0, Job.MIX1, [])
    with pytest.raises(LocalProtocolError):
        match_members(SEED, 0, Job.MIX1, [*members(2), members(1)[0]])


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 40])
def test_those_who_answer_a_probe_are_few_and_whole_pairs_of_mix1(count: int) -> None:
    listed = members(count)
    chosen = choose_probers(SEED, 8, listed)
    assert len(chosen) == min(count, limits.PROBERS_MAX)
    for group in match_members(SEED, 8, Job.MIX1, listed):
        assert len(set(group) & set(chosen)) in (0, len(group))
    assert count <= 16 or set(choose_probers(SEED, 16, listed)) != set(chosen), "others in another round"


@pytest.mark.parametrize(("count", "each"), [(1, 4), (2, 4), (8, 4), (9, 3), (16, 2), (17, 1), (40, 1)])
def test_every_member_owns_as_many_slices_side_by_side(count: int, each: int) -> None:
    listed = members(count)
    assert count_slices(count) == count * each
    owners = [find_owner(slice_index, listed) for slice_index in range(count * each)]
    assert owners == [member for member in listed for _ in range(each)]
