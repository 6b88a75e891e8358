"""A node's network as one thing: transport, directory and the watch over the process under both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NoReturn

from pulsenet import limits
from pulsenet.errors import UnavailableError
from pulsenet.ids import PeerId
from pulsenetd.errors import NoBootstrapError
from pulsenetd.network import addresses, dial_back
from pulsenetd.network.dial import DialOutcome
from pulsenetd.network.dial_back import DialBackServer
from pulsenetd.network.directory import Directory
from pulsenetd.network.supervisor import Loss, RestartPolicy, Supervisor, watch_process
from pulsenetd.network.transport import Transport

logger: Final = logging.getLogger("pulsenet.network")

REFRESH_SECONDS: Final = 20.0
"""Least time between two replacements of a p2pd that is alive but will not dial."""

REMEMBERED_PEERS_MAX: Final = 64
"""Peers dialled again after a restart or a partition, besides the bootstraps."""

INBOUND_JOINED_MAX: Final = 16
"""Connected peers joined with at one mending, besides those that were dialled."""


class Network:
    """Brings the network up, keeps it up and takes it down.

    Args:
        transport: Closed when given.
        directory: Closed when given.
        draw: Uniform in [0, 1), for jitter.
        clock: Monotonic seconds.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        *,
        draw: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.transport = transport
        self.directory = directory
        self.supervisor = Supervisor(
            watch=self._watch,
            restart=self._restart,
            policy=RestartPolicy(draw),
            clock=clock,
            sleep=sleep,
        )
        self._dial_back = DialBackServer(directory.run_id, self._find_host, clock)
        self._draw = draw
        self._sleep = sleep
        self._clock = clock
        self._replacing = asyncio.Lock()
        self._refresh_at = clock() + REFRESH_SECONDS
        self._bootstraps: tuple[str, ...] = ()
        self._remembered: dict[PeerId, tuple[str, ...]] = {}

    async def open(
        self,
        bootstraps: Sequence[str],
        *,
        timeout_seconds: float = limits.REQUEST_OPEN_SECONDS_MAX,
        try_seconds: float = 0.0,
        wait: bool = False,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> tuple[DialOutcome, ...]:
        """Start p2pd, dial the bootstraps and join the directory; return one outcome per bootstrap.

        One bootstrap that answers is enough. A node that is a bootstrap itself may be the first of them.

        Args:
            bootstraps: Addresses with ``/p2p/<peer>``; none starts a swarm of one.
            timeout_seconds: Limit for each dial.
            try_seconds: How long to go on while none can be reached: those started at the same moment come up late.
            wait: Try for ever while no bootstrap can be reached, instead of giving up.
            on_progress: Told what is being waited for.

        Raises:
            NoBootstrapError: none was reached; one line per address with its own reason (A-NET-1).
            P2pdError, AddressInUseError, ConfigError, UnavailableError: see :meth:`Transport.open`.
        """
        for text in bootstraps:
            addresses.split_address(text)
        try:
            await self.transport.open(on_progress)
            await self._open_upper_parts()
            self._bootstraps = tuple(bootstraps)
            outcomes = await self._reach_one(timeout_seconds, try_seconds, wait, on_progress)
            await self.directory.join([outcome.peer_id for outcome in outcomes if outcome.is_connected])
        except BaseException:
            await self.close()
            raise
        return outcomes

    async def _reach_one(
        self, timeout_seconds: float, try_seconds: float, wait: bool, on_progress: Callable[[str], None]
    ) -> tuple[DialOutcome, ...]:
        """Dial the bootstraps until one answers."""
        give_up_at = self._clock() + try_seconds
        delay_seconds = limits.RETRY_SECONDS_MIN
        told = ""
        while True:
            outcomes = await self.transport.dial_all(self._bootstraps, timeout_seconds)
            others = [outcome for outcome in outcomes if outcome.reason != "self"]
            if len(others) < len(outcomes) or not others or any(outcome.is_connected for outcome in others):
                return outcomes
            if not wait and self._clock() >= give_up_at:
                raise NoBootstrapError(describe_failure(others))
            text = describe_failure(others) if wait else summarise_failure(others)
            if text != told:
                told = text
                on_progress(text)
            await self._sleep(delay_seconds * (0.5 + self._draw() / 2))
            with contextlib.suppress(UnavailableError):  # p2pd is busy: the next round shows whether it is stuck
                await self._refresh_if_stuck(outcomes)
            delay_seconds = min(2 * delay_seconds, limits.RETRY_SECONDS_MAX)

    async def run(self) -> NoReturn:
        """Watch p2pd and restart everything when it dies, until cancelled.

        Raises:
            P2pdError: p2pd died too often, or cannot run any more.
        """
        await self.supervisor.run()

    async def close(self) -> None:
        """Take everything down; nothing of it is left behind."""
        try:
            await self.directory.close(p2pd_is_alive=self.transport.is_open and self.supervisor.is_healthy)
        finally:
            await self.transport.close()

    async def dial(self, peer_id: PeerId, peer_addresses: Sequence[str]) -> tuple[DialOutcome, ...]:
        """Connect to a peer and get to know its part of the directory; return one outcome per address.

        Raises:
            UnavailableError: p2pd is being restarted.
        """
        outcomes = await self.transport.dial(peer_id, peer_addresses)
        if any(outcome.is_connected for outcome in outcomes):
            self._remember(peer_id, tuple(peer_addresses))
            await self.directory.join([peer_id])
        return outcomes

    async def mend(self) -> tuple[PeerId, ...]:
        """Dial bootstraps and remembered peers again and join with those that answer; return them.

        To be called on a timer: routing tables of a healed partition do not merge by themselves. Some of the peers
        that dialled this node are joined with too: a first node has nobody else to compare its clock with.

        Raises:
            UnavailableError: p2pd is being restarted.
        """
        async with self._replacing:
            if self.transport.is_open and not self.directory.is_open:
                # a busy p2pd did not take the directory in time, at a replacement or a change of mode
                await self.directory.open(self.transport.p2pd.hivemind_p2p)
        outcomes = await self._dial_known()
        if await self._refresh_if_stuck(outcomes):
            outcomes = await self._dial_known()
        known = [outcome.peer_id for outcome in outcomes if outcome.is_connected]
        others = [link.peer_id for link in await self.transport.connected_peers()]
        first = int(self._draw() * len(others))
        joined = await self.directory.join(known + (others[first:] + others[:first])[:INBOUND_JOINED_MAX])
        with contextlib.suppress(UnavailableError):
            await self.directory.announce_overdue()
        return joined

    async def take_reachability(self, can_be_dialled: bool) -> None:
        """Store and answer for others in the directory only while others can dial this node.

        Raises:
            UnavailableError: p2pd is being restarted, or did not answer in time.
        """
        async with self._replacing:
            is_changed = await self.directory.set_client_mode(not can_be_dialled)
        if is_changed:
            await self.mend()

    async def _dial_known(self) -> list[DialOutcome]:
        targets: dict[PeerId, list[str]] = {}
        for address, peer_id in map(addresses.split_address, self._bootstraps):
            targets.setdefault(peer_id, []).append(address)
        for peer_id, known in self._remembered.items():
            targets.setdefault(peer_id, list(known))
        dials = [self.transport.dial(peer_id, known) for peer_id, known in targets.items()]
        return [outcome for per_peer in await asyncio.gather(*dials) for outcome in per_peer]

    async def _refresh_if_stuck(self, outcomes: Sequence[DialOutcome]) -> bool:
        """Replace p2pd if it has no peer and will not dial any: its back-off grows to minutes (A-NET-5)."""
        others = [outcome for outcome in outcomes if outcome.reason != "self"]
        now = self._clock()
        if not others or not all(outcome.is_old for outcome in others) or now < self._refresh_at:
            return False
        async with self._replacing:
            if await self.transport.connected_peers():
                return False
            self._refresh_at = now + REFRESH_SECONDS
            self.supervisor.restarts["stuck"] += 1
            logger.debug("no peer left and libp2p backs off: starting a new p2pd")
            await self._replace_p2pd()
        return True

    async def _watch(self) -> Loss:
        while True:
            async with self._replacing:
                if not self.transport.is_open:
                    return Loss("failed", "p2pd was to be replaced, which did not come to its end")
                process = self.transport.p2pd
            loss = await watch_process(process)
            async with self._replacing:
                if self.transport.is_open and self.transport.p2pd is not process:
                    continue  # replaced on purpose
                return loss

    async def _replace_p2pd(self) -> None:
        await self.directory.close(p2pd_is_alive=False)
        await self.transport.reopen()
        await self._open_upper_parts()

    async def _open_upper_parts(self) -> None:
        """Have a new p2pd carry the directory, and dial back for those who ask."""
        await self.transport.p2pd.serve(dial_back.STREAM_NAME, self._dial_back.serve_stream)
        await self.directory.open(self.transport.p2pd.hivemind_p2p)

    async def _find_host(self, peer_id: PeerId) -> str | None:
        for link in await self.transport.connected_peers():
            for address in link.addresses if link.peer_id == peer_id else ():
                parts = address.split("/")
                if parts[1] in ("ip4", "ip6") and "p2p-circuit" not in parts:
                    return f"{parts[1]}/{parts[2]}"
        return None

    async def _restart(self) -> None:
        async with self._replacing:
            await self._replace_p2pd()
        try:
            await self.mend()
        except UnavailableError as error:
            logger.warning("nobody reached after the restart: %s", error)

    def _remember(self, peer_id: PeerId, peer_addresses: tuple[str, ...]) -> None:
        self._remembered.pop(peer_id, None)
        self._remembered[peer_id] = peer_addresses
        if len(self._remembered) > REMEMBERED_PEERS_MAX:
            del self._remembered[next(iter(self._remembered))]


def describe_failure(outcomes: Sequence[DialOutcome]) -> str:
    """Return the operator's text when no bootstrap was reached: one line per address, then what to do."""
    lines = [f"  {outcome}" for outcome in outcomes]
    return "\n".join(
        ["no bootstrap can be reached:", *lines, "check the addresses and that one of them runs; --wait retries"]
    )


def summarise_failure(outcomes: Sequence[DialOutcome]) -> str:
    """Return one line on bootstraps that may still come up: how many failed for which reason."""
    counts = Counter(outcome.detail for outcome in outcomes)
    return f"no bootstrap answers yet ({', '.join(f'{text}: {count}' for text, count in counts.items())}): trying again"
