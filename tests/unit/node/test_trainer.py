"""The publisher commits before it announces, never contradicts itself, and always leaves a way in."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.chain.plan import plan_route
from pulsenet.chain.records import Catalogue, EpochRecord, Head, Kind, Manifest, SignedRecord
from pulsenet.chain.signing import encode_signed, open_record, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import StorageError, TrustError
from pulsenet.ids import Digest, Version, compute_digest
from pulsenet.node.effects import (
    EXECUTION_ORDER,
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
    Report,
    SendRequest,
    SetTimer,
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
    StateReached,
    StoreFailed,
    TimerFired,
)
from pulsenet.node.mesh import Holdings
from pulsenet.node.published import STATE_KEY
from pulsenet.node.speaker import RESIGN_JITTER_MS
from pulsenet.node.trainer import Trainer
from pulsenet.node.trainer_phase import Phase
from pulsenet.wire.messages import GetHead, HeadReply

TABLE = Digest(b"t" * 32)
ANSWERED = EncodeSnapshot | EncodeSkip | StoreAnchor | Commit


@dataclass
class Disk:
    """What survives a crash."""

    state: dict[str, bytes] = field(default_factory=dict)
    records: dict[Digest, SignedRecord] = field(default_factory=dict)
    blobs: set[Digest] = field(default_factory=set)


class Desk:
    """Drives one publisher with a shell made of dictionaries; weights are named by a string per generation."""

    def __init__(
        self, run: Any, *, disk: Disk | None = None, trust: Trust | None = None, key: Any = None, **arguments: Any
    ) -> None:
        self.run = run
        self.key = key or run.publisher
        self.disk = disk or Disk()
        self.trust = trust or run.trust()
        arguments.setdefault("learn_seconds", 0.0)
        self.trainer = Trainer(
            self.trust,
            self.key.peer_id,
            self.key.sign,
            lambda count: 0,
            verify=run.verify,
            state=self.disk.state.get(STATE_KEY),
            **arguments,
        )
        self.now = 1_000.0
        self.now_ms = run.start_ms
        self.weights: dict[int, str] = {}
        self.baseline = ""
        self.committed: Version | None = None
        self.log: list[Effect] = []
        self.todo: deque[ANSWERED] = deque()
        self.timer: float | None = None
        self.send(TimerFired())

    def send(self, event: Event) -> list[Effect]:
        """Hand in one event, execute what it causes except the work, which waits in ``todo``."""
        effects = sorted(
            self.trainer.handle(event, self.now, self.now_ms), key=lambda effect: EXECUTION_ORDER[type(effect)]
        )
        for effect in effects:
            if isinstance(effect, SetTimer):
                assert effect.at >= self.now
                self.timer = effect.at
            elif isinstance(effect, ANSWERED):
                self.todo.append(effect)
            elif isinstance(effect, Release):
                self.disk.blobs -= set(effect.blob_ids)
                for digest in effect.record_digests:
                    self.disk.records.pop(digest, None)
        self.log += effects
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, firing the timer when it is due."""
        until = self.now + seconds
        effects: list[Effect] = []
        while self.timer is not None and self.timer <= until:
            at, self.timer = self.timer, None
            self._move(at)
            effects += self.send(TimerFired())
        self._move(until)
        return effects

    def _move(self, at: float) -> None:
        self.now_ms += round((at - self.now) * 1000)
        self.now = at

    def offer(
        self, generation: int, weights: str | None = None, table: Digest = TABLE, step: int | None = None
    ) -> list[Effect]:
        self.weights[generation] = weights or f"weights {generation}"
        return self.send(SnapshotOffered(generation, generation * 10 if step is None else step, table))

    def work(self) -> list[Effect]:
        """Do the oldest piece of work and hand in its answer."""
        return self.send(self.answer(self.todo.popleft()))

    def answer(self, effect: ANSWERED) -> Event:
        match effect:
            case EncodeSnapshot(generation, kind):
                name = self.weights[generation]
                changed = 0 if kind is Kind.PATCH and name == self.baseline else 7
                blob = self._blob("empty" if not changed else f"{kind} {self.baseline} {name}")
                size_bytes = 2_000 if kind is Kind.ANCHOR else changed * 3
                root = self.run.digest(f"root of {name}")
                return PatchEncoded(generation, blob, 2, root, 2_000, size_bytes, changed, 1_000)
            case Commit(generation, version, _, records, state):
                for record in records:
                    self.disk.records[record_digest(record)] = record
                self.disk.state.update(dict(state))
                if generation is not None:
                    self.baseline, self.committed = self.weights[generation], version
                return Committed(version)
            case StoreAnchor(version) if version != self.committed:
                return ExtraFailed(version, "no_baseline")
            case StoreAnchor(version):
                return AnchorStored(version, self._blob(f"anchor {version}"), 2_000)
            case EncodeSkip(base_version, version):
                blob = self._blob(f"skip {base_version} {version}")
                return SkipEncoded(base_version, version, blob, 1, 50, 15)

    def _blob(self, name: str) -> Digest:
        digest = compute_digest(name.encode())
        self.disk.blobs.add(digest)
        return digest

    def settle(self) -> None:
        while self.todo:
            self.work()

    def publish(self, generation: int, weights: str | None = None, table: Digest = TABLE) -> Version:
        """Offer, and do all the work that follows."""
        self.offer(generation, weights, table)
        self.settle()
        assert self.trainer.state is not None
        return self.trainer.state.version

    def publish_round(self, round_index: int, weights: str | None = None, table: Digest = TABLE) -> Version:
        """Hand over what a round gave: the same on every authority, unless a test says otherwise."""
        self.offer(round_index + 1, weights or f"round {round_index}", table, step=round_index)
        self.settle()
        assert self.trainer.state is not None
        return self.trainer.state.version

    def of(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.log if isinstance(effect, kind)]

    def heads(self) -> list[Head]:
        return [self.open(Head, effect.record) for effect in self.of(AnnounceHead)]

    def open(self, cls: Any, signed: SignedRecord) -> Any:
        return open_record(cls, signed, self.run.verify, run_id=self.run.run_id)

    def manifest(self, digest: Digest) -> Manifest:
        manifest: Manifest = self.open(Manifest, self.disk.records[digest])
        return manifest

    def catalogue(self) -> Catalogue:
        catalogue: Catalogue = self.open(Catalogue, self.disk.records[self.heads()[-1].catalogue_digest])
        return catalogue

    def restart(self, **arguments: Any) -> Desk:
        desk = Desk(self.run, disk=self.disk, key=self.key, **arguments)
        desk.baseline, desk.committed = self.baseline, self.committed
        return desk


