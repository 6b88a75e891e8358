"""The outer algorithm and its constants, as the run's descriptor signs them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pulsenet.errors import ConfigError
from pulsenet.outer.constants import check_constants, decode_constants, encode_constants


class Algorithm(StrEnum):
    """How trainers share what they learn."""

    PULSELOCO = "pulseloco"
    """Gated pseudo-gradients with error feedback, every H inner steps."""
    DILOCO = "diloco"
    """Dense pseudo-gradients every H inner steps; no gate."""
    DDP = "ddp"
    """The mean of the gradients before every inner step; no outer optimiser."""


class Combination(StrEnum):
    """How contributions become the aggregate."""

    MEAN = "mean"
    MEDIAN = "median"
    TRIMMED = "trimmed"


MANTISSA_BITS: Final = 23
"""Of FP32."""

_FLUSH: Final = ("flush_interval", "flush_mantissa_bits")

_OTHERS_NAMES: Final = frozenset({"contributions_min", "contribution_wait_seconds", "all_gather_ratio_min"})
"""Constants in the same list that govern when a round closes and what travels, not what it computes."""


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """Constants of a run's rounds. Reals are rounded to FP32 when given: only their bits are signed.

    Raises:
        ConfigError: a value no run can have.
    """

    algorithm: Algorithm = Algorithm.PULSELOCO
    inner_steps: int = 8
    """Inner steps a round (H)."""
    learning_rate: float = 0.7
    """Of the outer optimiser."""
    momentum_factor: float = 0.9
    """Of the outer optimiser (mu)."""
    missed_rounds_max: int = 2
    """Rounds missed in a row after which the residual is given up and the state fetched anew."""
    clip_norm_ratio: float = 0.0
    """Contributions are cut to this multiple of the round's median norm; 0 cuts none."""
    norm_max: float = 1e18
    """A contribution of a larger Euclidean norm is refused."""
    combination: Combination = Combination.MEAN
    trim_count: int = 0
    """With ``trimmed``: contributions left out on each side of every element."""
    state_anchor_interval: int = 10
    """Rounds between state anchors (K)."""
    flush_interval: int = 0
    """Rounds in which every block passes the gate whole once (N); 0 for never. Only with ``pulseloco``."""
    flush_mantissa_bits: int = MANTISSA_BITS
    """Mantissa bits of a value that passes so; what is cut off stays in the residual."""

    def __post_init__(self) -> None:
        check_constants(self, ("inner_steps", "missed_rounds_max", "state_anchor_interval"))
        if 0.0 < self.clip_norm_ratio < 1.0:
            raise ConfigError(f"clip_norm_ratio is {self.clip_norm_ratio}: it is 0 or at least 1")
        if self.trim_count < 0 or (self.trim_count and self.combination is not Combination.TRIMMED):
            raise ConfigError(
                f"trim_count is {self.trim_count} with combination {self.combination}: it goes with trimmed"
            )
        if self.flush_interval < 0 or (self.flush_interval and self.is_dense):
            text = f"flush_interval is {self.flush_interval} with the algorithm {self.algorithm}"
            raise ConfigError(f"{text}: only pulseloco has flushes, and 0 is none")
        if not 0 <= self.flush_mantissa_bits <= MANTISSA_BITS:
            raise ConfigError(f"flush_mantissa_bits is {self.flush_mantissa_bits}: FP32 has {MANTISSA_BITS}")
        if self.flush_interval == 0 and self.flush_mantissa_bits != MANTISSA_BITS:
            raise ConfigError(f"flush_mantissa_bits is {self.flush_mantissa_bits}, but flush_interval is 0")
        if self.combination is not Combination.MEAN and not self.is_dense:
            raise ConfigError(
                f"combination {self.combination} needs dense contributions: use the algorithm diloco, or mean"
            )

    @property
    def is_dense(self) -> bool:
        """Whether contributions hold every element."""
        return self.algorithm is not Algorithm.PULSELOCO

    @property
    def cuts_values(self) -> bool:
        """Whether sent values may be shorter than what they are cut from, so that a rest stays."""
        return self.flush_mantissa_bits < MANTISSA_BITS

    def to_constants(self) -> tuple[tuple[str, int], ...]:
        """Return the descriptor's constants; see :mod:`pulsenet.outer.constants`.

        Without flushes their constants are left out, so that versions that do not know them can take part.
        """
        return encode_constants(self, {"algorithm", *(() if self.flush_interval else _FLUSH)})

    @classmethod
    def from_constants(cls, algorithm: str, constants: tuple[tuple[str, int], ...]) -> OuterSettings:
        """Return the settings a descriptor signs; what it does not name has its default.

        Raises:
            ConfigError: an algorithm, name or value this code does not know: peers would step differently.
        """
        if algorithm not in tuple(Algorithm):
            raise ConfigError(f"the run's outer algorithm {algorithm!r} is not one of {', '.join(Algorithm)}")
        ours = [(name, value) for name, value in constants if name not in _OTHERS_NAMES]
        return cls(algorithm=Algorithm(algorithm), **decode_constants(cls, ours, {"algorithm"}))
