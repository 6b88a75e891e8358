"""What a final receipt needs before its outer step: whole contributions, or slices that an authority named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Aggregate, Contribution, Member, Receipt, SliceName
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.ids import Digest, compute_digest
from pulsenet.node.courier import Courier
from pulsenet.node.effects import (
    Count,
    Effect,
    Fate,
    Log,
    Release,
    SendRequest,
    StepState,
    StoreRecord,
    StrikePeer,
    SumSlices,
)
from pulsenet.node.events import (
    PeerConnected,
    PeerLost,
    ReplyReceived,
    SlicesSummed,
    StoreFailed,
    SumFailed,
    TrainingAttached,
)
from pulsenet.node.gathering import GATHER_SECONDS_MAX, Gathering
from pulsenet.node.slices import ASK_SECONDS, NAME_SECONDS, OWNER_SECONDS
from pulsenet.testing.fakes import FakeStore
from pulsenet.testing.toy_training import SIZE, encode_entries, write_pieces
from pulsenet.wire.messages import AggregatesReply, GetAggregates

ALWAYS_SLICED_BITS = 0x7149_F2CA


class Bench:
    """One trainer of three (a member and no authority, unless told otherwise), with everybody's records."""

    def __init__(
        self,
        make_run: Callable[..., Any],
        *,
        is_authority: bool = False,
        sends: bool = True,
        ratio: int = ALWAYS_SLICED_BITS,
    ) -> None:
        keys = make_run.publisher, make_run.second, make_run.third  # type: ignore[attr-defined]
        self.authority, self.others = keys[0], keys[1:]
        self.me = keys[0] if is_authority else keys[1]
        self.run = make_run(
            trainers=tuple(sorted(key.peer_id for key in keys)),
            algorithm="pulseloco",
            constants=(("all_gather_ratio_min", ratio),),
        )
        self.trust = self.run.trust()
        self.ledger = Ledger(self.trust)
        self.store = FakeStore()
        self.courier = Courier()
        self.now = 0.0
        self.members = sorted(keys if sends else (keys[0], keys[2], make_run.key(9)), key=lambda key: key.peer_id)
        self.contributions: dict[Any, Contribution] = {}
        members = []
        for key in self.members:
            signed = self.contribute(key)
            self.ledger.accept_listed(signed)
            members.append(Member(key.peer_id, record_digest(signed), 0x3F800000))
        self.receipt = Receipt(
            run_id=self.run.run_id,
            revision=0,
            term=1,
            coordinator=self.authority.peer_id,
            round_index=0,
            base_state_root=compute_digest(b"state"),
            previous=None,
            members=tuple(members),
            rejected=(),
        )
        self.signed_receipt = self.run.seal(self.receipt, self.authority)
        self.ledger.accept_final(self.signed_receipt)
        seat = self.run.seat(self.me, self.trust, self.ledger)
        self.gathering = Gathering(seat, self.store, self.courier)

    def contribute(self, key: Any) -> Any:
        values = np.arange(1, SIZE + 1, dtype=np.float32)
        pieces = [b"c" + key.peer_id[:3], *encode_entries(values > 0, values, key.peer_id[:3])]
        blob_id, size_bytes = write_pieces(self.store, pieces)
        contribution = Contribution(
            self.run.run_id, 0, key.peer_id, 0, compute_digest(b"state"), blob_id, size_bytes, SIZE, SIZE, 0, 1
        )
        self.contributions[key] = contribution
        return self.run.seal(contribution, key)

    @property
    def own_place(self) -> int:
        return self.members.index(self.me)

    def lose(self, *keys: Any) -> None:
        """Let nothing of these contributions be here but the records."""
        for key in keys:
            self.store.release((self.contributions[key].blob_id,), ())

    def connect(self, *keys: Any) -> None:
        for key in keys:
            self.courier.connected.add(key.peer_id)
            self.gathering.handle(PeerConnected(key.peer_id, (), outbound=True), self.now)

    def update(self, *, is_over: bool = False) -> list[Effect]:
        final = None if is_over else self.ledger.final(0)
        return self.gathering.update(self.now, final=final, anchor=None)

    def is_whole(self) -> bool:
        final = self.ledger.final(0)
        assert final is not None
        return self.gathering.is_whole(final)

    def step_order(self) -> StepState:
        final = self.ledger.final(0)
        assert final is not None
        (order,) = (e for e in self.gathering.order(final, Fate.COUNTED) if isinstance(e, StepState))
        return order

    def names(self, tag: bytes = b"") -> tuple[SliceName, ...]:
        found = []
        for place in range(3):
            blob_id, size_bytes = write_pieces(self.store, [b"slice %d" % place + tag])
            found.append(SliceName(blob_id, size_bytes))
        return tuple(found)

    def statement(self, names: tuple[SliceName, ...], signer: Any = None, **changes: Any) -> bytes:
        fields = {"revision": 0, "round_index": 0, "outcome": outcome_of(self.receipt), "slices": names} | changes
        return encode_signed(self.run.seal(Aggregate(run_id=self.run.run_id, **fields), signer or self.authority))

    def hear(self, *statements: bytes) -> list[Effect]:
        return self.gathering.handle(ReplyReceived(1, self.authority.peer_id, AggregatesReply(statements)), self.now)