@pytest.fixture
def desk(run: Any) -> Desk:
    return Desk(run)


# The first versions


def test_the_first_publish_is_an_anchor_of_epoch_0_number_1(desk: Desk) -> None:
    assert desk.trainer.holdings == Holdings()
    assert desk.publish(1) == Version(0, 1)
    assert desk.of(EncodeSnapshot) == [EncodeSnapshot(1, Kind.ANCHOR)]
    (head,) = desk.heads()
    manifest = desk.manifest(head.manifest_digest)
    assert (manifest.kind, manifest.base_version, manifest.previous) == (Kind.ANCHOR, None, None)
    assert (manifest.changed_count, manifest.element_count, manifest.trainer_step) == (1_000, 1_000, 10)
    assert desk.of(StoreAnchor) == []


def test_the_next_publish_is_a_patch_on_the_committed_version(desk: Desk) -> None:
    desk.publish(1)
    assert desk.publish(2) == Version(0, 2)
    manifest = desk.manifest(desk.heads()[-1].manifest_digest)
    assert (manifest.kind, manifest.base_version, manifest.version) == (Kind.PATCH, Version(0, 1), Version(0, 2))
    assert manifest.base_root == desk.run.digest("root of weights 1")
    assert manifest.root == desk.run.digest("root of weights 2")
    assert manifest.previous == desk.heads()[0].manifest_digest


def test_a_follower_accepts_everything_that_is_announced(desk: Desk) -> None:
    follower = desk.run.trust()
    for generation in range(1, 24):
        desk.publish(generation)
        follower.accept_head(desk.of(AnnounceHead)[-1].record, desk.now_ms)
        follower.accept_catalogue(desk.disk.records[desk.heads()[-1].catalogue_digest])
        for entry in desk.catalogue().entries:
            follower.accept_manifest(desk.disk.records[entry.manifest_digest])
    assert follower.head is not None
    assert follower.head.version == Version(0, 23)


def test_a_version_with_no_visible_change_is_a_version(desk: Desk) -> None:
    """A-ENC-6."""
    desk.publish(1, "same")
    assert desk.publish(2, "same") == Version(0, 2)
    assert desk.publish(3, "same") == Version(0, 3)
    manifest = desk.manifest(desk.heads()[-1].manifest_digest)
    assert (manifest.changed_count, manifest.encoded_size_bytes) == (0, 0)
    assert manifest.root == manifest.base_root


def test_several_optimiser_steps_between_publishes_are_one_patch_on_the_last_published(desk: Desk) -> None:
    """A-ENC-5: the base is what was committed, not what was offered."""
    desk.publish(1, "step 0")
    desk.offer(2, "step 4")
    desk.offer(3, "step 8")
    desk.offer(4, "step 12")
    desk.settle()
    assert [(m.base_root, m.root) for m in map(desk.manifest, (h.manifest_digest for h in desk.heads()[1:]))] == [
        (desk.run.digest("root of step 0"), desk.run.digest("root of step 4")),
        (desk.run.digest("root of step 4"), desk.run.digest("root of step 12")),
    ]


def test_the_newest_waiting_snapshot_replaces_the_one_that_waited(desk: Desk) -> None:
    desk.offer(1)
    assert desk.offer(2) == []
    assert desk.offer(3) == [DropSnapshot(2)]
    desk.settle()
    assert [effect.generation for effect in desk.of(EncodeSnapshot)] == [1, 3]


# Commit


def test_announcement_never_precedes_the_commit(desk: Desk) -> None:
    """A-PUB-2: in every prefix of the run, what is announced is on the disk with all it names."""
    for generation in range(1, 12):
        desk.offer(generation)
        while desk.todo:
            desk.work()
            for head in desk.heads():
                if head.version == desk.heads()[-1].version:
                    catalogue = desk.open(Catalogue, desk.disk.records[head.catalogue_digest])
                    for entry in catalogue.entries:
                        assert desk.manifest(entry.manifest_digest).blob_id in desk.disk.blobs


def test_nothing_is_announced_before_committed_arrives(desk: Desk) -> None:
    desk.offer(1)
    desk.work()
    assert isinstance(desk.todo[0], Commit)
    assert desk.of(AnnounceHead) == []
    assert desk.trainer.state is None
    effects = desk.work()
    assert [type(effect) for effect in effects if isinstance(effect, AnnounceHead)] == [AnnounceHead]


@pytest.mark.parametrize("failure", ["encode", "commit", "disk"])
def test_a_failed_publish_leaves_the_baseline_and_the_next_one_holds_the_union(desk: Desk, failure: str) -> None:
    """A-PUB-3."""
    desk.publish(1)
    for generation in (2, 3):
        desk.offer(generation)
        if failure != "encode":
            desk.work()
        desk.todo.clear()
        event: Event = StoreFailed(None, "enospc") if failure == "disk" else EncodeFailed(generation, "enospc")
        effects = desk.send(event)
        assert any(isinstance(effect, Log) and "enospc" in effect.text for effect in effects)
        if failure != "encode":
            assert any(isinstance(effect, Release) for effect in effects)
    assert desk.publish(4) == Version(0, 2)
    manifest = desk.manifest(desk.heads()[-1].manifest_digest)
    assert manifest.base_root == desk.run.digest("root of weights 1")
    assert manifest.root == desk.run.digest("root of weights 4")


def test_a_failure_of_something_else_is_not_the_publishs(desk: Desk) -> None:
    desk.publish(1)
    desk.offer(2)
    assert desk.send(EncodeFailed(1, "late")) == []
    assert desk.send(PatchEncoded(1, TABLE, 2, TABLE, 2_000, 1, 1, 1_000)) == []
    desk.work()
    assert desk.send(StoreFailed(TABLE, "enospc")) == []
    assert desk.send(ExtraFailed(Version(0, 1), "late")) == []
    assert desk.send(Committed(Version(0, 1))) == []
    desk.settle()
    assert desk.heads()[-1].version == Version(0, 2)


def test_a_crash_before_the_commit_leaves_the_old_state_and_after_it_the_new_one(desk: Desk) -> None:
    """A-PUB-1."""
    desk.publish(1)
    desk.offer(2)
    desk.work()
    again = desk.restart()
    assert again.heads()[-1].version == Version(0, 1)
    assert again.publish(3) == Version(0, 2)
    again.offer(4)
    again.work()
    again.answer(again.todo.popleft())  # the disk has it, the process never hears of it
    once_more = again.restart()
    assert once_more.heads()[-1].version == Version(0, 3)


