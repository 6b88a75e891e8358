"""What the shell tells the machines of mixing, beside what every machine hears.

The training process holds z, the momentum and the inner steps. The shell encodes the vectors it hands over as blobs,
one for each slice that the round's plan asks for, and tells the machine their names; it never shows it a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

from pulsenet.ids import Digest, PeerId
from pulsenet.outer.mixing.settings import Job
from pulsenet.tensors.params import ParameterTable


@dataclass(frozen=True, slots=True)
class PartSlice:
    """One slice of a vector, as a blob in the store that can be served.

    A blob begins with its round and job, so equal values of two rounds are two blobs, and the older can be released.
    """

    blob_id: Digest
    encoded_size_bytes: int
    element_count: int
    """Elements of the slice, dense, of all sections together; the same for every member of the round."""
    norm_bits: int
    """Euclidean norm of the slice's values as FP32 bits."""


@dataclass(frozen=True, slots=True)
class DebtName:
    """An exchange that only the other side applied."""

    round_index: int
    job: Job


@dataclass(frozen=True, slots=True)
class MixingAttached:
    """A training process is there; answered by ``StartMixing``.

    Whatever round was open is over: one that outlived an earlier life of this machine ended it with its own values.
    """

    round_index: int | None
    """The round it wants to open next; ``None`` if it holds no state that counts, and would adopt somebody's."""
    element_count: int
    """Elements of all masters: no state that is adopted may be larger."""


@dataclass(frozen=True, slots=True)
class MixingLost:
    """The training process is gone, and with it every round it had begun."""


@dataclass(frozen=True, slots=True)
class AdoptFailed:
    """The state that ``StartMixing`` offered could not be read; another one is looked for. ``reason`` is a code."""

    reason: str


@dataclass(frozen=True, slots=True)
class RoundWanted:
    """The training process wants to open a round; answered by ``OpenRound``. Every earlier round is over."""

    round_index: int


@dataclass(frozen=True, slots=True)
class PartStored:
    """The vector of a job, the debts of the plan added to it, is durable as blobs: as many as the plan has slices."""

    round_index: int
    job: Job
    slices: tuple[PartSlice, ...]
    debts: tuple[DebtName, ...] = ()
    """Debts of the plan that were added; from now on they are settled."""
    mixed_root: Digest | None = None
    """Root of the last common mean this node holds, whatever the job: survivors compare it, and parts that are gated
    against it combine only with their like."""


@dataclass(frozen=True, slots=True)
class PartFailed:
    """There is no vector for a job of the plan; ``reason`` is a stable code such as ``finite`` or ``enospc``."""

    round_index: int
    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class ResultWanted:
    """The training process waits for the result of a job; answered by ``MixReady`` within the job's wait.

    Of Mix1 it is told at the end of the inner steps, of Mix2 together with ``PartStored``.
    """

    round_index: int
    job: Job


@dataclass(frozen=True, slots=True)
class PartsCombined:
    """The mean that ``CombineParts`` of this number asked for is durable and can be served."""

    number: int
    blob_id: Digest
    encoded_size_bytes: int
    norm_bits: int


@dataclass(frozen=True, slots=True)
class CombineFailed:
    """No mean was made.

    With ``bad`` it is the fault of those members: their parts are not what the rules allow, and the machine asks
    again without them. Without, this node could not do it.
    """

    number: int
    reason: str
    bad: tuple[tuple[PeerId, str], ...] = ()
    """Whose part is bad, and why: a code that says what its blob breaks."""


@dataclass(frozen=True, slots=True)
class MeanChecked:
    """Whether the mean that ``CheckMean`` of this number named may be taken; ``reason`` is empty or a code as above."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class StateStored:
    """z at the opening of a round is durable as one blob, as ``StoreState`` asked; joiners may begin from it."""

    round_index: int
    state: PartSlice


@dataclass(frozen=True, slots=True)
class MastersTold:
    """What this node's training process trains: while it coordinates, subsets of Mix2 are chosen from it."""

    table: ParameterTable


@dataclass(frozen=True, slots=True)
class ProbeMade:
    """What this node's training process predicts for the tokens of the probe, after the inner steps of a round."""

    round_index: int
    batch: Digest
    """Names the tokens."""
    bins: Digest
    """Of the tokens that have bins of their own."""
    answer: bytes
    """Encoded probabilities of the bins."""
    scores: bytes
    """FP32 for each tensor of Mix2's subset: how far apart its two parts were; empty if nothing was mixed."""


@dataclass(frozen=True, slots=True)
class ProbeSeen:
    """An encoded signed answer to a probe arrived, from a peer or from this node's own trainer."""

    record: bytes
    source: PeerId


@dataclass(frozen=True, slots=True)
class ProbesCompared:
    """What the answers came to that ``CompareProbes`` of this number named; ``None`` if no two could be compared."""

    number: int
    distance: float | None


@dataclass(frozen=True, slots=True)
class ShareSeen:
    """An encoded signed share arrived from a peer."""

    record: bytes
    source: PeerId


@dataclass(frozen=True, slots=True)
class RosterSeen:
    """An encoded signed roster that the node's book accepted; said by one machine to the others."""

    record: bytes


@dataclass(frozen=True, slots=True)
class PresenceSeen:
    """A trainer told in which round it is: a peer by asking for the roster, or this node's own."""

    peer_id: PeerId
    round_index: int | None
    """The round it is in, or is about to open; ``None`` while this node's own looks for a state to begin with."""


@dataclass(frozen=True, slots=True)
class PresenceEnded:
    """This node's own training process is gone."""


MixingEvent = (
    MixingAttached
    | MixingLost
    | AdoptFailed
    | RoundWanted
    | PartStored
    | PartFailed
    | ResultWanted
    | PartsCombined
    | CombineFailed
    | MeanChecked
    | StateStored
    | MastersTold
    | ProbeMade
    | ProbeSeen
    | ProbesCompared
    | ShareSeen
    | RosterSeen
    | PresenceSeen
    | PresenceEnded
)
"""Anything only the machines of mixing are told."""
