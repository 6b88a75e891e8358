"""The publisher: from an offered snapshot to an announced version, as a machine.

One job is in work at a time, so the shell never holds more than the baseline and one snapshot. The order
is always: encode, commit, announce, then the extras of that version (skip patches, an anchor), each
committed and announced the same way. The baseline moves at a commit and at nothing else.

In a run with rounds only the coordinator announces. Every other authority does the same work and says nothing, so
that it can take over with whatever is committed there; see :mod:`pulsenet.node.turns`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from pulsenet import limits
from pulsenet.chain.records import ALGORITHM_NONE, Descriptor, Kind, Manifest, SignedRecord
from pulsenet.chain.signing import Sign, Verify, encode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.courier import Courier
from pulsenet.node.draft import Draft, Encoding, draft_extra, draft_version
from pulsenet.node.effects import (
    Commit,
    Count,
    DropSnapshot,
    Effect,
    EncodeSkip,
    EncodeSnapshot,
    Log,
    RefuseSnapshot,
    Release,
    Report,
    StoreAnchor,
)
from pulsenet.node.events import (
    AnchorStored,
    BlobLost,
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
from pulsenet.node.mesh import Holdings
from pulsenet.node.published import (
    HEAD_KEY,
    STATE_KEY,
    TERM_NONE,
    PublishedState,
    find_extras_due,
    find_released,
    find_repair,
    make_catalogue,
    summarise,
    with_catalogue,
)
from pulsenet.node.scribe import Scribe
from pulsenet.node.speaker import Speaker
from pulsenet.node.succession import Standing, Succession
from pulsenet.node.timer import Timer
from pulsenet.node.trainer_phase import ANSWERS, Phase
from pulsenet.node.trainer_report import make_report
from pulsenet.node.turns import Leadership, Turns
from pulsenet.wire.messages import GetHead, HeadReply

LEARN_SECONDS_DEFAULT = 3.0
"""How long a starting publisher listens for the newest head before it trusts its own state."""

ENTRIES_PER_VERSION_MAX = len(limits.SKIP_LADDER) + 2
"""Catalogue entries one version may add: its patch, its skips and its anchor."""


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
        leadership: In a run with rounds, this node's coordinator; ``None`` publishes without rounds. A run whose
            descriptor names an outer algorithm is published by its coordinators alone.

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
        leadership: Leadership | None = None,
    ) -> None:
        self._trust = trust
        self._peer_id = peer_id
        self._scribe = Scribe(trust, peer_id, sign)
        self._state = None if state is None else PublishedState.restore(state)
        self._succession = Succession(trust, verify, self._scribe)
        self._turns = None if leadership is None else Turns(trust, leadership, self._succession)
        self._speaker = Speaker(trust, peer_id, self._scribe, self._succession, self._turns, draw)
        self._phase = Phase.LEARNING
        self._waiting: SnapshotOffered | None = None
        self._encoding: Encoding | None = None
        self._pending: tuple[Draft, SignedRecord | None] | None = None
        self._extra: EncodeSkip | StoreAnchor | None = None
        self._extras_due: deque[EncodeSkip | StoreAnchor] = deque()
        self._anchor_due = False
        self._last_patch: Manifest | None = None
        self._told: Report | None = None
        self._learn_seconds = learn_seconds
        self._learn_until: float | None = None
        self._started_ms = 0
        self._encode_at_min = float("-inf")
        self._timer = Timer()
        self._courier = Courier()

    @property
    def phase(self) -> Phase:
        """What the publisher is doing."""
        return self._phase

    @property
    def state(self) -> PublishedState | None:
        """What is committed; ``None`` before the first publish."""
        return self._state

    @property
    def holdings(self) -> Holdings:
        """What this node can serve, for its have record."""
        state = self._state
        return Holdings() if state is None else Holdings(state.version.epoch, *state.patch_range, state.anchor_numbers)

    def find_refusal(self, snapshot: SnapshotOffered, now: float) -> str:
        """Return why a snapshot offered now may not become a version, or the empty string.

        Known before any weight is copied.
        """
        is_misnumbered = self._turns is not None and self._turns.is_misnumbered(snapshot)
        return self._find_refusal(snapshot, now) or ("round" if is_misnumbered else "")

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        if self._learn_until is None:
            self._learn_until = now + self._learn_seconds
            self._started_ms = now_ms
        self._timer.note(now)
        effects: list[Effect] = []
        if self._turns is not None:
            self._turns.note(event)
        if isinstance(event, ANSWERS.get(self._phase, ())):
            effects += self._take_answer(event, now, now_ms)
        elif isinstance(event, SnapshotOffered):
            effects += self._take_snapshot(event, now)
        elif isinstance(event, HeadSeen):
            effects += self._take_head(event.record)
        elif isinstance(event, ReplyReceived) and isinstance(event.reply, HeadReply) and event.reply.head is not None:
            effects += self._take_head(event.reply.head)
        elif isinstance(event, BlobLost):
            self._take_loss(event.blob_id)
        elif isinstance(event, PeerConnected):
            effects.append(self._courier.send(event.peer_id, GetHead()))
        return effects + self._go_on(now, now_ms)

    # News

    def _take_snapshot(self, snapshot: SnapshotOffered, now: float) -> list[Effect]:
        reason = self.find_refusal(snapshot, now)
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
        if self._turns is not None or self._phase is Phase.LEARNING or self._succession.rival is not None:
            return []
        if not self._may_publish:
            return []
        if self._succession.compare_later(head, self._state, self._started_ms) is not Standing.LIVE:
            return []
        text = (
            f"version {head.version} of this run was published by another process while this one was running, "
            "so publishing stops here. Stop the other publisher, then restart this one to take over"
        )
        return [Log("error", text)]

    def _take_loss(self, blob_id: Digest) -> None:
        """Nobody has a blob any more: an anchor of what is committed lets readers do without it."""
        if self._state is None or not self._may_publish or self._succession.rival is not None:
            return
        repair = find_repair(self._state, blob_id)
        if repair is not None and repair not in (self._extra, *self._extras_due):
            self._extras_due.append(repair)

    # Answers to the work in hand

    def _take_answer(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        match event:
            case PatchEncoded():
                return self._take_encoded(event, now, now_ms)
            case SkipEncoded() | AnchorStored():
                return self._take_extra(event, now, now_ms)
            case Committed():
                return self._take_committed(event, now, now_ms)
            case _:
                assert isinstance(event, EncodeFailed | ExtraFailed | StoreFailed), f"no answer: {event}"
                return self._take_failure(event)

    def _take_encoded(self, event: PatchEncoded, now: float, now_ms: int) -> list[Effect]:
        encoding = self._encoding
        assert encoding is not None
        snapshot = encoding.snapshot
        if snapshot.generation != event.generation:
            return []
        # News may have come while the encoder worked: ask everything again before anything is signed.
        reason = self._find_refusal(snapshot, now)
        if reason:
            self._stop_work()
            return [*self._refuse(snapshot, reason), *self._orphan(event.blob_id)]
        if encoding.kind is Kind.PATCH and self._choose_kind(snapshot) is Kind.ANCHOR:
            self._encoding = Encoding(snapshot, Kind.ANCHOR)
            return [*self._orphan(event.blob_id), EncodeSnapshot(snapshot.generation, Kind.ANCHOR)]
        return self._commit_version(encoding, event, now, now_ms)

    def _take_extra(self, event: SkipEncoded | AnchorStored, now: float, now_ms: int) -> list[Effect]:
        assert self._state is not None
        assert self._extra is not None
        if isinstance(event, AnchorStored) and event.blob_id in self._state.blob_ids:
            self._stop_work()  # it was lost, and is the same again
            return []
        draft = draft_extra(self._scribe, self._state, self._extra, event, term=self._term)
        return [] if draft is None else self._commit(draft, now, now_ms)

    def _take_failure(self, event: EncodeFailed | ExtraFailed | StoreFailed) -> list[Effect]:
        generation = self._generation_in_work()
        match event:
            case EncodeFailed():
                is_ours = event.generation == generation
            case ExtraFailed():
                is_ours = generation is None and event.version == self._version()
            case _:
                # The commit is the only thing this machine has stored, so a failure without a digest is the commit's.
                is_ours = event.digest is None
        if not is_ours:
            return []
        orphan = [] if self._pending is None else self._orphan(self._pending[0].manifest.blob_id)
        if event.reason == "no_baseline":
            # The committed weights cannot be rebuilt here, so the next version must stand on its own.
            self._anchor_due = True
        self._stop_work()
        # By its number, so that two that failed alike are two lines of the log.
        what = "extra anchor or skip patch" if generation is None else f"publish of snapshot {generation}"
        text = f"the {what} failed ({event.reason}); the newest committed version is still {self._version()}"
        return [Log("warning", text), *orphan]

    def _take_committed(self, event: Committed, now: float, now_ms: int) -> list[Effect]:
        assert self._pending is not None
        draft, head = self._pending
        if event.version != draft.state.version:
            return []
        before = self._state
        self._stop_work()
        self._state = draft.state
        if self._turns is not None and draft.is_fresh:
            self._turns.starts_over = False
        if draft.generation is not None:
            self._anchor_due = False
            self._succession.fulfil()
            # With rounds all authorities make the same anchors, so that a take-over brings seeds nothing to fetch.
            interval, is_aligned = self._descriptor.anchor_interval, self._turns is not None
            due = find_extras_due(draft.state, interval, is_aligned=is_aligned)
            anchor = StoreAnchor(draft.state.version)
            if self._extras_due and anchor not in due:
                # A blob was lost while this version was made: an anchor of the one before cannot be had any more.
                due.append(anchor)
            self._extras_due = deque(due)
        # In a run with rounds the head is signed when its turn comes, which may be now.
        effects = [] if head is None else self._speaker.announce(head, draft.state, now, now_ms)
        blob_ids, record_digests = find_released(before, draft.state)
        if blob_ids or record_digests:
            effects.append(Release(blob_ids, record_digests))
        if draft.generation is not None:
            self._last_patch = draft.manifest
            is_standby = self._turns is not None and not self._turns.is_leading(now)
            effects.append(Log("info", summarise(draft.manifest, is_standby=is_standby)))
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
        if self._phase is not Phase.LEARNING:
            effects += self._speak(now, now_ms)
        return effects + self._report(now_ms) + self._set_timer(now)

    def _finish_learning(self, now: float, now_ms: int) -> list[Effect]:
        self._phase = Phase.IDLE
        if self._turns is not None:
            return []
        if self._succession.compare_at_start(self._state, self._started_ms):
            return self._speaker.resign(self._state, now, now_ms)
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
        reason = self._find_refusal(snapshot, now)
        if reason:
            return self._refuse(snapshot, reason)
        self._encode_at_min = now + self._descriptor.publish_interval_min_ms / 1000
        self._encoding = Encoding(snapshot, self._choose_kind(snapshot))
        self._phase = Phase.ENCODING
        return [EncodeSnapshot(snapshot.generation, self._encoding.kind)]

    def _commit_version(self, encoding: Encoding, encoded: PatchEncoded, now: float, now_ms: int) -> list[Effect]:
        snapshot, before = encoding.snapshot, self._chain
        reason = self._find_epoch_reason(snapshot)
        if self._turns is None:
            version, epoch = self._succession.choose_version(before, reason)
        else:
            version, epoch = self._turns.choose_version(before, reason, snapshot.trainer_step)
            if self._turns.contradicts(version, encoded.root):
                self._stop_work()
                return [
                    *self._diverge(version, now),
                    *self._refuse(snapshot, "diverged"),
                    *self._orphan(encoded.blob_id),
                ]
        draft = draft_version(
            self._scribe, encoding, encoded, before=before, version=version, epoch=epoch, term=self._term
        )
        return self._commit(draft, now, now_ms)

    def _commit(self, draft: Draft, now: float, now_ms: int) -> list[Effect]:
        catalogue = self._scribe.seal(make_catalogue(draft.state, self._trust.run_id))
        after = with_catalogue(draft.state, record_digest(catalogue))
        head = self._scribe.issue_head(after, now_ms) if self._turns is None else None
        self._pending = replace(draft, state=after), head
        self._phase = Phase.COMMITTING
        saved = ((STATE_KEY, after.encode()), *(() if head is None else ((HEAD_KEY, encode_signed(head)),)))
        epoch = () if draft.epoch is None else (draft.epoch,)
        is_standby = self._turns is not None and not self._turns.is_leading(now)
        records = (*epoch, draft.signed, catalogue)
        return [Commit(draft.generation, after.version, after.root, records, saved, is_standby)]

    def _speak(self, now: float, now_ms: int) -> list[Effect]:
        diverged = None if self._turns is None or self._chain is None else self._turns.find_divergence(self._chain)
        effects = [] if diverged is None else self._diverge(diverged, now)
        is_committing = self._phase is Phase.COMMITTING
        return effects + self._speaker.go_on(self._chain, now, now_ms, is_committing=is_committing)

    def _diverge(self, version: Version, now: float) -> list[Effect]:
        assert self._turns is not None
        self._extras_due.clear()
        return self._turns.diverge(version, now)

    # Decisions

    def _find_refusal(self, snapshot: SnapshotOffered, now: float) -> str:
        if not self._may_publish:
            return "not_publisher"
        if self._succession.rival is not None:
            return "superseded"
        # The genesis may name the table; weights of another shape are then somebody's mistake, not the first version.
        if self._state is None and self._descriptor.table_digest not in (None, snapshot.table_digest):
            return "table"
        if self._turns is not None and self._turns.is_behind(self._chain, snapshot):
            return "behind"
        if self._find_epoch_reason(snapshot) and not self._may_open_epoch(now):
            return "authorities"
        return ""

    @property
    def _may_publish(self) -> bool:
        if not self._trust.may_publish(self._peer_id):
            return False
        # Without a coordinator of its own, a node must not speak for a run with rounds.
        return self._turns is not None or self._descriptor.algorithm == ALGORITHM_NONE

    @property
    def _chain(self) -> PublishedState | None:
        """What the next version goes on from; ``None`` if it stands on its own."""
        return self._state if self._turns is None or not self._turns.starts_over else None

    @property
    def _term(self) -> int:
        return TERM_NONE if self._turns is None else self._turns.term

    def _may_open_epoch(self, now: float) -> bool:
        if self._turns is None:
            return self._succession.may_open(self._state)
        return self._turns.may_open(self._chain, now)

    def _find_epoch_reason(self, snapshot: SnapshotOffered) -> str:
        return self._succession.find_epoch_reason(self._chain, snapshot.table_digest)

    def _choose_kind(self, snapshot: SnapshotOffered) -> Kind:
        state = self._chain
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
        reason = "superseded" if self._succession.rival is not None else ""
        if not self._speaker.is_speaking:
            reason = "standby"
        if not self._may_publish:
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
        told, self._told = self._told, report
        return [] if report == told else [report]

    def _set_timer(self, now: float) -> list[Effect]:
        times = [self._speaker.next_wake]
        if self._phase is Phase.LEARNING:
            times.append(self._learn_until)
        if self._phase is Phase.IDLE and self._waiting is not None:
            times.append(self._encode_at_min)
        at = min((time for time in times if time is not None), default=None)
        return self._timer.wake_at(None if at is None else max(at, now))
