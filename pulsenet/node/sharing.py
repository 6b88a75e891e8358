"""Whom to ask for the chunks of each wanted blob, so that the publisher pays for few of them.

Other readers come first, the publisher last: it is asked for what no reader that can be asked holds, in turns
(:mod:`pulsenet.node.picker`). A few readers wait for no turns where it gives to all of them sooner than that. Where
readers upload too little, it helps out (:mod:`pulsenet.node.relief`). That is counted, so that an operator sees why a
publisher pays for its readers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Effect
from pulsenet.node.events import Event
from pulsenet.node.holdings import Flags
from pulsenet.node.holdings_fetch import HoldingsFetcher, Missing
from pulsenet.node.list_fetch import BlobWant
from pulsenet.node.picker import SETTLE_SECONDS, TURN_SECONDS_MIN, TURNS_MAX, Picker
from pulsenet.node.relief import RELIEF_SECONDS, Help, Relief
from pulsenet.node.sources import Claim, Source, Sources
from pulsenet.node.transfers import Transfer, Transfers
from pulsenet.node.windows import Meter
from pulsenet.wire.chunks import ChunkList

FIRST_CHUNKS = 2
"""Chunks asked of a reader whose pace is unknown: it may have a thin uplink."""

FIRST_TURN_SHARE = 32
TURN_GROWTH = 4
"""What part of a blob is asked of the publisher in turn after its first answer, one chunk at least, and how many times
more after each further one: it tells what it gave to others after they have asked, and in the first second all ask."""

IN_FLIGHT_SECONDS = 3.0
IN_FLIGHT_MIN = 8
"""Chunks asked for at a time where readers feed one another: what comes in so much time, and not fewer."""

BLOCKED_SECONDS = 0.5
"""A reader that may ask nobody for what it lacks looks again after this."""


@dataclass(slots=True)
class _Share:
    """One wanted blob."""

    want: BlobWant
    picker: Picker
    opened_at: float | None = None
    turn_count: int = 0
    """Chunks asked of the publisher in turn."""


@dataclass(slots=True)
class _Plan:
    """Who can give what of one blob, now."""

    is_shared: bool
    """Whether others than the publisher may have chunks of it."""
    readers: list[PeerId] = field(default_factory=list)
    """Peers that read it as this node does."""
    holders: list[PeerId] = field(default_factory=list)
    """Others that can be asked now."""
    publisher_room: int = 1 << 20
    is_publisher_free: bool = True
    """Whether the publisher may be asked for anything; otherwise for what nobody else can give."""
    takes_turns: bool = True
    """Whether readers divide among them what nobody else can give."""
    help: Help | None = None
    """Given when the publisher helps out."""

    @property
    def is_beyond(self) -> bool:
        """Whether the publisher may be asked for more than is asked for at a time."""
        return self.help is not None and self.help.is_beyond

    @property
    def is_publisher_first(self) -> bool:
        """Whether readers are asked only for what they bring sooner."""
        return self.help is not None and self.help.seconds is not None


class Sharing:
    """Pure; a part of the fetcher, which asks it for one request after another.

    Args:
        sources: Providers, shared with the owner's other fetchers.
        transfers: The requests in flight.
        take_request_id: Returns an id the owner never used before.
        own_id: This node's key.
    """

    def __init__(
        self, sources: Sources, transfers: Transfers, take_request_id: Callable[[], int], own_id: PeerId | None
    ) -> None:
        self._sources = sources
        self._transfers = transfers
        self._own_id = own_id
        self._holdings = HoldingsFetcher(sources, take_request_id)
        self._shares: dict[Digest, _Share] = {}
        self._pace = Meter()
        self._relief = Relief(transfers)
        self._turn_seconds = 1.0
        self._look_at = float("-inf")
        self._now = 0.0
        self.publisher_size_bytes = 0
        self.reader_size_bytes = 0

    # Blobs and chunks

    def keep(self, blob_ids: Collection[Digest]) -> None:
        """Forget every blob but these."""
        self._shares = {blob_id: share for blob_id, share in self._shares.items() if blob_id in blob_ids}

    def open(
        self, want: BlobWant, chunk_list: ChunkList, wanted: Collection[Digest], open_now: Iterable[Digest]
    ) -> None:
        """Begin a blob: these of its chunks are wanted, and these can be asked for."""
        blob_id = want.manifest.blob_id
        places: dict[Digest, int] = {}
        for place, (_, digest) in enumerate(chunk_list.entries):
            places.setdefault(digest, place)
        digests = list(wanted)
        picker = Picker(
            digests,
            [places[digest] for digest in digests],
            len(chunk_list.entries),
            own_id=self._own_id,
            draw=self._sources.draw,
        )
        picker.open(open_now)
        known = self._shares.get(blob_id)
        opened_at, turn_count = (None, 0) if known is None else (known.opened_at, known.turn_count)
        self._shares[blob_id] = _Share(want, picker, opened_at, turn_count)

    def put_back(self, digest: Digest, blob_ids: Iterable[Digest]) -> None:
        """A chunk can be asked for again, for these blobs."""
        for blob_id in blob_ids:
            self._shares[blob_id].picker.open((digest,))

    def has_open(self, blob_id: Digest) -> bool:
        """Say whether a chunk of the blob can be asked for."""
        share = self._shares.get(blob_id)
        return share is not None and len(share.picker) > 0

    def lack_everywhere(self, blob_id: Digest, unfinished: Collection[Digest]) -> bool:
        """Say whether there are live sources, and all of them together lack a part of the blob, as far as they told."""
        live = [source for source in self._sources if not source.is_parked]
        share = self._shares.get(blob_id)
        holders = [source for source in live if blob_id not in source.misses]
        if not live or not holders:
            return bool(live)
        if share is None or any(share.want.claim_of(source) is Claim.HOLDS for source in holders):
            return False
        told = [source.peer_id for source in holders if share.picker.knows(source.peer_id)]
        return len(told) == len(holders) and not share.picker.covers(told, unfinished)

    # What happens

    def handle(self, event: Event, now: float) -> tuple[list[Effect], Missing | None]:
        """Take in an event about a question of ours; anything else is ignored."""
        return self._holdings.handle(event, now)

    def lose_peer(self, peer_id: PeerId) -> None:
        """Forget a peer that is gone."""
        self._holdings.lose_peer(peer_id)
        for share in self._shares.values():
            share.picker.forget(peer_id)

    def note_miss(self, blob_id: Digest, peer_id: PeerId) -> None:
        """A peer lacks a chunk it told of, or knows nothing of the blob any more."""
        share = self._shares.get(blob_id)
        if share is not None:
            share.picker.forget(peer_id)

    def note_chunk(self, transfer: Transfer, size_bytes: int, now: float) -> None:
        """A good chunk came."""
        share = self._shares.get(transfer.blob_id)
        is_publisher = share is not None and share.want.publisher == transfer.peer_id
        self._relief.note_chunk(transfer, self._sources.get(transfer.peer_id) if is_publisher else None, now)
        if is_publisher:
            self.publisher_size_bytes += size_bytes
            self._turn_seconds += (now - transfer.began_at - self._turn_seconds) / 4
        else:
            self.reader_size_bytes += size_bytes
        self._pace.note(1.0, now)

    def ask_around(self, now: float) -> list[Effect]:
        """Ask other readers what they hold of the blobs that are open."""
        self._now = now
        for share in self._shares.values():
            if share.opened_at is None and len(share.picker):
                share.opened_at = now
                share.picker.begin(now)
        open_shares = {blob_id: share.picker for blob_id, share in self._shares.items() if share.picker.is_begun}
        self._holdings.set_blobs(open_shares)
        return self._holdings.pump(self._find_targets, now)

    def wakes(self, now: float) -> list[float]:
        """Return later times at which something may be asked."""
        self._now = now
        asks_at = self._holdings.next_wake(self._find_targets, now)
        settles = [share.opened_at + SETTLE_SECONDS for share in self._shares.values() if share.opened_at is not None]
        return [*([] if asks_at is None else [asks_at]), self._look_at, *settles]

    @property
    def shortfall(self) -> str:
        """Why the publisher serves what other readers should: ``thin-upload``, ``no-readers``, or empty."""
        if self._relief.is_told(self._now):
            return "thin-upload"
        return "no-readers" if self._sources.unreached_count and any(map(self._is_alone, self._shares.values())) else ""

    def _is_alone(self, share: _Share) -> bool:
        """Say whether for a while there was nobody but the publisher to ask for a blob that readers share."""
        if not share.want.is_shared or share.opened_at is None or self._now < share.opened_at + RELIEF_SECONDS:
            return False
        return all(source.is_parked or source.peer_id == share.want.publisher for source in self._sources)

    def find_late(self, now: float) -> list[int]:
        """Return requests to other readers to call back: the publisher brings sooner what they owe."""
        late: list[int] = []
        for share in self._shares.values():
            plan = self._plan(share, now)
            publisher = None if share.want.publisher is None else self._sources.get(share.want.publisher)
            if plan.help is not None and publisher is not None:
                late += self._relief.find_late(publisher, plan.help, len(share.picker), now)
        return list(dict.fromkeys(late))

    # Choosing

    def choose(self, blob_id: Digest, room: int, now: float) -> tuple[Source, list[Digest]] | None:
        """Return whom to ask for which chunks of a blob, at most ``room``; they count as asked for from now on."""
        share = self._shares[blob_id]
        plan = self._plan(share, now)
        level = min(room, self._compute_room(now)) if plan.is_shared else room

        def rank(source: Source) -> int:
            if source.peer_id == share.want.publisher:
                return Claim.UNKNOWN if plan.is_shared and not plan.is_publisher_first else Claim.HOLDS
            if plan.is_publisher_first:
                return Claim.UNKNOWN
            if share.picker.may_help(source.peer_id):
                return Claim.HOLDS
            return share.want.claim_of(source)

        for source in self._sources.candidates(blob_id, now, rank):
            is_publisher = source.peer_id == share.want.publisher
            here = self._count_here(source, plan, room if is_publisher and plan.is_beyond else level, is_publisher)
            if here <= 0 or not share.want.may_ask(source):
                continue
            if is_publisher:
                allowed = None if plan.is_publisher_free else self._find_lonely(share, plan, now)
            else:
                # A have record may be newer than what was told of chunks, and whoever holds all is not asked again.
                holds_all = share.want.claim_of(source) is Claim.HOLDS
                allowed = None if holds_all else share.picker.held_by(source.peer_id)
                if allowed is None and not holds_all and share.want.is_shared and source.tells_holdings:
                    continue
            skip = {digest for each in self._transfers if each.peer_id == source.peer_id for digest in each.awaited}
            chosen = share.picker.choose(allowed, here, in_order=not plan.readers, skip=skip)
            if chosen:
                if is_publisher and plan.help is not None:
                    self._relief.note_helped(now)
                elif is_publisher and not plan.is_publisher_free:
                    share.turn_count += len(chosen)
                return source, chosen
        self._look_at = now + BLOCKED_SECONDS if plan.is_shared else self._look_at
        return None

    @staticmethod
    def _count_here(source: Source, plan: _Plan, room: int, is_publisher: bool) -> int:
        """Return how many chunks may be asked of a source now."""
        if is_publisher:
            return min(room, source.room_chunks, plan.publisher_room)
        pace = source.window.chunks_per_second
        if plan.help is not None and plan.help.seconds is not None:
            is_soon = pace > 0 and source.expect_seconds(pace) < plan.help.seconds
            return min(room, source.room_chunks) if is_soon else 0
        is_new = plan.is_shared and not pace
        return min(room, source.room_chunks, FIRST_CHUNKS - source.chunks_in_flight if is_new else room)

    def _compute_room(self, now: float) -> int:
        """Return how much more to ask for, of all sources together: what comes in a few seconds.

        More would stand in queues, where it keeps other readers from what they need and looks like a stall.
        """
        level = round(IN_FLIGHT_SECONDS * self._pace.per_second(now))
        return max(level, IN_FLIGHT_MIN) - self._transfers.chunk_count

    def _find_targets(self, blob_id: Digest) -> list[PeerId]:
        """Return whom to ask about a blob: the publisher, then peers that told of an open chunk, then the others."""
        share = self._shares.get(blob_id)
        if share is None or not share.want.is_shared or not len(share.picker) or not share.picker.is_begun:
            return []
        targets = [
            source.peer_id
            for source in self._sources
            if source.peer_id != share.want.publisher
            and source.tells_holdings
            and source.can_be_asked(blob_id, self._now)
            and share.want.claim_of(source) is not Claim.HOLDS
            and not share.picker.is_whole_at(source.peer_id)
        ]
        targets.sort(key=lambda peer_id: not share.picker.may_help(peer_id))
        publisher = None if share.want.publisher is None else self._sources.get(share.want.publisher)
        if targets and publisher is not None and publisher.tells_holdings and not publisher.is_parked:
            targets.insert(0, publisher.peer_id)
        return targets

    def _plan(self, share: _Share, now: float) -> _Plan:
        """Look at who can give what."""
        want, picker, blob_id = share.want, share.picker, share.want.manifest.blob_id
        others = [each for each in self._sources if each.peer_id != want.publisher and not each.is_parked]
        plan = _Plan(is_shared=want.is_shared and bool(others))
        if not plan.is_shared or share.opened_at is None:
            return plan
        targets = self._find_targets(blob_id)
        is_settled = all(self._holdings.is_answered(peer_id, blob_id) for peer_id in targets)
        if not is_settled and now < share.opened_at + SETTLE_SECONDS:
            plan.publisher_room = 0
            return plan
        ready = [each for each in others if each.can_be_asked(blob_id, now)]
        plan.holders = [each.peer_id for each in ready]
        is_whole_there = any(want.claim_of(each) is Claim.HOLDS or picker.is_whole_at(each.peer_id) for each in ready)
        plan.readers = [
            each.peer_id for each in others if picker.knows(each.peer_id) and not picker.is_whole_at(each.peer_id)
        ]
        if want.publisher is None or not (is_whole_there or plan.readers):
            return plan
        plan.help = self._judge(share, others, now)
        if plan.help is not None:
            plan.publisher_room = plan.help.chunk_count
        elif is_whole_there:
            picker.note_held(now)
            plan.publisher_room = 0
        else:
            plan.is_publisher_free = False
            plan.takes_turns = not self._is_quick(share, plan, now)
            plan.publisher_room = self._count_turn(share, plan)
        return plan

    def _is_quick(self, share: _Share, plan: _Plan, now: float) -> bool:
        """Say whether the publisher's copies for a few others would hold this node up for less than a turn."""
        publisher = None if share.want.publisher is None else self._sources.get(share.want.publisher)
        if publisher is None or len(plan.readers) >= TURNS_MAX:
            return False
        return share.picker.chunk_count * len(plan.readers) <= TURN_SECONDS_MIN * publisher.peak.per_second(now)

    def _judge(self, share: _Share, others: list[Source], now: float) -> Help | None:
        publisher = None if share.want.publisher is None else self._sources.get(share.want.publisher)
        if publisher is None or not publisher.can_be_asked(share.want.manifest.blob_id, now):
            return None
        assert share.opened_at is not None
        known = [each for each in others if share.picker.knows(each.peer_id)]
        return self._relief.judge(
            publisher,
            open_seconds=now - share.opened_at,
            reader_count=len(known),
            open_count=len(share.picker),
            now=now,
        )

    def _count_turn(self, share: _Share, plan: _Plan) -> int:
        """Return how many chunks may be asked of the publisher in turn before it tells again what it gave."""
        assert share.want.publisher is not None
        answers = share.picker.count_answers(share.want.publisher)
        if not answers or len(plan.readers) < TURNS_MAX:
            return plan.publisher_room
        first = max(share.picker.chunk_count // FIRST_TURN_SHARE, 1)
        allowed = first * TURN_GROWTH ** min(answers - 1, 8)
        return max(allowed - share.turn_count, 0) if answers < 8 else plan.publisher_room

    def _find_lonely(self, share: _Share, plan: _Plan, now: float) -> Flags:
        assert share.want.publisher is not None
        if not plan.takes_turns:
            return ~share.picker.held_by_any(plan.holders)
        return share.picker.at_publisher(share.want.publisher, plan.holders, plan.readers, self._turn_seconds, now)
