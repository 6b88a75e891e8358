"""Effects that talk to peers and to the directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pulsenet.chain.signing import encode_signed
from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import AnnounceHave, AnnounceHead, CancelRequest, DialPeer, Effect, SendRequest, StrikePeer
from pulsenet.node.events import (
    Event,
    HeadSeen,
    PeerConnected,
    PeerLost,
    ReplyReceived,
    RequestDone,
    RequestFailed,
)
from pulsenet.node.rounds_respond import ROUND_REQUESTS
from pulsenet.wire.messages import GetChunkList, GetChunks, GetHoldings, Message
from pulsenetd.driver import Handler, Post
from pulsenetd.logs import logger
from pulsenetd.network.stack import Network
from pulsenetd.network.streams import PeerRefusedError, PeerUnavailableError

REFUSALS_TOLD = (*ROUND_REQUESTS, GetChunkList, GetChunks, GetHoldings)
"""Requests whose machines act on what a refusal says: not held, or when to come back."""


class NetworkHandlers:
    """Executes requests, dials and announcements.

    Args:
        network: The node's network.
        broadcast: Queues an event for every machine.
    """

    def __init__(self, network: Network, broadcast: Callable[[Event], None]) -> None:
        self._network = network
        self._broadcast = broadcast
        self._downloads: dict[tuple[int, PeerId, Digest | None], asyncio.Task[object]] = {}
        """Requests for chunks under way. Machines number theirs apart, but none wants another's blob."""

    def table(self) -> dict[type[Effect], Handler]:
        """Return the handlers by effect."""
        return {
            SendRequest: self._send_request,
            CancelRequest: self._cancel_request,
            DialPeer: self._dial_peer,
            AnnounceHead: self._announce_head,
            AnnounceHave: self._announce_have,
            StrikePeer: self._strike_peer,
        }

    async def _send_request(self, effect: SendRequest, post: Post) -> None:
        if not isinstance(effect.message, GetChunks):
            await self._exchange(effect, post)
            return
        task = asyncio.current_task()
        assert task is not None
        key = (effect.request_id, effect.peer_id, effect.message.blob_id)
        self._downloads[key] = task
        try:
            await self._exchange(effect, post)
        finally:
            if self._downloads.get(key) is task:
                del self._downloads[key]

    async def _cancel_request(self, effect: CancelRequest, post: Post) -> None:
        # The stream is aborted with the task, so that the provider's slot is free for others at once.
        task = self._downloads.get((effect.request_id, effect.peer_id, effect.blob_id))
        if task is not None:
            task.cancel()

    async def _exchange(self, effect: SendRequest, post: Post) -> None:
        request_id, peer_id = effect.request_id, effect.peer_id

        def take(reply: Message) -> None:
            post(ReplyReceived(request_id, peer_id, reply))

        try:
            await self._network.transport.request(peer_id, effect.message, effect.timeout_seconds, take)
        except PeerUnavailableError as error:
            if isinstance(error, PeerRefusedError) and isinstance(effect.message, REFUSALS_TOLD):
                # A joiner tells its operator why it waits, and for how long (A-CHK-6); busy is no fault of a provider.
                take(error.refusal)
            else:
                post(RequestFailed(request_id, peer_id, error.reason))
        except UnavailableError:
            post(RequestFailed(request_id, peer_id, "closed"))
        except RemoteProtocolError as error:
            # The transport counted it.
            post(RequestFailed(request_id, peer_id, error.code))
        else:
            if isinstance(effect.message, GetChunks):
                post(RequestDone(request_id, peer_id))

    async def _dial_peer(self, effect: DialPeer, post: Post) -> None:
        try:
            outcomes = await self._network.dial(effect.peer_id, effect.addresses)
            reached = tuple(outcome.address for outcome in outcomes if outcome.is_connected)
            links = [] if reached else await self._network.transport.connected_peers()
        except (UnavailableError, RemoteProtocolError) as error:
            self._broadcast(PeerLost(effect.peer_id, str(error)))
            return
        came = next((link for link in links if link.peer_id == effect.peer_id), None)
        if reached:
            self._broadcast(PeerConnected(effect.peer_id, reached, outbound=True))
        elif came is not None:
            # By itself, while its addresses were tried: a loss told now would be the last word on a peer that is here.
            self._broadcast(PeerConnected(effect.peer_id, came.addresses, came.outbound))
        else:
            reasons = ", ".join(sorted({outcome.reason for outcome in outcomes})) or "no address"
            self._broadcast(PeerLost(effect.peer_id, reasons))

    async def _announce_head(self, effect: AnnounceHead, post: Post) -> None:
        # The mesh pushes it at once; the directory is the slower way and may be down.
        self._broadcast(HeadSeen(encode_signed(effect.record), None))
        try:
            await self._network.directory.announce_head(effect.record)
        except UnavailableError as error:
            logger.debug("the head was not announced in the directory: %s", error)

    async def _announce_have(self, effect: AnnounceHave, post: Post) -> None:
        try:
            await self._network.directory.announce_have(effect.record)
        except UnavailableError as error:
            logger.debug("the have record was not announced in the directory: %s", error)

    async def _strike_peer(self, effect: StrikePeer, post: Post) -> None:
        logger.debug("a peer broke the specification: %s", effect.code)
        self._network.transport.strike(effect.peer_id, effect.code)
