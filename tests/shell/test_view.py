"""What a node answers to peers: only what it holds, and news is shown to its machines before the verdict."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from drivers import make_driver, running

from pulsenet.chain.records import EpochRecord
from pulsenet.chain.signing import encode_signed, record_digest
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId, Version, compute_digest
from pulsenet.node.mesh import Mesh
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.messages import (
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
    GetRounds,
    GetTasks,
    HaveReply,
    HeadReply,
    HoldingsReply,
    Message,
    PushContribution,
    PushForkProof,
    PushHead,
    PushReceipt,
    PushReply,
    PushRollouts,
    PushTerm,
    PushVote,
    RecordsReply,
    Refusal,
    Task,
    TasksReply,
)
from pulsenetd.handlers.store import LEASE_SECONDS
from pulsenetd.storage.store import Store
from pulsenetd.view import TELL_PAUSE_RATIO, NodeView, Responder

HERE = ("/ip4/10.0.0.1/tcp/1",)
DATA = b"weights" * 100
DIGEST = compute_digest(DATA)
LIST = ChunkList(((len(DATA), DIGEST),))


class Node:
    """A mesh under a driver, a store, and what peers see of both."""

    def __init__(self, store: Store, run: Any) -> None:
        self.store, self.run = store, run
        self.now = 1_000.0
        self.trust = run.trust()
        key = run.inferencer
        self.mesh = Mesh(
            self.trust, key.peer_id, key.sign, random.Random(1).randrange, role="inferencer", addresses=HERE
        )
        self.descriptors = [encode_signed(run.genesis)]
        self.view = NodeView(store, self.trust, self.mesh, lambda: self.descriptors, lambda: self.now)
        self.threads = ThreadPoolExecutor(1)
        self.take_rollouts: Callable[[bytes], Awaitable[str]] | None = None
        self.give_tasks: Callable[[PeerId, GetTasks], Awaitable[Message]] | None = None
        self.about_rounds: list[tuple[PeerId, Message]] = []

    async def answer_round(self, peer_id: PeerId, request: Any) -> Message:
        self.about_rounds.append((peer_id, request))
        return Refusal("busy", "", 100)

    def ask(self, *requests: Message, peer_id: PeerId | None = None) -> list[Message]:
        """Return the replies to requests of one peer, the stranger unless another is named."""

        async def scenario() -> list[Message]:
            driver = make_driver({"mesh": self.mesh}, self.run.now_ms, lambda: self.now)
            responder = Responder(
                self.view, driver, self.threads, self.take_rollouts, self.answer_round, self.give_tasks
            )
            async with running(driver):
                peer = peer_id or self.run.stranger.peer_id
                return [reply for request in requests for reply in await responder.answer(peer, request)]

        return asyncio.run(scenario())


@pytest.fixture
def node(store: Store, run: Any) -> Iterator[Node]:
    made = Node(store, run)
    yield made
    made.threads.shutdown()


def test_a_node_that_knows_nothing_says_so(node: Node) -> None:
    digest = Digest(b"x" * 32)
    assert node.ask(GetHead()) == [HeadReply(None)]
    assert node.ask(GetRecords((digest,))) == [RecordsReply(())]
    assert node.ask(GetEpochs(0)) == [RecordsReply(())]
    assert node.ask(GetChunks((digest,))) == [ChunkReply(digest, None)]
    (refusal,) = node.ask(GetChunkList(digest, 0))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "not-found"


def test_blobs_records_and_the_newest_head_are_served(node: Node, run: Any) -> None:
    news = run.news(1)
    node.trust.accept_head(news.head, run.now_ms)
    node.store.put_record(news.manifest)
    node.store.put_chunk_list(LIST.blob_id, LIST.encode())
    node.store.put_chunks({DIGEST: DATA})
    assert node.ask(GetHead()) == [HeadReply(encode_signed(news.head))]
    assert node.ask(GetRecords((record_digest(news.manifest),))) == [RecordsReply((encode_signed(news.manifest),))]
    encoded = LIST.encode()
    assert node.ask(GetChunkList(LIST.blob_id, 0)) == [ChunkListReply(LIST.blob_id, len(encoded), encoded)]
    assert node.ask(GetHoldings(LIST.blob_id)) == [HoldingsReply(LIST.blob_id, b"\x80", b"\x00")]
    assert node.ask(GetChunks((DIGEST,))) == [ChunkReply(DIGEST, DATA)]
    assert node.ask(GetHoldings(LIST.blob_id)) == [HoldingsReply(LIST.blob_id, b"\x80", b"\x80")]


@pytest.mark.parametrize("request_type", ["list", "chunk"])
def test_what_a_peer_reads_stays_until_it_is_through(node: Node, request_type: str) -> None:
    node.store.put_chunk_list(LIST.blob_id, LIST.encode())
    node.store.put_chunks({DIGEST: DATA})
    node.ask(GetChunkList(LIST.blob_id, 0) if request_type == "list" else GetChunks((DIGEST,)))
    node.store.release((LIST.blob_id,), (), node.now)
    assert node.store.is_complete(LIST.blob_id)
    node.store.sweep(node.now + LEASE_SECONDS + 1)
    assert not node.store.has_chunk(DIGEST)


@pytest.mark.parametrize("asked", [GetChunkList(LIST.blob_id, 0), GetHoldings(LIST.blob_id)])
def test_asking_once_a_minute_what_a_released_blob_consists_of_does_not_keep_it(node: Node, asked: Message) -> None:
    node.store.put_chunk_list(LIST.blob_id, LIST.encode())
    node.store.put_chunks({DIGEST: DATA})
    node.ask(GetChunks((DIGEST,)))
    node.store.release((LIST.blob_id,), (), node.now)
    released_at = node.now
    while node.store.has_chunk(DIGEST):
        node.now += LEASE_SECONDS / 2
        node.ask(asked)
        node.store.sweep(node.now)
    assert node.now == released_at + LEASE_SECONDS


class CountingStore:
    """A store that takes a second to say whether it holds a chunk."""

    def __init__(self, node: Node) -> None:
        self._node, self._store = node, node.store
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def has_chunk(self, digest: Digest) -> bool:
        self.count += 1
        self._node.now += 1.0
        return self._store.has_chunk(digest)


def test_looking_at_many_chunks_takes_a_small_share_of_the_time_however_often_peers_ask(node: Node) -> None:
    node.store.put_chunk_list(LIST.blob_id, LIST.encode())
    counting = CountingStore(node)
    node.view = NodeView(counting, node.trust, node.mesh, lambda: node.descriptors, lambda: node.now)  # type: ignore[arg-type]
    nothing, all_of_it = (HoldingsReply(LIST.blob_id, held, b"\x00") for held in (b"\x00", b"\x80"))
    assert node.ask(*[GetHoldings(LIST.blob_id)] * 50) == [nothing] * 50
    assert counting.count == 1
    node.store.put_chunks({DIGEST: DATA})
    node.now += TELL_PAUSE_RATIO
    assert node.ask(*[GetHoldings(LIST.blob_id)] * 50) == [all_of_it] * 50
    assert counting.count == 2


def test_what_is_not_held_is_not_leased(node: Node) -> None:
    node.ask(GetChunks((DIGEST,)), GetChunkList(LIST.blob_id, 0))
    node.store.put_chunk_list(LIST.blob_id, LIST.encode())
    node.store.put_chunks({DIGEST: DATA})
    node.store.release((LIST.blob_id,), (), node.now)
    assert not node.store.has_chunk(DIGEST)


def test_descriptors_and_epochs_are_served_from_where_a_peer_asks(node: Node, run: Any) -> None:
    second = run.revise(run.genesis, run.descriptor, private=True)
    node.descriptors.append(encode_signed(second))
    assert node.ask(GetDescriptors(1)) == [RecordsReply((encode_signed(second),))]
    assert node.ask(GetDescriptors(2)) == [RecordsReply(())]
    epochs = [
        run.sign(EpochRecord(run.run_id, 0, epoch, Version(0, 3), compute_digest(b"root"), 4, "restart"), run.owner)
        for epoch in (1, 2)
    ]
    for signed in epochs:
        node.trust.accept_epoch(signed)
    assert node.ask(GetEpochs(0)) == [RecordsReply(tuple(encode_signed(signed) for signed in epochs))]
    assert node.ask(GetEpochs(2)) == [RecordsReply((encode_signed(epochs[1]),))]


def test_a_pushed_head_is_judged_by_the_machines_before_the_answer(node: Node, run: Any) -> None:
    head = run.news(1).head
    assert node.ask(PushHead(encode_signed(head))) == [PushReply(True, "")]
    assert node.trust.head is not None
    assert node.trust.head.version == Version(0, 1)
    forged = run.sign(node.trust.head, run.stranger)
    (reply,) = node.ask(PushHead(encode_signed(forged)))
    assert reply == PushReply(False, "untrusted")


def test_a_pushed_proof_of_a_fork_is_judged_by_the_machines(node: Node, run: Any) -> None:
    first = run.sign(run.manifest(3), run.publisher)
    second = run.sign(run.manifest(3, root=compute_digest(b"another")), run.publisher)
    (lie,) = node.ask(PushForkProof(encode_signed(first), encode_signed(first)))
    assert isinstance(lie, PushReply)
    assert not lie.accepted
    assert node.trust.fork is None
    assert node.ask(PushForkProof(encode_signed(first), encode_signed(second))) == [PushReply(True, "")]
    assert node.trust.fork is not None


def test_have_records_are_exchanged(node: Node, run: Any) -> None:
    stranger = run.stranger.peer_id
    node.mesh.update(node.now, run.now_ms, addresses=HERE)
    (reply,) = node.ask(ExchangeHave(run.have(run.stranger)))
    assert isinstance(reply, HaveReply)
    assert reply.have is not None
    assert reply.have == node.mesh.own_have
    assert node.mesh.have_of(stranger) is not None


def test_a_have_record_of_somebody_else_is_a_breach(node: Node, run: Any) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        node.ask(ExchangeHave(run.have(run.second)))
    assert caught.value.code == "schema"
    assert node.mesh.have_of(run.second.peer_id) is None


def test_tasks_are_leased_where_there_are_any(node: Node) -> None:
    task = Task(bytes(16), "{}", 1)
    assert node.ask(GetTasks(4)) == [TasksReply(())]

    async def give(peer_id: PeerId, request: GetTasks) -> Message:
        return TasksReply((task,) * request.count_max)

    node.give_tasks = give
    assert node.ask(GetTasks(2)) == [TasksReply((task, task))]


def test_rollouts_are_judged_where_they_are_wanted(node: Node) -> None:
    judged: list[bytes] = []

    async def take(record: bytes) -> str:
        judged.append(record)
        return "" if record == b"good" else "untrusted"

    assert node.ask(PushRollouts(b"good")) == [PushReply(False, "not_publisher")]
    node.take_rollouts = take
    assert node.ask(PushRollouts(b"good"), PushRollouts(b"bad")) == [
        PushReply(True, ""),
        PushReply(False, "untrusted"),
    ]
    assert judged == [b"good", b"bad"]


def test_what_concerns_rounds_is_answered_by_whoever_knows_them(node: Node, run: Any) -> None:
    requests: tuple[Message, ...] = (
        GetRounds(3),
        PushVote(b"vote"),
        PushTerm((b"vote",)),
        PushContribution(b"contribution"),
        PushReceipt(b"receipt", ()),
    )
    assert node.ask(*requests) == [Refusal("busy", "", 100)] * 5
    assert node.about_rounds == [(run.stranger.peer_id, request) for request in requests]
