"""The follower of a run: an inferencer keeps a mirror and an engine current, a seed keeps blobs.

One loop decides what is possible now: learn what is newest, plan the cheapest route, fetch all its hops, apply
them one at a time as each becomes whole, and swap the engine once at the end. Nothing waits for a
particular event to repeat, so a lost or late event costs time and never progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from pulsenet.chain.records import CatalogueEntry, Have, Kind, Manifest
from pulsenet.chain.retention import RetentionLimits
from pulsenet.chain.signing import decode_signed
from pulsenet.chain.trust import Trust
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import (
    ApplyHop,
    Count,
    DropPreparation,
    Effect,
    HandToEngine,
    Log,
    PrepareHop,
    Release,
)
from pulsenet.node.engine_swap import EngineSwap
from pulsenet.node.events import (
    BlobDamaged,
    EngineApplied,
    EngineFailed,
    Event,
    HaveSeen,
    HopApplied,
    HopFailed,
    PeerLost,
    RoomTaken,
)
from pulsenet.node.fetch import Fetcher, StoreIndex
from pulsenet.node.list_fetch import BlobWant
from pulsenet.node.listener import Listener
from pulsenet.node.machine import Draw
from pulsenet.node.mesh import Holdings
from pulsenet.node.report import Reporter, Standing
from pulsenet.node.route import Router
from pulsenet.node.shelf import Shelf
from pulsenet.node.timer import Timer


class Phase(StrEnum):
    """What the machine is doing about the newest version."""

    WAITING = "waiting"
    """No head is in force."""
    LEARNING = "learning"
    """A head is known; its catalogue or manifests are not all here."""
    FETCHING = "fetching"
    APPLYING = "applying"
    CURRENT = "current"
    """Everything of the newest version is here."""
    STALLED = "stalled"
    """The catalogue offers no way; the reason is reported."""
    FORKED = "forked"
    """The epoch is forked; what is held is kept, nothing more is taken."""


class Step(StrEnum):
    """What moves the machine from one phase to another."""

    HEAD_LOST = "head lost"
    HEAD_NEWER = "head newer"
    ROUTE_KNOWN = "route known"
    ROUTE_MISSING = "route missing"
    HOP_STARTED = "hop started"
    HOP_ENDED = "hop ended"
    TARGET_REACHED = "target reached"
    FORK_FOUND = "fork found"
    FORK_HEALED = "fork healed"


TRANSITIONS: dict[tuple[Phase, Step], Phase] = {
    (Phase.WAITING, Step.HEAD_NEWER): Phase.LEARNING,
    (Phase.WAITING, Step.FORK_FOUND): Phase.FORKED,
    (Phase.LEARNING, Step.HEAD_LOST): Phase.WAITING,
    (Phase.LEARNING, Step.ROUTE_KNOWN): Phase.FETCHING,
    (Phase.LEARNING, Step.ROUTE_MISSING): Phase.STALLED,
    (Phase.LEARNING, Step.TARGET_REACHED): Phase.CURRENT,
    (Phase.LEARNING, Step.FORK_FOUND): Phase.FORKED,
    (Phase.FETCHING, Step.HEAD_LOST): Phase.WAITING,
    (Phase.FETCHING, Step.HEAD_NEWER): Phase.LEARNING,
    (Phase.FETCHING, Step.ROUTE_MISSING): Phase.STALLED,
    (Phase.FETCHING, Step.HOP_STARTED): Phase.APPLYING,
    (Phase.FETCHING, Step.TARGET_REACHED): Phase.CURRENT,
    (Phase.FETCHING, Step.FORK_FOUND): Phase.FORKED,
    # A hop under way is always let finish: only afterwards is the newest news looked at.
    (Phase.APPLYING, Step.HOP_ENDED): Phase.LEARNING,
    (Phase.CURRENT, Step.HEAD_LOST): Phase.WAITING,
    (Phase.CURRENT, Step.HEAD_NEWER): Phase.LEARNING,
    (Phase.CURRENT, Step.FORK_FOUND): Phase.FORKED,
    (Phase.STALLED, Step.HEAD_LOST): Phase.WAITING,
    (Phase.STALLED, Step.HEAD_NEWER): Phase.LEARNING,
    (Phase.STALLED, Step.ROUTE_KNOWN): Phase.FETCHING,
    (Phase.STALLED, Step.FORK_FOUND): Phase.FORKED,
    (Phase.FORKED, Step.FORK_HEALED): Phase.LEARNING,
}
"""Every allowed move; a missing cell is a programming error."""


class Inferencer:
    """The machine of one inferencer or seed; see :class:`pulsenet.node.machine.Machine`.

    Args:
        trust: The run's rules; shared with the node's other machines.
        peer_id: This node's key.
        role: ``inferencer``, or ``seed``: stores what a publisher retains, newest first, and applies nothing.
        draw: Chance, for sources and jitter.
        index: What is durable here.
        held: Version and root of the mirror, checked; ``None`` if there is none.
        stored: Manifests whose blobs the store holds whole, by digest.
        retention_limits: How much to keep.
        have_of: Newest verified have record of a peer, as the mesh knows it.

    Raises:
        LocalProtocolError: ``role`` is neither.
    """

    def __init__(
        self,
        trust: Trust,
        peer_id: PeerId,
        draw: Draw,
        index: StoreIndex,
        *,
        role: str = "inferencer",
        held: tuple[Version, Digest] | None = None,
        stored: Mapping[Digest, Manifest] | None = None,
        retention_limits: RetentionLimits | None = None,
        have_of: Callable[[PeerId], Have | None] = lambda peer_id: None,
    ) -> None:
        if role not in ("inferencer", "seed"):
            raise LocalProtocolError(f"no machine follows a run as {role!r}")
        self._trust = trust
        self._role = role
        self._have_of = have_of
        self._listener = Listener(trust, peer_id, draw, index)
        self._news, self._sources = self._listener.news, self._listener.sources
        self._fetcher = Fetcher(self._sources, self._listener.take_request_id, index, peer_id)
        self._router = Router(*(held or (None, None)))
        self._engine = EngineSwap(self._sources.backoff_seconds)
        self._shelf = Shelf(role, stored or {}, retention_limits)
        self._reporter = Reporter(role)
        self._phase = Phase.WAITING
        self._applying: CatalogueEntry | None = None
        self._preparing: Digest | None = None
        """Manifest of the hop decoded while it arrives."""
        self._hop_retry_at = 0.0
        self._seen: tuple[object, ...] = ()
        self._wanted: tuple[Digest, ...] = ()
        self._wants_key: tuple[object, ...] = ()
        self._timer = Timer()

    # What the node's other parts ask

    @property
    def phase(self) -> Phase:
        """What the machine is doing."""
        return self._phase

    @property
    def mirror_version(self) -> Version | None:
        """Version the mirror holds, root checked."""
        return self._router.held

    @property
    def applied_version(self) -> Version | None:
        """Version the engine confirmed."""
        return self._engine.version

    @property
    def holdings(self) -> Holdings:
        """What this node can serve, for its have record."""
        return self._shelf.holdings

    @property
    def chunks_in_flight(self) -> int:
        """Chunks asked for or being stored: what bounds this machine's memory."""
        return self._fetcher.chunks_in_flight

    # Events

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        self._timer.note(now)
        effects = self._take(event, now, now_ms)
        effects += self._listener.save(now)
        effects += self._decide(now)
        effects += self._prepare()
        effects += self._hand_over(now)
        self._ask_haves(source.peer_id for source in self._sources)
        effects += self._fetcher.pump(now)
        effects += self._listener.ask(self._wanted, now)
        effects += self._reporter.report(self._standing(), self._fetcher.progress, now, now_ms)
        return effects + self._set_timer(now)

    def _take(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        effects = self._listener.take(event, now, now_ms)
        match event:
            case PeerLost(peer_id):
                effects += self._fetcher.lose_peer(peer_id, now)
            case HaveSeen(record):
                self._take_have(record)
            case HopApplied() | HopFailed():
                effects += self._take_hop(event, now)
            case EngineApplied() | EngineFailed():
                effects += self._engine.handle(event, now)
            case BlobDamaged(blob_id):
                self._shelf.lose(blob_id)
                self._fetcher.look_again(blob_id)
                self._seen = ()
            case RoomTaken(size_bytes):
                self._seen = () if self._shelf.note_taken(size_bytes) else self._seen
            case _:
                effects += self._fetcher.handle(event, now)
        return effects

    def _take_have(self, record: bytes) -> None:
        """Read what the mesh believes of its signer: it judged the same bytes before, and counted them."""
        try:
            signers = decode_signed(record).signers
        except RemoteProtocolError:
            return
        self._ask_haves(signers)

    def _take_hop(self, event: HopApplied | HopFailed, now: float) -> list[Effect]:
        entry = self._applying
        if entry is None or event.version != entry.version:
            return []
        self._applying = None
        # Used, or dropped by the mirror as it moved.
        self._preparing = None
        self._move(Step.HOP_ENDED)
        if isinstance(event, HopApplied) and event.root == entry.root:
            self._router.note_applied(entry)
            self._shelf.add(entry.manifest_digest, self._news.manifest(entry.manifest_digest))
            # Not only at the newest version: a slow node may never get there.
            return self._tidy()
        # Without the signed root nothing was reached, whatever the shell says.
        reason = event.reason if isinstance(event, HopFailed) else "root_mismatch"
        mirror = event.mirror if isinstance(event, HopFailed) else None
        count = self._router.note_failed(entry, reason, mirror)
        manifest = self._news.manifest(entry.manifest_digest)
        assert manifest is not None, "nothing else is wanted while a hop is applied"
        # Bytes that rotted on the disk are fetched again; where nothing is lacking this changes nothing.
        self._fetcher.look_again(manifest.blob_id)
        self._hop_retry_at = now + self._sources.backoff_seconds(count)
        text = f"the {entry.kind} to version {entry.version} could not be applied ({reason}); the mirror holds {mirror}"
        return [Count("rejected", reason), Log("warning", text)]

    # Decisions

    def _decide(self, now: float) -> list[Effect]:
        if self._phase is Phase.APPLYING:
            return []
        if self._trust.fork is not None:
            if self._phase is not Phase.FORKED:
                self._move(Step.FORK_FOUND)
            return self._want(())
        if self._phase is Phase.FORKED:
            self._move(Step.FORK_HEALED)
        head = self._news.head
        if head is None:
            if self._phase is not Phase.WAITING:
                self._move(Step.HEAD_LOST)
            return []
        seen = (head.version, head.catalogue_digest)
        if self._phase is Phase.WAITING or seen != self._seen:
            self._seen = seen
            if self._phase is not Phase.LEARNING:
                self._move(Step.HEAD_NEWER)
        if self._role == "seed":
            return self._follow_as_seed()
        return self._follow(now)

    def _follow(self, now: float) -> list[Effect]:
        head, catalogue = self._news.head, self._news.catalogue
        assert head is not None
        effects: list[Effect] = []
        if catalogue is not None:
            self._note_unavailable(now)
            refused = frozenset(
                entry.manifest_digest for entry in catalogue.entries if self._is_refused(entry.manifest_digest)
            )
            if self._router.plan(head, catalogue, refused, now):
                self._router.forget_failures(catalogue)
                effects += self._want(self._router.route)
            if self._router.route:
                self._engine.set_goal(head.version)
        if self._router.is_at(head):
            if self._phase is not Phase.CURRENT:
                self._move(Step.TARGET_REACHED)
                effects += self._tidy()
            lost = self._shelf.choose_lost(catalogue, self._news.manifest, self._fetcher.is_whole)
            return effects + (self._want(lost) if lost else [])
        hop = self._router.next_hop
        if hop is None:
            if catalogue is not None and self._phase is not Phase.STALLED:
                self._move(Step.ROUTE_MISSING)
                effects.append(
                    Log("warning", f"no way from {self._router.held} to {head.version}: {self._router.reason}")
                )
            return effects
        return effects + self._go_along(hop, now)

    def _go_along(self, hop: CatalogueEntry, now: float) -> list[Effect]:
        """Open the blobs of every manifest that is here, and apply the next hop if its blob is whole."""
        effects = self._want(self._router.route)
        manifest = self._news.manifest(hop.manifest_digest)
        if manifest is None:
            return effects
        if self._phase in (Phase.LEARNING, Phase.STALLED):
            self._move(Step.ROUTE_KNOWN)
        if now >= self._hop_retry_at and self._fetcher.is_whole(manifest.blob_id):
            self._applying = hop
            self._move(Step.HOP_STARTED)
            effects.append(ApplyHop(manifest, hop.manifest_digest))
        return effects

    def _prepare(self) -> list[Effect]:
        """Have the next patch decoded while it arrives, so that only writing it is left once it is whole."""
        if self._phase is Phase.APPLYING:
            return []
        hop = self._router.next_hop if self._phase is Phase.FETCHING and self._role == "inferencer" else None
        manifest = None if hop is None else self._news.manifest(hop.manifest_digest)
        if hop is not None and manifest is not None and self._starts_here(manifest):
            if self._preparing == hop.manifest_digest:
                return []
            if self._fetcher.is_arriving(manifest.blob_id):
                self._preparing = hop.manifest_digest
                return [PrepareHop(manifest)]
        if self._preparing is None:
            return []
        self._preparing = None
        return [DropPreparation()]

    def _starts_here(self, manifest: Manifest) -> bool:
        held = (self._router.held, self._router.held_root)
        return manifest.kind is not Kind.ANCHOR and (manifest.base_version, manifest.base_root) == held

    def _follow_as_seed(self) -> list[Effect]:
        catalogue = self._news.catalogue
        if catalogue is None:
            return []
        wanted = self._shelf.choose_for_seed(catalogue)
        effects = self._want(wanted)
        for entry in wanted:
            manifest = self._news.manifest(entry.manifest_digest)
            if manifest is not None and self._fetcher.is_whole(manifest.blob_id):
                self._shelf.add(entry.manifest_digest, manifest)
        whole = all(
            self._shelf.holds(entry.manifest_digest) or self._is_refused(entry.manifest_digest) for entry in wanted
        )
        if self._phase is Phase.LEARNING:
            self._move(Step.ROUTE_KNOWN)
            effects += self._tidy(catalogue.entries)
        if whole and self._phase is Phase.FETCHING:
            self._move(Step.TARGET_REACHED)
        return effects

    def _want(self, entries: Sequence[CatalogueEntry]) -> list[Effect]:
        """Tell the fetchers what is wanted: manifests first, and the blob of each manifest that is here."""
        digests = tuple(entry.manifest_digest for entry in entries)
        key = (digests, self._news.manifest_count, len(self._shelf))
        if key == self._wants_key:
            return []
        self._wanted = digests
        self._news.keep_manifests([*self._wanted, *self._shelf.digests])
        wants = []
        for digest in self._wanted:
            manifest = self._news.manifest(digest)
            # A seed is done with what it shelved; a hop must be whole at the moment it is applied.
            if manifest is not None and not (self._role == "seed" and self._shelf.holds(digest)):
                self._shelf.begin(digest, manifest)
                wants.append(BlobWant(manifest, self._news.signer(digest)))
        # Opening known manifests above may have read some from the store.
        self._wants_key = (digests, self._news.manifest_count, len(self._shelf))
        return self._fetcher.set_wants(wants)

    def _note_unavailable(self, now: float) -> None:
        for entry in self._router.route:
            manifest = self._news.manifest(entry.manifest_digest)
            if manifest is not None and self._fetcher.is_unavailable(manifest.blob_id, now):
                self._router.note_unavailable(entry, now)

    def _is_refused(self, digest: Digest) -> bool:
        manifest = self._news.known_manifest(digest)
        if manifest is not None and self._fetcher.refusal_of(manifest.blob_id):
            # The fetcher forgets a blob with the route that wanted it; the refusal must outlive both.
            self._news.refuse(digest)
        return self._news.is_refused(digest)

    def _tidy(self, entries: Iterable[CatalogueEntry] = ()) -> list[Effect]:
        blob_ids, record_digests = self._shelf.release(self._router.held, entries, self._wanted)
        # What goes from the disk is asked for, and stored, again if it is ever wanted again.
        self._wanted = tuple(digest for digest in self._wanted if digest not in record_digests)
        self._news.keep_manifests([*self._wanted, *self._shelf.digests])
        return [Release(blob_ids, record_digests)] if blob_ids or record_digests else []

    def _hand_over(self, now: float) -> list[Effect]:
        if self._role == "seed" or self._phase is Phase.FORKED or self._router.held is None:
            return []
        is_done = self._phase is Phase.CURRENT
        version = self._engine.due(self._router.held, is_done=is_done, now=now)
        return [] if version is None else [HandToEngine(version)]

    # Upkeep

    def _ask_haves(self, peer_ids: Iterable[PeerId]) -> None:
        for peer_id in peer_ids:
            have = self._have_of(peer_id)
            if have is not None:
                self._sources.note_have(peer_id, have)

    def _standing(self) -> Standing:
        return Standing.under(
            self._trust,
            phase=str(self._phase),
            reason=self._router.reason if self._phase is Phase.STALLED else "",
            applied=self._shelf.newest_version if self._role == "seed" else self._engine.version,
            mirror=self._router.held,
        )

    def _set_timer(self, now: float) -> list[Effect]:
        wakes = [
            self._listener.next_wake(now),
            self._fetcher.next_wake(now),
            self._engine.next_wake(now),
            self._reporter.next_wake(now),
            self._hop_retry_at,
        ]
        return self._timer.wake_next(wakes, now)

    def _move(self, step: Step) -> None:
        assert (self._phase, step) in TRANSITIONS, (self._phase, step)
        self._phase = TRANSITIONS[self._phase, step]
