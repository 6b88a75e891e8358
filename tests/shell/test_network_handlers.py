"""Requests, dials and announcements become events, whatever the network does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pulsenet.chain.signing import encode_signed
from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import AnnounceHave, AnnounceHead, CancelRequest, DialPeer, SendRequest, StrikePeer
from pulsenet.node.events import (
    Event,
    HeadSeen,
    PeerConnected,
    PeerLost,
    ReplyReceived,
    RequestDone,
    RequestFailed,
)
from pulsenet.wire.messages import (
    ChunkReply,
    GetChunkList,
    GetChunks,
    GetHead,
    GetHoldings,
    GetRounds,
    HeadReply,
    Message,
    Refusal,
)
from pulsenetd.handlers.network import NetworkHandlers
from pulsenetd.network.dial import DialOutcome
from pulsenetd.network.streams import PeerRefusedError, PeerUnavailableError
from pulsenetd.network.transport import PeerLink

PEER = PeerId(b"p" * 32)
BLOB = Digest(b"b" * 32)
HERE, THERE = "/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/2"


class FakeNetwork:
    """Answers requests with what a test gave it, and remembers what was announced."""

    def __init__(self) -> None:
        self.replies: list[Message] = []
        self.error: Exception | None = None
        self.hangs = False
        self.outcomes: list[DialOutcome] = []
        self.links: list[PeerLink] = []
        self.announced: list[Any] = []
        self.strikes: list[tuple[PeerId, str]] = []
        self.transport = self.directory = self

    async def request(self, peer_id: PeerId, message: Message, seconds: float, take: Callable[[Message], None]) -> None:
        for reply in self.replies:
            take(reply)
        if self.hangs:
            await asyncio.Event().wait()
        self.fail()

    def strike(self, peer_id: PeerId, code: str) -> None:
        self.strikes.append((peer_id, code))

    async def dial(self, peer_id: PeerId, peer_addresses: tuple[str, ...]) -> tuple[DialOutcome, ...]:
        self.fail()
        return tuple(self.outcomes)

    async def connected_peers(self) -> list[PeerLink]:
        return self.links

    async def announce_head(self, record: Any) -> None:
        self.fail()
        self.announced.append(record)

    announce_have = announce_head

    def fail(self) -> None:
        if self.error is not None:
            raise self.error


class Scene:
    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.posted: list[Event] = []
        self.broadcast: list[Event] = []
        network: Any = self.network
        self.table: dict[Any, Any] = dict(NetworkHandlers(network, self.broadcast.append).table())

    def execute(self, effect: Any) -> None:
        asyncio.run(self.table[type(effect)](effect, self.posted.append))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_reply_goes_to_the_machine_that_asked(scene: Scene) -> None:
    scene.network.replies = [HeadReply(None)]
    scene.execute(SendRequest(3, PEER, GetHead(), 1.0))
    assert scene.posted == [ReplyReceived(3, PEER, HeadReply(None))]
    assert scene.broadcast == []


def test_chunks_arrive_one_by_one_and_their_end_is_told(scene: Scene) -> None:
    digests = (Digest(b"a" * 32), Digest(b"b" * 32))
    replies = [ChunkReply(digest, b"data") for digest in digests]
    scene.network.replies = list(replies)
    scene.execute(SendRequest(4, PEER, GetChunks(digests), 1.0))
    assert scene.posted == [*(ReplyReceived(4, PEER, reply) for reply in replies), RequestDone(4, PEER)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PeerUnavailableError("timeout", "20 s"), "timeout"),
        (UnavailableError("p2pd is being restarted"), "closed"),
        (RemoteProtocolError("framing", "a frame of 0 bytes"), "framing"),
    ],
)
def test_a_failed_request_is_told_with_its_stable_reason(scene: Scene, error: Exception, reason: str) -> None:
    scene.network.replies = [ChunkReply(Digest(b"a" * 32), b"data")]
    scene.network.error = error
    scene.execute(SendRequest(5, PEER, GetChunks((Digest(b"a" * 32),)), 1.0))
    assert isinstance(scene.posted[0], ReplyReceived), "what came before the failure still counts"
    assert scene.posted[1:] == [RequestFailed(5, PEER, reason)]


async def test_a_request_for_chunks_that_is_called_back_ends_and_tells_nothing_more(scene: Scene) -> None:
    scene.network.hangs = True
    scene.network.replies = [ChunkReply(Digest(b"a" * 32), b"data")]
    request = SendRequest(8, PEER, GetChunks((Digest(b"a" * 32), Digest(b"b" * 32)), BLOB), 1.0)
    download = asyncio.create_task(scene.table[SendRequest](request, scene.posted.append))
    await asyncio.sleep(0)
    for other in (CancelRequest(9, PEER, BLOB), CancelRequest(8, PEER, Digest(b"c" * 32))):
        await scene.table[CancelRequest](other, scene.posted.append)
        await asyncio.sleep(0)
        assert not download.done()
    await scene.table[CancelRequest](CancelRequest(8, PEER, BLOB), scene.posted.append)
    await asyncio.wait([download])
    await scene.table[CancelRequest](CancelRequest(8, PEER, BLOB), scene.posted.append)
    assert download.cancelled()
    assert scene.posted == [ReplyReceived(8, PEER, scene.network.replies[0])]


def test_a_question_about_rounds_that_is_refused_says_why_and_for_how_long(scene: Scene) -> None:
    """A-CHK-6: a joiner waits with a reason and an estimate."""
    refusal = Refusal("busy", "an outer step", 40_000)
    scene.network.error = PeerRefusedError(refusal)
    scene.execute(SendRequest(6, PEER, GetRounds(3), 1.0))
    assert scene.posted == [ReplyReceived(6, PEER, refusal)]


@pytest.mark.parametrize("message", [GetChunks((BLOB,)), GetChunkList(BLOB, 0), GetHoldings(BLOB)])
def test_a_refused_question_about_a_blob_says_why_and_for_how_long(scene: Scene, message: Message) -> None:
    """Not held is a miss and busy is nobody's fault: neither may look like a failure of the provider."""
    refusal = Refusal("busy", "", 4_000)
    scene.network.error = PeerRefusedError(refusal)
    scene.execute(SendRequest(7, PEER, message, 1.0))
    assert scene.posted == [ReplyReceived(7, PEER, refusal)]


