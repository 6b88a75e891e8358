"""Whom to ask: the providers a node knows, what they claim, and how they behaved.

A source that fails backs off and comes last; one that answers "not held" is left alone for that key, for good
if its signed have record claimed otherwise. Every rule here is per source, so one bad peer never stops a
download that another could serve.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from pulsenet import limits
from pulsenet.chain.records import Have, Kind, Manifest
from pulsenet.ids import Digest, PeerId
from pulsenet.node.machine import Draw

SOURCES_MAX = 128
"""Sources remembered at once; the shell connects to far fewer outbound."""

MISSES_MAX = 1_024
"""Keys remembered as missing at one source; the oldest is forgotten beyond."""

WINDOW_CHUNKS_START = 4
WINDOW_CHUNKS_MAX = limits.CHUNKS_PER_REQUEST_MAX * limits.STREAMS_PER_PEER_MAX
"""Chunks asked of one source at once: grows by success, halves by failure, so thin links are not flooded."""

FAILURES_MAX = 6
"""Failures in a row after which a source is parked."""

PARKED_SECONDS = 300.0
"""A parked source is tried again after this, or as soon as it is heard of."""


class Claim(IntEnum):
    """What a source says about holding a blob; smaller is asked first."""

    HOLDS = 0
    UNKNOWN = 1
    DENIES = 2


@dataclass(slots=True)
class Miss:
    """A source answered that it does not hold a key."""

    count: int
    retry_at: float
    """Infinity once the source's own claim was proved wrong."""


@dataclass(slots=True)
class Source:
    """One provider."""

    peer_id: PeerId
    have: Have | None = None
    requests_in_flight: int = 0
    chunks_in_flight: int = 0
    window_chunks: int = WINDOW_CHUNKS_START
    failure_count: int = 0
    """In a row."""
    false_claim_count: int = 0
    retry_at: float = 0.0
    misses: dict[Digest, Miss] = field(default_factory=dict)

    @property
    def is_parked(self) -> bool:
        """Whether it failed so often that it counts as gone."""
        return self.failure_count >= FAILURES_MAX

    @property
    def room_chunks(self) -> int:
        """Chunks that may be asked of it now, in one request."""
        if self.requests_in_flight >= limits.STREAMS_PER_PEER_MAX:
            return 0
        return min(limits.CHUNKS_PER_REQUEST_MAX, max(self.window_chunks - self.chunks_in_flight, 0))