def test_a_baseline_that_cannot_be_rebuilt_makes_the_next_version_an_anchor(desk: Desk) -> None:
    desk.publish(1)
    again = desk.restart()
    again.offer(2)
    again.todo.clear()
    again.send(EncodeFailed(2, "no_baseline"))
    assert again.publish(3) == Version(0, 2)
    assert again.manifest(again.heads()[-1].manifest_digest).kind is Kind.ANCHOR
    assert again.publish(4) == Version(0, 3)
    assert again.manifest(again.heads()[-1].manifest_digest).kind is Kind.PATCH


# Anchors, skips, retention


def test_anchors_follow_the_interval_and_skips_the_ladder(desk: Desk) -> None:
    for generation in range(1, 74):
        desk.publish(generation)
    assert [effect.version.number for effect in desk.of(StoreAnchor)] == [11, 21, 31, 41, 51, 61, 71]
    spans = {(e.base_version.number, e.version.number) for e in desk.of(EncodeSkip)}
    assert spans == {(8, 16), (16, 24), (24, 32), (32, 40), (40, 48), (48, 56), (56, 64), (64, 72)}


def test_the_long_skip_is_made_where_its_base_is_retained(make_run: Any) -> None:
    desk = Desk(make_run(anchor_interval=100))
    for generation in range(1, 129):
        desk.publish(generation)
    assert EncodeSkip(Version(0, 64), Version(0, 128)) in desk.of(EncodeSkip)
    skips = [entry for entry in desk.catalogue().entries if entry.kind is Kind.SKIP and entry.version.number == 128]
    assert [entry.base_version for entry in skips] == [Version(0, 64), Version(0, 120)]
    route = plan_route(Version(0, 64), Version(0, 128), desk.catalogue())
    assert [entry.kind for entry in route] == [Kind.SKIP]


def test_at_every_moment_a_newcomer_finds_a_way_in(desk: Desk) -> None:
    """A-PUB-4: the publisher may die after any single step."""
    desk.publish(1)
    for generation in range(2, 45):
        desk.offer(generation)
        while desk.todo:
            desk.work()
            state = desk.restart().trainer.state
            assert state is not None
            catalogue = Catalogue(desk.run.run_id, 0, tuple(item.entry for item in state.retained))
            route = plan_route(None, state.version, catalogue)
            assert route[0].kind is Kind.ANCHOR
            blobs = {item.entry.manifest_digest: item.blob_id for item in state.retained}
            assert {blobs[entry.manifest_digest] for entry in route} <= desk.disk.blobs


def test_what_is_retained_is_two_anchors_and_all_since_the_older_and_the_disk_holds_no_more(desk: Desk) -> None:
    for generation in range(1, 41):
        desk.publish(generation)
    state = desk.trainer.state
    assert state is not None
    assert state.anchor_numbers == (21, 31)
    assert state.patch_range == (21, 40)
    assert desk.trainer.holdings == Holdings(0, 21, 40, (21, 31))
    assert desk.disk.blobs == state.blob_ids
    assert set(desk.disk.records) == state.record_digests


def test_a_failed_extra_is_given_up_and_publishing_goes_on(desk: Desk) -> None:
    for generation in range(1, 11):
        desk.publish(generation)
    desk.offer(11)
    desk.work()
    desk.work()
    assert list(desk.todo) == [StoreAnchor(Version(0, 11))]
    desk.todo.clear()
    desk.send(ExtraFailed(Version(0, 11), "enospc"))
    assert desk.publish(12) == Version(0, 12)
    assert desk.of(StoreAnchor)[-1] == StoreAnchor(Version(0, 12))
    assert desk.trainer.state is not None
    assert desk.trainer.state.anchor_numbers == (1, 12)


def test_an_extra_whose_commit_fails_is_not_in_the_catalogue(desk: Desk) -> None:
    for generation in range(1, 11):
        desk.publish(generation)
    desk.offer(11)
    for _ in range(3):
        desk.work()
    assert isinstance(desk.todo[0], Commit)
    assert desk.todo[0].generation is None
    desk.todo.clear()
    effects = desk.send(ExtraFailed(Version(0, 11), "enospc"))
    assert any(isinstance(effect, Release) for effect in effects)
    assert desk.trainer.state is not None
    assert desk.trainer.state.anchor_numbers == (1,)


def test_an_extra_is_announced_under_the_same_version(desk: Desk) -> None:
    for generation in range(1, 12):
        desk.publish(generation)
    last, before = desk.heads()[-1], desk.heads()[-2]
    assert last.version == before.version == Version(0, 11)
    assert last.manifest_digest == before.manifest_digest
    assert last.catalogue_digest != before.catalogue_digest
    assert last.issued_at_ms > before.issued_at_ms
    assert desk.of(Commit)[-1].generation is None


def blob_of(desk: Desk, number: int, kind: Kind) -> Digest:
    assert desk.trainer.state is not None
    (found,) = (
        item.blob_id
        for item in desk.trainer.state.retained
        if (item.entry.version.number, item.entry.kind) == (number, kind)
    )
    return found


def test_a_blob_that_nobody_has_any_more_is_made_up_for_by_an_anchor(desk: Desk) -> None:
    for generation in range(1, 16):
        desk.publish(generation)
    lost = blob_of(desk, 14, Kind.PATCH)
    desk.send(BlobLost(lost))
    assert list(desk.todo) == [StoreAnchor(Version(0, 15))]
    desk.send(BlobLost(lost))
    desk.settle()
    assert desk.trainer.state is not None
    assert desk.trainer.state.anchor_numbers == (11, 15)
    assert [effect.version for effect in desk.of(StoreAnchor)].count(Version(0, 15)) == 1
    assert desk.publish(16) == Version(0, 16)


@pytest.mark.parametrize("generation", [16, 21])
def test_a_blob_that_is_lost_while_a_version_is_made_is_made_up_for_by_an_anchor_of_that(
    desk: Desk, generation: int
) -> None:
    for earlier in range(1, generation):
        desk.publish(earlier)
    desk.offer(generation)
    desk.send(BlobLost(blob_of(desk, 14, Kind.PATCH)))
    desk.settle()
    assert desk.trainer.state is not None
    assert desk.trainer.state.anchor_numbers == (11, generation)
    assert desk.of(StoreAnchor).count(StoreAnchor(Version(0, generation))) == 1
    assert desk.publish(generation + 1) == Version(0, generation + 1)


