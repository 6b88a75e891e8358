"""Messages peers exchange on a stream (SPEC section 3).

A requester opens a stream, sends :class:`Hello`, then requests one after another; each request is
answered by exactly one reply, except :class:`GetChunks`, which is answered by one :class:`ChunkReply`
per digest and closed by the requester's :class:`Ack`. A provider that will not answer sends
:class:`Refusal` and keeps the stream.

The annotations are the schema: ``wire/schema.py`` reads sizes and counts from them and checks them
before it allocates. Signed records travel as opaque bytes; ``chain/records.py`` knows what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, get_args

from pulsenet import limits
from pulsenet.ids import Digest, PeerId, RunId
from pulsenet.wire.schema import LATER, CountMax, SizeExact, SizeMax

Record = Annotated[bytes, SizeMax(limits.RECORD_SIZE_BYTES_MAX)]
"""An encoded ``SignedRecord``."""

Address = Annotated[str, SizeMax(limits.ADDRESS_SIZE_BYTES_MAX)]
"""A libp2p multiaddress without the trailing ``/p2p/...`` part."""

VoteRecord = Annotated[bytes, SizeMax(limits.VOTE_SIZE_BYTES_MAX)]
"""An encoded ``SignedRecord`` of a vote."""

Votes = Annotated[tuple[VoteRecord, ...], CountMax(limits.SIGNATURES_MAX)]
"""Votes of more than half of the authorities for one candidate and term, or nothing."""

ReasonCode = Annotated[str, SizeMax(64)]
Detail = Annotated[str, SizeMax(512)]

FEATURE_HOLDINGS = "holdings"
"""Answers :class:`GetHoldings`."""

FEATURE_PROBES = "probes"
"""Takes :class:`PushProbe`."""

FEATURES = (FEATURE_HOLDINGS, FEATURE_PROBES)
"""What this code says in its :class:`Hello` that it knows beside the first messages of this wire version."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on every stream, in both directions."""

    run_id: RunId
    wire_version_min: int
    wire_version_max: int
    role: Annotated[str, SizeMax(16)]
    software: Annotated[str, SizeMax(64)]
    features: Annotated[tuple[Annotated[str, SizeMax(32)], ...], CountMax(16)] = field(default=(), metadata=LATER)
    """What the sender knows beside the messages every node of this wire version knows."""


@dataclass(frozen=True, slots=True)
class GetHead:
    """Ask for the newest head the provider knows."""


@dataclass(frozen=True, slots=True)
class HeadReply:
    """The newest head, or ``None`` before the first publish."""

    head: Record | None


@dataclass(frozen=True, slots=True)
class GetRecords:
    """Ask for signed records by the digest of their payload."""

    digests: Annotated[tuple[Digest, ...], CountMax(limits.RECORDS_PER_REQUEST_MAX)]


@dataclass(frozen=True, slots=True)
class RecordsReply:
    """The records the provider holds among those asked for; absent ones are left out."""

    records: Annotated[tuple[Record, ...], CountMax(limits.RECORDS_PER_REQUEST_MAX)]


@dataclass(frozen=True, slots=True)
class GetDescriptors:
    """Ask for the descriptor revisions from ``revision_min`` upward, in order.

    Answered by :class:`RecordsReply`, at most ``REVISIONS_PER_REQUEST_MAX`` of them.
    """

    revision_min: int


@dataclass(frozen=True, slots=True)
class GetEpochs:
    """Ask for the epoch records from ``epoch_min`` upward; answered by :class:`RecordsReply`."""

    epoch_min: int


@dataclass(frozen=True, slots=True)
class GetChunkList:
    """Ask for a blob's chunk list, from byte ``offset`` of its encoding."""

    blob_id: Digest
    offset: int