class Sources:
    """The table of providers, shared by everything one machine fetches."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._sources: dict[PeerId, Source] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources.values())

    def get(self, peer_id: PeerId) -> Source | None:
        """Return the source, if it is known."""
        return self._sources.get(peer_id)

    def connect(self, peer_id: PeerId) -> bool:
        """Take in a peer that can be reached, and forgive what it failed before; ``False`` if the table is full."""
        source = self._sources.get(peer_id)
        if source is None:
            if len(self._sources) >= SOURCES_MAX:
                return False
            source = self._sources[peer_id] = Source(peer_id)
        source.failure_count = 0
        source.retry_at = 0.0
        source.misses.clear()
        return True

    def disconnect(self, peer_id: PeerId) -> None:
        """Forget a peer; its requests in flight will fail on their own."""
        self._sources.pop(peer_id, None)

    def note_have(self, peer_id: PeerId, have: Have) -> None:
        """Take in a verified have record: newer claims make earlier misses worth another try."""
        source = self._sources.get(peer_id)
        if source is None or (source.have is not None and source.have.issued_at_ms >= have.issued_at_ms):
            return
        source.have = have
        source.misses.clear()
        self.note_heard(peer_id)

    def note_heard(self, peer_id: PeerId) -> None:
        """The peer spoke to us: if it was parked, it deserves one more try now."""
        source = self._sources.get(peer_id)
        if source is not None and source.is_parked:
            source.failure_count = FAILURES_MAX - 1
            source.retry_at = 0.0

    def note_success(self, peer_id: PeerId, *, chunk_count: int = 0) -> None:
        """The source answered a request as asked, with this many good chunks."""
        source = self._sources.get(peer_id)
        if source is not None:
            source.failure_count = 0
            source.retry_at = 0.0
            source.window_chunks = min(source.window_chunks + chunk_count, WINDOW_CHUNKS_MAX)

    def note_failure(self, peer_id: PeerId, now: float, *, wait_seconds: float = 0.0) -> None:
        """The source failed a request; wait before the next, longer each time and at least ``wait_seconds``."""
        source = self._sources.get(peer_id)
        if source is None:
            return
        source.failure_count = min(source.failure_count + 1, FAILURES_MAX)
        source.window_chunks = max(source.window_chunks // 2, 1)
        backoff_seconds = PARKED_SECONDS if source.is_parked else self.backoff_seconds(source.failure_count)
        source.retry_at = now + max(backoff_seconds, min(wait_seconds, PARKED_SECONDS))

    def note_miss(self, peer_id: PeerId, key: Digest, now: float, *, claimed: bool) -> None:
        """The source does not hold ``key``; if it ``claimed`` to, it is not asked for it again."""
        source = self._sources.get(peer_id)
        if source is None:
            return
        miss = source.misses.pop(key, None)
        count = 1 if miss is None else miss.count + 1
        if claimed:
            source.false_claim_count += 1
        retry_at = float("inf") if claimed else now + self.backoff_seconds(count)
        source.misses[key] = Miss(count, retry_at)
        if len(source.misses) > MISSES_MAX:
            source.misses.pop(next(iter(source.misses)))

    def keep_misses(self, keys: Collection[Digest]) -> None:
        """Forget what is missing of anything but ``keys``: nobody wants the rest any more."""
        for source in self._sources.values():
            for key in [key for key in source.misses if key not in keys]:
                del source.misses[key]

    def backoff_seconds(self, attempt: int) -> float:
        """Return the wait after ``attempt`` failures: doubled each time, bounded, and jittered down by up to half."""
        assert attempt >= 1
        full_seconds = min(limits.RETRY_SECONDS_MIN * 2.0 ** min(attempt - 1, 16), limits.RETRY_SECONDS_MAX)
        return full_seconds * (0.5 + self._draw(1024) / 2048)

    def candidates(self, key: Digest, now: float, claim_of: Callable[[Source], Claim]) -> list[Source]:
        """Return the sources that may be asked for ``key`` now, best first.

        Order: fewest false claims, then its claim, then failures in a row, then the least loaded, then chance.
        A later scheduler (rarest first, hedging) replaces this order and nothing else.
        """
        ready = [
            source
            for source in self._sources.values()
            if source.retry_at <= now
            and source.requests_in_flight < limits.STREAMS_PER_PEER_MAX
            and (key not in source.misses or source.misses[key].retry_at <= now)
        ]
        return sorted(
            ready,
            key=lambda source: (
                source.false_claim_count,
                claim_of(source),
                source.failure_count,
                source.chunks_in_flight + source.requests_in_flight,
                self._draw(1 << 16),
            ),
        )

    def all_miss(self, key: Digest) -> bool:
        """Say whether there are live sources and every one of them answered that it does not hold ``key``."""
        live = [source for source in self._sources.values() if not source.is_parked]
        return bool(live) and all(key in source.misses for source in live)

    def next_retry_at(self, now: float) -> float | None:
        """Return the earliest later time at which a source or a miss may be tried again."""
        times = [source.retry_at for source in self._sources.values()]
        times += [miss.retry_at for source in self._sources.values() for miss in source.misses.values()]
        return min((at for at in times if now < at < float("inf")), default=None)


def claim_of(source: Source, manifest: Manifest, publisher: PeerId | None) -> Claim:
    """Return what ``source`` says about the blob of ``manifest``.

    The signer of the manifest holds it by rule: it announces nothing it has not stored.
    """
    if source.peer_id == publisher:
        return Claim.HOLDS
    have = source.have
    if have is None or manifest.kind is Kind.SKIP:
        return Claim.UNKNOWN
    if have.epoch != manifest.version.epoch:
        return Claim.DENIES
    number = manifest.version.number
    if manifest.kind is Kind.ANCHOR:
        return Claim.HOLDS if number in have.anchors else Claim.DENIES
    holds = have.version_last > 0 and have.version_first <= number <= have.version_last
    return Claim.HOLDS if holds else Claim.DENIES
