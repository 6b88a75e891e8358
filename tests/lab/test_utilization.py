"""Utilisation over shaped links is what the planner says, within five points (paced inner steps, small payloads)."""

from __future__ import annotations

import pytest
from mixing_lab import Case, measure

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(3000)]
pytest.importorskip("torch")

MBPS = 4.0
PARAMS = 1 << 23
PAIR_SECONDS = PARAMS * 4 * 8e-6 / MBPS
POINTS_MAX = 0.05
MISSES = pytest.mark.xfail(reason="the last slice of a mean is waited for, and little else (gossip.md)")
VARIANTS = (
    "diloco",
    pytest.param("global_m1", marks=MISSES),
    "global_m1_local_m2",
    pytest.param("global_m1_local_m2_subset", marks=MISSES),
    "local_m1_m2",
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_utilisation_is_what_the_planner_says(variant: str) -> None:
    found = measure(Case(variant, MBPS, PARAMS, step_seconds=236 / 240 * PAIR_SECONDS / 8))
    print(f"{variant}: measured {found.utilization:.3f}, planned {found.predicted:.3f}, whole {found.mixed_ratio:.2f}")
    assert found.mixed_ratio >= 0.8
    assert abs(found.utilization - found.predicted) <= POINTS_MAX
