"""Fifty nodes started at the same moment are one network a minute later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from free_ports import find_free_port
from networks import RUN_ID, make_network

from pulsenet import limits
from pulsenet.chain.records import Have, Head
from pulsenet.chain.signing import decode_signed, encode_signed, seal
from pulsenet.errors import UnavailableError
from pulsenet.ids import Digest, PeerId, Version
from pulsenetd.chores import MEND_SECONDS, repeat
from pulsenetd.identity import Identity, load_or_create
from pulsenetd.network import hivemind_repairs
from pulsenetd.network.addresses import join_address
from pulsenetd.network.stack import Network

STARTS_COUNT = 50
BOOTSTRAPS_COUNT = 5
ONE_NETWORK_SECONDS_MAX = 60.0
BUSY_MAX = 0.7


def make_head(identity: Identity, now_ms: int) -> Any:
    nothing = Digest(bytes(32))
    head = Head(RUN_ID, 0, 0, Version(0, 1), nothing, nothing, nothing, None, now_ms, now_ms + 300_000)
    return seal(head, identity.sign, identity.peer_id)


def make_have(identity: Identity, now_ms: int) -> Any:
    return seal(Have(RUN_ID, "seed", 0, 0, 0, (), (), now_ms), identity.sign, identity.peer_id)


async def wait_head(node: Network, head: bytes) -> None:
    """Wait until a node finds the head; the caller has a deadline."""
    found: list[bytes] = []
    while found != [head]:
        with contextlib.suppress(UnavailableError):  # too busy: asked again, as a chore would
            found = await node.directory.read_heads()


async def wait_everybody(node: Network, peer_ids: set[PeerId]) -> None:
    """Wait until a node finds everybody's have record; the caller has a deadline."""
    found: set[PeerId] = set()
    while found != peer_ids:
        for shard in range(limits.HAVE_SHARDS):
            with contextlib.suppress(UnavailableError):
                found |= {decode_signed(record).signers[0] for record in await node.directory.read_haves(shard)}


async def wait_one_network(nodes: Sequence[Network], head: bytes, peer_ids: set[PeerId]) -> None:
    """Wait until every node finds the head, and the first, one in the middle and the last find everybody."""
    await asyncio.gather(*(wait_head(node, head) for node in nodes))
    await asyncio.gather(*(wait_everybody(node, peer_ids) for node in (nodes[0], nodes[len(nodes) // 2], nodes[-1])))


@pytest.mark.nightly
async def test_fifty_nodes_started_at_once_are_one_network_within_a_minute(tmp_path: Path) -> None:
    """A-DHT-4: the five bootstraps of the list start at the same moment as those that need them.

    Fifty p2pd and directories in one process, without models: the network of fifty nodes, not fifty daemons. They take
    about 55 s of processor time, most of it for starting p2pd, so two cores have to be free.
    """
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    if busy > BUSY_MAX:
        pytest.skip(f"{busy:.1f} programs want each core of this machine already")
    hivemind_repairs.load_now()
    names = [f"n{number}" for number in range(STARTS_COUNT)]
    identities = [load_or_create(tmp_path / f"{name}.key") for name in names]
    addresses = [f"/ip4/127.0.0.1/tcp/{find_free_port()}" for _ in range(BOOTSTRAPS_COUNT)]
    listed = [join_address(*pair) for pair in zip(addresses, (one.peer_id for one in identities), strict=False)]
    nodes = [
        make_network(tmp_path, name, listen_addresses=(addresses[index],))
        if index < BOOTSTRAPS_COUNT
        else make_network(tmp_path, name)
        for index, name in enumerate(names)
    ]
    publisher = identities[-1]

    async def live(node: Network, identity: Identity) -> None:
        """What a daemon does: start, announce, mend."""
        node.directory.set_authorities([publisher.peer_id])
        await node.open(listed, try_seconds=ONE_NETWORK_SECONDS_MAX)
        with contextlib.suppress(UnavailableError):  # too busy: announced again at the next mending
            await node.directory.announce_have(make_have(identity, node.directory.now_ms()))
        if identity is publisher:
            with contextlib.suppress(UnavailableError):
                await node.directory.announce_head(head)

    head = make_head(publisher, int(time.time() * 1000))

    def mender(node: Network) -> Any:
        async def mend() -> None:
            await node.mend()

        return mend

    mending: list[asyncio.Task[None]] = []
    try:
        started = time.monotonic()
        async with asyncio.timeout(ONE_NETWORK_SECONDS_MAX):
            await asyncio.gather(*(live(*pair) for pair in zip(nodes, identities, strict=True)))
            opened = time.monotonic() - started
            mending += [asyncio.create_task(repeat(MEND_SECONDS, mender(node))) for node in nodes]
            await wait_one_network(nodes, encode_signed(head), {identity.peer_id for identity in identities})
        print(f"all open after {opened:.0f} s, one network after {time.monotonic() - started:.0f} s")
    finally:
        for task in mending:
            task.cancel()
        await asyncio.gather(*(node.close() for node in nodes))
