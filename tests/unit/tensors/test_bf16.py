import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.tensors.bf16 import (
    bits_to_float32,
    cast_to_bf16_bits,
    cast_to_bf16_bits_twin,
)

ALL_BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def cast(*fp32_bits: int) -> list[int]:
    return cast_to_bf16_bits(np.array(fp32_bits, np.uint32).view(np.float32)).tolist()


def test_every_bf16_value_survives_fp32_and_back_except_signalling_nans() -> None:
    back = cast_to_bf16_bits(bits_to_float32(ALL_BITS))
    is_nan = (ALL_BITS & 0x7FFF) > 0x7F80
    assert np.array_equal(back[~is_nan], ALL_BITS[~is_nan])
    assert np.array_equal(back[is_nan], ALL_BITS[is_nan] | 0x0040)


def test_ties_go_to_even_and_overflow_to_infinity() -> None:
    assert cast(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF) == [0x3F80, 0x3F82, 0x3F81, 0x3F80]
    assert cast(0x7F7FFFFF, 0xFF7FFFFF) == [0x7F80, 0xFF80]


def test_nan_stays_nan_whatever_its_payload() -> None:
    assert cast(0x7F800001, 0xFF800001, 0xFFFFFFFF, 0x7FC00000) == [0x7FC0, 0xFFC0, 0xFFFF, 0x7FC0]


def test_signed_zero_and_subnormals_keep_their_bits() -> None:
    assert cast(0x80000000, 0x00000001, 0x00010000, 0x80018000) == [0x8000, 0x0000, 0x0001, 0x8002]


def test_shape_is_kept_for_scalars_empty_and_strided_arrays() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(bits_to_float32(cast_to_bf16_bits(values.T)), values.T)
    assert cast_to_bf16_bits(np.array(1.0, np.float32)).shape == ()
    assert cast_to_bf16_bits(np.zeros((0, 5), np.float32)).shape == (0, 5)


def test_cast_of_another_dtype_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="float64"):
        cast_to_bf16_bits(np.zeros(1, np.float64))  # type: ignore[arg-type]


def test_loop_equals_its_twin_around_every_rounding_boundary() -> None:
    high = np.arange(0, 1 << 16, 7, dtype=np.uint32) << np.uint32(16)
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (high | np.uint32(low)).view(np.float32)
        assert np.array_equal(cast_to_bf16_bits(values), cast_to_bf16_bits_twin(values))
