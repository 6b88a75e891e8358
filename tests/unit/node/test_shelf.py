"""The shelf says what can be served and lets go only of what nothing needs."""

from __future__ import annotations

from dataclasses import replace

from pulsenet.chain.records import Catalogue, CatalogueEntry, Kind, Manifest
from pulsenet.chain.retention import RetentionLimits
from pulsenet.chain.trust import entry_of
from pulsenet.ids import Digest, RunId, Version, compute_digest
from pulsenet.node.mesh import Holdings
from pulsenet.node.shelf import Shelf

RUN_ID = RunId(b"r" * 32)


def manifest(kind: Kind, number: int, epoch: int = 0, blob: str = "") -> Manifest:
    name = blob or f"{kind} {epoch} {number}"
    digest = Digest(b"d" * 32)
    is_anchor = kind is Kind.ANCHOR
    return Manifest(
        run_id=RUN_ID,
        revision=0,
        term=0,
        kind=kind,
        base_version=None if is_anchor else Version(epoch, number - (8 if kind is Kind.SKIP else 1)),
        version=Version(epoch, number),
        base_root=None if is_anchor else digest,
        root=digest,
        table_digest=digest,
        blob_id=compute_digest(name.encode()),
        raw_size_bytes=1000,
        encoded_size_bytes=1000 if is_anchor else 10,
        changed_count=0,
        element_count=500,
        codec_id=1,
        trainer_step=0,
        previous=None,
    )


def digest_of(item: Manifest) -> Digest:
    return compute_digest(repr(item).encode())


def shelf(role: str, *items: Manifest, limits: RetentionLimits | None = None) -> Shelf:
    return Shelf(role, {digest_of(item): item for item in items}, limits)


def entries(*items: Manifest) -> list[CatalogueEntry]:
    return [entry_of(item, digest_of(item)) for item in items]


def patches(first: int, last: int) -> list[Manifest]:
    return [manifest(Kind.PATCH, number) for number in range(first, last + 1)]


def test_an_empty_shelf_holds_nothing() -> None:
    empty = shelf("seed")
    assert empty.holdings == Holdings()
    assert empty.newest_version is None
    assert empty.digests == ()
    assert len(empty) == 0


def test_holdings_are_the_newest_unbroken_stretch_and_the_anchors() -> None:
    items = [*patches(3, 4), *patches(6, 9), manifest(Kind.ANCHOR, 5), manifest(Kind.SKIP, 8)]
    assert shelf("seed", *items).holdings == Holdings(0, 6, 9, (5,))
    assert shelf("seed", manifest(Kind.ANCHOR, 5)).holdings == Holdings(0, 0, 0, (5,))


def test_holdings_speak_of_the_newest_epoch_only() -> None:
    assert shelf("seed", *patches(3, 9), manifest(Kind.PATCH, 12, epoch=1)).holdings == Holdings(1, 12, 12, ())


def test_whole_blobs_are_added_and_known() -> None:
    item = manifest(Kind.PATCH, 3)
    empty = shelf("seed")
    empty.add(digest_of(item), None)
    assert not empty.holds(digest_of(item))
    empty.add(digest_of(item), item)
    assert empty.holds(digest_of(item))
    assert empty.newest_version == Version(0, 3)


def test_an_anchor_that_two_authorities_signed_is_held_once() -> None:
    first = manifest(Kind.ANCHOR, 5)
    assert shelf("seed", first, replace(first, term=2)).holdings == Holdings(0, 0, 0, (5,))


def test_a_seed_wants_the_newest_first_and_patches_before_anchors() -> None:
    items = [*patches(2, 4), manifest(Kind.ANCHOR, 1), manifest(Kind.ANCHOR, 3)]
    catalogue = Catalogue(RUN_ID, 0, tuple(entries(*items)))
    wanted = shelf("seed").choose_for_seed(catalogue)
    assert [(entry.version.number, entry.kind) for entry in wanted] == [
        (4, Kind.PATCH),
        (3, Kind.PATCH),
        (3, Kind.ANCHOR),
        (2, Kind.PATCH),
        (1, Kind.ANCHOR),
    ]
    chooser = shelf("seed")
    assert chooser.choose_for_seed(catalogue) is chooser.choose_for_seed(catalogue)


def test_a_seed_lets_go_of_what_the_catalogue_does_not_keep() -> None:
    items = patches(2, 5)
    holder = shelf("seed", *items)
    blob_ids, digests = holder.release(None, entries(*items[2:]))
    assert set(blob_ids) == {items[0].blob_id, items[1].blob_id}
    assert set(digests) == {digest_of(items[0]), digest_of(items[1])}
    assert set(holder.digests) == {digest_of(item) for item in items[2:]}


