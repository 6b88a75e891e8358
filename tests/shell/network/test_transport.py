"""Messages over real p2pd streams on loopback."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.errors import ConfigError, LocalProtocolError, RemoteProtocolError, UnavailableError, UsageError
from pulsenet.ids import Digest, PeerId, RunId, compute_digest
from pulsenet.wire.framing import encode_message
from pulsenet.wire.messages import (
    ChunkReply,
    GetChunks,
    GetHead,
    GetRecords,
    HeadReply,
    Hello,
    Message,
    PushHead,
    PushReply,
    Refusal,
)
from pulsenetd.errors import AddressInUseError
from pulsenetd.identity import to_libp2p_text
from pulsenetd.network.streams import Deadlines, PeerRefusedError, PeerUnavailableError
from pulsenetd.network.transport import STREAM_NAME

QUICK = Deadlines(open_seconds=2.0, read_stall_seconds=0.5, write_stall_seconds=2.0, provider_idle_seconds=5.0)


async def answer_head(_peer: PeerId, _message: Message) -> list[Message]:
    return [HeadReply(b"head")]


def is_running(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


async def test_a_request_gets_its_reply_and_streams_are_reused(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b") as b:
        seen: list[PeerId] = []

        async def answer(peer_id: PeerId, message: Message) -> list[Message]:
            seen.append(peer_id)
            return [HeadReply(None)] if isinstance(message, GetHead) else [PushReply(True, "")]

        b.transport.serve(answer)
        await a.meet(b)
        for _ in range(5):
            assert await a.transport.request(b.peer_id, GetHead(), 5) == [HeadReply(None)]
        assert await a.transport.request(b.peer_id, PushHead(b"x"), 5) == [PushReply(True, "")]
        assert seen == [a.peer_id] * 6
        assert a.transport.traffic.streams_opened["outbound"] == 1
        assert b.transport._provider.doorkeeper.peers == {a.peer_id}
        links = await a.transport.connected_peers()
        assert [link.peer_id for link in links] == [b.peer_id]
        assert links[0].outbound
        assert links[0].round_trip_seconds is not None
        assert links[0].round_trip_seconds > 0
        assert not (await b.transport.connected_peers())[0].outbound


async def test_chunks_arrive_whole_are_returned_in_order_and_reported_one_by_one(make_node: Any) -> None:
    chunks = [os.urandom(limits.CHUNK_SIZE_BYTES), b"", os.urandom(1), os.urandom(limits.CHUNK_SIZE_BYTES)]
    held = {compute_digest(data): data for data in chunks}
    absent = Digest(bytes(32))

    async def answer(_peer: PeerId, message: Message) -> list[Message]:
        assert isinstance(message, GetChunks)
        return [ChunkReply(digest, held.get(digest)) for digest in message.digests]

    async with make_node("a") as a, make_node("b") as b:
        b.transport.serve(answer)
        await a.meet(b)
        told: list[Message] = []
        replies = await a.transport.request(b.peer_id, GetChunks(tuple(held)), 20, told.append)
        assert replies == [ChunkReply(digest, data) for digest, data in held.items()]
        assert len(told) == len(replies)  # over several streams, in any order
        assert all(reply in told for reply in replies)
        assert await a.transport.request(b.peer_id, GetChunks((absent,)), 5) == [ChunkReply(absent, None)]
        assert a.transport.traffic.bytes["received", "chunk"] > 2 * limits.CHUNK_SIZE_BYTES
        assert b.transport.traffic.bytes["sent", "chunk"] == a.transport.traffic.bytes["received", "chunk"]


async def test_at_most_four_streams_carry_many_requests_and_a_small_one_passes_bulk(make_node: Any) -> None:
    digest = compute_digest(b"x")
    release = asyncio.Event()

    async def answer(_peer: PeerId, message: Message) -> list[Message]:
        if isinstance(message, GetChunks):
            await release.wait()
            return [ChunkReply(digest, b"x")]
        return [HeadReply(None)]

    async with make_node("a") as a, make_node("b") as b:
        b.transport.serve(answer)
        await a.meet(b)
        bulk = [asyncio.create_task(a.transport.request(b.peer_id, GetChunks((digest,)), 20)) for _ in range(12)]
        assert await a.transport.request(b.peer_id, GetHead(), 5) == [HeadReply(None)]
        assert not any(task.done() for task in bulk)
        release.set()
        await asyncio.gather(*bulk)
        assert a.transport.traffic.streams_opened["outbound"] <= limits.STREAMS_PER_PEER_MAX


async def test_a_peer_of_another_run_is_refused_with_a_code(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b", run_id=RunId(bytes(32))) as b:
        b.transport.serve(answer_head)
        await a.meet(b)
        with pytest.raises(PeerRefusedError) as caught:
            await a.transport.request(b.peer_id, GetHead(), 5)
        assert caught.value.refusal.code == "wrong-run"
        assert b.transport.traffic.rejected["wrong-run"] == 1


async def test_a_stranger_is_refused_before_any_work(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b") as b:
        asked: list[PeerId] = []

        class Rules:
            def admits(self, peer_id: PeerId) -> bool:
                asked.append(peer_id)
                return False

            def is_member(self, peer_id: PeerId) -> bool:
                return False

        b.transport.serve(answer_head, rules=Rules())
        await a.meet(b)
        with pytest.raises(PeerRefusedError) as caught:
            await a.transport.request(b.peer_id, GetHead(), 5)
        assert caught.value.refusal.code == "not-admitted"
        assert asked == [a.peer_id]


async def test_a_handlers_failure_becomes_a_refusal_and_the_stream_lives_on(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b") as b:
        await a.meet(b)
        with pytest.raises(PeerRefusedError) as starting:
            await a.transport.request(b.peer_id, GetHead(), 5)
        assert starting.value.refusal.code == "starting"

        async def fail(_peer: PeerId, _message: Message) -> list[Message]:
            raise UnavailableError("nothing here")

        b.transport.serve(fail)
        with pytest.raises(PeerRefusedError) as unavailable:
            await a.transport.request(b.peer_id, GetHead(), 5)
        assert unavailable.value.refusal.code == "unavailable"

        async def refuse(_peer: PeerId, _message: Message) -> list[Message]:
            return [Refusal("busy", "later", 10)]

        b.transport.serve(refuse)
        with pytest.raises(PeerRefusedError, match="busy: later"):
            await a.transport.request(b.peer_id, GetChunks((Digest(bytes(32)),)), 5)
        b.transport.serve(answer_head)
        assert await a.transport.request(b.peer_id, GetHead(), 5) == [HeadReply(b"head")]
        assert a.transport.traffic.streams_opened["outbound"] == 1


async def test_a_reply_of_the_wrong_kind_is_the_peers_fault(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b") as b:

        async def answer(_peer: PeerId, message: Message) -> list[Message]:
            if isinstance(message, GetChunks):
                return [ChunkReply(Digest(b"y" * 32), b"")]
            return [PushReply(True, "")]

        b.transport.serve(answer)
        await a.meet(b)
        with pytest.raises(RemoteProtocolError, match="unexpected-message"):
            await a.transport.request(b.peer_id, GetHead(), 5)
        with pytest.raises(RemoteProtocolError, match="not asked for"):
            await a.transport.request(b.peer_id, GetChunks((Digest(b"x" * 32),)), 5)
        assert a.transport.traffic.rejected["unexpected-message"] == 2


async def test_a_message_that_is_no_request_is_our_own_mistake(make_node: Any) -> None:
    async with make_node("a") as a:
        with pytest.raises(LocalProtocolError):
            await a.transport.request(PeerId(bytes(32)), HeadReply(None), 5)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(b"\xff\xff\xff\xff", "framing", id="A-CHK-7-length-too-large"),
        pytest.param(b"\x00\x00\x00\x00", "framing", id="A-CHK-7-length-zero"),
        pytest.param(encode_message(GetHead())[:2], "framing", id="A-CHK-7-cut-in-mid-frame"),
        pytest.param(b"\x06\x00\x00\x00\x02\xdd\xff\xff\xff\xff", "decode", id="A-MSG-1-huge-array"),
        pytest.param(b"\x01\x00\x00\x00\xfe", "message-unknown", id="unknown-number"),
        pytest.param(encode_message(HeadReply(None)), "unexpected-message", id="reply-as-request"),
    ],
)
async def test_bytes_that_break_the_specification_close_the_stream_with_a_reason(
    make_node: Any, sent: bytes, code: str
) -> None:
    violations: list[tuple[PeerId, str]] = []

    async with make_node("a") as a, make_node("b") as b:
        b.transport.serve(answer_head)
        b.transport._provider.on_violation = lambda peer, reason: violations.append((peer, reason))
        await a.meet(b)
        hello = a.transport._hello
        reader, writer = await a.transport.p2pd.open_stream(b.peer_id, STREAM_NAME, 5)
        writer.write(encode_message(hello))
        assert await reader.readexactly(len(encode_message(hello))) == encode_message(hello)
        writer.write(sent)
        if len(sent) == 2:
            writer.close()
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        for _ in range(100):
            if b.transport.traffic.rejected:
                break
            await asyncio.sleep(0.02)
        assert b.transport.traffic.rejected == {code: 1}
        # a cut frame looks like a lost link and costs no strike
        assert violations == ([] if len(sent) == 2 else [(a.peer_id, code)])


async def test_a_stream_must_begin_with_a_hello_of_a_version_that_is_spoken(make_node: Any) -> None:
    async with make_node("a", deadlines=QUICK) as a, make_node("b", deadlines=QUICK) as b:
        b.transport.serve(answer_head)
        await a.meet(b)
        reader, writer = await a.transport.p2pd.open_stream(b.peer_id, STREAM_NAME, 5)
        writer.write(encode_message(GetHead()))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert b.transport.traffic.rejected["unexpected-message"] == 1
        newer = Hello(a.transport._hello.run_id, 2, 3, "seed", "future")
        reader, writer = await a.transport.p2pd.open_stream(b.peer_id, STREAM_NAME, 5)
        writer.write(encode_message(newer))
        assert b"wire-version" in await asyncio.wait_for(reader.readuntil(b"1 to 1"), 5)
        writer.close()
        assert await a.transport.request(b.peer_id, GetHead(), 5) == await answer_head(a.peer_id, GetHead())


async def test_a_silent_provider_is_given_up_after_the_stall_deadline(make_node: Any) -> None:
    async with make_node("a", deadlines=QUICK) as a, make_node("b") as b:

        async def never(_peer: PeerId, _message: Message) -> list[Message]:
            await asyncio.sleep(60)
            return []

        b.transport.serve(never)
        await a.meet(b)
        started = time.monotonic()
        with pytest.raises(PeerUnavailableError) as caught:
            await a.transport.request(b.peer_id, GetHead(), 30)
        assert caught.value.reason == "timeout"
        assert 0.4 < time.monotonic() - started < 3


async def test_a_request_ends_at_its_own_timeout(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b") as b:

        async def never(_peer: PeerId, _message: Message) -> list[Message]:
            await asyncio.sleep(60)
            return []

        b.transport.serve(never)
        await a.meet(b)
        with pytest.raises(PeerUnavailableError, match=r"no answer to GetHead for 0\.3 s"):
            await a.transport.request(b.peer_id, GetHead(), 0.3)


async def test_a_peer_nobody_knows_is_unreachable(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b") as b:
        stranger = b.peer_id
        with pytest.raises(PeerUnavailableError) as caught:
            await a.transport.request(stranger, GetHead(), 5)
        assert caught.value.reason == "unreachable"


async def test_a_stream_the_provider_closed_while_idle_is_replaced_without_an_error(make_node: Any) -> None:
    short_idle = Deadlines(provider_idle_seconds=0.3)

    async with make_node("a") as a, make_node("b", deadlines=short_idle) as b:
        b.transport.serve(answer_head)
        await a.meet(b)
        await a.transport.request(b.peer_id, GetHead(), 5)
        await asyncio.sleep(0.8)
        await a.transport.request(b.peer_id, GetHead(), 5)
        assert a.transport.traffic.streams_opened["outbound"] == 2


async def test_reopening_after_p2pd_was_killed_keeps_peer_id_port_and_handlers(make_node: Any) -> None:
    """A-PROC-1: killed with -9, back under the same peer id; requests work again."""
    async with make_node("a") as a, make_node("b") as b:
        b.transport.serve(answer_head)
        await a.meet(b)
        await a.transport.request(b.peer_id, GetHead(), 5)
        address = await b.address()
        os.kill(b.transport.p2pd.process_id, signal.SIGKILL)
        assert await asyncio.wait_for(b.transport.p2pd.wait_exit(), 5) == -signal.SIGKILL
        with pytest.raises(PeerUnavailableError):
            await a.transport.request(b.peer_id, GetHead(), 2)
        await b.transport.reopen()
        assert await b.address() == address
        await a.transport.reopen()
        await a.meet(b)
        assert await a.transport.request(b.peer_id, GetHead(), 5) == [HeadReply(b"head")]


async def test_requests_while_the_network_is_down_fail_at_once(make_node: Any) -> None:
    async with make_node("a") as a:
        await a.transport.close()
        assert not a.transport.is_open
        with pytest.raises(PeerUnavailableError, match="restarted"):
            await a.transport.request(PeerId(bytes(32)), GetHead(), 5)
        with pytest.raises(UnavailableError):
            await a.transport.dial(PeerId(bytes(32)), ["/ip4/127.0.0.1/tcp/1"])


async def test_closing_leaves_no_process_and_no_socket(make_node: Any) -> None:
    """A-PROC-2."""
    async with make_node("a") as a, make_node("b") as b:
        b.transport.serve(answer_head)
        await a.meet(b)
        await a.transport.request(b.peer_id, GetHead(), 5)
        process_id = b.transport.p2pd.process_id
        assert sorted(path.suffix for path in b.settings.socket_directory.iterdir()) == [".sock", ".sock"]
        started = time.monotonic()
        await b.transport.close()
        assert time.monotonic() - started < 3
        assert list(b.settings.socket_directory.iterdir()) == []
        assert not is_running(process_id)


async def test_a_stopped_p2pd_is_killed_on_close(make_node: Any) -> None:
    async with make_node("a") as a:
        process_id = a.transport.p2pd.process_id
        os.kill(process_id, signal.SIGSTOP)
        await a.transport.close()
        assert not is_running(process_id)


async def test_every_bootstrap_failure_has_its_own_reason(make_node: Any) -> None:
    """A-NET-1: refused, black hole and wrong peer id, one line each; asking again gives the same reasons."""
    async with make_node("a") as a, make_node("b") as b:
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        other = to_libp2p_text(PeerId(a.peer_id[::-1]))
        targets = [
            f"/ip4/127.0.0.1/tcp/1/p2p/{other}",
            f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{to_libp2p_text(b.peer_id)}",
            f"{await b.address()}/p2p/{other}",
            f"{await a.address()}/p2p/{to_libp2p_text(a.peer_id)}",
        ]
        # libp2p has one dial per peer: the two that name the same peer go one after the other here
        outcomes = [(await a.transport.dial_all([target], 1.0))[0] for target in targets]
        reasons = [outcome.reason for outcome in outcomes]
        assert reasons == ["refused", "timed-out", "wrong-peer", "self"], outcomes
        again = await a.transport.dial_all(targets[:1], 1.0)
        assert again[0].reason == "refused"
        assert str(outcomes[0]).startswith(targets[0] + ": connection refused")
        assert to_libp2p_text(b.peer_id) in str(outcomes[2])
        silent.close()


async def test_a_peer_that_was_away_is_dialled_as_soon_as_it_is_back(make_node: Any) -> None:
    """A-NET-5: libp2p's own back-off is a minute after so many dials, and neither link is lost meanwhile."""
    async with make_node("a") as a, make_node("b") as b:
        address = await b.address()
        await b.transport.close()
        for _ in range(8):
            assert [one.reason for one in await a.transport.dial(b.peer_id, [address])] == ["refused"]
        process = a.transport.p2pd
        await b.transport.open()
        assert [one.reason for one in await a.transport.dial(b.peer_id, [address])] == ["connected"]
        assert a.transport.p2pd is process


