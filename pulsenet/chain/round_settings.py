"""The constants of a run that govern its rounds (SPEC section 6.12)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from pulsenet.chain.records import Descriptor
from pulsenet.errors import RemoteProtocolError

ALL_GATHER_RATIO_MIN: Final = 17.0
"""Default: what whole contributions save with 4 or 5 trainers, and slices still with 16 (docs/outer.md)."""


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """What the descriptor says about rounds; fields it does not name keep their defaults."""

    inner_steps: int = 8
    """Inner steps of a round; under ``ddp`` always one, whatever the constant says."""
    keeps_uncounted: bool = True
    """Whether what no receipt counted is sent later: under ``ddp`` it is lost, so nothing is done ahead either."""
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
    all_gather_ratio_min: float = ALL_GATHER_RATIO_MIN
    """Bytes of a ring all-reduce of dense values over those of all contributions, below which they are summed by
    slice; 0 means never, except that dense algorithms always do."""

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
        is_ddp = descriptor.algorithm == "ddp"
        if is_ddp:
            counts["inner_steps"] = 1
        return cls(
            **counts,
            keeps_uncounted=not is_ddp,
            clip_norm_ratio=_read_ratio(constants, "clip_norm_ratio", 0.0),
            all_gather_ratio_min=_read_ratio(constants, "all_gather_ratio_min", ALL_GATHER_RATIO_MIN),
        )


def _read_ratio(constants: Mapping[str, int], name: str, default: float) -> float:
    ratio = _float_of(constants[name]) if name in constants else default
    if not 0.0 <= ratio < float("inf"):
        raise RemoteProtocolError("schema", f"descriptor: {name} {ratio}")
    return ratio


def _float_of(bits: int) -> float:
    if bits >= 1 << 32:
        raise RemoteProtocolError("schema", f"descriptor: {bits} are no FP32 bits")
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value
