"""Laws of the planner over all models and links."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet.outer.plan import Variant, Workload, make_plan, predict_utilization
from pulsenet.outer.plan_link import LOSS_RATIO_MAX, Congestion, Link

law = settings(derandomize=True, deadline=None, max_examples=100)
SLACK = 1 + 1e-9

variants = st.sampled_from(list(Variant))
workloads = st.builds(
    Workload,
    params=st.floats(1, 1e12),
    peer_count=st.integers(1, 64),
    step_seconds=st.floats(1e-3, 1e3),
    inner_steps=st.integers(1, 500),
    bytes_per_param=st.sampled_from([1.0, 2.0, 4.0]),
    density=st.floats(0, 1),
    entry_bits=st.floats(1, 100),
    flush_interval=st.integers(0, 32),
    subset_ratio=st.floats(0, 1),
    state_anchor_interval=st.integers(1, 100),
    are_authorities=st.booleans(),
)
links = st.builds(
    Link,
    down_mbps=st.floats(1e-2, 1e5),
    up_mbps=st.floats(1e-2, 1e5),
    loss_ratio=st.floats(0, LOSS_RATIO_MAX),
    rtt_seconds=st.floats(0, 1),
    congestion=st.sampled_from(list(Congestion)),
)
factors = st.floats(1, 100)


@law
@given(variants, workloads, links, factors)
def test_more_bandwidth_never_lowers_utilisation(
    variant: Variant, workload: Workload, link: Link, factor: float
) -> None:
    faster = (
        link.with_down(link.down_mbps * factor),
        replace(link, down_mbps=link.down_mbps * factor),
        replace(link, up_mbps=link.up_mbps * factor),
    )
    before = predict_utilization(variant, workload, link)
    for each in faster:
        assert before <= predict_utilization(variant, workload, each) * SLACK


@law
@given(variants, workloads, links, st.floats(0, LOSS_RATIO_MAX), st.floats(0, 1))
def test_neither_loss_nor_delay_raises_utilisation(
    variant: Variant, workload: Workload, link: Link, loss: float, rtt: float
) -> None:
    before = predict_utilization(variant, workload, link)
    lossier = replace(link, loss_ratio=max(link.loss_ratio, loss))
    farther = replace(link, rtt_seconds=max(link.rtt_seconds, rtt))
    assert predict_utilization(variant, workload, lossier) <= before * SLACK
    assert predict_utilization(variant, workload, farther) <= before * SLACK


@law
@given(variants, workloads, links)
def test_one_trainer_sends_nothing(variant: Variant, workload: Workload, link: Link) -> None:
    plan = make_plan(variant, replace(workload, peer_count=1), link)
    assert (plan.received_bytes, plan.sent_bytes, plan.blocking_seconds, plan.utilization) == (0.0, 0.0, 0.0, 1.0)


@law
@given(variants, workloads, links)
def test_utilisation_is_a_share_and_waiting_makes_up_the_rest(variant: Variant, workload: Workload, link: Link) -> None:
    plan = make_plan(variant, workload, link)
    assert 0.0 < plan.utilization <= 1.0
    assert plan.blocking_seconds >= 0.0
    assert abs(plan.utilization * plan.round_seconds - workload.compute_seconds) <= 1e-6 * plan.round_seconds
    assert plan.joiner_can_catch_up <= (plan.catch_up_seconds is not None)


@law
@given(workloads, links)
def test_what_moves_less_and_waits_less_is_never_worse(workload: Workload, link: Link) -> None:
    found = {variant: predict_utilization(variant, workload, link) for variant in Variant}
    assert found[Variant.DDP] <= found[Variant.DILOCO] * SLACK
    assert found[Variant.DILOCO] <= found[Variant.GLOBAL_M1] * SLACK
    assert found[Variant.GLOBAL_M1_LOCAL_M2] <= found[Variant.GLOBAL_M1_LOCAL_M2_SUBSET] * SLACK
    assert found[Variant.GLOBAL_M1_LOCAL_M2_SUBSET] <= found[Variant.GLOBAL_M1] * SLACK


@law
@given(variants, workloads, links, factors)
def test_longer_rounds_never_lower_utilisation(variant: Variant, workload: Workload, link: Link, factor: float) -> None:
    longer = replace(workload, step_seconds=workload.step_seconds * factor)
    assert predict_utilization(variant, workload, link) <= predict_utilization(variant, longer, link) * SLACK


@law
@given(workloads, links, st.floats(0, 1))
def test_denser_contributions_never_weigh_less(workload: Workload, link: Link, density: float) -> None:
    denser = replace(workload, density=max(density, workload.density))
    before, after = (make_plan(Variant.PULSELOCO, each, link) for each in (workload, denser))
    assert before.payload_bytes <= after.payload_bytes * SLACK


@law
@given(variants, workloads, links, st.integers(0, 16))
def test_more_trainers_never_bring_less_to_a_dense_exchange(
    variant: Variant, workload: Workload, link: Link, more: int
) -> None:
    if variant is Variant.PULSELOCO:
        return  # the run changes over to slices, which weigh less
    larger = replace(workload, peer_count=workload.peer_count + more)
    assert make_plan(variant, workload, link).received_bytes <= make_plan(variant, larger, link).received_bytes * SLACK
