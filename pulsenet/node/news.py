"""Keeping up with a run: descriptors, epochs, heads, catalogues and manifests, fetched, judged and stored.

Every record passes :class:`Trust`. What is missing is named as a need and asked of peers that may know it,
first of the one who made us aware of it. What changed in trust is made durable before anything builds on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pulsenet import limits
from pulsenet.chain.records import Catalogue, Head, Manifest, SignedRecord
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.trust import BASE_VERSION, Trust
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.blame import OVERTAKEN_CODES, UNRIPE_CODES, Refused, blame, is_offence
from pulsenet.node.effects import Count, Effect, Log, Release, SaveState, StoreRecord, StrikePeer
from pulsenet.node.fetch import StoreIndex
from pulsenet.node.published import HEAD_KEY
from pulsenet.node.records_fetch import Need, RecordsArrived
from pulsenet.wire.messages import GetDescriptors, GetEpochs, GetHead, GetRecords
from pulsenet.wire.schema import decode_value

TRUST_KEY = "trust"
"""Name of the saved trust among the node's durable values."""

STALE_POLL_SECONDS = 5.0
"""While no head is in force, one peer is asked for its head about this often."""

STASH_MAX = 4
"""Heads kept while the descriptors or epochs they build on are fetched; the oldest is dropped beyond."""

STASH_TRIES_MAX = 8
"""Answers that brought a stashed head no nearer before it is dropped."""

NEWEST_KEPT = 8
"""Heads and catalogues kept for peers that still hold an older head; the oldest is let go beyond."""

LAST_HEAD_SOURCES_MIN = 2
LAST_HEAD_WAIT_SECONDS = 60.0
"""Peers whose newest head is waited for, and for how long, before one whose time is over is believed (SPEC 6.3)."""

REFUSED_MAX = 1_024
"""Manifests remembered as false; the oldest is forgotten beyond, and would be judged again."""

BUILDS_ON_DESCRIPTOR = "revision-unknown"
BUILDS_ON_EPOCH = "epoch"
"""Refusals that a fetched record may lift."""


@dataclass(slots=True)
class _Stashed:
    record: bytes
    source: PeerId | None
    lacks: str
    tries: int = 0


