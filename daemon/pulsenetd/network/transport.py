"""Messages to and from peers over libp2p streams.

One object owns p2pd. Requests run over pooled long-lived streams, incoming streams are served, and both
survive a restart of p2pd: :meth:`Transport.reopen` brings up a new one under the same key and ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import PeerId, RunId, short
from pulsenet.wire.messages import FEATURES, Hello, Message
from pulsenetd.errors import AddressInUseError
from pulsenetd.network import addresses, p2pd
from pulsenetd.network.admission import Rules
from pulsenetd.network.dial import DialHistory, DialOutcome
from pulsenetd.network.knock import CLOSED, knock
from pulsenetd.network.p2pd import P2pd, P2pdSettings, RawStream
from pulsenetd.network.pacing import Caps, FindKind, Gate, UploadDesk
from pulsenetd.network.provider import Handler, Provider
from pulsenetd.network.requester import Requester
from pulsenetd.network.streams import Deadlines, PeerUnavailableError, Traffic

logger: Final = logging.getLogger("pulsenet.transport")

STREAM_NAME: Final = "/pulsenet/1"
"""libp2p protocol name of our streams (SPEC section 3)."""

_REAP_SECONDS: Final = 15.0
_CONTROL_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A peer that libp2p holds a connection to."""

    peer_id: PeerId
    addresses: tuple[str, ...]
    outbound: bool
    """Whether this node dialled it."""
    round_trip_seconds: float | None
    """Smoothed time from our Hello to theirs; ``None`` before the first stream."""


