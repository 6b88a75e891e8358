"""Access links with bandwidth: what a node sends waits for its uplink, and what reaches it for its downlink.

The core of the network has room for everything; the line of each node to it is the bottleneck, as at home. An uplink
serves its receivers in turn, one message at a time, and passes over a receiver whose downlink is already full, as
streams with back-pressure do. A downlink takes what arrives in order. Loss and congestion control are not
modelled: rates are what is left after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pulsenet.ids import PeerId
from pulsenet.node.machine import Draw
from pulsenet.testing.clock import Action, VirtualClock
from pulsenet.wire.messages import ChunkListReply, ChunkReply, Message, RecordsReply

MESSAGE_OVERHEAD_BYTES = 96
"""Framing and everything of a message that is not payload; a guess, the same for all."""

SMALL_SIZE_BYTES = 4096
"""Smaller messages go ahead of everything that waits: they travel in streams of their own."""

BACKLOG_SECONDS = 0.1
"""How far ahead of its downlink a receiver is sent to: what buffers on the way hold."""

MEGABIT = 125_000.0
"""Bytes per second in one Mb/s."""


@dataclass(frozen=True, slots=True)
class Link:
    """A node's line to the network. Rates in bytes per second."""

    up_rate: float = float("inf")
    down_rate: float = float("inf")
    delay_seconds: float = 0.0
    """From the node to the core, one way; a round trip between two nodes is twice the sum of theirs."""
    is_dialable: bool = True
    """``False`` behind a NAT: the node dials out, nobody dials it, and then streams go both ways."""


UNLIMITED = Link()
"""A line that is no bottleneck."""


def draw_home_link(draw: Draw, *, nat_per_mille: int = 0) -> Link:
    """Return a home line: 20 to 1,000 Mb/s down and 5 to 100 up, each even on a logarithmic scale, 5 to 40 ms away.

    The faster way down has the faster way up: a third of the spread of the two is common.
    """
    common = draw(1001) / 1000
    down = 20.0 * 50.0 ** ((common + 2 * draw(1001) / 1000) / 3)
    up = 5.0 * 20.0 ** ((common + 2 * draw(1001) / 1000) / 3)
    return Link(
        up_rate=up * MEGABIT,
        down_rate=down * MEGABIT,
        delay_seconds=0.005 + 0.035 * draw(1001) / 1000,
        is_dialable=draw(1000) >= nat_per_mille,
    )


def size_of(message: Message) -> int:
    """Return about how many bytes a message takes on the wire."""
    match message:
        case ChunkReply(_, data):
            return MESSAGE_OVERHEAD_BYTES + len(data or b"")
        case ChunkListReply(_, _, data):
            return MESSAGE_OVERHEAD_BYTES + len(data)
        case RecordsReply(records):
            return MESSAGE_OVERHEAD_BYTES + sum(map(len, records))
        case _:
            return MESSAGE_OVERHEAD_BYTES


def content_size_of(message: Message) -> int:
    """Return how many bytes of blobs a message carries."""
    return len(message.data or b"") if isinstance(message, ChunkReply) else 0


@dataclass(slots=True)
class Meter:
    """Bytes that went over one node's line."""

    sent_size_bytes: int = 0
    received_size_bytes: int = 0
    sent_content_size_bytes: int = 0
    """Content of chunks alone: what is counted in payloads."""
    received_content_size_bytes: int = 0


@dataclass(slots=True)
class _Transfer:
    wire_size_bytes: float
    message: Message
    delay_seconds: float
    deliver: Action
    is_wanted: Callable[[], bool]


@dataclass(slots=True)
class _Uplink:
    waiting: dict[PeerId, deque[_Transfer]] = field(default_factory=dict)
    """By receiver; the one served longest ago first."""
    free_at: float = 0.0
    wake_at: float = float("inf")


