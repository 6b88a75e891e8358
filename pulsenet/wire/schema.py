"""Canonical msgpack for frozen dataclasses, driven by their annotations (SPEC section 2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SizeMax:
    """Upper bound of ``bytes`` or UTF-8 text, in bytes."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class SizeExact:
    """Exact size of ``bytes``."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class CountMax:
    """Upper bound of a tuple's item count."""

    count: int
