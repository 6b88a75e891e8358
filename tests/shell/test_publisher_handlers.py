"""A training process learns what became of each snapshot, once, whatever happened to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.records import Kind
from pulsenet.errors import StorageError
from pulsenet.ids import Digest, Version
from pulsenet.local.protocol import PublishDone, PublishStatus
from pulsenet.node.effects import Commit, DropSnapshot, EncodeSkip, EncodeSnapshot, RefuseSnapshot, StoreAnchor
from pulsenet.node.events import (
    AnchorStored,
    Committed,
    EncodeFailed,
    Event,
    ExtraFailed,
    PatchEncoded,
    SkipEncoded,
    SnapshotOffered,
)
from pulsenetd.handlers.publisher import OFFERS_MAX, PublisherHandlers
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.local.server import SnapshotOffer
from pulsenetd.metrics import Metrics
from pulsenetd.storage.disk import Disk
from pulsenetd.storage.publishing import Publisher
from pulsenetd.storage.store import Store


class RefusingDisk(Disk):
    """A disk that can run out of room at a commit."""

    is_full = False

    def before_commit(self) -> None:
        if self.is_full:
            raise StorageError("database or disk is full", "enospc")


class Trainer:
    """The handlers on a real pipeline; the test takes the machine's part."""

    def __init__(self, directory: Path, run: Any, hands: Any, *, takes_turns: bool = False) -> None:
        self.run = run
        self.disk = RefusingDisk()
        self.store = Store.open(directory, disk=self.disk)
        self.publisher = Publisher(self.store, directory / "spools")
        self.metrics = Metrics()
        self.ledger = Ledger(self.metrics, self._monotonic)
        self.threads = ThreadPoolExecutor(1)
        self.offered: list[Event] = []
        self.now = 0.0
        self.refusal = ""
        self.handlers = PublisherHandlers(
            self.publisher,
            self.threads,
            self.offered.append,
            self.ledger,
            self.metrics,
            self._monotonic,
            find_refusal=lambda snapshot: self.refusal,
            takes_turns=takes_turns,
        )
        self.table = self.handlers.table()
        self.model = hands.Model()

    def _monotonic(self) -> float:
        self.now += 0.5
        return self.now

    async def offer(self, generation: int, *, consensus: bool = True) -> asyncio.Future[PublishDone]:
        self.parts = self.model.parts()
        return await self.handlers.offer(SnapshotOffer(generation, 10 + generation, self.parts, consensus))

    async def execute(self, effect: Any) -> Any:
        """Return what the handler posted, if anything."""
        posted: list[Event] = []
        await self.table[type(effect)](effect, posted.append)
        return posted[0] if posted else None

    def commit_of(self, encoded: PatchEncoded, number: int, kind: Kind, root: Digest) -> Commit:
        base = None if kind is Kind.ANCHOR else Version(0, number - 1)
        manifest = self.run.manifest(
            number,
            kind=kind,
            base_version=base,
            base_root=None if base is None else root,
            root=encoded.root,
            blob_id=encoded.blob_id,
            encoded_size_bytes=encoded.encoded_size_bytes,
            changed_count=encoded.changed_count,
            codec_id=encoded.codec_id,
        )
        records = (self.run.sign(manifest, self.run.publisher),)
        return Commit(encoded.generation, Version(0, number), encoded.root, records, (("state", b"s"),))

    async def publish(self, generation: int) -> PublishDone:
        """Publish the model as version ``generation``, as the machine would."""
        outcome = await self.offer(generation)
        held = self.publisher.committed
        kind = Kind.ANCHOR if held is None else Kind.PATCH
        encoded = await self.execute(EncodeSnapshot(generation, kind))
        assert isinstance(encoded, PatchEncoded)
        root = encoded.root if held is None else held.root
        answer = await self.execute(self.commit_of(encoded, generation, kind, root))
        assert answer == Committed(Version(0, generation))
        return await outcome

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"pulsenet_{name}", labels)

    def close(self) -> None:
        self.publisher.close()
        self.store.close()
        self.threads.shutdown()


@pytest.fixture
def trainer(tmp_path: Path, run: Any, hands: Any) -> Iterator[Trainer]:
    made = Trainer(tmp_path / "trainer", run, hands)
    yield made
    made.close()


async def test_an_offer_reaches_the_machine_with_its_table(trainer: Trainer) -> None:
    for consensus in (True, False):
        assert not (await trainer.offer(1, consensus=consensus)).done()
        assert trainer.offered[-1] == SnapshotOffered(1, 11, trainer.model.table.digest, consensus)


