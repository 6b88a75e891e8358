"""What a round costs on a link: bytes, waiting, and the share of the time that goes into inner steps.

The model is ``U = C / (max(C, T1) + T2)``: C is the time of the inner steps, T1 a mixing that overlaps them and T2 an
exchange that everything waits for. Sizes of ``pulseloco`` are fitted to what was measured (docs/planning.md says from
what).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from pulsenet.outer.plan_link import Link


class Variant(StrEnum):
    """What a plan is made for: an algorithm of runs, or a variant of gossip."""

    DDP = "ddp"
    DILOCO = "diloco"
    PULSELOCO = "pulseloco"
    GLOBAL_M1 = "global_m1"
    """Mix1: global mean. Mix2: none."""
    GLOBAL_M1_LOCAL_M2 = "global_m1_local_m2"
    """Mix1: global mean. Mix2: random pairs."""
    GLOBAL_M1_LOCAL_M2_SUBSET = "global_m1_local_m2_subset"
    """The same, with Mix2 on some of the parameters."""
    LOCAL_M1_M2 = "local_m1_m2"
    """Random pairs in both."""


WITH_ROUNDS: Final = frozenset({Variant.DDP, Variant.DILOCO, Variant.PULSELOCO})
"""Algorithms that close rounds; the others are variants of the algorithm ``gossip``."""

TARGET_UTILIZATION: Final = 0.9

FP32_BITS: Final = 32.0
"""Blocks and sums that would be longer travel dense."""
FLUSHED_ENTRY_BITS: Final = 5.6
"""Of a value that passes in its block's turn with one mantissa bit."""
FLUSHED_SUM_BITS: Final = 32.0
"""Of a sum of such values."""
SLICE_GROWTH: Final = 0.97
"""A slice of M trainers has 1 + 0.97 ln M times the size of one trainer's share of it: edges of rounding cells are the
same for all, so the trainers' entries overlap."""

SLICED_MEMBERS_MIN: Final = 3
ALL_GATHER_RATIO_MIN: Final = 17.0
FLUSH_ALL_GATHER_RATIO_MIN: Final = 10.0
"""As new runs have them: below so many times saved against a ring all-reduce, members sum by slice."""

STATE_BYTES_PER_PARAM: Final = 8
"""Of a state anchor: FP32 masters and momentum."""
DDP_STATE_BYTES_PER_PARAM: Final = 12
"""Of one under ``ddp``: FP32 masters and AdamW's two moments."""

ROUND_TRIPS: Final = 4
"""Of a round with a receipt: contributions, the receipt, slices' names, slices."""
MIX_ROUND_TRIPS: Final = 2
"""Of a mixing: slices or a partner's values, and the answer."""

MBPS_MIN: Final = 1e-6
MBPS_MAX: Final = 1e9
"""Between these the speed for a utilisation is looked for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The model and its training. Counts are at least 1, shares from 0 to 1."""

    params: float
    """Parameters that train."""
    peer_count: int
    """Trainers (M)."""
    step_seconds: float
    """Of one inner step."""
    inner_steps: int = 8
    """Of a round (H)."""
    bytes_per_param: float = 4.0
    """Of everything dense: gradients, pseudo-gradients, mixed parameters."""
    density: float = 0.03
    """Share of the entries that pass the gate of ``pulseloco``."""
    entry_bits: float = 18.0
    """Of such an entry, position and value."""
    flush_interval: int = 8
    """Rounds in which every block of ``pulseloco`` passes whole once; 0 for never."""
    subset_ratio: float = 0.43
    """Share of the parameters in the subset of Mix2."""
    state_anchor_interval: int = 10
    """Rounds between state anchors (K); inner steps under ``ddp``."""
    are_authorities: bool = False
    """Whether the trainers' nodes are the authorities, who look into every contribution; a round waits for them."""

    def __post_init__(self) -> None:
        assert 1 <= self.params < math.inf
        assert self.peer_count >= 1
        assert 0.0 < self.step_seconds < math.inf
        assert self.inner_steps >= 1
        assert 0.0 < self.bytes_per_param < math.inf
        assert 0.0 <= self.density <= 1.0
        assert 0.0 < self.entry_bits < math.inf
        assert self.flush_interval >= 0
        assert 0.0 <= self.subset_ratio <= 1.0
        assert self.state_anchor_interval >= 1

    @property
    def compute_seconds(self) -> float:
        """Return the time of a round's inner steps (C)."""
        return self.inner_steps * self.step_seconds


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of one trainer."""

    payload_bytes: float = 0.0
    """Of what it has to say, once."""
    moved_bytes: float = 0.0
    """What it receives, and on average sends."""
    replayed_bytes: float = 0.0
    """What a joiner fetches to make up for it: every contribution, or the sums of the slices."""
    connection_count: int = 1
    round_trips: int = 0

    def seconds(self, link: Link) -> float:
        """Return how long it takes."""
        return link.transfer_seconds(
            received_bytes=self.moved_bytes,
            sent_bytes=self.moved_bytes,
            connection_count=self.connection_count,
            round_trips=self.round_trips,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What one round of one trainer costs."""

    variant: Variant
    payload_bytes: float
    """Of what the trainer has to say in a round, once."""
    received_bytes: float
    sent_bytes: float
    """On average over the trainers, who also serve what they fetched."""
    authority_received_bytes: float
    """What a trainer receives whose node is an authority: it looks into every contribution."""
    overlapped_seconds: float
    """Of Mix1 (T1), which runs beside the inner steps."""
    blocking_seconds: float
    """In which no inner step runs."""
    round_seconds: float
    utilization: float
    """Time in inner steps over all time."""
    mbps_for_target: float | None
    """Download speed at which utilisation is 90 %, upload in proportion; ``None`` where no speed is enough."""
    catch_up_seconds: float | None
    """From joining to the run's state at worst, on this link; ``None`` where the run is faster."""
    joiner_can_catch_up: bool
    """Whether that ends before what it needs is dropped."""


