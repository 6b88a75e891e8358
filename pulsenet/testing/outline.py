"""Events and messages as one line of a trace: everything that tells them apart, and of long bytes only an outline."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from functools import cache

BYTES_WHOLE_MAX = 64
"""Longer ones are told by length, start and end: simulations that differ inside one differ in what follows."""

_EDGE = 8


def outline(value: object) -> str:
    """Return one line for an event, a message, or what is in them; equal values give equal lines in every process."""
    if isinstance(value, bytes):
        if len(value) <= BYTES_WHOLE_MAX:
            return value.hex()
        return f"{len(value)}:{value[:_EDGE].hex()}:{value[-_EDGE:].hex()}"
    if isinstance(value, tuple):
        return f"({','.join(map(outline, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        inside = ",".join([outline(getattr(value, name)) for name in _names_of(type(value))])
        return f"{type(value).__name__}({inside})"
    return repr(value)


@cache
def _names_of(kind: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))  # type: ignore[arg-type]  # a dataclass
