"""The whole network of a node: up, watched, brought back, taken down."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from free_ports import find_free_port
from networks import RUN_ID, bootstrap_address, make_network, wait_alone, wait_healthy

from pulsenet.chain.records import Have
from pulsenet.chain.signing import encode_signed, seal
from pulsenet.errors import UnavailableError, UsageError
from pulsenet.ids import PeerId
from pulsenet.wire.messages import GetHead, HeadReply, Message
from pulsenetd.errors import NoBootstrapError, P2pdError, exit_code
from pulsenetd.identity import load_or_create
from pulsenetd.network import hivemind_repairs
from pulsenetd.network.addresses import get_port, join_address, split_address
from pulsenetd.network.directory_keys import get_shard


async def answer(_peer: PeerId, _message: Message) -> list[Message]:
    return [HeadReply(b"head")]


async def test_p2pd_killed_while_running_is_back_soon_and_peers_find_each_other_again(tmp_path: Path) -> None:
    """A-PROC-1: noticed within 5 s, not ready meanwhile, same peer id, requests go through again."""
    first = make_network(tmp_path, "first")
    second = make_network(tmp_path, "second")
    await first.open([])
    try:
        address = await bootstrap_address(tmp_path, "first", first)
        outcomes = await second.open([address])
        assert [outcome.reason for outcome in outcomes] == ["connected"]
        watch = asyncio.create_task(second.run())
        first.transport.serve(answer)
        peer_id = outcomes[0].peer_id
        assert await second.transport.request(peer_id, GetHead(), 5) == [HeadReply(b"head")]
        killed_at = time.monotonic()
        os.kill(second.transport.p2pd.process_id, signal.SIGKILL)
        await wait_healthy(second, False)
        assert time.monotonic() - killed_at < 5
        await wait_healthy(second, True)
        assert second.supervisor.restarts == {"died": 1}
        assert await second.transport.request(peer_id, GetHead(), 5) == [HeadReply(b"head")]
        assert await second.mend() == (peer_id,)
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch
    finally:
        await second.close()
        await first.close()
    assert list((tmp_path / "second").iterdir()) == []


@pytest.mark.nightly
async def test_a_stopped_p2pd_is_noticed_within_fifteen_seconds_and_replaced(tmp_path: Path) -> None:
    """A-PROC-1: hung, not dead; the old process is gone afterwards and the port is the same."""
    network = make_network(tmp_path, "node")
    await network.open([])
    try:
        address = await bootstrap_address(tmp_path, "node", network)
        watch = asyncio.create_task(network.run())
        process_id = network.transport.p2pd.process_id
        stopped_at = time.monotonic()
        os.kill(process_id, signal.SIGSTOP)
        await wait_healthy(network, False)
        assert time.monotonic() - stopped_at < 15
        await wait_healthy(network, True)
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
        assert await bootstrap_address(tmp_path, "node", network) == address
        assert network.supervisor.restarts == {"hung": 1}
        watch.cancel()
    finally:
        await network.close()


async def test_no_bootstrap_reached_is_one_error_with_a_line_each(tmp_path: Path) -> None:
    """A-NET-1."""
    network = make_network(tmp_path, "node")
    first, second = (join_address(f"/ip4/127.0.0.1/tcp/{port}", PeerId(bytes([port]) * 32)) for port in (1, 2))
    with pytest.raises(NoBootstrapError) as caught:
        await network.open([first, second])
    lines = str(caught.value).splitlines()
    assert lines[1:3] == [f"  {first}: connection refused", f"  {second}: connection refused"]
    assert exit_code(caught.value) == 3
    assert not network.transport.is_open
    assert list((tmp_path / "node").iterdir()) == []
    with pytest.raises(UsageError):
        await network.open(["not an address"])


async def test_one_live_bootstrap_of_five_is_enough_and_the_others_are_named(tmp_path: Path) -> None:
    """A-NET-1: each dead one fails in its own way, the one that lives is found within 30 s."""
    live, node = make_network(tmp_path, "live"), make_network(tmp_path, "node")
    await live.open([])
    try:
        address = await bootstrap_address(tmp_path, "live", live)
        refused, silent, nameless = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))
        with socket.create_server(("127.0.0.1", 0)) as hole:
            port = hole.getsockname()[1]
            dead = [
                join_address("/ip4/127.0.0.1/tcp/1", refused),
                join_address(f"/ip4/127.0.0.1/tcp/{port}", silent),
                join_address("/dns4/nobody.invalid/tcp/1", nameless),
                join_address(split_address(address)[0], PeerId(bytes([4]) * 32)),
            ]
            started = time.monotonic()
            outcomes = await node.open([*dead, address], timeout_seconds=5)
        assert time.monotonic() - started < 30
        reasons = [outcome.reason for outcome in outcomes]
        assert reasons == ["refused", "timed-out", "unresolved", "wrong-peer", "connected"]
    finally:
        await node.close()
        await live.close()


async def test_bootstraps_that_start_at_the_same_moment_find_each_other(tmp_path: Path) -> None:
    """A-DHT-4: all have the same list, and nobody on it is up yet."""
    names = [f"n{number}" for number in range(4)]
    nodes = []
    for name in names:
        port = find_free_port()
        nodes.append(make_network(tmp_path, name, listen_addresses=(f"/ip4/127.0.0.1/tcp/{port}",)))
    listed = [
        join_address(node.transport._settings.listen_addresses[0], load_or_create(tmp_path / f"{name}.key").peer_id)
        for name, node in zip(names, nodes, strict=True)
    ]
    try:
        await asyncio.gather(*(node.open(listed[:2], try_seconds=30) for node in nodes))
        # the first two were each other's only bootstrap: whichever was up first found nobody, and mends
        await asyncio.gather(*(node.mend() for node in nodes))
        for node in nodes:
            assert len(node.directory._node.protocol.routing_table.uid_to_peer_id) >= 2
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


async def test_two_islands_become_one_as_soon_as_one_node_reaches_the_other(tmp_path: Path) -> None:
    """A-DHT-4, A-NET-5: store goes on saying yes on either side, so the timer's mending has to join them."""
    port = find_free_port()
    first = make_network(tmp_path, "first", listen_addresses=(f"/ip4/127.0.0.1/tcp/{port}",))
    second, third, fourth = (make_network(tmp_path, name) for name in ("second", "third", "fourth"))
    identity = load_or_create(tmp_path / "second.key")
    try:
        await fourth.open([])
        listed = join_address(f"/ip4/127.0.0.1/tcp/{port}", load_or_create(tmp_path / "first.key").peer_id)
        await third.open([listed, await bootstrap_address(tmp_path, "fourth", fourth)])
        await first.open([])
        await second.open([listed])
        issued_at_ms = second.directory.now_ms()
        have = seal(Have(RUN_ID, "seed", 0, 0, 0, (), (), issued_at_ms), identity.sign, identity.peer_id)
        await second.directory.announce_have(have)
        shard = get_shard(identity.peer_id)
        assert await first.directory.read_haves(shard) == [encode_signed(have)]
        assert await fourth.directory.read_haves(shard) == []
        await third.mend()
        assert await fourth.directory.read_haves(shard) == [encode_signed(have)]
    finally:
        await asyncio.gather(*(node.close() for node in (first, second, third, fourth)))


