"""The ears of a publisher: in a run with rounds an authority must know what the others announced.

It follows heads, epochs and catalogues as a follower does, fetches no blob, and keeps on disk what it believes, so
that a coordinator which comes back neither repeats nor contradicts what was published meanwhile.
"""

from __future__ import annotations

from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Effect
from pulsenet.node.events import Event, ForkProofSeen, HeadSeen, PeerConnected, PeerLost, StoreFailed
from pulsenet.node.fetch import StoreIndex
from pulsenet.node.machine import Draw
from pulsenet.node.news import News
from pulsenet.node.records_fetch import RecordsArrived, RecordsFetcher
from pulsenet.node.sources import Sources
from pulsenet.node.store_trouble import StoreTrouble
from pulsenet.node.timer import Timer
from pulsenet.wire.messages import GetRecords


class Listener:
    """The machine; see :class:`pulsenet.node.machine.Machine`.

    Args:
        trust: The run's rules; shared with the node's other machines, which act on what is learnt here.
        peer_id: This node's key.
        draw: Chance, for sources and jitter.
        index: What the store holds: a coordinator's own catalogue is there.
    """

    def __init__(self, trust: Trust, peer_id: PeerId, draw: Draw, index: StoreIndex) -> None:
        self._peer_id = peer_id
        self._draw = draw
        self._index = index
        self._sources = Sources(draw)
        take_request_id = Courier().take_request_id
        self._records = RecordsFetcher(self._sources, take_request_id)
        self._news = News(trust, index, self._jitter, own=peer_id)
        self._store_trouble = StoreTrouble()
        self._timer = Timer()

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        self._timer.note(now)
        effects = self._take(event, now, now_ms)
        if self._store_trouble.take_due(now):
            self._news.save_again()
        effects += self._read_catalogue(now, now_ms)
        effects += self._news.save_changes()
        self._records.set_needs(self._news.needs((), now))
        effects += self._records.pump(now)
        return effects + self._set_timer(now)

    def _take(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        match event:
            case PeerConnected(peer_id) if peer_id != self._peer_id:
                if self._sources.connect(peer_id):
                    self._news.ask_head(peer_id, now)
            case PeerLost(peer_id):
                self._sources.disconnect(peer_id)
                self._records.lose_peer(peer_id)
            case HeadSeen(record, source):
                if source is not None:
                    self._sources.note_heard(source)
                return self._news.take_head(record, source, now_ms)
            case ForkProofSeen(first, second):
                self._news.take_fork_proof(first, second)
            case StoreFailed(digest, reason):
                return self._store_trouble.note(reason, now, is_state=digest is None)
            case _:
                effects, arrived = self._records.handle(event, now)
                return effects if arrived is None else effects + self._news.take_records(arrived, now, now_ms)
        return []

    def _read_catalogue(self, now: float, now_ms: int) -> list[Effect]:
        """Take the newest head's catalogue from the own store, where this node published it."""
        head = self._news.head
        if head is None or self._news.catalogue is not None:
            return []
        record = self._index.record(head.catalogue_digest)
        if record is None:
            return []
        arrived = RecordsArrived(GetRecords((head.catalogue_digest,)), self._peer_id, (record,))
        return self._news.take_records(arrived, now, now_ms)

    def _set_timer(self, now: float) -> list[Effect]:
        wakes = [self._records.next_wake(now), self._news.next_wake(now), self._store_trouble.next_wake(now)]
        return self._timer.wake_next(wakes, now)

    def _jitter(self, seconds: float) -> float:
        return seconds * (0.75 + self._draw(1024) / 2048)
