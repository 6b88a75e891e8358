"""Real nodes on loopback for the network adapters' tests."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pulsenet.ids import PeerId, RunId
from pulsenetd.identity import Identity, load_or_create
from pulsenetd.network import hivemind_repairs
from pulsenetd.network.p2pd import P2pdSettings
from pulsenetd.network.pacing import Caps
from pulsenetd.network.streams import Deadlines
from pulsenetd.network.transport import Transport

# Tests are no package: helpers of several files are found by their directory.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "e2e"))  # free_ports

RUN_ID = RunId(bytes(range(32)))


@dataclass
class Node:
    identity: Identity
    settings: P2pdSettings
    transport: Transport

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    async def address(self) -> str:
        return (await self.transport.listen_addresses(private_too=True))[0]

    async def meet(self, other: Node) -> None:
        outcomes = await self.transport.dial(other.peer_id, [await other.address()])
        assert outcomes[0].is_connected, outcomes


@pytest.fixture(autouse=True)
def _own_clock() -> Iterator[None]:
    """Let hivemind have the system's clock again: a directory that a test opens sets its own for the process."""
    yield
    if "hivemind.dht.node" in sys.modules:
        hivemind_repairs.set_clock(time.time)


NodeMaker = Callable[..., Any]


@pytest.fixture
def make_node(tmp_path: Path) -> NodeMaker:
    """Return an async context manager ``make_node(name, **options)`` that opens a node and closes it again."""

    @contextlib.asynccontextmanager
    async def make(
        name: str,
        *,
        deadlines: Deadlines | None = None,
        run_id: RunId = RUN_ID,
        caps: Caps = Caps(),  # noqa: B008 - frozen
        **options: Any,
    ) -> AsyncIterator[Node]:
        identity = load_or_create(tmp_path / f"{name}.key")
        settings = P2pdSettings(identity_path=identity.path, socket_directory=tmp_path / name, **options)
        transport = Transport(
            settings, peer_id=identity.peer_id, run_id=run_id, role="inferencer", deadlines=deadlines, caps=caps
        )
        await transport.open()
        try:
            yield Node(identity, settings, transport)
        finally:
            await transport.close()

    return make
