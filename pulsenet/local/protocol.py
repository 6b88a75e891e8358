"""Messages between the daemon and the processes beside it: a training loop, an engine (docs: hand-off).

They travel in the frames of :mod:`pulsenet.local.framing`. A process opens a connection, sends :class:`Attach`, then
one request after another. Each request has one reply.

A publish is :class:`OfferSnapshot` and then one :class:`SnapshotPart` or :class:`ChangedPart` after another until the
table is covered. Each is answered by :class:`PartWanted`, or by :class:`PublishDone`: after the last part, or as soon
as the publish ended otherwise. A connection that closes before the last part gives the publish up.

Training processes also use the messages of ``pulsenet.local.rounds_protocol`` and ``pulsenet.local.mixing_protocol``.
This is no wire format of the swarm: both ends belong to one installation on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from pulsenet import limits
from pulsenet.chain.records import RewardName
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.local.mixing_protocol import MIXING_MESSAGE_TYPES, MixingMessage
from pulsenet.local.rounds_protocol import ROUNDS_MESSAGE_TYPES, Code, RoundsMessage, Table
from pulsenet.wire.messages import TaskId
from pulsenet.wire.schema import CountMax, SizeExact, SizeMax

PROTOCOL_VERSION: Final = 5

ROLLOUTS_REPLY_SIZE_BYTES_MAX: Final = limits.TABLE_SIZE_BYTES_MAX
"""Batches in one reply, together; the rest is left for the next call."""

STATUS_SIZE_BYTES_MAX: Final = 1 << 20

SENDER_SIZE_BYTES: Final = 16

Detail = Annotated[str, SizeMax(4096)]
TASKS_PER_CALL_MAX: Final = 1_024

TaskContent = Annotated[str, SizeMax(limits.TASK_SIZE_BYTES_MAX)]
Batch = Annotated[bytes, SizeMax(limits.ROLLOUT_BATCH_SIZE_BYTES_MAX)]


class PublishStatus(StrEnum):
    """What became of one publish."""

    QUEUED = "queued"
    """The daemon holds the snapshot; the caller did not want to wait for more."""
    COMMITTED = "committed"
    STANDBY = "standby"
    """Committed here and kept ready; the authority that coordinates the run announces the same version."""
    REPLACED = "replaced"
    """A newer publish took its place before work on it began; nothing is lost."""
    NOT_PUBLISHER = "not_publisher"
    """This node may not publish; nothing was done."""
    FAILED = "failed"
    """Not committed, or not known to be; ``reason`` says which."""


class UpdateKind(StrEnum):
    """What an engine is handed."""

    RECORDS = "records"
    """Absolute records from the engine's version to the new one, in spool form."""
    FULL = "full"
    """All weights, in the table's dense layout."""


@dataclass(frozen=True, slots=True)
class Attach:
    """First message of a connection; answered by :class:`Attached` or :class:`LocalRefusal`."""

    protocol_version: int
    software: Annotated[str, SizeMax(64)]


@dataclass(frozen=True, slots=True)
class Attached:
    """The daemon speaks this version and has this role."""

    protocol_version: int
    role: Annotated[str, SizeMax(16)]


@dataclass(frozen=True, slots=True)
class Origin:
    """Which hand-over of a training process that keeps a device baseline this is."""

    sender: Annotated[bytes, SizeExact(SENDER_SIZE_BYTES)]
    """Drawn anew for each device baseline: no other process, and no other model, has it."""
    number: int
    """Counts this sender's hand-overs, those that failed too."""


@dataclass(frozen=True, slots=True)
class OfferSnapshot:
    """Publish weights of this table; their parts follow."""

    trainer_step: int
    table: Table
    is_blocking: bool
    """Ask for a part only once the one before is in work: at most two are in memory, and the sender waits."""
    wait: bool
    """Send :class:`PublishDone` only once the outcome is known."""
    origin: Origin | None = None
    """``None``: the process keeps no device baseline, and every part is whole."""
    consensus: bool = True


@dataclass(frozen=True, slots=True)
class PartWanted:
    """Send the next part."""

    generation: int
    """Names the publish, in logs."""
    base_number: int | None = None
    """The hand-over of this sender that is committed: parts may tell what changed since. ``None``: whole parts only."""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The next tensors, in the sealed memfd that comes with this frame (see :mod:`pulsenet.local.parts`)."""

    tensor_count: int


@dataclass(frozen=True, slots=True)
class ChangedPart:
    """The next tensors by what changed, in the sealed memfd of this frame (see :mod:`pulsenet.local.changed_parts`)."""

    tensor_count: int
    size_bytes: int
    """Of the memory."""


@dataclass(frozen=True, slots=True)
class PublishDone:
    """Outcome of a publish; sizes are 0 unless committed, as a standby or not."""

    status: PublishStatus
    version: Version | None
    raw_size_bytes: int
    encoded_size_bytes: int
    changed_count: int
    element_count: int
    reason: Detail


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """Ask for weights newer than the engine's; answered by :class:`UpdateReply` or :class:`NoUpdate`."""

    engine_version: Version | None
    """``None``: the engine does not know what it holds, so it needs everything."""
    engine_root: Digest | None
    """Root of ``engine_version``, if it is known: another run has versions of the same name."""
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class UpdateReply:
    """New weights, in the descriptor that comes with this frame."""

    generation: int
    """Names this hand-over in :class:`ConfirmUpdate`."""
    kind: UpdateKind
    base_version: Version | None
    """What records start from; ``None`` for a full update."""
    version: Version
    root: Digest
    table: Table
    size_bytes: int
    """Of the descriptor's content."""


@dataclass(frozen=True, slots=True)
class NoUpdate:
    """Nothing newer came before the time was up."""


