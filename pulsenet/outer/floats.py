"""FP32 as every backend must do it (SPEC outer, "Arithmetic").

Each operation is rounded by itself: no fused multiply-add, no reciprocal for a division, subnormals kept. What IEEE
754 leaves open is the pattern of a NaN, so a result that is NaN is always written as ``NAN_BITS``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet.errors import LocalProtocolError

FP32s = npt.NDArray[np.float32]

NAN_BITS: Final = 0x7FC00000
"""The one NaN that results hold: backends differ in the payload and sign they would make."""


def fp32_to_bits(value: float) -> int:
    """Return the bits of ``value`` rounded to FP32: how constants are signed."""
    return int(np.float32(value).view(np.uint32))


def fp32_from_bits(bits: int) -> np.float32:
    """Return the FP32 value of ``bits``.

    Raises:
        LocalProtocolError: not 32 bits.
    """
    if not 0 <= bits < 1 << 32:
        raise LocalProtocolError(f"{bits:#x} is not the bits of an FP32 value")
    return np.uint32(bits).view(np.float32)


def settle_nans(values: FP32s) -> FP32s:
    """Write every NaN of ``values`` as ``NAN_BITS``, in place, and return them."""
    is_nan = np.isnan(values)
    if is_nan.any():
        values.view(np.uint32)[is_nan] = NAN_BITS
    return values


def check_flat(values: FP32s, size: int | None = None) -> None:
    """Refuse what the loops could not walk.

    Raises:
        LocalProtocolError: not a flat contiguous FP32 array, or not of ``size`` elements.
    """
    if values.dtype != np.dtype(np.float32) or values.ndim != 1 or not values.flags.c_contiguous:
        raise LocalProtocolError(f"a flat contiguous float32 array is needed, not {values.ndim}-d {values.dtype}")
    if size is not None and values.size != size:
        raise LocalProtocolError(f"{values.size} elements beside {size}")
