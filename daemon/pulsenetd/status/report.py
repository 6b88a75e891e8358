"""What a node says of itself: ``/status``, and the checks behind ``/livez`` and ``/readyz``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version as package_version
from typing import Any, Final

from pulsenetd.identity import to_libp2p_text
from pulsenetd.network.reachability import Reachability
from pulsenetd.network.stack import Network
from pulsenetd.readiness import check_readiness
from pulsenetd.roles import Parts
from pulsenetd.rollouts import Rollouts
from pulsenetd.status.conditions import find_conditions
from pulsenetd.status.observer import Observer
from pulsenetd.status.transfers import list_transfers

HEARTBEAT_MISSED_SECONDS: Final = 15.0
"""An event loop that did not turn for so long is stuck, and ``/livez`` says so."""

REPORTED_FIELDS: Final = ("applied_version", "latest_seen_version", "version_lag", "version_age_seconds", "revision")
"""Fields every status has, as ``None`` until a machine has reported."""


class NodeReport:
    """Gathers it from where it is known. All methods may be called from any thread."""

    def __init__(self, parts: Parts, network: Network, reachability: Reachability) -> None:
        self._parts = parts
        self._network = network
        self._reachability = reachability
        self.observer = Observer()
        self.addresses: tuple[str, ...] = ()
        """Where others are told to dial this node."""
        self.rollouts: Rollouts | None = None
        self.beaten_at = self._started_at = parts.monotonic()
        """When the event loop turned last."""

    def live_checks(self) -> Mapping[str, bool]:
        """Return every check of ``/livez`` by what it says."""
        return {"event loop turns": self._parts.monotonic() - self.beaten_at < HEARTBEAT_MISSED_SECONDS}

    def ready_checks(self) -> Mapping[str, bool]:
        """Return the same of ``/readyz``."""
        is_healthy = self._network.supervisor.is_healthy
        return {
            **self.live_checks(),
            **check_readiness(self._parts.config, self._parts.ledger, p2pd_answers=is_healthy),
        }

    def status(self) -> dict[str, Any]:
        """Return the node's state as plain values; docs/status-page.md names every field.

        Raises:
            StorageError: The disk does not say what is on it.
        """
        parts, settled, ledger = self._parts, self._parts.settled, self._parts.ledger
        usage = parts.store.usage()
        traffic, directory = self._network.transport.traffic, self._network.directory
        observed = self.observer.status()
        software = f"pulsenet {package_version('pulsenet')}"
        status: dict[str, Any] = {
            "run": settled.run_name,
            "run_id": settled.token.run_id.hex(),
            "peer_id": to_libp2p_text(settled.identity.peer_id),
            "pid": os.getpid(),
            "role": parts.config.role,
            "addresses": list(self.addresses),
            "reachability": self._reachability.status(),
            "clock_offset_seconds": directory.clock_offset.ahead_seconds,
            "p2pd_restarts": self._network.supervisor.restart_count,
            "p2pd_healthy": self._network.supervisor.is_healthy,
            "software": software,
            "now_ms": directory.now_ms(),
            "uptime_seconds": parts.monotonic() - self._started_at,
            "event_loop_turns": all(self.live_checks().values()),
            "store_bytes": usage.chunk_size_bytes,
            "store_damaged_chunks": usage.damaged_count,
            "disk_free_bytes": usage.free_size_bytes,
            "last_update_failed": ledger.last_update_failed,
            "bytes": {f"{direction}_{kind}": count for (direction, kind), count in list(traffic.bytes.items())},
            "blob_bytes": {f"{direction}_{kind}": size for (direction, kind), size in list(traffic.blob_bytes.items())},
            "rollouts": None if self.rollouts is None else self.rollouts.status(),
            "versions": [dict(facts) for facts in list(ledger.versions.values())],
            **dict.fromkeys(REPORTED_FIELDS),
            **dict(ledger.fields),
            "state": ledger.fields.get("phase", "starting"),
            "peers": ledger.fields.get("peers_connected", 0),
            **observed,
        }
        status["transfers"] = list_transfers(status, observed["received_bytes_per_second"])
        status["conditions"] = find_conditions(status)
        return status
