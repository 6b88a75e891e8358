"""The constants of a run whose outer algorithm is ``gossip``, as the run's descriptor signs them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

from pulsenet.errors import ConfigError
from pulsenet.outer.constants import check_constants, decode_constants, encode_constants

ALGORITHM: Final = "gossip"
"""Name of the algorithm in a run's descriptor."""


class Job(IntEnum):
    """One of the two mixings of a round."""

    MIX1 = 1
    """Of the outer iterates; overlaps the inner steps."""
    MIX2 = 2
    """Of the pseudo-gradients; everything waits for it."""


class MixingKind(StrEnum):
    """Who takes part in a mean."""

    NONE = "none"
    GLOBAL = "global"
    """All members of the round's roster."""
    PAIR = "pair"
    """Two members that a seeded matching puts together."""


class Vector(IntEnum):
    """What is mixed."""

    ITERATE = 1
    """The outer iterate (z): masters at the round's start."""
    GRADIENT = 2
    """The pseudo-gradient (D): masters at the round's start minus masters after the inner steps."""
    MOMENTUM = 3
    """The outer momentum (v) before the round's step."""


class MixingVariant(StrEnum):
    """How the outer synchronisation is split; names are those of :class:`pulsenet.outer.plan.Variant`."""

    DILOCO = "diloco"
    """Mix2: global mean. The baseline: one exchange, that everything waits for."""
    GLOBAL_M1 = "global_m1"
    """Mix1: global mean. Mix2: none."""
    GLOBAL_M1_LOCAL_M2 = "global_m1_local_m2"
    """Mix1: global mean. Mix2: random pairs."""
    GLOBAL_M1_LOCAL_M2_SUBSET = "global_m1_local_m2_subset"
    """The same, with Mix2 on the tensors that the roster names."""
    LOCAL_M1_M2 = "local_m1_m2"
    """Random pairs in both."""

    @property
    def mix1(self) -> MixingKind:
        """How outer iterates are mixed."""
        return _KINDS[self][0]

    @property
    def mix2(self) -> MixingKind:
        """How pseudo-gradients are mixed."""
        return _KINDS[self][1]

    @property
    def mixes_subset(self) -> bool:
        """Whether Mix2 is of the roster's tensors only."""
        return self is MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET

    @property
    def has_consensus(self) -> bool:
        """Whether all members that hear each other hold the same mean of the outer iterates: what can be published."""
        return self is not MixingVariant.LOCAL_M1_M2

    def kind(self, job: Job) -> MixingKind:
        """Return how a job mixes."""
        return self.mix1 if job is Job.MIX1 else self.mix2


_KINDS: Final = {
    MixingVariant.DILOCO: (MixingKind.NONE, MixingKind.GLOBAL),
    MixingVariant.GLOBAL_M1: (MixingKind.GLOBAL, MixingKind.NONE),
    MixingVariant.GLOBAL_M1_LOCAL_M2: (MixingKind.GLOBAL, MixingKind.PAIR),
    MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET: (MixingKind.GLOBAL, MixingKind.PAIR),
    MixingVariant.LOCAL_M1_M2: (MixingKind.PAIR, MixingKind.PAIR),
}


@dataclass(frozen=True, slots=True)
class MixingSettings:
    """Constants of a run's rounds. Reals are rounded to FP32 when given: only their bits are signed.

    Raises:
        ConfigError: a value no run can have.
    """

    variant: MixingVariant = MixingVariant.GLOBAL_M1_LOCAL_M2
    inner_steps: int = 8
    """Inner steps a round (H)."""
    learning_rate: float = 0.7
    """Of the outer optimiser."""
    momentum_factor: float = 0.9
    """Of the outer optimiser (mu)."""
    mixes_momentum: bool = False
    """Whether the outer momentum travels with the pseudo-gradients, or with the outer iterates where Mix2 is none."""
    mixing_gate: bool = False
    """Whether only entries travel that would change a BF16 cast; the rest waits in residuals."""
    roster_rounds: int = 8
    """Rounds for which a roster is valid."""
    mix1_wait_seconds: int = 10
    """How long after the inner steps Mix1 is still waited for."""
    mix2_wait_seconds: int = 30
    """How long Mix2 is waited for."""
    probe_interval: int = 8
    """Rounds between two measurements of disagreement; 0 for never."""
    disagreement_max: float = 0.0
    """Jensen-Shannon distance from 0 to 1 above which the next roster widens the subset; 0 for never."""
    subset_ratio: float = 0.43
    """Share of the elements in a run's first subset."""
    norm_max: float = 1e18
    """A part of a larger Euclidean norm is refused."""

    def __post_init__(self) -> None:
        check_constants(self, ("inner_steps", "roster_rounds", "mix1_wait_seconds", "mix2_wait_seconds"))
        if self.probe_interval < 0:
            raise ConfigError(f"probe_interval is {self.probe_interval}: it is at least 0")
        if self.disagreement_max > 1.0:
            raise ConfigError(f"disagreement_max is {self.disagreement_max}: a Jensen-Shannon distance is at most 1")
        if not 0.0 < self.subset_ratio <= 1.0:
            raise ConfigError(f"subset_ratio is {self.subset_ratio}: it is above 0 and at most 1")
        if self.mixes_momentum and self.variant is MixingVariant.DILOCO:
            raise ConfigError("mixes_momentum with the variant diloco: trainers of one mean have one momentum already")

    def vectors(self, job: Job) -> tuple[Vector, ...]:
        """Return what travels in a job, in the order of its table; nothing where the job mixes nothing."""
        kind = self.variant.kind(job)
        if kind is MixingKind.NONE:
            return ()
        if job is Job.MIX1:
            has_momentum = self.mixes_momentum and self.variant.mix2 is MixingKind.NONE
            return (Vector.ITERATE, Vector.MOMENTUM) if has_momentum else (Vector.ITERATE,)
        return (Vector.GRADIENT, Vector.MOMENTUM) if self.mixes_momentum else (Vector.GRADIENT,)

    def gates(self, vector: Vector, round_index: int) -> bool:
        """Return whether a vector travels gated in a round.

        Momentum has no BF16 cast that it would change. Outer iterates are gated against the last mean that all hold,
        which pairs do not have; once in ``roster_rounds`` rounds they travel whole, so that a trainer that joins or
        that missed a mean holds the next one.
        """
        if not self.mixing_gate or vector is Vector.MOMENTUM:
            return False
        if vector is Vector.ITERATE:
            return self.variant.mix1 is MixingKind.GLOBAL and round_index % self.roster_rounds != 0
        return True

    def to_constants(self) -> tuple[tuple[str, int], ...]:
        """Return the descriptor's constants; see :mod:`pulsenet.outer.constants`."""
        return encode_constants(self)

    @classmethod
    def from_constants(cls, algorithm: str, constants: tuple[tuple[str, int], ...]) -> MixingSettings:
        """Return the settings a descriptor signs; what it does not name has its default.

        Raises:
            ConfigError: another algorithm, or a name or value this code does not know: peers would step differently.
        """
        if algorithm != ALGORITHM:
            raise ConfigError(f"the run's outer algorithm is {algorithm!r}, not {ALGORITHM!r}")
        return cls(**decode_constants(cls, constants))
