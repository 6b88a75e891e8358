"""The seam between :class:`pulsenet.GossipOptimizer` and whatever averages vectors.

The training process holds the outer iterate z, the momentum v and the inner steps' weights theta. A mixer is handed
vectors and gives means back; what it cannot get in time it leaves out. Nothing here raises because others are away:
a round goes on with this trainer's own values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pulsenet.ids import Digest
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.mixing.probe import Answer
from pulsenet.outer.mixing.settings import Job, MixingSettings
from pulsenet.tensors.params import ParameterTable


@dataclass(frozen=True, slots=True, eq=False)
class Adoption:
    """What a trainer that comes newly, or too late, takes over in place of its own z."""

    values: tuple[FP32s, ...]
    """One flat array per tensor of the table."""
    is_consensus: bool
    """Whether all members of a round hold these bits; else they are one member's z."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Where a trainer begins."""

    round_index: int
    """The round the run is in, at least the one held."""
    adoption: Adoption | None = None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a round asks of this trainer."""

    round_index: int
    """The round that was opened: the newest one where this trainer is behind."""
    subset: tuple[int, ...] | None = None
    """Tensors of Mix2, ascending; ``None`` for all."""
    is_listed: bool = True
    """Whether a fresh roster names this trainer; else the round mixes nothing."""
    is_probed: bool = False
    """Whether this trainer answers the probe after the inner steps, if it has one."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """What a job came back with."""

    sections: tuple[tuple[FP32s, ...], ...] | None
    """By vector and tensor of the job, flat. Where nothing arrived they are the own values, a debt settled; ``None``
    if the job changed nothing at all."""
    contributor_count: int = 1
    """Trainers whose values are in the mean, this one among them; the fewest of any part that came."""
    reason: str = ""
    """Stable code, where somebody's values are missing."""
    is_common: bool = False
    """Whether all of it is a mean that everybody holds who took it."""

    @property
    def is_mixed(self) -> bool:
        """Whether anybody else's values are in."""
        return self.contributor_count > 1


NOTHING_MIXED = Mixed(None)
"""Of a job that was not started."""


@dataclass(frozen=True, slots=True)
class MixingReport:
    """What one round did to this trainer."""

    round_index: int
    """The round that is over."""
    next_round_index: int
    is_listed: bool
    """Whether a roster named this trainer in the round."""
    mix1_count: int
    """Trainers in the mean that the step was taken from; 1 if only this one, 0 if the variant has no Mix1."""
    mix2_count: int
    """Likewise of the pseudo-gradients."""
    mix1_reason: str
    mix2_reason: str
    delta_norm: float
    """Of the own pseudo-gradient."""
    distance: float | None
    """Euclidean, from the own z to the mean that Mix1 gave; ``None`` if it gave none."""
    inner_seconds: float
    """Between the calls of ``step()`` in this round."""
    blocked_seconds: float
    """Inside them."""
    utilization_total: float = 1.0
    """Time in inner steps over wall time since the run began, checkpoints included."""
    adopted: bool = False
    """Whether the round began with somebody else's z."""
    start_square: float | None = None
    """Mean squared Euclidean distance between two trainers' z, as Mix1 tells; ``None`` if its mean was not whole."""
    end_square: float | None = None
    """Of their weights after the inner steps, on the tensors of Mix2; ``None`` if either mean was not whole."""
    noise_square: float | None = None
    """Of what the inner steps alone did, on the same tensors: what the bound is reckoned from."""
    is_consensus: bool | None = None
    """Whether what this round published is a mean that all members hold; ``None`` if this trainer published nothing."""

    @property
    def utilization(self) -> float:
        """Time in inner steps over wall time."""
        total = self.inner_seconds + self.blocked_seconds
        return self.inner_seconds / total if total > 0.0 else 1.0


class Mixer(Protocol):
    """How one trainer averages with others. One instance a trainer; calls come from one thread.

    Only :meth:`open` raises for trouble with the network or the daemon.
    """

    @property
    def settings(self) -> MixingSettings:
        """Return the run's variant and constants."""

    @property
    def publishes(self) -> bool:
        """Return whether weights given to :meth:`publish` may go anywhere."""

    def open(self, table: ParameterTable, self_test: Digest) -> None:
        """Say which masters this trainer has, and that its arithmetic is sound.

        Raises:
            ConfigError: the run has other masters.
            UnavailableError: nobody answers.
        """

    def locate(self, held_round_index: int | None) -> Start:
        """Return where to begin. Asked once, and again after a checkpoint was loaded.

        Args:
            held_round_index: Rounds stepped by the state that is held; ``None`` for one that is new.
        """

    def begin_round(self, round_index: int, iterate: Callable[[], Iterable[Entries]]) -> RoundPlan:
        """Open a round.

        Args:
            round_index: The round this trainer would open next.
            iterate: Gives z, dense; it may be read until :meth:`result` of the round's first job has returned.
        """

    def start(self, job: Job, sections: Sequence[Iterable[Entries]], *, mixed_root: Digest | None = None) -> None:
        """Hand vectors over and return at once; they may be read until :meth:`result` of the job has returned.

        Args:
            job: One that mixes something in this run's variant.
            sections: For each vector of the job, in the order of ``settings.vectors(job)``, dense values of each tensor
                of the table, or of the subset in Mix2, ascending.
            mixed_root: Root of the newest common mean that this trainer holds.
        """

    def result(self, job: Job) -> Mixed:
        """Wait at most until the job's deadline; afterwards nothing reads what was handed over."""

    def abandon(self) -> None:
        """Give up what is under way; afterwards nothing reads what was handed over."""

    def tell(self, report: MixingReport) -> None:
        """Take what a round did, for whoever watches."""

    def tell_probe(self, round_index: int, answer: Answer, scores: bytes) -> None:
        """Take what this trainer predicts for the tokens of its probe, for the run's coordinator.

        Args:
            round_index: Round whose inner steps led to it.
            answer: The probabilities of its bins.
            scores: FP32 for each tensor of Mix2's subset: how far apart its two parts were; empty if unknown.
        """

    def publish(self, model: torch.nn.Module, round_index: int, *, is_consensus: bool) -> None:
        """Make these weights the run's next version, if that falls to this trainer."""

    def close(self) -> None:
        """Leave; a second call does nothing."""
