"""The gate: send an entry only if it would change the BF16 cast of its weight (SPEC outer, "Gate").

In their turn whole blocks pass it (``outer/flush.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.outer.contribution import Entries, Indices
from pulsenet.outer.floats import NAN_BITS, FP32s, check_flat, settle_nans
from pulsenet.outer.flush import NO_FLUSH, TensorFlush, cut_values
from pulsenet.tensors.bf16 import cast_to_bf16_bits_twin
from pulsenet.tensors.jit import compile_loop
from pulsenet.tensors.params import index_dtype

_TILE_ELEMENTS: Final = 2048
"""Elements worked on at once: all arrays of a tile stay in the first-level cache."""


def correct_delta_twin(theta: FP32s, local: FP32s, residual: FP32s) -> FP32s:
    """Define :func:`correct_delta` in numpy."""
    with np.errstate(all="ignore"):
        return settle_nans(residual + (theta - local))


@compile_loop
def _correct_loop(theta: FP32s, local: FP32s, residual: FP32s, out: FP32s, nan: np.float32) -> None:
    for i in range(theta.size):
        value = residual[i] + (theta[i] - local[i])
        out[i] = value if value == value else nan


def correct_delta(theta: FP32s, local: FP32s, residual: FP32s, *, out: FP32s | None = None) -> FP32s:
    """Return ``residual + (theta - local)``: the pseudo-gradient with what earlier rounds held back.

    Args:
        theta: Masters at the round's start, flat.
        local: Masters now.
        residual: What the gate held back so far.
        out: Where to write; may be ``residual`` itself.

    Raises:
        LocalProtocolError: arrays that are not flat FP32 of one length.
    """
    out = np.empty_like(theta) if out is None else out
    for values in (theta, local, residual, out):
        check_flat(values, theta.size)
    with np.errstate(all="ignore"):
        _correct_loop(theta, local, residual, out, np.uint32(NAN_BITS).view(np.float32))
    return out


def gate_entries_twin(
    theta: FP32s, local: FP32s, residual: FP32s, *, tensor_index: int, flush: TensorFlush = NO_FLUSH
) -> Entries:
    """Define :func:`gate_entries` in numpy."""
    corrected = correct_delta_twin(theta, local, residual)
    with np.errstate(all="ignore"):
        moved = settle_nans(theta - corrected)
    passes = cast_to_bf16_bits_twin(theta) != cast_to_bf16_bits_twin(moved)
    for part in flush.parts:
        passes[part] = True
        corrected[part] = cut_values(corrected[part], flush.mantissa_bits)
    indices = np.flatnonzero(passes)
    return Entries(tensor_index, indices.astype(index_dtype(theta.size)), corrected[indices])


@compile_loop
def _compare_casts(
    theta_bits: npt.NDArray[np.uint32], moved_bits: npt.NDArray[np.uint32], differs: npt.NDArray[np.uint8]
) -> None:
    """Write whether the BF16 casts differ. All constants are uint32, so that the loop fills vector registers."""
    magnitude, infinity, quiet = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x0040)
    half, one, low_bits = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
    for i in range(theta_bits.size):
        old, new = theta_bits[i], moved_bits[i]
        old_high, new_high = old >> low_bits, new >> low_bits
        old_cast = old_high | quiet if (old & magnitude) > infinity else (old + (half + (old_high & one))) >> low_bits
        new_cast = new_high | quiet if (new & magnitude) > infinity else (new + (half + (new_high & one))) >> low_bits
        differs[i] = old_cast != new_cast


@compile_loop
def _gate_loop(
    theta: FP32s,
    local: FP32s,
    residual: FP32s,
    nan: np.float32,
    tile_elements: int,
    out_indices: npt.NDArray[np.uint32],
    out_values: FP32s,
) -> int:
    """Write the sent positions and corrected values of one block; return their number."""
    corrected, moved = np.empty(tile_elements, np.float32), np.empty(tile_elements, np.float32)
    differs = np.empty(tile_elements, np.uint8)
    theta_bits, moved_bits = theta.view(np.uint32), moved.view(np.uint32)
    count = 0
    for start in range(0, theta.size, tile_elements):
        end = min(start + tile_elements, theta.size)
        tile_theta, tile_local, tile_residual = theta[start:end], local[start:end], residual[start:end]
        for i in range(end - start):
            value = tile_residual[i] + (tile_theta[i] - tile_local[i])
            value = value if value == value else nan
            corrected[i] = value
            value = tile_theta[i] - value
            moved[i] = value if value == value else nan
        _compare_casts(theta_bits[start:end], moved_bits, differs)
        for i in range(end - start):
            # Written always and counted only if sent: no branch to mispredict, and count <= start + i.
            out_indices[count] = start + i
            out_values[count] = corrected[i]
            count += int(differs[i])
    return count


def gate_entries(
    theta: FP32s, local: FP32s, residual: FP32s, *, tensor_index: int, flush: TensorFlush = NO_FLUSH
) -> Entries:
    """Return the entries of one tensor that pass the gate, without keeping the corrected pseudo-gradient.

    The bits do not depend on how the tensor is cut into blocks. Arguments as in :func:`correct_delta`.

    Args:
        theta: As there.
        local: As there.
        residual: As there.
        tensor_index: Of the tensor.
        flush: What passes whole in this round.

    Raises:
        LocalProtocolError: arrays that are not flat FP32 of one length.
    """
    for values in (theta, local, residual):
        check_flat(values, theta.size)
    dtype = index_dtype(theta.size)
    indices, values_sent = [np.empty(0, dtype)], [np.empty(0, np.float32)]
    for part, passes_whole in flush.split(theta.size):
        if passes_whole:
            corrected = correct_delta(theta[part], local[part], residual[part])
            indices.append(np.arange(part.start, part.stop, dtype=dtype))
            values_sent.append(cut_values(corrected, flush.mantissa_bits))
            continue
        for positions, sent in _gate_blocks(theta[part], local[part], residual[part]):
            indices.append(positions.astype(dtype) + dtype.type(part.start))
            values_sent.append(sent)
    return Entries(tensor_index, np.concatenate(indices), np.concatenate(values_sent))


def _gate_blocks(theta: FP32s, local: FP32s, residual: FP32s) -> Iterator[tuple[Indices, FP32s]]:
    """Yield positions and values of what passes the gate, block by block."""
    nan = np.uint32(NAN_BITS).view(np.float32)
    # Pages of these buffers that no entry reaches are never touched.
    block_elements = min(limits.BLOCK_ELEMENTS, theta.size)
    found_indices, found_values = np.empty(block_elements, np.uint32), np.empty(block_elements, np.float32)
    dtype = index_dtype(theta.size)
    for start in range(0, theta.size, limits.BLOCK_ELEMENTS):
        block = slice(start, start + limits.BLOCK_ELEMENTS)
        with np.errstate(all="ignore"):
            count = _gate_loop(
                theta[block], local[block], residual[block], nan, _TILE_ELEMENTS, found_indices, found_values
            )
        yield found_indices[:count].astype(dtype) + dtype.type(start), found_values[:count].copy()