async def test_a_committed_version_is_told_with_its_sizes(trainer: Trainer) -> None:
    anchor = await trainer.publish(1)
    trainer.model.step()
    patch = await trainer.publish(2)
    table = trainer.model.table
    assert (anchor.status, anchor.version, anchor.reason) == (PublishStatus.COMMITTED, Version(0, 1), "")
    assert anchor.changed_count == anchor.element_count == table.element_count
    assert (patch.status, patch.version) == (PublishStatus.COMMITTED, Version(0, 2))
    assert 0 < patch.changed_count < table.element_count // 10
    assert 0 < patch.encoded_size_bytes < patch.raw_size_bytes == table.size_bytes
    assert trainer.store.state("state") == b"s"


async def test_a_committed_version_shows_in_metrics_and_status(trainer: Trainer) -> None:
    await trainer.publish(1)
    assert trainer.value("patch_density_ratio") == 0.0, "an anchor is no patch"
    trainer.model.step()
    done = await trainer.publish(2)
    assert trainer.value("published_versions_total") == 2.0
    assert trainer.value("patch_density_ratio") == done.changed_count / done.element_count
    assert trainer.value("patch_compression_ratio") == done.raw_size_bytes / done.encoded_size_bytes
    assert trainer.value("update_seconds_count", stage="encode") == 2.0
    first, second = trainer.ledger.versions.values()
    assert (first["version"], first["kind"]) == (1, "anchor")
    assert first["encode_seconds"] == pytest.approx(0.5, abs=0.2)
    assert (second["kind"], second["changed_count"]) == ("patch", done.changed_count)
    held = trainer.publisher.committed
    assert held is not None
    assert second["root"] == held.root.hex()


async def test_a_snapshot_that_a_newer_one_replaced_is_told_so(trainer: Trainer) -> None:
    outcome = await trainer.offer(1)
    assert await trainer.execute(DropSnapshot(1)) is None
    done = await outcome
    assert (done.status, done.version) == (PublishStatus.REPLACED, None)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("not_publisher", PublishStatus.NOT_PUBLISHER),
        ("table", PublishStatus.FAILED),
        ("superseded", PublishStatus.FAILED),
    ],
)
async def test_a_refused_snapshot_is_told_why(trainer: Trainer, reason: str, status: PublishStatus) -> None:
    outcome = await trainer.offer(1)
    await trainer.execute(RefuseSnapshot(1, reason))
    done = await outcome
    assert (done.status, done.reason) == (status, reason)


@pytest.mark.parametrize(
    ("reason", "status"), [("not_publisher", PublishStatus.NOT_PUBLISHER), ("behind", PublishStatus.FAILED)]
)
async def test_an_offer_that_can_become_no_version_is_refused_before_a_part_is_sent(
    trainer: Trainer, reason: str, status: PublishStatus
) -> None:
    trainer.refusal = reason

    outcome = await trainer.offer(1)
    assert outcome.done(), "the local server asks for parts of everything else"
    done = outcome.result()
    assert (done.status, done.reason, done.version) == (status, reason, None)
    assert trainer.offered == [], "the machine has nothing to do with it"
    assert trainer.parts.waiting_count == 0
    assert trainer.value("rejected_total", reason=reason) == 1.0


async def test_whose_turn_it_never_is_offers_after_each_round_without_being_counted(
    tmp_path: Path, run: Any, hands: Any
) -> None:
    trainer = Trainer(tmp_path / "turns", run, hands, takes_turns=True)
    try:
        for trainer.refusal in ("not_publisher", "behind"):
            done = await (await trainer.offer(1))
            assert done.reason == trainer.refusal
        assert trainer.value("rejected_total", reason="not_publisher") is None
        assert trainer.value("rejected_total", reason="behind") == 1.0
    finally:
        trainer.close()


async def test_a_version_kept_ready_is_told_as_such_and_not_counted_as_published(trainer: Trainer) -> None:
    outcome = await trainer.offer(1)
    encoded = await trainer.execute(EncodeSnapshot(1, Kind.ANCHOR))
    commit = trainer.commit_of(encoded, 1, Kind.ANCHOR, encoded.root)
    assert await trainer.execute(replace(commit, is_standby=True)) == Committed(Version(0, 1))
    done = await outcome
    assert (done.status, done.version) == (PublishStatus.STANDBY, Version(0, 1))
    assert done.encoded_size_bytes > 0
    assert trainer.value("published_versions_total") == 0.0
    assert list(trainer.ledger.versions), "status shows what is ready"


