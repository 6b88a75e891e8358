"""The publisher: from an offered snapshot to an announced version, as a machine.

One job is in work at a time, so the shell never holds more than the baseline and one snapshot. The order
is always: encode, commit, announce, then the extras of that version (skip patches, an anchor), each
committed and announced the same way. The baseline moves at a commit and at nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pulsenet import limits
from pulsenet.chain.records import Descriptor, Kind, Manifest, SignedRecord
from pulsenet.chain.signing import Sign, Verify, decode_signed, encode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.codec import anchor
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import (
    AnnounceHead,
    Commit,
    Count,
    DropSnapshot,
    Effect,
    EncodeSkip,
    EncodeSnapshot,
    Log,
    RefuseSnapshot,
    Release,
    SendRequest,
    SetTimer,
    StoreAnchor,
)
from pulsenet.node.events import (
    AnchorStored,
    Committed,
    EncodeFailed,
    Event,
    ExtraFailed,
    HeadSeen,
    PatchEncoded,
    PeerConnected,
    ReplyReceived,
    SkipEncoded,
    SnapshotOffered,
    StoreFailed,
)
from pulsenet.node.machine import Draw
from pulsenet.node.published import (
    HEAD_KEY,
    STATE_KEY,
    PublishedState,
    add_extra,
    advance,
    describe_extra,
    describe_snapshot,
    find_extras_due,
    find_released,
    make_catalogue,
    summarise,
    with_catalogue,
)
from pulsenet.node.scribe import Scribe
from pulsenet.node.succession import Standing, Succession
from pulsenet.node.trainer_phase import TRANSITIONS, Phase
from pulsenet.node.trainer_report import make_report
from pulsenet.wire.messages import GetHead, HeadReply

LEARN_SECONDS_DEFAULT = 3.0
"""How long a starting publisher listens for the newest head before it trusts its own state."""

RESIGN_JITTER_MS = 4_000
"""A head is signed again up to this much early, so that nodes started together do not stay in step."""

ENTRIES_PER_VERSION_MAX = len(limits.SKIP_LADDER) + 2
"""Catalogue entries one version may add: its patch, its skips and its anchor."""


@dataclass(frozen=True, slots=True)
class _Encoding:
    """The snapshot being encoded."""

    snapshot: SnapshotOffered
    kind: Kind


@dataclass(frozen=True, slots=True)
class _Pending:
    """What becomes true with the commit under way."""

    generation: int | None
    manifest: Manifest
    state: PublishedState
    head: SignedRecord


class Trainer:
    """The publisher's machine.

    Args:
        trust: The run's rules; shared with the node's other machines.
        peer_id: This node's key; it signs manifests, catalogues and heads.
        sign: Signs with that key.
        draw: Chance, for jitter.
        verify: Checks an Ed25519 signature.
        state: What ``Commit`` last stored under ``STATE_KEY``, or ``None`` on a first start.
        learn_seconds: How long to listen for the newest head before work starts; 0 trusts the own state.
        authority_keys: Further authority keys held here; they are used to open an epoch and for nothing else.

    Raises:
        StorageError: ``state`` is damaged.
    """

    def __init__(
        self,
        trust: Trust,
        peer_id: PeerId,
        sign: Sign,
        draw: Draw,
        *,
        verify: Verify,
        state: bytes | None = None,
        learn_seconds: float = LEARN_SECONDS_DEFAULT,
        authority_keys: Mapping[PeerId, Sign] | None = None,
    ) -> None:
        self._trust = trust
        self._peer_id = peer_id
        self._draw = draw
        self._scribe = Scribe(trust, peer_id, sign, authority_keys)
        self._state = None if state is None else PublishedState.restore(state)
        self._succession = Succession(trust, verify, self._scribe)
        self._phase = Phase.LEARNING
        self._waiting: SnapshotOffered | None = None
        self._encoding: _Encoding | None = None
        self._pending: _Pending | None = None
        self._extra: EncodeSkip | StoreAnchor | None = None
        self._extras_due: deque[EncodeSkip | StoreAnchor] = deque()
        self._anchor_due = False
        self._last_patch: Manifest | None = None
        self._is_report_due = True
        self._learn_seconds = learn_seconds
        self._learn_until: float | None = None
        self._started_ms = 0
        self._resign_at: float | None = None
        self._encode_at_min = float("-inf")
        self._timer_at: float | None = None
        self._request_count = 0

    @property
    def phase(self) -> Phase:
        """What the publisher is doing."""
        return self._phase

    @property
    def state(self) -> PublishedState | None:
        """What is committed; ``None`` before the first publish."""
        return self._state

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        if self._learn_until is None:
            self._learn_until = now + self._learn_seconds
            self._started_ms = now_ms
        if self._timer_at is not None and now >= self._timer_at:
            self._timer_at = None
        effects: list[Effect] = []
        if (self._phase, type(event)) in TRANSITIONS:
            effects += self._take_answer(event, now, now_ms)
        elif isinstance(event, SnapshotOffered):
            effects += self._take_snapshot(event)
        elif isinstance(event, HeadSeen):
            effects += self._take_head(event.record)
        elif isinstance(event, ReplyReceived) and isinstance(event.reply, HeadReply) and event.reply.head is not None:
            effects += self._take_head(event.reply.head)
        elif isinstance(event, PeerConnected):
            self._request_count += 1
            effects.append(SendRequest(self._request_count, event.peer_id, GetHead(), limits.REQUEST_OPEN_SECONDS_MAX))
        return effects + self._go_on(now, now_ms)

    # News

    def _take_snapshot(self, snapshot: SnapshotOffered) -> list[Effect]:
        reason = self._find_refusal(snapshot)
        if reason:
            return self._refuse(snapshot, reason)
        replaced = self._waiting
        self._waiting = snapshot
        return [] if replaced is None else [DropSnapshot(replaced.generation)]

    def _take_head(self, record: bytes) -> list[Effect]:
        try:
            head = self._succession.read(record)
        except (RemoteProtocolError, TrustError):
            # The mesh judges the same bytes, counts them and strikes their sender; here they change nothing.
            return []
        if self._phase is Phase.LEARNING or self._succession.rival is not None:
            return []
        if self._succession.compare_later(head, self._state, self._started_ms) is not Standing.LIVE:
            return []
        text = (
            f"version {head.version} of this run was published by another process while this one was running, "
            "so publishing stops here. Stop the other publisher, then restart this one to take over"
        )
        self._is_report_due = True
        return [Log("error", text)]

    # Answers to the work in hand

    def _take_answer(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        match event:
            case PatchEncoded():
                return self._take_encoded(event, now_ms)
            case SkipEncoded() | AnchorStored():
                return self._take_extra(event, now_ms)
            case Committed():
                return self._take_committed(event, now, now_ms)
            case EncodeFailed() | ExtraFailed() | StoreFailed():
                return self._take_failure(event)
            case _:
                raise AssertionError(f"no answer: {event}")

    def _take_encoded(self, event: PatchEncoded, now_ms: int) -> list[Effect]:
        encoding = self._encoding
        assert encoding is not None
        snapshot = encoding.snapshot
        if snapshot.generation != event.generation:
            return []
        # News may have come while the encoder worked: ask everything again before anything is signed.
        reason = self._find_refusal(snapshot)
        if reason:
            self._stop_work()
            return [*self._refuse(snapshot, reason), *self._orphan(event.blob_id)]
        if encoding.kind is Kind.PATCH and self._choose_kind(snapshot) is Kind.ANCHOR:
            self._encoding = _Encoding(snapshot, Kind.ANCHOR)
            return [*self._orphan(event.blob_id), EncodeSnapshot(snapshot.generation, Kind.ANCHOR)]
        return self._commit_version(encoding, event, now_ms)

    def _take_extra(self, event: SkipEncoded | AnchorStored, now_ms: int) -> list[Effect]:
        state, extra = self._state, self._extra
        assert state is not None
        skip = event if isinstance(event, SkipEncoded) else None
        base_version = None if skip is None else skip.base_version
        asked_base = extra.base_version if isinstance(extra, EncodeSkip) else None
        if event.version != state.version or base_version != asked_base:
            return []
        manifest = describe_extra(
            state,
            run_id=self._trust.run_id,
            revision=self._scribe.revision,
            base_version=base_version,
            blob_id=event.blob_id,
            encoded_size_bytes=event.encoded_size_bytes,
            changed_count=state.element_count if skip is None else skip.changed_count,
            codec_id=anchor.CODEC_ID if skip is None else skip.codec_id,
        )
        signed = self._scribe.seal(manifest)
        after = add_extra(state, manifest, record_digest(signed))
        return self._commit(None, manifest, signed, after, now_ms)

    def _take_failure(self, event: EncodeFailed | ExtraFailed | StoreFailed) -> list[Effect]:
        generation = self._generation_in_work()
        match event:
            case EncodeFailed():
                is_ours = event.generation == generation
            case ExtraFailed():
                is_ours = generation is None and event.version == self._version()
            case StoreFailed():
                # The commit is the only thing this machine has stored, so a failure without a digest is the commit's.
                is_ours = event.digest is None
        if not is_ours:
            return []
        orphan = [] if self._pending is None else self._orphan(self._pending.manifest.blob_id)
        if event.reason == "no_baseline":
            # The committed weights cannot be rebuilt here, so the next version must stand on its own.
            self._anchor_due = True
        self._stop_work()
        what = "extra anchor or skip patch" if generation is None else "publish"
        text = f"the {what} failed ({event.reason}); the newest committed version is still {self._version()}"
        self._is_report_due = True
        return [Log("warning", text), *orphan]

    def _take_committed(self, event: Committed, now: float, now_ms: int) -> list[Effect]:
        pending = self._pending
        assert pending is not None
        if event.version != pending.state.version:
            return []
        before = self._state
        self._stop_work()
        self._state = pending.state
        if pending.generation is not None:
            self._anchor_due = False
            self._succession.fulfil()
            self._extras_due.extend(find_extras_due(pending.state, self._descriptor.anchor_interval))
        effects = self._announce(pending.head, now, now_ms)
        blob_ids, record_digests = find_released(before, pending.state)
        if blob_ids or record_digests:
            effects.append(Release(blob_ids, record_digests))
        if pending.generation is not None:
            self._last_patch = pending.manifest
            effects.append(Log("info", summarise(pending.manifest)))
        return effects

    # Work

    def _go_on(self, now: float, now_ms: int) -> list[Effect]:
        """Start whatever is due, and ask for the next timer."""
        effects: list[Effect] = []
        assert self._learn_until is not None
        if self._phase is Phase.LEARNING and now >= self._learn_until:
            effects += self._finish_learning(now, now_ms)
        if self._phase is Phase.IDLE:
            effects += self._start_work(now)
        if self._resign_at is not None and now >= self._resign_at and self._phase is not Phase.COMMITTING:
            effects += self._resign(now, now_ms)
        return effects + self._report(now_ms) + self._set_timer(now)

    def _finish_learning(self, now: float, now_ms: int) -> list[Effect]:
        self._phase = Phase.IDLE
        self._is_report_due = True
        if self._succession.compare_at_start(self._state, self._started_ms):
            return self._resign(now, now_ms)
        newest = self._succession.newest
        assert newest is not None
        text = f"the newest version of this run is {newest.version}, not what is stored here ({self._version()})"
        return [Log("warning", f"{text}: the next publish opens a new epoch with an anchor")]

    def _start_work(self, now: float) -> list[Effect]:
        if self._extras_due:
            self._extra = self._extras_due.popleft()
            self._phase = Phase.SKIPPING if isinstance(self._extra, EncodeSkip) else Phase.ANCHORING
            return [self._extra]
        snapshot = self._waiting
        if snapshot is None or now < self._encode_at_min:
            return []
        self._waiting = None
        reason = self._find_refusal(snapshot)
        if reason:
            return self._refuse(snapshot, reason)
        self._encode_at_min = now + self._descriptor.publish_interval_min_ms / 1000
        self._encoding = _Encoding(snapshot, self._choose_kind(snapshot))
        self._phase = Phase.ENCODING
        return [EncodeSnapshot(snapshot.generation, self._encoding.kind)]

    def _commit_version(self, encoding: _Encoding, encoded: PatchEncoded, now_ms: int) -> list[Effect]:
        snapshot = encoding.snapshot
        state = self._state
        reason = self._find_epoch_reason(snapshot)
        version, epoch = self._succession.choose_version(state, reason)
        before = None if epoch is not None else state
        manifest = describe_snapshot(
            encoded,
            run_id=self._trust.run_id,
            revision=self._scribe.revision,
            version=version,
            table_digest=snapshot.table_digest,
            trainer_step=snapshot.trainer_step,
            base=before if encoding.kind is Kind.PATCH else None,
            previous=None if before is None else before.previous,
        )
        epoch_record = None if before is None else before.epoch_record
        if epoch is not None:
            epoch_record = encode_signed(epoch)
        signed = self._scribe.seal(manifest)
        after = advance(state, manifest, record_digest(signed), epoch_record)
        return self._commit(snapshot.generation, manifest, signed, after, now_ms)

    def _commit(
        self,
        generation: int | None,
        manifest: Manifest,
        signed: SignedRecord,
        after: PublishedState,
        now_ms: int,
    ) -> list[Effect]:
        catalogue = self._scribe.seal(make_catalogue(after, self._trust.run_id))
        after = with_catalogue(after, record_digest(catalogue))
        head = self._scribe.issue_head(after, now_ms)
        self._pending = _Pending(generation, manifest, after, head)
        self._phase = Phase.COMMITTING
        known = None if self._state is None else self._state.epoch_record
        opened = after.epoch_record if after.epoch_record != known else None
        epoch = () if opened is None else (decode_signed(opened),)
        saved = ((STATE_KEY, after.encode()), (HEAD_KEY, encode_signed(head)))
        return [Commit(generation, after.version, after.root, (*epoch, signed, catalogue), saved)]

    def _announce(self, head: SignedRecord, now: float, now_ms: int) -> list[Effect]:
        """Announce a head of the committed state, unless our own rules would refuse it from anybody else."""
        assert self._state is not None
        try:
            if self._trust.epoch < self._state.version.epoch and self._state.epoch_record is not None:
                self._trust.accept_epoch(decode_signed(self._state.epoch_record))
            self._trust.accept_head(head, now_ms)
        except TrustError as error:
            self._succession.require_epoch("restart")
            text = f"version {self._version()} is not announced ({error}): the next publish opens a new epoch"
            return [Log("error", text)]
        self._is_report_due = True
        self._resign_at = now + limits.HEAD_RESIGN_SECONDS - self._draw(RESIGN_JITTER_MS + 1) / 1000
        return [AnnounceHead(head)]

    def _resign(self, now: float, now_ms: int) -> list[Effect]:
        """Say again, with a new time, that the committed version is the newest."""
        self._resign_at = None
        state = self._state
        if state is None or not self._trust.may_publish(self._peer_id) or self._succession.rival is not None:
            return []
        if self._succession.find_epoch_reason(state, state.table_digest):
            # What is committed is not the newest of the run; saying so would only be refused.
            return []
        return self._announce(self._scribe.issue_head(state, now_ms), now, now_ms)

    # Decisions

    def _find_refusal(self, snapshot: SnapshotOffered) -> str:
        """Return why this snapshot may not become a version, or the empty string."""
        if not self._trust.may_publish(self._peer_id):
            return "not_publisher"
        if self._succession.rival is not None:
            return "superseded"
        # The genesis may name the table; weights of another shape are then somebody's mistake, not the first version.
        if self._state is None and self._descriptor.table_digest not in (None, snapshot.table_digest):
            return "table"
        if self._find_epoch_reason(snapshot) and not self._succession.may_open(self._state):
            return "authorities"
        return ""

    def _find_epoch_reason(self, snapshot: SnapshotOffered) -> str:
        return self._succession.find_epoch_reason(self._state, snapshot.table_digest)

    def _choose_kind(self, snapshot: SnapshotOffered) -> Kind:
        state = self._state
        if state is None or self._anchor_due or self._find_epoch_reason(snapshot):
            return Kind.ANCHOR
        # Anchors failed for so long that the catalogue is full: only an anchor makes room.
        full = len(state.retained) + ENTRIES_PER_VERSION_MAX > limits.CATALOGUE_ENTRIES_MAX
        return Kind.ANCHOR if full else Kind.PATCH

    # Small things

    def _refuse(self, snapshot: SnapshotOffered, reason: str) -> list[Effect]:
        return [RefuseSnapshot(snapshot.generation, reason), Count("rejected", reason)]

    def _stop_work(self) -> None:
        self._phase = Phase.IDLE
        self._encoding = None
        self._pending = None
        self._extra = None

    def _orphan(self, blob_id: Digest) -> list[Effect]:
        """Release a blob that no manifest names; equal patches share one, so it may be in use all the same."""
        used = frozenset() if self._state is None else self._state.blob_ids
        return [] if blob_id in used else [Release((blob_id,), ())]

    @property
    def _descriptor(self) -> Descriptor:
        """The run's descriptor, where this node was already found to be its publisher."""
        assert self._trust.descriptor is not None
        return self._trust.descriptor

    def _generation_in_work(self) -> int | None:
        return None if self._encoding is None else self._encoding.snapshot.generation

    def _version(self) -> Version | None:
        return None if self._state is None else self._state.version

    def _report(self, now_ms: int) -> list[Effect]:
        if not self._is_report_due:
            return []
        self._is_report_due = False
        reason = "superseded" if self._succession.rival is not None else ""
        if not self._trust.may_publish(self._peer_id):
            reason = "not_publisher"
        report = make_report(
            phase=self._phase,
            reason=reason,
            state=self._state,
            newest=self._succession.newest,
            patch=self._last_patch,
            is_seen=not self._trust.stale(now_ms),
            is_forked=self._trust.fork is not None,
        )
        return [report]

    def _set_timer(self, now: float) -> list[Effect]:
        times = [self._resign_at]
        if self._phase is Phase.LEARNING:
            times.append(self._learn_until)
        if self._phase is Phase.IDLE and self._waiting is not None:
            times.append(self._encode_at_min)
        at = min((time for time in times if time is not None), default=None)
        if at is None or at == self._timer_at:
            return []
        self._timer_at = at
        return [SetTimer(max(at, now))]
