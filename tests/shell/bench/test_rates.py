"""Timing repeats as often as it says, and memory work touches everything."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.tensors.params import ParameterTable
from pulsenetd.bench import rates
from pulsenetd.bench.pairs import Pair
from pulsenetd.bench.rates import (
    REPEATS_MAX,
    REPEATS_MIN,
    all_cores,
    compare_blocks,
    copy_memory,
    count_cores,
    cut_blocks,
    measure_seconds,
    one_core,
    read_pair,
)


def test_quick_work_is_repeated_up_to_a_limit_and_prepared_each_time() -> None:
    calls: list[str] = []
    seconds = measure_seconds(lambda: calls.append("work"), seconds=1000.0, prepare=lambda: calls.append("prepare"))
    assert calls == ["prepare", "work"] * REPEATS_MAX
    assert 0 <= seconds < 1000


def test_short_measurements_are_still_repeated() -> None:
    calls: list[str] = []
    measure_seconds(lambda: calls.append("work"), seconds=1e-3)
    assert len(calls) >= REPEATS_MIN


def test_work_that_takes_as_long_as_the_budget_is_done_once() -> None:
    calls: list[str] = []
    measure_seconds(lambda: calls.append("work"), seconds=1e-12)
    assert len(calls) == 1


def test_the_clock_given_is_the_one_that_counts() -> None:
    ticks = iter([0.0, 5.0, 10.0, 12.0, 20.0, 29.0])
    assert measure_seconds(lambda: None, seconds=15.0, clock=lambda: next(ticks)) == 2.0


def test_one_core_works_in_the_calling_thread_and_all_cores_in_others() -> None:
    def name_thread(_: int) -> str:
        return threading.current_thread().name

    here = threading.current_thread().name
    with one_core() as run_blocks:
        assert set(run_blocks(name_thread, range(8))) == {here}
    with all_cores() as run_blocks:
        assert here not in set(run_blocks(name_thread, range(8)))
    assert count_cores() >= 1


def test_memory_work_goes_through_both_versions(
    mixed_table: ParameterTable, make_pair: Callable[[ParameterTable, float], Pair]
) -> None:
    pair = make_pair(mixed_table, 0.1)
    out = np.empty_like(pair.old)
    with all_cores() as run_blocks:
        copy_memory(pair, out, run_blocks)
        read_pair(pair, run_blocks)
        compare_blocks(cut_blocks(pair), run_blocks)
    assert np.array_equal(out, pair.old)


def test_blocks_to_compare_are_all_of_both_versions_in_tasks_of_some_size(
    mixed_table: ParameterTable, make_pair: Callable[[ParameterTable, float], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 100)
    monkeypatch.setattr(rates, "TASK_SIZE_BYTES", 500)
    pair = make_pair(mixed_table, 0.1)
    tasks = cut_blocks(pair)
    assert all(sum(old.nbytes for old, _ in task) >= 500 for task in tasks[:-1])
    assert max(old.size for task in tasks for old, _ in task) <= 100
    for version in range(2):
        assert sum(blocks[version].nbytes for task in tasks for blocks in task) == mixed_table.size_bytes
    assert any(not np.array_equal(*blocks) for task in tasks for blocks in task)
