"""What is kept always holds a way in, and the rest is released."""

from __future__ import annotations

import pytest

from pulsenet.chain.plan import plan_route
from pulsenet.chain.records import Catalogue, CatalogueEntry, Kind
from pulsenet.chain.retention import RetentionLimits, due_skip_bases, is_anchor_due, retained
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest, RunId, Version, compute_digest


def v(number: int, epoch: int = 0) -> Version:
    return Version(epoch, number)


def entry(kind: Kind, base: int | None, number: int, size_bytes: int) -> CatalogueEntry:
    digest = compute_digest(f"{kind} {base} {number}".encode())
    base_version = None if base is None else v(base)
    return CatalogueEntry(kind, base_version, v(number), Digest(b"r" * 32), digest, size_bytes)


def anchor(number: int) -> CatalogueEntry:
    return entry(Kind.ANCHOR, None, number, 1000)


def patches(first: int, last: int) -> list[CatalogueEntry]:
    return [entry(Kind.PATCH, number - 1, number, 10) for number in range(first, last + 1)]


def numbers(entries: tuple[CatalogueEntry, ...], kind: Kind) -> list[int]:
    return [e.version.number for e in entries if e.kind is kind]


def has_way_in(entries: tuple[CatalogueEntry, ...], number: int) -> bool:
    return bool(plan_route(None, v(number), Catalogue(RunId(b"r" * 32), 0, entries)))


def test_a_publisher_keeps_two_anchors_and_everything_since_the_older() -> None:
    entries = [anchor(10), anchor(20), anchor(30), *patches(11, 35), entry(Kind.SKIP, 24, 32, 30)]
    verdict = retained(entries, "trainer")
    assert numbers(verdict.keep, Kind.ANCHOR) == [20, 30]
    assert numbers(verdict.keep, Kind.PATCH) == list(range(21, 36))
    assert numbers(verdict.keep, Kind.SKIP) == [32]
    assert numbers(verdict.release, Kind.PATCH) == list(range(11, 21))
    assert not set(verdict.keep) & set(verdict.release)


def test_a_skip_that_spans_the_older_anchor_is_kept() -> None:
    verdict = retained([anchor(10), anchor(20), *patches(11, 24), entry(Kind.SKIP, 8, 16, 30)], "trainer")
    assert numbers(verdict.keep, Kind.SKIP) == [16]


def test_keep_and_release_together_are_the_input_without_repeats() -> None:
    entries = [anchor(10), *patches(5, 15), *patches(5, 15)]
    verdict = retained(entries, "trainer")
    assert sorted((*verdict.keep, *verdict.release), key=lambda e: e.manifest_digest) == sorted(
        set(entries), key=lambda e: e.manifest_digest
    )


def test_without_an_anchor_nothing_is_released() -> None:
    assert retained(patches(1, 5), "trainer").release == ()
    assert retained([], "trainer").keep == ()


def test_one_kept_anchor_still_leaves_a_way_in_at_every_step_of_a_chain() -> None:
    """A-PUB-4: the old anchor goes only in the pass that already holds the new one."""
    held: tuple[CatalogueEntry, ...] = (anchor(1),)
    for number in range(2, 42):
        held = (*held, *patches(number, number))
        held = retained(held, "trainer", RetentionLimits(anchors_kept=1)).keep
        assert has_way_in(held, number)
        if number % 10 == 0:
            held = retained((*held, anchor(number)), "trainer", RetentionLimits(anchors_kept=1)).keep
            assert numbers(held, Kind.ANCHOR) == [number]
            assert has_way_in(held, number)


def test_a_thousand_versions_stay_within_two_anchor_intervals() -> None:
    """A-DSK-3: disk holds two anchors and the patches since the older one."""
    held: tuple[CatalogueEntry, ...] = (anchor(0),)
    for number in range(1, 1001):
        added = [*patches(number, number), *([anchor(number)] if number % 50 == 0 else [])]
        held = retained((*held, *added), "trainer").keep
        assert len(held) <= 2 + 100
    assert numbers(held, Kind.ANCHOR) == [950, 1000]


def test_the_catalogue_bound_drops_the_oldest_and_keeps_the_way_in() -> None:
    entries = [anchor(0), *patches(1, 30), entry(Kind.SKIP, 0, 8, 30)]
    verdict = retained(entries, "trainer", RetentionLimits(entries_max=25))
    assert has_way_in(verdict.keep, 30)
    assert len(verdict.keep) == 25
    assert numbers(verdict.keep, Kind.PATCH)[-22:] == list(range(9, 31))


def test_a_publisher_keeps_its_way_in_whatever_the_size_limit() -> None:
    verdict = retained([anchor(0), anchor(10), *patches(1, 12)], "trainer", RetentionLimits(size_bytes_max=1))
    assert numbers(verdict.keep, Kind.ANCHOR) == [10]
    assert numbers(verdict.keep, Kind.PATCH) == [11, 12]


def test_a_seed_takes_the_newest_first_within_its_limit() -> None:
    entries = [anchor(0), anchor(10), *patches(1, 12)]
    verdict = retained(entries, "seed", RetentionLimits(size_bytes_max=1050))
    assert numbers(verdict.keep, Kind.ANCHOR) == [10]
    assert numbers(verdict.keep, Kind.PATCH) == [8, 9, 10, 11, 12]


