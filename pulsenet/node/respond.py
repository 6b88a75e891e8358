"""What a node answers: the serving rule, pure, over whatever the node holds (SPEC section 3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pulsenet import limits
from pulsenet.ids import Digest
from pulsenet.node.holdings import make_holdings_reply
from pulsenet.wire.messages import (
    Ack,
    ChunkListReply,
    ChunkReply,
    ExchangeHave,
    GetChunkList,
    GetChunks,
    GetDescriptors,
    GetEpochs,
    GetHead,
    GetHoldings,
    GetRecords,
    HaveReply,
    HeadReply,
    Message,
    PeerAddress,
    PushForkProof,
    PushHead,
    PushReply,
    PushRollouts,
    RecordsReply,
    Refusal,
)

REPLY_SIZE_BYTES_MAX = limits.CHUNK_SIZE_BYTES_MAX
"""Records in one reply, together: a reply is one frame, so the rest is left out and asked for again."""

Push = PushHead | PushForkProof | PushRollouts
"""Requests that hand something over; the node's machines judge it, not the serving rule."""


class StoreView(Protocol):
    """What the serving rule may look at. Everything it returns is verified and durable."""

    def newest_head(self) -> bytes | None:
        """Return the newest accepted head, an encoded signed record."""
        ...

    def record(self, digest: Digest) -> bytes | None:
        """Return the encoded signed record whose payload has this digest."""
        ...

    def descriptors(self, revision_min: int) -> Iterable[bytes]:
        """Yield the encoded descriptor revisions from ``revision_min`` upward, in order, without a gap."""
        ...

    def epochs(self, epoch_min: int) -> Iterable[bytes]:
        """Yield the encoded epoch records from ``epoch_min`` upward, in order."""
        ...

    def chunk_list(self, blob_id: Digest) -> bytes | None:
        """Return the encoded chunk list of a blob."""
        ...

    def chunk_list_slice(self, blob_id: Digest, offset: int, size_bytes: int) -> tuple[int, bytes] | None:
        """Return the size of a blob's encoded chunk list and a slice of it; costs no more than the slice."""
        ...

    def chunk(self, digest: Digest) -> bytes | None:
        """Return a chunk."""
        ...

    def has_chunk(self, digest: Digest) -> bool:
        """Say whether a chunk would be served, without reading it."""
        ...

    def was_given(self, digest: Digest) -> bool:
        """Say whether a chunk was served to somebody lately."""
        ...

    def have(self) -> bytes | None:
        """Return this node's own encoded have record."""
        ...

    def neighbours(self) -> Sequence[PeerAddress]:
        """Return neighbours a newcomer may dial."""
        ...

    def push_verdict(self, push: Push) -> str:
        """Return the empty string if the pushed item was taken, or a stable code.

        The shell shows a pushed item to the machines first and answers afterwards.
        """
        ...


def respond(request: Message, view: StoreView) -> list[Message]:
    """Return the replies to one request: one message, one per digest for ``GetChunks``, none for ``Ack``.

    Never raises for anything a peer may send: what cannot be answered is refused with a stable code
    (``not-found``, ``range``, ``unexpected``). The caller bounds how many requests it serves at once.
    """
    match request:
        case GetHead():
            return [HeadReply(view.newest_head())]
        case GetRecords(digests):
            return [_fill(record for digest in digests if (record := view.record(digest)) is not None)]
        case GetDescriptors(revision_min):
            if revision_min < 0:
                return [_refuse("range", f"revision {revision_min}")]
            return [_fill(view.descriptors(revision_min))]
        case GetEpochs(epoch_min):
            if epoch_min < 0:
                return [_refuse("range", f"epoch {epoch_min}")]
            return [_fill(view.epochs(epoch_min))]
        case GetChunkList():
            return [_slice_chunk_list(request, view)]
        case GetHoldings(blob_id):
            encoded = view.chunk_list(blob_id)
            if encoded is None:
                return [_refuse("not-found", blob_id.hex())]
            return [make_holdings_reply(blob_id, encoded, view.has_chunk, view.was_given)]
        case GetChunks(digests):
            return [ChunkReply(digest, view.chunk(digest)) for digest in digests]
        case ExchangeHave():
            return [HaveReply(view.have(), tuple(view.neighbours())[: limits.NEIGHBOURS_MAX])]
        case PushHead() | PushForkProof() | PushRollouts():
            reason = view.push_verdict(request)
            return [PushReply(accepted=not reason, reason=reason)]
        case Ack():
            return []
        case _:
            return [_refuse("unexpected", type(request).__name__)]


def _fill(records: Iterable[bytes]) -> RecordsReply:
    """Return as many of the leading records as one reply holds; always at least the first."""
    taken: list[bytes] = []
    size_bytes = 0
    for record in records:
        size_bytes += len(record)
        if taken and size_bytes > REPLY_SIZE_BYTES_MAX:
            break
        taken.append(record)
        if len(taken) == limits.RECORDS_PER_REQUEST_MAX:
            break
    return RecordsReply(tuple(taken))


def _slice_chunk_list(request: GetChunkList, view: StoreView) -> Message:
    found = view.chunk_list_slice(request.blob_id, max(request.offset, 0), limits.CHUNK_SIZE_BYTES_MAX)
    if found is None:
        return _refuse("not-found", request.blob_id.hex())
    size_bytes, data = found
    if not 0 <= request.offset <= size_bytes:
        return _refuse("range", f"offset {request.offset} of {size_bytes}")
    return ChunkListReply(request.blob_id, size_bytes, data)


def _refuse(code: str, detail: str) -> Refusal:
    # No retry time: asking this node again for the same thing will not help.
    return Refusal(code, detail, retry_after_ms=0)
