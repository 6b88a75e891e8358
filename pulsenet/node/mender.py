"""Getting back what a publisher's disk lost of the versions it offers.

Followers plan a route and fetch whatever it lacks; a publisher plans none. This machine fetches from others what is
gone, and says so to the trainer's machine where nobody has it, which then makes an anchor of what it has in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pulsenet.chain.records import Have, Manifest
from pulsenet.chain.signing import decode_signed
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId, short
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Effect, Log, ShowToMachines
from pulsenet.node.events import BlobDamaged, BlobLost, ChunkStored, Event, PeerConnected, PeerLost
from pulsenet.node.fetch import Fetcher, StoreIndex
from pulsenet.node.list_fetch import BlobWant
from pulsenet.node.machine import Draw
from pulsenet.node.published import PublishedState
from pulsenet.node.sources import Sources
from pulsenet.node.timer import Timer
from pulsenet.wire.schema import decode_value

MEND_SECONDS = 60.0
"""How long peers are asked without a chunk of it coming before a blob counts as lost; they are asked on."""


class Mender:
    """The machine of a publisher that mends its store; see :class:`pulsenet.node.machine.Machine`.

    Args:
        peer_id: This node's key.
        draw: Chance, for sources and jitter.
        index: What is durable here.
        find_state: Returns what is committed.
        have_of: Newest verified have record of a peer, as the mesh knows it.
        lacking: Blobs that were not whole when the node started.
    """

    def __init__(
        self,
        peer_id: PeerId,
        draw: Draw,
        index: StoreIndex,
        *,
        find_state: Callable[[], PublishedState | None],
        have_of: Callable[[PeerId], Have | None],
        lacking: Iterable[Digest] = (),
    ) -> None:
        self._peer_id = peer_id
        self._index = index
        self._find_state = find_state
        self._have_of = have_of
        self._sources = Sources(draw)
        take_request_id = Courier().take_request_id
        self._fetcher = Fetcher(self._sources, take_request_id, index)
        self._lacking = dict.fromkeys(lacking, float("-inf"))
        """Blobs to mend, and since when nothing came of them."""
        self._is_lost: set[Digest] = set()
        self._timer = Timer()

    @property
    def lacking(self) -> tuple[Digest, ...]:
        """Offered blobs that are not whole here."""
        return tuple(self._lacking)

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        self._timer.note(now)
        effects = self._take(event, now)
        if self._lacking:
            effects += self._mend(now)
        return effects + self._set_timer(now)

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PeerConnected(peer_id):
                if peer_id != self._peer_id:
                    self._sources.connect(peer_id, sought=event.outbound)
                return []
            case PeerLost(peer_id):
                self._sources.disconnect(peer_id)
                return self._fetcher.lose_peer(peer_id, now)
            case BlobDamaged(blob_id):
                self._lacking[blob_id] = now
                self._is_lost.discard(blob_id)
                self._fetcher.look_again(blob_id)
                return []
            case ChunkStored():
                self._lacking = dict.fromkeys(self._lacking, now)
        return self._fetcher.handle(event, now)

    def _mend(self, now: float) -> list[Effect]:
        offered = self._read_offered()
        # What is not offered any more need not come back; others keep what they still want of it.
        self._lacking = {
            blob_id: now if since == float("-inf") else since
            for blob_id, since in self._lacking.items()
            if blob_id in offered
        }
        effects = self._fetcher.set_wants([BlobWant(offered[blob_id], None) for blob_id in self._lacking])
        for blob_id in [blob_id for blob_id in self._lacking if self._fetcher.is_whole(blob_id)]:
            del self._lacking[blob_id]
            effects.append(Log("info", f"blob {short(blob_id)} of {_name(offered[blob_id])} is whole again"))
        self._is_lost &= self._lacking.keys()
        for source in self._sources:
            have = self._have_of(source.peer_id)
            if have is not None:
                self._sources.note_have(source.peer_id, have)
        return effects + self._fetcher.pump(now) + self._give_up(offered, now)

    def _read_offered(self) -> dict[Digest, Manifest]:
        """Return the manifests of the lacking blobs that are still offered."""
        state = self._find_state()
        found: dict[Digest, Manifest] = {}
        for item in () if state is None else state.retained:
            encoded = self._index.record(item.entry.manifest_digest) if item.blob_id in self._lacking else None
            if encoded is not None:
                try:
                    found[item.blob_id] = decode_value(Manifest, decode_signed(encoded).payload)
                except RemoteProtocolError:
                    continue  # the record is damaged too; the next anchor leaves both behind
        return found

    def _give_up(self, offered: dict[Digest, Manifest], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for blob_id, since in self._lacking.items():
            if blob_id not in self._is_lost and now >= since + MEND_SECONDS:
                self._is_lost.add(blob_id)
                text = (
                    f"the disk damaged blob {short(blob_id)} of {_name(offered[blob_id])}, and no peer that is "
                    "reached has it: readers that need it take an anchor instead. Look at the disk "
                    "('pulsenet doctor'); starting a seed or reader that still has it mends this"
                )
                effects += [Log("error", text), ShowToMachines(BlobLost(blob_id))]
        return effects

    def _set_timer(self, now: float) -> list[Effect]:
        waits = [since + MEND_SECONDS for blob_id, since in self._lacking.items() if blob_id not in self._is_lost]
        wakes = [*waits, self._fetcher.next_wake(now)] if self._lacking else []
        return self._timer.wake_next(wakes, now)


def _name(manifest: Manifest) -> str:
    return f"the {manifest.kind} to version {manifest.version}"