def test_a_seed_too_small_for_an_anchor_still_serves_patches() -> None:
    verdict = retained([anchor(10), *patches(11, 20)], "seed", RetentionLimits(size_bytes_max=50))
    assert numbers(verdict.keep, Kind.ANCHOR) == []
    assert numbers(verdict.keep, Kind.PATCH) == [16, 17, 18, 19, 20]


def test_an_inferencer_keeps_what_rebuilds_its_mirror() -> None:
    entries = [anchor(10), *patches(8, 20)]
    verdict = retained(entries, "inferencer", mirror=v(20))
    assert numbers(verdict.keep, Kind.ANCHOR) == [10]
    assert numbers(verdict.release, Kind.PATCH) == [8, 9, 10]


def test_an_inferencer_releases_the_anchor_before_the_one_it_came_by() -> None:
    verdict = retained([anchor(10), *patches(11, 20), anchor(20), *patches(21, 22)], "inferencer", mirror=v(22))
    assert numbers(verdict.keep, Kind.ANCHOR) == [20]
    assert numbers(verdict.keep, Kind.PATCH) == [21, 22]


def test_an_inferencer_short_of_room_keeps_patches_to_serve() -> None:
    verdict = retained([anchor(10), *patches(11, 20)], "inferencer", RetentionLimits(size_bytes_max=60), mirror=v(20))
    assert numbers(verdict.keep, Kind.ANCHOR) == []
    assert numbers(verdict.keep, Kind.PATCH) == list(range(15, 21))


def test_an_inferencer_without_a_whole_route_keeps_the_newest_first() -> None:
    verdict = retained(patches(11, 20), "inferencer", RetentionLimits(entries_max=3), mirror=v(20))
    assert numbers(verdict.keep, Kind.PATCH) == [18, 19, 20]
    assert retained(patches(11, 12), "inferencer").release == ()


def test_an_unknown_role_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="relay"):
        retained([], "relay")


def test_skips_are_due_at_multiples_of_their_span() -> None:
    assert due_skip_bases(v(16), 0) == (v(8),)
    assert due_skip_bases(v(64), 0) == (v(56), v(0))
    assert due_skip_bases(v(17), 0) == ()


def test_a_skip_never_starts_before_the_epoch() -> None:
    assert due_skip_bases(v(64, epoch=2), 57) == ()
    assert due_skip_bases(v(72, epoch=2), 64) == (v(64, epoch=2),)


def test_anchors_are_due_first_and_then_by_interval() -> None:
    assert is_anchor_due(v(1), None, 10)
    assert is_anchor_due(v(11), v(1), 10)
    assert not is_anchor_due(v(10), v(1), 10)
    assert is_anchor_due(v(2, epoch=1), v(1), 10)
    assert is_anchor_due(v(2), v(1), 0)


def test_aligned_anchors_do_not_depend_on_the_one_before() -> None:
    for newest in (1, 4, 9):
        due = [number for number in range(10, 13) if is_anchor_due(v(number), v(newest), 10, is_aligned=True)]
        assert due == [10, 11, 12], "the first that comes"
    assert not is_anchor_due(v(19), v(10), 10, is_aligned=True)
    assert is_anchor_due(v(21), v(12), 10, is_aligned=True), "numbers may be left out"
    assert is_anchor_due(v(5), None, 10, is_aligned=True)
    assert is_anchor_due(v(5, epoch=1), v(4), 10, is_aligned=True)
    assert is_anchor_due(v(2), v(1), 0, is_aligned=True)


ROUTE = [anchor(10), *patches(11, 20)]
BESIDE = [entry(Kind.SKIP, 12, 20, 90), entry(Kind.SKIP, 12, 19, 90)]


@pytest.mark.parametrize(
    ("room", "is_kept"),
    [
        (RetentionLimits(size_bytes_max=1100), True),
        (RetentionLimits(size_bytes_max=1099), False),
        (RetentionLimits(entries_max=11), True),
        (RetentionLimits(entries_max=10), False),
    ],
)
def test_an_inferencers_own_route_comes_first_if_there_is_room_for_all_of_it(
    room: RetentionLimits, is_kept: bool
) -> None:
    verdict = retained([*ROUTE, *BESIDE], "inferencer", room, mirror=v(20))
    assert (set(verdict.keep) == set(ROUTE)) is is_kept
    assert (numbers(verdict.keep, Kind.ANCHOR) == [10]) is is_kept
    if not is_kept:
        assert numbers(verdict.keep, Kind.SKIP) == [19, 20]


def test_a_seed_has_no_mirror_of_its_own_to_look_after() -> None:
    room = RetentionLimits(size_bytes_max=1100)
    assert retained([*ROUTE, *BESIDE], "seed", room, mirror=v(20)) == retained([*ROUTE, *BESIDE], "seed", room)


def test_what_must_be_kept_takes_its_room_once() -> None:
    verdict = retained([anchor(0), anchor(10), *patches(1, 12)], "trainer", RetentionLimits(size_bytes_max=1030))
    assert numbers(verdict.keep, Kind.PATCH) == [10, 11, 12]


def test_of_a_patch_and_an_anchor_of_one_version_a_seed_short_of_room_keeps_the_patch() -> None:
    """It serves the many who are up to date."""
    verdict = retained([anchor(5), anchor(10), *patches(6, 10)], "seed", RetentionLimits(entries_max=1))
    assert [entry.kind for entry in verdict.keep] == [Kind.PATCH]
