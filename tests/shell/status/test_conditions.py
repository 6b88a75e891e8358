"""Every state has a cause and a next step, and the worst comes first."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenetd.metrics import DISK_REASONS
from pulsenetd.status.conditions import Level, find_conditions

FINE: dict[str, Any] = {
    "role": "inferencer",
    "state": "current",
    "now_ms": 2_000_000,
    "uptime_seconds": 500.0,
    "event_loop_turns": True,
    "p2pd_healthy": True,
    "peers": 3,
    "applied_epoch": 0,
    "applied_version": 7,
    "latest_seen_version": 7,
    "version_lag": 0,
    "publisher_seen": True,
    "disk_free_bytes": 1 << 40,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "loop-stuck": ("error", {"event_loop_turns": False}),
    "fork": ("error", {"fork": True}),
    **{f"disk-{reason}": ("error", {"reason": reason}) for reason in DISK_REASONS},
    "disk-low": ("warning", {"disk_free_bytes": 5_000_000}),
    "damaged": ("warning", {"store_damaged_chunks": 2}),
    "p2pd": ("error", {"p2pd_healthy": False, "peers": 0}),
    "no-peers": ("warning", {"peers": 0}),
    "unreachable": ("note", {"reachability": {"reachable": False, "advice": "forward port 4001"}}),
    "clock": ("warning", {"clock_offset_seconds": -8.0}),
    "stale": ("warning", {"stale": True, "publisher_seen": False, "publisher_last_seen_timestamp_seconds": 800.0}),
    "starting": ("note", {"state": "starting", "latest_seen_version": None, "publisher_seen": False}),
    "not-heard": ("note", {"state": "waiting", "publisher_seen": False}),
    "update-failed": ("warning", {"last_update_failed": True}),
    "no-source": ("warning", {"reason": "no-source"}),
    "standby": ("note", {"reason": "standby"}),
    "superseded": ("warning", {"reason": "superseded"}),
    "not-publisher": ("warning", {"reason": "not_publisher"}),
    "stalled": ("warning", {"state": "stalled", "reason": "no-route"}),
    "behind": ("note", {"version_lag": 2, "latest_seen_version": 9}),
    "thin-upload": ("note", {"fetch_shortfall": "thin-upload"}),
    "no-readers": ("note", {"fetch_shortfall": "no-readers"}),
    "engine": ("warning", {"engine_ready": False}),
    "round-stuck": ("warning", {"round_stuck": True, "round_index": 4, "rounds_phase": "pending"}),
    "no-coordinator": ("warning", {"rounds_reason": "no-coordinator", "rounds_phase": "pending"}),
    "joining": ("note", {"rounds_phase": "joining", "rounds_reason": "no-state-anchor"}),
    "rounds-behind": ("note", {"rounds_behind": 3}),
    "no-consensus": ("note", {"mixing_phase": "training", "consensus": False}),
    "unlisted": ("note", {"mixing_phase": "waiting", "mixing_is_listed": False}),
}


def test_a_node_that_works_is_ready() -> None:
    (one,) = find_conditions(FINE)
    assert (one["code"], one["level"]) == ("ready", "ok")
    assert "0.7" in one["cause"]


@pytest.mark.parametrize("code", CASES)
def test_what_is_wrong_is_named_with_cause_and_next_step(code: str) -> None:
    level, fields = CASES[code]
    found = {one["code"]: one for one in find_conditions(FINE | fields)}
    assert found[code]["level"] == level
    for part in ("title", "cause", "next_step"):
        assert found[code][part].strip()
    assert found[code]["next_step"].endswith((".", ")"))
    if level in ("error", "warning"):
        assert "ready" not in found


@pytest.mark.parametrize("phase", ["rounds_phase", "mixing_phase"])
def test_who_trains_with_others_need_not_publish(phase: str) -> None:
    found = find_conditions(FINE | {"reason": "not_publisher", phase: "training"})
    assert "not-publisher" not in {one["code"] for one in found}


def test_the_worst_comes_first() -> None:
    found = find_conditions(FINE | {"fork": True, "peers": 0, "version_lag": 3, "reachability": {"reachable": False}})
    levels = [list(Level).index(Level(one["level"])) for one in found]
    assert levels == sorted(levels)
    assert found[0]["code"] == "fork"


def test_nobody_knows_anything_of_a_node_that_says_nothing() -> None:
    assert [one["code"] for one in find_conditions({})] == ["starting"]


def test_lag_is_no_news_where_the_fork_is() -> None:
    assert "behind" not in {one["code"] for one in find_conditions(FINE | {"fork": True, "version_lag": 1})}


def test_a_seed_that_nobody_can_dial_is_warned_of_a_young_node_without_peers_is_not() -> None:
    unreachable = FINE | {"role": "seed", "reachability": {"reachable": False, "advice": None}}
    assert find_conditions(unreachable)[0]["level"] == "warning"
    assert find_conditions(FINE | {"peers": 0, "uptime_seconds": 2.0})[0]["code"] == "ready"


def test_a_trainer_that_published_nothing_is_told_how() -> None:
    (one,) = find_conditions(FINE | {"role": "trainer", "state": "idle", "publisher_seen": False})
    assert "attach_publisher()" in one["next_step"]


def test_how_long_nobody_was_heard_is_said() -> None:
    found = find_conditions(FINE | CASES["stale"][1])
    assert "20 min" in found[0]["cause"]
