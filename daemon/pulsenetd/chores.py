"""What a node does on a timer beside its machines: watch links, read the directory, mend, sweep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from pulsenet import limits
from pulsenet.errors import ConfigError, RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import PeerId
from pulsenet.node.events import Event, HaveSeen, HeadSeen, PeerConnected, PeerLost
from pulsenetd import runs
from pulsenetd.logs import logger
from pulsenetd.network import addresses
from pulsenetd.network.stack import Network
from pulsenetd.network.transport import PeerLink
from pulsenetd.storage.disk import DirectoryLock

LINKS_SECONDS: Final = 1.0
HEADS_SECONDS: Final = 15.0
"""The directory is the fallback: the mesh brings heads within a round trip."""
HAVES_SECONDS: Final = 20.0
HAVES_FIRST_SECONDS: Final = 1.0
"""Between the reads of one shard and the next; a newcomer first reads them all, each in about this time."""
MEND_SECONDS: Final = 20.0
"""A link that comes back is used within this time, the 10 s a dial takes at most, and libp2p's back-off from the one or
two dials that our own calls made before the loss was noticed (6 to 9 s)."""
RUN_FILES_SECONDS: Final = 3.0
"""What nodes and commands of this machine wrote into the run's directory is noticed within so many seconds."""
DESCRIPTORS_SECONDS: Final = 15.0
"""A revision usually comes with the next head; a run that publishes seldom passes it on by asking around."""


async def repeat(seconds: float | Callable[[], float], work: Callable[[], Awaitable[None]]) -> None:
    """Do ``work`` again and again, waiting so many seconds in between, or as many as the call says each time.

    The network may be away for a while, the disk may refuse, and a file of the run may be damaged: none of it ends
    a node that works, and the operator is told once.
    """
    last_text = ""
    while True:
        try:
            await work()
        except UnavailableError as error:
            logger.debug("a chore waits: %s", error)
        except (StorageError, ConfigError, RemoteProtocolError) as error:
            text = str(error)
            logger.log(logging.DEBUG if text == last_text else logging.WARNING, "%s", text)
            last_text = text
        else:
            last_text = ""
        await asyncio.sleep(seconds() if callable(seconds) else seconds)


class LinkWatch:
    """Tells the machines which peers can be reached, as libp2p sees it."""

    def __init__(self, network: Network, broadcast: Callable[[Event], None]) -> None:
        self._network = network
        self._broadcast = broadcast
        self.connected: frozenset[PeerId] = frozenset()
        """Peers with a connection at the last look."""
        self.links: tuple[PeerLink, ...] = ()
        """The same, with what is known of each connection."""

    async def look(self) -> None:
        """Compare the connections with those of the last look, and tell what changed.

        Raises:
            UnavailableError: p2pd did not answer this time, which says nothing of the connections.
        """
        reason = "closed"
        try:
            links = await self._network.transport.connected_peers()
        except UnavailableError:
            if self._network.supervisor.is_healthy:
                raise  # it happens on a machine at full load; one that hangs is noticed by its supervisor
            links, reason = [], "p2pd is being restarted"
        now = {link.peer_id: link for link in links}
        for peer_id in now.keys() - self.connected:
            link = now[peer_id]
            self._broadcast(PeerConnected(peer_id, link.addresses, link.outbound))
        for peer_id in self.connected - now.keys():
            self._broadcast(PeerLost(peer_id, reason))
        self.connected = frozenset(now)
        self.links = tuple(links)


class DirectoryReader:
    """Reads heads, and the have records of one shard after another."""

    def __init__(self, network: Network, broadcast: Callable[[Event], None], draw: Callable[[int], int]) -> None:
        self._network = network
        self._broadcast = broadcast
        self._draw = draw
        self._shard = draw(limits.HAVE_SHARDS)
        self._read_count = 0

    async def read_heads(self) -> None:
        """Show the machines every head the directory has."""
        for record in await self._network.directory.read_heads():
            self._broadcast(HeadSeen(record, None))

    async def read_haves(self) -> None:
        """Show the machines the have records of the next shard."""
        self._shard = (self._shard + 1) % limits.HAVE_SHARDS
        for record in await self._network.directory.read_haves(self._shard):
            self._broadcast(HaveSeen(record, None))
        self._read_count += 1

    def haves_wait_seconds(self) -> float:
        """Return when to read the next shard: soon until all were read once, with some chance against steps in time."""
        usual = HAVES_SECONDS if self._read_count >= limits.HAVE_SHARDS else HAVES_FIRST_SECONDS
        return usual * (0.75 + self._draw(1_000) / 2_000)


