"""The ears of a node: it hears of heads, epochs and catalogues, fetches what is missing, and keeps what it believes.

Followers have one within. In a run with rounds every authority has one as a machine of its own, for it must know what
the others announced: a coordinator that comes back neither repeats nor contradicts what was published meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from pulsenet.chain.trust import Trust
from pulsenet.ids import Digest, PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Effect
from pulsenet.node.events import Event, ForkProofSeen, HeadSeen, PeerConnected, PeerLost, StoreFailed
from pulsenet.node.fetch import StoreIndex
from pulsenet.node.machine import Draw
from pulsenet.node.news import News
from pulsenet.node.records_fetch import RecordsFetcher
from pulsenet.node.sources import Sources
from pulsenet.node.store_trouble import StoreTrouble
from pulsenet.node.timer import Timer


class Listener:
    """A machine, see :class:`pulsenet.node.machine.Machine`, or the part of one: then its owner calls the rest.

    Args:
        trust: The run's rules; shared with the node's other machines, which act on what is learnt here.
        peer_id: This node's key.
        draw: Chance, for sources and jitter.
        index: What the store holds: a coordinator's own catalogue is there.
    """

    def __init__(self, trust: Trust, peer_id: PeerId, draw: Draw, index: StoreIndex) -> None:
        self._peer_id = peer_id
        self._draw = draw
        self.sources = Sources(draw)
        self.take_request_id = Courier().take_request_id
        self.news = News(trust, index, self._jitter, own=peer_id)
        self._records = RecordsFetcher(self.sources, self.take_request_id)
        self._store_trouble = StoreTrouble()
        self._timer = Timer()

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        self._timer.note(now)
        effects = [*self.take(event, now, now_ms), *self.save(now), *self.ask((), now)]
        return effects + self._timer.wake_next([self.next_wake(now)], now)

    def take(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in news, or an event about peers, our requests or the disk; anything else is ignored."""
        match event:
            case PeerConnected(peer_id) if peer_id != self._peer_id:
                if self.sources.connect(peer_id, sought=event.outbound):
                    self.news.ask_head(peer_id, now)
            case PeerLost(peer_id):
                self.sources.disconnect(peer_id)
                self._records.lose_peer(peer_id)
            case HeadSeen(record, source):
                if source is not None:
                    self.sources.note_heard(source)
                return self.news.take_head(record, source, now_ms)
            case ForkProofSeen(first, second):
                self.news.take_fork_proof(first, second)
            case StoreFailed(digest, reason):
                return self._store_trouble.note(reason, now, is_state=digest is None)
            case _:
                effects, arrived = self._records.handle(event, now)
                return effects if arrived is None else effects + self.news.take_records(arrived, now, now_ms)
        return []

    def save(self, now: float) -> list[Effect]:
        """Return the orders to store what changed, or what the disk refused and is due again."""
        if self._store_trouble.take_due(now):
            self.news.save_again()
        return self.news.save_changes()

    def ask(self, manifest_digests: Iterable[Digest], now: float) -> list[Effect]:
        """Ask for what is missing to know the run and these manifests."""
        self._records.set_needs(self.news.needs(manifest_digests, now))
        return self._records.pump(now)

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which there may be something to do."""
        times = (self._records.next_wake(now), self.news.next_wake(now), self._store_trouble.next_wake(now))
        return min((at for at in times if at is not None), default=None)

    def _jitter(self, seconds: float) -> float:
        return seconds * (0.75 + self._draw(1024) / 2048)
