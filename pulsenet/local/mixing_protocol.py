"""Messages of mixing: how a training process averages with others through the daemon beside it.

They travel as those of :mod:`pulsenet.local.protocol`, on a connection that the process keeps for them. Its closing
means that the process is gone with everything that it did not store. Settings are asked for and blobs are put and
fetched as in :mod:`pulsenet.local.rounds_protocol`, of which a few messages are used here too.

======================  =========================================================================================
training process        daemon
======================  =========================================================================================
:class:`OpenMixing`     :class:`MixingOpened`; refused with ``no-mixing`` if the run's algorithm is another,
                        ``table``, ``self-test``, ``not-listed``, or ``busy`` while another connection has it open
:class:`Locate`         :class:`Begin`, or ``NoOrder`` when the time is up; then it may be asked again
:class:`RefuseState`    the same: the state that was offered could not be read, and another one is looked for
:class:`WantRound`      :class:`RoundOpened`, or ``NoOrder``
``PutBlobPart``         ``BlobTaken`` or ``BlobRefused``
:class:`StorePart`      ``Waiting``. A job's vector: its blobs were put before
:class:`FailPart`       ``Waiting``. There is no vector for a job of the round
:class:`AwaitMix`       :class:`MixDone` within the job's wait, or ``NoOrder`` when the time of the question is up
``FetchBlobPart``       ``BlobPart`` or ``NoBlobPart``
:class:`StoreIterate`   ``Waiting``. z at the opening of the round, if :class:`RoundOpened` wants it
:class:`StoreProbe`     ``Waiting``. What the process predicts, if :class:`RoundOpened` asked for it
:class:`TellRound`      ``Waiting``. What a round did, for status and metrics
======================  =========================================================================================

Anything else is refused with a :class:`pulsenet.local.protocol.LocalRefusal`, and the connection closes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, get_args

from pulsenet import limits
from pulsenet.ids import Digest
from pulsenet.local.rounds_protocol import Code, Table
from pulsenet.wire.schema import CountMax, SizeMax

DEBTS_MAX: Final = 64
"""Of one job; more are dropped before they get so many."""

Subset = Annotated[tuple[int, ...], CountMax(limits.TENSORS_MAX)]
"""Tensor indices, ascending; empty for all."""


@dataclass(frozen=True, slots=True)
class OpenMixing:
    """Take part with these masters, and with arithmetic that gave this self-test digest."""

    table: Table
    self_test: Digest


@dataclass(frozen=True, slots=True)
class MixingOpened:
    """This connection is the training process of the node."""


@dataclass(frozen=True, slots=True)
class Locate:
    """Ask where to begin."""

    round_index: int | None
    """The round to be opened next; ``None`` for a process that holds no state that counts."""
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class RefuseState:
    """The state that :class:`Begin` offered is not what it should be; ``reason`` is a stable code."""

    reason: Code
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class MixBlob:
    """A blob by its name."""

    blob_id: Digest
    encoded_size_bytes: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Where the run is, and what a new process may begin from."""

    round_index: int
    parts: Annotated[tuple[MixBlob, ...], CountMax(limits.ROSTER_MEMBERS_MAX)]
    """Slices of z, all of them in order; none if nobody offers a state."""
    is_consensus: bool


@dataclass(frozen=True, slots=True)
class WantRound:
    """Open a round; every earlier one is over."""

    round_index: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class DebtName:
    """An exchange that only the other side applied."""

    round_index: int
    job: int


@dataclass(frozen=True, slots=True)
class DebtBlobs:
    """What is to be added to a vector: a mean less what was kept instead."""

    name: DebtName
    own: MixBlob
    mean: MixBlob
    subset: Subset
    """Tensors that the blobs are of."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What one job asks for."""

    slice_count: int
    """Blobs that the vector is cut into; 0 if nothing is handed over and nothing is asked."""
    debts: Annotated[tuple[DebtBlobs, ...], CountMax(DEBTS_MAX)]


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """The round that is opened."""

    round_index: int
    is_listed: bool
    member_count: int
    subset: Subset
    """Tensors of Mix2."""
    mix1: JobPlan
    mix2: JobPlan
    wants_iterate: bool
    """Whether z is to be stored for joiners."""
    publishes: bool
    """Whether this node coordinates the run, so that it publishes its weights."""
    is_probed: bool
    """Whether :class:`StoreProbe` is to follow the round, if the process has a probe."""


