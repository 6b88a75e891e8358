"""Whether others can dial this node, found out by asking peers, and what the operator sets if they cannot."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import PeerId, RunId, short
from pulsenetd.network import addresses, dial_back
from pulsenetd.network.dial_back import OPEN, DialBackReply, DialBackRequest
from pulsenetd.network.knock import CLOSED
from pulsenetd.network.stack import Network

logger: Final = logging.getLogger("pulsenet.reachability")

LOOK_SECONDS: Final = 5.0
"""How often it is looked whether it is time to ask."""
KNOWN_SECONDS: Final = 300.0
"""How often peers are asked again once the answer is known."""
DOUBT_SECONDS: Final = 15.0
"""When peers are asked again after a first no, and while nobody can tell."""
NOES_MIN: Final = 2
"""Rounds of asking without a yes before the node believes that nobody can dial it."""
ASKED_MAX: Final = 3
"""Peers asked at a time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What peers say."""

    is_reachable: bool | None
    """``None`` while nobody can tell."""
    host: str
    """IP address peers see this node come from; empty if unknown."""
    ports: tuple[int, ...]
    """TCP ports that were tried there."""
    reason: str
    """``open``, or why not, as in :data:`pulsenetd.network.knock.CLOSED`; empty if unknown."""


UNKNOWN: Final = Finding(None, "", (), "")


class Reachability:
    """Asks peers now and then to dial back, and draws the consequences.

    A node nobody can dial leaves the part of the directory that stores for others, and announces no address; it
    serves over the connections it opened.

    Args:
        network: The node's network; told whether the node can be dialled.
        run_id: This run.
        announced: What the operator had announced; empty if nothing.
        is_public: Whether peers may live anywhere, so that a peer of the same network proves little.
        draw: Uniform in [0, 1), to choose peers.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        network: Network,
        *,
        run_id: RunId,
        announced: Sequence[str],
        is_public: Callable[[], bool],
        draw: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._network = network
        self._run_id = run_id
        self._announced = tuple(announced)
        self._is_public = is_public
        self._draw = draw
        self._clock = clock
        self._ask_at = float("-inf")
        self._no_count = 0
        self._told: tuple[str, ...] = ()
        self.finding = UNKNOWN

    @property
    def is_reachable(self) -> bool | None:
        """Whether peers can dial this node; ``None`` while nobody can tell."""
        return self.finding.is_reachable

    async def look(self) -> None:
        """Ask peers if it is time.

        Raises:
            UnavailableError: p2pd is being restarted.
        """
        if self._clock() < self._ask_at:
            return
        self._told = await self._network.transport.listen_addresses(private_too=True)
        ports = self._ports
        found = judge(await self._ask_some(ports), ports, self._announced, is_public=self._is_public())
        self._no_count = self._no_count + 1 if found.is_reachable is False else 0
        is_settled = found.is_reachable or self._no_count >= NOES_MIN
        self._ask_at = self._clock() + (KNOWN_SECONDS if is_settled else DOUBT_SECONDS)
        if found.is_reachable is None or not is_settled:
            return
        before, self.finding = self.finding, found
        if found != before:
            logger.log(logging.INFO if found.is_reachable else logging.WARNING, "%s", self.describe())
        await self._network.take_reachability(bool(found.is_reachable))

    def describe(self) -> str:
        """Return what is known in one line, with the exact option to set where there is one."""
        found = self.finding
        if found.is_reachable is None:
            return "no peer could tell yet whether this node can be dialled"
        port = found.ports[0] if found.ports else 0
        public = addresses.make_tcp_address(found.host, port)
        if found.is_reachable:
            place = f"peers can dial this node at {found.host} port {port}"
            return place if self._announced or public in self._told else f"{place}: add --announce {public}"
        everywhere = "::" if ":" in found.host else "0.0.0.0"  # noqa: S104 - advice to the operator, bound by nobody here
        listen = addresses.make_tcp_address(everywhere, port)
        return (
            f"peers cannot dial this node at {found.host} port {port} ({CLOSED.get(found.reason, found.reason)}): it "
            f"goes on over connections it opens itself. To be found, let TCP port {port} through to this machine and "
            f"join with --listen {listen} --announce {public}"
        )

    def status(self) -> dict[str, Any]:
        """Return what ``/status`` shows."""
        found = self.finding
        return {
            "reachable": found.is_reachable,
            "host": found.host,
            "ports": list(found.ports),
            "reason": found.reason,
            "advice": self.describe(),
        }

    @property
    def _ports(self) -> tuple[int, ...]:
        ports = [addresses.get_port(one) for one in self._told if one.split("/")[3] == "tcp"]
        return tuple(dict.fromkeys(ports))[: dial_back.PORTS_MAX]

    async def _ask_some(self, ports: tuple[int, ...]) -> list[DialBackReply]:
        links = [link.peer_id for link in await self._network.transport.connected_peers()]
        first = int(self._draw() * len(links))
        replies: list[DialBackReply] = []
        if not ports:
            return replies
        for peer_id in (links[first:] + links[:first])[:ASKED_MAX]:
            reply = await self._ask(peer_id, DialBackRequest(self._run_id, ports))
            if reply is not None and reply.host:
                replies.append(reply)
        return replies

    async def _ask(self, peer_id: PeerId, request: DialBackRequest) -> DialBackReply | None:
        try:
            return await dial_back.ask(self._network.transport.p2pd.open_stream, peer_id, request)
        except (UnavailableError, RemoteProtocolError) as error:
            logger.debug("%s cannot tell whether this node can be dialled: %s", short(peer_id), error)
            return None


def judge(
    replies: Sequence[DialBackReply], ports: Sequence[int], announced: Sequence[str], *, is_public: bool
) -> Finding:
    """Return what the peers' replies amount to.

    One peer that got through is enough. In a public run, peers that see this node under a private address are
    neighbours: they count only where nobody else answered. An address that was announced and is not the one peers
    see cannot be checked this way, so a no proves nothing then.
    """
    if is_public:
        far = [reply for reply in replies if ipaddress.ip_address(reply.host).is_global]
        replies = far or replies
    for reply in replies:
        for port, outcome in zip(ports, reply.outcomes, strict=False):
            if outcome == OPEN:
                return Finding(True, reply.host, (port,), OPEN)
    hosts = {addresses.get_host(one) for one in announced}
    seen = [reply for reply in replies if not hosts or reply.host in hosts]
    if not seen or not any(reply.outcomes for reply in seen):
        return UNKNOWN
    reply = next(reply for reply in seen if reply.outcomes)
    return Finding(False, reply.host, tuple(ports), reply.outcomes[0])
