"""What is fetched, and when it will be here."""

from __future__ import annotations

from pulsenetd.status.transfers import ETA_SECONDS_MAX, list_transfers

VERSION = {
    "latest_seen_epoch": 2,
    "latest_seen_version": 7,
    "fetch_wanted_bytes": 1_000,
    "fetch_held_bytes": 400,
    "fetch_sources": 3,
    "reason": "",
}
ROUND = {"round_index": 5, "rounds_wanted_size_bytes": 900, "rounds_held_size_bytes": 500, "rounds_reason": "no-source"}


def test_nothing_is_fetched_where_all_is_held() -> None:
    assert list_transfers({}, 5.0) == []
    assert list_transfers(VERSION | {"fetch_held_bytes": 1_000}, 5.0) == []


def test_the_rest_takes_as_long_as_the_rate_says() -> None:
    (one,) = list_transfers(VERSION, 100.0)
    assert one == {
        "kind": "version",
        "name": "version 2.7",
        "wanted_bytes": 1_000,
        "held_bytes": 400,
        "source_count": 3,
        "reason": "",
        "eta_seconds": 6.0,
    }


def test_two_transfers_share_the_line() -> None:
    first, second = list_transfers(VERSION | ROUND, 100.0)
    assert (first["eta_seconds"], second["eta_seconds"]) == (6.0, 10.0)
    assert (second["kind"], second["name"], second["reason"]) == ("round", "round 5", "no-source")


def test_what_stands_still_has_no_end() -> None:
    for rate in (None, 0.0, 600 / ETA_SECONDS_MAX):
        assert list_transfers(VERSION, rate)[0]["eta_seconds"] is None
