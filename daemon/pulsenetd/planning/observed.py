"""The speed of a node's link, from the status it gives of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pulsenet.errors import UnavailableError

FETCHED_BYTES_MIN: Final = 1 << 20
"""Less tells more of waiting than of the link."""

SECONDS_MIN: Final = 1e-3
"""Less cannot be told from what was fetched before the news of it came."""


def read_observed_mbps(status: Mapping[str, Any], node: str) -> float:
    """Return the fastest fetch among the versions the node remembers, in Mbit/s: the link carries at least that.

    Raises:
        UnavailableError: It fetched nothing that tells.
    """
    versions = status.get("versions")
    speeds = [
        size * 8e-6 / seconds
        for facts in (versions if isinstance(versions, list) else ())
        if isinstance(facts, dict)
        and isinstance(size := facts.get("encoded_size_bytes"), int)
        and isinstance(seconds := facts.get("fetch_seconds"), int | float)
        and size >= FETCHED_BYTES_MIN
        and seconds >= SECONDS_MIN
    ]
    if not speeds:
        raise UnavailableError(
            f"--measure: the node in {node} has fetched no version of a MiB or more, so it knows nothing of its link; "
            "give --mbps, or name the node of an inferencer with --data-dir"
        )
    return max(speeds)