def test_an_anchor_of_the_newest_version_that_was_lost_is_written_again_and_not_announced_twice(desk: Desk) -> None:
    for generation in range(1, 12):
        desk.publish(generation)
    state, commits = desk.trainer.state, len(desk.of(Commit))
    desk.send(BlobLost(blob_of(desk, 11, Kind.ANCHOR)))
    desk.settle()
    assert desk.of(StoreAnchor)[-1] == StoreAnchor(Version(0, 11))
    assert desk.trainer.state == state
    assert len(desk.of(Commit)) == commits
    assert desk.publish(12) == Version(0, 12)


def test_an_anchor_nobody_needs_is_made_for_no_lost_blob(desk: Desk) -> None:
    desk.send(BlobLost(TABLE))
    for generation in range(1, 18):
        desk.publish(generation)
    for lost in (TABLE, blob_of(desk, 5, Kind.PATCH), blob_of(desk, 16, Kind.SKIP)):
        assert desk.send(BlobLost(lost)) == []
    desk.trust.accept_descriptor(desk.run.revise(authorities=(desk.run.second.peer_id,)))
    desk.send(BlobLost(blob_of(desk, 17, Kind.PATCH)))
    assert not desk.todo


def test_an_answer_for_another_extra_is_ignored(desk: Desk) -> None:
    for generation in range(1, 16):
        desk.publish(generation)
    desk.offer(16)
    desk.work()
    desk.work()
    assert list(desk.todo) == [EncodeSkip(Version(0, 8), Version(0, 16))]
    assert desk.send(SkipEncoded(Version(0, 4), Version(0, 16), TABLE, 1, 5, 5)) == []
    assert desk.send(SkipEncoded(Version(0, 8), Version(0, 15), TABLE, 1, 5, 5)) == []
    desk.settle()
    assert Kind.SKIP in {entry.kind for entry in desk.catalogue().entries}


# Time


def test_the_head_is_signed_again_every_40_seconds(desk: Desk) -> None:
    """A-DHT-1: a reader that was away finds it within one interval."""
    desk.publish(1)
    desk.wait(limits.HEAD_RESIGN_SECONDS * 10 + 1)
    heads = desk.heads()
    assert len(heads) == 11
    assert {head.version for head in heads} == {Version(0, 1)}
    gaps = [later.issued_at_ms - earlier.issued_at_ms for earlier, later in pairwise(heads)]
    assert max(gaps) <= 40_000
    assert RESIGN_JITTER_MS < 40_000


def test_a_publisher_that_comes_back_announces_at_once(desk: Desk) -> None:
    """A-DHT-1."""
    desk.publish(1)
    again = desk.restart(learn_seconds=3.0)
    assert again.heads() == []
    again.wait(3.0)
    assert [head.version for head in again.heads()] == [Version(0, 1)]


def test_publishes_keep_the_least_interval_of_the_run(make_run: Any) -> None:
    desk = Desk(make_run(publish_interval_min_ms=5_000))
    desk.publish(1)
    desk.offer(2)
    assert not desk.todo
    desk.wait(4.9)
    assert not desk.todo
    desk.offer(3)
    desk.wait(0.2)
    assert list(desk.todo) == [EncodeSnapshot(3, Kind.PATCH)]


# Who may publish


def test_a_node_that_may_not_publish_says_so_and_does_nothing(make_run: Any) -> None:
    desk = Desk(make_run(authorities=(make_run.second,)))
    effects = desk.offer(1)
    assert [effect for effect in effects if not isinstance(effect, Report)] == [
        RefuseSnapshot(1, "not_publisher"),
        Count("rejected", "not_publisher"),
    ]
    assert desk.trainer.phase is Phase.IDLE


def test_a_key_revoked_while_the_encoder_works_publishes_nothing(desk: Desk) -> None:
    desk.publish(1)
    desk.offer(2)
    desk.offer(3)
    desk.trust.accept_descriptor(desk.run.revise(authorities=(desk.run.second.peer_id,)))
    desk.settle()
    assert desk.of(RefuseSnapshot) == [RefuseSnapshot(2, "not_publisher"), RefuseSnapshot(3, "not_publisher")]
    assert len(desk.heads()) == 1
    desk.wait(200.0)
    assert len(desk.heads()) == 1
    assert desk.trainer.state is not None
    assert desk.disk.blobs == desk.trainer.state.blob_ids


def test_a_first_version_of_another_table_than_the_owner_named_is_refused(make_run: Any) -> None:
    names = {"table_digest": Digest(b"o" * 32), "base_root": Digest(b"b" * 32), "base_blob_id": Digest(b"c" * 32)}
    desk = Desk(make_run(**names))
    assert RefuseSnapshot(1, "table") in desk.offer(1)
    assert desk.publish(2, table=Digest(b"o" * 32)) == Version(0, 1)


def test_another_table_later_opens_an_epoch_with_an_anchor(desk: Desk) -> None:
    desk.publish(1)
    desk.publish(2)
    other = Digest(b"u" * 32)
    assert desk.publish(3, table=other) == Version(1, 3)
    head = desk.heads()[-1]
    assert head.epoch_digest is not None
    epoch = desk.open(EpochRecord, desk.disk.records[head.epoch_digest])
    assert (epoch.first_number, epoch.kept_version, epoch.reason) == (3, Version(0, 2), "table")
    assert [entry.kind for entry in desk.catalogue().entries] == [Kind.ANCHOR]
    assert desk.publish(4, table=other) == Version(1, 4)
    assert desk.manifest(desk.heads()[-1].manifest_digest).kind is Kind.PATCH


# Other publishers, former lives


def test_snapshots_wait_while_the_newest_head_is_learnt(run: Any) -> None:
    desk = Desk(run, learn_seconds=3.0)
    desk.offer(1)
    assert DropSnapshot(1) in desk.offer(2)
    assert not desk.todo
    assert desk.timer == desk.now + 3.0
    desk.wait(3.0)
    assert list(desk.todo) == [EncodeSnapshot(2, Kind.ANCHOR)]


