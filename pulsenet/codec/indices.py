"""Positions as gaps: how many elements lie between a change and the one before (SPEC codec, "Gaps" and "Ranks").

A gap is one or more codes: the escape value (255 in one byte, 65535 in two) means "add the escape and go on", any
other value ends the gap. Every loop has a numpy twin of the same signature that defines it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.tensors.jit import compile_loop

UInt32s = npt.NDArray[np.uint32]
Codes = npt.NDArray[Any]
"""uint8 or uint16."""

NARROW_ESCAPE: Final = 0xFF
WIDE_ESCAPE: Final = 0xFFFF

RANK_SIZE_BYTES_MAX: Final = 3
"""A rank gap is below 2^20, so its LEB128 form has at most three bytes."""


@compile_loop
def _encode_gaps_loop(positions: UInt32s, escape: int, out: Codes) -> int:
    size = 0
    expected = 0
    for i in range(positions.size):
        gap = int(positions[i]) - expected
        while gap >= escape:
            out[size] = escape
            size += 1
            gap -= escape
        out[size] = gap
        size += 1
        expected = int(positions[i]) + 1
    return size


def encode_gaps_twin(positions: UInt32s, escape: int) -> Codes:
    """Define :func:`encode_gaps` in numpy."""
    gaps = _gaps_between(positions)
    escapes = gaps // escape
    ends = np.cumsum(escapes + 1) - 1
    codes = np.full(int(ends[-1]) + 1 if ends.size else 0, escape, _code_dtype(escape))
    codes[ends] = gaps % escape
    return codes


def encode_gaps(positions: UInt32s, escape: int) -> Codes:
    """Return the codes of ascending ``positions``: uint8 for the narrow escape, uint16 for the wide one."""
    if positions.size == 0:
        return np.empty(0, _code_dtype(escape))
    out = np.empty(positions.size + int(positions[-1]) // escape, _code_dtype(escape))
    return out[: _encode_gaps_loop(positions, escape, out)]


@compile_loop
def _decode_gaps_loop(codes: Codes, escape: int, element_count: int, out: UInt32s) -> int:
    count = 0
    position = 0
    open_gap = False
    for i in range(codes.size):
        code = int(codes[i])
        position += code
        open_gap = code == escape
        if not open_gap:
            if count == out.size or position >= element_count:
                return -1
            out[count] = position
            count += 1
            position += 1
    return -1 if open_gap else count


def decode_gaps_twin(codes: Codes, escape: int, element_count: int, count: int) -> UInt32s | None:
    """Define :func:`decode_gaps` in numpy."""
    ends = np.flatnonzero(codes != escape)
    if ends.size != count or (codes.size and codes[-1] == escape):
        return None
    positions = np.cumsum(codes, dtype=np.int64)[ends] + np.arange(count)
    if count and positions[-1] >= element_count:
        return None
    return positions.astype(np.uint32)


def decode_gaps(codes: Codes, escape: int, element_count: int, count: int) -> UInt32s | None:
    """Return the ``count`` ascending positions below ``element_count`` that ``codes`` stand for, else ``None``."""
    out = np.empty(count, np.uint32)
    return out if _decode_gaps_loop(codes, escape, element_count, out) == count else None


@compile_loop
def _encode_ranks_loop(ranks: UInt32s, out: npt.NDArray[np.uint8]) -> int:
    size = 0
    expected = 0
    for i in range(ranks.size):
        gap = int(ranks[i]) - expected
        while gap >= 0x80:
            out[size] = gap & 0x7F | 0x80
            size += 1
            gap >>= 7
        out[size] = gap
        size += 1
        expected = int(ranks[i]) + 1
    return size


def encode_ranks_twin(ranks: UInt32s) -> npt.NDArray[np.uint8]:
    """Define :func:`encode_ranks` in numpy."""
    gaps = _gaps_between(ranks)
    sizes = 1 + (gaps >= 1 << 7) + (gaps >= 1 << 14)
    starts = np.cumsum(sizes) - sizes
    out = np.zeros(int(sizes.sum()), np.uint8)
    for byte in range(RANK_SIZE_BYTES_MAX):
        has = sizes > byte
        more = sizes[has] > byte + 1
        out[starts[has] + byte] = (gaps[has] >> 7 * byte & 0x7F) | np.where(more, 0x80, 0)
    return out


def encode_ranks(ranks: UInt32s) -> npt.NDArray[np.uint8]:
    """Return ascending ``ranks`` below 2^20 as LEB128 gaps, one after another."""
    out = np.empty(ranks.size * RANK_SIZE_BYTES_MAX, np.uint8)
    return out[: _encode_ranks_loop(ranks, out)]


@compile_loop
def _decode_ranks_loop(data: npt.NDArray[np.uint8], rank_count: int, out: UInt32s) -> int:
    count = 0
    rank = 0
    gap = 0
    size = 0
    for i in range(data.size):
        byte = int(data[i])
        gap |= (byte & 0x7F) << (7 * size)
        size += 1
        if byte >= 0x80:
            if size == 3:
                return -1
            continue
        rank += gap
        if count == out.size or rank >= rank_count or (byte == 0 and size > 1):
            return -1
        out[count] = rank
        count += 1
        rank += 1
        gap = 0
        size = 0
    return -1 if size else count


def decode_ranks_twin(data: npt.NDArray[np.uint8], rank_count: int, count: int) -> UInt32s | None:
    """Define :func:`decode_ranks` in numpy."""
    ends = np.flatnonzero(data < 0x80)
    if ends.size != count or (data.size and data[-1] >= 0x80):
        return None
    starts = np.concatenate(([0], ends[:-1] + 1)).astype(np.int64)[:count]
    sizes = ends - starts + 1
    if np.any(sizes > RANK_SIZE_BYTES_MAX) or np.any((data[ends] == 0) & (sizes > 1)):
        return None
    gaps = np.zeros(count, np.int64)
    for byte in range(RANK_SIZE_BYTES_MAX):
        has = sizes > byte
        gaps[has] |= (data[starts[has] + byte].astype(np.int64) & 0x7F) << 7 * byte
    ranks = np.cumsum(gaps + 1) - 1
    if count and ranks[-1] >= rank_count:
        return None
    return ranks.astype(np.uint32)


def decode_ranks(data: npt.NDArray[np.uint8], rank_count: int, count: int) -> UInt32s | None:
    """Return the ``count`` ascending ranks below ``rank_count`` that ``data`` stands for, else ``None``."""
    out = np.empty(count, np.uint32)
    return out if _decode_ranks_loop(data, rank_count, out) == count else None


def _gaps_between(positions: UInt32s) -> npt.NDArray[np.int64]:
    before = np.concatenate((np.array([-1]), positions[:-1].astype(np.int64)))[: positions.size]
    gaps: npt.NDArray[np.int64] = positions.astype(np.int64) - before - 1
    return gaps


def _code_dtype(escape: int) -> np.dtype[Any]:
    return np.dtype(np.uint8) if escape == NARROW_ESCAPE else np.dtype(np.uint16)
