"""A network that delays, drops, duplicates, reorders, parts and lies, by draw."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pulsenet.ids import PeerId
from pulsenet.testing.fakes import Chance
from pulsenet.wire.messages import ChunkReply, Message


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the network is. Rates are per mille of messages."""

    latency_seconds_min: float = 0.005
    latency_seconds_max: float = 0.050
    drop_per_mille: int = 0
    """The request ends in a time-out."""
    close_per_mille: int = 0
    """The stream ends at once."""
    lose_per_mille: int = 0
    """A reply never arrives, although the request was heard."""
    duplicate_per_mille: int = 0
    delay_per_mille: int = 0
    """A message takes up to ``DELAY_SECONDS_MAX`` longer."""
    flip_per_mille: int = 0
    """One bit of a chunk is flipped on the way."""
    engine_fail_per_mille: int = 0


DELAY_SECONDS_MAX = 8.0

CALM = Faults()
"""No faults; only latency."""


def draw_faults(chance: Chance) -> Faults:
    """Return a network between calm and bad."""
    return Faults(
        latency_seconds_min=0.001,
        latency_seconds_max=chance.between(0.01, 0.5),
        drop_per_mille=chance(80),
        close_per_mille=chance(80),
        duplicate_per_mille=chance(80),
        flip_per_mille=chance(50),
        engine_fail_per_mille=chance(200),
    )


class Network:
    """What happens to messages between peers."""

    def __init__(self, chance: Chance, faults: Faults) -> None:
        self._chance = chance
        self.faults = faults
        self.partitions: set[tuple[PeerId, PeerId]] = set()
        """Ordered pairs between which nothing gets through; one pair is a one-way partition."""
        self.islands: dict[PeerId, int] = {}
        """Number of the group a peer is cut off with; 0 for everybody who is not named."""
        self.one_way = False
        """Whether what is sent to an island of a higher number still gets through."""
        self.clogs: dict[tuple[PeerId, PeerId], float] = {}
        """Ordered pairs between which everything is held, and until when."""
        self.silent: set[PeerId] = set()
        """Peers that take requests and never answer."""
        self.liars: set[PeerId] = set()
        """Peers that answer every chunk with other bytes, or say they do not hold it."""

    def heal(self) -> None:
        """End every fault."""
        self.faults = CALM
        for trouble in (self.partitions, self.islands, self.clogs, self.silent, self.liars):
            trouble.clear()

    def latency_seconds(self) -> float:
        """Return how long the next message takes."""
        seconds = self._chance.between(self.faults.latency_seconds_min, self.faults.latency_seconds_max)
        if self.faults.delay_per_mille and self._chance.happens(self.faults.delay_per_mille):
            seconds += self._chance.between(0.0, DELAY_SECONDS_MAX)
        return seconds

    def way_seconds(self, sender: PeerId, receiver: PeerId, now: float) -> float:
        """Return how long the next message from ``sender`` to ``receiver`` takes, a clog included."""
        held_until = self.clogs.get((sender, receiver), 0.0) if self.clogs else 0.0
        return max(held_until - now, 0.0) + self.latency_seconds()

    def is_cut(self, sender: PeerId, receiver: PeerId) -> bool:
        """Say whether requests of ``sender`` to ``receiver`` end in nothing: one way or the other is cut."""
        return self.loses(sender, receiver) or self.loses(receiver, sender)

    def loses(self, sender: PeerId, receiver: PeerId) -> bool:
        """Say whether nothing that ``sender`` sends reaches ``receiver``; the other way may be open."""
        if (sender, receiver) in self.partitions:
            return True
        if not self.islands:
            return False
        source, target = self.islands.get(sender, 0), self.islands.get(receiver, 0)
        return source > target if self.one_way else source != target

    def loses_reply(self, sender: PeerId, receiver: PeerId) -> bool:
        """Say whether the next reply never arrives."""
        drawn = self.faults.lose_per_mille and self._chance.happens(self.faults.lose_per_mille)
        return bool(drawn) or self.loses(sender, receiver)

    def find_failure(self, sender: PeerId, receiver: PeerId) -> str:
        """Return how a request fails: ``timeout``, ``closed``, or empty if it gets through."""
        return "timeout" if self.is_cut(sender, receiver) else self.draw_failure(receiver)

    def draw_failure(self, receiver: PeerId) -> str:
        """Return how a request fails that no partition stops; as :meth:`find_failure`."""
        if receiver in self.silent or self._chance.happens(self.faults.drop_per_mille):
            return "timeout"
        return "closed" if self._chance.happens(self.faults.close_per_mille) else ""

    def duplicates(self) -> bool:
        """Say whether a reply arrives twice."""
        return self._chance.happens(self.faults.duplicate_per_mille)

    def engine_fails(self) -> bool:
        """Say whether an engine refuses an update."""
        return self._chance.happens(self.faults.engine_fail_per_mille)

    def corrupt(self, provider: PeerId, reply: Message) -> Message:
        """Return the reply as it arrives."""
        if not isinstance(reply, ChunkReply) or not reply.data:
            return reply
        if provider in self.liars:
            return replace(reply, data=None) if self._chance.happens(500) else replace(reply, data=b"lie" + reply.data)
        if self._chance.happens(self.faults.flip_per_mille):
            data = bytearray(reply.data)
            data[self._chance(len(data))] ^= 1 << self._chance(8)
            return replace(reply, data=bytes(data))
        return reply