async def test_a_directory_that_could_not_be_opened_again_is_opened_by_the_next_mending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make_network(tmp_path, "node")
    await network.open([])
    try:

        async def fail(_p2p: object) -> None:
            raise UnavailableError("timed out: joining the directory")

        with monkeypatch.context() as patch:
            patch.setattr(network.directory, "open", fail)
            with pytest.raises(UnavailableError):
                await network.take_reachability(False)
        assert not network.directory.is_open
        await network.mend()
        assert network.directory.is_open
        assert network.directory._node.protocol.client_mode
    finally:
        await network.close()


async def test_a_replacement_that_did_not_come_to_its_end_is_made_up_for(tmp_path: Path) -> None:
    """The machines of a node may be built anew at any moment, and the watch with them."""
    network = make_network(tmp_path, "node")
    await network.open([])
    try:
        await network.directory.close(p2pd_is_alive=False)
        await network.transport.close()
        watch = asyncio.create_task(network.run())
        for _ in range(600):
            if network.transport.is_open and network.supervisor.restarts["failed"]:
                break
            await asyncio.sleep(0.05)
        assert not watch.done()
        assert network.transport.is_open
        assert network.directory.is_open
        watch.cancel()
    finally:
        await network.close()


async def test_a_bootstrap_itself_may_be_the_first_one_up(tmp_path: Path) -> None:
    node = make_network(tmp_path, "node", listen_addresses=(f"/ip4/127.0.0.1/tcp/{find_free_port()}",))
    own = join_address("/ip4/127.0.0.1/tcp/1", load_or_create(tmp_path / "node.key").peer_id)
    other = join_address("/ip4/127.0.0.1/tcp/2", PeerId(bytes([2]) * 32))
    outcomes = await node.open([own, other])
    try:
        assert [outcome.reason for outcome in outcomes] == ["self", "refused"]
    finally:
        await node.close()