def test_an_inferencer_keeps_the_way_to_its_mirror() -> None:
    items = [manifest(Kind.ANCHOR, 5), *patches(3, 9)]
    holder = shelf("inferencer", *items)
    blob_ids, _ = holder.release(Version(0, 9), ())
    assert set(blob_ids) == {item.blob_id for item in patches(3, 5)}
    assert holder.release(Version(0, 9), ()) == ((), ())


def test_a_blob_still_named_by_another_manifest_is_not_released() -> None:
    first, second = manifest(Kind.PATCH, 3, blob="empty"), manifest(Kind.PATCH, 9, blob="empty")
    holder = shelf("inferencer", first, manifest(Kind.ANCHOR, 8), second)
    blob_ids, digests = holder.release(Version(0, 9), ())
    assert blob_ids == ()
    assert digests == (digest_of(first),)


def test_what_came_in_part_goes_once_it_is_wanted_no_more() -> None:
    left, wanted = patches(1, 2)
    twin = replace(left, term=1)
    holder = shelf("inferencer")
    for item in (left, wanted, twin):
        holder.begin(digest_of(item), item)
    twins = {digest_of(wanted), digest_of(twin)}
    assert holder.release(None, (), twins) == ((), (digest_of(left),)), "its blob is that of another"
    assert holder.release(None, (), twins) == ((), ())
    holder.add(digest_of(wanted), wanted)
    assert holder.release(None, (), ()) == ((twin.blob_id,), (digest_of(twin),))


def test_what_is_left_of_a_damaged_blob_stays_while_others_are_fetched() -> None:
    items = patches(1, 2)
    holder = shelf("inferencer", *items)
    holder.begin(digest_of(items[0]), items[0])
    holder.lose(items[0].blob_id)
    holder.begin(digest_of(items[0]), items[0])
    assert holder.release(None, (), ()) == ((), ())


def test_a_damaged_blob_is_neither_held_nor_announced_until_it_is_whole_again() -> None:
    anchor, patch, last = manifest(Kind.ANCHOR, 1), manifest(Kind.PATCH, 2), manifest(Kind.PATCH, 3)
    kept = shelf("inferencer", anchor, patch, last)
    kept.lose(patch.blob_id)
    kept.lose(Digest(b"unknown blob".ljust(32)))
    assert not kept.holds(digest_of(patch))
    assert (kept.holdings.version_first, kept.holdings.version_last) == (3, 3)
    catalogue = Catalogue(RunId(bytes(32)), 0, tuple(entries(anchor, patch, last)))
    known = {digest_of(item): item for item in (anchor, patch, last)}
    whole: set[Digest] = set()

    def choose(named: Catalogue | None) -> list[Digest]:
        return [entry.manifest_digest for entry in kept.choose_lost(named, known.get, whole.__contains__)]

    assert choose(None) == []
    assert choose(catalogue) == [digest_of(patch)]
    whole.add(patch.blob_id)
    assert choose(catalogue) == []
    assert kept.holds(digest_of(patch))


def test_what_was_damaged_and_is_named_no_more_is_forgotten() -> None:
    anchor, patch = manifest(Kind.ANCHOR, 1), manifest(Kind.PATCH, 2)
    kept = shelf("inferencer", anchor, patch)
    kept.lose(patch.blob_id)
    known = {digest_of(patch): patch}
    for numbers in ((anchor,), (anchor, patch)):
        catalogue = Catalogue(RunId(bytes(32)), 0, tuple(entries(*numbers)))
        assert kept.choose_lost(catalogue, known.get, lambda blob_id: False) == ()
    assert kept.release(Version(0, 1), ()) == ((patch.blob_id,), (digest_of(patch),)), "nobody fetches the rest of it"


def test_a_seed_lets_go_of_what_was_damaged_and_is_wanted_no_more() -> None:
    items = patches(2, 3)
    holder = shelf("seed", *items)
    holder.lose(items[0].blob_id)
    assert holder.release(None, entries(*items), [digest_of(items[0])]) == ((), ())
    assert holder.release(None, entries(items[1]), ()) == ((items[0].blob_id,), (digest_of(items[0]),))


def test_versions_make_do_with_the_room_that_rounds_leave() -> None:
    items = [manifest(Kind.ANCHOR, 1), *patches(2, 5)]
    sizes = [item.encoded_size_bytes for item in items]
    kept = shelf("seed", *items, limits=RetentionLimits(size_bytes_max=sum(sizes)))
    catalogue = Catalogue(RunId(bytes(32)), 0, tuple(entries(*items)))
    assert len(kept.choose_for_seed(catalogue)) == 5
    assert kept.note_taken(sizes[0])
    assert not kept.note_taken(sizes[0])
    assert [entry.version.number for entry in kept.choose_for_seed(catalogue)] == [5, 4, 3, 2]
    assert kept.note_taken(10 * sum(sizes))
    assert kept.choose_for_seed(catalogue) == ()
    assert not shelf("seed", *items).note_taken(1)