class Links:
    """The lines of all nodes.

    Args:
        clock: Virtual time.
        scale: Bytes on the wire that one byte of a chunk stands for.
    """

    def __init__(self, clock: VirtualClock, *, scale: float = 1.0) -> None:
        self._clock = clock
        self.scale = scale
        self._links: dict[PeerId, Link] = {}
        self._uplinks: dict[PeerId, _Uplink] = {}
        self._down_free_at: dict[PeerId, float] = {}
        self._meters: dict[PeerId, Meter] = {}

    def connect(self, peer_id: PeerId, link: Link) -> None:
        """Give a node its line; without, it has one that is no bottleneck."""
        self._links[peer_id] = link

    def link_of(self, peer_id: PeerId) -> Link:
        """Return a node's line."""
        return self._links.get(peer_id, UNLIMITED)

    def meter_of(self, peer_id: PeerId) -> Meter:
        """Return what went over a node's line so far."""
        meter = self._meters.get(peer_id)
        if meter is None:
            meter = self._meters[peer_id] = Meter()
        return meter

    def delay_seconds(self, sender: PeerId, receiver: PeerId) -> float:
        """Return how long a bit travels over the lines of two nodes."""
        return self.link_of(sender).delay_seconds + self.link_of(receiver).delay_seconds

    def send(
        self,
        sender: PeerId,
        receiver: PeerId,
        message: Message,
        deliver: Action,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
        delay_seconds: float = 0.0,
    ) -> None:
        """Carry a message and call ``deliver`` when its last bit is there.

        Args:
            sender: Whose uplink it takes.
            receiver: Whose downlink it takes.
            message: What is carried.
            deliver: Called once, unless a node dies before.
            is_wanted: Asked when the uplink comes to it: what nobody waits for any more is not sent.
            delay_seconds: Time on the way beside that of the two lines.
        """
        delay_seconds += self.delay_seconds(sender, receiver)
        wire_size_bytes = size_of(message) + (self.scale - 1) * content_size_of(message)
        transfer = _Transfer(wire_size_bytes, message, delay_seconds, deliver, is_wanted)
        if wire_size_bytes < SMALL_SIZE_BYTES or (sender not in self._links and receiver not in self._links):
            self._count_sent(sender, message)
            self._clock.after(delay_seconds, lambda: self._arrive(receiver, transfer))
            return
        uplink = self._uplinks.get(sender)
        if uplink is None:
            uplink = self._uplinks[sender] = _Uplink()
        uplink.waiting.setdefault(receiver, deque()).append(transfer)
        self._serve(sender, uplink)

    def drop(self, peer_id: PeerId) -> None:
        """A node died: nothing that waits for its uplink, or to be sent to it, is sent any more."""
        self._down_free_at.pop(peer_id, None)
        self._uplinks.pop(peer_id, None)
        for uplink in self._uplinks.values():
            uplink.waiting.pop(peer_id, None)

    def _serve(self, sender: PeerId, uplink: _Uplink) -> None:
        """Begin to send what may be sent now, and come back when more may."""
        now = self._clock.now
        rate = self.link_of(sender).up_rate
        while uplink.free_at <= now:
            self._forget_unwanted(uplink)
            if not uplink.waiting:
                return
            wake_at = float("inf")
            for receiver, queue in uplink.waiting.items():
                room_at = self._room_at(receiver, queue[0], rate)
                if room_at <= now:
                    break
                wake_at = min(wake_at, room_at)
            else:
                self._wake(sender, uplink, wake_at)
                return
            transfer = queue.popleft()
            # Its turn is over: the next one is that of whoever waited longest.
            del uplink.waiting[receiver]
            if queue:
                uplink.waiting[receiver] = queue
            uplink.free_at = now + transfer.wire_size_bytes / rate
            self._start(sender, receiver, transfer, sent_at=uplink.free_at)
        if uplink.waiting:
            self._wake(sender, uplink, uplink.free_at)

    def _forget_unwanted(self, uplink: _Uplink) -> None:
        for receiver, queue in tuple(uplink.waiting.items()):
            while queue and not queue[0].is_wanted():
                queue.popleft()
            if not queue:
                del uplink.waiting[receiver]

    def _wake(self, sender: PeerId, uplink: _Uplink, moment: float) -> None:
        if uplink.wake_at == moment:
            return
        uplink.wake_at = moment

        def act() -> bool:
            if uplink.wake_at == moment and self._uplinks.get(sender) is uplink:
                uplink.wake_at = float("inf")
                self._serve(sender, uplink)
            return False

        self._clock.at(moment, act)

    def _room_at(self, receiver: PeerId, transfer: _Transfer, up_rate: float) -> float:
        """Return from when a receiver may be sent to: when what comes would wait no longer than buffers hold it."""
        ahead_seconds = transfer.delay_seconds + max(BACKLOG_SECONDS, transfer.wire_size_bytes / up_rate)
        return self._down_free_at.get(receiver, 0.0) - ahead_seconds

    def _start(self, sender: PeerId, receiver: PeerId, transfer: _Transfer, *, sent_at: float) -> None:
        self._count_sent(sender, transfer.message)
        first_bit_at = self._clock.now + transfer.delay_seconds
        # Several senders share a downlink: each takes the part of its time that its bytes need at full rate.
        free_at = max(first_bit_at, self._down_free_at.get(receiver, 0.0))
        free_at += transfer.wire_size_bytes / self.link_of(receiver).down_rate
        self._down_free_at[receiver] = free_at
        last_bit_at = max(free_at, sent_at + transfer.delay_seconds)
        self._clock.at(last_bit_at, lambda: self._arrive(receiver, transfer))

    def _count_sent(self, sender: PeerId, message: Message) -> None:
        meter = self.meter_of(sender)
        meter.sent_size_bytes += size_of(message)
        meter.sent_content_size_bytes += content_size_of(message)

    def _arrive(self, receiver: PeerId, transfer: _Transfer) -> bool | None:
        meter = self.meter_of(receiver)
        meter.received_size_bytes += size_of(transfer.message)
        meter.received_content_size_bytes += content_size_of(transfer.message)
        return transfer.deliver()
