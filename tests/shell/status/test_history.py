"""A ring of samples: fixed in size, without a clock."""

from __future__ import annotations

import json

from pulsenetd.status.history import SAMPLES_MAX, SERIES, History


def test_samples_come_back_in_order_and_what_is_unknown_stays_unknown() -> None:
    history = History()
    assert history.columns()["times_ms"] == []
    history.add(1_000, {"version_lag": 0, "received_bytes_per_second": 1.5})
    history.add(6_000, {"version_lag": None, "something_else": 3})
    columns = history.columns()
    assert columns["times_ms"] == [1_000, 6_000]
    assert columns["series"]["version_lag"] == [0.0, None]
    assert columns["series"]["received_bytes_per_second"] == [1.5, None]
    assert set(columns["series"]) == set(SERIES)
    assert "NaN" not in json.dumps(columns)


def test_the_oldest_samples_go_and_the_ring_does_not_grow() -> None:
    history = History(samples_max=3)
    for number in range(8):
        history.add(number, {"version_lag": number})
    assert history.columns()["times_ms"] == [5, 6, 7]
    assert history.columns()["series"]["version_lag"] == [5.0, 6.0, 7.0]


def test_three_hours_are_kept() -> None:
    history = History()
    for number in range(SAMPLES_MAX + 10):
        history.add(number, {})
    columns = history.columns()
    assert len(columns["times_ms"]) * columns["sample_seconds"] == 3 * 3_600
    assert columns["times_ms"][0] == 10
