"""What a node is fetching, how much of it is here, and when the rest will be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pulsenetd.words import ETA_SECONDS_MAX, say_version


def list_transfers(status: Mapping[str, Any], received_bytes_per_second: float | None) -> list[dict[str, Any]]:
    """Return every transfer that is not done.

    Args:
        status: Fields of ``/status``.
        received_bytes_per_second: All that arrives; ``None`` if nobody knows.

    Returns:
        For each ``kind`` (``version`` or ``round``), ``name``, ``wanted_bytes``, ``held_bytes``, ``eta_seconds``
        (``None`` while nothing arrives), ``source_count`` and ``reason``, a code why nothing moves.
    """
    candidates: tuple[dict[str, Any], ...] = (
        {
            "kind": "version",
            "name": f"version {say_version(status, 'latest_seen')}".rstrip(),
            "wanted_bytes": status.get("fetch_wanted_bytes") or 0,
            "held_bytes": status.get("fetch_held_bytes") or 0,
            "source_count": status.get("fetch_sources"),
            "reason": status.get("reason") or "",
        },
        {
            "kind": "round",
            "name": f"round {status.get('round_index')}",
            "wanted_bytes": status.get("rounds_wanted_size_bytes") or 0,
            "held_bytes": status.get("rounds_held_size_bytes") or 0,
            "source_count": None,
            "reason": status.get("rounds_reason") or "",
        },
    )
    found = [one for one in candidates if one["wanted_bytes"] > one["held_bytes"]]
    left = 0
    for one in found:
        # They share the line, so the second waits for the first.
        left += one["wanted_bytes"] - one["held_bytes"]
        rate = received_bytes_per_second or 0.0
        seconds = left / rate if rate > 0 else ETA_SECONDS_MAX
        one["eta_seconds"] = None if seconds >= ETA_SECONDS_MAX else seconds
    return found