@dataclass(frozen=True, slots=True)
class ChunkListReply:
    """Up to 1 MiB of the encoded chunk list from the offset asked for."""

    blob_id: Digest
    total_size_bytes: int
    data: Annotated[bytes, SizeMax(limits.CHUNK_SIZE_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class GetChunks:
    """Ask for chunks by digest."""

    digests: Annotated[tuple[Digest, ...], CountMax(limits.CHUNKS_PER_REQUEST_MAX)]
    blob_id: Digest | None = field(default=None, metadata=LATER)
    """The blob they are wanted for; a hint, by which a provider serves patches before anchors."""


@dataclass(frozen=True, slots=True)
class ChunkReply:
    """One chunk, or ``data = None`` when the provider does not hold it."""

    digest: Digest
    data: Annotated[bytes, SizeMax(limits.CHUNK_SIZE_BYTES_MAX)] | None


@dataclass(frozen=True, slots=True)
class Ack:
    """The requester has received everything (an EOF proves nothing: p2pd shows one late, and after faults as well)."""


@dataclass(frozen=True, slots=True)
class PushHead:
    """A newer head, pushed along the mesh; answered by :class:`PushReply`."""

    head: Record


@dataclass(frozen=True, slots=True)
class PushForkProof:
    """Two valid manifests of one version with different roots; answered by :class:`PushReply`."""

    first: Record
    second: Record


@dataclass(frozen=True, slots=True)
class PushRollouts:
    """A signed rollout batch for a trainer; answered by :class:`PushReply`."""

    batch: Annotated[bytes, SizeMax(limits.ROLLOUT_BATCH_SIZE_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class PushReply:
    """Whether a pushed item was taken; ``reason`` is empty or a stable code."""

    accepted: bool
    reason: ReasonCode


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer can be dialled."""

    peer_id: PeerId
    addresses: Annotated[tuple[Address, ...], CountMax(limits.ADDRESSES_MAX)]


@dataclass(frozen=True, slots=True)
class ExchangeHave:
    """Neighbours tell each other what they hold; answered by :class:`HaveReply`."""

    have: Record


@dataclass(frozen=True, slots=True)
class HaveReply:
    """The provider's own have record and some of its neighbours."""

    have: Record | None
    neighbours: Annotated[tuple[PeerAddress, ...], CountMax(limits.NEIGHBOURS_MAX)]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The provider will not answer this request; ``code`` is stable, ``detail`` is for people."""

    code: ReasonCode
    detail: Detail
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class PushVote:
    """A vote: a candidate's for itself, or one given to the receiver; answered by :class:`PushReply`."""

    vote: VoteRecord


@dataclass(frozen=True, slots=True)
class PushTerm:
    """Whose term it is, with the votes that prove it; answered by :class:`PushReply`."""

    votes: Votes


@dataclass(frozen=True, slots=True)
class PushContribution:
    """A trainer's contribution to the round that is open; answered by :class:`PushReply`."""

    contribution: Record


@dataclass(frozen=True, slots=True)
class PushReceipt:
    """A receipt: proposed, countersigned or final, as its signatures say; answered by :class:`PushReply`."""

    receipt: Record
    votes: Votes
    """What proves the coordinator's term while the receipt is not final; empty otherwise."""


@dataclass(frozen=True, slots=True)
class GetRounds:
    """Ask for the final receipts from ``round_index`` upward; answered by :class:`RoundsReply`."""

    round_index: int


@dataclass(frozen=True, slots=True)
class RoundsReply:
    """How far the rounds are, and how to get there."""

    round_index: int
    """The round that is due: one above the newest final receipt the provider knows."""
    votes: Votes
    receipts: Annotated[tuple[Record, ...], CountMax(limits.ROUND_RECEIPTS_PER_REPLY_MAX)]
    """Final receipts, ascending without a gap from the round asked for, or from the oldest kept if that is later."""
    state_anchor: Record | None
    """The newest state anchor the provider holds."""


@dataclass(frozen=True, slots=True)
class GetAggregates:
    """Ask what the contributions of a final receipt add up to; answered by :class:`AggregatesReply`."""

    round_index: int


@dataclass(frozen=True, slots=True)
class AggregatesReply:
    """What authorities signed of it, as far as the provider knows; empty before that."""

    aggregates: Annotated[tuple[Record, ...], CountMax(limits.SIGNATURES_MAX)]


TaskId = Annotated[bytes, SizeExact(16)]


@dataclass(frozen=True, slots=True)
class Task:
    """What a training process wants sampled, leased to the peer that is told of it."""

    task_id: TaskId
    content: Annotated[str, SizeMax(limits.TASK_SIZE_BYTES_MAX)]
    """JSON object, for the engine's process; never interpreted by pulsenet."""
    lease_ms: int
    """Another peer is told of it after this time, unless a batch answered it."""


@dataclass(frozen=True, slots=True)
class GetTasks:
    """Ask a trainer for work; answered by :class:`TasksReply`."""

    count_max: int


@dataclass(frozen=True, slots=True)
class TasksReply:
    """Tasks leased to the requester, oldest first; empty if there are none."""

    tasks: Annotated[tuple[Task, ...], CountMax(limits.TASKS_PER_REPLY_MAX)]


ChunkBits = Annotated[bytes, SizeMax(limits.CHUNK_LIST_ENTRIES_MAX // 8)]
"""One bit for each entry of a chunk list, in order, from the highest bit of the first byte; spare bits are 0."""


@dataclass(frozen=True, slots=True)
class GetHoldings:
    """Ask which chunks of a blob the provider holds; answered by :class:`HoldingsReply`."""

    blob_id: Digest


@dataclass(frozen=True, slots=True)
class HoldingsReply:
    """Which chunks of a blob can be had of the provider, now."""

    blob_id: Digest
    held: ChunkBits
    """Chunks it would serve."""
    given: ChunkBits
    """Chunks it has sent to somebody lately, or is sending."""


ShareRecord = Annotated[bytes, SizeMax(limits.SHARE_SIZE_BYTES_MAX)]
"""An encoded ``SignedRecord`` of a share."""


@dataclass(frozen=True, slots=True)
class GetRoster:
    """A trainer tells in which round it is, and asks who mixes; answered by :class:`RosterReply`."""

    round_index: int | None
    """The round it is in, or is about to open; ``None`` only asks, and tells of nobody's presence."""


@dataclass(frozen=True, slots=True)
class RosterReply:
    """The newest rosters, and whose term it is."""

    votes: Votes
    rosters: Annotated[tuple[Record, ...], CountMax(limits.ROSTERS_PER_REPLY_MAX)]
    """Ascending by term and number."""


@dataclass(frozen=True, slots=True)
class PushShare:
    """A member's share of a round, for whoever needs it; answered by :class:`PushReply`."""

    share: ShareRecord


@dataclass(frozen=True, slots=True)
class GetShares:
    """Ask a trainer what it shared in a job of a round; answered by :class:`SharesReply`."""

    round_index: int | None
    """``None`` asks a joiner's question: for whatever state the provider offers."""
    job: int
    slice_index: int
    """The first slice asked for."""


@dataclass(frozen=True, slots=True)
class SharesReply:
    """What the provider shared, or holds of what others did."""

    round_index: int | None
    """The round the provider is in, if it is in any."""
    known_from: int
    """Of earlier rounds it does not know any more what it took."""
    is_open: bool
    """Whether the job of the round asked for may still come to something at the provider."""
    shares: Annotated[tuple[ShareRecord, ...], CountMax(limits.SHARES_PER_REPLY_MAX)]
    """Ascending by slice."""


@dataclass(frozen=True, slots=True)
class PushProbe:
    """What a member predicts for the tokens of the probe, for the coordinator; answered by :class:`PushReply`."""

    probe: Record


Message = (
    Hello
    | GetHead
    | HeadReply
    | GetRecords
    | RecordsReply
    | GetDescriptors
    | GetEpochs
    | GetChunkList
    | ChunkListReply
    | GetChunks
    | ChunkReply
    | Ack
    | PushHead
    | PushForkProof
    | PushRollouts
    | PushReply
    | ExchangeHave
    | HaveReply
    | Refusal
    | PushVote
    | PushTerm
    | PushContribution
    | PushReceipt
    | GetRounds
    | RoundsReply
    | GetAggregates
    | AggregatesReply
    | GetTasks
    | TasksReply
    | GetHoldings
    | HoldingsReply
    | GetRoster
    | RosterReply
    | PushShare
    | GetShares
    | SharesReply
    | PushProbe
)
"""Anything a frame may hold, in the order of the numbers on the wire: a new one goes to the end, none is reused."""

MESSAGE_TYPES: dict[int, type[Message]] = dict(enumerate(get_args(Message), start=1))
"""By the byte before the msgpack body."""
