"""Plans reproduce what was published and what was measured."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pulsenet.outer.plan import (
    WITH_ROUNDS,
    Plan,
    Variant,
    Workload,
    find_mbps,
    make_plan,
    make_plans,
    predict_utilization,
)
from pulsenet.outer.plan_link import Link
from pulsenet.outer.settings import Algorithm

FAST = Link(1000, 1000)


def published(**changes: Any) -> Workload:
    """The setting of the published table: 1.5 billion BF16 parameters, 8 trainers, 236 s of inner steps."""
    given: dict[str, Any] = {"params": 1.5e9, "peer_count": 8, "step_seconds": 2.36, "inner_steps": 100}
    return Workload(**(given | {"bytes_per_param": 2.0} | changes))


def plan(variant: str, workload: Workload, mbps: float = 100.0) -> Plan:
    return make_plan(Variant(variant), workload, Link(mbps, mbps))


@pytest.mark.parametrize(
    ("variant", "mbps", "percent"),
    [
        ("diloco", 100, 36),
        ("diloco", 200, 53),
        ("global_m1", 100, 56),
        ("global_m1", 200, 100),
        ("global_m1_local_m2", 100, 36),
        ("global_m1_local_m2", 200, 66),
        ("global_m1_local_m2_subset", 100, 45),
    ],
)
def test_the_published_utilisation_comes_out_within_one_point(variant: str, mbps: float, percent: float) -> None:
    assert 100 * plan(variant, published(), mbps).utilization == pytest.approx(percent, abs=1.0)


@pytest.mark.parametrize(
    ("payload_bytes", "compute_seconds", "mbps"), [(108e6, 39.0, 200), (1.77e9, 49.0, 2600), (30.5e9, 49.0, 44_800)]
)
def test_the_published_speeds_for_90_percent_come_out_with_the_fitted_time_of_inner_steps(
    payload_bytes: float, compute_seconds: float, mbps: float
) -> None:
    # Two trainers receive one payload each; the time of the inner steps is fitted, not published.
    workload = Workload(payload_bytes, 2, compute_seconds, inner_steps=1, bytes_per_param=1.0)
    assert find_mbps(Variant.DILOCO, workload, FAST, 0.9) == pytest.approx(mbps, rel=0.01)


@pytest.mark.parametrize(
    ("flush_interval", "payload_ratio", "received_ratios"),
    [
        (8, 27, {4: 13.6, 8: 9.7, 16: 9.2}),
        (4, 18, {2: 18}),
        (0, 61, {8: 30, 16: 26}),
    ],
)
def test_sizes_of_pulseloco_are_the_measured_ones(
    flush_interval: int, payload_ratio: float, received_ratios: dict[int, float]
) -> None:
    # docs/outer.md, flushes: density 3 %, 17.5 bits an entry.
    for count, ratio in received_ratios.items():
        workload = Workload(1e9, count, 1.0, density=0.03, entry_bits=17.5, flush_interval=flush_interval)
        pulseloco = plan("pulseloco", workload)
        assert 4e9 / pulseloco.payload_bytes == pytest.approx(payload_ratio, rel=0.03)
        assert plan("diloco", workload).received_bytes / pulseloco.received_bytes == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize(("count", "ratio"), [(2, 45.2), (3, 30.2), (4, 22.6), (6, 24.1), (8, 22.4), (16, 19.3)])
def test_slices_grow_with_the_trainers_as_measured(count: int, ratio: float) -> None:
    # docs/outer.md, "What a trainer receives": density 4 %, 17.7 bits an entry, no flushes; slices from 5 trainers on.
    workload = Workload(1e9, count, 1.0, density=0.04, entry_bits=17.7, flush_interval=0)
    measured = plan("diloco", workload).received_bytes / plan("pulseloco", workload).received_bytes
    assert measured == pytest.approx(ratio, rel=0.02)


def test_bytes_of_a_round_follow_the_formulas() -> None:
    received = {each.variant: each.received_bytes for each in make_plans(published(), FAST)}
    dense, ring = 3e9, 5.25e9
    assert received.pop(Variant.PULSELOCO) < ring / 2
    assert received == {
        Variant.DDP: 100 * ring,
        Variant.DILOCO: ring,
        Variant.GLOBAL_M1: ring,
        Variant.GLOBAL_M1_LOCAL_M2: ring + dense,
        Variant.GLOBAL_M1_LOCAL_M2_SUBSET: pytest.approx(ring + 0.43 * dense),
        Variant.LOCAL_M1_M2: 2 * dense,
    }


def test_a_mixing_that_overlaps_the_inner_steps_costs_only_what_outlasts_them() -> None:
    slow, fast = plan("global_m1", published(), 100), plan("global_m1", published(), 200)
    assert slow.overlapped_seconds == pytest.approx(420)
    assert slow.blocking_seconds == pytest.approx(420 - 236)
    assert fast.blocking_seconds == 0.0
    assert fast.utilization == 1.0
    assert slow.round_seconds == pytest.approx(420)


def test_ddp_waits_in_every_inner_step() -> None:
    assert plan("ddp", published()).blocking_seconds == pytest.approx(100 * 420)


def test_one_trainer_moves_nothing_and_waits_for_nothing() -> None:
    for each in make_plans(published(peer_count=1), Link(1, 1, 0.1, 0.1)):
        assert each.received_bytes == each.sent_bytes == each.authority_received_bytes == 0.0
        assert each.blocking_seconds == 0.0
        assert each.utilization == 1.0
        assert each.mbps_for_target == 0.0


def test_the_speed_for_90_percent_gives_90_percent_and_upload_follows() -> None:
    link = Link(100, 25)
    for variant in Variant:
        mbps = find_mbps(variant, published(), link, 0.9)
        assert mbps is not None
        assert predict_utilization(variant, published(), link.with_down(mbps)) == pytest.approx(0.9, abs=1e-6)


def test_where_loss_or_delay_cap_the_speed_no_link_is_enough() -> None:
    assert find_mbps(Variant.DILOCO, published(), Link(100, 100, 0.05), 0.9) is None
    assert find_mbps(Variant.DDP, published(step_seconds=0.5), Link(100, 100, 0.0, 0.1), 0.9) is None


def test_authorities_receive_every_contribution() -> None:
    pulseloco = plan("pulseloco", published())
    assert pulseloco.authority_received_bytes == pytest.approx(7 * pulseloco.payload_bytes)
    assert pulseloco.received_bytes < pulseloco.authority_received_bytes
    assert plan("local_m1_m2", published()).authority_received_bytes == 6e9


def test_trainers_that_are_authorities_save_nothing_by_slices() -> None:
    plain = {each.variant: each for each in make_plans(published(), FAST)}
    for each in make_plans(published(are_authorities=True), FAST):
        if each.variant not in WITH_ROUNDS:
            assert each == plain[each.variant]
            continue
        assert each.received_bytes == each.authority_received_bytes == pytest.approx(7 * each.payload_bytes)
        assert each.authority_received_bytes == plain[each.variant].authority_received_bytes
        assert each.utilization < plain[each.variant].utilization
    # A joiner replays three contributions of 32 s in each round of 100 s and two contributions.
    workload = Workload(1e9, 3, 100.0, inner_steps=1, are_authorities=True)
    assert plan("diloco", workload, 1000).catch_up_seconds == pytest.approx((64 + 960) / (1 - 96 / 164))


def test_payloads_and_sums_never_exceed_dense_ones() -> None:
    workload = published(density=1.0, entry_bits=96.0, flush_interval=0)
    assert plan("pulseloco", workload).payload_bytes == 6e9
    assert plan("pulseloco", workload).received_bytes == plan("diloco", published(bytes_per_param=4)).received_bytes


def test_a_joiner_on_a_slow_link_never_reaches_the_run() -> None:
    slow = plan("ddp", published(), 1)
    # The run is as slow as the link, so what counts is what is replayed beside what is exchanged.
    assert slow.catch_up_seconds is not None
    assert not slow.joiner_can_catch_up
    # Others do not wait for a joiner: with few trainers it replays more than they exchange.
    workload = Workload(1e9, 2, 1.0, inner_steps=1, flush_interval=0)
    assert plan("diloco", workload, 1000).catch_up_seconds is None
    assert not plan("diloco", workload, 1000).joiner_can_catch_up


def test_a_joiner_downloads_the_state_anchor_and_gains_on_the_run() -> None:
    workload = Workload(1e9, 2, 100.0, inner_steps=1)
    found = plan("diloco", workload, 1000)
    # 64 s for the anchor and 10 rounds of two contributions of 32 s each, while a round takes 132 s.
    assert found.catch_up_seconds == pytest.approx((64 + 10 * 64) / (1 - 64 / 132))
    assert not found.joiner_can_catch_up
    assert plan("diloco", workload, 2000).joiner_can_catch_up
    # Gossip replays nothing.
    assert plan("global_m1", workload, 1000).catch_up_seconds == pytest.approx(64)


def test_a_joiner_of_a_sliced_round_fetches_the_sums() -> None:
    few, many = (Workload(1e9, count, 100.0, inner_steps=1) for count in (2, 3))
    assert plan("diloco", many, 1000).catch_up_seconds == pytest.approx((64 + 320) / (1 - 32 / (100 + 4 / 3 * 32)))
    seconds = [plan("diloco", each, 1000).catch_up_seconds for each in (few, many)]
    assert seconds[0] is not None
    assert seconds[1] is not None
    assert seconds[1] < seconds[0]


def test_under_ddp_the_state_holds_the_inner_optimizer_and_rounds_are_inner_steps() -> None:
    found = plan("ddp", Workload(1e9, 3, 1000.0, inner_steps=5), 1000)
    # 96 s for the anchor and 10 inner steps of one sum of 32 s each, while an inner step takes 1000 s and 4/3 of 32 s.
    assert found.catch_up_seconds == pytest.approx((96 + 320) / (1 - 32 / (1000 + 4 / 3 * 32)))


@pytest.mark.parametrize(
    ("variant", "round_trips"),
    [("ddp", 400), ("diloco", 4), ("pulseloco", 4), ("global_m1", 0), ("global_m1_local_m2", 2), ("local_m1_m2", 2)],
)
def test_round_trips_are_waited_for(variant: str, round_trips: int) -> None:
    fast, far = (Link(1e9, 1e9, rtt_seconds=seconds) for seconds in (0.1, 1.1))  # both carry as much
    waits = [make_plan(Variant(variant), published(), link).blocking_seconds for link in (fast, far)]
    assert waits[1] - waits[0] == pytest.approx(round_trips)


def test_what_closes_rounds_is_what_runs_with_rounds_can_have() -> None:
    assert {str(each) for each in WITH_ROUNDS} == {str(each) for each in Algorithm}


def test_figures_are_finite() -> None:
    for each in make_plans(published(density=0.0, flush_interval=0, subset_ratio=0.0), Link(0.001, 0.001, 0.1, 5.0)):
        assert math.isfinite(each.round_seconds)
        assert 0.0 < each.utilization <= 1.0