async def test_a_connection_somebody_else_opened_is_not_counted_as_our_own(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b") as b:
        await b.meet(a)
        assert (await a.transport.dial(b.peer_id, [await b.address()]))[0].is_connected
        assert [link.outbound for link in await a.transport.connected_peers()] == [False]
        assert [link.outbound for link in await b.transport.connected_peers()] == [True]


async def test_a_node_nobody_can_dial_serves_over_the_connection_it_opened(make_node: Any) -> None:
    """Outbound only: what it announces leads nowhere, and the peer it dialled is served all the same."""
    async with make_node("a") as a, make_node("b", announce_addresses=("/ip4/127.0.0.1/tcp/1",)) as b:
        b.transport.serve(answer_head)
        assert (await a.transport.dial(b.peer_id, [await b.address()]))[0].reason == "refused"
        await b.meet(a)
        assert await a.transport.request(b.peer_id, GetHead(), 5) == [HeadReply(b"head")]


async def test_addresses_a_peer_made_up_are_outcomes_and_not_errors(make_node: Any) -> None:
    async with make_node("a") as a, make_node("b") as b:
        claimed = ["", "nonsense", "/ip4/1.2.3.4/tcp/1/nonsense/x", "/ip4/1.2.3.4/tcp/1/p2p/x", "/ip4/é/tcp/1"]
        outcomes = await a.transport.dial(b.peer_id, [*claimed, await b.address()])
        assert [outcome.reason for outcome in outcomes] == ["invalid"] * 5 + ["connected"]
        assert [outcome.reason for outcome in await a.transport.dial(b.peer_id, claimed)] == ["invalid"] * 5
        assert await a.transport.dial(b.peer_id, []) == ()


async def test_a_port_somebody_listens_on_is_refused_and_named(make_node: Any) -> None:
    """A-NET-2: also against another p2pd, with which libp2p would share the port in silence."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"port {port}"):
            async with make_node("a", listen_addresses=(f"/ip4/127.0.0.1/tcp/{port}",)):
                pass
    async with make_node("b") as b:
        address = await b.address()
        with pytest.raises(AddressInUseError, match=address.rpartition("/")[2]):
            async with make_node("c", listen_addresses=(address,)):
                pass


async def test_announcing_port_zero_is_refused_at_start(make_node: Any) -> None:
    """A-NET-4."""
    with pytest.raises(UsageError, match="port 0"):
        async with make_node("a", announce_addresses=("/ip4/1.2.3.4/tcp/0",)):
            pass
    async with make_node("b", announce_addresses=("/ip4/1.2.3.4/tcp/4001",)) as b:
        assert await b.transport.listen_addresses(private_too=False) == ("/ip4/1.2.3.4/tcp/4001",)
    with pytest.raises(ConfigError):
        async with make_node("c", listen_addresses=("/ip4/1.2.3.4",)):
            pass


async def test_a_loopback_address_is_not_announced_to_a_public_swarm(make_node: Any) -> None:
    """A-NET-6."""
    async with make_node("a") as a:
        assert await a.transport.listen_addresses(private_too=False) == ()
        assert len(await a.transport.listen_addresses(private_too=True)) == 1


async def test_a_peer_that_answers_with_rubbish_again_and_again_is_not_asked_any_more(make_node: Any) -> None:
    """Strikes of replies and of what the machines found count together."""
    async with make_node("a") as a, make_node("b") as b:
        asked = 0

        async def answer(peer_id: PeerId, message: Message) -> list[Message]:
            nonlocal asked
            asked += 1
            return [HeadReply(None)]

        b.transport.serve(answer)
        await a.meet(b)
        for _ in range(4):
            a.transport.strike(b.peer_id, "signature")
        with pytest.raises(RemoteProtocolError, match="unexpected-message"):
            await a.transport.request(b.peer_id, GetRecords(()), 5)
        with pytest.raises(PeerUnavailableError, match="struck-out"):
            await a.transport.request(b.peer_id, GetHead(), 5)
        assert asked == 1
        a.transport.serve(answer)
        with pytest.raises(PeerRefusedError) as caught:
            await b.transport.request(a.peer_id, GetHead(), 5)
        assert caught.value.refusal.code == "struck-out"
        assert asked == 1


async def test_p2pd_drops_a_flood_of_connections_itself_and_its_command_line_holds_no_secret(make_node: Any) -> None:
    """Anybody on the machine can read a command line; libp2p prunes idle connections beyond its own high mark."""
    async with make_node("a") as node:
        line = read_command_line(node.transport.p2pd.process_id)
        given = line.split(b"\0")
        assert b"-connManager=1" in given
        assert not [one for one in given if one.startswith((b"-connHi", b"-connLo", b"-connGrace"))]
        for form in (bytes, lambda key: key.hex().encode(), base64.b64encode):
            assert form(node.identity.path.read_bytes())[8:40] not in line


def read_command_line(process_id: int) -> bytes:
    return Path(f"/proc/{process_id}/cmdline").read_bytes()