class News:
    """The machine's view of the run. Pure; the owner fetches what :meth:`needs` names.

    Args:
        trust: The run's rules; may be shared with other machines, which may change it too.
        index: Records held here are read before any peer is asked.
        draw_seconds: Returns a jittered wait around the given one.
        own: This node's key, if it publishes: its own catalogues are not let go here.
    """

    def __init__(
        self,
        trust: Trust,
        index: StoreIndex,
        draw_seconds: Callable[[float], float],
        *,
        own: PeerId | None = None,
    ) -> None:
        self._trust = trust
        self._index = index
        self._draw_seconds = draw_seconds
        self._stash: dict[bytes, _Stashed] = {}
        self._manifests: dict[Digest, tuple[Manifest, PeerId]] = {}
        self.manifest_count = 0
        """Manifests ever taken in; changes whenever one became known."""
        self._looked_up: set[Digest] = set()
        self._refused: dict[Digest, None] = {}
        self._head_due = 0.0
        self._head_hint: PeerId | None = None
        self._teller: PeerId | None = None
        """Who told us the newest head: likely to hold what it names."""
        self._told = BASE_VERSION
        """Version of that head; the mesh may have accepted it before it was told here."""
        self._last_heads: dict[PeerId, SignedRecord] = {}
        """Heads that were valid once, by the peer that gave it as its newest."""
        self._last_heads_since = 0.0
        self._own = own
        self._newest: dict[Digest, None] = {}
        """The newest heads and catalogues, oldest first; own catalogues are kept by whoever made them."""
        self._saved = self._durable_view()
        self._fork_told = trust.fork is not None

    # What is known

    @property
    def head(self) -> Head | None:
        """The newest head, if it is in force and its epoch is not forked."""
        if self._trust.fork is not None or not self._trust.head_in_force:
            return None
        return self._trust.head

    @property
    def catalogue(self) -> Catalogue | None:
        """The catalogue the newest head names, once it is here."""
        return self._trust.catalogue if self._trust.catalogue_is_current else None

    def manifest(self, digest: Digest) -> Manifest | None:
        """Return a verified manifest, from memory or from the store."""
        known = self._manifests.get(digest)
        if known is None and digest not in self._looked_up and digest not in self._refused:
            self._looked_up.add(digest)
            stored = self._index.record(digest)
            if stored is not None:
                self._take_manifest(stored, digest)
                known = self._manifests.get(digest)
        return None if known is None else known[0]

    def known_manifest(self, digest: Digest) -> Manifest | None:
        """Return a verified manifest if it is in memory."""
        known = self._manifests.get(digest)
        return None if known is None else known[0]

    def signer(self, digest: Digest) -> PeerId | None:
        """Return who signed a known manifest."""
        known = self._manifests.get(digest)
        return None if known is None else known[1]

    def is_refused(self, digest: Digest) -> bool:
        """Say whether the manifest is known to break a rule, so that no route may use it."""
        return digest in self._refused

    def refuse(self, digest: Digest) -> None:
        """Use this manifest in no route: it, or the blob it names, is its signer's fault."""
        self._refused[digest] = None
        if len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def keep_manifests(self, digests: Iterable[Digest]) -> None:
        """Forget every manifest but these; the store still has them."""
        kept = set(digests)
        self._manifests = {digest: known for digest, known in self._manifests.items() if digest in kept}
        self._looked_up &= kept

    # What is missing

    def ask_head(self, peer_id: PeerId, now: float) -> None:
        """A peer can be reached: ask it for its head soon."""
        self._head_due = now
        self._head_hint = peer_id

    def needs(self, manifest_digests: Iterable[Digest], now: float) -> dict[Need, PeerId | None]:
        """Return what must be fetched to know the run and these manifests, and whom to ask first."""
        needs: dict[Need, PeerId | None] = {}
        if now >= self._head_due:
            needs[GetHead()] = self._head_hint
        lacking = {stashed.lacks: stashed.source for stashed in self._stash.values()}
        if self._trust.descriptor is None:
            lacking.setdefault(BUILDS_ON_DESCRIPTOR, None)
        if BUILDS_ON_DESCRIPTOR in lacking:
            needs[GetDescriptors(self._trust.next_revision)] = lacking[BUILDS_ON_DESCRIPTOR]
        if BUILDS_ON_EPOCH in lacking:
            needs[GetEpochs(max(self._trust.epoch, 1))] = lacking[BUILDS_ON_EPOCH]
        head = self.head
        if head is not None and self.catalogue is None:
            needs[GetRecords((head.catalogue_digest,))] = self._teller
        missing = [digest for digest in manifest_digests if digest not in self._refused and not self.manifest(digest)]
        if missing:
            needs[GetRecords(tuple(missing[: limits.RECORDS_PER_REQUEST_MAX]))] = self._teller
        return needs

    def next_wake(self, now: float) -> float | None:
        """Return when the head is to be asked for again."""
        return self._head_due if self._head_due > now else None

    # What arrives

    def take_head(self, record: bytes, source: PeerId | None, now_ms: int, *, is_ours: bool = False) -> list[Effect]:
        """Judge an encoded head.

        Args:
            is_ours: It answers our own request, so its refusal is counted here; the mesh counts all others.
        """
        try:
            signed = decode_signed(record)
            head = self._trust.accept_head(signed, now_ms)
            if self._teller is None or head.version > self._told:
                self._told, self._teller = head.version, source
            return []
        except (RemoteProtocolError, TrustError) as error:
            lacks = self._find_lacking(record, error)
            if lacks:
                self._stash_head(record, source, lacks)
                return []
            # Asked for its newest head, a peer may well know only an older one: that is no news, not an offence.
            return blame(error, source) if is_ours and error.code not in OVERTAKEN_CODES else []

    def _take_last_head(self, record: bytes, source: PeerId, now: float, now_ms: int) -> list[Effect]:
        """While nobody knows a valid head: believe the newest of those that several peers hold, and call it stale."""
        if not self._trust.stale(now_ms):
            self._last_heads.clear()
            return []
        try:
            signed = decode_signed(record)
            head = decode_value(Head, signed.payload)
        except RemoteProtocolError:
            return []
        known = self._trust.head
        if known is not None and self._trust.head_in_force and head.version <= known.version:
            return []
        if not self._last_heads:
            self._last_heads_since = now
        self._last_heads[source] = signed
        is_alone = len(self._last_heads) < LAST_HEAD_SOURCES_MIN
        if is_alone and now < self._last_heads_since + LAST_HEAD_WAIT_SECONDS:
            return []
        return self._choose_last_head(now_ms)

    def _choose_last_head(self, now_ms: int) -> list[Effect]:
        heard, self._last_heads = self._last_heads, {}
        newest_first = sorted(heard.items(), key=lambda item: decode_value(Head, item[1].payload).version, reverse=True)
        for source, signed in newest_first:
            try:
                head = self._trust.accept_last_head(signed, now_ms)
            except (RemoteProtocolError, TrustError):
                continue  # counted when it came; the next may still be believed
            self._told, self._teller = head.version, source
            text = (
                f"no peer knows a head that is still valid: going on with version {head.version}, the newest that "
                f"{len(heard)} of them held; stale until the publisher is heard"
            )
            return [Log("warning", text)]
        return []

    def take_fork_proof(self, first: bytes, second: bytes) -> None:
        """Judge a fork proof; the mesh counts what is refused here."""
        with contextlib.suppress(RemoteProtocolError, TrustError):
            self._trust.accept_fork_proof(decode_signed(first), decode_signed(second))

    def take_records(self, arrived: RecordsArrived, now: float, now_ms: int) -> list[Effect]:
        """Judge what a peer answered to one of our needs."""
        match arrived.need:
            case GetHead():
                effects: list[Effect] = []
                for record in arrived.records[:1]:
                    effects += self.take_head(record, arrived.peer_id, now_ms, is_ours=True)
                    effects += self._take_last_head(record, arrived.peer_id, now, now_ms)
                seconds = STALE_POLL_SECONDS if self._trust.stale(now_ms) else limits.HEAD_RESIGN_SECONDS
                self._head_due = now + self._draw_seconds(seconds)
                self._head_hint = None
                return effects
            case GetDescriptors() | GetEpochs():
                return self._take_foundations(arrived, now_ms)
            case _:
                return self._take_named(arrived, frozenset(arrived.need.digests))

    def save_changes(self) -> list[Effect]:
        """Return the effects that make what changed in trust durable, and tell of a fork once."""
        self._read_catalogue()
        effects: list[Effect] = []
        view = self._durable_view()
        if view != self._saved:
            effects += [StoreRecord(record) for record in view if record is not None and record not in self._saved]
            effects.append(SaveState(TRUST_KEY, self._trust.save()))
            if self._trust.head_record is not None and self._trust.head_record not in self._saved:
                effects.append(SaveState(HEAD_KEY, encode_signed(self._trust.head_record)))
            effects += self._let_go()
            self._saved = view
        fork = self._trust.fork
        if fork is not None and not self._fork_told:
            text = f"version {fork.version} was signed twice with different roots; nothing more of this epoch is taken"
            effects += [Count("rejected", "fork"), Log("error", text)]
        self._fork_told = fork is not None
        return effects

    def _read_catalogue(self) -> None:
        """Take the newest head's catalogue from the own store, if it is there and not known."""
        head = self.head
        stored = None if head is None or self.catalogue is not None else self._index.record(head.catalogue_digest)
        if stored is not None:
            with contextlib.suppress(RemoteProtocolError, TrustError):  # damaged: peers are asked for it
                self._trust.accept_catalogue(decode_signed(stored))

    def save_again(self) -> None:
        """Hold nothing for durable: the disk refused what :meth:`save_changes` returned."""
        self._saved = ()

    def _let_go(self) -> list[Effect]:
        """Release the heads and catalogues that were newest long ago: a head is signed every 40 s."""
        for record in (self._trust.head_record, self._trust.catalogue_record):
            if record is None or (record.type == Catalogue.TYPE and record.signers[0] == self._own):
                continue
            digest = record_digest(record)
            self._newest.pop(digest, None)
            self._newest[digest] = None
        gone = sorted(list(self._newest)[:-NEWEST_KEPT])
        for digest in gone:
            del self._newest[digest]
        return [Release((), tuple(gone))] if gone else []

    # Judging

    def _take_foundations(self, arrived: RecordsArrived, now_ms: int) -> list[Effect]:
        """Take descriptors or epochs in order, then try the heads that waited for them."""
        effects: list[Effect] = []
        for record in arrived.records:
            try:
                signed = decode_signed(record)
                if isinstance(arrived.need, GetDescriptors):
                    self._trust.accept_descriptor(signed)
                else:
                    self._trust.accept_epoch(signed)
            except (RemoteProtocolError, TrustError) as error:
                if not (isinstance(error, TrustError) and error.code == BUILDS_ON_DESCRIPTOR):
                    effects += blame(error, arrived.peer_id)
                break
        stashed_heads, self._stash = self._stash, {}
        for stashed in stashed_heads.values():
            effects += self.take_head(stashed.record, stashed.source, now_ms)
            again = self._stash.get(stashed.record)
            if again is not None:
                again.tries = stashed.tries + 1
                if again.tries >= STASH_TRIES_MAX:
                    del self._stash[stashed.record]
        return effects

    def _take_named(self, arrived: RecordsArrived, digests: frozenset[Digest]) -> list[Effect]:
        effects: list[Effect] = []
        for record in arrived.records:
            try:
                signed = decode_signed(record)
            except RemoteProtocolError as error:
                return [*effects, *blame(error, arrived.peer_id)]
            digest = record_digest(signed)
            if digest not in digests:
                return [*effects, StrikePeer(arrived.peer_id, "unexpected"), Count("rejected", "unexpected")]
            if signed.type == Catalogue.TYPE:
                effects += self._take_catalogue(signed, digest, arrived.peer_id)
                continue
            error_or_none = self._take_manifest(record, digest)
            if error_or_none is not None:
                effects += blame(error_or_none, arrived.peer_id)
            else:
                effects.append(StoreRecord(signed))
        return effects

    def _take_catalogue(self, signed: SignedRecord, digest: Digest, source: PeerId) -> list[Effect]:
        head = self.head
        if head is None or digest != head.catalogue_digest:
            # It was asked for, and a newer head overtook it: nobody's fault.
            return []
        try:
            self._trust.accept_catalogue(signed)
        except (RemoteProtocolError, TrustError) as error:
            return blame(error, source)
        return []

    def _take_manifest(self, record: bytes, digest: Digest) -> Refused | None:
        """Take a manifest whose payload has ``digest``; a false one of its signer is never asked for again."""
        try:
            signed = decode_signed(record)
            if record_digest(signed) != digest:
                return RemoteProtocolError("unexpected", digest.hex())
            manifest = self._trust.accept_manifest(signed)
        except (RemoteProtocolError, TrustError) as error:
            # A catalogue that is still to come may vouch for a key that signs no more, and then it is asked for again.
            if not is_offence(error) and error.code not in (*UNRIPE_CODES, "fork", "untrusted"):
                self.refuse(digest)
            return error
        self._manifests[digest] = (manifest, signed.signers[0])
        self.manifest_count += 1
        return None

    def _find_lacking(self, record: bytes, error: Refused) -> str:
        """Return what must be fetched before this head can be judged, or the empty string."""
        if not isinstance(error, TrustError):
            return ""
        if error.code in UNRIPE_CODES:
            return error.code
        if error.code == "untrusted" and self._names_newer_revision(record):
            # Its signer may have been admitted by a revision we have not seen.
            return BUILDS_ON_DESCRIPTOR
        return ""

    def _names_newer_revision(self, record: bytes) -> bool:
        try:
            head = decode_value(Head, decode_signed(record).payload)
        except RemoteProtocolError:
            return False
        return head.revision >= self._trust.next_revision

    def _stash_head(self, record: bytes, source: PeerId | None, lacks: str) -> None:
        self._stash.pop(record, None)
        self._stash[record] = _Stashed(record, source, lacks)
        if len(self._stash) > STASH_MAX:
            del self._stash[next(iter(self._stash))]

    def _durable_view(self) -> tuple[SignedRecord | None, ...]:
        trust = self._trust
        fork = trust.fork
        proof = () if fork is None else (fork.first, fork.second)
        return (trust.descriptor_record, *trust.epoch_records, trust.head_record, trust.catalogue_record, *proof)