@pytest.mark.parametrize("patience", [{"try_seconds": 30}, {"wait": True}], ids=["within a limit", "without one"])
async def test_a_bootstrap_that_comes_up_later_is_joined(tmp_path: Path, patience: dict[str, Any]) -> None:
    """A-NET-1: retried, and told once in one line."""
    place = f"/ip4/127.0.0.1/tcp/{find_free_port()}"
    later = make_network(tmp_path, "later", listen_addresses=(place,))
    address = join_address(place, load_or_create(tmp_path / "later.key").peer_id)
    node = make_network(tmp_path, "node")
    told = asyncio.Queue[str]()
    opening = asyncio.create_task(node.open([address], on_progress=told.put_nowait, **patience))
    try:
        assert "connection refused" in await told.get()
        await later.open([])
        assert (await opening)[0].is_connected
        assert told.empty()
    finally:
        opening.cancel()
        await node.close()
        await later.close()


async def test_peers_dialled_later_are_remembered_for_mending(tmp_path: Path) -> None:
    first, second = make_network(tmp_path, "first"), make_network(tmp_path, "second")
    await first.open([])
    await second.open([])
    try:
        peer_id = load_or_create(tmp_path / "first.key").peer_id
        listening = await first.transport.listen_addresses(private_too=True)
        outcomes = await second.dial(peer_id, listening)
        assert outcomes[0].is_connected
        assert await second.mend() == (peer_id,)
        # the first one dialled nobody, and still learns of its peer's clock and part of the directory
        assert await first.mend() == (load_or_create(tmp_path / "second.key").peer_id,)
        assert first.directory.clock_offset.ahead_seconds is not None
    finally:
        await second.close()
        await first.close()


async def test_a_node_that_lost_everybody_reaches_them_soon_after_they_are_back(tmp_path: Path) -> None:
    """A-NET-5: this node dialled nobody in vain; where hivemind did at the last moment, libp2p waits for seconds."""
    first, second = make_network(tmp_path, "first"), make_network(tmp_path, "second")
    await first.open([])
    try:
        address = await bootstrap_address(tmp_path, "first", first)
        await second.open([address])
        await first.close()
        await wait_alone(second)
        for _ in range(6):
            assert await second.mend() == ()
        await first.open([])
        joined: list[int] = []
        while not any(joined) and len(joined) < 150:
            joined.append(len(await second.mend()))
            await asyncio.sleep(0.2)
        assert any(joined)
    finally:
        await second.close()
        await first.close()


async def test_where_libp2p_backs_off_from_everybody_a_new_p2pd_dials(tmp_path: Path) -> None:
    """A-NET-5: something at the address opens and speaks another language; the watch sees no death."""

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    first, second = make_network(tmp_path, "first"), make_network(tmp_path, "second")
    await first.open([])
    try:
        address = await bootstrap_address(tmp_path, "first", first)
        await second.open([address])
        watch = asyncio.create_task(second.run())
        await first.close()
        port = get_port(split_address(address)[0])
        stranger = await asyncio.start_server(hang_up, "127.0.0.1", port)
        process = second.transport.p2pd
        assert await second.mend() == ()
        second._refresh_at = 0.0
        assert await second.mend() == ()
        assert second.transport.p2pd is not process
        stranger.close()
        await stranger.wait_closed()
        await first.open([])
        assert await second.mend() == ()  # refreshed a moment ago: libp2p still backs off
        second._refresh_at = 0.0
        assert len(await second.mend()) == 1
        await asyncio.sleep(0.1)
        assert second.supervisor.restart_count == 0
        assert second.supervisor.restarts["stuck"] == 2
        assert not watch.done()
        watch.cancel()
    finally:
        await second.close()
        await first.close()


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (None, 0, "missing"),
        (b"#!/bin/sh\n", 0o600, "not executable"),
        (b"\x7fELF\x02\x01" + bytes(12) + b"\x09\x00", 0o700, "built for ELF machine 9"),
        (b"#!/bin/sh\necho cannot start >&2\nexit 3\n", 0o700, "cannot start"),
    ],
)
async def test_a_p2pd_that_cannot_run_is_named_within_five_seconds(
    tmp_path: Path, content: bytes | None, mode: int, words: str
) -> None:
    """A-PROC-6."""
    binary = tmp_path / "p2pd"
    if content is not None:
        binary.write_bytes(content)
        binary.chmod(mode)
    hivemind_repairs.load_now()

    network = make_network(tmp_path, "node", binary=binary)
    started = time.monotonic()
    with pytest.raises(P2pdError, match=words) as caught:
        await network.open([])
    assert time.monotonic() - started < 5
    assert str(binary) in str(caught.value)
    assert exit_code(caught.value) == 7
