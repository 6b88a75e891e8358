"""Series are named once, in base units, with labels from closed sets (A-OBS-1, A-OBS-3)."""

from __future__ import annotations

import re

import pytest

from pulsenetd.metrics import Metrics


def test_no_stranger_can_invent_a_series() -> None:
    """A-OBS-1"""
    metrics = Metrics()
    for index in range(1_000):
        metrics.count("rejected", f"peer-{index}")
        metrics.count("bytes_received", f"kind-{index}", 10)
        metrics.count("wasted_bytes", f"reason-{index}")
    text = metrics.text().decode()
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(series) <= 500
    assert 'pulsenet_rejected_total{reason="other"} 1000.0' in text
    assert 'pulsenet_bytes_total{direction="received",kind="other"} 10000.0' in text


def test_names_follow_the_rules_of_promtool() -> None:
    """A-OBS-1"""
    metrics = Metrics()
    metrics.count("retries", "timeout")
    metrics.observe("fetch", 0.5)
    metrics.set("applied_version", 3)
    for line in metrics.text().decode().splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert re.fullmatch(r"pulsenet_[a-z0-9_]+", name)
            assert name.endswith("_total") == (kind == "counter")
    assert "pulsenet_applied_version 3.0" in metrics.text().decode()


def test_a_counter_nobody_declared_is_our_own_error() -> None:
    with pytest.raises(KeyError):
        Metrics().count("surprise", "x")