@pytest.fixture
def bench(make_run: Callable[..., Any]) -> Bench:
    return Bench(make_run)


def sums_of(effects: list[Effect]) -> list[SumSlices]:
    return [effect for effect in effects if isinstance(effect, SumSlices)]


def asked_of(effects: list[Effect]) -> list[Digest]:
    return [e.peer_id for e in effects if isinstance(e, SendRequest) and isinstance(e.message, GetAggregates)]  # type: ignore[misc]


def test_a_trainer_sums_its_slice_hears_the_names_and_steps_from_slices(bench: Bench) -> None:
    bench.connect(bench.authority, *bench.others)
    effects = bench.update()
    assert asked_of(effects) == [bench.authority.peer_id]
    (order,) = sums_of(effects)
    assert (order.round_index, order.slices, order.stored) == (0, (bench.own_place,), (bench.own_place,))
    assert [member.peer_id for member, _ in order.members] == [key.peer_id for key in bench.members]
    # Every element is a chunk of 9 bytes behind a head of 4; there are two elements a slice.
    assert order.ranges == (((4 + 18 * bench.own_place, 18),),) * 3
    names = bench.names()
    told = bench.gathering.handle(SlicesSummed(0, ((bench.own_place, names[bench.own_place]),)), 0.0)
    assert Count("slices", "summed", 1.0) in told
    assert not bench.is_whole()
    bench.now = ASK_SECONDS
    assert asked_of(bench.update()) == [bench.authority.peer_id]
    statement = bench.statement(names)
    assert bench.hear(statement) == [StoreRecord(decode_signed(statement))]
    assert asked_of(bench.update()) == []
    bench.update()
    assert bench.is_whole()
    order = bench.step_order()
    assert order.slices == names
    assert order.fate is Fate.COUNTED
    # Stepping again after a restart of the disk orders the same.
    assert bench.step_order() == order
    assert bench.update(is_over=True) == []


def test_an_authority_sums_everything_and_signs_the_names(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, is_authority=True)
    (order,) = sums_of(bench.update())
    assert (order.slices, order.stored, order.ranges) == ((0, 1, 2), (bench.own_place,), ())
    assert not bench.is_whole()
    assert sums_of(bench.update()) == []
    names = bench.names()
    (stored,) = bench.gathering.handle(SlicesSummed(0, tuple(enumerate(names))), 0.0)
    assert isinstance(stored, StoreRecord)
    found = bench.ledger.aggregate(0)
    assert found is not None
    assert found.slices == names
    bench.update()
    assert bench.is_whole()
    # It steps from what it summed itself, not from what others serve.
    assert bench.step_order().slices == ()
    assert bench.update(is_over=True) == []


def test_few_or_small_contributions_are_fetched_whole(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, ratio=0)
    assert sums_of(bench.update()) == []
    assert bench.is_whole()
    assert bench.step_order().slices == ()
    authority = Bench(make_run, is_authority=True, ratio=0)
    assert sums_of(authority.update()) == []
    assert authority.is_whole()


