"""A reduced model of how a version spreads, for swarms that are too large for the real machines.

Kept: every line with its rates, pieces that are passed on as soon as they are whole, some neighbours per reader, a
publisher that sends each piece only a few times. Left out: records, chunk lists, requests, retries, faults; who
sends simply knows what its neighbours lack. It is checked against the real machines where those are affordable.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pulsenet.testing.clock import VirtualClock
from pulsenet.testing.fakes import Chance
from pulsenet.testing.links import BACKLOG_SECONDS, Link
from pulsenet.testing.spread import Spread, compute_bound_seconds

DIALS = 6
"""Neighbours each reader chooses; with those that choose it there are about twice as many."""

PUBLISHER_COPIES = 2
"""How often the publisher sends a piece."""


class SpreadModel:
    """One version on its way to many readers.

    Args:
        seed: Decides neighbours and pieces.
        publisher: The publisher's line.
        lines: The readers' lines.
        payload_size_bytes: Size of the version.
        piece_count: Pieces it is cut into.
        copies: How often the publisher sends a piece.
    """

    def __init__(
        self,
        seed: int,
        publisher: Link,
        lines: Sequence[Link],
        *,
        payload_size_bytes: float,
        piece_count: int,
        copies: int = PUBLISHER_COPIES,
    ) -> None:
        self._chance = Chance(seed)
        self._clock = VirtualClock()
        self._publisher = publisher
        self._lines = list(lines)
        self._payload_size_bytes = payload_size_bytes
        self._piece_count = piece_count
        self._piece_size_bytes = payload_size_bytes / piece_count
        count = len(self._lines)
        self._held = [0] * count
        """Pieces of each reader, one bit each."""
        self._coming = [0] * count
        self._full = (1 << piece_count) - 1
        self._neighbours = self._choose_neighbours()
        self._turn = [0] * count
        self._is_sending = [False] * count
        self._down_free_at = [0.0] * count
        self._to_publish = [piece for _ in range(copies) for piece in range(piece_count)]
        self._to_publish.reverse()
        self._published_count = 0
        self._done_at: list[float] = []

    def run(self) -> Spread:
        """Let it spread to everybody.

        Raises:
            AssertionError: somebody is left without.
        """
        self._publish()
        event_count = 0
        while self._clock.step(float("inf")):
            event_count += 1
        count = len(self._lines)
        assert len(self._done_at) == count
        return Spread(
            reader_count=count,
            payload_size_bytes=self._payload_size_bytes,
            half_seconds=self._done_at[(count - 1) // 2],
            all_seconds=self._done_at[-1],
            bound_seconds=compute_bound_seconds(self._payload_size_bytes, self._publisher, self._lines),
            publisher_payloads=self._published_count / self._piece_count,
            received_payloads=1.0,
            event_count=event_count,
        )

    def _choose_neighbours(self) -> list[list[int]]:
        count = len(self._lines)
        dialable = [reader for reader in range(count) if self._lines[reader].is_dialable]
        chosen: list[dict[int, None]] = [{} for _ in range(count)]
        for reader in range(count):
            for _ in range(min(DIALS, count - 1)):
                other = dialable[self._chance(len(dialable))] if dialable else reader
                if other != reader:
                    chosen[reader][other] = chosen[other][reader] = None
        return [list(others) for others in chosen]

    def _publish(self) -> bool:
        """Send the next piece to a reader that lacks it and has room; readers take turns by chance."""
        now = self._clock.now
        seconds = self._piece_size_bytes / self._publisher.up_rate
        if not self._to_publish:
            return False
        piece = self._to_publish[-1]
        start = self._chance(len(self._lines))
        wake_at = float("inf")
        for step in range(len(self._lines)):
            reader = (start + step) % len(self._lines)
            if (self._held[reader] | self._coming[reader]) >> piece & 1:
                continue
            room_at = self._down_free_at[reader] - max(BACKLOG_SECONDS, seconds)
            if room_at <= now:
                self._to_publish.pop()
                self._published_count += 1
                self._send(reader, piece, self._publisher)
                self._clock.after(seconds, self._publish)
                return True
            wake_at = min(wake_at, room_at)
        if wake_at == float("inf"):
            # Everybody has it, or will.
            self._to_publish.pop()
            wake_at = now
        self._clock.at(wake_at, self._publish)
        return False

    def _pass_on(self, sender: int) -> bool:
        """Send some piece to the next neighbour that lacks one and has room."""
        self._is_sending[sender] = False
        now, line, held = self._clock.now, self._lines[sender], self._held[sender]
        seconds = self._piece_size_bytes / line.up_rate
        neighbours = self._neighbours[sender]
        wake_at = float("inf")
        for step in range(len(neighbours)):
            place = (self._turn[sender] + step) % len(neighbours)
            reader = neighbours[place]
            lacking = held & ~(self._held[reader] | self._coming[reader])
            if not lacking:
                continue
            room_at = self._down_free_at[reader] - max(BACKLOG_SECONDS, seconds)
            if room_at <= now:
                self._turn[sender] = place + 1
                self._is_sending[sender] = True
                self._send(reader, self._choose_piece(lacking), line)
                self._clock.after(seconds, partial(self._pass_on, sender))
                return True
            wake_at = min(wake_at, room_at)
        if wake_at < float("inf"):
            self._is_sending[sender] = True
            self._clock.at(wake_at, partial(self._pass_on, sender))
        return False

    def _choose_piece(self, lacking: int) -> int:
        start = self._chance(self._piece_count)
        later = lacking >> start << start or lacking
        return (later & -later).bit_length() - 1

    def _send(self, reader: int, piece: int, line: Link) -> None:
        self._coming[reader] |= 1 << piece
        now, target = self._clock.now, self._lines[reader]
        delay_seconds = line.delay_seconds + target.delay_seconds
        free_at = max(now + delay_seconds, self._down_free_at[reader]) + self._piece_size_bytes / target.down_rate
        self._down_free_at[reader] = free_at
        arrives_at = max(free_at, now + self._piece_size_bytes / line.up_rate + delay_seconds)
        self._clock.at(arrives_at, partial(self._arrive, reader, piece))

    def _arrive(self, reader: int, piece: int) -> None:
        self._held[reader] |= 1 << piece
        if self._held[reader] == self._full:
            self._done_at.append(self._clock.now)
        if not self._is_sending[reader]:
            self._pass_on(reader)
