"""The constants of a run that govern its rounds (SPEC section 6.12)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Self

from pulsenet.chain.records import Descriptor
from pulsenet.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """What the descriptor says about rounds; fields it does not name keep their defaults."""

    inner_steps: int = 8
    """Inner steps of a round."""
    missed_rounds_max: int = 2
    """Missed rounds in a row after which a residual is dropped."""
    contributions_min: int = 1
    """Checked contributions without which no round closes."""
    contribution_wait_seconds: int = 30
    """After so many, how long a coordinator waits for the other trainers it is connected to."""
    state_anchor_interval: int = 10
    """Rounds between state anchors."""
    clip_norm_ratio: float = 0.0
    """Norms above this many times the round's median are scaled down to it; 0 means never."""

    @classmethod
    def of(cls, descriptor: Descriptor) -> Self:
        """Read the descriptor's constants; names of others are left alone.

        Raises:
            RemoteProtocolError: ``schema`` for a value that cannot be.
        """
        constants = dict(descriptor.constants)
        counts = {
            name: constants[name]
            for name in (
                "inner_steps",
                "missed_rounds_max",
                "contributions_min",
                "contribution_wait_seconds",
                "state_anchor_interval",
            )
            if name in constants
        }
        for name, value in counts.items():
            if value < 1 and name != "contribution_wait_seconds":
                raise RemoteProtocolError("schema", f"descriptor: {name} 0")
        ratio = _float_of(constants.get("clip_norm_ratio", 0))
        if not 0.0 <= ratio < float("inf"):
            raise RemoteProtocolError("schema", f"descriptor: clip_norm_ratio {ratio}")
        return cls(**counts, clip_norm_ratio=ratio)


def _float_of(bits: int) -> float:
    if bits >= 1 << 32:
        raise RemoteProtocolError("schema", f"descriptor: {bits} are no FP32 bits")
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value
