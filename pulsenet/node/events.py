"""What the shell tells a core machine: things that happened, with nothing left to look up."""

from __future__ import annotations

from dataclasses import dataclass

from pulsenet.chain.records import SliceName
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.mixing.events import MixingEvent
from pulsenet.wire.messages import Message


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time asked for by the last ``SetTimer`` has come."""


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A stream to this peer can be opened, in our direction if ``outbound``."""

    peer_id: PeerId
    addresses: tuple[str, ...]
    outbound: bool


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer cannot be reached any more."""

    peer_id: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class HeadSeen:
    """An encoded signed head arrived: pushed by a peer, read from the directory or from disk."""

    record: bytes
    source: PeerId | None
    """``None`` when it came from the directory or the disk."""


@dataclass(frozen=True, slots=True)
class HaveSeen:
    """An encoded signed have record arrived from a peer or the directory."""

    record: bytes
    source: PeerId | None


@dataclass(frozen=True, slots=True)
class ForkProofSeen:
    """Two encoded signed manifests said to disagree about one version."""

    first: bytes
    second: bytes
    source: PeerId


@dataclass(frozen=True, slots=True)
class ReplyReceived:
    """The reply to a request; a ``GetChunks`` yields one event per chunk, then ``RequestDone``."""

    request_id: int
    peer_id: PeerId
    reply: Message


@dataclass(frozen=True, slots=True)
class RequestDone:
    """Every reply to this request has arrived and was acknowledged."""

    request_id: int
    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """No reply will come: ``reason`` is a stable code such as ``timeout``, ``closed`` or ``refused``."""

    request_id: int
    peer_id: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class ChunkStored:
    """The chunk is durable and can be served."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The disk refused; ``reason`` is a stable code such as ``enospc``."""

    digest: Digest | None
    reason: str


@dataclass(frozen=True, slots=True)
class BlobDamaged:
    """The disk lost a chunk of a stored blob: read again, it was not what it had been, and is deleted."""

    blob_id: Digest


@dataclass(frozen=True, slots=True)
class BlobLost:
    """No peer has what the disk lost of a blob that this node publishes; said by one machine to the others."""

    blob_id: Digest


@dataclass(frozen=True, slots=True)
class RoomTaken:
    """Blobs of rounds take this much of the room for blobs: what is kept of versions has to make do with the rest."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class HopApplied:
    """The mirror now holds ``version``, its root was checked and the fact is durable."""

    version: Version
    root: Digest


@dataclass(frozen=True, slots=True)
class HopFailed:
    """The hop to ``version`` was undone; ``mirror`` is what the mirror holds now, if anything.

    ``reason`` is a stable code: ``base_mismatch``, ``root_mismatch``, ``decode``, ``structure``, ``enospc``.
    """

    version: Version
    reason: str
    mirror: Version | None


@dataclass(frozen=True, slots=True)
class EngineApplied:
    """The engine confirmed that it serves ``version``."""

    version: Version


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine refused or died; ``version`` is what it holds now, if known."""

    version: Version | None
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotOffered:
    """The training process handed over weights; ``generation`` names the hand-off."""

    generation: int
    trainer_step: int
    table_digest: Digest
    consensus: bool = True
    """``False`` where all members of a run that mixes do not hold them."""


@dataclass(frozen=True, slots=True)
class PatchEncoded:
    """A blob exists, durable in the store, for the publish that ``EncodeSnapshot`` started."""

    generation: int
    blob_id: Digest
    codec_id: int
    root: Digest
    raw_size_bytes: int
    encoded_size_bytes: int
    changed_count: int
    element_count: int


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """The publish was given up, while encoding or at its commit, and the baseline did not move.

    ``reason`` is a stable code.
    """

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class AnchorStored:
    """The committed version's anchor blob is durable."""

    version: Version
    blob_id: Digest
    encoded_size_bytes: int


@dataclass(frozen=True, slots=True)
class SkipEncoded:
    """The skip patch from ``base_version`` to ``version`` is durable."""

    base_version: Version
    version: Version
    blob_id: Digest
    codec_id: int
    encoded_size_bytes: int
    changed_count: int


