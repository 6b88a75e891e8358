"""Work that a training process wants sampled: leased to one inferencer at a time until a batch answers it.

Leases end by time alone, so an inferencer that dies costs its tasks a delay and nobody has to notice. The board itself
is memory: whoever owns it writes down what changes and puts it back with :meth:`TaskBoard.restore`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pulsenet import limits
from pulsenet.ids import PeerId
from pulsenet.wire.messages import Task

LEASES_PER_TASK_MAX: Final = 8
"""A task that so many inferencers did not answer is given up: it may be what breaks them."""

LEASED_PER_PEER_MAX: Final = 256
"""Tasks one inferencer holds at one time, so that none hoards them."""


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """How the tasks of this node stand."""

    waiting: int
    leased: int
    done: int
    """Answered by a batch; this and what follows since the node started."""
    expired: int
    """Leases that ended without an answer."""
    given_up: int
    """Tasks that no inferencer answered within ``LEASES_PER_TASK_MAX`` leases."""


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A task as an earlier life of the node left it."""

    task_id: bytes
    content: str
    lease_seconds: float
    lease_count: int
    peer_id: PeerId | None
    """Who had it last; ``None`` if it was never leased."""
    rest_seconds: float
    """Of that lease; 0 or less if it is over."""


@dataclass(slots=True)
class _Entry:
    content: str
    lease_seconds: float
    lease_count: int = 0


@dataclass(frozen=True, slots=True)
class _Lease:
    peer_id: PeerId
    until: float


class TaskBoard:
    """The tasks of one trainer's node.

    Args:
        draw_bytes: Returns so many random bytes, for task ids.
    """

    def __init__(self, draw_bytes: Callable[[int], bytes]) -> None:
        self._draw_bytes = draw_bytes
        self._entries: dict[bytes, _Entry] = {}
        self._waiting: deque[bytes] = deque()
        self._leases: dict[bytes, _Lease] = {}
        self._held: Counter[PeerId] = Counter()
        self._size_bytes = 0
        self._done = self._expired = self._given_up = 0
        self._given_up_ids: list[bytes] = []

    def restore(self, stored: Iterable[StoredTask], now: float) -> None:
        """Put the tasks of an earlier life back, in the order they were queued; leases run on."""
        for task in stored:
            self._entries[task.task_id] = _Entry(task.content, task.lease_seconds, task.lease_count)
            self._size_bytes += len(task.content.encode())
            if task.peer_id is None:
                self._waiting.append(task.task_id)
                continue
            # The clock that measured the rest may have jumped: no lease is longer than a new one.
            until = now + min(task.rest_seconds, task.lease_seconds)
            self._leases[task.task_id] = _Lease(task.peer_id, until)
            self._held[task.peer_id] += 1

    def put(self, contents: Sequence[str], lease_seconds: float) -> tuple[bytes, ...] | None:
        """Queue tasks and return their ids; ``None``, and none queued, if there is no room for all."""
        size_bytes = sum(len(content.encode()) for content in contents)
        if len(self._entries) + len(contents) > limits.TASKS_MAX:
            return None
        if self._size_bytes + size_bytes > limits.TASKS_SIZE_BYTES_MAX:
            return None
        self._size_bytes += size_bytes
        ids = tuple(self._draw_bytes(16) for _ in contents)
        for task_id, content in zip(ids, contents, strict=True):
            self._entries[task_id] = _Entry(content, lease_seconds)
            self._waiting.append(task_id)
        return ids

    def withdraw(self, task_ids: Iterable[bytes]) -> None:
        """Take tasks back that were queued a moment ago."""
        for task_id in task_ids:
            self._waiting.remove(task_id)
            self._forget(task_id)

    def lease(self, peer_id: PeerId, count_max: int, now: float) -> tuple[Task, ...]:
        """Lease the oldest tasks to an inferencer: as many as it asks for, may hold, and fit one message."""
        self._end_leases(now)
        room = min(count_max, limits.TASKS_PER_REPLY_MAX, LEASED_PER_PEER_MAX - self._held[peer_id])
        given: list[Task] = []
        size_bytes = 0
        while self._waiting and len(given) < room:
            task_id = self._waiting[0]
            entry = self._entries[task_id]
            size_bytes += len(entry.content.encode()) + 64
            if given and size_bytes > limits.CHUNK_SIZE_BYTES_MAX:
                break
            self._waiting.popleft()
            entry.lease_count += 1
            self._leases[task_id] = _Lease(peer_id, now + entry.lease_seconds)
            self._held[peer_id] += 1
            given.append(Task(task_id, entry.content, int(entry.lease_seconds * 1000)))
        self._held += Counter()  # keys that hold nothing are forgotten
        return tuple(given)

    def finish(self, task_ids: Iterable[bytes]) -> int:
        """Take tasks off the board that a batch answers, whoever held them; return how many were on it."""
        known = [task_id for task_id in dict.fromkeys(task_ids) if task_id in self._entries]
        for task_id in known:
            if task_id in self._leases:
                self._end_lease(task_id)
            else:
                self._waiting.remove(task_id)
            self._forget(task_id)
        self._done += len(known)
        return len(known)

    def take_given_up(self) -> tuple[bytes, ...]:
        """Return the tasks that were given up since the last call."""
        given_up, self._given_up_ids = tuple(self._given_up_ids), []
        return given_up

    def counts(self, now: float) -> TaskCounts:
        """Return how the tasks stand; nothing changes, so any thread may ask."""
        over = [task_id for task_id, lease in list(self._leases.items()) if lease.until <= now]
        entries = [entry for task_id in over if (entry := self._entries.get(task_id)) is not None]
        given_up = sum(entry.lease_count >= LEASES_PER_TASK_MAX for entry in entries)
        return TaskCounts(
            waiting=len(self._waiting) + len(entries) - given_up,
            leased=len(self._leases) - len(entries),
            done=self._done,
            expired=self._expired + len(entries),
            given_up=self._given_up + given_up,
        )

    def _end_leases(self, now: float) -> None:
        """Put tasks whose lease is over in front of the queue, the oldest first."""
        over = [task_id for task_id, lease in self._leases.items() if lease.until <= now]
        for task_id in reversed(over):
            self._end_lease(task_id)
            self._expired += 1
            if self._entries[task_id].lease_count < LEASES_PER_TASK_MAX:
                self._waiting.appendleft(task_id)
            else:
                self._given_up += 1
                self._given_up_ids.append(task_id)
                self._forget(task_id)

    def _end_lease(self, task_id: bytes) -> None:
        self._held[self._leases.pop(task_id).peer_id] -= 1

    def _forget(self, task_id: bytes) -> None:
        self._size_bytes -= len(self._entries.pop(task_id).content.encode())