@dataclass(frozen=True, slots=True)
class PartBlob:
    """One slice of a vector."""

    blob_id: Digest
    encoded_size_bytes: int
    element_count: int
    norm_bits: int
    """Euclidean norm as FP32 bits."""


@dataclass(frozen=True, slots=True)
class StorePart:
    """The vector of a job, in blobs that were put on this connection."""

    round_index: int
    job: int
    slices: Annotated[tuple[PartBlob, ...], CountMax(limits.ROSTER_MEMBERS_MAX)]
    debts: Annotated[tuple[DebtName, ...], CountMax(DEBTS_MAX)]
    """Those of the plan that were added."""
    mixed_root: Digest | None
    """Root of the newest common mean that the process holds."""


@dataclass(frozen=True, slots=True)
class FailPart:
    """There is no vector; ``reason`` is a stable code."""

    round_index: int
    job: int
    reason: Code


@dataclass(frozen=True, slots=True)
class AwaitMix:
    """Wait for the result of a job; of Mix1 asked at the end of the inner steps."""

    round_index: int
    job: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class MixSlice:
    """One slice of a result."""

    mean: MixBlob | None
    """``None`` leaves the own values there."""
    contributor_count: int


@dataclass(frozen=True, slots=True)
class MixDone:
    """What came of a job."""

    round_index: int
    job: int
    slices: Annotated[tuple[MixSlice, ...], CountMax(limits.ROSTER_MEMBERS_MAX)]
    """As many as the plan had; none if nothing changed."""
    reason: Code
    """Why something is missing."""


@dataclass(frozen=True, slots=True)
class StoreIterate:
    """z at the opening of a round, in a blob that was put."""

    round_index: int
    part: PartBlob


@dataclass(frozen=True, slots=True)
class TellRound:
    """What a round did; numbers as FP32 bits."""

    round_index: int
    mix1_count: int
    """Trainers in the mean; 0 if the variant has no Mix1."""
    mix2_count: int
    mix1_reason: Code
    mix2_reason: Code
    inner_seconds_bits: int
    blocked_seconds_bits: int
    utilization_bits: int
    """Since the run began."""
    delta_norm_bits: int
    distance_bits: int | None
    """From z to the mean that Mix1 gave."""
    start_square_bits: int | None
    """Mean squared distance between two trainers' z; ``None`` where no whole mean told it."""
    end_square_bits: int | None
    """Of their weights after the inner steps, on the tensors of Mix2."""
    noise_square_bits: int | None
    """Of what the inner steps did, on the same tensors."""
    is_consensus: bool | None
    """Whether the version that the round published is a mean that all members hold; ``None`` where none was."""


@dataclass(frozen=True, slots=True)
class StoreProbe:
    """What the process predicts for the tokens of its probe, after the inner steps of a round."""

    round_index: int
    batch: Digest
    bins: Digest
    answer: Annotated[bytes, SizeMax(limits.PROBE_ANSWER_SIZE_BYTES_MAX)]
    scores: Annotated[bytes, SizeMax(4 * limits.PROBE_SCORES_MAX)]


MixingMessage = (
    OpenMixing
    | MixingOpened
    | Locate
    | RefuseState
    | Begin
    | WantRound
    | RoundOpened
    | StorePart
    | FailPart
    | AwaitMix
    | MixDone
    | StoreIterate
    | TellRound
    | StoreProbe
)

MIXING_MESSAGE_TYPES: Final[tuple[type[MixingMessage], ...]] = get_args(MixingMessage)
"""In the order of their numbers."""
