"""Routes remember failures: rebuild from an anchor, leave hopeless manifests out, wait for missing ones."""

from __future__ import annotations

from pulsenet.chain.records import Catalogue, CatalogueEntry, Head, Kind
from pulsenet.ids import Digest, RunId, Version, compute_digest
from pulsenet.node.route import FAILURES_MAX, HOP_TRIES_MAX, UNAVAILABLE_SECONDS, Router

RUN_ID = RunId(b"r" * 32)
NONE: frozenset[Digest] = frozenset()


def v(number: int) -> Version:
    return Version(0, number)


def root_of(number: int) -> Digest:
    return compute_digest(f"root {number}".encode())


def entry(kind: Kind, base: int | None, number: int, size_bytes: int) -> CatalogueEntry:
    digest = compute_digest(f"{kind} {base} {number}".encode())
    return CatalogueEntry(kind, None if base is None else v(base), v(number), root_of(number), digest, size_bytes)


ANCHOR = entry(Kind.ANCHOR, None, 10, 1000)
PATCHES = [entry(Kind.PATCH, number - 1, number, 10) for number in range(11, 18)]
SKIP = entry(Kind.SKIP, 10, 16, 90)


def catalogue(*entries: CatalogueEntry) -> Catalogue:
    return Catalogue(RUN_ID, 0, entries)


ALL = catalogue(ANCHOR, *PATCHES, SKIP)


def head(number: int = 17, seed: bytes = b"c") -> Head:
    return Head(RUN_ID, 0, 0, v(number), root_of(number), Digest(b"m" * 32), Digest(seed * 32), None, 0, 1)


def numbers(router: Router) -> list[int]:
    return [hop.version.number for hop in router.route]


def planned(held: int | None = 15, kept: Catalogue = ALL) -> Router:
    router = Router(None if held is None else v(held), None if held is None else root_of(held))
    assert router.plan(head(), kept, NONE, 0.0)
    return router


def test_a_plan_is_made_once_for_one_situation() -> None:
    router = planned()
    assert numbers(router) == [16, 17]
    assert not router.plan(head(), ALL, NONE, 1.0)
    assert router.plan(head(seed=b"d"), ALL, NONE, 1.0)


def test_applied_hops_leave_the_route_and_end_at_the_head() -> None:
    router = planned()
    for hop in PATCHES[-2:]:
        assert router.next_hop == hop
        assert not router.is_at(head())
        router.note_applied(hop)
    assert router.next_hop is None
    assert router.is_at(head())
    assert router.plan(head(), ALL, NONE, 0.0)
    assert router.route == ()


def test_an_applied_hop_that_is_not_next_leaves_the_route_alone() -> None:
    router = planned()
    router.note_applied(ANCHOR)
    assert router.held == v(10)
    assert numbers(router) == [16, 17]


def test_a_route_on_a_mirror_in_doubt_is_dropped_at_once() -> None:
    """While the next catalogue is on its way nothing is planned: the hop must not fail until it is called hopeless."""
    router = planned()
    router.note_failed(PATCHES[-2], "base_mismatch", v(15))
    assert router.next_hop is None
    assert router.plan(head(), ALL, NONE, 0.0)
    assert numbers(router)[0] == 10


def test_a_mismatch_is_answered_from_an_anchor() -> None:
    """A-CHAIN-5: the mirror is in doubt, so the next route does not build upon it."""
    router = planned()
    assert router.note_failed(PATCHES[5], "base_mismatch", v(15)) == 1
    assert router.plan(head(), ALL, NONE, 0.0)
    assert router.next_hop == ANCHOR
    assert not router.is_at(head(15))
    router.note_applied(ANCHOR)
    router.plan(head(), ALL, NONE, 0.0)
    assert numbers(router)[-1] == 17
    assert router.next_hop != ANCHOR


def test_a_full_disk_puts_neither_mirror_nor_manifest_in_doubt() -> None:
    router = planned()
    assert [router.note_failed(PATCHES[5], "enospc", v(15)) for _ in range(5)] == [1, 2, 3, 4, 5]
    router.plan(head(), ALL, NONE, 0.0)
    assert numbers(router) == [16, 17]
    router.note_applied(PATCHES[5])
    assert router.note_failed(PATCHES[6], "enospc", v(16)) == 1


def test_a_lost_mirror_is_rebuilt() -> None:
    router = planned()
    router.note_failed(PATCHES[5], "enospc", None)
    assert router.plan(head(), ALL, NONE, 0.0)
    assert router.held is None
    assert router.next_hop == ANCHOR


def test_a_manifest_that_keeps_failing_is_left_out() -> None:
    router = planned(held=None, kept=catalogue(ANCHOR, *PATCHES))
    for attempt in range(HOP_TRIES_MAX):
        assert router.note_failed(PATCHES[0], "root_mismatch", v(10)) == attempt + 1
    router.plan(head(), ALL, NONE, 0.0)
    assert [hop.kind for hop in router.route] == [Kind.ANCHOR, Kind.SKIP, Kind.PATCH]
    router.plan(head(seed=b"d"), catalogue(ANCHOR, *PATCHES), NONE, 0.0)
    assert router.route == ()


def test_without_a_route_the_reason_is_a_stable_code() -> None:
    """A-CHAIN-3."""
    router = planned(held=5, kept=catalogue(*PATCHES))
    assert router.route == ()
    assert router.reason == "base_mismatch"
    router.plan(head(seed=b"d"), ALL, NONE, 0.0)
    assert router.reason == ""


def test_refused_manifests_are_never_used() -> None:
    router = Router(v(15), root_of(15))
    router.plan(head(), ALL, frozenset({PATCHES[6].manifest_digest}), 0.0)
    assert router.route == ()


def test_a_blob_nobody_has_is_left_out_for_a_while_if_there_is_another_way() -> None:
    """A-CHAIN-2."""
    router = planned(held=12)
    router.note_unavailable(PATCHES[2], 0.0)
    router.note_unavailable(PATCHES[2], 30.0)
    assert router.plan(head(), ALL, NONE, 30.0)
    assert numbers(router) == [10, 16, 17]
    assert router.plan(head(), ALL, NONE, UNAVAILABLE_SECONDS)
    assert numbers(router) == [13, 14, 15, 16, 17]


def test_a_blob_nobody_has_is_waited_for_if_there_is_no_other_way() -> None:
    router = planned(held=15)
    router.note_unavailable(PATCHES[6], 0.0)
    router.plan(head(), catalogue(*PATCHES), NONE, 1.0)
    assert numbers(router) == [16, 17]


def test_failures_are_forgotten_with_their_manifests_and_bounded() -> None:
    router = planned(held=None)
    for _ in range(HOP_TRIES_MAX):
        router.note_failed(ANCHOR, "decode", None)
    router.forget_failures(catalogue(*PATCHES))
    router.plan(head(), ALL, NONE, 0.0)
    assert router.next_hop == ANCHOR
    for _ in range(HOP_TRIES_MAX):
        router.note_failed(ANCHOR, "decode", None)
    for number in range(FAILURES_MAX):
        router.note_failed(entry(Kind.PATCH, number, number + 1, 1), "decode", None)
    router.plan(head(), ALL, NONE, 0.0)
    assert router.next_hop == ANCHOR
