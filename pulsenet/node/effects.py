"""What a core machine orders the shell to do.

The shell executes the effects of one ``handle`` call in the order of :data:`EXECUTION_ORDER`:
persist, then apply, then announce. A crash may repeat a message; it must never contradict one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pulsenet.chain.records import Contribution, Kind, Manifest, Member, SignedRecord, SliceName, StateAnchor
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.events import BlobLost, ContributionSeen, HeadSeen, ReceiptSeen, StateLost, StateReached, TermSeen
from pulsenet.node.mixing.effects import MIXING_EFFECTS, MixingEffect
from pulsenet.node.mixing.events import PresenceEnded, PresenceSeen, ProbeSeen, RosterSeen
from pulsenet.wire.messages import Message


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """Keep a signed record, durable, under its payload digest."""

    record: SignedRecord


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Keep a verified chunk, durable, under its digest; answered by ``ChunkStored`` or ``StoreFailed``."""

    digest: Digest
    data: bytes


@dataclass(frozen=True, slots=True)
class StoreChunkList:
    """Keep a verified encoded chunk list under its blob id."""

    blob_id: Digest
    data: bytes


@dataclass(frozen=True, slots=True)
class SaveState:
    """Replace a named value of the node's durable state (newest head, epoch, fork proof)."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Records and blobs nobody here needs any more; the shell deletes what no lease protects."""

    blob_ids: tuple[Digest, ...]
    record_digests: tuple[Digest, ...]
    spares_versions: bool = False
    """Whether a blob stays that a stored manifest names: members of a round choose what theirs are called, and may have
    chosen the name of a version's."""


@dataclass(frozen=True, slots=True)
class PrepareHop:
    """Decode a patch while its chunks become durable, ahead of an ``ApplyHop`` of the same manifest; no answer.

    The mirror holds the patch's base and stays as it is. Whatever was prepared before is dropped. A mirror that holds
    something else, or cannot prepare, does nothing: ``ApplyHop`` then decodes.
    """

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class DropPreparation:
    """The hop being prepared will not be made; no answer."""


@dataclass(frozen=True, slots=True)
class ApplyHop:
    """Move the mirror along one manifest whose blob is whole; answered by ``HopApplied`` or ``HopFailed``.

    Whatever was prepared is used if it is for this manifest and what the mirror holds, and dropped otherwise.
    """

    manifest: Manifest
    manifest_digest: Digest


@dataclass(frozen=True, slots=True)
class HandToEngine:
    """Bring the engine to the mirror's version; answered by ``EngineApplied`` or ``EngineFailed``."""

    version: Version


@dataclass(frozen=True, slots=True)
class EncodeSnapshot:
    """Encode the offered snapshot: a patch against the committed baseline, or an anchor.

    Answered by ``PatchEncoded`` or ``EncodeFailed``.
    """

    generation: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class StoreAnchor:
    """Write the committed version as an anchor blob; answered by ``AnchorStored`` or ``ExtraFailed``."""

    version: Version


@dataclass(frozen=True, slots=True)
class EncodeSkip:
    """Compose the patches between two versions; answered by ``SkipEncoded`` or ``ExtraFailed``."""

    base_version: Version
    version: Version


@dataclass(frozen=True, slots=True)
class Commit:
    """Make records and state durable in one transaction, then move the baseline.

    Answered by ``Committed``, or by ``EncodeFailed`` with nothing stored and the baseline where it was.
    """

    generation: int | None
    """``None`` for an anchor or skip beside the committed version: the baseline stays, failure is ``ExtraFailed``."""
    version: Version
    root: Digest
    records: tuple[SignedRecord, ...]
    state: tuple[tuple[str, bytes], ...]
    is_standby: bool = False
    """Another authority coordinates the run: the version is kept ready here and not announced."""


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """A newer snapshot replaced this waiting one; tell the training process."""

    generation: int


@dataclass(frozen=True, slots=True)
class RefuseSnapshot:
    """This snapshot will not be published; tell the training process.

    ``reason`` is a stable code: ``not_publisher``, ``table``, ``superseded`` or ``authorities``; in a run with rounds
    also ``round``, ``behind`` or ``diverged``.
    """

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send a request to a peer; answered by ``ReplyReceived`` / ``RequestDone`` or ``RequestFailed``."""

    request_id: int
    peer_id: PeerId
    message: Message
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Stop receiving the chunks of a request, which others bring sooner or nobody any more.

    What is under way may still be told.
    """

    request_id: int
    peer_id: PeerId
    blob_id: Digest


@dataclass(frozen=True, slots=True)
class DialPeer:
    """Try to reach a peer; answered by ``PeerConnected`` or ``PeerLost``."""

    peer_id: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnnounceHead:
    """Put the signed head into the directory under our authority key, and show it to the mesh as ``HeadSeen``."""

    record: SignedRecord


@dataclass(frozen=True, slots=True)
class AnnounceHave:
    """Put our have record into the directory."""

    record: SignedRecord


@dataclass(frozen=True, slots=True)
class StrikePeer:
    """The peer broke the specification; counted under ``code``, and the shell may drop it."""

    peer_id: PeerId
    code: str


@dataclass(frozen=True, slots=True)
class Count:
    """Add ``value`` to a counter of the closed set in ``pulsenetd.metrics``; ``label`` from a closed set."""

    name: str
    label: str
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """The newest verified state, for status, metrics and the operator's log.

    ``fields`` holds plain values such as ``applied_version``; the shell shows what it knows.
    """

    fields: tuple[tuple[str, str | int | float | bool | None], ...]


@dataclass(frozen=True, slots=True)
class Log:
    """One line for the operator; ``level`` is ``info``, ``warning`` or ``error``."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Wake the machine at this monotonic time, replacing any earlier request."""

    at: float


