"""BF16 as bits: the cast from FP32, and the way back (SPEC codec, "Floats and the ordered integer").

Nothing here does float arithmetic, so NaN payloads, signed zeros and subnormals survive.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pulsenet.errors import LocalProtocolError
from pulsenet.tensors.jit import compile_loop

UInt16s = npt.NDArray[np.uint16]
UInt32s = npt.NDArray[np.uint32]


@compile_loop
def _cast_loop(bits: UInt32s, out: UInt16s) -> None:
    for i in range(bits.size):
        value = bits[i]
        if (value & 0x7FFFFFFF) > 0x7F800000:
            out[i] = (value >> 16) | 0x0040
        else:
            out[i] = (value + 0x7FFF + ((value >> 16) & 1)) >> 16


def cast_to_bf16_bits_twin(values: npt.NDArray[np.float32]) -> UInt16s:
    """Define :func:`cast_to_bf16_bits` in numpy."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    high = bits >> np.uint32(16)
    # A NaN near the top of the range may wrap in the sum; np.where then takes the other branch.
    rounded = (bits + (np.uint32(0x7FFF) + (high & np.uint32(1)))) >> np.uint32(16)
    return np.where(is_nan, high | np.uint32(0x0040), rounded).astype(np.uint16)


def cast_to_bf16_bits(values: npt.NDArray[np.float32]) -> UInt16s:
    """Return the BF16 bits of ``values``, same shape: round to nearest even on the bits.

    A NaN becomes ``(bits >> 16) | 0x0040``: its payload's upper part stays and it cannot turn into infinity.

    Raises:
        LocalProtocolError: ``values`` is not float32.
    """
    if values.dtype != np.dtype(np.float32):
        raise LocalProtocolError(f"cast to BF16 takes float32, not {values.dtype}")
    bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    out = np.empty(bits.size, np.uint16)
    _cast_loop(bits, out)
    return out.reshape(values.shape)


def bits_to_float32(bits: UInt16s) -> npt.NDArray[np.float32]:
    """Return the FP32 values that BF16 ``bits`` stand for, same shape; exact for every input."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
