"""Whom to ask: the providers a node knows, what they claim, and how they behaved.

A source that fails backs off and comes last; one that answers "not held" is left alone for that key, for good
if its signed have record claimed otherwise; one that keeps sending bad bytes is banned for a while, reconnecting or
not. Every rule here is per source, so one bad peer never stops a download that another could serve.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from pulsenet import limits
from pulsenet.chain.records import Have, Kind, Manifest
from pulsenet.chain.trust import FUTURE_MS_MAX
from pulsenet.ids import Digest, PeerId
from pulsenet.node.machine import Draw
from pulsenet.node.windows import Peak, Window

SOURCES_MAX = 128
"""Sources remembered at once; the shell connects to far fewer outbound."""

MISSES_MAX = 1_024
"""Keys remembered as missing at one source; the oldest is forgotten beyond."""

FAILURES_MAX = 6
"""Failures in a row after which a source is parked."""

PARKED_SECONDS = 300.0
"""A parked source is tried again after this, or as soon as it is heard of."""

STRIKES_MAX = 5.0
STRIKES_PER_GOOD_CHUNK = 0.1
"""Bad chunks, less a little for each good one, after which a source is banned."""

BANNED_SECONDS = 60.0
"""A banned source is asked for nothing so long, whatever is heard of it; one more bad chunk bans it again."""

BANS_MAX = 1_024
"""Peers whose strikes outlive their connection; the one struck longest ago is forgotten beyond."""

WINDOW_PARTS = 4
"""While something is under way, no request is for less than this part of a window, or than a whole request."""

UNREACHED_MAX = 256
UNREACHED_SECONDS = 400.0
"""Readers that told of themselves and that no connection leads to: remembered until all others told so much later."""


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
    is_sought: bool = False
    """Whether this node looks for it, and not only it for this node."""
    requests_in_flight: int = 0
    chunks_in_flight: int = 0
    window: Window = field(default_factory=Window)
    peak: Peak = field(default_factory=Peak)
    """Of one request at a time; measured of publishers alone."""
    tells_holdings: bool = True
    """Whether it answers which chunks of a blob it holds; older nodes do not."""
    strikes: float = 0.0
    is_banned: bool = False
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
        room = min(limits.CHUNKS_PER_REQUEST_MAX, self.window.chunks - self.chunks_in_flight)
        # Asked early, in small parts: who fetches from this node too gets a request only behind what this node is
        # sending it, and should not run out of things to send meanwhile.
        part = min(self.window.chunks // WINDOW_PARTS, limits.CHUNKS_PER_REQUEST_MAX)
        return room if room >= max(part if self.chunks_in_flight else 1, 1) else 0

    def expect_seconds(self, usual_pace: float) -> float:
        """Return when the next chunk asked of it would come, by its pace; by the usual one before it was measured."""
        pace = self.window.chunks_per_second or usual_pace
        return (self.chunks_in_flight + 1) / pace if pace > 0 else 0.0

    def can_be_asked(self, key: Digest, now: float) -> bool:
        """Say whether it may be asked for ``key`` now, if there is room."""
        is_missed = key in self.misses and self.misses[key].retry_at > now
        return not self.is_parked and self.retry_at <= now and not is_missed


class Sources:
    """The table of providers, shared by everything one machine fetches.

    Args:
        draw: Chance.
        window_chunks_min: What any of them may owe, however slow it is.
    """

    def __init__(self, draw: Draw, window_chunks_min: int = 1) -> None:
        self.draw = draw
        self._window_chunks_min = window_chunks_min
        self._sources: dict[PeerId, Source] = {}
        self._struck: dict[PeerId, tuple[float, float]] = {}
        """Strikes of peers, and until when they are banned, if they are."""
        self._unreached: dict[PeerId, int] = {}
        """Issue times of have records, in Unix milliseconds."""
        self._told_at_ms = 0

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources.values())

    def get(self, peer_id: PeerId) -> Source | None:
        """Return the source, if it is known."""
        return self._sources.get(peer_id)

    def connect(self, peer_id: PeerId, *, sought: bool = False) -> bool:
        """Take in a peer that can be reached, and forgive what it failed before; ``False`` if the table is full.

        Args:
            peer_id: Whose key.
            sought: Whether this node dialled it or needs what it alone has: then it takes the place of one that is not.
                Anybody may come here, and as many as they like; they must not keep out whom this node looks for.
        """
        source = self._sources.get(peer_id)
        if source is None:
            if len(self._sources) >= SOURCES_MAX and not (sought and self._drop_unsought()):
                return False
            source = self._sources[peer_id] = Source(peer_id, window=Window(self._window_chunks_min))
        source.is_sought |= sought
        self._unreached.pop(peer_id, None)
        source.failure_count = 0
        source.retry_at = 0.0
        source.misses.clear()
        source.strikes, banned_until = self._struck.get(peer_id, (0.0, 0.0))
        if banned_until > 0:
            source.is_banned, source.failure_count, source.retry_at = True, FAILURES_MAX, banned_until
        return True

    def _drop_unsought(self) -> bool:
        """Forget the newest of those that only looked for this node and owe it nothing; say whether there was one."""
        idle = [each.peer_id for each in self if not (each.is_sought or each.requests_in_flight)]
        if idle:
            self.disconnect(idle[-1])
        return bool(idle)

    def disconnect(self, peer_id: PeerId) -> None:
        """Forget a peer; its requests in flight will fail on their own."""
        self._sources.pop(peer_id, None)

    def note_have(self, peer_id: PeerId, have: Have) -> None:
        """Take in a verified have record: newer claims make earlier misses worth another try."""
        self._told_at_ms = max(self._told_at_ms, have.issued_at_ms)
        source = self._sources.get(peer_id)
        if source is None and have.role != "trainer":
            self._unreached.pop(peer_id, None)
            self._unreached[peer_id] = have.issued_at_ms
            if len(self._unreached) > UNREACHED_MAX:
                del self._unreached[next(iter(self._unreached))]
        if source is None:
            return
        # None is taken that lies further from now on either side: the one known is of a clock that was set back since.
        ahead_ms = -1 if source.have is None else source.have.issued_at_ms - have.issued_at_ms
        if 0 <= ahead_ms <= 2 * FUTURE_MS_MAX:
            return
        source.have = have
        source.misses.clear()
        self.note_heard(peer_id)

    @property
    def unreached_count(self) -> int:
        """Readers and seeds that told of themselves lately and cannot be asked, because no connection leads to them."""
        return sum(at > self._told_at_ms - UNREACHED_SECONDS * 1000 for at in self._unreached.values())

    def note_heard(self, peer_id: PeerId) -> None:
        """The peer spoke to us: if it was parked, it deserves one more try now."""
        source = self._sources.get(peer_id)
        if source is not None and source.is_parked and not source.is_banned:
            source.failure_count = FAILURES_MAX - 1
            source.retry_at = 0.0

    def note_ended(self, peer_id: PeerId) -> None:
        """A request to the source is over, however it ended; whoever came again since may have none."""
        source = self._sources.get(peer_id)
        if source is not None:
            source.requests_in_flight = max(source.requests_in_flight - 1, 0)

    def note_success(self, peer_id: PeerId, now: float) -> None:
        """The source answered a request as asked; one that was under way when it was banned lifts no ban."""
        source = self._sources.get(peer_id)
        if source is not None and not (source.is_banned and now < source.retry_at):
            source.failure_count = 0
            source.retry_at = 0.0
            source.is_banned = False

    def note_chunk(self, peer_id: PeerId, now: float) -> None:
        """The source sent a good chunk."""
        source = self._sources.get(peer_id)
        if source is not None:
            source.window.note_chunk(now)
            source.strikes = max(source.strikes - STRIKES_PER_GOOD_CHUNK, 0.0)

    def note_strike(self, peer_id: PeerId, now: float) -> None:
        """The source sent bytes that are not what they are called; at the limit it is banned."""
        self.note_failure(peer_id, now)
        source = self._sources.get(peer_id)
        if source is None:
            return
        source.strikes += 1.0
        banned_until = 0.0
        if source.strikes >= STRIKES_MAX:
            source.is_banned, source.failure_count = True, FAILURES_MAX
            source.retry_at = banned_until = now + BANNED_SECONDS
        self._struck.pop(peer_id, None)
        self._struck[peer_id] = (source.strikes, banned_until)
        if len(self._struck) > BANS_MAX:
            del self._struck[next(iter(self._struck))]

    def note_busy(self, peer_id: PeerId, now: float, *, wait_seconds: float) -> None:
        """The source has no room for us now: come back after about ``wait_seconds``. It did nothing wrong."""
        source = self._sources.get(peer_id)
        if source is not None:
            wait_seconds = min(max(wait_seconds, limits.RETRY_SECONDS_MIN), PARKED_SECONDS)
            source.retry_at = max(source.retry_at, now + wait_seconds + self.jitter(wait_seconds) / 4)

    def note_failure(self, peer_id: PeerId, now: float, *, wait_seconds: float = 0.0) -> None:
        """The source failed a request; wait before the next, longer each time and at least ``wait_seconds``."""
        source = self._sources.get(peer_id)
        if source is None:
            return
        source.failure_count = min(source.failure_count + 1, FAILURES_MAX)
        source.window.shrink()
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
        return self.jitter(full_seconds)

    def jitter(self, seconds: float) -> float:
        """Return a time from half of ``seconds`` to all of it, by chance."""
        return seconds * (0.5 + self.draw(1024) / 2048)

    def candidates(self, key: Digest, now: float, claim_of: Callable[[Source], int]) -> list[Source]:
        """Return the sources that may be asked for ``key`` now, best first.

        Order: fewest false claims, then its claim, then failures in a row, then who would deliver soonest by its
        measured pace, then the least loaded, then chance.
        """
        ready = [
            source
            for source in self._sources.values()
            if source.retry_at <= now
            and source.requests_in_flight < limits.STREAMS_PER_PEER_MAX
            and (key not in source.misses or source.misses[key].retry_at <= now)
        ]
        paces = [source.window.chunks_per_second for source in ready if source.window.chunks_per_second > 0]
        usual_pace = sum(paces) / len(paces) if paces else 0.0
        return sorted(
            ready,
            key=lambda source: (
                source.false_claim_count,
                claim_of(source),
                source.failure_count,
                source.expect_seconds(usual_pace),
                source.chunks_in_flight + source.requests_in_flight,
                self.draw(1 << 16),
            ),
        )

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