class Fate(StrEnum):
    """What a final receipt makes of this node's own work of its round."""

    COUNTED = "counted"
    """The residual is what was not sent, and the part that the scale cut off."""
    MISSED = "missed"
    """Not listed: everything of this round, sent or not, is folded back into the residual."""
    REJECTED = "rejected"
    """The content was refused: this round's work is dropped, the residual is as before the round."""
    DROPPED = "dropped"
    """Missed too often: the residual is dropped as well, and the inner optimizer starts afresh."""


@dataclass(frozen=True, slots=True)
class RunInnerSteps:
    """Let the training process run this many inner steps on from where it is; answered by ``InnerStepsDone``.

    The order may come again, where it may have been lost behind something that the disk refused: then it bears the
    same number, and steps that were run are not run once more.
    """

    round_index: int
    inner_steps: int
    number: int = 0
    """Rises with each order of one life of the machine."""


@dataclass(frozen=True, slots=True)
class StoreContribution:
    """Gate what the inner steps of this round made, and store it with what a fold-back needs.

    Answered by ``ContributionStored`` or ``ContributionFailed``. Inner steps still running end first. Ordered again
    for a round whose contribution is stored, it is only answered again.
    """

    round_index: int


@dataclass(frozen=True, slots=True)
class CheckContribution:
    """Look into a contribution whose blob is whole; answered by ``ContributionChecked``."""

    contribution: Contribution
    contribution_digest: Digest


@dataclass(frozen=True, slots=True)
class SumSlices:
    """Sum some slices of what a final receipt lists; answered by ``SlicesSummed`` or ``SumFailed``.

    There are as many slices as members, and those parts of every blob are here. Nothing moves. Ordered again, it is
    done again, to the same end.
    """

    round_index: int
    members: tuple[tuple[Member, Contribution], ...]
    """Ascending by key."""
    slices: tuple[int, ...]
    """Ascending."""
    stored: tuple[int, ...]
    """Those of them whose blobs are stored; of the others only the names are asked."""
    ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each member, where each of the slices lies in its blob: offset and size in bytes. Empty if all slices are
    summed, because then all blobs are whole."""


@dataclass(frozen=True, slots=True)
class StepState:
    """Do the outer step of a final receipt, and settle the residual in the same breath.

    All blobs are whole, or with ``slices`` those and the own contribution. Inner steps still running end first.
    Answered by ``StateStepped`` or ``StepFailed``; ordered again for a round that is done, it is only answered again.

    Of the own contribution the training process may hold the corrected pseudo-gradient or not: without it,
    ``COUNTED`` means zero wherever its blob sent, and the others leave the residual as it is.
    """

    round_index: int
    members: tuple[tuple[Member, Contribution], ...]
    """Ascending by key; the state stays as it is if there is none."""
    fate: Fate
    slices: tuple[SliceName, ...] = ()
    """If any, all slices of the aggregate, in order: they are read, and not what the members sent."""


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Replace the outer state by an anchor whose blob is whole; answered by ``StateRestored`` or ``RestoreFailed``."""

    anchor: StateAnchor
    drops_residual: bool
    """Whether the residual is unknown or of a state that was wrong, stored contributions included; else it stays."""


@dataclass(frozen=True, slots=True)
class StoreStateAnchor:
    """Write the outer state of this round as a blob, before any later step; answered by ``StateAnchorStored``."""

    round_index: int


@dataclass(frozen=True, slots=True)
class ShowToMachines:
    """Tell every machine of this node, the sender included."""

    event: (
        HeadSeen
        | BlobLost
        | TermSeen
        | ContributionSeen
        | ReceiptSeen
        | StateReached
        | StateLost
        | RosterSeen
        | PresenceSeen
        | PresenceEnded
        | ProbeSeen
    )


Effect = (
    StoreRecord
    | StoreChunk
    | StoreChunkList
    | SaveState
    | Release
    | PrepareHop
    | DropPreparation
    | ApplyHop
    | HandToEngine
    | EncodeSnapshot
    | StoreAnchor
    | EncodeSkip
    | Commit
    | DropSnapshot
    | RefuseSnapshot
    | SendRequest
    | CancelRequest
    | DialPeer
    | AnnounceHead
    | AnnounceHave
    | StrikePeer
    | Count
    | Report
    | Log
    | SetTimer
    | RunInnerSteps
    | StoreContribution
    | CheckContribution
    | SumSlices
    | StepState
    | RestoreState
    | StoreStateAnchor
    | MixingEffect
    | ShowToMachines
)
"""Anything a machine may order."""

EXECUTION_ORDER: dict[type[Effect], int] = {
    StoreRecord: 0,
    StoreChunkList: 0,
    SaveState: 0,
    Commit: 0,
    StoreChunk: 1,
    StoreAnchor: 1,
    EncodeSkip: 1,
    EncodeSnapshot: 1,
    PrepareHop: 1,
    DropPreparation: 1,
    ApplyHop: 1,
    HandToEngine: 1,
    DropSnapshot: 1,
    RefuseSnapshot: 1,
    StoreStateAnchor: 1,
    **dict.fromkeys(MIXING_EFFECTS, 1),
    RunInnerSteps: 1,
    StoreContribution: 1,
    CheckContribution: 1,
    SumSlices: 1,
    StepState: 1,
    RestoreState: 1,
    ShowToMachines: 2,
    SendRequest: 2,
    CancelRequest: 2,
    DialPeer: 2,
    AnnounceHead: 2,
    AnnounceHave: 2,
    StrikePeer: 3,
    Count: 3,
    Report: 3,
    Log: 3,
    SetTimer: 3,
    Release: 4,
}
"""Persist, apply, announce, account, release. Sorting is stable, so equal ranks keep their order."""