class RunFileKeeper:
    """Keeps the run's file on this machine current: own addresses in it, other nodes of the machine dialled."""

    def __init__(self, path: Path, peer_id: PeerId, network: Network) -> None:
        self._path = path
        self._peer_id = peer_id
        self._network = network

    def write(self, own: tuple[str, ...]) -> None:
        """Put this node's addresses first; keep those of other nodes, also of those that start at the same moment."""
        lock = DirectoryLock.acquire(self._path.parent, wait=True)
        try:
            file = runs.read_run_file(self._path)
            mine = tuple(addresses.join_address(address, self._peer_id) for address in own)
            others = self._without_own(file.bootstraps)
            kept = (mine + others)[: limits.ADDRESSES_MAX]
            if kept != file.bootstraps:
                runs.write_run_file(self._path, runs.RunFile(file.name, file.token, kept))
        finally:
            lock.release()

    def read(self) -> tuple[str, ...]:
        """Return the addresses of the other nodes that wrote themselves down."""
        try:
            file = runs.read_run_file(self._path)
        except (FileNotFoundError, ConfigError) as error:
            logger.debug("no bootstraps from the run file: %s", error)
            return ()
        return self._without_own(file.bootstraps)

    async def dial_others(self, connected: frozenset[PeerId]) -> None:
        """Dial nodes of this machine that came up since."""
        for text in await asyncio.to_thread(self.read):
            address, peer_id = addresses.split_address(text)
            if peer_id in connected:
                continue
            try:
                await self._network.dial(peer_id, (address,))
            except RemoteProtocolError as error:
                logger.debug("a node of this machine cannot be dialled: %s", error)

    def _without_own(self, bootstraps: tuple[str, ...]) -> tuple[str, ...]:
        """Return the addresses of others; what is no address is left out, for the file may be edited by people."""
        others = []
        for text in bootstraps:
            try:
                is_own = addresses.split_address(text)[1] == self._peer_id
            except ConfigError as error:
                logger.debug("an entry of the run file is left out: %s", error)
                continue
            if not is_own:
                others.append(text)
        return tuple(others)


class AddressWatch:
    """Notices where this node is dialled by now: machines get other addresses, and a new p2pd may get another port.

    Args:
        network: Knows where it listens.
        run_file: Where nodes of this machine look.
        is_private: Whether addresses of the own network are told to others.
        tell: Told what is announced from now on.
    """

    def __init__(
        self,
        network: Network,
        run_file: RunFileKeeper,
        *,
        is_private: Callable[[], bool],
        tell: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._network = network
        self._run_file = run_file
        self._is_private = is_private
        self._tell = tell
        self._here: frozenset[str] = frozenset()
        self._announced: frozenset[str] | None = None

    async def look(self) -> None:
        """Compare with the last look, and pass on what changed.

        Raises:
            UnavailableError: p2pd does not answer.
            StorageError: The run's file cannot be written.
            ConfigError: It is damaged.
        """
        listening = await self._network.transport.listen_addresses(private_too=True)
        here = frozenset(listening)  # p2pd names them in any order
        if not here or here == self._here:
            return  # none at all: the machine is off the network, and comes back
        announced = await self._network.transport.listen_addresses(private_too=self._is_private())
        if self._announced not in (None, frozenset(announced)):
            logger.info("others are told other addresses of this node now: %s", ", ".join(announced) or "none")
        self._announced = frozenset(announced)
        self._tell(announced)
        with suppress(FileNotFoundError):  # somebody deleted it, and joins anew
            await asyncio.to_thread(self._run_file.write, listening)
        self._here = here
