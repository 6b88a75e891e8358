"""Float formats as bits: their fields, and the ordered integer (SPEC codec, "Floats and the ordered integer").

Nothing here does float arithmetic, so NaN payloads, signed zeros and subnormals survive. Patterns that a format
calls NaN or infinity are treated like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[Any]
"""Unsigned integers of the element's width."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Fields of a sign-magnitude format: the sign on top, then the exponent, then the mantissa."""

    mantissa_bits: int
    exponent_bits: int

    @property
    def element_bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def exponent_mask(self) -> int:
        """The exponent field's largest value, and the mask that cuts it out once the mantissa is shifted away."""
        return (1 << self.exponent_bits) - 1

    @property
    def exponent_bias(self) -> int:
        """Exponent field of the values from 1 up to 2."""
        return self.exponent_mask >> 1


FLOAT_FORMATS: Final[dict[str, FloatFormat]] = {
    "BF16": FloatFormat(mantissa_bits=7, exponent_bits=8),
    "F16": FloatFormat(mantissa_bits=10, exponent_bits=5),
    "F32": FloatFormat(mantissa_bits=23, exponent_bits=8),
    "F8_E4M3": FloatFormat(mantissa_bits=3, exponent_bits=4),
    "F8_E5M2": FloatFormat(mantissa_bits=2, exponent_bits=5),
}
"""Dtypes that have an ordered integer, and so the *plain* and *tight* codecs."""


def to_ordered(bits: Bits) -> Bits:
    """Map float bits to integers of the same width that rise with the value; -0 is just below +0.

    A bijection on all patterns of any unsigned width: in 16 bits, -0 is 0x7FFF and +0 is 0x8000.
    """
    sign = _sign_bit(bits)
    ordered: Bits = np.where(bits >= sign, ~bits, bits | sign).astype(bits.dtype, copy=False)
    return ordered


def from_ordered(ordered: Bits) -> Bits:
    """Undo :func:`to_ordered`."""
    sign = _sign_bit(ordered)
    bits: Bits = np.where(ordered >= sign, ordered & ~sign, ~ordered).astype(ordered.dtype, copy=False)
    return bits


def _sign_bit(bits: Bits) -> Any:
    return bits.dtype.type(1 << (bits.dtype.itemsize * 8 - 1))
