"""Operations on many elements at once that compilers do not find by themselves: masks of 64, one bit an element.

Called from a compiled loop each is a handful of vector instructions; called from Python it runs the plain body below,
which defines it. Masks are unsigned words whose lowest bit stands for the first element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

UInt8s = npt.NDArray[np.uint8]
UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

LANE_COUNT: Final = 64
"""Elements of one mask."""

WORD_COUNT: Final = 8
"""Masks of one span."""

SPAN: Final = LANE_COUNT * WORD_COUNT

KIND_COUNT: Final = 20
"""Values that a span is split by, from 0."""

_KIND_BITS: Final = 5

_WORD: Final = ir.IntType(64)
_WORDS: Final = ir.VectorType(_WORD, WORD_COUNT)
_BYTES: Final = ir.VectorType(ir.IntType(8), LANE_COUNT)

Function = TypeVar("Function", bound=Callable[..., Any])


_as_instructions: Final = cast(Callable[[Callable[..., Any]], Callable[..., Any]], intrinsic)


def _compiled_as(plain: Callable[..., Any]) -> Callable[[Function], Function]:
    """Let compiled callers of ``plain`` use what the decorated function returns for their argument types."""
    return cast(Callable[[Function], Function], overload(plain, strict=False))


def find_differences(old: npt.NDArray[Any], new: npt.NDArray[Any], start: int) -> np.uint64:
    """Return which of the 64 elements from ``start`` on differ; both arrays go on that far."""
    mask = 0
    for lane in range(LANE_COUNT):
        mask |= int(old[start + lane] != new[start + lane]) << lane
    return np.uint64(mask)


def count_ones(word: np.uint64) -> int:
    """Return how many bits are set."""
    return int(word).bit_count()


def find_lowest(word: np.uint64) -> int:
    """Return the position of the lowest bit that is set; there is one."""
    return (int(word) & -int(word)).bit_length() - 1


def split_span(values: UInt8s, start: int, masks: UInt64s, counts: Int64s) -> None:
    """Write where each value below ``KIND_COUNT`` stands among 512 bytes, and how often in each 64 of them.

    Args:
        values: Bytes below 32, or 255 for none: only their lowest five bits may be looked at.
        start: The first of those that count.
        masks: Row v, word w: which of the bytes from 64 w on are v.
        counts: Row v, byte w from the lowest: how many of these are v, at most 64.
    """
    for kind in range(KIND_COUNT):
        packed = 0
        for word in range(WORD_COUNT):
            first = start + word * LANE_COUNT
            equal = values[first : first + LANE_COUNT] == kind
            masks[kind, word] = np.packbits(equal, bitorder="little").view("<u8")[0]
            packed |= int(np.count_nonzero(equal)) << 8 * word
        counts[kind] = packed


# What compiled callers get. Vectors are written as compilers' own portable operations: where a processor lacks one,
# several take its place.


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return context.make_array(array_type)(context, builder, array).data


def _call_of_words(builder: Any, name: str, words: Any) -> Any:
    kind = ir.FunctionType(words.type, [words.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [words])


@_as_instructions
def _differences(typing_context: Any, old: Any, new: Any, start: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        lanes = []
        for array_type, array in zip(signature.args[:2], arguments[:2], strict=True):
            vector = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), LANE_COUNT)
            first = builder.gep(_data(context, builder, array_type, array), [arguments[2]])
            lanes.append(builder.load(builder.bitcast(first, vector.as_pointer()), align=1))
        return builder.bitcast(builder.icmp_unsigned("!=", *lanes), _WORD)

    return types.uint64(old, new, types.intp), build


@_compiled_as(find_differences)
def _find_differences(old: Any, new: Any, start: Any) -> Any:
    if old.layout == new.layout == "C":
        return lambda old, new, start: _differences(old, new, start)
    return find_differences


@_as_instructions
def _ones(typing_context: Any, word: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), build


@_compiled_as(count_ones)
def _count_ones(word: Any) -> Any:
    return lambda word: _ones(word)


@_as_instructions
def _lowest(typing_context: Any, word: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), build


@_compiled_as(find_lowest)
def _find_lowest(word: Any) -> Any:
    return lambda word: _lowest(word)


@_as_instructions
def _split(typing_context: Any, values: Any, start: Any, masks: Any, counts: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        values_data, masks_data, counts_data = (
            _data(context, builder, signature.args[at], arguments[at]) for at in (0, 2, 3)
        )
        first = builder.gep(values_data, [arguments[1]])
        planes = _build_planes(builder, builder.bitcast(first, _BYTES.as_pointer()))
        upper, lower = _combine(builder, planes[2:], 5), _combine(builder, planes[:2], 4)
        rows = builder.bitcast(masks_data, _WORDS.as_pointer())
        for kind in range(KIND_COUNT):
            mask = builder.and_(upper[kind >> 2], lower[kind & 3])
            builder.store(mask, builder.gep(rows, [_WORD(kind)]), align=8)
            ones = builder.trunc(
                _call_of_words(builder, "llvm.ctpop.v8i64", mask), ir.VectorType(ir.IntType(8), WORD_COUNT)
            )
            builder.store(builder.bitcast(ones, _WORD), builder.gep(counts_data, [_WORD(kind)]), align=8)
        return context.get_dummy_value()

    return types.void(values, types.intp, masks, counts), build


def _build_planes(builder: Any, groups: Any) -> list[Any]:
    """Return for each bit of the values a vector of masks: the bytes that have it set."""
    kind = ir.ArrayType(_WORDS, _KIND_BITS)
    room = builder.bitcast(cgutils.alloca_once(builder, kind), _WORD.as_pointer())
    for word in range(WORD_COUNT):
        group = builder.load(builder.gep(groups, [_WORD(word)]), align=1)
        for bit in range(_KIND_BITS):
            chosen = builder.and_(group, ir.Constant(_BYTES, [1 << bit] * LANE_COUNT))
            mask = builder.bitcast(builder.icmp_unsigned("!=", chosen, ir.Constant(_BYTES, None)), _WORD)
            builder.store(mask, builder.gep(room, [_WORD(bit * WORD_COUNT + word)]), align=8)
    rows = builder.bitcast(room, _WORDS.as_pointer())
    return [builder.load(builder.gep(rows, [_WORD(bit)]), align=8) for bit in range(_KIND_BITS)]


def _combine(builder: Any, planes: Sequence[Any], count: int) -> list[Any]:
    """Return masks of the bytes whose bits in these planes make 0, 1, ... below ``count``."""
    found = []
    for value in range(count):
        wanted = [plane if value >> bit & 1 else builder.not_(plane) for bit, plane in enumerate(planes)]
        mask = wanted[0]
        for other in wanted[1:]:
            mask = builder.and_(mask, other)
        found.append(mask)
    return found


@_compiled_as(split_span)
def _split_span(values: Any, start: Any, masks: Any, counts: Any) -> Any:
    return lambda values, start, masks, counts: _split(values, start, masks, counts)