def test_in_an_old_round_a_trainer_sums_its_slice_and_an_authority_names_none(
    bench: Bench, make_run: Callable[..., Any]
) -> None:
    for one in (bench, Bench(make_run, is_authority=True)):
        later = Receipt(
            run_id=one.run.run_id,
            revision=0,
            term=1,
            coordinator=one.authority.peer_id,
            round_index=1,
            base_state_root=compute_digest(b"state 1"),
            previous=outcome_of(one.receipt),
            members=one.receipt.members,
            rejected=(),
        )
        one.ledger.accept_final(one.run.seal(later, one.authority))
        slices = [order.slices for order in sums_of(one.update())]
        assert slices == ([] if one.me is one.authority else [(one.own_place,)])
        assert one.is_whole() is (one.me is one.authority)


def test_a_trainer_that_is_no_member_only_fetches(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, sends=False)
    assert sums_of(bench.update()) == []
    bench.hear(bench.statement(bench.names()))
    bench.update()
    bench.update()
    assert bench.is_whole()


def test_records_come_before_anything_is_decided(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run)
    bench.ledger._contributions.clear()
    bench.connect(bench.authority)
    assert sums_of(bench.update()) == []
    assert not bench.is_whole()
    assert bench.gathering.pump(0.0) != []


@pytest.mark.parametrize("is_authority", [False, True])
def test_a_sum_that_fails_leads_to_whole_contributions(make_run: Callable[..., Any], is_authority: bool) -> None:
    bench = Bench(make_run, is_authority=is_authority)
    assert len(sums_of(bench.update())) == 1
    told = bench.gathering.handle(SumFailed(0, "decode"), 0.0)
    assert Count("slices", "failed") in told
    assert any(isinstance(effect, Log) for effect in told)
    assert sums_of(bench.update()) == []
    assert bench.is_whole()
    assert bench.step_order().slices == ()


def test_answers_about_another_round_mean_nothing(bench: Bench) -> None:
    assert bench.gathering.handle(SlicesSummed(0, ()), 0.0) == []
    bench.update()
    assert bench.gathering.handle(SlicesSummed(7, ()), 0.0) == []
    assert bench.gathering.handle(SumFailed(7, "decode"), 0.0) == []


def test_a_step_from_slices_that_fails_is_tried_from_everything(bench: Bench) -> None:
    bench.update()
    names = bench.names()
    bench.gathering.handle(SlicesSummed(0, ((bench.own_place, names[bench.own_place]),)), 0.0)
    bench.hear(bench.statement(names))
    bench.update()
    bench.update()
    assert bench.step_order().slices == names
    bench.gathering.note_failed("slices")
    bench.update()
    assert bench.is_whole()
    assert bench.step_order().slices == ()
    bench.gathering.note_failed("enospc")
    assert bench.is_whole()


def test_bad_statements_are_counted_and_cost_their_sender(bench: Bench) -> None:
    bench.update()
    names = bench.names()
    told = bench.hear(b"\xc1", bench.statement(names[:2]), bench.statement(names, signer=bench.others[0]))
    assert [effect for effect in told if isinstance(effect, StrikePeer)] == [
        StrikePeer(bench.authority.peer_id, "decode")
    ]
    assert [effect.label for effect in told if isinstance(effect, Count)] == ["decode", "mismatch", "untrusted"]
    assert bench.ledger.aggregate(0) is None


def test_what_was_summed_for_a_round_without_names_is_let_go(bench: Bench) -> None:
    bench.update()
    (name,) = bench.names()[:1]
    bench.gathering.handle(SlicesSummed(0, ((bench.own_place, name),)), 0.0)
    bench.now = NAME_SECONDS + 1.0
    bench.update()
    assert bench.is_whole()
    assert bench.step_order().slices == ()
    assert bench.update(is_over=True) == [Release((name.blob_id,), ())]


def test_a_full_disk_begins_the_round_anew(bench: Bench) -> None:
    assert len(sums_of(bench.update())) == 1
    bench.gathering.handle(StoreFailed(None, "enospc"), 0.0)
    assert len(sums_of(bench.update())) == 1


