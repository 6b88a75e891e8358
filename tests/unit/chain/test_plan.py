"""The planner finds the cheapest safe route, or says what is missing."""

from __future__ import annotations

import pytest

from pulsenet.chain.plan import plan_route
from pulsenet.chain.records import Catalogue, CatalogueEntry, Kind
from pulsenet.errors import UnavailableError
from pulsenet.ids import Digest, RunId, Version, compute_digest

RUN_ID = RunId(b"r" * 32)


def v(number: int, epoch: int = 0) -> Version:
    return Version(epoch, number)


def root_of(version: Version) -> Digest:
    return compute_digest(f"root {version}".encode())


def anchor(version: Version, size_bytes: int = 1000) -> CatalogueEntry:
    digest = compute_digest(f"anchor {version}".encode())
    return CatalogueEntry(Kind.ANCHOR, None, version, root_of(version), digest, size_bytes)


def patch(base: Version, version: Version, size_bytes: int = 10, kind: Kind = Kind.PATCH) -> CatalogueEntry:
    digest = compute_digest(f"{kind} {base} {version}".encode())
    return CatalogueEntry(kind, base, version, root_of(version), digest, size_bytes)


def skip(base: Version, version: Version, size_bytes: int = 40) -> CatalogueEntry:
    return patch(base, version, size_bytes, Kind.SKIP)


def catalogue(*entries: CatalogueEntry) -> Catalogue:
    return Catalogue(RUN_ID, 0, tuple(sorted(entries, key=lambda entry: (entry.version, entry.kind))))


def patches(first: int, last: int) -> list[CatalogueEntry]:
    return [patch(v(number - 1), v(number)) for number in range(first, last + 1)]


def test_a_joiner_at_v57_takes_the_newest_anchor_and_seven_patches() -> None:
    """A-CHAIN-1: anchors every 10, the chain starts at v40."""
    kept = catalogue(anchor(v(40)), anchor(v(50)), *patches(41, 57))
    route = plan_route(None, v(57), kept)
    assert [entry.version.number for entry in route] == [50, *range(51, 58)]
    assert route[0].kind is Kind.ANCHOR
    assert sum(entry.encoded_size_bytes for entry in route) == 1070


def test_what_is_held_is_an_empty_route() -> None:
    assert plan_route(v(5), v(5), catalogue()) == ()


def test_one_version_behind_takes_one_patch() -> None:
    route = plan_route(v(56), v(57), catalogue(anchor(v(50)), *patches(51, 57)))
    assert [entry.version.number for entry in route] == [57]


def test_a_cheaper_skip_replaces_the_patches_it_spans() -> None:
    kept = catalogue(anchor(v(40)), *patches(41, 57), skip(v(40), v(48)), skip(v(48), v(56)))
    route = plan_route(v(40), v(57), kept)
    assert [entry.version.number for entry in route] == [48, 56, 57]


def test_a_dearer_skip_is_left_alone() -> None:
    kept = catalogue(*patches(41, 48), skip(v(40), v(48), size_bytes=81))
    assert len(plan_route(v(40), v(48), kept)) == 8


def test_equal_bytes_prefer_fewer_hops() -> None:
    kept = catalogue(*patches(41, 48), skip(v(40), v(48), size_bytes=80))
    assert len(plan_route(v(40), v(48), kept)) == 1


def test_an_anchor_beats_a_long_costly_chain() -> None:
    kept = catalogue(*[patch(v(n - 1), v(n), 300) for n in range(1, 11)], anchor(v(8)))
    route = plan_route(v(0), v(10), kept)
    assert [(entry.kind, entry.version.number) for entry in route] == [
        (Kind.ANCHOR, 8),
        (Kind.PATCH, 9),
        (Kind.PATCH, 10),
    ]


def test_a_hole_in_the_chain_is_never_jumped() -> None:
    """A-CHAIN-2: v53 is gone, v54..v57 exist; v54 is not applied on v52."""
    kept = catalogue(*patches(51, 52), *patches(54, 57))
    with pytest.raises(UnavailableError, match=r"base_mismatch: nothing leads on from 0\.52"):
        plan_route(v(52), v(57), kept)
    with pytest.raises(UnavailableError, match="chain_hole"):
        plan_route(v(51), v(57), kept)


def test_an_anchor_after_the_hole_is_the_way_on() -> None:
    """A-CHAIN-2: v60 comes as an anchor."""
    kept = catalogue(*patches(51, 52), *patches(54, 60), anchor(v(60)))
    assert [entry.version.number for entry in plan_route(v(52), v(60), kept)] == [60]


def test_a_pruned_chain_is_not_replayed_on_the_original_model() -> None:
    """A-CHAIN-3: only v10..v14 are kept, the receiver holds v0."""
    with pytest.raises(UnavailableError, match="base_mismatch"):
        plan_route(v(0), v(14), catalogue(*patches(11, 14)))
    route = plan_route(v(0), v(14), catalogue(anchor(v(10)), *patches(11, 14)))
    assert route[0] == anchor(v(10))


