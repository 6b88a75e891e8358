"""Windows agree with what strided views do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsenet.errors import StructureError
from pulsenet.serving.vllm.windows import Window, find_shared, find_uncovered, make_window

SOURCE = np.arange(6 * 8 * 4).reshape(6, 8, 4)


def view_window(view: Any, target: Any, memory: Any) -> Window | None:
    """Return the window of a numpy view of ``SOURCE`` and one of ``memory``."""
    item = SOURCE.itemsize
    return make_window(
        source_offset=(view.__array_interface__["data"][0] - SOURCE.__array_interface__["data"][0]) // item,
        source_strides=[stride // item for stride in view.strides],
        target_offset=(target.__array_interface__["data"][0] - memory.__array_interface__["data"][0]) // item,
        target_strides=[stride // item for stride in target.strides],
        sizes=view.shape,
    )


@st.composite
def slices(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw one contiguous range per dimension of ``SOURCE``."""
    ranges = []
    for size in SOURCE.shape:
        first = draw(st.integers(0, size - 1))
        ranges.append(slice(first, draw(st.integers(first + 1, size))))
    return tuple(ranges)


@given(
    ranges=slices(),
    order=st.permutations(range(3)),
    wanted=st.sets(st.integers(0, SOURCE.size - 1), max_size=80),
    index_dtype=st.sampled_from([np.uint32, np.uint64]),
)
def test_elements_go_where_a_copy_of_the_view_would_put_them(
    ranges: tuple[Any, ...], order: list[int], wanted: set[int], index_dtype: Any
) -> None:
    view = SOURCE[ranges].transpose(order)
    memory = np.full(view.size + 7, -1)
    target = memory[5 : 5 + view.size].reshape(view.shape)
    window = view_window(view, target, memory)
    assert window is not None
    target[...] = view
    indices = np.array(sorted(wanted), dtype=index_dtype)
    chosen, positions = window.route(indices)
    inside = set(view.reshape(-1).tolist())
    assert indices[chosen].tolist() == [index for index in sorted(wanted) if index in inside]
    assert memory[positions].tolist() == indices[chosen].tolist()
    assert window.element_count == view.size


@given(cuts=st.lists(slices(), max_size=4))
def test_what_no_window_covers_is_counted(cuts: list[tuple[Any, ...]]) -> None:
    covered: set[int] = set()
    windows = []
    for ranges in cuts:
        view = SOURCE[ranges]
        memory = np.zeros(view.shape, dtype=SOURCE.dtype)
        window = view_window(view, memory, memory)
        assert window is not None
        windows.append(window)
        covered |= set(view.reshape(-1).tolist())
    assert find_uncovered(SOURCE.size, windows) == SOURCE.size - len(covered)


def test_shards_of_rows_and_columns_are_counted_in_large_units() -> None:
    """A billion elements cost no billion flags."""
    rows, columns = 1 << 20, 1 << 20
    halves = [
        make_window(
            source_offset=half * columns // 2,
            source_strides=(columns, 1),
            target_offset=0,
            target_strides=(columns // 2, 1),
            sizes=(rows, columns // 2),
        )
        for half in range(2)
    ]
    assert find_uncovered(rows * columns, [half for half in halves if half is not None]) == 0
    assert halves[0] is not None
    assert find_uncovered(rows * columns, halves[:1]) == rows * columns // 2


def test_a_whole_tensor_becomes_one_dimension() -> None:
    memory = np.zeros(SOURCE.size + 10, dtype=SOURCE.dtype)
    window = view_window(SOURCE, memory[10:].reshape(SOURCE.shape), memory)
    assert window == Window(0, 10, (SOURCE.size,), (1,), (1,))
    assert find_uncovered(SOURCE.size, [window]) == 0


def test_a_scalar_and_nothing() -> None:
    """A-DT-2."""
    scalar = make_window(source_offset=0, source_strides=(), target_offset=3, target_strides=(), sizes=())
    assert scalar is not None
    assert scalar.element_count == 1
    chosen, positions = scalar.route(np.array([0], dtype=np.uint32))
    assert (chosen.tolist(), positions.tolist()) == ([0], [3])
    assert find_uncovered(1, [scalar]) == 0
    assert find_uncovered(1, []) == 1
    assert find_uncovered(0, []) == 0
    none = make_window(source_offset=0, source_strides=(5, 1), target_offset=0, target_strides=(5, 1), sizes=(0, 5))
    assert none is None


def test_indices_beyond_32_bits() -> None:
    """A-DT-4."""
    count = 2**33
    window = Window(count - 8, 0, (8,), (1,), (1,))
    chosen, positions = window.route(np.array([5, count - 8, count - 1], dtype=np.uint64))
    assert (chosen.tolist(), positions.tolist()) == ([1, 2], [0, 7])
    narrow = Window(2**32 - 4, 0, (4,), (1,), (1,))
    chosen, positions = narrow.route(np.array([2**31 + 5, 2**32 - 1], dtype=np.uint32))
    assert (chosen.tolist(), positions.tolist()) == ([1], [3])


def test_views_that_touch_an_element_twice_are_refused() -> None:
    spread = {"source_offset": 0, "target_offset": 0, "sizes": (4, 3)}
    with pytest.raises(StructureError, match="one element has two places"):
        make_window(source_strides=(0, 1), target_strides=(3, 1), **spread)
    with pytest.raises(StructureError, match="two elements share one place"):
        make_window(source_strides=(3, 1), target_strides=(1, 1), **spread)


@given(cuts=st.lists(st.tuples(st.integers(0, 2), slices()), max_size=4))
def test_elements_of_a_memory_with_two_owners_are_found(cuts: list[tuple[int, tuple[Any, ...]]]) -> None:
    owners: dict[int, set[int]] = {}
    windows = []
    for owner, ranges in cuts:
        view = SOURCE[ranges]
        source = np.zeros(view.shape, dtype=SOURCE.dtype)
        window = make_window(
            source_offset=0,
            source_strides=[stride // source.itemsize for stride in source.strides],
            target_offset=int(view.reshape(-1)[0]),
            target_strides=[stride // source.itemsize for stride in view.strides],
            sizes=view.shape,
        )
        assert window is not None
        windows.append((owner, window))
        for element in view.reshape(-1).tolist():
            owners.setdefault(element, set()).add(owner)
    clashes = [found for found in owners.values() if len(found) > 1]
    shared = find_shared(SOURCE.size, windows)
    assert (shared is not None) == bool(clashes)
    if shared is not None:
        assert any(set(shared) <= found for found in clashes)