def make_plans(workload: Workload, link: Link) -> list[Plan]:
    """Return a plan for each variant."""
    return [make_plan(variant, workload, link) for variant in Variant]


def make_plan(variant: Variant, workload: Workload, link: Link) -> Plan:
    """Return what a round of a variant costs."""
    mix, exchange = _exchanges(variant, workload)
    times = workload.inner_steps if variant is Variant.DDP else 1
    overlapped, blocking = _seconds(variant, workload, link)
    round_seconds = workload.compute_seconds + blocking
    moved = mix.moved_bytes + times * exchange.moved_bytes
    catch_up, in_time = _plan_joiner(variant, workload, link, round_seconds / times)
    others = workload.peer_count - 1
    return Plan(
        variant=variant,
        payload_bytes=mix.payload_bytes + times * exchange.payload_bytes,
        received_bytes=moved,
        sent_bytes=moved,
        authority_received_bytes=times * others * exchange.payload_bytes if variant in WITH_ROUNDS else moved,
        overlapped_seconds=overlapped,
        blocking_seconds=blocking,
        round_seconds=round_seconds,
        utilization=workload.compute_seconds / round_seconds,
        mbps_for_target=find_mbps(variant, workload, link, TARGET_UTILIZATION),
        catch_up_seconds=catch_up,
        joiner_can_catch_up=in_time,
    )


def predict_utilization(variant: Variant, workload: Workload, link: Link) -> float:
    """Return the share of the time that goes into inner steps."""
    _, blocking = _seconds(variant, workload, link)
    return workload.compute_seconds / (workload.compute_seconds + blocking)


def find_mbps(variant: Variant, workload: Workload, link: Link, utilization: float) -> float | None:
    """Return the least download speed for a utilisation, all else as on the link; ``None`` if there is none."""

    def is_enough(mbps: float) -> bool:
        return predict_utilization(variant, workload, link.with_down(mbps)) >= utilization

    if workload.peer_count == 1:
        return 0.0
    if not is_enough(MBPS_MAX):
        return None
    low, high = math.log(MBPS_MIN), math.log(MBPS_MAX)
    for _ in range(60):  # utilisation never falls with the speed
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(math.exp(middle)) else (middle, high)
    return math.exp(high)


def _seconds(variant: Variant, workload: Workload, link: Link) -> tuple[float, float]:
    """Return the time of Mix1, and the time of a round in which no inner step runs."""
    mix, exchange = _exchanges(variant, workload)
    times = workload.inner_steps if variant is Variant.DDP else 1
    overlapped = mix.seconds(link)
    late = max(overlapped - workload.compute_seconds, 0.0)
    return overlapped, late + times * exchange.seconds(link)


def _exchanges(variant: Variant, workload: Workload) -> tuple[Exchange, Exchange]:
    """Return what overlaps the inner steps and what blocks; under ``ddp`` the latter once an inner step."""
    nothing = Exchange()
    match variant:
        case Variant.DDP | Variant.DILOCO:
            return nothing, _of_trainers(workload, _global_mean(workload, round_trips=ROUND_TRIPS))
        case Variant.PULSELOCO:
            return nothing, _of_trainers(workload, _gated_mean(workload))
        case Variant.GLOBAL_M1:
            return _global_mean(workload, round_trips=MIX_ROUND_TRIPS), nothing
        case Variant.GLOBAL_M1_LOCAL_M2:
            return _global_mean(workload, round_trips=MIX_ROUND_TRIPS), _pair(workload, 1.0)
        case Variant.GLOBAL_M1_LOCAL_M2_SUBSET:
            return _global_mean(workload, round_trips=MIX_ROUND_TRIPS), _pair(workload, workload.subset_ratio)
        case _:
            assert variant is Variant.LOCAL_M1_M2
            return _pair(workload, 1.0), _pair(workload, 1.0)


