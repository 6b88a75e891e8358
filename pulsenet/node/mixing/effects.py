"""What the machines of mixing order the shell to do, beside what every machine may order."""

from __future__ import annotations

from dataclasses import dataclass

from pulsenet.chain.records import SliceName
from pulsenet.ids import Digest, PeerId
from pulsenet.node.mixing.events import DebtName, PartSlice
from pulsenet.outer.mixing.probe import Answer
from pulsenet.outer.mixing.settings import Job


@dataclass(frozen=True, slots=True)
class Debt:
    """What this node owes a vector: the mean it agreed to, less what it kept instead.

    Both blobs are in the store. The shell adds ``mean - own`` to the vector before it encodes it, element by element
    in FP32, on the tensors that both the debt's subset and the job's have. A debt whose name it added to a vector of
    this training process before is named in ``PartStored`` again and not added: the disk may have refused to note it.
    """

    name: DebtName
    own: SliceName
    mean: SliceName
    subset: tuple[int, ...]
    """Tensors the blobs are of, ascending; empty for all."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What one job of a round asks of the training process."""

    job: Job
    slice_count: int
    """Blobs the vector is to be cut into: 1 for a pair, as many as members for a global mean; 0 if the job is not done
    in this round, or this node is alone in it: then nothing is handed over and nothing asked."""
    debts: tuple[Debt, ...] = ()
    """To be added to the vector."""

    @property
    def is_mixed(self) -> bool:
        """Whether there is anything to hand over."""
        return self.slice_count > 0


@dataclass(frozen=True, slots=True)
class StartMixing:
    """Let the training process begin, with somebody's state if there are parts; answers ``MixingAttached``.

    The blobs are whole and were signed by members; what cannot be read is answered by ``AdoptFailed``.
    """

    round_index: int
    """The round the run is in, as far as anybody told; at least the one held."""
    parts: tuple[SliceName, ...] = ()
    """The slices of z, all of them in order; none if nobody offers a state."""
    is_consensus: bool = False
    """Whether the parts are a mean that all members of their round took; else one member's own z."""


@dataclass(frozen=True, slots=True)
class OpenRound:
    """Open a round in the training process; answers ``RoundWanted``."""

    round_index: int
    """At least the one wanted; above it if others are further."""
    is_listed: bool
    """Whether a fresh roster names this node; else the round mixes nothing."""
    member_count: int
    """Members of the roster; 1 without."""
    subset: tuple[int, ...]
    """Tensors of Mix2, ascending; empty for all."""
    mix1: JobPlan
    mix2: JobPlan
    is_probed: bool = False
    """Whether this node answers the probe after the inner steps, by ``ProbeMade``."""


@dataclass(frozen=True, slots=True)
class CombinePart:
    """One input of a mean."""

    peer_id: PeerId
    part: PartSlice


@dataclass(frozen=True, slots=True)
class CombineParts:
    """Check some parts of one slice and store their mean; answered by ``PartsCombined`` or ``CombineFailed``.

    All blobs are whole. Parts are summed in their order, and divided once by their number. Ordered again it comes to
    the same end.
    """

    number: int
    """Names the order in its answer; never used twice in one life of the machine."""
    round_index: int
    job: Job
    slice_index: int
    slice_count: int
    subset: tuple[int, ...]
    """Tensors of the vector, ascending; empty for all."""
    parts: tuple[CombinePart, ...]
    """Ascending by key, this node's own among them unless it is gated against another mean."""
    mixed_root: Digest | None = None
    """What gated outer iterates among the parts are relative to; ``None`` where the round has none."""


@dataclass(frozen=True, slots=True)
class CheckMean:
    """Look into a mean that another member made, whose blob is whole; answered by ``MeanChecked``."""

    number: int
    round_index: int
    job: Job
    slice_index: int
    slice_count: int
    subset: tuple[int, ...]
    contributor_count: int
    mean: PartSlice
    mixed_root: Digest | None = None
    """As for ``CombineParts``."""


@dataclass(frozen=True, slots=True)
class MixedSlice:
    """One slice of what came of a job."""

    mean: SliceName | None
    """Blob of the mean, whole and checked; ``None`` leaves the own values there."""
    contributor_count: int
    """Whose values are in, this node's own among them or not; 1 for the own alone."""


@dataclass(frozen=True, slots=True)
class MixReady:
    """Hand the result of a job to the training process; answers ``ResultWanted``."""

    round_index: int
    job: Job
    slices: tuple[MixedSlice, ...]
    """As many as the plan had; none if the job changed nothing at all."""
    reason: str = ""
    """Why something is missing: ``part`` (the own vector), ``late``, ``lost`` (members that cannot be reached),
    ``over`` (the others are further), ``refused`` (bad parts), ``store``, or empty."""

    @property
    def is_alone(self) -> bool:
        """Whether nobody else's values are in."""
        return all(piece.mean is None for piece in self.slices)


@dataclass(frozen=True, slots=True)
class StoreState:
    """Hand z over as one blob when the next round opens, for joiners; answered by ``StateStored``."""


@dataclass(frozen=True, slots=True)
class CompareProbes:
    """Compute how far apart the trainers of a round are; answered by ``ProbesCompared``. Each answer was checked."""

    number: int
    """As of ``CombineParts``."""
    round_index: int
    answers: tuple[Answer, ...]
    """Ascending by the keys of those who gave them."""


MixingEffect = StartMixing | OpenRound | CombineParts | CheckMean | MixReady | StoreState | CompareProbes
"""Anything only the machines of mixing order."""

MIXING_EFFECTS = (StartMixing, OpenRound, CombineParts, CheckMean, MixReady, StoreState, CompareProbes)
