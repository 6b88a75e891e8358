"""Well-formed values of any declared message or record, made from its annotations alone.

A message that is added to a registry has samples, and so is mutated, without a word here.
"""

from __future__ import annotations

import dataclasses
import random
import types
import typing
from enum import StrEnum
from typing import Any

from pulsenet import ids
from pulsenet.wire.schema import CountMax, SizeExact, SizeMax

COUNT_MAX = 3
SIZE_BYTES_MAX = 48
"""Of lists and bytes in a sample, where their bounds allow more."""


def make_sample(annotation: Any, draw: random.Random) -> Any:
    """Return a value that the schema of ``annotation`` allows."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _make_bounded(*arguments, draw=draw)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not types.NoneType]
        return None if draw.random() < 0.3 else make_sample(inner, draw)
    if origin is tuple:
        return tuple(make_sample(argument, draw) for argument in arguments)
    if annotation in (ids.PeerId, ids.Digest, ids.RunId):
        return draw.randbytes(ids.DIGEST_SIZE_BYTES)
    if annotation is ids.Version:
        return ids.Version(draw.randrange(3), draw.randrange(1000))
    if annotation is bool:
        return draw.random() < 0.5
    if annotation is int:
        return draw.choice((0, 1, 7, 300, 70_000, 2**40, 2**63 - 1))
    if annotation is str:
        return draw.choice(("", "name", "ünïcode"))
    if annotation is bytes:
        return draw.randbytes(draw.randrange(SIZE_BYTES_MAX))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return draw.choice(list(annotation))
    assert dataclasses.is_dataclass(annotation), annotation
    hints = typing.get_type_hints(annotation, include_extras=True)
    return annotation(**{field.name: make_sample(hints[field.name], draw) for field in dataclasses.fields(annotation)})


def _make_bounded(base: Any, bound: Any, *, draw: random.Random) -> Any:
    match bound:
        case CountMax(count):
            item = typing.get_args(base)[0]
            return tuple(make_sample(item, draw) for _ in range(draw.randrange(min(count, COUNT_MAX) + 1)))
        case SizeExact(size_bytes):
            return draw.randbytes(size_bytes)
        case SizeMax(size_bytes):
            size_bytes = draw.randrange(min(size_bytes, SIZE_BYTES_MAX) + 1)
            return "x" * size_bytes if base is str else draw.randbytes(size_bytes)
    raise AssertionError(bound)
