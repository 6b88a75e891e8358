"""Utilisation over shaped links is what the planner says, within five points (paced inner steps, small payloads)."""

from __future__ import annotations

import pytest
from mixing_lab import Case, measure

from pulsenet.outer.mixing.settings import MixingVariant

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(3000)]
pytest.importorskip("torch")

MBPS = 4.0
PARAMS = 1 << 23
PAIR_SECONDS = PARAMS * 4 * 8e-6 / MBPS
POINTS_MAX = 0.05


@pytest.mark.parametrize("variant", list(MixingVariant))
def test_utilisation_is_what_the_planner_says(variant: MixingVariant) -> None:
    found = measure(Case(variant.value, MBPS, PARAMS, step_seconds=236 / 240 * PAIR_SECONDS / 8))
    told = f"{found.utilization:.3f}, planned {found.predicted:.3f}, by the line {found.predicted_by_line:.3f}"
    print(f"{variant}: measured {told}, whole {found.mixed_ratio:.2f}")
    assert found.mixed_ratio >= 0.8
    assert abs(found.utilization - found.predicted) <= POINTS_MAX
