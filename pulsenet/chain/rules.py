"""What a single record must satisfy by itself, whoever signed it (SPEC section 4).

Rules that need other records (who may sign, what came before) are in ``chain/trust.py``.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from pulsenet import limits
from pulsenet.chain.records import (
    Aggregate,
    Catalogue,
    CatalogueEntry,
    Contribution,
    Descriptor,
    EpochRecord,
    Have,
    Head,
    Kind,
    Manifest,
    Probe,
    Receipt,
    RolloutBatch,
    Roster,
    Share,
    ShareKind,
    StateAnchor,
    Vote,
)
from pulsenet.chain.round_settings import RoundSettings
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Version
from pulsenet.wire.schema import INTEGER_MAX

Signable = (
    Descriptor
    | EpochRecord
    | Manifest
    | Catalogue
    | Head
    | Have
    | RolloutBatch
    | Vote
    | Contribution
    | Receipt
    | Aggregate
    | StateAnchor
    | Roster
    | Share
    | Probe
)
"""Every record a run signs."""

HEAD_VALIDITY_MS_MAX: Final = int(limits.HEAD_VALIDITY_SECONDS * 1000)
FP32_ONE_BITS: Final = 0x3F80_0000
FP32_INFINITY_BITS: Final = 0x7F80_0000

STATE_JOB: Final = 0
"""Job of a share that offers a state."""

SHARE_JOB_MAX: Final = 2

SHARE_ELEMENTS_MAX: Final = 2 * limits.CONTRIBUTION_ELEMENTS_MAX
"""Of pseudo-gradient and momentum together."""

RAW_SIZE_BYTES_MAX: Final = limits.CHUNK_LIST_ENTRIES_MAX * limits.CHUNK_SIZE_BYTES_MAX


def _check_rollouts(record: RolloutBatch) -> None:
    _require(record.version_first <= record.version_last, "rollouts: version_first above version_last")
    _require(1 <= record.sample_count <= limits.ROLLOUT_SAMPLES_MAX, f"rollouts: {record.sample_count} samples")
    _require(record.logprob_bits in (16, 32), f"rollouts: logprobs of {record.logprob_bits} bits")
    _require(len(set(record.part_names)) == len(record.part_names), "rollouts: a reward part is named twice")
    _require((record.trainer is None) == (not record.task_ids), "rollouts: tasks without their trainer, or no tasks")
    _require(len(set(record.task_ids)) == len(record.task_ids), "rollouts: a task is answered twice")


def compute_encoded_size_bytes_max(raw_size_bytes: int) -> int:
    """Return the most bytes a blob of a version of this dense size may have."""
    grown = -(-raw_size_bytes * 101 // 100)  # PATCH_OVERHEAD_RATIO_MAX in whole numbers, rounded up
    return grown + 64 * limits.TENSORS_MAX + 1024


def _require(condition: bool, detail: str) -> None:
    if not condition:
        raise RemoteProtocolError("schema", detail)


def _ascends(items: Sequence[Any]) -> bool:
    return all(first < second for first, second in itertools.pairwise(items))


def _check_descriptor(record: Descriptor) -> None:
    _require((record.revision == 0) == (record.previous is None), "descriptor: only the genesis has no previous")
    for role in ("owners", "authorities", "trainers", "inferencers"):
        _require(_ascends(getattr(record, role)), f"descriptor: {role} do not ascend, or one occurs twice")
    _require(1 <= record.owner_threshold <= len(record.owners), "descriptor: owner_threshold outside 1..owners")
    _require(record.owner_threshold <= limits.SIGNATURES_MAX, "descriptor: owner_threshold above SIGNATURES_MAX")
    _require(len(record.authorities) >= 1, "descriptor: no authority")
    base = (record.table_digest, record.base_root, record.base_blob_id)
    _require(all(base) or not any(base), "descriptor: table and base are given in part")
    _require(_ascends([name.encode() for name, _ in record.constants]), "descriptor: constants do not ascend")
    _require(record.anchor_interval >= 1, "descriptor: anchor_interval 0")
    _require(1 <= record.wire_version_min <= record.wire_version_max, "descriptor: wire versions out of order")
    RoundSettings.of(record)  # refuses constants that no round could go by


def _check_epoch(record: EpochRecord) -> None:
    _require(record.epoch >= 1, "epoch: epoch 0 has no record")
    _require(record.first_number >= 1, "epoch: numbers start at 1")
    _require((record.kept_version is None) == (record.kept_root is None), "epoch: kept version without its root")
    if record.kept_version is not None:
        _require(record.kept_version.epoch < record.epoch, "epoch: keeps a version of itself or later")
        _require(record.kept_version.number < record.first_number, "epoch: first_number not above what it keeps")


def _check_step(kind: Kind, base: Version | None, version: Version) -> None:
    """Check where one manifest leads from and to."""
    _require(version.number >= 1, f"{kind}: numbers start at 1")
    if base is None:
        _require(kind is Kind.ANCHOR, f"{kind} without a base version")
        return
    _require(kind is not Kind.ANCHOR, "anchor with a base version")
    if base.epoch == version.epoch:
        span = version.number - base.number
        _require(span == 1 if kind is Kind.PATCH else span >= 2, f"{kind} from {base} to {version}")
    else:
        _require(kind is Kind.PATCH, f"{kind} across epochs")
        _require(base.epoch < version.epoch and base.number < version.number, f"{kind} from {base} to {version}")


def _check_manifest(record: Manifest) -> None:
    _check_step(record.kind, record.base_version, record.version)
    _require((record.base_version is None) == (record.base_root is None), "manifest: base version without its root")
    _require(record.raw_size_bytes <= RAW_SIZE_BYTES_MAX, "manifest: raw_size_bytes above the limit")
    _require(record.element_count <= record.raw_size_bytes, "manifest: more elements than bytes")
    _require(record.changed_count <= record.element_count, "manifest: more changes than elements")
    if record.kind is Kind.ANCHOR:
        _require(record.changed_count == record.element_count, "manifest: an anchor changes every element")
    _require(
        record.encoded_size_bytes <= compute_encoded_size_bytes_max(record.raw_size_bytes),
        f"manifest: {record.encoded_size_bytes} bytes encode {record.raw_size_bytes}",
    )


def entry_key(entry: CatalogueEntry) -> tuple[Version, str, Version]:
    """Return the order of catalogue entries: by version, then kind, then base version (an anchor's first)."""
    return entry.version, entry.kind.value, entry.base_version or Version(0, 0)


def _check_catalogue(record: Catalogue) -> None:
    _require(_ascends([entry_key(entry) for entry in record.entries]), "catalogue: entries do not ascend")
    roots: dict[Version, bytes] = {}
    for entry in record.entries:
        _check_step(entry.kind, entry.base_version, entry.version)
        _require(entry.version.epoch <= record.epoch, f"catalogue: {entry.version} is of a later epoch")
        _require(roots.setdefault(entry.version, entry.root) == entry.root, f"catalogue: two roots for {entry.version}")


def _check_head(record: Head) -> None:
    _require(record.version.number >= 1, "head: numbers start at 1")
    _require((record.version.epoch == 0) == (record.epoch_digest is None), "head: epoch 0 alone has no epoch record")
    validity_ms = record.valid_until_ms - record.issued_at_ms
    _require(0 < validity_ms <= HEAD_VALIDITY_MS_MAX, f"head: valid for {validity_ms} ms")


def _check_have(record: Have) -> None:
    _require(record.version_first <= record.version_last, "have: version_first above version_last")
    _require(_ascends(record.anchors), "have: anchors do not ascend")


def _check_vote(record: Vote) -> None:
    _require(record.term >= 1, "vote: terms start at 1")
    _require(record.newest is None or 1 <= record.newest.term <= record.term, "vote: newest receipt of a later term")


def _check_contribution(record: Contribution) -> None:
    _require(record.entry_count <= record.element_count, "contribution: more entries than elements")
    _require(record.element_count <= limits.CONTRIBUTION_ELEMENTS_MAX, "contribution: element_count above the limit")
    _require(record.norm_bits < FP32_INFINITY_BITS, "contribution: the norm is not a finite number from 0 up")
    _require(
        record.encoded_size_bytes <= compute_encoded_size_bytes_max(4 * record.element_count),
        f"contribution: {record.encoded_size_bytes} bytes encode {record.element_count} elements",
    )


def _check_receipt(record: Receipt) -> None:
    _require(record.term >= 1, "receipt: terms start at 1")
    _require((record.round_index == 0) == (record.previous is None), "receipt: only round 0 has no previous")
    members = [member.peer_id for member in record.members]
    rejected = [rejection.peer_id for rejection in record.rejected]
    _require(_ascends(members), "receipt: members do not ascend, or one occurs twice")
    _require(_ascends(rejected), "receipt: rejected do not ascend, or one occurs twice")
    _require(not set(members) & set(rejected), "receipt: a key is counted and rejected")
    _require(bool(members or rejected), "receipt: nobody contributed")
    for member in record.members:
        _require(0 < member.scale_bits <= FP32_ONE_BITS, "receipt: a scale outside 0..1")


def _check_aggregate(record: Aggregate) -> None:
    _require(bool(record.slices), "aggregate: no slice")
    size_bytes_max = compute_encoded_size_bytes_max(4 * limits.CONTRIBUTION_ELEMENTS_MAX)
    for name in record.slices:
        _require(name.encoded_size_bytes <= size_bytes_max, "aggregate: a slice above the limit")


def _check_state_anchor(record: StateAnchor) -> None:
    _require((record.round_index == 0) == (record.outcome is None), "stateanchor: only the start has no outcome")
    _require(record.encoded_size_bytes <= RAW_SIZE_BYTES_MAX, "stateanchor: encoded_size_bytes above the limit")


def _check_roster(record: Roster) -> None:
    _require(record.term >= 1, "roster: terms start at 1")
    _require(1 <= record.round_count <= limits.ROSTER_ROUNDS_MAX, f"roster: valid for {record.round_count} rounds")
    _require(record.end_round <= INTEGER_MAX, "roster: rounds beyond every number")
    _require(bool(record.members) and _ascends(record.members), "roster: nobody, not ascending, or somebody twice")
    _require(_ascends(record.subset), "roster: the subset does not ascend, or names a tensor twice")
    _require(not record.subset or record.subset[-1] < limits.TENSORS_MAX, "roster: a tensor no table has")
    is_measured = record.probe_round is not None
    _require(is_measured == (record.distance_bits is not None), "roster: a probe without its distance")
    _require((record.distance_bits or 0) <= FP32_ONE_BITS, "roster: a distance outside 0..1")


def _check_probe(record: Probe) -> None:
    _require(bool(record.answer), "probe: no answer")
    _require(len(record.scores) % 4 == 0, "probe: scores that are no FP32 values")
    for (bits,) in struct.iter_unpack("<I", record.scores):
        _require(bits < FP32_INFINITY_BITS, "probe: a score is not a finite number from 0 up")


def _check_share(record: Share) -> None:
    _require(record.job <= SHARE_JOB_MAX, f"share: job {record.job}")
    _require(record.slice_index < record.slice_count, f"share: slice {record.slice_index} of {record.slice_count}")
    _require(record.slice_count <= limits.ROSTER_MEMBERS_MAX, "share: more slices than members")
    _require((record.kind is ShareKind.MEAN) == bool(record.contributors), "share: only means have contributors")
    is_single = record.slice_count == 1
    is_of_pairs = record.kind in (ShareKind.HINT, ShareKind.TAKEN)
    _require(is_single or not is_of_pairs, "share: only pairs hint and take")
    is_state = record.job == STATE_JOB
    _require(not is_state or (record.kind is ShareKind.PART and is_single), "share: a state is one part")
    _require(record.element_count <= SHARE_ELEMENTS_MAX, "share: element_count above the limit")
    _require(record.norm_bits < FP32_INFINITY_BITS, "share: the norm is not a finite number from 0 up")
    _require(
        record.encoded_size_bytes <= compute_encoded_size_bytes_max(4 * record.element_count),
        f"share: {record.encoded_size_bytes} bytes encode {record.element_count} elements",
    )


_CHECKS: Final[dict[type[Any], Callable[[Any], None]]] = {
    Descriptor: _check_descriptor,
    EpochRecord: _check_epoch,
    Manifest: _check_manifest,
    Catalogue: _check_catalogue,
    Head: _check_head,
    Have: _check_have,
    RolloutBatch: _check_rollouts,
    Vote: _check_vote,
    Contribution: _check_contribution,
    Receipt: _check_receipt,
    Aggregate: _check_aggregate,
    StateAnchor: _check_state_anchor,
    Roster: _check_roster,
    Share: _check_share,
    Probe: _check_probe,
}


def check_record(record: Signable) -> None:
    """Check the rules of the record's type.

    Raises:
        RemoteProtocolError: ``schema``, with the rule that does not hold.
    """
    _CHECKS[type(record)](record)
