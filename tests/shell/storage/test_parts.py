"""The queue between the local server and the encoder."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from pulsenet.errors import RemoteProtocolError
from pulsenet.local.changed_parts import ChangedPartWriter
from pulsenet.local.parts import PartLayout
from pulsenet.local.shared_memory import Region
from pulsenet.tensors.params import make_table
from pulsenetd.storage import parts
from pulsenetd.storage.parts import ChangedPart, Part, PartQueue, PublishFailedError


def open_count() -> int:
    """Count the snapshots' memories this process holds; a mapping keeps a descriptor of its own."""
    inodes = set()
    for entry in list(os.scandir("/proc/self/fd")):
        if os.path.lexists(entry.path) and "memfd:pulsenet" in os.readlink(entry.path):
            inodes.add(os.stat(entry.path).st_ino)
    return len(inodes)


@pytest.fixture
def model(kit: Any) -> Any:
    return kit.Model()


def test_parts_come_out_in_order_and_each_is_let_go_when_the_next_is_asked_for(model: Any) -> None:
    before = open_count()
    queue = model.parts()
    count = len(model.table.tensors)
    assert queue.is_whole
    assert queue.waiting_count == count
    for index, part in enumerate(queue.take()):
        assert part.tensor_indices == range(index, index + 1)
        assert part.view(index).tobytes() == model.table.view(model.bytes, index).tobytes()
        assert queue.waiting_count == count - index - 1
        assert open_count() == before + count - index
    assert open_count() == before
    assert index == count - 1


def test_a_table_without_tensors_is_whole_at_once() -> None:
    queue = PartQueue(make_table([]))
    assert queue.is_whole
    assert list(queue.take()) == []


def test_the_worker_waits_for_a_part_and_says_when_it_took_one(model: Any) -> None:
    taken = threading.Event()
    queue = PartQueue(model.table, taken.set)
    seen: list[range] = []
    worker = threading.Thread(target=lambda: seen.extend(part.tensor_indices for part in queue.take()))
    worker.start()
    worker.join(0.05)
    assert worker.is_alive()
    assert not taken.is_set()
    for index in range(len(model.table.tensors)):
        model.put_part(queue, index)
    worker.join(10)
    assert taken.is_set()
    assert seen == [range(index, index + 1) for index in range(len(model.table.tensors))]
    assert queue.waited_seconds >= 0.04


@pytest.mark.parametrize("code", ["cut_short", "dropped"])
def test_a_snapshot_that_will_never_be_whole_wakes_the_worker_and_drops_its_memory(model: Any, code: str) -> None:
    before = open_count()
    queue = PartQueue(model.table)
    model.put_part(queue, 0)
    model.put_part(queue, 1)
    failures: list[str] = []
    reached = threading.Event()

    def work() -> None:
        try:
            for part in queue.take():
                if part.tensor_indices.start == 1:
                    reached.set()
        except PublishFailedError as error:
            failures.append(error.code)

    worker = threading.Thread(target=work)
    worker.start()
    assert reached.wait(10)
    queue.cut("cut_short") if code == "cut_short" else queue.close()
    worker.join(10)
    assert failures == [code]
    model.put_part(queue, 2)
    assert queue.waiting_count == 0
    assert open_count() == before


def test_a_whole_snapshot_cannot_be_cut_but_dropped(model: Any) -> None:
    before = open_count()
    queue = model.parts()
    queue.cut("cut_short")
    assert queue.waiting_count == len(model.table.tensors)
    queue.close()
    assert open_count() == before
    with pytest.raises(PublishFailedError, match="dropped"):
        list(queue.take())


def test_a_process_that_hands_over_nothing_for_long_is_given_up(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SECONDS_MAX", 0.01)
    queue = PartQueue(model.table)
    with pytest.raises(PublishFailedError, match="too_slow"):
        list(queue.take())
    model.put_part(queue, 0)
    assert queue.waiting_count == 0


@pytest.mark.parametrize("tensor_count", [-1, 0, 99])
def test_a_part_of_no_or_of_too_many_tensors_is_refused(model: Any, tensor_count: int) -> None:
    with pytest.raises(RemoteProtocolError, match="handoff-part"):
        PartQueue(model.table).next_layout(tensor_count)


def seal_changes(model: Any, index: int = 0) -> tuple[Any, Any]:
    """Return layout and memory of a changed part of one tensor, of which one element changed."""
    layout, spec = PartLayout(model.table, index, 1), model.table.tensors[index]
    writer = ChangedPartWriter(layout)
    writer.write_listed(index, np.zeros(1, spec.index_dtype), np.zeros(1, spec.bits_dtype))
    return layout, Region.open_snapshot(*writer.seal())


def test_changed_parts_come_out_as_they_are(model: Any) -> None:
    before = open_count()
    queue = PartQueue(model.table)
    queue.base_number = 3
    queue.put_changed(*seal_changes(model))
    model.put_part(queue, 1)
    parts = queue.take()
    part = next(parts)
    assert isinstance(part, ChangedPart)
    assert [content.tensor_index for content in part.contents] == [0]
    del part
    assert isinstance(next(parts), Part)
    parts.close()
    queue.close()
    queue.put_changed(*seal_changes(model, 2))
    assert open_count() == before


def test_changed_parts_nobody_asked_for_or_that_hold_something_else_are_refused(model: Any) -> None:
    before = open_count()
    queue = PartQueue(model.table)
    with pytest.raises(RemoteProtocolError, match="whole parts were asked for"):
        queue.put_changed(*seal_changes(model))
    queue.base_number = 0
    layout, region = seal_changes(model)
    with pytest.raises(RemoteProtocolError, match="handoff-changes"):
        queue.put_changed(PartLayout(model.table, 0, 2), region)
    assert queue.waiting_count == 0
    del layout, region
    assert open_count() == before
