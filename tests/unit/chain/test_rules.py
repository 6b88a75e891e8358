"""What a single record must satisfy by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.records import Have, Kind, RolloutBatch
from pulsenet.chain.rules import RAW_SIZE_BYTES_MAX, check_record, compute_encoded_size_bytes_max, entry_key
from pulsenet.chain.trust import entry_of
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import PeerId, Version, compute_digest

DIGEST = compute_digest(b"x")
TWICE = (b"a" * 32, b"a" * 32)


def refuse(record: Any) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        check_record(record)
    assert caught.value.code == "schema"


@pytest.mark.parametrize(
    "changes",
    [
        {"previous": DIGEST},
        {"revision": 1},
        {"owners": TWICE},
        {"authorities": TWICE},
        {"trainers": (b"b" * 32, b"a" * 32)},
        {"inferencers": TWICE},
        {"owner_threshold": 0},
        {"owner_threshold": 2},
        {"owners": tuple(bytes([number]) * 32 for number in range(65)), "owner_threshold": 65},
        {"authorities": ()},
        {"table_digest": DIGEST},
        {"constants": (("mu", 1), ("lr", 2))},
        {"constants": (("mu", 1), ("mu", 1))},
        {"constants": (("contributions_min", 0),)},
        {"constants": (("clip_norm_ratio", 0x7FC0_0000),)},
        {"anchor_interval": 0},
        {"wire_version_min": 0},
        {"wire_version_min": 2},
    ],
)
def test_a_descriptor_that_contradicts_itself_is_refused(run: Any, changes: dict[str, Any]) -> None:
    check_record(run.descriptor)
    refuse(replace(run.descriptor, **changes))


def test_a_descriptor_names_table_and_base_whole(run: Any) -> None:
    whole = replace(run.descriptor, table_digest=DIGEST, base_root=DIGEST, base_blob_id=DIGEST)
    check_record(replace(whole, constants=(("lr", 2), ("mu", 1))))


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 0},
        {"first_number": 0, "kept_version": None, "kept_root": None},
        {"kept_root": None},
        {"kept_version": None},
        {"kept_version": Version(1, 3)},
        {"kept_version": Version(0, 9)},
    ],
)
def test_an_epoch_record_that_contradicts_itself_is_refused(run: Any, changes: dict[str, Any]) -> None:
    check_record(run.epoch(1, 9))
    check_record(run.epoch(1, 9, kept_version=None, kept_root=None))
    refuse(replace(run.epoch(1, 9), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": Version(0, 0)},
        {"kind": Kind.ANCHOR},
        {"kind": Kind.SKIP},
        {"base_version": None, "base_root": None},
        {"base_root": None},
        {"base_version": Version(0, 3)},
        {"base_version": Version(0, 5)},
        {"base_version": Version(0, 6)},
        {"base_version": Version(1, 4)},
        {"version": Version(1, 4)},
        {"version": Version(1, 5), "kind": Kind.SKIP},
        {"raw_size_bytes": RAW_SIZE_BYTES_MAX + 1},
        {"element_count": 2001},
        {"changed_count": 1001},
        {"encoded_size_bytes": compute_encoded_size_bytes_max(2000) + 1},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(run: Any, changes: dict[str, Any]) -> None:
    check_record(run.manifest(5))
    refuse(replace(run.manifest(5), **changes))


def test_anchors_patches_across_epochs_and_skips_have_their_own_shape(run: Any) -> None:
    check_record(run.manifest(9, epoch=2, base_version=Version(0, 4)))
    check_record(run.manifest(9, kind=Kind.SKIP, base_version=Version(0, 1)))
    check_record(run.manifest(5, changed_count=0))
    check_record(run.manifest(1))
    refuse(run.manifest(1, changed_count=999))
    refuse(run.manifest(1, base_version=Version(0, 0), base_root=DIGEST))


def test_a_blob_may_exceed_dense_only_by_the_stated_overhead() -> None:
    assert compute_encoded_size_bytes_max(0) == 64 * 65_536 + 1024
    assert compute_encoded_size_bytes_max(1000) - compute_encoded_size_bytes_max(0) == 1010
    assert compute_encoded_size_bytes_max(1) - compute_encoded_size_bytes_max(0) == 2


def test_catalogue_entries_ascend_and_agree(run: Any) -> None:
    patch, anchor = run.manifest(9), run.manifest(9, is_anchor=True)
    near = run.manifest(9, kind=Kind.SKIP, base_version=Version(0, 1))
    far = run.manifest(9, kind=Kind.SKIP, base_version=Version(0, 2))
    catalogue = run.catalogue(patch, anchor, near, far)
    check_record(catalogue)
    assert [entry.kind for entry in catalogue.entries] == [Kind.ANCHOR, Kind.PATCH, Kind.SKIP, Kind.SKIP]
    refuse(replace(catalogue, entries=catalogue.entries[::-1]))
    refuse(replace(catalogue, entries=(catalogue.entries[0],) * 2))
    refuse(run.catalogue(patch, replace(anchor, root=DIGEST)))
    refuse(run.catalogue(run.manifest(9, epoch=1, is_anchor=True)))
    entry = entry_of(patch, DIGEST)
    refuse(replace(catalogue, entries=(replace(entry, kind=Kind.SKIP),)))
    assert entry_key(entry) == (Version(0, 9), "patch", Version(0, 8))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": Version(0, 0)},
        {"epoch_digest": DIGEST},
        {"version": Version(1, 5)},
        {"valid_until_ms": 1_800_000_000_000},
        {"valid_until_ms": 1_800_000_300_001},
        {"valid_until_ms": 5},
    ],
)
def test_a_head_that_contradicts_itself_is_refused(run: Any, changes: dict[str, Any]) -> None:
    check_record(run.head(5))
    refuse(replace(run.head(5), **changes))


def test_haves_and_rollouts_name_ranges_in_order(run: Any) -> None:
    have = Have(run.run_id, "seed", 0, 1, 3, (1, 3), (), 0)
    check_record(have)
    refuse(replace(have, version_first=4))
    refuse(replace(have, anchors=(3, 1)))
    batch = RolloutBatch(run.run_id, 1, Version(0, 1), Version(0, 2), 1, ("right",), 16, None, (), b"", "{}")
    check_record(batch)
    refuse(replace(batch, version_first=Version(0, 3)))


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_count": 0},
        {"sample_count": 4_097},
        {"logprob_bits": 8},
        {"part_names": ("right", "right")},
        {"task_ids": (bytes(16),)},
        {"trainer": PeerId(bytes(32))},
        {"trainer": PeerId(bytes(32)), "task_ids": (bytes(16),) * 2},
    ],
)
def test_rollouts_that_no_arrays_could_fit_are_refused(run: Any, changes: dict[str, Any]) -> None:
    refuse(
        replace(RolloutBatch(run.run_id, 1, Version(0, 1), Version(0, 2), 1, (), 16, None, (), b"", "{}"), **changes)
    )


def test_every_bound_may_be_met(run: Any) -> None:
    whole = {"base_version": None, "base_root": None}
    keys = tuple(bytes([number]) * 32 for number in range(64))
    batch = RolloutBatch(run.run_id, 1, Version(0, 1), Version(0, 1), 4_096, (), 32, None, (), b"", "{}")
    for record in (
        replace(run.descriptor, owners=keys, owner_threshold=64),
        replace(run.descriptor, anchor_interval=1),
        replace(run.descriptor, authorities=keys[:1]),
        run.epoch(1, 1, kept_version=None, kept_root=None),
        run.manifest(5, raw_size_bytes=RAW_SIZE_BYTES_MAX),
        run.manifest(5, raw_size_bytes=1000),
        run.manifest(5, encoded_size_bytes=compute_encoded_size_bytes_max(2000)),
        run.manifest(5, kind=Kind.SKIP, base_version=Version(0, 3)),
        run.manifest(5, kind=Kind.ANCHOR, changed_count=1000, **whole),
        run.head(1),
        run.head(5, valid_until_ms=1_800_000_000_001),
        Have(run.run_id, "seed", 0, 3, 3, (), (), 0),
        batch,
    ):
        check_record(record)


def test_an_epoch_0_that_keeps_nothing_is_none_either(run: Any) -> None:
    refuse(run.epoch(0, 9, kept_version=None, kept_root=None))


def test_no_anchor_is_of_number_0(run: Any) -> None:
    check_record(run.manifest(1, is_anchor=True))
    refuse(run.manifest(0, is_anchor=True))


def test_an_anchor_leads_from_nowhere(run: Any) -> None:
    refuse(run.manifest(5, kind=Kind.ANCHOR, base_version=Version(0, 1), changed_count=1000))


def test_a_catalogue_lists_one_anchor_of_a_version(run: Any) -> None:
    catalogue = run.catalogue(run.manifest(9, is_anchor=True))
    other = replace(catalogue.entries[0], manifest_digest=DIGEST)
    refuse(replace(catalogue, entries=(*catalogue.entries, other)))