COPIED: Final = "copied"
"""Reason of one who took a hand-over and is no engine: nothing is said of what the engine holds."""


@dataclass(frozen=True, slots=True)
class ConfirmUpdate:
    """The engine took a hand-over, or refused it; answered by :class:`Confirmed`."""

    generation: int
    ok: bool
    held: Version | None
    """What the engine serves now; ``None`` if its weights are unknown."""
    reason: Detail


@dataclass(frozen=True, slots=True)
class Confirmed:
    """``accepted`` is false if the hand-over was withdrawn meanwhile: load again."""

    accepted: bool
    reason: Detail


@dataclass(frozen=True, slots=True)
class SubmitRollouts:
    """Samples for the trainers; the daemon adds run, number and signature. Fields as ``RolloutBatch``."""

    version_first: Version
    version_last: Version
    sample_count: int
    part_names: Annotated[tuple[RewardName, ...], CountMax(limits.REWARD_PARTS_MAX)]
    logprob_bits: int
    trainer: PeerId | None
    task_ids: Annotated[tuple[TaskId, ...], CountMax(limits.TASKS_PER_BATCH_MAX)]
    body: Batch
    metadata: Annotated[str, SizeMax(65_536)]


@dataclass(frozen=True, slots=True)
class RolloutsTaken:
    """Whether the daemon has stored the batch and will send it on."""

    accepted: bool
    reason: Detail
    retry_after_ms: int = 0
    """Above 0: nothing is wrong with the batch; there was no room for it, or the disk refused. Ask again then."""


@dataclass(frozen=True, slots=True)
class TakeRollouts:
    """Ask for verified batches; answered by :class:`RolloutsReply`, empty when the time is up."""

    count_max: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class SignedBatch:
    """A verified batch and the key that signed it."""

    peer_id: PeerId
    sequence: int
    """The batch's, so that nobody has to decode it to name it."""
    number_min: int
    """Samples that began with weights of a lower version number are stale."""
    batch: Batch
    """An encoded ``RolloutBatch``."""


@dataclass(frozen=True, slots=True)
class RolloutsReply:
    """Batches, oldest first; each is given out once."""

    batches: Annotated[tuple[SignedBatch, ...], CountMax(limits.ROLLOUT_QUEUE_BATCHES_MAX)]


@dataclass(frozen=True, slots=True)
class TellChecks:
    """How many samples of a key the training process recomputed; answered by :class:`ChecksNoted`."""

    peer_id: PeerId
    checked_count: int
    mismatched_count: int


@dataclass(frozen=True, slots=True)
class ChecksNoted:
    """They are counted."""


@dataclass(frozen=True, slots=True)
class SendTasks:
    """Work for the inferencers; answered by :class:`TasksQueued`."""

    contents: Annotated[tuple[TaskContent, ...], CountMax(TASKS_PER_CALL_MAX)]
    """JSON objects."""
    lease_ms: int


@dataclass(frozen=True, slots=True)
class TasksQueued:
    """Ids of the tasks, in their order; none of them if there was no room for all, and then why."""

    task_ids: Annotated[tuple[TaskId, ...], CountMax(TASKS_PER_CALL_MAX)]
    reason: Detail
    retry_after_ms: int
    """Above 0: there was no room."""


@dataclass(frozen=True, slots=True)
class TakeTasks:
    """Ask for work; answered by :class:`TasksGiven`, empty when the time is up."""

    count_max: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class GivenTask:
    """A task leased to this node."""

    trainer: PeerId
    task_id: TaskId
    content: TaskContent
    lease_ms: int


@dataclass(frozen=True, slots=True)
class TasksGiven:
    """Tasks of one trainer."""

    tasks: Annotated[tuple[GivenTask, ...], CountMax(limits.TASKS_PER_REPLY_MAX)]


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Ask how the node is; answered by :class:`StatusReply`."""


@dataclass(frozen=True, slots=True)
class StatusReply:
    """A JSON object."""

    status: Annotated[str, SizeMax(STATUS_SIZE_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class LocalRefusal:
    """The daemon will not do this; ``code`` is stable, ``detail`` is for people."""

    code: Code
    detail: Detail


LocalMessage = (
    Attach
    | Attached
    | OfferSnapshot
    | PartWanted
    | SnapshotPart
    | ChangedPart
    | PublishDone
    | RequestUpdate
    | UpdateReply
    | NoUpdate
    | ConfirmUpdate
    | Confirmed
    | SubmitRollouts
    | RolloutsTaken
    | TakeRollouts
    | RolloutsReply
    | TellChecks
    | ChecksNoted
    | SendTasks
    | TasksQueued
    | TakeTasks
    | TasksGiven
    | GetStatus
    | StatusReply
    | LocalRefusal
    | RoundsMessage
    | MixingMessage
)

MESSAGE_TYPES: Final[dict[int, type[LocalMessage]]] = {
    1: Attach,
    2: Attached,
    3: OfferSnapshot,
    4: PartWanted,
    5: PublishDone,
    6: RequestUpdate,
    7: UpdateReply,
    8: NoUpdate,
    9: ConfirmUpdate,
    10: Confirmed,
    11: SubmitRollouts,
    12: RolloutsTaken,
    13: TakeRollouts,
    14: RolloutsReply,
    15: GetStatus,
    16: StatusReply,
    17: LocalRefusal,
    18: SnapshotPart,
    19: ChangedPart,
    60: TellChecks,
    61: ChecksNoted,
    62: SendTasks,
    63: TasksQueued,
    64: TakeTasks,
    65: TasksGiven,
    **dict(enumerate(ROUNDS_MESSAGE_TYPES, start=20)),
    **dict(enumerate(MIXING_MESSAGE_TYPES, start=70)),
}
