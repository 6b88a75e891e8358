"""The serving rule answers every request from what the view holds, and refuses the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from pulsenet import limits
from pulsenet.ids import Digest, PeerId, RunId, compute_digest
from pulsenet.node.respond import REPLY_SIZE_BYTES_MAX, Push, respond
from pulsenet.wire.chunks import ChunkList
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
    Hello,
    HoldingsReply,
    Message,
    PeerAddress,
    PushForkProof,
    PushHead,
    PushReply,
    PushRollouts,
    RecordsReply,
    Refusal,
)

BLOB_ID = Digest(b"\x07" * 32)


@dataclass
class Shelf:
    """A store view over plain dictionaries."""

    head: bytes | None = None
    records: dict[Digest, bytes] = field(default_factory=dict)
    revisions: list[bytes] = field(default_factory=list)
    epoch_records: list[bytes] = field(default_factory=list)
    chunk_lists: dict[Digest, bytes] = field(default_factory=dict)
    chunks: dict[Digest, bytes] = field(default_factory=dict)
    given: set[Digest] = field(default_factory=set)
    own_have: bytes | None = None
    near: list[PeerAddress] = field(default_factory=list)
    verdicts: dict[Push, str] = field(default_factory=dict)

    def newest_head(self) -> bytes | None:
        return self.head

    def record(self, digest: Digest) -> bytes | None:
        return self.records.get(digest)

    def descriptors(self, revision_min: int) -> Iterable[bytes]:
        return self.revisions[revision_min:]

    def epochs(self, epoch_min: int) -> Iterable[bytes]:
        return self.epoch_records[epoch_min:]

    def chunk_list(self, blob_id: Digest) -> bytes | None:
        return self.chunk_lists.get(blob_id)

    def chunk_list_slice(self, blob_id: Digest, offset: int, size_bytes: int) -> tuple[int, bytes] | None:
        encoded = self.chunk_lists.get(blob_id)
        return None if encoded is None else (len(encoded), encoded[offset : offset + size_bytes])

    def chunk(self, digest: Digest) -> bytes | None:
        return self.chunks.get(digest)

    def has_chunk(self, digest: Digest) -> bool:
        return digest in self.chunks

    def was_given(self, digest: Digest) -> bool:
        return digest in self.given

    def have(self) -> bytes | None:
        return self.own_have

    def neighbours(self) -> Sequence[PeerAddress]:
        return self.near

    def push_verdict(self, push: Push) -> str:
        return self.verdicts[push]


def test_the_newest_head_is_returned_and_none_before_the_first_publish() -> None:
    assert respond(GetHead(), Shelf()) == [HeadReply(None)]
    assert respond(GetHead(), Shelf(head=b"head")) == [HeadReply(b"head")]


def test_records_come_in_the_order_asked_and_absent_ones_are_left_out() -> None:
    first, second, absent = (compute_digest(name) for name in (b"1", b"2", b"3"))
    shelf = Shelf(records={first: b"one", second: b"two"})
    assert respond(GetRecords((second, absent, first)), shelf) == [RecordsReply((b"two", b"one"))]


def test_records_that_would_not_fit_one_frame_are_left_for_the_next_request() -> None:
    digests = tuple(compute_digest(bytes([index])) for index in range(8))
    shelf = Shelf(records=dict.fromkeys(digests, bytes(limits.RECORD_SIZE_BYTES_MAX)))
    (reply,) = respond(GetRecords(digests), shelf)
    assert isinstance(reply, RecordsReply)
    assert len(reply.records) == REPLY_SIZE_BYTES_MAX // limits.RECORD_SIZE_BYTES_MAX


def test_the_first_record_is_sent_whatever_its_size() -> None:
    digest = compute_digest(b"large")
    shelf = Shelf(records={digest: bytes(REPLY_SIZE_BYTES_MAX + 1)})
    (reply,) = respond(GetRecords((digest,)), shelf)
    assert isinstance(reply, RecordsReply)
    assert len(reply.records) == 1


def test_descriptors_and_epochs_start_at_the_number_asked_for() -> None:
    shelf = Shelf(revisions=[b"r0", b"r1", b"r2"], epoch_records=[b"e0", b"e1"])
    assert respond(GetDescriptors(1), shelf) == [RecordsReply((b"r1", b"r2"))]
    assert respond(GetEpochs(1), shelf) == [RecordsReply((b"e1",))]


def test_one_reply_holds_at_most_the_allowed_number_of_revisions() -> None:
    shelf = Shelf(revisions=[bytes([number]) for number in range(100)])
    (reply,) = respond(GetDescriptors(0), shelf)
    assert isinstance(reply, RecordsReply)
    assert reply.records == tuple(bytes([number]) for number in range(limits.REVISIONS_PER_REQUEST_MAX))


@pytest.mark.parametrize("request_", [GetDescriptors(-1), GetEpochs(-1)])
def test_negative_numbers_are_refused(request_: Message) -> None:
    (reply,) = respond(request_, Shelf())
    assert isinstance(reply, Refusal)
    assert reply.code == "range"


def test_a_chunk_list_is_sent_in_slices_of_one_chunk() -> None:
    encoded = bytes(limits.CHUNK_SIZE_BYTES_MAX) + b"tail"
    shelf = Shelf(chunk_lists={BLOB_ID: encoded})
    assert respond(GetChunkList(BLOB_ID, 0), shelf) == [
        ChunkListReply(BLOB_ID, len(encoded), encoded[: limits.CHUNK_SIZE_BYTES_MAX])
    ]
    assert respond(GetChunkList(BLOB_ID, limits.CHUNK_SIZE_BYTES_MAX), shelf) == [
        ChunkListReply(BLOB_ID, len(encoded), b"tail")
    ]


def test_a_slice_of_a_chunk_list_is_read_without_the_rest() -> None:
    class Sliced(Shelf):
        def chunk_list(self, blob_id: Digest) -> bytes | None:
            raise AssertionError("36 MiB for a question of 40 bytes")

    encoded = bytes(limits.CHUNK_SIZE_BYTES_MAX) + b"tail"
    (reply,) = respond(GetChunkList(BLOB_ID, limits.CHUNK_SIZE_BYTES_MAX), Sliced(chunk_lists={BLOB_ID: encoded}))
    assert reply == ChunkListReply(BLOB_ID, len(encoded), b"tail")


def test_the_empty_chunk_list_is_not_the_missing_one() -> None:
    assert respond(GetChunkList(BLOB_ID, 0), Shelf(chunk_lists={BLOB_ID: b""})) == [ChunkListReply(BLOB_ID, 0, b"")]


@pytest.mark.parametrize(("offset", "code"), [(-1, "range"), (5, "range")])
def test_an_offset_outside_the_chunk_list_is_refused(offset: int, code: str) -> None:
    (reply,) = respond(GetChunkList(BLOB_ID, offset), Shelf(chunk_lists={BLOB_ID: b"list"}))
    assert isinstance(reply, Refusal)
    assert reply.code == code


def test_a_missing_chunk_list_is_refused_as_not_found() -> None:
    (reply,) = respond(GetChunkList(BLOB_ID, 0), Shelf())
    assert isinstance(reply, Refusal)
    assert reply.code == "not-found"


def test_each_chunk_asked_for_has_its_own_reply_and_a_missing_one_is_none() -> None:
    held, absent = compute_digest(b"chunk"), compute_digest(b"absent")
    shelf = Shelf(chunks={held: b"chunk"})
    assert respond(GetChunks((absent, held)), shelf) == [ChunkReply(absent, None), ChunkReply(held, b"chunk")]


def test_an_exchange_of_haves_returns_ours_and_a_bounded_number_of_neighbours() -> None:
    near = [PeerAddress(PeerId(bytes([index]) * 32), ("/ip4/10.0.0.1/tcp/1",)) for index in range(20)]
    (reply,) = respond(ExchangeHave(b"theirs"), Shelf(own_have=b"ours", near=near))
    assert reply == HaveReply(b"ours", tuple(near[: limits.NEIGHBOURS_MAX]))


@pytest.mark.parametrize("push", [PushHead(b"h"), PushForkProof(b"a", b"b"), PushRollouts(b"r")])
def test_a_push_is_answered_with_the_verdict_of_the_machines(push: Push) -> None:
    assert respond(push, Shelf(verdicts={push: ""})) == [PushReply(True, "")]
    assert respond(push, Shelf(verdicts={push: "untrusted"})) == [PushReply(False, "untrusted")]


def test_an_acknowledgement_needs_no_answer() -> None:
    assert respond(Ack(), Shelf()) == []


@pytest.mark.parametrize("message", [HeadReply(None), Hello(RunId(bytes(32)), 1, 1, "seed", "test")])
def test_a_message_that_is_no_request_is_refused(message: Message) -> None:
    (reply,) = respond(message, Shelf())
    assert isinstance(reply, Refusal)
    assert reply.code == "unexpected"


def test_holdings_tell_which_chunks_are_here_and_which_were_given_to_somebody() -> None:
    digests = [compute_digest(bytes([number])) for number in range(10)]
    chunk_list = ChunkList(tuple((1, digest) for digest in [*digests, digests[0]]))
    shelf = Shelf(
        chunk_lists={chunk_list.blob_id: chunk_list.encode()},
        chunks={digests[0]: b"0", digests[9]: b"9"},
        given={digests[1]},
    )
    (reply,) = respond(GetHoldings(chunk_list.blob_id), shelf)
    assert reply == HoldingsReply(chunk_list.blob_id, bytes([0b10000000, 0b01100000]), bytes([0b01000000, 0]))
    (refusal,) = respond(GetHoldings(BLOB_ID), shelf)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "not-found"
