"""What a node tells its operator: versions, lag, age and progress, never better than it knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pulsenet.chain.records import Head
from pulsenet.chain.trust import Trust
from pulsenet.ids import Version
from pulsenet.node.effects import Effect, Report
from pulsenet.node.fetch import FetchProgress

REPORT_SECONDS = 1.0
"""Progress and ages are told at most this often; a change of version or phase at once."""

CONFIRMATIONS_MAX = 128
"""Versions whose last confirmation as newest is remembered."""

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the machine is."""

    phase: str
    reason: str
    applied: Version | None
    """An inferencer: what the engine confirmed. A seed: the newest version stored whole."""
    mirror: Version | None
    head: Head | None
    """The newest head ever accepted."""
    is_in_force: bool
    """Whether it still counts: not where its signer was revoked since, or an epoch was opened."""
    is_forked: bool

    @classmethod
    def under(
        cls, trust: Trust, *, phase: str, reason: str, applied: Version | None, mirror: Version | None
    ) -> Standing:
        """Return where the machine is, given what it believes of the run."""
        return cls(phase, reason, applied, mirror, trust.head, trust.head_in_force is not None, trust.fork is not None)


class Reporter:
    """Makes ``Report`` effects. Pure."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._told: tuple[object, ...] | None = None
        self._told_at = 0.0
        self._confirmed_ms: dict[Version, int] = {}

    def report(
        self, standing: Standing, progress: Callable[[], FetchProgress], now: float, now_ms: int
    ) -> list[Effect]:
        """Return a report if something changed or the last one is old."""
        head = standing.head
        if head is not None:
            self._confirmed_ms[head.version] = head.issued_at_ms
            for version in sorted(self._confirmed_ms)[:-CONFIRMATIONS_MAX]:
                del self._confirmed_ms[version]
        is_seen = head is not None and standing.is_in_force and now_ms < head.valid_until_ms
        key = (replace(standing, head=None), is_seen, None if head is None else head.version)
        if key == self._told and now < self._told_at + REPORT_SECONDS:
            return []
        self._told = key
        self._told_at = now
        return [Report(self._fields(standing, progress(), is_seen, now_ms))]

    def next_wake(self, now: float) -> float | None:
        """Return when the next report is due."""
        return max(self._told_at + REPORT_SECONDS, now + 0.001) if self._told is not None else None

    def _fields(
        self, standing: Standing, progress: FetchProgress, is_seen: bool, now_ms: int
    ) -> tuple[tuple[str, Value], ...]:
        confirmed_ms = None if standing.applied is None else self._confirmed_ms.get(standing.applied)
        return (
            *describe_versions(
                role=self._role,
                phase=standing.phase,
                reason=standing.reason or progress.reason,
                applied=standing.applied,
                newest=standing.head,
                is_seen=is_seen,
                is_forked=standing.is_forked,
            ),
            ("mirror_version", None if standing.mirror is None else standing.mirror.number),
            ("version_age_seconds", None if confirmed_ms is None else max(now_ms - confirmed_ms, 0) / 1000),
            ("fetch_wanted_bytes", progress.wanted_size_bytes),
            ("fetch_held_bytes", progress.held_size_bytes),
            ("fetch_requests", progress.requests_in_flight),
            ("fetch_sources", progress.source_count),
            ("fetch_publisher_bytes", progress.publisher_size_bytes),
            ("fetch_reader_bytes", progress.reader_size_bytes),
            ("fetch_shortfall", progress.shortfall),
        )


def describe_versions(
    *,
    role: str,
    phase: str,
    reason: str,
    applied: Version | None,
    newest: Head | None,
    is_seen: bool,
    is_forked: bool,
) -> tuple[tuple[str, Value], ...]:
    """Return the fields that publishers and followers report alike.

    Args:
        role: The node's.
        phase: What its machine is doing.
        reason: Why it does nothing else, or the empty string.
        applied: The version it holds.
        newest: The newest head of the run.
        is_seen: Whether that is in force and valid now.
        is_forked: Whether the epoch is forked.
    """
    lag = None if newest is None or applied is None else max(newest.version.number - applied.number, 0)
    if not is_seen and lag == 0:
        # Nobody was heard, so nobody knows: a lag of 0 would be a claim (A-OBS-2).
        lag = None
    return (
        ("role", role),
        ("phase", phase),
        ("reason", reason),
        ("applied_version", None if applied is None else applied.number),
        ("applied_epoch", None if applied is None else applied.epoch),
        ("latest_seen_version", None if newest is None else newest.version.number),
        ("latest_seen_epoch", None if newest is None else newest.version.epoch),
        ("version_lag", lag),
        ("publisher_seen", is_seen),
        ("publisher_last_seen_timestamp_seconds", 0.0 if newest is None else newest.issued_at_ms / 1000),
        ("stale", newest is not None and not is_seen),
        ("fork", is_forked),
    )