def test_without_anything_held_an_anchor_is_required() -> None:
    with pytest.raises(UnavailableError, match="no_anchor"):
        plan_route(None, v(14), catalogue(*patches(11, 14)))


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(UnavailableError, match=r"no_target.*0\.58"):
        plan_route(v(57), v(58), catalogue(*patches(51, 57)))


def test_avoided_manifests_are_not_used() -> None:
    kept = catalogue(anchor(v(50)), *patches(51, 57), skip(v(50), v(57), 1))
    route = plan_route(v(50), v(57), kept, avoid={skip(v(50), v(57), 1).manifest_digest})
    assert len(route) == 7


def test_a_mirror_whose_root_the_catalogue_contradicts_starts_from_an_anchor() -> None:
    """A-CHAIN-4: the same number with another root is another history."""
    kept = catalogue(anchor(v(50)), *patches(51, 57))
    assert len(plan_route(v(56), v(57), kept, held_root=root_of(v(56)))) == 1
    assert plan_route(v(56), v(57), kept, held_root=Digest(b"x" * 32))[0].kind is Kind.ANCHOR
    assert plan_route(v(57), v(57), kept, held_root=Digest(b"x" * 32))[0].kind is Kind.ANCHOR


def test_a_root_the_catalogue_says_nothing_about_is_built_upon() -> None:
    kept = catalogue(*patches(57, 58))
    assert len(plan_route(v(56), v(58), kept, held_root=Digest(b"x" * 32))) == 2


def test_a_new_epoch_is_entered_by_its_patch_only_from_the_kept_version() -> None:
    """A-CHAIN-4: the epoch after a restart cuts v56 and v57 of the old one."""
    kept = catalogue(anchor(v(50)), *patches(51, 55), patch(v(55), v(58, epoch=1)), anchor(v(58, epoch=1)))
    assert [e.kind for e in plan_route(v(55), v(58, epoch=1), kept)] == [Kind.PATCH]
    assert [e.kind for e in plan_route(v(57), v(58, epoch=1), kept)] == [Kind.ANCHOR]


def test_entries_that_do_not_lead_forward_are_ignored() -> None:
    backward = patch(v(9), v(8), 0)
    anchor_with_base = CatalogueEntry(Kind.ANCHOR, v(1), v(9), root_of(v(9)), Digest(b"a" * 32), 0)
    baseless = CatalogueEntry(Kind.PATCH, None, v(9), root_of(v(9)), Digest(b"b" * 32), 0)
    with pytest.raises(UnavailableError):
        plan_route(v(1), v(9), catalogue(backward, anchor_with_base, baseless))


def test_hops_beyond_the_target_are_ignored() -> None:
    kept = catalogue(*patches(51, 60))
    assert [entry.version.number for entry in plan_route(v(58), v(59), kept)] == [59]


def test_a_cheaper_way_found_late_replaces_the_dearer_one() -> None:
    kept = catalogue(patch(v(0), v(3), 100, Kind.SKIP), *patches(1, 4))
    assert [entry.version.number for entry in plan_route(v(0), v(4), kept)] == [1, 2, 3, 4]


def test_a_patch_that_leads_back_is_no_way_around_a_hole() -> None:
    kept = catalogue(patch(v(9), v(8), 0), patch(v(8), v(10), 10, Kind.SKIP))
    with pytest.raises(UnavailableError, match="base_mismatch"):
        plan_route(v(9), v(10), kept)


def test_what_may_be_used_after_an_avoided_manifest_still_is() -> None:
    kept = Catalogue(RUN_ID, 0, (patch(v(0), v(1)), anchor(v(1))))
    assert plan_route(v(0), v(1), kept, avoid={patch(v(0), v(1)).manifest_digest}) == (anchor(v(1)),)


def test_of_two_equal_ways_the_one_the_catalogue_names_first_is_taken() -> None:
    """So that every node takes the same."""
    first, second = (patch(v(number), v(3), 10, Kind.SKIP) for number in (1, 2))
    kept = catalogue(skip(v(0), v(2)), skip(v(0), v(1)), second, first)
    assert [entry.version.number for entry in plan_route(v(0), v(3), kept)] == [1, 3]


def test_a_dearer_way_that_was_found_first_is_not_gone_on_from() -> None:
    """The way to v2 by one dear hop waits in the queue while the cheap one by v1 is found."""
    kept = catalogue(skip(v(0), v(2), 50), *patches(1, 3), skip(v(2), v(4), 100), skip(v(3), v(5), 5))
    assert [entry.version.number for entry in plan_route(v(0), v(4), kept)] == [1, 2, 4]
    with pytest.raises(UnavailableError, match="no_target"):
        plan_route(v(0), v(6), kept)


def test_a_target_that_was_listed_but_cannot_be_reached_says_so_whatever_lies_around() -> None:
    kept = catalogue(skip(v(0), v(2), 50), *patches(1, 2), patch(v(8), v(9)))
    with pytest.raises(UnavailableError, match="chain_hole"):
        plan_route(v(0), v(9), kept)