class Transport:
    """This node's way to its peers.

    Args:
        settings: How to run p2pd; its key file is this node's identity.
        peer_id: This node.
        run_id: Only peers of this run are talked to.
        role: ``trainer``, ``inferencer`` or ``seed``, told to peers.
        software: Name and version, told to peers.
        deadlines: Shorter ones make tests quick.
        clock: Monotonic seconds.
        caps: What the operator allows to be sent and received.
    """

    def __init__(
        self,
        settings: P2pdSettings,
        *,
        peer_id: PeerId,
        run_id: RunId,
        role: str,
        software: str = "pulsenet",
        deadlines: Deadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
        caps: Caps = Caps(),  # noqa: B008  # frozen
    ) -> None:
        self._settings = settings
        self._peer_id = peer_id
        self._deadlines = deadlines or Deadlines()
        self._hello = Hello(
            run_id=run_id,
            wire_version_min=limits.WIRE_VERSION,
            wire_version_max=limits.WIRE_VERSION,
            role=role,
            software=software,
            features=FEATURES,
        )
        self.traffic = Traffic()
        self._clock = clock
        self._provider = Provider(self._hello, self._deadlines, self.traffic, UploadDesk(caps.upload, clock), clock)
        self._provider.on_violation = self.strike
        self._p2pd: P2pd | None = None
        self._requester = Requester(
            self._hello,
            self._open_raw_stream,
            self._deadlines,
            self.traffic,
            clock,
            self._drop_connection,
            Gate(caps.download, clock),
        )
        self._outbound: set[PeerId] = set()
        self._dial_history = DialHistory()
        self._reaper: asyncio.Task[None] | None = None

    # -- life cycle ---------------------------------------------------------------------------

    async def open(self, on_progress: Callable[[str], None] = lambda _: None) -> None:
        """Start p2pd and serve incoming streams.

        Raises:
            P2pdError, AddressInUseError, ConfigError, UnavailableError: see :func:`pulsenetd.network.p2pd.start`.
        """
        assert self._p2pd is None
        running = await p2pd.start(self._settings, on_progress)
        try:
            await running.serve(STREAM_NAME, self._provider.serve_stream)
            listening = await running.listen_addresses(self._settings.start_timeout_seconds)
        except BaseException:
            await running.close()
            raise
        self._p2pd = running
        self._requester.open()
        self._keep_ports(listening)
        self._reaper = asyncio.create_task(self._reap_idle_streams())

    async def close(self) -> None:
        """Drop every stream, end p2pd and remove its sockets."""
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        running, self._p2pd = self._p2pd, None
        self._requester.close()
        await self._provider.close()
        if running is not None:
            await running.close()

    def abandon(self) -> None:
        """Leave no p2pd and no socket of it behind, without waiting: this process is about to end."""
        if self._p2pd is not None:
            self._p2pd.abandon()

    async def reopen(self, on_progress: Callable[[str], None] = lambda _: None) -> None:
        """Replace a p2pd that died or hangs by a new one with the same key, ports and handlers.

        Raises:
            P2pdError, ConfigError, UnavailableError: see :meth:`open`.
        """
        await self.close()
        self._dial_history.clear()
        try:
            await self.open(on_progress)
        except AddressInUseError:
            logger.warning("the old port is taken: listening on another")
            free = tuple(addresses.with_port(address, 0) for address in self._settings.listen_addresses)
            self._settings = replace(self._settings, listen_addresses=free)
            await self.open(on_progress)

    @property
    def is_open(self) -> bool:
        """Whether a p2pd is in use."""
        return self._p2pd is not None

    @property
    def p2pd(self) -> P2pd:
        """The running p2pd.

        Raises:
            UnavailableError: it is being restarted.
        """
        if self._p2pd is None:
            raise UnavailableError("the network is down: p2pd is being restarted")
        return self._p2pd

    # -- messages -----------------------------------------------------------------------------

    async def request(
        self,
        peer_id: PeerId,
        message: Message,
        timeout_seconds: float,
        on_reply: Callable[[Message], None] | None = None,
    ) -> list[Message]:
        """Send a request and return its replies; see :meth:`pulsenetd.network.requester.Requester.request`.

        A peer that broke the specification too often is not asked (``struck-out``).
        """
        if self._provider.doorkeeper.standing.wait_seconds(peer_id, self._clock()) > 0:
            raise PeerUnavailableError("struck-out", "this peer broke the specification too often")
        try:
            return await self._requester.request(peer_id, message, timeout_seconds, on_reply)
        except RemoteProtocolError as error:
            self.strike(peer_id, error.code)
            raise

    def strike(self, peer_id: PeerId, code: str) -> None:
        """Count that a peer broke the specification; at the fifth time it is left alone for a while."""
        if self._provider.doorkeeper.standing.strike(peer_id, self._clock()):
            logger.warning("%s broke the specification too often, last by %s: left alone for now", short(peer_id), code)

    def serve(
        self,
        handler: Handler,
        *,
        rules: Rules | None = None,
        find_kind: FindKind | None = None,
    ) -> None:
        """Answer requests from now on, at most ``SERVED_REQUESTS_MAX`` at once.

        Args:
            handler: Returns the replies to one request: one, or one ``ChunkReply`` per digest asked for.
            rules: Asked at each stream and request before any work is done; by default everybody is served.
            find_kind: Says what kind of blob chunks are asked of; patches go before anchors, and each is counted.
        """
        self._provider.handler = handler
        self._provider.doorkeeper.rules = rules
        if find_kind is not None:
            self._provider.find_kind = self._requester.find_kind = find_kind

    def stop_serving(self) -> None:
        """Refuse requests as ``starting`` until :meth:`serve` is called again."""
        self._provider.handler = None

    # -- connections --------------------------------------------------------------------------

    async def dial(
        self, peer_id: PeerId, peer_addresses: Sequence[str], timeout_seconds: float | None = None
    ) -> tuple[DialOutcome, ...]:
        """Connect to a peer at any of its addresses; return one outcome per address.

        Never raises for what a peer claims: an address that is none has the outcome ``invalid``.

        Raises:
            UnavailableError: p2pd itself is being restarted.
        """
        running = self.p2pd
        if peer_id == self._peer_id:
            return tuple(DialOutcome(peer_id, one, "self", "this is our own key") for one in peer_addresses)
        usable = [address for address in peer_addresses if running.can_dial(address)]
        outcomes = {address: DialOutcome(peer_id, address, "invalid", "not an address") for address in peer_addresses}
        if usable:
            outcomes |= await self._dial_usable(
                running, peer_id, usable, timeout_seconds or self._deadlines.open_seconds
            )
        return tuple(outcomes[address] for address in peer_addresses)

    async def _dial_usable(
        self, running: P2pd, peer_id: PeerId, usable: Sequence[str], timeout_seconds: float
    ) -> dict[str, DialOutcome]:
        is_new = True
        with contextlib.suppress(UnavailableError):  # p2pd is busy: knocking once too often does no harm
            is_new = peer_id not in {peer.peer_id for peer in await running.list_peers(_CONTROL_SECONDS)}
        outcomes: dict[str, DialOutcome] = {}
        if is_new:
            answers = await asyncio.gather(*(knock(address, timeout_seconds) for address in usable))
            closed = {address: reason for address, reason in zip(usable, answers, strict=True) if reason}
            outcomes = {one: DialOutcome(peer_id, one, reason, CLOSED[reason]) for one, reason in closed.items()}
            usable = [address for address in usable if address not in closed]
            if not usable:
                return outcomes
        try:
            await running.connect(peer_id, usable, timeout_seconds)
        except UnavailableError as error:
            text = str(error)
            return outcomes | {address: self._dial_history.explain(peer_id, address, text) for address in usable}
        if is_new:
            self._outbound.add(peer_id)
        for address in usable:
            self._dial_history.forget(peer_id, address)
        return outcomes | {address: DialOutcome(peer_id, address, "connected", "connected") for address in usable}

    async def dial_all(self, bootstraps: Sequence[str], timeout_seconds: float) -> tuple[DialOutcome, ...]:
        """Dial bootstraps (``/ip4/.../p2p/<peer>``) at once; return one outcome each, in their order (A-NET-1).

        Raises:
            UsageError: one of them is no such address.
            UnavailableError: p2pd itself is being restarted.
        """
        targets = [addresses.split_address(text) for text in bootstraps]
        by_peer: dict[PeerId, list[str]] = {}
        for address, peer_id in targets:
            # libp2p dials a peer once at a time, so all its addresses go into one call
            by_peer.setdefault(peer_id, []).append(address)
        results = await asyncio.gather(*(self.dial(*target, timeout_seconds) for target in by_peer.items()))
        outcomes = {(one.address, one.peer_id): one for per_peer in results for one in per_peer}
        return tuple(outcomes[target] for target in targets)

    async def connected_peers(self) -> list[PeerLink]:
        """Return the peers libp2p is connected to, ascending by key.

        Raises:
            UnavailableError: p2pd did not answer.
        """
        peers = await self.p2pd.list_peers(_CONTROL_SECONDS)
        present = {peer.peer_id for peer in peers}
        self._outbound &= present
        self._requester.forget_others(present)
        return [
            PeerLink(
                peer_id=peer.peer_id,
                addresses=peer.addresses,
                outbound=peer.peer_id in self._outbound,
                round_trip_seconds=self._requester.get_round_trip(peer.peer_id),
            )
            for peer in sorted(peers, key=lambda peer: peer.peer_id)
        ]

    async def listen_addresses(self, *, private_too: bool) -> tuple[str, ...]:
        """Return the addresses to announce, public ones first, without the peer part.

        Args:
            private_too: Also those that only machines nearby can dial; a public swarm wants none of them.

        Raises:
            UnavailableError: p2pd did not answer.
        """
        if self._settings.announce_addresses:
            return self._settings.announce_addresses
        listening = await self.p2pd.listen_addresses(_CONTROL_SECONDS)
        return addresses.select_announced(listening, private_too=private_too)

    # -- inside -------------------------------------------------------------------------------

    async def _open_raw_stream(self, peer_id: PeerId, timeout_seconds: float) -> RawStream:
        return await self.p2pd.open_stream(peer_id, STREAM_NAME, timeout_seconds)

    async def _drop_connection(self, peer_id: PeerId) -> None:
        """Replace a connection over which nothing comes any more; where the peer dialled us, it has to dial again."""
        with contextlib.suppress(UnavailableError):
            running = self.p2pd
            known = [peer.addresses for peer in await running.list_peers(_CONTROL_SECONDS) if peer.peer_id == peer_id]
            if not known:
                return
            logger.info("dropping the connection to %s: nothing came over it although it was asked", short(peer_id))
            was_outbound = peer_id in self._outbound
            await running.disconnect(peer_id, _CONTROL_SECONDS)
            if was_outbound:
                await self.dial(peer_id, known[0])

    def _keep_ports(self, listening: Sequence[str]) -> None:
        """Remember which ports the system chose, so that a restart keeps the addresses peers know."""
        kept = []
        for address in self._settings.listen_addresses:
            protocol = address.split("/")[3]
            ports = [addresses.get_port(one) for one in listening if one.split("/")[3] == protocol]
            wants_any = addresses.get_port(address) == 0
            kept.append(addresses.with_port(address, ports[0]) if wants_any and ports else address)
        self._settings = replace(self._settings, listen_addresses=tuple(kept))

    async def _reap_idle_streams(self) -> None:
        while True:
            await asyncio.sleep(_REAP_SECONDS)
            self._requester.close_unused()
