"""Pushing small messages: one request each, whose answer mostly does not matter, because it is sent again."""

from __future__ import annotations

from collections.abc import Iterable

from pulsenet import limits
from pulsenet.ids import PeerId
from pulsenet.node.effects import Effect, SendRequest
from pulsenet.wire.messages import Message


class Courier:
    """Knows who can be reached, and numbers the requests of its owner."""

    def __init__(self) -> None:
        self.connected: set[PeerId] = set()
        self._request_count = 0

    def take_request_id(self) -> int:
        """Return an id never used before."""
        self._request_count += 1
        return self._request_count

    def send(self, peer_id: PeerId, message: Message) -> SendRequest:
        """Return the order to send one message."""
        return SendRequest(self.take_request_id(), peer_id, message, limits.REQUEST_OPEN_SECONDS_MAX)

    def send_to_connected(self, message: Message, peers: Iterable[PeerId] | None = None) -> list[Effect]:
        """Return the orders to send a message to those of ``peers``, or of everybody, that can be reached."""
        chosen = self.connected if peers is None else self.connected & set(peers)
        return [self.send(peer_id, message) for peer_id in sorted(chosen)]