@dataclass(frozen=True, slots=True)
class ExtraFailed:
    """The anchor or skip patch in work for ``version`` was given up; ``reason`` is a stable code."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """Everything the last ``Commit`` named is fsynced and the baseline has moved."""

    version: Version


@dataclass(frozen=True, slots=True)
class VoteSeen:
    """An encoded signed vote arrived from a peer."""

    record: bytes
    source: PeerId


@dataclass(frozen=True, slots=True)
class TermSeen:
    """Encoded signed votes said to prove whose term it is."""

    votes: tuple[bytes, ...]
    source: PeerId | None
    """``None`` when another machine of this node says so."""


@dataclass(frozen=True, slots=True)
class ContributionSeen:
    """An encoded signed contribution arrived, from a peer or from this node's own training process."""

    record: bytes
    source: PeerId | None


@dataclass(frozen=True, slots=True)
class ReceiptSeen:
    """An encoded signed receipt arrived: proposed, countersigned or final."""

    record: bytes
    votes: tuple[bytes, ...]
    source: PeerId | None


@dataclass(frozen=True, slots=True)
class TrainingAttached:
    """The training process is there, with the newest whole outer state it has on disk, if any."""

    round_index: int | None
    """Rounds that led to that state; ``None`` while there is none."""
    state_root: Digest | None
    stored: ContributionStored | None
    """The newest contribution it stored, whether or not it was ever sent."""


@dataclass(frozen=True, slots=True)
class TrainingLost:
    """The training process is gone, and with it every inner step it had not stored."""


@dataclass(frozen=True, slots=True)
class InnerStepsDone:
    """The steps that ``RunInnerSteps`` ordered are done."""

    round_index: int


@dataclass(frozen=True, slots=True)
class ContributionStored:
    """The contribution's blob is durable; the training process holds what a fold-back needs, as long as it lives."""

    round_index: int
    base_state_root: Digest
    blob_id: Digest
    encoded_size_bytes: int
    entry_count: int
    element_count: int
    norm_bits: int
    codec_id: int


@dataclass(frozen=True, slots=True)
class ContributionFailed:
    """There is nothing to send for this round; ``reason`` is a stable code such as ``finite`` or ``enospc``."""

    round_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class ContributionChecked:
    """Whether the content of a contribution may be counted; ``reason`` is empty or a code of SPEC section 6.9."""

    contribution_digest: Digest
    reason: str


@dataclass(frozen=True, slots=True)
class SlicesSummed:
    """The slices that ``SumSlices`` asked for; those to be stored are durable and can be served."""

    round_index: int
    slices: tuple[tuple[int, SliceName], ...]
    """Place and name of each."""


@dataclass(frozen=True, slots=True)
class SumFailed:
    """The slices were not summed; ``reason`` is a stable code."""

    round_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class StateStepped:
    """The outer step of ``round_index - 1`` is done, residual included."""

    round_index: int
    state_root: Digest


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The outer step was not done and nothing moved; ``reason`` is a stable code."""

    round_index: int
    reason: str


@dataclass(frozen=True, slots=True)
class StateRestored:
    """The training process holds the state of an anchor, hashed after it was read."""

    round_index: int
    state_root: Digest


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """The anchor could not be restored; ``reason`` is a stable code."""

    reason: str


@dataclass(frozen=True, slots=True)
class StateAnchorStored:
    """The outer state of this round is durable as a blob that can be served."""

    round_index: int
    state_root: Digest
    blob_id: Digest
    encoded_size_bytes: int


@dataclass(frozen=True, slots=True)
class StateReached:
    """This node's trainer holds the state that is due next; said by one machine to the others."""

    round_index: int
    state_root: Digest


@dataclass(frozen=True, slots=True)
class StateLost:
    """This node's trainer holds no current state any more; said by one machine to the others."""


Event = (
    TimerFired
    | PeerConnected
    | PeerLost
    | HeadSeen
    | HaveSeen
    | ForkProofSeen
    | ReplyReceived
    | RequestDone
    | RequestFailed
    | ChunkStored
    | StoreFailed
    | BlobDamaged
    | BlobLost
    | RoomTaken
    | HopApplied
    | HopFailed
    | EngineApplied
    | EngineFailed
    | SnapshotOffered
    | PatchEncoded
    | EncodeFailed
    | AnchorStored
    | SkipEncoded
    | ExtraFailed
    | Committed
    | VoteSeen
    | TermSeen
    | ContributionSeen
    | ReceiptSeen
    | TrainingAttached
    | TrainingLost
    | InnerStepsDone
    | ContributionStored
    | ContributionFailed
    | ContributionChecked
    | SlicesSummed
    | SumFailed
    | StateStepped
    | StepFailed
    | StateRestored
    | RestoreFailed
    | StateAnchorStored
    | StateReached
    | StateLost
    | MixingEvent
)
"""Anything a machine may be told."""
