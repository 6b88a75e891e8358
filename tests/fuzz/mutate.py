"""Turns well-formed bytes into hostile ones: flips, cuts, splices, forged lengths, and values of another kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

NUMBERS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x100,
    0x7FFF,
    0xFFFF,
    0x10000,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
"""Where counters, lengths and signs go wrong."""

BYTES = (0x00, 0x01, 0x7F, 0x80, 0xC0, 0xC1, 0xC6, 0xCF, 0xDB, 0xDC, 0xDD, 0xDF, 0xFF)
"""Ends of ranges, and the heads of msgpack that announce most."""

SIZE_BYTES_MAX = 1 << 20
"""No mutated input is longer: what is beyond a frame is refused before a decoder sees it."""

Mutation = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def _at(draw: random.Random, data: bytes) -> int:
    """A place, near the front more often: headers are there."""
    if draw.random() < 0.5:
        return draw.randrange(min(len(data), 64) + 1)
    return draw.randrange(len(data) + 1)


def flip_bit(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\0")
    changed[min(_at(draw, changed), len(changed) - 1)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def set_byte(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\0")
    changed[min(_at(draw, changed), len(changed) - 1)] = draw.choice(BYTES)
    return bytes(changed)


def cut_end(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def cut_piece(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start = _at(draw, data)
    return data[:start] + data[start + draw.choice((1, 2, 4, 8, 32, 36)) :]


def put_in(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = _at(draw, data)
    return data[:at] + draw.randbytes(draw.choice((1, 2, 4, 8, 32, 100))) + data[at:]


def repeat_piece(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start = _at(draw, data)
    piece = data[start : start + draw.choice((1, 4, 32, 36, 200))]
    count = draw.choice((1, 2, 30, 1000))
    return data[:start] + piece * count + data[start:]


def join_other(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = draw.choice(others)
    return data[: _at(draw, data)] + other[_at(draw, other) :]


def forge_number(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    size_bytes = draw.choice((1, 2, 4, 8))
    number = draw.choice(NUMBERS) + draw.choice((-1, 0, 0, 1))
    raw = (number % (1 << 8 * size_bytes)).to_bytes(size_bytes, draw.choice(("little", "big")))
    at = _at(draw, data)
    return data[:at] + raw + data[at + size_bytes :]


def make_noise(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 2, 5, 40, 300)))


PLAIN: tuple[Mutation, ...] = (
    flip_bit,
    flip_bit,
    set_byte,
    set_byte,
    cut_end,
    cut_piece,
    put_in,
    repeat_piece,
    join_other,
    forge_number,
    forge_number,
    make_noise,
)


def change_value(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change one value inside a msgpack map or array and write it again, its keys in order."""
    for skipped in (
        0,
        4,
        5,
        1,
        6,
    ):  # bare, or behind the head of a frame
        try:
            tree = msgpack.unpackb(data[skipped:], unicode_errors="surrogateescape")
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
            continue
        if isinstance(tree, (dict, list)):
            try:
                return _frame(data[:skipped], _pack(_change(draw, tree)))
            except (RecursionError, ValueError):  # nested by an earlier change deeper than can be written
                break
    return flip_bit(draw, data, others)


def _frame(head: bytes, body: bytes) -> bytes:
    """Put a body behind its frame's head, its length made right so that the body is looked at."""
    if len(head) == 5:
        return (1 + len(body)).to_bytes(4, "little") + head[4:] + body
    if len(head) == 6:
        return len(body).to_bytes(4, "little") + head[4:] + body
    return head + body


def _change(draw: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value:
        key = draw.choice(list(value))
        if draw.random() < 0.75:
            return {**value, key: _change(draw, value[key])}
        changed = dict(value)
        moved = changed.pop(key)
        if draw.random() < 0.5:
            changed[draw.choice(("", "zzz", f"{key}\udcff", "\0", "../../x"))] = moved
        return changed
    if isinstance(value, list) and value and draw.random() < 0.75:
        index = draw.randrange(len(value))
        what = draw.random()
        if what < 0.6:
            return [*value[:index], _change(draw, value[index]), *value[index + 1 :]]
        if what < 0.8:
            return value[:index] + value[index + 1 :]
        # Many of something large would be memory of ours, not of the decoder that refuses it.
        count = draw.choice((2, 2, 70, 2000)) if len(_pack(value[index])) < 200 else 2
        return value[:index] + [value[index]] * count + value[index + 1 :]
    if isinstance(value, bytes) and draw.random() < 0.6:
        return draw.choice(PLAIN)(draw, value, [value])
    if type(value) is int and draw.random() < 0.6:
        return min(max(draw.choice(NUMBERS) * draw.choice((1, 1, 1, -1)), -(2**63)), 2**64 - 1)
    return _invent(draw)


def _invent(draw: random.Random) -> Any:
    match draw.randrange(12):
        case 0:
            return None
        case 1:
            return draw.choice((True, False))
        case 2:
            return draw.choice(NUMBERS)
        case 3:
            return -draw.choice(NUMBERS[:14])
        case 4:
            return draw.choice((0.0, -0.0, float("nan"), float("inf"), 1.5))
        case 5:
            return bytes(draw.choice((0, 1, 31, 32, 33, 64, 70_000)))
        case 6:
            return msgpack.ExtType(draw.randrange(128), b"x")
        case 7:
            return draw.choice(("", "..", "/etc/passwd", "a\n\x1b[31mb", "\0", "x" * 600, "ü" * 40))
        case 8:
            return []
        case 9:
            return {}
        case 10:
            nested: Any = None
            for _ in range(draw.choice((3, 8, 9, 200))):
                nested = [nested]
            return nested
        case _:
            return [draw.choice(NUMBERS)] * draw.choice((1, 2, 40, 3000))


def _pack(value: Any) -> bytes:
    """As the canonical encoding would be, whatever the values are."""
    return bytes(msgpack.packb(_sort_keys(value), unicode_errors="surrogateescape"))


def _sort_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sort_keys(value[key]) for key in sorted(value, key=str)}
    return list(map(_sort_keys, value)) if isinstance(value, list) else value


def mutate(draw: random.Random, seeds: Sequence[bytes], *, is_structured: bool) -> bytes:
    """Return hostile bytes made of one of the seeds, or two."""
    data = draw.choice(seeds)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if is_structured and draw.random() < 0.5:
            data = change_value(draw, data, seeds)
        else:
            data = draw.choice(PLAIN)(draw, data, seeds)
        data = data[:SIZE_BYTES_MAX]
    return data