@pytest.mark.parametrize("is_authority", [True, False])
def test_a_training_process_that_begins_anew_is_ordered_what_was_ordered_before(
    make_run: Callable[..., Any], is_authority: bool
) -> None:
    """A checkpoint was loaded: the order went with the state that it was for, and nobody answers it any more."""
    bench = Bench(make_run, is_authority=is_authority)
    (order,) = sums_of(bench.update())
    assert sums_of(bench.update()) == []
    bench.gathering.handle(TrainingAttached(0, compute_digest(b"state"), None), 0.0)
    assert sums_of(bench.update()) == [order]


def test_slices_that_led_astray_are_blamed_on_their_signer_and_not_used_again(bench: Bench) -> None:
    bench.update()
    names = bench.names()
    bench.gathering.handle(SlicesSummed(0, ((bench.own_place, names[bench.own_place]),)), 0.0)
    bench.hear(bench.statement(names))
    bench.update()
    bench.update()
    assert bench.step_order().slices == names
    told = bench.gathering.note_astray(1)
    assert Count("slices", "astray") in told
    assert any(isinstance(effect, Log) and effect.level == "error" for effect in told)
    bench.update(is_over=True)
    assert sums_of(bench.update()) == []
    assert bench.is_whole()
    assert bench.step_order().slices == ()
    # A state that whole contributions led to has nobody to blame.
    assert bench.gathering.note_astray(5) == []


def test_a_slice_whose_owner_is_gone_is_summed_here(bench: Bench) -> None:
    bench.update()
    names = bench.names()
    bench.gathering.handle(SlicesSummed(0, ((bench.own_place, names[bench.own_place]),)), 0.0)
    gone = (bench.own_place + 1) % 3
    bench.store.release((names[gone].blob_id,), ())
    bench.hear(bench.statement(names))
    bench.update()
    bench.update()
    bench.now = OWNER_SECONDS + 1.0
    (order,) = sums_of(bench.update())
    assert not bench.is_whole()
    assert order.slices == (gone,)
    bench.gathering.handle(SlicesSummed(0, ((gone, names[gone]),)), bench.now)
    bench.update()
    assert bench.is_whole()


def test_nothing_is_asked_while_nobody_is_there_and_at_once_when_somebody_comes(bench: Bench) -> None:
    assert asked_of(bench.update()) == []
    assert bench.gathering.next_wake(0.0) is not None
    bench.now = 0.5
    bench.connect(bench.others[1])
    # No authority can be reached; others may have heard.
    assert asked_of(bench.update()) == [bench.others[1].peer_id]
    bench.courier.connected.clear()
    bench.gathering.handle(PeerLost(bench.others[1].peer_id, "closed"), 0.6)
    assert asked_of(bench.update()) == []


def test_gathering_stalls_only_while_nothing_moves_and_nothing_is_summed(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, ratio=0)
    bench.lose(bench.members[0])
    assert not bench.gathering.is_stalled(1e9)
    bench.update()
    assert bench.gathering.next_wake(0.0) == GATHER_SECONDS_MAX
    assert not bench.gathering.is_stalled(GATHER_SECONDS_MAX - 0.1)
    assert bench.gathering.is_stalled(GATHER_SECONDS_MAX)
    bench.update(is_over=True)
    assert not bench.gathering.is_stalled(1e9)
    summing = Bench(make_run)
    assert len(sums_of(summing.update())) == 1
    summing.now = 100.0
    summing.update()
    assert not summing.gathering.is_stalled(100.0)
    assert summing.gathering.progress().source_count == 0


def test_names_that_are_heard_twice_are_stored_once(bench: Bench) -> None:
    bench.update()
    statement = bench.statement(bench.names())
    told = bench.hear(statement, statement)
    assert len([effect for effect in told if isinstance(effect, StoreRecord)]) == 1


def test_names_that_do_not_come_are_asked_for_again_in_time(bench: Bench) -> None:
    bench.connect(bench.others[1])
    assert asked_of(bench.update()) == [bench.others[1].peer_id]
    wake = bench.gathering.next_wake(bench.now)
    assert wake is not None
    assert wake <= ASK_SECONDS
    bench.now = wake
    assert asked_of(bench.update()) == [bench.others[1].peer_id]