def test_a_publisher_restored_to_an_older_state_opens_an_epoch_above_what_it_published(desk: Desk) -> None:
    """A-CHAIN-4: v58 is out, the node is restored to v55 and trains on."""
    for generation in range(1, 4):
        desk.publish(generation)
    old = Disk(dict(desk.disk.state), dict(desk.disk.records), set(desk.disk.blobs))
    for generation in range(4, 7):
        desk.publish(generation)
    follower = desk.run.trust()
    follower.accept_head(desk.of(AnnounceHead)[-1].record, desk.now_ms)

    again = Desk(desk.run, disk=old, learn_seconds=3.0)
    again._move(again.now + 1.0)
    again.send(HeadSeen(encode_signed(desk.of(AnnounceHead)[-1].record), None))
    again.wait(3.0)
    assert again.heads() == []
    assert again.publish(7) == Version(1, 7)
    epoch_digest = again.heads()[-1].epoch_digest
    assert epoch_digest is not None
    follower.accept_epoch(again.disk.records[epoch_digest])
    accepted = follower.accept_head(again.of(AnnounceHead)[-1].record, again.now_ms)
    assert accepted.version == Version(1, 7)
    assert follower.fork is None
    assert again.publish(8) == Version(1, 8)


def test_peers_are_asked_for_their_head_and_their_answer_counts(run: Any) -> None:
    desk = Desk(run, learn_seconds=3.0)
    (request,) = desk.send(PeerConnected(run.stranger.peer_id, (), True))
    assert isinstance(request, SendRequest)
    assert request.message == GetHead()
    desk.send(ReplyReceived(request.request_id, run.stranger.peer_id, HeadReply(None)))
    record = run.head(Version(0, 9), issued_at_ms=run.start_ms - 9_000_000)
    desk.send(ReplyReceived(request.request_id, run.stranger.peer_id, HeadReply(record)))
    desk.wait(3.0)
    assert desk.publish(1) == Version(1, 10)


def test_an_own_state_that_is_ahead_of_what_peers_know_goes_on(desk: Desk) -> None:
    desk.publish(1)
    first = desk.of(AnnounceHead)[-1].record
    desk.publish(2)
    again = desk.restart(learn_seconds=3.0)
    again.send(HeadSeen(encode_signed(first), None))
    again.wait(3.0)
    assert again.publish(3) == Version(0, 3)


def test_the_epoch_and_its_numbers_survive_a_restart(desk: Desk) -> None:
    desk.publish(1)
    desk.publish(2, table=Digest(b"u" * 32))
    again = desk.restart()
    assert again.trust.epoch == 1
    assert again.heads()[-1].version == Version(1, 2)
    assert again.publish(3, table=Digest(b"u" * 32)) == Version(1, 3)


def test_late_news_of_a_former_life_cuts_the_encoding_and_opens_an_epoch(desk: Desk) -> None:
    desk.publish(1)
    desk.offer(2)
    desk.send(HeadSeen(desk.run.head(Version(0, 58), issued_at_ms=desk.run.start_ms - 1), None))
    desk.work()
    assert list(desk.todo) == [EncodeSnapshot(2, Kind.ANCHOR)]
    desk.settle()
    assert desk.heads()[-1].version == Version(1, 59)
    assert desk.trainer.state is not None
    assert desk.disk.blobs == desk.trainer.state.blob_ids


def test_a_head_that_would_only_be_refused_is_not_signed_again(desk: Desk) -> None:
    desk.publish(1)
    desk.send(HeadSeen(desk.run.head(Version(0, 58), issued_at_ms=desk.run.start_ms - 1), None))
    desk.wait(200.0)
    assert len(desk.heads()) == 1


def test_two_publishers_with_one_key_stop_instead_of_flapping(desk: Desk) -> None:
    """A-AUTH-3: what was agreed stays, and the operator is told once."""
    desk.publish(1)
    desk.wait(10.0)
    rival = desk.run.head(Version(0, 2), issued_at_ms=desk.now_ms)
    effects = desk.send(HeadSeen(rival, None))
    assert [effect.level for effect in effects if isinstance(effect, Log)] == ["error"]
    assert ("reason", "superseded") in next(effect for effect in effects if isinstance(effect, Report)).fields
    later = desk.run.head(Version(0, 3), issued_at_ms=desk.now_ms)
    assert [effect for effect in desk.send(HeadSeen(later, None)) if not isinstance(effect, Report)] == []
    assert RefuseSnapshot(2, "superseded") in desk.offer(2)
    desk.wait(200.0)
    assert len(desk.heads()) == 1


def test_a_restart_takes_over_from_another_publisher(desk: Desk) -> None:
    desk.publish(1)
    rival = desk.run.head(Version(0, 9), issued_at_ms=desk.now_ms + 50_000)
    again = desk.restart(learn_seconds=3.0)
    again.send(HeadSeen(rival, None))
    again.wait(3.0)
    assert again.publish(2) == Version(1, 10)


def test_a_forked_epoch_is_left_for_the_next_one(desk: Desk) -> None:
    desk.publish(1)
    own = desk.of(AnnounceHead)[-1].record
    other = desk.run.seal(replace(desk.heads()[-1], root=TABLE), desk.run.publisher)
    desk.trust.accept_fork_proof(own, other)
    assert desk.publish(2) == Version(1, 2)
    assert desk.trust.fork is None


def test_a_commit_that_the_own_rules_refuse_is_not_announced(desk: Desk) -> None:
    desk.publish(1)
    desk.offer(2)
    desk.work()
    desk.trust.accept_epoch(desk.run.epoch(1, 50, Version(0, 1)))
    effects = desk.work()
    assert any(isinstance(effect, Log) and effect.level == "error" for effect in effects)
    assert len(desk.heads()) == 1
    assert desk.publish(3) == Version(1, 50)
    assert desk.heads()[-1].epoch_digest == desk.trust.epoch_digest


def test_one_of_three_authorities_publishes_but_does_not_open_an_epoch_alone(make_run: Any) -> None:
    run = make_run(authorities=(make_run.publisher, make_run.second, make_run.third))
    desk = Desk(run)
    desk.publish(1)
    assert RefuseSnapshot(2, "authorities") in desk.offer(2, table=Digest(b"u" * 32))


@pytest.mark.parametrize("record", [b"", b"junk", b"\x93" * 40])
def test_junk_for_a_head_changes_nothing(desk: Desk, record: bytes) -> None:
    desk.publish(1)
    assert desk.send(HeadSeen(record, None)) == []
    assert desk.publish(2) == Version(0, 2)


# The rest


def test_damaged_saved_state_is_a_storage_error(run: Any) -> None:
    with pytest.raises(StorageError):
        Desk(run, disk=Disk(state={STATE_KEY: b"\x00"}))


