"""Whole tensors out of changed parts and the baseline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pulsenet.ids import Digest, Version
from pulsenet.local.changed_parts import ChangedPartWriter
from pulsenet.local.parts import PartLayout
from pulsenet.local.shared_memory import Region
from pulsenetd.storage import filling
from pulsenetd.storage.filling import FilledPart, Filler
from pulsenetd.storage.parts import ChangedPart, PublishFailedError
from pulsenetd.storage.rebuild import HeldVersion, Weights


def make_weights(model: Any) -> Weights:
    region = Region.create("test", model.table.layout_size_bytes)
    region.bytes[:] = model.bytes
    held = HeldVersion(Version(0, 1), Digest(bytes(32)), Digest(model.table.digest))
    return Weights(model.table, region, [], held)


def make_part(model: Any, write: Callable[[ChangedPartWriter, int], None], first: int, count: int) -> ChangedPart:
    layout = PartLayout(model.table, first, count)
    writer = ChangedPartWriter(layout)
    for index in layout.tensor_indices:
        write(writer, index)
    return ChangedPart(layout, Region.open_snapshot(*writer.seal()))


def list_changes(before: Any, model: Any) -> Callable[[ChangedPartWriter, int], None]:
    """Write every third tensor whole, and what changed in the others."""

    def write(writer: ChangedPartWriter, index: int) -> None:
        new = model.table.view(model.bytes, index)
        if index % 3 == 0:
            writer.write_whole(index, [new.view(np.uint8)])
            return
        indices = np.flatnonzero(model.table.view(before, index) != new).astype(model.table.tensors[index].index_dtype)
        writer.write_listed(index, indices, new[indices])

    return write


@pytest.mark.parametrize("cut", [[6], [1, 3, 2], [2, 4]])
def test_a_filled_part_is_the_new_weights(kit: Any, cut: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "COPY_ELEMENTS", 1000)
    model = kit.Model()
    weights = make_weights(model)
    before = model.bytes.copy()
    model.step(share=0.02)
    model.table.view(model.bytes, 2)[:] = model.table.view(before, 2)
    first = 0
    with ThreadPoolExecutor(2) as threads:
        filler = Filler(weights, threads.map)
        for count in cut:
            part = make_part(model, list_changes(before, model), first, count)
            filled = filler.fill(part)
            assert isinstance(filled, FilledPart)
            for index in filled.tensor_indices:
                assert np.array_equal(filled.view(index), model.table.view(model.bytes, index))
                assert (index in filled.unchanged) == (index in {2, 4} or (index == 5 and not changed(before, model)))
            part.close()
            first += count
    assert np.array_equal(weights.region.bytes, before)


def changed(before: Any, model: Any) -> bool:
    return bool(np.any(model.table.view(before, 5) != model.table.view(model.bytes, 5)))


def test_a_whole_part_is_left_as_it_is(kit: Any) -> None:
    part = next(kit.Model().parts().take())
    assert Filler(None, map).fill(part) is part


def test_without_a_baseline_nothing_can_be_filled(kit: Any) -> None:
    model = kit.Model()
    part = make_part(model, list_changes(model.bytes, model), 0, 6)
    with pytest.raises(PublishFailedError, match="other_base"):
        Filler(None, map).fill(part)


@pytest.mark.parametrize("indices", [[5, 4], [7, 7], [0, 12_000], [0xFFFFFFFF]])
def test_indices_out_of_order_twice_or_outside_are_refused(kit: Any, indices: list[int]) -> None:
    model = kit.Model()

    def write(writer: ChangedPartWriter, index: int) -> None:
        writer.write_listed(index, np.array(indices, np.uint32), np.zeros(len(indices), np.uint16))

    part = make_part(model, write, 0, 1)
    with pytest.raises(PublishFailedError, match="bad_changes"):
        Filler(make_weights(model), map).fill(part)