def _global_mean(workload: Workload, *, round_trips: int) -> Exchange:
    """Reduce-scatter and all-gather: each trainer sums one slice."""
    count, dense_bytes = workload.peer_count, workload.params * workload.bytes_per_param
    return Exchange(
        payload_bytes=dense_bytes,
        moved_bytes=2 * (count - 1) / count * dense_bytes,
        replayed_bytes=dense_bytes if count >= SLICED_MEMBERS_MIN else count * dense_bytes,
        connection_count=max(count - 1, 1),
        round_trips=round_trips,
    )


def _of_trainers(workload: Workload, exchange: Exchange) -> Exchange:
    """Return what trainers move in an exchange with a receipt: as authorities they fetch every contribution."""
    if not workload.are_authorities:
        return exchange
    count = workload.peer_count
    return replace(
        exchange,
        moved_bytes=(count - 1) * exchange.payload_bytes,
        replayed_bytes=count * exchange.payload_bytes,
    )


def _pair(workload: Workload, share: float) -> Exchange:
    """Two trainers exchange a share of the parameters. The odd one out has nothing to do; this is one of the others."""
    dense_bytes = workload.params * workload.bytes_per_param * share
    return Exchange(
        payload_bytes=dense_bytes,
        moved_bytes=dense_bytes if workload.peer_count > 1 else 0.0,
        round_trips=MIX_ROUND_TRIPS,
    )


def _gated_mean(workload: Workload) -> Exchange:
    """Everyone fetches every contribution, or slices where the run's rule says so."""
    count = workload.peer_count
    flushed_share = 1 / workload.flush_interval if workload.flush_interval else 0.0
    gated_bits = (1 - flushed_share) * workload.density * workload.entry_bits
    payload_bits = min(gated_bits + flushed_share * FLUSHED_ENTRY_BITS, FP32_BITS)
    ratio_min = FLUSH_ALL_GATHER_RATIO_MIN if workload.flush_interval else ALL_GATHER_RATIO_MIN
    moved_bits, replayed_bits = (count - 1) * payload_bits, count * payload_bits
    if count >= SLICED_MEMBERS_MIN and ratio_min * count * payload_bits > 2 * FP32_BITS:
        sum_bits = gated_bits * (1 + SLICE_GROWTH * math.log(count)) + flushed_share * FLUSHED_SUM_BITS
        replayed_bits = min(sum_bits, FP32_BITS)
        moved_bits = (count - 1) / count * (payload_bits + replayed_bits)
    per_bit = workload.params / 8
    return Exchange(
        payload_bytes=payload_bits * per_bit,
        moved_bytes=moved_bits * per_bit,
        replayed_bytes=replayed_bits * per_bit,
        connection_count=max(count - 1, 1),
        round_trips=ROUND_TRIPS,
    )


def _plan_joiner(variant: Variant, workload: Workload, link: Link, round_seconds: float) -> tuple[float | None, bool]:
    """Return how long a joiner needs to the run's state, and whether that is in time.

    It downloads a state anchor and then what rounds since were made of, at worst K of them, while the run goes on. What
    it needs is kept for at least K rounds. Gossip has nothing to replay: a state is loaded, and mixing does the rest.
    """
    per_param = DDP_STATE_BYTES_PER_PARAM if variant is Variant.DDP else STATE_BYTES_PER_PARAM
    anchor_seconds = _download_seconds(link, workload, workload.params * per_param)
    replay_seconds = 0.0
    if variant in WITH_ROUNDS:
        _, exchange = _exchanges(variant, workload)
        replay_seconds = _download_seconds(link, workload, exchange.replayed_bytes)
    kept_seconds = workload.state_anchor_interval * round_seconds
    if replay_seconds >= round_seconds:
        return None, False
    backlog_seconds = anchor_seconds + workload.state_anchor_interval * replay_seconds
    catch_up_seconds = backlog_seconds / (1 - replay_seconds / round_seconds)
    return catch_up_seconds, catch_up_seconds <= kept_seconds


def _download_seconds(link: Link, workload: Workload, size_bytes: float) -> float:
    return link.transfer_seconds(
        received_bytes=size_bytes, sent_bytes=0.0, connection_count=workload.peer_count, round_trips=1
    )
