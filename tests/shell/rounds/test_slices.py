"""Rounds summed by slice through a daemon: the bits of whole contributions, and refusals that move nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_trainers import Trainer, run_locally, run_rounds

from pulsenet import limits
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest, PeerId
from pulsenet.local import rounds_protocol as local
from pulsenet.node.effects import Fate
from pulsenet.outer.contribution import Entries
from pulsenet.outer.settings import Algorithm, Combination, OuterSettings
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.training import slice_work
from pulsenet.training.exchange import Outcome
from pulsenet.training.round_blobs import BlobSpool
from pulsenet.training.slice_work import SlicedAggregate, is_content_fault
from pulsenet.wire.sections import BlobCutter, find_slice_range

SETTINGS = OuterSettings(inner_steps=3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough sections in a small model that every slice has some."""
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 32)


def key(index: int) -> PeerId:
    return PeerId(bytes([index]) * 32)


@pytest.fixture
def sliced_run(small_run: Any) -> type[Any]:
    """A small run whose first node is an authority: it names all slices; the others sum their own."""

    class SlicedRun(small_run):  # type: ignore[misc]
        def __init__(self, daemons: list[Any]) -> None:
            self.found: dict[int, dict[int, set[local.SliceBlob]]] = {}
            self.spoil: Callable[[local.StepOrder], local.StepOrder] = lambda order: order
            super().__init__(daemons)

        def step_order(self, index: int, round_index: int) -> Any:
            step = super().step_order(index, round_index)
            found = self.found.setdefault(round_index, {})
            if len(found) == len(step.members) and all(len(said) == 1 for said in found.values()):
                slices = tuple(next(iter(found[place])) for place in sorted(found))
                return step if index == 0 else self.spoil(replace(step, slices=slices))
            return self.sum_order(index, step)

        def sum_order(self, index: int, step: local.StepOrder) -> local.SumOrder:
            count = len(step.members)
            places = range(count) if index == 0 else [index]
            wanted = []
            for place in places:
                ranges = () if index == 0 else self.find_ranges(step, place)
                wanted.append(local.WantedSlice(place, place == index, ranges))
            return local.SumOrder(step.round_index, step.base_state_root, step.members, tuple(wanted))

        def find_ranges(self, step: local.StepOrder, place: int) -> tuple[local.ByteRange, ...]:
            ranges = []
            for member in step.members:
                cutter = BlobCutter()
                cutter.feed(self.daemons[0].blobs[member.blob_id])
                cutter.finish()
                ranges.append(local.ByteRange(*find_slice_range(cutter.chunk_list, place, len(step.members))))
            return tuple(ranges)

        def hear(self, index: int, message: Any) -> None:
            with self.mutex:
                if isinstance(message, local.Summed):
                    found = self.found.setdefault(message.round_index, {})
                    for each in message.slices:
                        found.setdefault(each.slice_index, set()).add(each)
                    members = len(self.receipts[message.round_index].members)
                    spoken = self.spoken = getattr(self, "spoken", set()) | {(message.round_index, index)}
                    if len({i for r, i in spoken if r == message.round_index}) == members:
                        for other, daemon in enumerate(self.daemons):
                            daemon.order(self.step_order(other, message.round_index))
                    return
                super().hear(index, message)

    return SlicedRun


MakeTrainers = Callable[..., tuple[Any, list[Trainer]]]


@pytest.fixture
def make_trainers(make_daemon: Any, connect: Any, sliced_run: Any) -> MakeTrainers:
    def make(settings: OuterSettings = SETTINGS) -> tuple[Any, list[Trainer]]:
        daemons = [make_daemon(settings, peer_id=key(index)) for index in range(3)]
        run = sliced_run(daemons)
        return run, [Trainer(connect(daemon, order_seconds=30.0), index) for index, daemon in enumerate(daemons)]

    return make


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        OuterSettings(algorithm=Algorithm.DILOCO, inner_steps=3),
        OuterSettings(algorithm=Algorithm.DILOCO, inner_steps=3, combination=Combination.MEDIAN),
        OuterSettings(inner_steps=3, flush_interval=2, flush_mantissa_bits=1),
    ],
    ids=["pulseloco", "diloco", "median", "flushes"],
)
def test_rounds_by_slice_have_the_bits_of_rounds_in_one_process(
    make_trainers: MakeTrainers, settings: OuterSettings
) -> None:
    run, trainers = make_trainers(settings)
    run_rounds(trainers, 3)
    assert [trainer.bits() for trainer in trainers] == run_locally(3, 3, settings)
    assert {report.outcome for trainer in trainers for report in trainer.reports} == {Outcome.COUNTED}
    # Owners and the authority found the same names.
    assert [{len(said) for said in found.values()} for found in run.found.values()] == [{1}] * 3
    stepped = [message for message in run.daemons[1].said if isinstance(message, local.Stepped)]
    assert len(stepped) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda order: replace(order, slices=order.slices[:2]),
        lambda order: replace(order, slices=order.slices[::-1]),
        lambda order: replace(order, slices=(order.slices[1], *order.slices[1:])),
        lambda order: replace(
            order, slices=tuple(replace(each, slice_index=n) for n, each in enumerate(order.slices[::-1]))
        ),
    ],
    ids=["short", "reversed", "twice", "moved"],
)
def test_slices_that_are_not_those_of_the_round_move_nothing(make_trainers: MakeTrainers, spoil: Any) -> None:
    run, trainers = make_trainers()
    run_rounds(trainers, 1)
    spoiled: list[local.StepOrder] = []

    def spoil_once(order: local.StepOrder) -> local.StepOrder:
        if order.round_index != 1 or spoiled:
            return order
        spoiled.append(order)
        return spoil(order)  # type: ignore[no-any-return]

    run.spoil = spoil_once
    for daemon in run.daemons[1:]:

        def again(message: Any, daemon: Any = daemon, heard: Any = daemon.on_said) -> None:
            if isinstance(message, local.StepFailed):
                daemon.order(replace(spoiled[0], slices=()))
            heard(message)

        daemon.on_said = again
    run_rounds(trainers, 1)
    failed = [m for daemon in run.daemons for m in daemon.said if isinstance(m, local.StepFailed)]
    assert failed == [local.StepFailed(1, "slices")]
    assert [trainer.bits() for trainer in trainers] == run_locally(3, 2, SETTINGS)