async def test_offers_beyond_the_bound_are_refused_as_busy_and_close_their_memory(trainer: Trainer) -> None:
    outcomes = [await trainer.offer(generation) for generation in range(1, OFFERS_MAX + 2)]
    assert [outcome.done() for outcome in outcomes] == [False] * OFFERS_MAX + [True]
    assert outcomes[-1].result().reason == "busy"
    assert trainer.parts.waiting_count == 0
    assert outcomes[-1].result().status is PublishStatus.FAILED
    await trainer.execute(DropSnapshot(1))
    assert not (await trainer.offer(99)).done(), "an outcome makes room"
    assert len(trainer.offered) == OFFERS_MAX + 1


async def test_a_failed_encoding_is_told_and_the_next_publish_goes_on(trainer: Trainer) -> None:
    outcome = await trainer.offer(1)
    # A patch is ordered and there is nothing it could start from.
    assert await trainer.execute(EncodeSnapshot(1, Kind.PATCH)) == EncodeFailed(1, "no_baseline")
    failed, committed = await outcome, await trainer.publish(2)
    assert (failed.status, failed.reason) == (PublishStatus.FAILED, "no_baseline")
    assert committed.status is PublishStatus.COMMITTED
    # What failed may have waited minutes for a training process that is gone, which says nothing of the encoder.
    assert trainer.value("update_seconds_count", stage="encode") == 1.0


async def test_a_commit_the_disk_refuses_is_told_and_nothing_moved(trainer: Trainer) -> None:
    """A-PUB-2, A-DSK-1"""
    await trainer.publish(1)
    held = trainer.publisher.committed
    assert held is not None
    trainer.model.step()
    outcome = await trainer.offer(2)
    encoded = await trainer.execute(EncodeSnapshot(2, Kind.PATCH))
    trainer.disk.is_full = True
    answer = await trainer.execute(trainer.commit_of(encoded, 2, Kind.PATCH, held.root))
    assert answer == EncodeFailed(2, "enospc")
    assert trainer.publisher.committed == held
    done = await outcome
    assert (done.status, done.reason) == (PublishStatus.FAILED, "enospc")
    assert trainer.value("published_versions_total") == 1.0
    assert list(trainer.ledger.versions) == [1]


async def test_a_snapshot_refused_after_its_encoding_leaves_nothing_behind(trainer: Trainer) -> None:
    """A rival's head may arrive while a snapshot is being encoded."""
    outcome = await trainer.offer(1)
    await trainer.execute(EncodeSnapshot(1, Kind.ANCHOR))
    await trainer.execute(RefuseSnapshot(1, "superseded"))
    assert (await outcome).reason == "superseded"
    assert trainer.handlers._encode_seconds == {}
    assert trainer.handlers._outcomes == {}


async def test_a_training_process_that_went_away_stops_nothing(trainer: Trainer) -> None:
    outcome = await trainer.offer(1)
    outcome.cancel()
    await trainer.execute(DropSnapshot(1))
    await trainer.execute(DropSnapshot(7))
    assert (await trainer.publish(2)).status is PublishStatus.COMMITTED


async def test_anchors_and_skips_beside_the_newest_version_are_answered(trainer: Trainer) -> None:
    for number in (1, 2, 3):
        await trainer.publish(number)
        trainer.model.step()
    anchor = await trainer.execute(StoreAnchor(Version(0, 3)))
    skip = await trainer.execute(EncodeSkip(Version(0, 1), Version(0, 3)))
    late = await trainer.execute(StoreAnchor(Version(0, 2)))
    held = trainer.publisher.committed
    assert held is not None
    manifest = trainer.run.manifest(
        3, root=held.root, blob_id=anchor.blob_id, encoded_size_bytes=anchor.encoded_size_bytes
    )
    records = (trainer.run.sign(manifest, trainer.run.publisher),)
    beside = await trainer.execute(Commit(None, held.version, held.root, records, ()))
    assert isinstance(anchor, AnchorStored)
    assert isinstance(skip, SkipEncoded)
    assert late == ExtraFailed(Version(0, 2), "no_baseline")
    assert beside == Committed(Version(0, 3))
    assert trainer.value("published_versions_total") == 3.0
