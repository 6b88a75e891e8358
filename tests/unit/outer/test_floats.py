import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.floats import NAN_BITS, check_flat, fp32_from_bits, fp32_to_bits, settle_nans


def test_constants_travel_as_bits() -> None:
    assert fp32_to_bits(0.7) == 0x3F333333
    assert fp32_to_bits(0.9) == 0x3F666666
    assert float(fp32_from_bits(0x3F333333)) == float(np.float32(0.7))


@pytest.mark.parametrize("bits", [-1, 1 << 32])
def test_what_is_not_32_bits_is_no_constant(bits: int) -> None:
    with pytest.raises(LocalProtocolError, match="not the bits"):
        fp32_from_bits(bits)


def test_every_nan_gets_one_pattern_and_nothing_else_moves() -> None:
    bits = np.array([0xFFC00001, 0x7F800001, 0x80000000, 0x7F800000, 1], np.uint32)
    settled = settle_nans(bits.view(np.float32).copy()).view(np.uint32)
    assert settled.tolist() == [NAN_BITS, NAN_BITS, 0x80000000, 0x7F800000, 1]


@pytest.mark.parametrize(
    "values", [np.zeros(3), np.zeros((1, 3), np.float32), np.zeros(6, np.float32)[::2], np.zeros(4, np.float32)]
)
def test_what_the_loops_cannot_walk_is_refused(values: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError):
        check_flat(values, 3)
