"""What a node's status tells of its link."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.errors import UnavailableError
from pulsenetd.planning.observed import read_observed_mbps

MIB = 1 << 20


def test_the_fastest_fetch_is_what_the_link_carries_at_least() -> None:
    versions = [
        {"version": 1, "encoded_size_bytes": 100 * MIB, "fetch_seconds": 40.0},
        {"version": 2, "encoded_size_bytes": 10 * MIB, "fetch_seconds": 1.0},
        {"version": 3, "encoded_size_bytes": 10 * MIB, "fetch_seconds": None},
    ]
    assert read_observed_mbps({"versions": versions}, "here") == pytest.approx(10 * MIB * 8e-6)


@pytest.mark.parametrize(
    "versions",
    [
        None,
        [],
        ["nonsense", {"version": 1}],
        [{"encoded_size_bytes": MIB - 1, "fetch_seconds": 1.0}],
        [{"encoded_size_bytes": MIB, "fetch_seconds": 0.0}],
    ],
)
def test_a_node_that_fetched_nothing_that_tells_is_named_with_the_way_out(versions: Any) -> None:
    with pytest.raises(UnavailableError, match=r"node in /a/node has fetched no version .* give --mbps"):
        read_observed_mbps({"versions": versions}, "/a/node")
