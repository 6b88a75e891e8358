"""Quantities are short."""

from __future__ import annotations

import urllib.error

import pytest

from pulsenetd.words import say_cause, say_count, say_moment, say_rate, say_seconds, say_size, say_version


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_500, "1.5 kB"),
        (38_100_000, "38.1 MB"),
        (99_960, "100 kB"),
        (412e6, "412 MB"),
        (999_700, "1.0 MB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_sizes_have_a_decimal_unit(size: float, text: str) -> None:
    assert say_size(size) == text


def test_a_rate_that_nobody_knows_is_empty() -> None:
    assert say_rate(None) == ""
    assert say_rate(11_300_000) == "11.3 MB/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (1_240, "20 min"),
        (3_700, "1 h 1 min"),
        (93_000, "1 d 1 h"),
    ],
)
def test_times_have_two_units_at_most(seconds: float, text: str) -> None:
    assert say_seconds(seconds) == text


def test_a_version_is_said_with_its_epoch_and_nothing_where_there_is_none() -> None:
    assert say_version({"applied_epoch": 2, "applied_version": 7}) == "2.7"
    assert say_version({"latest_seen_version": 7}, "latest_seen") == "0.7"
    assert say_version({"applied_version": None}) == ""


def test_one_thing_has_no_plural() -> None:
    assert [say_count(count, "peer") for count in (0, 1, 2)] == ["0 peers", "1 peer", "2 peers"]


@pytest.mark.parametrize(
    ("unix_ms", "text"),
    [
        (1_796_130_059_999, "2026-12-01 13:00 UTC"),
        (0, "1970-01-01 00:00 UTC"),
        (2**63 - 1, "9999-12-31 23:59 UTC"),
    ],
)
def test_moments_are_the_same_everywhere(unix_ms: int, text: str) -> None:
    assert say_moment(unix_ms) == text


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), "Connection refused"),
        (urllib.error.URLError("no host given"), "no host given"),
        (TimeoutError("timed out"), "timed out"),
        (ValueError("what answers is no node"), "what answers is no node"),
    ],
)
def test_a_cause_is_what_the_system_says_without_its_number(error: Exception, cause: str) -> None:
    assert say_cause(error) == cause
