"""A-CLI-6: waits are nested, or refused with the rule that is broken."""

from __future__ import annotations

import pytest

from pulsenet.errors import ConfigError
from pulsenet.node.timeouts import Timeouts, check_timeouts


def test_the_defaults_are_nested() -> None:
    check_timeouts(Timeouts())


@pytest.mark.parametrize(
    ("timeouts", "rule"),
    [
        (Timeouts(chunk_idle_seconds=11.0), r"chunk_idle_seconds \(11\) .* source_switch_seconds \(10\)"),
        (Timeouts(source_switch_seconds=1_200.0), r"source_switch_seconds \(1200\) .* round_seconds \(1200\)"),
        (Timeouts(round_seconds=7_200.0), r"round_seconds \(7200\) .* watchdog_seconds \(3600\)"),
        (Timeouts(chunk_idle_seconds=0.0), r"chunk_idle_seconds \(0\) must be above 0"),
    ],
)
def test_a_longer_inner_wait_is_refused_with_the_rule(timeouts: Timeouts, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        check_timeouts(timeouts)
