"""Whole networks on loopback, for tests of what they do together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from pulsenet.chain.records import Head, SignedRecord
from pulsenet.chain.signing import seal
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.wire.messages import Hello
from pulsenetd.identity import Identity, load_or_create, to_libp2p_bytes, verify
from pulsenetd.network.addresses import join_address
from pulsenetd.network.directory import Directory
from pulsenetd.network.p2pd import P2pdSettings, RawStream
from pulsenetd.network.provider import Provider
from pulsenetd.network.requester import OpenRawStream, Requester
from pulsenetd.network.stack import Network
from pulsenetd.network.transport import Transport

RUN_ID = RunId(bytes(range(32)))
PEER = PeerId(bytes(range(32)))
HELLO = Hello(RunId(bytes(32)), 1, 1, "seed", "test")


def make_network(tmp_path: Path, name: str, **options: Any) -> Network:
    identity = load_or_create(tmp_path / f"{name}.key")
    settings = P2pdSettings(identity_path=identity.path, socket_directory=tmp_path / name, **options)
    transport = Transport(settings, peer_id=identity.peer_id, run_id=RUN_ID, role="seed")
    directory = Directory(peer_id=identity.peer_id, run_id=RUN_ID, verify=verify)
    return Network(transport, directory, draw=lambda: 0.0)


@contextlib.asynccontextmanager
async def open_directory(
    node: Any, *authorities: Any, client_mode: bool = False, **options: Any
) -> AsyncIterator[Directory]:
    """Open a directory on a node of ``make_node``, with the other nodes whose heads it believes."""
    directory = Directory(peer_id=node.peer_id, run_id=RUN_ID, verify=verify, **options)
    await directory.set_client_mode(client_mode)
    directory.set_authorities([one.peer_id for one in authorities])
    await directory.open(node.transport.p2pd.hivemind_p2p)
    try:
        yield directory
    finally:
        await directory.close()


@contextlib.asynccontextmanager
async def open_both(make_node: Any) -> AsyncIterator[tuple[Any, Any, Directory, Directory]]:
    """Open an authority and a node that has met it, perhaps an attacker, and the directory of each."""
    async with (
        make_node("a") as a,
        make_node("b") as b,
        open_directory(a, a) as first,
        open_directory(b, a) as second,
    ):
        await b.meet(a)
        await second.join([a.peer_id])
        yield a, b, first, second


def sign_head(identity: Identity, number: int, issued_at_ms: int | None = None) -> SignedRecord:
    issued_at_ms = int(time.time() * 1000) if issued_at_ms is None else issued_at_ms
    digest = Digest(bytes(32))
    head = Head(RUN_ID, 0, 0, Version(0, number), digest, digest, digest, None, issued_at_ms, issued_at_ms + 300_000)
    return seal(head, identity.sign, identity.peer_id)


@contextlib.asynccontextmanager
async def open_line(provider: Provider, make: Callable[[OpenRawStream], Requester]) -> AsyncIterator[Requester]:
    """Open a requester of a provider, both of which know the other as PEER, over loopback TCP instead of libp2p."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await provider.serve_stream(to_libp2p_bytes(PEER), reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)

    async def open_raw_stream(_peer: PeerId, _timeout_seconds: float) -> RawStream:
        return await asyncio.open_connection(*server.sockets[0].getsockname())

    requester = make(open_raw_stream)
    requester.open()
    try:
        yield requester
    finally:
        requester.close()
        await provider.close()
        server.close()


async def bootstrap_address(tmp_path: Path, name: str, network: Network) -> str:
    address = (await network.transport.listen_addresses(private_too=True))[0]
    return join_address(address, load_or_create(tmp_path / f"{name}.key").peer_id)


async def wait_healthy(network: Network, is_healthy: bool) -> None:
    """Wait until the watch over p2pd says so."""
    for _ in range(3_000):
        if network.supervisor.is_healthy == is_healthy:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the watch does not say so")


async def wait_alone(network: Network) -> None:
    """Wait until p2pd noticed that nobody is left."""
    for _ in range(200):
        if not await network.transport.connected_peers():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("still connected")
