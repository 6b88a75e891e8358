"""Effects that account: counters, gauges, the status object and the operator's log."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pulsenet.chain.records import Kind, Manifest
from pulsenet.node.effects import Count, Effect, Log, Report
from pulsenetd.driver import Handler, Post
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics

_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_GAUGES: Final = {
    "applied_version": -1.0,
    "mirror_version": -1.0,
    "latest_seen_version": -1.0,
    "version_lag": math.nan,
    "version_age_seconds": math.nan,
    "publisher_last_seen_timestamp_seconds": 0.0,
    "publisher_seen": 0.0,
    "stale": 0.0,
    "fork": 0.0,
    "round_index": -1.0,
    "round_contributors": 0.0,
    "rounds_behind": 0.0,
    "round_stuck": 0.0,
    "residual_norm": math.nan,
    "disagreement": math.nan,
    "disagreement_l2_start": math.nan,
    "disagreement_l2_end": math.nan,
    "disagreement_l2_bound": math.nan,
    "mixing_subset_ratio": math.nan,
    "consensus": math.nan,
    "utilization_ratio": math.nan,
    "utilization_predicted_ratio": math.nan,
}
"""Gauges of reported fields of the same name, and what they are while the field is unknown."""

VERSIONS_REMEMBERED: Final = 128
"""Versions whose facts and times are kept for status."""

REPEAT_SECONDS: Final = 600.0
"""A warning that comes back in the same words is not said again for so long, only counted: a full disk refuses every
few seconds."""

WARNINGS_REMEMBERED: Final = 64

PEER_KINDS: Final = ("connected", "neighbour", "outbound", "known")


@dataclass(slots=True)
class _Said:
    """When a warning was said last, and how often it came back since."""

    at: float
    repeat_count: int = 0


class Ledger:
    """Keeps what the machines reported, and mirrors it into the metrics."""

    def __init__(self, metrics: Metrics, monotonic: Callable[[], float]) -> None:
        self._metrics = metrics
        self.fields: dict[str, Any] = {}
        """The newest value of every reported field."""
        self.versions: OrderedDict[int, dict[str, Any]] = OrderedDict()
        """What is known of the last versions made or applied here, by number."""
        self.last_update_failed = False
        """Whether the last hop or hand-over failed; a node is not ready then."""
        self._monotonic = monotonic
        self._seen_at: OrderedDict[int, float] = OrderedDict()
        self._said: OrderedDict[str, _Said] = OrderedDict()
        for gauge, unknown in _GAUGES.items():
            metrics.set(gauge, unknown)

    def table(self) -> dict[type[Effect], Handler]:
        """Return the handlers by effect."""
        return {Count: self._count, Report: self._report, Log: self._log}

    def note(self, **fields: Any) -> None:
        """Take fields the shell itself knows."""
        self.fields.update(fields)
        self._show()

    def note_version(self, number: int, **facts: Any) -> None:
        """Remember facts about one version, for the status object."""
        self.versions.setdefault(number, {"version": number}).update(facts)
        while len(self.versions) > VERSIONS_REMEMBERED:
            self.versions.popitem(last=False)

    def note_manifest(self, manifest: Manifest, **seconds: float | None) -> None:
        """Remember what a version consists of that was made or applied here, and how long that took."""
        if manifest.kind is not Kind.ANCHOR:
            self._metrics.set("patch_density_ratio", manifest.changed_count / max(manifest.element_count, 1))
            self._metrics.set("patch_compression_ratio", manifest.raw_size_bytes / max(manifest.encoded_size_bytes, 1))
        self.note_version(
            manifest.version.number,
            kind=str(manifest.kind),
            root=manifest.root.hex(),
            raw_size_bytes=manifest.raw_size_bytes,
            encoded_size_bytes=manifest.encoded_size_bytes,
            changed_count=manifest.changed_count,
            element_count=manifest.element_count,
            **seconds,
        )

    def note_engine(self, number: int) -> None:
        """Remember how long after its news the engine served a version."""
        self.fields["engine_version"] = number
        seconds = self.seconds_since_seen(number, self._monotonic())
        if seconds is not None:
            self.note_version(number, engine_seconds=seconds)

    def seconds_since_seen(self, number: int, now: float) -> float | None:
        """Return the seconds since the news of a version came, if it is remembered."""
        seen_at = self._seen_at.get(number)
        return None if seen_at is None else now - seen_at

    def describe(self) -> str:
        """Return in a few words where the node is, for whoever supervises it."""
        fields = self.fields
        number, lag = fields.get("applied_version"), fields.get("version_lag")
        version = "no version" if number is None else f"version {number}"
        behind = "" if lag is None else f", {lag} behind"
        return f"{fields.get('phase', 'starting')}: {version}{behind}, {fields.get('peers_connected', 0)} peers"

    async def _count(self, effect: Count, post: Post) -> None:
        self._metrics.count(effect.name, effect.label, effect.value)

    async def _report(self, effect: Report, post: Post) -> None:
        self.fields.update(effect.fields)
        newest = self.fields.get("latest_seen_version")
        if isinstance(newest, int) and newest not in self._seen_at:
            self._seen_at[newest] = self._monotonic()
            while len(self._seen_at) > VERSIONS_REMEMBERED:
                self._seen_at.popitem(last=False)
        self._show()

    async def _log(self, effect: Log, post: Post) -> None:
        level, more = _LEVELS[effect.level], ""
        if level >= logging.WARNING:
            now, said = self._monotonic(), self._said.get(effect.text)
            if said is not None and now < said.at + REPEAT_SECONDS:
                said.repeat_count += 1
                return
            if said is not None and said.repeat_count:
                more = f" (and {said.repeat_count} times since this was said last)"
            self._said[effect.text] = _Said(now)
            self._said.move_to_end(effect.text)
            while len(self._said) > WARNINGS_REMEMBERED:
                self._said.popitem(last=False)
        logger.log(level, "%s%s", effect.text, more)

    def _show(self) -> None:
        for gauge, unknown in _GAUGES.items():
            value = self.fields.get(gauge)
            self._metrics.set(gauge, unknown if value is None else float(value))
        for kind in PEER_KINDS:
            count = self.fields.get(f"peers_{kind}")
            if count is not None:
                self._metrics.peers.labels(kind).set(count)
