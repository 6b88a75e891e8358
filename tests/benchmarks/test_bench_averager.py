"""The parts of ``bench_averager.py`` that need no network: what is said of a round, and the table."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from averaging_peer import digest, make_vector
from bench_averager import UNENDED, format_table, make_row


def end(digests: list[str], outcome: str = "mixed", counted: int = 3, **shares: float) -> dict[str, object]:
    return {"digests": digests, "outcome": outcome, "counted": counted, **shares}


def test_a_row_counts_the_different_bits_that_peers_hold_by_tensor() -> None:
    ends = [end(["a", "b"]), end(["a", "c"], "lost", 1)]
    row = make_row("pulsenet", 3, is_killed=True, seconds=4.0, received=[2_000_000, 4_000_000], ends=ends)
    assert row.distinct == (1, 2)
    assert row.outcomes == ("lost", "mixed")
    assert row.counted == (1, 3)
    assert row.received_mb == 3.0
    assert row.mean_share is None


def test_peers_that_never_ended_are_said_to_hang() -> None:
    row = make_row("hivemind", 3, is_killed=True, seconds=240.0, received=[1, 1], ends=[])
    assert row.outcomes == (UNENDED,)
    assert row.distinct == ()
    assert row.mean_share is None


def test_the_table_says_how_many_tensors_are_equal_and_how_much_is_the_mean() -> None:
    ends = [end(["a"], mean_share=0.5, own_share=0.25), end(["b"], mean_share=1.0, own_share=0.0)]
    row = make_row("hivemind", 2, is_killed=False, seconds=4.04, received=[1, 1], ends=ends)
    assert format_table([row]).splitlines()[-1] == (
        "| hivemind | 2 | no | 4.0 | 0.0 | 0 of 1 | mixed | 3, 3 | 75%, untouched 12% |"
    )


def test_both_systems_average_one_vector_that_differs_by_peer() -> None:
    first, again, other = make_vector(64, 0), make_vector(64, 0), make_vector(64, 1)
    assert [digest(tensor) for tensor in first] == [digest(tensor) for tensor in again]
    assert all(digest(a) != digest(b) for a, b in zip(first, other, strict=True))
