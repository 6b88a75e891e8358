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
    duplicate_per_mille: int = 0
    flip_per_mille: int = 0
    """One bit of a chunk is flipped on the way."""
    engine_fail_per_mille: int = 0


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
        self.silent: set[PeerId] = set()
        """Peers that take requests and never answer."""
        self.liars: set[PeerId] = set()
        """Peers that answer every chunk with other bytes, or say they do not hold it."""

    def latency_seconds(self) -> float:
        """Return how long the next message takes."""
        return self._chance.between(self.faults.latency_seconds_min, self.faults.latency_seconds_max)

    def is_cut(self, sender: PeerId, receiver: PeerId) -> bool:
        """Say whether requests of ``sender`` to ``receiver`` end in nothing."""
        return (sender, receiver) in self.partitions or (receiver, sender) in self.partitions

    def loses(self, sender: PeerId, receiver: PeerId) -> bool:
        """Say whether nothing that ``sender`` sends reaches ``receiver``; the other way may be open."""
        return (sender, receiver) in self.partitions

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
