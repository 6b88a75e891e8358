"""When a round is summed by slice, and when a trainer does without."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pulsenet.chain.records import Aggregate, Member, SliceName
from pulsenet.ids import Digest, PeerId, RunId, compute_digest
from pulsenet.node.fetch import FetchProgress
from pulsenet.node.slices import (
    LATE_SECONDS,
    NAME_SECONDS,
    OWNER_SECONDS,
    SLICES_PER_ORDER_MAX,
    SUMMED_BYTES_PER_SECOND,
    SliceRound,
    Way,
    is_sliced,
)

KEYS = tuple(PeerId(bytes([n]) * 32) for n in range(4))
NAMES = tuple(SliceName(compute_digest(b"slice %d" % n), 10) for n in range(4))


def make_aggregate(names: tuple[SliceName, ...] = NAMES) -> Aggregate:
    return Aggregate(RunId(compute_digest(b"run")), 0, 5, compute_digest(b"outcome"), names)


@dataclass
class FakeLedger:
    known: Aggregate | None = None
    disputed: bool = False
    next_round_index: int = 6
    sizes: dict[Digest, tuple[int, int]] = field(default_factory=dict)

    def aggregate(self, round_index: int) -> Aggregate | None:
        return self.known

    def is_disputed(self, round_index: int) -> bool:
        return self.disputed

    def contribution(self, digest: Digest) -> Any:
        size_bytes, element_count = self.sizes[digest]
        contribution = SimpleNamespace(encoded_size_bytes=size_bytes, element_count=element_count)
        return SimpleNamespace(contribution=contribution)


@dataclass
class FakeGatherer:
    held: set[SliceName] = field(default_factory=set)
    holds_parts: bool = False
    held_size_bytes: int = 0

    def is_whole(self, blob_id: Digest) -> bool:
        return blob_id in {name.blob_id for name in self.held}

    def holds_contributions(self, digests: Any) -> bool:
        return self.holds_parts

    def progress(self) -> FetchProgress:
        return FetchProgress(100, self.held_size_bytes, 0, 1, "")


def make_round(*, is_newest: bool = True, duty: int | None = 1, size_bytes: int = 0) -> SliceRound:
    own = frozenset() if duty is None else frozenset([duty])
    return SliceRound(5, compute_digest(b"outcome"), KEYS, is_newest, own, 0.0, size_bytes)


class Bench:
    def __init__(self, **options: Any) -> None:
        self.ledger, self.gatherer, self.round = FakeLedger(), FakeGatherer(), make_round(**options)

    def update(self, now: float) -> None:
        self.round.update(self.ledger, self.gatherer, now)  # type: ignore[arg-type]

    def is_whole(self) -> bool:
        return self.round.is_whole(self.gatherer)  # type: ignore[arg-type]

    def find_due(self) -> tuple[int, ...]:
        return self.round.find_due(self.gatherer, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "member_count", "size_bytes", "ratio", "expected"),
    [
        ("diloco", 2, 400, 17.0, False),
        ("diloco", 3, 1, 0.0, True),
        ("ddp", 3, 1, 0.0, True),
        ("pulseloco", 2, 400, 17.0, False),
        ("pulseloco", 4, 11, 17.0, False),  # 800 / 44 = 18.2
        ("pulseloco", 4, 12, 17.0, True),  # 800 / 48 = 16.7
        ("pulseloco", 4, 400, 0.0, False),
        ("pulseloco", 5, 10, 16.0, False),  # 800 / 50 is not below 16
    ],
)
def test_the_way_follows_from_what_is_signed(
    algorithm: str, member_count: int, size_bytes: int, ratio: float, expected: bool
) -> None:
    bits = struct.unpack("<I", struct.pack("<f", ratio))[0]
    descriptor: Any = SimpleNamespace(algorithm=algorithm, constants=(("all_gather_ratio_min", bits),))
    digests = [compute_digest(bytes([n])) for n in range(member_count)]
    members = tuple(Member(PeerId(bytes([n]) * 32), digest, 0x3F800000) for n, digest in enumerate(digests))
    final: Any = SimpleNamespace(receipt=SimpleNamespace(members=members))
    ledger: Any = FakeLedger(sizes=dict.fromkeys(digests, (size_bytes, 100)))
    assert is_sliced(descriptor, final, ledger) is expected


def test_an_owner_sums_its_slice_and_fetches_the_others_from_theirs() -> None:
    bench = Bench()
    bench.update(0.0)
    assert bench.round.wanted_parts == {1}
    wants = bench.round.wants(frozenset([compute_digest(b"own")]))
    assert (wants.choice.slices, wants.choice.slice_count) == ({1}, 4)
    assert wants.named == ()
    assert wants.whole == {compute_digest(b"own")}
    assert bench.find_due() == ()
    bench.gatherer.holds_parts = True
    assert bench.find_due() == (1,)
    bench.round.ordered = frozenset([1])
    assert bench.find_due() == ()
    bench.round.ordered, bench.round.summed = frozenset(), {1: NAMES[1]}
    bench.ledger.known = make_aggregate()
    bench.update(1.0)
    assert bench.round.wants(frozenset()).named == tuple((NAMES[n], KEYS[n], True) for n in (0, 2, 3))
    assert not bench.is_whole()
    bench.gatherer.held = {NAMES[0], NAMES[2], NAMES[3]}
    bench.update(2.0)
    assert bench.is_whole()
    assert bench.find_due() == ()


def test_a_slice_found_on_the_disk_is_not_summed_again() -> None:
    bench = Bench()
    bench.ledger.known = make_aggregate()
    bench.gatherer.held = set(NAMES)
    bench.update(0.0)
    assert bench.round.wanted_parts == frozenset()
    assert bench.is_whole()


@pytest.mark.parametrize(("is_newest", "seconds"), [(True, NAME_SECONDS), (False, LATE_SECONDS)])
def test_without_names_everything_is_fetched_after_a_while(is_newest: bool, seconds: float) -> None:
    bench = Bench(is_newest=is_newest, size_bytes=int(SUMMED_BYTES_PER_SECOND))
    bench.ledger.next_round_index = 6 if is_newest else 7
    wait = seconds + 1.0 if is_newest else seconds
    bench.update(0.0)
    assert bench.round.next_wake(0.0) == wait
    bench.update(wait - 0.1)
    assert bench.round.way is Way.SLICES
    bench.update(wait)
    assert (bench.round.way, bench.round.why) == (Way.WHOLE, "unnamed")
    assert bench.round.next_wake(wait) is None
    assert not bench.is_whole()
    assert bench.find_due() == ()
    bench.ledger.known = make_aggregate()
    bench.update(wait + 1.0)
    assert bench.round.way is Way.WHOLE


def test_a_slice_that_does_not_come_is_summed_here_and_asked_of_all() -> None:
    bench = Bench(duty=None, size_bytes=int(4 * SUMMED_BYTES_PER_SECOND))
    bench.ledger.known = make_aggregate()
    bench.gatherer.held = {NAMES[0], NAMES[1]}
    bench.update(0.0)
    wait = OWNER_SECONDS + 1.0
    assert bench.round.next_wake(0.0) == wait
    bench.gatherer.held_size_bytes = 50
    bench.update(5.0)
    bench.update(wait)
    assert bench.round.wanted_parts == frozenset()  # something moved at 5 s
    bench.update(5.0 + wait)
    assert bench.round.wanted_parts == {2, 3}
    assert bench.round.wants(frozenset()).named[2:] == ((NAMES[2], KEYS[2], False), (NAMES[3], KEYS[3], False))
    bench.gatherer.holds_parts = True
    assert bench.find_due() == (2, 3)
    # One of them comes after all.
    bench.gatherer.held.add(NAMES[3])
    bench.update(6.0 + wait)
    assert bench.find_due() == (2,)
    bench.round.summed = {2: NAMES[2]}
    bench.update(7.0 + wait)
    assert bench.is_whole()


def test_while_it_sums_nothing_else_is_given_up() -> None:
    bench = Bench(duty=0)
    bench.ledger.known = make_aggregate()
    bench.round.ordered = frozenset([0])
    bench.update(0.0)
    bench.update(100.0)
    assert bench.round.wanted_parts == {0}


def test_many_slices_are_summed_some_at_a_time() -> None:
    bench = Bench()
    bench.round.lacking = frozenset(range(40))
    bench.gatherer.holds_parts = True
    assert bench.find_due() == tuple(range(SLICES_PER_ORDER_MAX))


@pytest.mark.parametrize(("why", "disputed"), [("mismatch", False), ("disputed", True)])
def test_names_that_are_doubtful_are_not_stepped_from(why: str, disputed: bool) -> None:
    bench = Bench()
    bench.round.summed = {1: SliceName(compute_digest(b"mine"), 10)}
    bench.ledger.known = None if disputed else make_aggregate()
    bench.ledger.disputed = disputed
    bench.update(0.0)
    assert (bench.round.way, bench.round.why) == (Way.WHOLE, why)


def test_what_nobody_named_is_found_to_be_let_go() -> None:
    found = make_round()
    found.summed = {1: NAMES[1], 2: SliceName(compute_digest(b"mine"), 10)}
    assert found.find_unnamed(make_aggregate()) == (compute_digest(b"mine"),)
    assert set(found.find_unnamed(None)) == {NAMES[1].blob_id, compute_digest(b"mine")}


def test_a_round_that_is_left_behind_is_waited_for_less() -> None:
    bench = Bench()
    bench.update(0.0)
    bench.ledger.next_round_index = 7
    bench.update(LATE_SECONDS)
    assert bench.round.way is Way.WHOLE