def refuse_of(run: Any, trainers: list[Trainer], change: Callable[[local.SumOrder], local.SumOrder]) -> str:
    """Let the second trainer sum something else first; return why it does not."""
    run_rounds(trainers, 1)
    daemon, made, changed = run.daemons[1], run.sum_order, []

    def order_wrongly(index: int, step: local.StepOrder) -> local.SumOrder:
        order = made(index, step)
        if index == 1 and not changed:
            changed.append(order)
            return change(order)
        return order  # type: ignore[no-any-return]

    heard = daemon.on_said

    def order_again(message: Any) -> None:
        if isinstance(message, local.SumRefused):
            daemon.order(changed[0])
        heard(message)

    run.sum_order, daemon.on_said = order_wrongly, order_again
    run_rounds(trainers, 1)
    assert [trainer.bits() for trainer in trainers] == run_locally(3, 2, SETTINGS)
    refused = daemon.last(local.SumRefused)
    assert refused.round_index == change(changed[0]).round_index
    return str(refused.reason)


def change_member(order: local.SumOrder, **changes: Any) -> local.SumOrder:
    return replace(order, members=(replace(order.members[0], **changes), *order.members[1:]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda order: replace(order, round_index=7), "base"),
        (lambda order: replace(order, base_state_root=Digest(bytes(32))), "base"),
        (lambda order: change_member(order, blob_id=Digest(bytes(32))), "not-found"),
        (lambda order: change_member(order, scale_bits=0x40000000), "decode"),
        (lambda order: replace(order, slices=(replace(order.slices[0], ranges=()),)), "decode"),
        (lambda order: replace(order, slices=(replace(order.slices[0], slice_index=2),)), "decode"),
    ],
    ids=["round", "base", "lost", "scale", "ranges", "place"],
)
def test_sums_that_cannot_be_made_are_refused_and_move_nothing(
    make_trainers: MakeTrainers, change: Any, reason: str
) -> None:
    run, trainers = make_trainers()
    assert refuse_of(run, trainers, change) == reason


def test_an_aggregate_is_read_in_order_once() -> None:
    found = SlicedAggregate(iter(["first", "second"]), 3)  # type: ignore[list-item]
    with pytest.raises(LocalProtocolError, match="the next is 0"):
        found.entries(1)
    assert [found.entries(0), found.entries(1)] == ["first", "second"]
    assert found.contributor_count == 3


def test_faults_of_content_are_told_from_those_of_the_connection() -> None:
    assert all(is_content_fault(code) for code in ("patch-count", "contribution-base", "shape", "slice-header"))
    assert not any(is_content_fault(code) for code in ("framing", "handoff-size", "message-unknown"))


def test_a_sum_that_is_not_finite_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table([TensorSpec("w", "F32", (2,))])
    work = slice_work.SliceWork(table, SETTINGS, spool_directory=None, run_blocks=map)
    entries = Entries(0, None, np.array([1.0, np.inf], np.float32))
    monkeypatch.setattr(slice_work, "read_slices", lambda *arguments, **options: iter([entries]))
    member = local.CountedMember(key(1), 0x3F800000, Digest(bytes(32)), 1)
    slices = (local.SliceBlob(0, Digest(bytes(32)), 1),)
    order = local.StepOrder(0, Digest(bytes(32)), Fate.MISSED, "", (member,), slices)
    connection: Any = SimpleNamespace(fetch_blob=lambda blob_id, size_bytes: [b"x"])
    spool = BlobSpool(None)
    with pytest.raises(RemoteProtocolError, match="not finite") as raised:
        work.open(connection, spool, order, Digest(bytes(32)), [np.zeros(2, np.float32)])
    assert raised.value.code == "slices"
    spool.close()
