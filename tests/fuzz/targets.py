"""What is fuzzed: each decoder of bytes from outside, with well-formed bytes to start from and what it may raise.

A decoder that accepts what it must not raises :class:`AcceptedError` here, which nothing promises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pulsenet.errors import PulsenetError

Decode = Callable[[bytes], object]


class AcceptedError(AssertionError):
    """Something unverified, or in a second form, was taken."""


@dataclass(frozen=True)
class Target:
    """One decoder."""

    name: str
    decode: Decode
    """Returns whatever it likes; raises what it promises, or :class:`AcceptedError`."""
    errors: tuple[type[PulsenetError], ...]
    """What it promises for bytes it refuses."""
    seeds: tuple[bytes, ...]
    """Well-formed, which each of them must be found to be."""
    is_structured: bool = False
    """Whether the bytes are msgpack, bare or in a frame, so that single values are changed as well."""
    has_spec_codes: bool = False
    """Whether its codes are those of the specification."""


def require(condition: bool, detail: str) -> None:
    """Complain about something that was accepted."""
    if not condition:
        raise AcceptedError(detail)