def test_any_other_refused_request_failed(scene: Scene) -> None:
    scene.network.error = PeerRefusedError(Refusal("busy", "", 4_000))
    scene.execute(SendRequest(8, PEER, GetHead(), 1.0))
    assert scene.posted == [RequestFailed(8, PEER, "refused")]


def test_a_dial_tells_every_machine_the_addresses_that_answered(scene: Scene) -> None:
    scene.network.outcomes = [
        DialOutcome(PEER, HERE, "refused", "connection refused"),
        DialOutcome(PEER, THERE, "connected", ""),
    ]
    scene.execute(DialPeer(PEER, (HERE, THERE)))
    assert scene.broadcast == [PeerConnected(PEER, (THERE,), outbound=True)]


def test_a_dial_that_reached_nobody_says_why(scene: Scene) -> None:
    scene.network.outcomes = [
        DialOutcome(PEER, HERE, "timed-out", "no answer"),
        DialOutcome(PEER, THERE, "refused", "connection refused"),
    ]
    scene.execute(DialPeer(PEER, (HERE, THERE)))
    scene.network.outcomes = []
    scene.execute(DialPeer(PEER, ()))
    scene.network.error = UnavailableError("p2pd is being restarted")
    scene.execute(DialPeer(PEER, (HERE,)))
    assert scene.broadcast == [
        PeerLost(PEER, "refused, timed-out"),
        PeerLost(PEER, "no address"),
        PeerLost(PEER, "p2pd is being restarted"),
    ]
    assert scene.posted == []


def test_a_peer_that_comes_by_itself_while_its_address_is_dialled_in_vain_is_not_lost(scene: Scene) -> None:
    """Behind NAT its address leads nowhere. Whoever watches connections has told of it, and tells nothing twice."""
    other = PeerLink(PeerId(b"o" * 32), (THERE,), True, None)
    scene.network.links = [other, PeerLink(PEER, (HERE,), False, None)]
    scene.network.outcomes = [DialOutcome(PEER, THERE, "timed-out", "no answer")]
    scene.execute(DialPeer(PEER, (THERE,)))
    assert scene.broadcast == [PeerConnected(PEER, (HERE,), outbound=False)]


def test_a_head_reaches_the_mesh_even_if_the_directory_is_down(scene: Scene, run: Any) -> None:
    head = run.news(1).head
    scene.execute(AnnounceHead(head))
    scene.network.error = UnavailableError("no directory")
    scene.execute(AnnounceHead(head))
    assert scene.network.announced == [head]
    assert scene.broadcast == [HeadSeen(encode_signed(head), None)] * 2


def test_a_have_record_goes_to_the_directory_and_may_fail_there(scene: Scene, run: Any) -> None:
    record = run.news(1).manifest
    scene.execute(AnnounceHave(record))
    scene.network.error = UnavailableError("no directory")
    scene.execute(AnnounceHave(record))
    assert scene.network.announced == [record]
    assert scene.broadcast == []


def test_a_strike_is_counted_even_while_the_network_is_down(scene: Scene) -> None:
    scene.network.error = UnavailableError("down")
    scene.execute(StrikePeer(PEER, "schema"))
    assert scene.network.strikes == [(PEER, "schema")]
    assert scene.posted == scene.broadcast == []
