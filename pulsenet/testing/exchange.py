"""One request between two simulated nodes: the way there, the wait for a slot, the replies, and every way to fail."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from pulsenet import limits
from pulsenet.ids import PeerId
from pulsenet.node.effects import SendRequest
from pulsenet.node.events import Event, ReplyReceived, RequestDone, RequestFailed
from pulsenet.node.uploads import WAIT_SECONDS_MAX, Uploads
from pulsenet.testing.clock import VirtualClock
from pulsenet.wire.messages import ChunkReply, GetChunks, Message, Refusal

if TYPE_CHECKING:
    from pulsenet.testing.node import SimNode
    from pulsenet.testing.world import World

UPLOAD_SLOTS_MAX: Final = limits.SERVED_REQUESTS_MAX - 4
"""Requests for chunks that a node serves at once at most, as the daemon does."""

RETRY_MS: Final = 2_000
"""When an asker that found no slot may come back, as the daemon says."""


class Slots:
    """Who is served chunks by one node now, and who waits: the daemon's own rule, and its patience.

    Args:
        clock: Virtual time.
        scale: As for :class:`pulsenet.testing.links.Links`.
    """

    def __init__(self, clock: VirtualClock, scale: float) -> None:
        self._clock = clock
        self._scale = scale
        self._uploads = Uploads(UPLOAD_SLOTS_MAX)
        self._exchanges: dict[int, Exchange] = {}
        self._served: set[int] = set()
        self._ticket = 0

    def enter(self, exchange: Exchange, asker: PeerId, kind: str) -> None:
        """Serve the exchange, now or when it is its turn; refuse it if that takes too long."""
        self._ticket += 1
        ticket = self._ticket
        if not self._uploads.ask(ticket, asker, kind):
            exchange.refuse()
            return
        self._exchanges[ticket] = exchange
        self._clock.after(WAIT_SECONDS_MAX, lambda: self._give_up(ticket))
        self._advance()

    def note_sent(self, exchange: Exchange, size_bytes: int) -> None:
        """A chunk left for the exchange."""
        ticket = next((ticket for ticket in self._served if self._exchanges[ticket] is exchange), None)
        if ticket is not None:
            self._uploads.note_sent(ticket, round(size_bytes * self._scale), self._clock.now)
            self._advance()

    def tidy(self) -> bool:
        """Exchanges may be over, served or not: whoever waits takes their places; no event of its own."""
        for ticket in sorted(self._served):
            if not self._exchanges[ticket].is_open:
                self._uploads.end(ticket, self._clock.now)
                self._served.discard(ticket)
                del self._exchanges[ticket]
        self._advance()
        return False

    def _give_up(self, ticket: int) -> bool:
        if ticket not in self._exchanges or ticket in self._served:
            return False
        self._uploads.leave(ticket)
        exchange = self._exchanges.pop(ticket)
        if exchange.is_open:
            exchange.refuse()
        self._advance()
        return False

    def _advance(self) -> None:
        while granted := self._uploads.advance(self._clock.now):
            for ticket in granted:
                if self._exchanges[ticket].is_open:
                    self._served.add(ticket)
                    self._exchanges[ticket].serve()
                else:
                    self._uploads.end(ticket, self._clock.now)
                    del self._exchanges[ticket]


class Exchange:
    """A request of one life of a node, until it is done, has failed, or nobody waits for it any more."""

    __slots__ = ("_is_over", "_life", "_machine", "_missing_count", "_node", "_request", "_world")

    def __init__(self, world: World, node: SimNode, machine: str, request: SendRequest) -> None:
        self._world = world
        self._node = node
        self._life = node.life
        self._machine = machine
        self._request = request
        self._missing_count = 0
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether anybody still waits for the answer."""
        return not self._is_over and self._node.is_up and self._node.life == self._life

    def start(self) -> None:
        """Send the request."""
        world, request, sender = self._world, self._request, self._node.peer_id
        is_lost = world.network.loses(sender, request.peer_id)
        failure = "timeout" if is_lost else world.network.draw_failure(request.peer_id)
        if not failure and not world.is_reachable(sender, request.peer_id):
            failure = "closed"
        if failure == "closed":
            world.clock.after(world.network.latency_seconds(), lambda: self._fail("closed"))
            return
        world.clock.after(request.timeout_seconds, lambda: self._fail("timeout"))
        if not failure:
            delay_seconds = world.network.way_seconds(sender, request.peer_id, world.clock.now)
            world.links.send(sender, request.peer_id, request.message, self._arrive, delay_seconds=delay_seconds)

    def cancel(self) -> None:
        """The asker wants no answer any more: what its provider has not begun to send is not sent."""
        if self.is_open:
            self._end()

    def _arrive(self) -> bool | None:
        receiver = self._world.nodes.get(self._request.peer_id)
        if receiver is None or not receiver.is_up:
            self._world.clock.after(self._world.network.latency_seconds(), lambda: self._fail("closed"))
            return False
        if isinstance(self._request.message, GetChunks):
            kind = self._world.kind_of(self._request.message.digests)
            receiver.slots.enter(self, self._node.peer_id, kind)
        else:
            self.serve()
        return None

    def serve(self) -> None:
        """Answer the request: the receiver has come to it."""
        world, asker = self._world, self._node.peer_id
        receiver = world.nodes[self._request.peer_id]
        replies = world.answer(receiver, self._request.message, asker)
        self._missing_count = len(replies)
        if world.network.loses_reply(receiver.peer_id, asker):
            return  # heard and answered, and the asker will never know
        self._answer(receiver.peer_id, replies)

    def refuse(self) -> None:
        """Tell the asker that there is no slot for it."""
        self._missing_count = 1
        self._answer(self._request.peer_id, [Refusal("busy", "every upload slot is taken", RETRY_MS)])

    def _answer(self, provider: PeerId, replies: list[Message]) -> None:
        world, asker = self._world, self._node.peer_id
        for reply in replies:
            received = world.network.corrupt(provider, reply)
            world.links.send(
                provider,
                asker,
                received,
                partial(self._receive, received),
                is_wanted=self._is_wanted,
                delay_seconds=world.network.way_seconds(provider, asker, world.clock.now),
            )

    def _is_wanted(self) -> bool:
        return self.is_open

    def _receive(self, reply: Message) -> bool:
        if not self.is_open:
            return False
        world, request = self._world, self._request
        if isinstance(reply, ChunkReply):
            world.nodes[request.peer_id].slots.note_sent(self, len(reply.data or b""))
        event = ReplyReceived(request.request_id, request.peer_id, reply)
        if world.network.duplicates():
            again = partial(self._deliver_again, event)
            world.clock.after(world.network.latency_seconds(), again)
        self._missing_count -= 1
        is_last = self._missing_count == 0
        if is_last and not isinstance(request.message, GetChunks):
            self._is_over = True
        world.deliver(self._node, self._machine, event)
        if is_last and self.is_open:
            self._end()
            world.deliver(self._node, self._machine, RequestDone(request.request_id, request.peer_id))
        return True

    def _deliver_again(self, event: Event) -> bool:
        is_same_life = self._node.is_up and self._node.life == self._life
        if is_same_life:
            self._world.deliver(self._node, self._machine, event)
        return is_same_life

    def _fail(self, reason: str) -> bool:
        if not self.is_open:
            return False
        self._end()
        failed = RequestFailed(self._request.request_id, self._request.peer_id, reason)
        self._world.deliver(self._node, self._machine, failed)
        return True

    def _end(self) -> None:
        self._is_over = True
        self._node.exchanges.pop((self._machine, self._request.request_id), None)
        receiver = self._world.nodes.get(self._request.peer_id)
        if receiver is not None and receiver.is_up:
            # The asker's acknowledgement frees the slot.
            self._world.clock.after(
                self._world.links.delay_seconds(self._node.peer_id, receiver.peer_id), receiver.slots.tidy
            )
