"""When a publisher helps out although other readers hold what is asked for.

It helps a reader that stands still, a chunk at a time, and one that would get more than twice as much of it as of all
others. Where it could give every reader at once more than twice what readers give each other, their uplinks are thin
and its own is idle: then it is asked for all that it can send, and what slow readers owe is called back. What readers
bring within seconds is left to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pulsenet.node.sources import Source
from pulsenet.node.transfers import Transfer, Transfers
from pulsenet.node.windows import Meter

RELIEF_SECONDS = 5.0
"""A blob is open for so long before the publisher helps out."""

RELIEF_RATIO = 2.0
"""The publisher helps where it is so much faster than all other sources together."""

WORTH_SECONDS = 5.0
"""What other readers bring within so much time is not worth the publisher's upload."""

STILL_SECONDS = 1.0
"""A reader to whom nothing comes for so long stands still."""

RELIEF_TOLD_SECONDS = 30.0
"""How long after it the help is told as a shortfall."""

CALL_BACK_SECONDS = 2.0
"""No request is called back that brought something within so much time."""


@dataclass(frozen=True, slots=True)
class Help:
    """What the publisher may be asked for beyond its turn."""

    chunk_count: int
    is_beyond: bool = False
    """Whether it may come on top of what is asked for at a time."""
    seconds: float | None = None
    """In about so much time it alone would bring every open chunk; whoever takes longer for one is not asked."""


class Relief:
    """Measures what comes of whom, and judges by it. Pure.

    Args:
        transfers: The requests in flight.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._readers_pace = Meter()
        self._moved_at = float("-inf")
        self._relieved_at = float("-inf")

    def note_chunk(self, transfer: Transfer, publisher: Source | None, now: float) -> None:
        """A good chunk came, of the publisher or of anybody else."""
        self._moved_at = now
        if publisher is None:
            self._readers_pace.note(1.0, now)
        elif now > transfer.began_at:
            publisher.peak.note(transfer.good_count / (now - transfer.began_at), now)

    def note_helped(self, now: float) -> None:
        """The publisher is asked for help."""
        self._relieved_at = now

    def is_told(self, now: float) -> bool:
        """Say whether the publisher helped out lately."""
        return now < self._relieved_at + RELIEF_TOLD_SECONDS

    def judge(
        self, publisher: Source, *, open_seconds: float, reader_count: int, open_count: int, now: float
    ) -> Help | None:
        """Return what help there is now, if any.

        Args:
            publisher: It can be asked.
            open_seconds: For how long the blob is open.
            reader_count: Others that hold it or read it, as far as they are known.
            open_count: Its chunks that are asked of nobody.
            now: Monotonic time.
        """
        if open_seconds < RELIEF_SECONDS:
            return None
        readers_pace = self._readers_pace.per_second(now)
        is_long = open_count + self._transfers.chunk_count > WORTH_SECONDS * readers_pace
        # By the pace it once had for this reader alone: how many others it serves now would count twice.
        fair_pace = publisher.peak.per_second(now) / (reader_count + 1)
        if is_long and fair_pace > RELIEF_RATIO * readers_pace:
            return Help(publisher.room_chunks, is_beyond=True, seconds=max(open_count, 1) / fair_pace)
        if publisher.chunks_in_flight:
            return None
        is_still = now >= self._moved_at + STILL_SECONDS
        if is_still and all(transfer.is_stalled for transfer in self._transfers):
            return Help(1)
        if is_long and is_still and not publisher.peak.per_second(now):
            # Nobody knows what it could do for this reader.
            return Help(1, is_beyond=True)
        is_faster = publisher.window.chunks_per_second > RELIEF_RATIO * readers_pace
        return Help(1) if is_long and is_faster else None

    def find_late(self, publisher: Source, help_: Help, open_count: int, now: float) -> list[int]:
        """Return requests to call back, latest first: what they owe, the publisher brings sooner and has room for."""
        if help_.seconds is None:
            return []
        limit_seconds = max(help_.seconds, CALL_BACK_SECONDS)
        late = sorted(
            (transfer.progress_at, request_id)
            for request_id, transfer in self._transfers.items()
            if transfer.peer_id != publisher.peer_id and now >= transfer.progress_at + limit_seconds
        )
        room = help_.chunk_count - open_count
        chosen: list[int] = []
        for _, request_id in late:
            if room <= 0:
                break
            room -= len(self._transfers[request_id].awaited)
            chosen.append(request_id)
        return chosen
