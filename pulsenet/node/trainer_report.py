"""What a publisher tells its operator, in the words a follower uses too."""

from __future__ import annotations

from pulsenet.chain.records import Head, Manifest
from pulsenet.node.effects import Report
from pulsenet.node.published import PublishedState
from pulsenet.node.trainer_phase import Phase


def make_report(
    *,
    phase: Phase,
    reason: str,
    state: PublishedState | None,
    newest: Head | None,
    patch: Manifest | None,
    is_seen: bool,
    is_forked: bool,
) -> Report:
    """Return the report of a publisher.

    Args:
        reason: Why nothing is published at present, or the empty string.
        newest: The newest head of the run, its own included.
        patch: The patch or first anchor committed last by this process.
        is_seen: Whether a head in force is valid now.
    """
    applied = None if state is None else state.version
    seen = None if newest is None else newest.version
    lag = None if applied is None or seen is None else max(seen.number - applied.number, 0)
    if not is_seen and lag == 0:
        # Nothing in force says what the newest version is, so nobody knows (CASES A-OBS-2).
        lag = None
    fields: list[tuple[str, str | int | float | bool | None]] = [
        ("role", "trainer"),
        ("phase", str(phase)),
        ("reason", reason),
        ("applied_version", None if applied is None else applied.number),
        ("applied_epoch", None if applied is None else applied.epoch),
        ("latest_seen_version", None if seen is None else seen.number),
        ("latest_seen_epoch", None if seen is None else seen.epoch),
        ("version_lag", lag),
        ("publisher_seen", is_seen),
        ("publisher_last_seen_timestamp_seconds", 0.0 if newest is None else newest.issued_at_ms / 1000),
        ("stale", newest is not None and not is_seen),
        ("fork", is_forked),
    ]
    if state is not None:
        fields += [("root", state.root.hex()), ("trainer_step", state.trainer_step)]
    if patch is not None:
        fields += [
            ("patch_kind", str(patch.kind)),
            ("patch_size_bytes", patch.encoded_size_bytes),
            ("raw_size_bytes", patch.raw_size_bytes),
            ("patch_density_ratio", patch.changed_count / max(patch.element_count, 1)),
            ("patch_compression_ratio", patch.raw_size_bytes / max(patch.encoded_size_bytes, 1)),
        ]
    return Report(tuple(fields))
