import numpy as np
import pytest

from pulsenet import limits
from pulsenet.errors import LocalProtocolError
from pulsenet.outer.flush import TensorFlush, cut_values
from pulsenet.outer.gate import correct_delta, correct_delta_twin, gate_entries, gate_entries_twin
from pulsenet.tensors.bf16 import cast_to_bf16_bits_twin

SPECIAL_BITS = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000,
    0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FC10000,
]  # fmt: skip


def values(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


@pytest.mark.parametrize(("step", "round_sent"), [(-3e-6, 652), (3e-6, 1303)])
def test_a_small_step_is_held_back_until_it_would_change_the_weight(step: float, round_sent: int) -> None:
    """A-LOC-1: half a BF16 step below 1 is 2^-9, above it 2^-8."""
    theta, residual = values(1.0), values(0.0)
    for round_index in range(1, round_sent + 1):
        residual += values(-step)  # a pseudo-gradient is the start minus the end
        sent = gate_entries(theta, theta, residual, tensor_index=0)
        assert len(sent) == (round_index == round_sent), round_index
    assert sent.values.tolist() == residual.tolist()


def test_the_gate_compares_bits_so_a_change_of_zeros_sign_is_sent() -> None:
    """The corrected -0 turns a weight of -0 into +0: equal as floats, another pattern in BF16."""
    entries = gate_entries(values(0.0, -0.0), values(0.0, 0.0), values(-0.0, -0.0), tensor_index=3)
    assert entries.tensor_index == 3
    assert entries.indices is not None
    assert entries.indices.tolist() == [1]


def test_weights_on_and_beside_ties_pass_where_their_casts_differ() -> None:
    highs, lows = range(0x3F80, 0x3F84), (0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    bits = np.array([high << 16 | low for high in highs for low in lows], np.uint32)
    theta, moved = (np.ascontiguousarray(grid).ravel().view(np.float32) for grid in np.meshgrid(bits, bits))
    # Within a factor of two of each other, so the difference is exact.
    entries = gate_entries(theta, theta, theta - moved, tensor_index=0)
    assert entries.indices is not None
    expected = np.flatnonzero(cast_to_bf16_bits_twin(theta) != cast_to_bf16_bits_twin(moved))
    assert entries.indices.tolist() == expected.tolist()


def test_both_ends_of_a_tensor_are_gated() -> None:
    theta = np.ones(5, np.float32)
    entries = gate_entries(theta, values(2.0, 1.0, 1.0, 1.0, 2.0), np.zeros(5, np.float32), tensor_index=0)
    assert entries.indices is not None
    assert entries.indices.tolist() == [0, 4]


def test_residual_joins_the_delta_in_fp32() -> None:
    corrected = correct_delta(values(1.0), values(1.0 - 2**-24), values(1e-10))
    assert corrected[0] == np.float32(1e-10) + np.float32(2**-24)


def test_the_result_may_be_written_over_the_residual() -> None:
    residual = values(0.5, -0.5)
    out = correct_delta(values(2.0, 2.0), values(1.0, 3.0), residual, out=residual)
    assert out is residual
    assert residual.tolist() == [1.5, -1.5]


def test_special_values_meet_each_other_as_the_twin_says() -> None:
    bits = np.array(SPECIAL_BITS, np.uint32)
    grid = np.stack(np.meshgrid(bits, bits, bits)).reshape(3, -1)
    theta, local, residual = (np.ascontiguousarray(row).view(np.float32) for row in grid)
    assert gate_entries(theta, local, residual, tensor_index=0).same_as(
        gate_entries_twin(theta, local, residual, tensor_index=0)
    )
    mine, twin = correct_delta(theta, local, residual), correct_delta_twin(theta, local, residual)
    assert np.array_equal(mine.view(np.uint32), twin.view(np.uint32))


def test_a_tensor_larger_than_a_block_is_gated_like_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    theta = generator.standard_normal(5000).astype(np.float32)
    local = theta - generator.standard_normal(5000).astype(np.float32) * np.float32(0.01)
    residual = np.zeros(5000, np.float32)
    whole = gate_entries(theta, local, residual, tensor_index=0)
    for block_elements in (1, 7, 2048, 4999):
        monkeypatch.setattr(limits, "BLOCK_ELEMENTS", block_elements)
        assert gate_entries(theta, local, residual, tensor_index=0).same_as(whole)
    assert 0 < len(whole) < 5000


def test_what_has_its_turn_passes_whole_and_the_gate_decides_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(2)
    theta = generator.standard_normal(5000).astype(np.float32)
    local = theta - generator.standard_normal(5000).astype(np.float32) * np.float32(0.001)
    local[1500] = theta[1500]
    residual = np.zeros(5000, np.float32)
    plain = gate_entries(theta, local, residual, tensor_index=0)
    flush = TensorFlush((slice(1000, 2000), slice(4000, 5000)), 2)
    found = gate_entries(theta, local, residual, tensor_index=0, flush=flush)
    assert found.same_as(gate_entries_twin(theta, local, residual, tensor_index=0, flush=flush))
    assert plain.indices is not None
    assert found.indices is not None
    is_whole = np.zeros(5000, np.bool_)
    for part in flush.parts:
        is_whole[part] = True
    mask = is_whole[found.indices]
    assert found.indices[mask].tolist() == np.flatnonzero(is_whole).tolist()
    corrected = correct_delta(theta, local, residual)
    assert np.array_equal(found.values[mask], cut_values(corrected[is_whole], 2))
    assert found.indices[~mask].tolist() == [index for index in plain.indices.tolist() if not is_whole[index]]
    assert np.array_equal(found.values[~mask], corrected[found.indices[~mask]])
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 500)
    assert gate_entries(theta, local, residual, tensor_index=0, flush=flush).same_as(found)


def test_an_empty_tensor_sends_nothing() -> None:
    empty = np.zeros(0, np.float32)
    assert len(gate_entries(empty, empty, empty, tensor_index=0)) == 0


def test_arrays_of_other_lengths_are_refused() -> None:
    with pytest.raises(LocalProtocolError):
        gate_entries(values(1.0), values(1.0, 2.0), values(0.0), tensor_index=0)
    with pytest.raises(LocalProtocolError):
        correct_delta(values(1.0), values(1.0), values(0.0), out=np.zeros(2, np.float32))
