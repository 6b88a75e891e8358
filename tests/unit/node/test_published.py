"""The committed state: what it keeps, what it lets go, and that it survives the disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.chain.records import Kind, Manifest
from pulsenet.chain.rules import check_record
from pulsenet.chain.signing import encode_signed, record_digest
from pulsenet.chain.trust import entry_of
from pulsenet.errors import StorageError
from pulsenet.ids import RunId, Version, compute_digest
from pulsenet.node.effects import EncodeSkip
from pulsenet.node.published import (
    CATALOGUES_KEPT,
    PublishedState,
    Retained,
    add_extra,
    advance,
    find_extras_due,
    find_released,
    make_catalogue,
    summarise,
    with_catalogue,
)

RUN_ID = RunId(b"r" * 32)


def digest(text: str) -> Any:
    return compute_digest(text.encode())


def manifest_of(state: PublishedState | None, version: Version, *, blob: str | None = None) -> Manifest:
    """A patch on the state, or an anchor where there is none."""
    kind = Kind.ANCHOR
    if state is not None:
        kind = Kind.PATCH if version.number == state.version.number + 1 else Kind.SKIP
    return Manifest(
        run_id=RUN_ID,
        revision=0,
        term=4,
        kind=kind,
        base_version=None if state is None else state.version,
        version=version,
        base_root=None if state is None else state.root,
        root=digest(f"root {version}"),
        table_digest=digest("table"),
        blob_id=digest(blob or f"blob {version}"),
        raw_size_bytes=2_000,
        encoded_size_bytes=30,
        changed_count=1_000 if state is None else 9,
        element_count=1_000,
        codec_id=2,
        trainer_step=version.number,
        previous=None if state is None else state.previous,
    )


def publish(state: PublishedState | None, count: int, *, epoch: int = 0) -> PublishedState:
    """The state after ``count`` more versions, without extras."""
    for _ in range(count):
        number = 1 if state is None else state.version.number + 1
        manifest = manifest_of(state, Version(epoch, number))
        state = advance(state, manifest, digest(f"manifest {manifest.version}"), None)
        state = with_catalogue(state, digest(f"catalogue {manifest.version}"))
    assert state is not None
    return state


def with_anchor(state: PublishedState) -> PublishedState:
    manifest = extra_of(state, base_version=None)
    return add_extra(state, manifest, digest(f"anchor manifest {state.version}"))


def extra_of(state: PublishedState, base_version: Version | None) -> Manifest:
    """A second way to the version of the state: a skip, or an anchor without a base."""
    changes: dict[str, Any] = {"base_version": base_version, "blob_id": digest(f"extra {base_version} {state.version}")}
    if base_version is not None:
        changes |= {"kind": Kind.SKIP, "base_root": state.root_of(base_version), "changed_count": 20}
    return replace(manifest_of(None, state.version), previous=state.previous, **changes)


def test_the_next_manifest_is_to_name_the_one_published_last() -> None:
    state = with_anchor(publish(None, 2))
    assert state.previous == digest("anchor manifest 0.2")
    assert state.manifest_digest == digest("manifest 0.2")


def test_the_state_survives_the_disk() -> None:
    state = with_anchor(publish(None, 12))
    assert PublishedState.restore(state.encode()) == state


def test_a_damaged_state_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="saved state of the publisher"):
        PublishedState.restore(publish(None, 1).encode()[:-1])


def test_two_anchors_and_everything_since_the_older_are_kept() -> None:
    state = with_anchor(publish(publish(None, 1), 9))
    assert state.anchor_numbers == (1, 10)
    assert state.patch_range == (1, 10)
    state = with_anchor(publish(state, 10))
    assert state.anchor_numbers == (10, 20)
    assert state.patch_range == (10, 20)
    assert state.newest_anchor == Version(0, 20)
    kinds = [item.entry.kind for item in state.retained if item.entry.version == Version(0, 10)]
    assert kinds == [Kind.ANCHOR]


def test_what_is_dropped_is_released_and_nothing_that_is_kept() -> None:
    before = publish(with_anchor(publish(None, 10)), 10)
    after = with_catalogue(with_anchor(before), digest("catalogue again"))
    blob_ids, records = find_released(before, after)
    assert set(blob_ids) == {digest(f"blob 0.{number}") for number in range(1, 11)}
    manifests = {digest(f"manifest 0.{number}") for number in range(1, 11)}
    assert set(records) == manifests | {digest("catalogue 0.17")}
    assert not set(blob_ids) & after.blob_ids
    assert not set(records) & after.record_digests


def test_a_blob_that_another_version_shares_stays() -> None:
    state = publish(None, 1)
    for number in range(2, 13):
        manifest = manifest_of(state, Version(0, number), blob="the empty patch")
        state = with_catalogue(advance(state, manifest, digest(f"m{number}"), None), digest(f"c{number}"))
        if number in (6, 12):
            before, state = state, with_anchor(state)
    blob_ids, _ = find_released(before, state)
    assert digest("blob 0.1") in blob_ids
    assert digest("the empty patch") not in blob_ids


def test_nothing_is_released_by_the_first_version() -> None:
    assert find_released(None, publish(None, 1)) == ((), ())


def test_a_new_epoch_drops_what_lies_before_the_cut_and_keeps_its_record(run: Any) -> None:
    before = publish(None, 3)
    epoch = run.epoch(1, 4)
    manifest = manifest_of(None, Version(1, 4))
    after = with_catalogue(advance(before, manifest, digest("m"), encode_signed(epoch)), digest("c"))
    assert [item.entry.version for item in after.retained] == [Version(1, 4)]
    assert after.epoch_digest == record_digest(epoch)
    assert after.unbroken_from == 4
    blob_ids, _ = find_released(before, after)
    assert len(blob_ids) == 3
    second = with_catalogue(advance(after, manifest_of(None, Version(2, 5)), digest("n"), None), digest("d"))
    assert record_digest(epoch) not in find_released(after, second)[1]


def test_skips_start_after_the_last_version_that_no_patch_leads_to() -> None:
    state = publish(None, 5)
    assert state.unbroken_from == 1
    state = advance(state, manifest_of(None, Version(0, 6)), digest("anchor"), None)
    assert state.unbroken_from == 6
    assert publish(state, 2).unbroken_from == 6


def leap(state: PublishedState, number: int) -> PublishedState:
    """The state after a version that leaves numbers out."""
    manifest = manifest_of(state, Version(0, number))
    return with_catalogue(advance(state, manifest, digest(f"manifest {number}"), None), digest(f"catalogue {number}"))


def test_a_version_that_leaves_numbers_out_breaks_no_stretch() -> None:
    state = publish(None, 3)
    after = leap(state, 6)
    assert (after.version, after.unbroken_from, after.patch_range) == (Version(0, 6), 1, (1, 6))
    check_record(make_catalogue(publish(after, 2), RUN_ID))


def test_a_skip_of_the_ladder_is_due_unless_the_version_came_by_it() -> None:
    state = publish(None, 8)
    by_one_leap = leap(state, 16)
    assert find_extras_due(by_one_leap, 100) == []
    by_two = leap(leap(state, 12), 16)
    assert find_extras_due(by_two, 100) == [EncodeSkip(Version(0, 8), Version(0, 16))]
    without_base = leap(leap(publish(None, 7), 12), 16)
    assert find_extras_due(without_base, 100) == [], "version 8 was left out"


def test_only_a_few_old_catalogues_stay() -> None:
    state = publish(None, CATALOGUES_KEPT + 3)
    assert len(state.catalogue_digests) == CATALOGUES_KEPT
    again = with_catalogue(state, state.catalogue_digests[0])
    assert again.catalogue_digests[-1] == state.catalogue_digests[0]
    assert len(set(again.catalogue_digests)) == CATALOGUES_KEPT


def test_the_catalogue_is_in_the_order_peers_demand_with_two_skips_to_one_version() -> None:
    state = with_anchor(publish(None, 64))
    for base in (Version(0, 56), Version(0, 1)):
        state = add_extra(state, extra_of(state, base), digest(f"skip {base}"))
    catalogue = make_catalogue(state, RUN_ID)
    check_record(catalogue)
    assert sum(entry.kind is Kind.SKIP for entry in catalogue.entries) == 2


def test_an_anchor_makes_room_in_a_full_catalogue_and_leaves_a_way_in() -> None:
    state = publish(None, 1)
    patches = [manifest_of(None, Version(0, 1))]
    for number in range(2, limits.CATALOGUE_ENTRIES_MAX + 1):
        version, base = Version(0, number), Version(0, number - 1)
        kind = {"kind": Kind.PATCH, "base_version": base, "base_root": digest(f"root {base}"), "changed_count": 9}
        patches.append(replace(manifest_of(None, version), **kind))
    retained = tuple(Retained(entry_of(patch, digest(f"m {patch.version}")), patch.blob_id) for patch in patches)
    state = replace(state, version=patches[-1].version, root=patches[-1].root, retained=retained)
    anchor = manifest_of(None, Version(0, len(patches) + 1))
    after = advance(state, anchor, digest("anchor"), None)
    assert len(after.retained) <= limits.CATALOGUE_ENTRIES_MAX
    assert after.retained[-1].entry.manifest_digest == digest("anchor")


def test_a_root_is_known_while_its_version_is_retained() -> None:
    state = publish(None, 2)
    assert state.root_of(Version(0, 1)) == digest("root 0.1")
    assert state.root_of(Version(0, 3)) is None


def test_the_operators_line_gives_share_and_bytes() -> None:
    line = summarise(manifest_of(publish(None, 1), Version(0, 2)))
    assert line == "published version 0.2 as patch: 0.90% changed, 30 of 2000 bytes"
    ready = summarise(manifest_of(publish(None, 1), Version(0, 2)), is_standby=True)
    assert ready == line.replace("published", "keeping ready")
