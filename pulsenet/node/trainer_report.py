"""What a publisher tells its operator, in the words a follower uses too."""

from __future__ import annotations

from pulsenet.chain.records import Head, Manifest
from pulsenet.node.effects import Report
from pulsenet.node.published import PublishedState
from pulsenet.node.report import describe_versions
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
    fields = [
        *describe_versions(
            role="trainer",
            phase=str(phase),
            reason=reason,
            applied=None if state is None else state.version,
            newest=newest,
            is_seen=is_seen,
            is_forked=is_forked,
        )
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
