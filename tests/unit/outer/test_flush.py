import numpy as np
import pytest

from pulsenet import limits
from pulsenet.outer.flush import NO_FLUSH, FlushPlan, TensorFlush, cut_values
from pulsenet.outer.settings import OuterSettings
from pulsenet.tensors.params import ParameterTable, TensorSpec

TABLE = ParameterTable(
    (
        TensorSpec("a", "F32", (25,)),
        TensorSpec("b", "F32", (0,)),
        TensorSpec("c", "F32", (10,)),
        TensorSpec("d", "F32", ()),
    )
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of ``a``, none of ``b``, one of ``c`` and one of ``d``."""
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 10)


def list_turns(plan: FlushPlan, round_index: int) -> list[tuple[int, int, int]]:
    return [
        (index, part.start, part.stop)
        for index in range(len(TABLE.tensors))
        for part in plan.of(index, round_index).parts
    ]


def test_every_block_has_one_turn_in_as_many_rounds_as_the_interval() -> None:
    blocks = [(0, 0, 10), (0, 10, 20), (0, 20, 25), (2, 0, 10), (3, 0, 1)]
    for interval in (1, 2, 3, 7):
        plan = FlushPlan(TABLE, OuterSettings(flush_interval=interval))
        for start in (0, 5, 1_000_003):
            turns = [turn for round_index in range(start, start + interval) for turn in list_turns(plan, round_index)]
            assert sorted(turns) == blocks


def test_turns_spread_over_rounds_by_block_number() -> None:
    plan = FlushPlan(TABLE, OuterSettings(flush_interval=2, flush_mantissa_bits=3))
    assert list_turns(plan, 4) == [(0, 0, 10), (0, 20, 25), (3, 0, 1)]
    assert list_turns(plan, 5) == [(0, 10, 20), (2, 0, 10)]
    assert plan.of(0, 4).mantissa_bits == 3
    plan = FlushPlan(TABLE, OuterSettings(flush_interval=3))
    assert list_turns(plan, 6) == [(0, 0, 10), (2, 0, 10)]
    assert list_turns(plan, 7) == [(0, 10, 20), (3, 0, 1)]
    assert list_turns(plan, 8) == [(0, 20, 25)]


def test_without_an_interval_nothing_passes_whole() -> None:
    assert FlushPlan(TABLE, OuterSettings()).of(0, 0) is NO_FLUSH


def test_a_tensor_is_split_into_parts_that_cover_it_in_order() -> None:
    whole, rest = True, False
    assert list(NO_FLUSH.split(3)) == [(slice(0, 3), rest)]
    assert list(NO_FLUSH.split(0)) == []
    flush = TensorFlush((slice(0, 2), slice(5, 7)))
    assert list(flush.split(9)) == [
        (slice(0, 2), whole),
        (slice(2, 5), rest),
        (slice(5, 7), whole),
        (slice(7, 9), rest),
    ]
    assert list(flush.split(7))[-1] == (slice(5, 7), whole)


def test_a_cut_value_lies_toward_zero_and_what_is_cut_off_is_exact() -> None:
    values = np.array([1.75, -1.75, 3.1e-6, -0.0, 0.0, 1e-45, 2.0**-127 + 2.0**-149], np.float32)
    for bits in range(24):
        cut = cut_values(values, bits)
        rest = values - cut
        assert np.array_equal(cut + rest, values)
        assert (np.abs(cut) <= np.abs(values)).all()
        normal = np.abs(values) >= np.float32(2.0**-126)
        assert (np.abs(rest[normal]) < np.abs(values[normal]) * 2.0**-bits).all()
    assert cut_values(values, 1)[:2].tolist() == [1.5, -1.5]
    assert cut_values(values, 0)[:2].tolist() == [1.0, -1.0]
    assert cut_values(values, 23).view(np.uint32).tolist() == values.view(np.uint32).tolist()
