import numpy as np
import pytest

from pulsenet.tensors.bf16 import bits_to_float32
from pulsenet.tensors.floats import FLOAT_FORMATS, from_ordered, to_ordered
from pulsenet.tensors.params import ELEMENT_SIZES_BYTES

ALL_8 = np.arange(1 << 8, dtype=np.uint32).astype(np.uint8)
ALL_16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
SOME_32 = np.concatenate((ALL_16.astype(np.uint32) << np.uint32(16), ALL_16.astype(np.uint32)))


@pytest.mark.parametrize("patterns", [ALL_8, ALL_16], ids=["8", "16"])
def test_ordered_integer_is_a_bijection_on_all_patterns(patterns: np.ndarray) -> None:
    ordered = to_ordered(patterns)
    assert ordered.dtype == patterns.dtype
    assert np.array_equal(np.sort(ordered), patterns)
    assert np.array_equal(from_ordered(ordered), patterns)


def test_ordered_integer_of_fp32_comes_back() -> None:
    assert np.array_equal(from_ordered(to_ordered(SOME_32)), SOME_32)


def test_ordered_integer_rises_with_the_value() -> None:
    finite = ALL_16[(ALL_16 & 0x7FFF) < 0x7F80]
    values = bits_to_float32(finite[np.argsort(to_ordered(finite))])
    assert np.all(values[1:] >= values[:-1])
    numbers = np.array([-np.inf, -3.5, -1e-45, -0.0, 0.0, 1e-45, 1.0, np.inf], np.float32)
    ordered = to_ordered(numbers.view(np.uint32)).astype(np.int64)
    assert np.all(np.diff(ordered) > 0)


def test_zeros_are_neighbours_in_the_ordered_integer() -> None:
    assert to_ordered(np.array([0x8000, 0x0000], np.uint16)).tolist() == [0x7FFF, 0x8000]
    assert to_ordered(np.array([0x80, 0x00], np.uint8)).tolist() == [0x7F, 0x80]
    assert to_ordered(np.array([1 << 31, 0], np.uint32)).tolist() == [(1 << 31) - 1, 1 << 31]


def test_formats_fill_their_elements_and_put_1_at_the_bias() -> None:
    for dtype, number_format in FLOAT_FORMATS.items():
        assert number_format.element_bits == 8 * ELEMENT_SIZES_BYTES[dtype]
    ones = {"BF16": 0x3F80, "F16": 0x3C00, "F32": 0x3F800000, "F8_E4M3": 0x38, "F8_E5M2": 0x3C}
    for dtype, bits in ones.items():
        assert bits >> FLOAT_FORMATS[dtype].mantissa_bits == FLOAT_FORMATS[dtype].exponent_bias
