"""Learning what run this is: asking peers for its descriptor, and saying what is missing where nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from pulsenet.chain.trust import Trust
from pulsenet.errors import UsageError
from pulsenet.ids import PeerId
from pulsenet.wire.messages import GetDescriptors, GetEpochs, RecordsReply
from pulsenetd.chores import RunFileKeeper
from pulsenetd.config import Config
from pulsenetd.errors import NoBootstrapError
from pulsenetd.identity import to_libp2p_text
from pulsenetd.logs import logger
from pulsenetd.membership import Membership
from pulsenetd.network.stack import Network
from pulsenetd.startup import Settled

REQUEST_SECONDS: Final = 10.0
"""For one question of the shell's own to a peer."""

SAY_SECONDS: Final = 5.0
"""How often a node that waits says so."""


class DescriptorSearch:
    """Asks whoever can be reached until the descriptor is known.

    Args:
        config: What the operator chose.
        settled: Run, directory and key.
        trust: Where the descriptor goes.
        membership: Takes revisions in.
        network: How peers are reached.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        settled: Settled,
        trust: Trust,
        membership: Membership,
        network: Network,
        monotonic: Callable[[], float],
    ) -> None:
        self._config = config
        self._settled = settled
        self._trust = trust
        self._membership = membership
        self._network = network
        self._monotonic = monotonic

    def refuse_to_be_alone(self, others_here: Sequence[str]) -> None:
        """Say what is missing where nothing leads to the run, rather than wait for a peer that cannot come."""
        if not others_here:
            raise UsageError(
                f"nothing leads to run {self._settled.run_name}: the token holds no address; "
                "take the one that 'pulsenet run show' prints where a node of it runs, or give --bootstrap "
                "(--wait waits to be dialled)"
            )

    async def find(self, live: RunFileKeeper) -> None:
        """Learn the run's descriptor from peers, if this machine does not have it."""
        deadline = self._monotonic() + self._config.start_timeout_seconds
        said_at = -SAY_SECONDS
        while self._trust.descriptor is None:
            links = [link.peer_id for link in await self._network.transport.connected_peers()]
            for peer_id in links:
                while await self._membership.ask(peer_id, self.ask):
                    pass
            await asyncio.to_thread(self._membership.refresh)
            if self._monotonic() > deadline and not self._config.wait:
                raise NoBootstrapError(self._explain())
            if self._monotonic() - said_at >= SAY_SECONDS:
                said_at = self._monotonic()
                waiting = f"waiting for a peer that knows run {self._settled.token.run_id.hex()[:16]}"
                logger.info("%s", self._admission_hint() if self._membership.is_refused else waiting)
            await live.dial_others(frozenset(links))
            await asyncio.sleep(0.5)

    async def ask(self, peer_id: PeerId, request: GetDescriptors | GetEpochs) -> RecordsReply:
        """Ask one peer for revisions or epochs."""
        replies = await self._network.transport.request(peer_id, request, REQUEST_SECONDS)
        assert isinstance(replies[0], RecordsReply)
        return replies[0]

    def _explain(self) -> str:
        if self._membership.is_refused:
            return self._admission_hint()
        return (
            f"no peer told this run's descriptor within {self._config.start_timeout_seconds:.0f} s; "
            "is one of its nodes running? Give --bootstrap, or --wait to keep trying"
        )

    def _admission_hint(self) -> str:
        role = "trainer" if self._config.role == "trainer" else "inferencer"
        peer = to_libp2p_text(self._settled.identity.peer_id)
        return f"this run serves its members only: ask its owner for 'pulsenet run admit NAME {peer} --role {role}'"