def test_the_report_names_the_version_its_lag_and_its_patch(desk: Desk) -> None:
    """A-OBS-2."""
    desk.publish(1)
    desk.publish(2)
    fields = dict(desk.of(Report)[-1].fields)
    assert (fields["applied_version"], fields["latest_seen_version"], fields["version_lag"]) == (2, 2, 0)
    assert fields["patch_density_ratio"] == 7 / 1_000
    assert fields["publisher_seen"] is True


def test_the_timer_is_asked_for_once_per_time(desk: Desk) -> None:
    desk.publish(1)
    before = len(desk.of(SetTimer))
    for _ in range(5):
        desk.send(PeerConnected(desk.run.stranger.peer_id, (), False))
    assert len(desk.of(SetTimer)) == before


def test_an_owner_may_open_the_epoch_a_lone_authority_cannot(make_run: Any) -> None:
    run = make_run(authorities=(make_run.publisher, make_run.second, make_run.third))
    desk = Desk(run)
    desk.publish(1)
    desk.trust.accept_epoch(run.epoch(1, 2, Version(0, 1)))
    assert desk.publish(2, table=Digest(b"u" * 32)) == Version(1, 2)


def test_a_full_catalogue_makes_the_next_version_an_anchor(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-PUB-4: where every extra anchor failed, the next version is one."""
    monkeypatch.setattr(limits, "CATALOGUE_ENTRIES_MAX", 20)
    kinds = []
    for generation in range(1, 25):
        desk.offer(generation)
        while desk.todo:
            effect = desk.todo.popleft()
            if isinstance(effect, StoreAnchor | EncodeSkip):
                desk.send(ExtraFailed(effect.version, "enospc"))
                continue
            if isinstance(effect, EncodeSnapshot):
                kinds.append(effect.kind)
            desk.send(desk.answer(effect))
        assert desk.trainer.state is not None
        assert len(desk.trainer.state.retained) <= 20
    assert kinds[0] is Kind.ANCHOR
    assert kinds[1:17] == [Kind.PATCH] * 16
    assert kinds[17] is Kind.ANCHOR


# Rounds


class Leadership:
    """A coordinator that leads when the test says so."""

    def __init__(self, *, leads: bool = True, term: int = 1) -> None:
        self.leads = leads
        self.term = term

    def is_leading(self, now: float) -> bool:
        return self.leads


class Swarm:
    """Three authorities that train together, and a follower that believes what they announce."""

    def __init__(self, make_run: Any, **changes: Any) -> None:
        keys = (make_run.publisher, make_run.second, make_run.third)
        self.run = make_run(authorities=keys, algorithm="pulseloco", **changes)
        self.offices = [Leadership(leads=index == 0) for index in range(3)]
        pairs = zip(keys, self.offices, strict=True)
        self.desks = [Desk(self.run, key=key, leadership=office) for key, office in pairs]
        self.follower = self.run.trust()
        self.heard: list[int] = [0, 0, 0]

    def elect(self, index: int, term: int) -> None:
        """The votes of a term are with this authority, and everybody knows."""
        for other, office in enumerate(self.offices):
            office.leads, office.term = other == index, term

    def gossip(self) -> list[Head]:
        """Show everybody what was announced since the last time; return it."""
        heads = []
        for index, desk in enumerate(self.desks):
            announced = desk.of(AnnounceHead)
            for effect in announced[self.heard[index] :]:
                heads.append(desk.open(Head, effect.record))
                self.follower.accept_head(effect.record, desk.now_ms)
                for other in self.desks:
                    if other is not desk:
                        with suppress(TrustError):  # older than what this one knows
                            other.trust.accept_head(effect.record, desk.now_ms)
                        other.send(HeadSeen(encode_signed(effect.record), None))
            self.heard[index] = len(announced)
        return heads

    def round(self, round_index: int, members: tuple[int, ...] = (0, 1, 2)) -> list[Head]:
        for index in members:
            self.desks[index].publish_round(round_index)
        return self.gossip()


@pytest.fixture
def swarm(make_run: Any) -> Swarm:
    return Swarm(make_run)


def test_only_the_coordinator_announces_and_the_others_keep_the_same_ready(swarm: Swarm) -> None:
    heads = [head for round_index in range(3) for head in swarm.round(round_index)]
    assert [(head.version, head.term) for head in heads] == [(Version(0, n), 1) for n in (1, 2, 3)]
    assert [desk.of(Commit)[-1].is_standby for desk in swarm.desks] == [False, True, True]
    assert [desk.trainer.state.root for desk in swarm.desks if desk.trainer.state] == [heads[-1].root] * 3
    assert all(desk.of(AnnounceHead) == [] for desk in swarm.desks[1:])
    for desk, reason in zip(swarm.desks, ("", "standby", "standby"), strict=True):
        assert dict(desk.of(Report)[-1].fields)["reason"] == reason
    lines = [effect.text for effect in swarm.desks[1].of(Log)]
    assert lines[-1].startswith("keeping ready version 0.3")


def test_manifests_and_heads_name_the_term_and_the_round(swarm: Swarm) -> None:
    swarm.elect(0, 5)
    (head,) = swarm.round(0)
    manifest = swarm.desks[0].manifest(head.manifest_digest)
    assert (head.term, manifest.term, manifest.trainer_step) == (5, 5, 0)


def test_a_head_is_on_disk_only_once_it_was_announced(swarm: Swarm) -> None:
    """What a commit stores, a former coordinator may show after a restart: no head of a term that is over."""
    swarm.round(0)
    assert [key for key, _ in swarm.desks[0].of(Commit)[0].state] == [STATE_KEY]


@pytest.mark.parametrize("members", [(1, 2), (0, 1, 2)])
def test_a_take_over_goes_on_in_the_same_epoch(swarm: Swarm, members: tuple[int, ...]) -> None:
    for round_index in range(3):
        swarm.round(round_index)
    swarm.elect(1, 2)
    swarm.desks[1].send(TimerFired())
    (head,) = swarm.gossip()
    assert (head.version, head.term) == (Version(0, 3), 2), "what is known is announced at once, in the new term"
    heads = swarm.round(3, members)
    assert [(head.version, head.term) for head in heads] == [(Version(0, 4), 2)]
    manifest = swarm.desks[1].manifest(heads[0].manifest_digest)
    assert (manifest.kind, manifest.base_version) == (Kind.PATCH, Version(0, 3))
    assert swarm.follower.fork is None


def test_what_the_leader_did_not_announce_the_next_one_does(swarm: Swarm) -> None:
    """It died between the outer step and its announcement; with the same root there is no fork if it had not."""
    swarm.round(0)
    for desk in swarm.desks:
        desk.publish_round(1)
    unheard = swarm.desks[0].of(AnnounceHead)[-1].record
    swarm.heard[0] += 1
    swarm.elect(1, 2)
    swarm.desks[1].send(TimerFired())
    (head,) = swarm.gossip()
    assert (head.version, head.term) == (Version(0, 2), 2)
    assert swarm.follower.accept_head(unheard, swarm.desks[0].now_ms) == head, "no news"
    assert swarm.follower.fork is None


def test_a_former_coordinator_says_nothing_more_and_follows(swarm: Swarm) -> None:
    swarm.round(0)
    swarm.elect(1, 2)
    swarm.round(1, (1, 2))
    swarm.round(2, (1, 2))
    before = len(swarm.desks[0].of(AnnounceHead))
    swarm.desks[0].wait(100.0)
    assert len(swarm.desks[0].of(AnnounceHead)) == before
    assert swarm.desks[0].publish_round(3) == Version(0, 4), "rounds it missed are left out"
    swarm.elect(0, 3)
    swarm.desks[0].wait(5.0)
    swarm.round(3, (1, 2))
    assert swarm.follower.head is not None
    assert (swarm.follower.head.version, swarm.follower.head.term) == (Version(0, 4), 3)
    skip = swarm.desks[0].manifest(swarm.follower.head.manifest_digest)
    assert (skip.kind, skip.base_version) == (Kind.SKIP, Version(0, 1))
    assert swarm.follower.fork is None


def test_a_leader_that_is_behind_says_nothing_older(swarm: Swarm) -> None:
    swarm.round(0)
    swarm.round(1, (0, 1))
    swarm.elect(2, 2)
    swarm.desks[2].wait(10.0)
    assert swarm.gossip() == []
    (head,) = swarm.round(2, (2,))
    assert (head.version, head.term) == (Version(0, 3), 2)


def test_a_coordinator_without_fresh_votes_holds_its_tongue_until_they_come(swarm: Swarm) -> None:
    swarm.round(0)
    swarm.offices[0].leads = False
    assert swarm.round(1) == []
    swarm.offices[0].leads = True
    swarm.desks[0].wait(5.0)
    (head,) = swarm.gossip()
    assert head.version == Version(0, 2)


def test_the_coordinator_signs_its_head_again(swarm: Swarm) -> None:
    swarm.round(0)
    swarm.desks[0].wait(limits.HEAD_RESIGN_SECONDS * 5 + 1)
    heads = swarm.gossip()
    assert len(heads) == 5
    assert {(head.version, head.term) for head in heads} == {(Version(0, 1), 1)}


def test_extras_are_made_everywhere_and_announced_by_one(swarm: Swarm) -> None:
    for round_index in range(16):
        swarm.round(round_index)
    assert [desk.trainer.state.anchor_numbers for desk in swarm.desks if desk.trainer.state] == [(1, 10)] * 3
    assert len({desk.trainer.state.blob_ids for desk in swarm.desks if desk.trainer.state}) == 1
    kinds = [entry.kind for entry in swarm.desks[0].catalogue().entries if entry.version == Version(0, 16)]
    assert kinds == [Kind.PATCH, Kind.SKIP]


def test_a_standby_that_began_later_makes_the_same_anchors(swarm: Swarm) -> None:
    """A seed that stored the leader's finds every blob of the next leader's catalogue on its disk."""
    for round_index in range(25):
        swarm.round(round_index, (0, 1, 2) if round_index >= 13 else (0, 1))
    states = [desk.trainer.state for desk in swarm.desks if desk.trainer.state]
    assert [state.anchor_numbers for state in states] == [(10, 20), (10, 20), (14, 20)]
    swarm.round(30)
    states = [desk.trainer.state for desk in swarm.desks if desk.trainer.state]
    assert [state.anchor_numbers for state in states] == [(20, 31)] * 3
    assert states[2].blob_ids == states[0].blob_ids


def test_a_skip_that_came_first_is_not_made_twice(make_run: Any) -> None:
    swarm = Swarm(make_run, anchor_interval=100)
    swarm.round(7)
    (head,) = swarm.round(15)
    assert head.version == Version(0, 16)
    assert swarm.desks[0].of(EncodeSkip) == []
    assert [entry.kind for entry in swarm.desks[0].catalogue().entries] == [Kind.ANCHOR, Kind.SKIP]


def test_a_restarted_standby_goes_on_from_its_own_disk(swarm: Swarm) -> None:
    swarm.round(0)
    swarm.round(1)
    again = swarm.desks[1] = swarm.desks[1].restart(leadership=swarm.offices[1])
    swarm.round(2)
    assert again.of(Commit)[-1].version == Version(0, 3)
    swarm.elect(1, 2)
    again.wait(5.0)
    swarm.heard[1] = 0
    (head,) = swarm.gossip()
    assert again.manifest(head.manifest_digest).base_version == Version(0, 2)


# Rounds: what is refused


def test_a_plain_trainer_is_told_before_a_weight_is_copied(make_run: Any) -> None:
    run = make_run(authorities=(make_run.second,), algorithm="pulseloco")
    desk = Desk(run)
    assert desk.trainer.find_refusal(SnapshotOffered(1, 0, TABLE), desk.now) == "not_publisher"
    desk.send(HeadSeen(run.head(Version(0, 2), issued_at_ms=run.start_ms + 60_000, key=run.second, term=1), None))
    assert desk.of(Log) == [], "others publish, as they should"


def test_an_authority_that_knows_of_no_coordinator_does_not_speak_for_rounds(make_run: Any) -> None:
    desk = Desk(make_run(algorithm="pulseloco"))
    assert RefuseSnapshot(1, "not_publisher") in desk.offer(1)


def test_a_round_is_published_once(swarm: Swarm) -> None:
    swarm.round(3)
    for round_index in (2, 3):
        snapshot = SnapshotOffered(9, round_index, TABLE)
        assert swarm.desks[0].trainer.find_refusal(snapshot, swarm.desks[0].now) == "behind"
    assert RefuseSnapshot(3, "behind") in swarm.desks[0].offer(3, step=2)
    assert swarm.desks[0].publish_round(4) == Version(0, 5)


def test_optimiser_steps_are_no_rounds(swarm: Swarm) -> None:
    desk = swarm.desks[0]
    desk.send(StateReached(2, TABLE))
    assert RefuseSnapshot(1, "round") in desk.offer(1, step=16)
    assert desk.trainer.find_refusal(SnapshotOffered(2, 1, TABLE), desk.now) == "round"
    assert desk.publish_round(2) == Version(0, 3)


def test_a_snapshot_that_waited_is_still_of_its_round(make_run: Any) -> None:
    swarm = Swarm(make_run)
    desk = Desk(swarm.run, leadership=swarm.offices[0], learn_seconds=3.0)
    desk.send(StateReached(0, TABLE))
    desk.offer(1, step=0)
    desk.send(StateReached(1, TABLE))
    desk.wait(3.0)
    desk.settle()
    assert desk.heads()[-1].version == Version(0, 1)


# Rounds: weights that differ


def test_a_standby_whose_weights_differ_adopts_nothing_and_starts_over(swarm: Swarm) -> None:
    swarm.round(0)
    swarm.desks[1].publish_round(1, "bits that rotted")
    swarm.desks[0].publish_round(1)
    swarm.gossip()
    assert Count("rejected", "diverged") in swarm.desks[1].log
    assert [effect.level for effect in swarm.desks[1].of(Log)].count("error") == 1
    swarm.elect(1, 2)
    swarm.desks[1].wait(20.0)
    assert swarm.gossip() == [], "what differs is never announced"
    blobs = set(swarm.desks[1].disk.blobs)
    (head,) = swarm.round(2, (1,))
    assert (head.version, head.term, head.root) == (Version(0, 3), 2, swarm.run.digest("root of round 2"))
    assert [entry.kind for entry in swarm.desks[1].catalogue().entries] == [Kind.ANCHOR], "no claim of before is left"
    assert not blobs & swarm.desks[1].disk.blobs
    swarm.round(3, (1,))
    assert [entry.kind for entry in swarm.desks[1].catalogue().entries] == [Kind.ANCHOR, Kind.PATCH]
    assert swarm.follower.fork is None


def test_weights_that_differ_from_what_is_known_are_never_signed(swarm: Swarm) -> None:
    swarm.round(0)
    swarm.round(1, (0,))
    desk = swarm.desks[1]
    blobs = set(desk.disk.blobs)
    desk.publish_round(1, "bits that rotted")
    assert RefuseSnapshot(2, "diverged") in desk.log
    assert [commit.version for commit in desk.of(Commit)] == [Version(0, 1)]
    assert desk.disk.blobs == blobs
    assert desk.publish_round(2) == Version(0, 3)
    assert desk.of(EncodeSnapshot)[-1].kind is Kind.ANCHOR


def test_a_commit_under_way_does_not_heal_a_divergence(swarm: Swarm) -> None:
    swarm.round(0)
    desk = swarm.desks[1]
    desk.publish_round(1, "bits that rotted")
    desk.offer(3, "round 2", step=2)
    desk.work()
    swarm.round(1, (0,))
    desk.settle()
    swarm.elect(1, 2)
    desk.wait(20.0)
    assert swarm.gossip() == []
    assert desk.publish_round(3) == Version(0, 4)
    assert desk.of(EncodeSnapshot)[-1].kind is Kind.ANCHOR


def test_a_lone_authority_that_lost_its_state_and_its_rounds_opens_an_epoch(make_run: Any) -> None:
    """A-CHAIN-4 with rounds: trained again from an older checkpoint, round 2 has other weights than version 3 had."""
    run = make_run(algorithm="pulseloco")
    desk = Desk(run, leadership=Leadership())
    for round_index in range(3):
        desk.publish_round(round_index)
    follower = run.trust()
    newest = desk.of(AnnounceHead)[-1].record
    follower.accept_head(newest, desk.now_ms)
    again = Desk(run, leadership=Leadership(term=2))
    again.trust.accept_head(newest, again.now_ms)
    again.publish_round(1, "another round 1")
    assert again.of(AnnounceHead) == [], "older than what is known"
    again.offer(3, "another round 2", step=2)
    again.settle()
    assert RefuseSnapshot(3, "diverged") in again.log
    assert again.publish_round(3, "another round 3") == Version(1, 7)
    record = again.disk.records[again.heads()[-1].epoch_digest]
    assert again.open(EpochRecord, record).reason == "divergence"
    follower.accept_epoch(record)
    assert follower.accept_head(again.of(AnnounceHead)[-1].record, again.now_ms).version == Version(1, 7)
    assert again.publish_round(4, "another round 4") == Version(1, 8)


def test_an_epoch_the_owner_opens_is_entered_by_all(swarm: Swarm) -> None:
    swarm.round(0)
    opened = swarm.run.epoch(1, 5, Version(0, 1))
    for trust in (swarm.follower, *(desk.trust for desk in swarm.desks)):
        trust.accept_epoch(opened)
    (head,) = swarm.round(1)
    assert head.version == Version(1, 6)
    swarm.elect(2, 2)
    swarm.desks[2].wait(5.0)
    (head,) = swarm.gossip()
    assert (head.version, head.term) == (Version(1, 6), 2)
    assert [desk.of(EncodeSnapshot)[-1].kind for desk in swarm.desks] == [Kind.ANCHOR] * 3


def test_another_table_needs_keys_that_one_authority_does_not_hold(swarm: Swarm) -> None:
    swarm.round(0)
    other = Digest(b"u" * 32)
    assert RefuseSnapshot(9, "authorities") in swarm.desks[0].offer(9, table=other, step=1)


def test_a_state_that_the_epoch_in_force_left_behind_starts_over(swarm: Swarm) -> None:
    """It opened an epoch and died before anybody heard; the others went on beyond its first number."""
    swarm.round(0)
    desk = swarm.desks[0]
    desk.trust.accept_epoch(swarm.run.epoch(1, 3, Version(0, 1)))
    assert desk.publish_round(1) == Version(1, 4)
    swarm.elect(1, 2)
    swarm.heard[0] = len(desk.of(AnnounceHead))
    for round_index in (1, 2, 3):
        swarm.round(round_index, (1, 2))
    again = swarm.desks[0] = desk.restart(leadership=swarm.offices[0])
    again.trust.accept_head(swarm.desks[1].of(AnnounceHead)[-1].record, again.now_ms)
    assert again.trust.epoch == 0
    swarm.elect(0, 3)
    assert again.publish_round(4) == Version(0, 5)
    assert Count("rejected", "rollback") in again.log
    assert again.of(EncodeSnapshot)[-1].kind is Kind.ANCHOR
    swarm.heard[0] = 0
    (head,) = swarm.gossip()
    assert (head.version, head.term) == (Version(0, 5), 3)
