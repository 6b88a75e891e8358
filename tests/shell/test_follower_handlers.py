"""Hops move the mirror; engines are handed what they lack, once, and say what became of it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.records import Kind, Manifest
from pulsenet.chain.signing import record_digest
from pulsenet.errors import StorageError
from pulsenet.ids import Digest, Version
from pulsenet.local.protocol import UpdateKind
from pulsenet.node.effects import ApplyHop, Commit, DropPreparation, EncodeSnapshot, HandToEngine, PrepareHop
from pulsenet.node.events import EngineApplied, EngineFailed, Event, HopApplied, HopFailed, PatchEncoded
from pulsenetd.handlers.follower import FollowerHandlers
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.local.server import EngineConfirmation
from pulsenetd.metrics import Metrics
from pulsenetd.storage.mirror import Mirror
from pulsenetd.storage.publishing import Publisher
from pulsenetd.storage.staging import StagedUpdate
from pulsenetd.storage.store import Store

ONE, TWO, THREE = (Version(0, number) for number in (1, 2, 3))


class Upstream:
    """A publisher whose versions the tests fetch."""

    def __init__(self, directory: Path, run: Any, hands: Any) -> None:
        self.run = run
        self.store = Store.open(directory)
        self.publisher = Publisher(self.store, directory / "spools")
        self.model = hands.Model()
        self.manifests: list[Manifest] = []

    def publish(self, count: int) -> list[Manifest]:
        for _ in range(count):
            number = len(self.manifests) + 1
            held = self.publisher.committed
            kind = Kind.ANCHOR if held is None else Kind.PATCH
            self.publisher.offer(number, self.model.parts())
            encoded = self.publisher.encode_snapshot(EncodeSnapshot(number, kind))
            assert isinstance(encoded, PatchEncoded)
            manifest = self.run.manifest(
                number,
                kind=kind,
                base_version=None if held is None else held.version,
                base_root=None if held is None else held.root,
                root=encoded.root,
                blob_id=encoded.blob_id,
                encoded_size_bytes=encoded.encoded_size_bytes,
                changed_count=encoded.changed_count,
                codec_id=encoded.codec_id,
            )
            signed = self.run.sign(manifest, self.run.publisher)
            self.publisher.commit(Commit(number, manifest.version, manifest.root, (signed,), ()))
            self.manifests.append(manifest)
            self.model.step()
        return self.manifests

    def close(self) -> None:
        self.publisher.close()
        self.store.close()


class Follower:
    """The handlers on a real mirror; the test takes the machine's and the engine's part."""

    def __init__(self, directory: Path, upstream: Upstream, hands: Any) -> None:
        self.upstream, self.hands = upstream, hands
        self.store = Store.open(directory)
        self.mirror = Mirror(self.store, directory / "spools")
        self.mirror.restore()
        self.metrics = Metrics()
        self.now = 100.0
        self.ledger = Ledger(self.metrics, lambda: self.now)
        self.threads = ThreadPoolExecutor(1)
        self.posted: list[Event] = []
        self.handlers = FollowerHandlers(
            self.mirror, self.threads, self.posted.append, self.ledger, self.metrics, lambda: self.now
        )
        self.table = self.handlers.table()

    async def hop(self, manifest: Manifest) -> Event:
        """Fetch a manifest's blob and apply it."""
        signed = self.upstream.run.sign(manifest, self.upstream.run.publisher)
        self.store.put_record(signed)
        self.hands.copy_blob(self.upstream.store, self.store, manifest.blob_id)
        posted: list[Event] = []
        await self.table[ApplyHop](ApplyHop(manifest, record_digest(signed)), posted.append)
        (answer,) = posted
        return answer

    async def hand_over(self, version: Version) -> None:
        await self.table[HandToEngine](HandToEngine(version), self.posted.append)

    async def follow(self, count: int) -> None:
        """Apply the next ``count`` versions and order their hand-over."""
        held = self.mirror.held
        first = 0 if held is None else held.version.number
        for manifest in self.upstream.manifests[first : first + count]:
            assert isinstance(await self.hop(manifest), HopApplied)
        assert self.mirror.held is not None
        await self.hand_over(self.mirror.held.version)

    async def ask(
        self, engine_version: Version | None, wait_seconds: float = 0.0, *, root: Digest | None = None
    ) -> StagedUpdate | None:
        return await self.handlers.serve_engine(engine_version, root, wait_seconds)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"pulsenet_{name}", labels)

    def close(self) -> None:
        self.threads.shutdown()
        self.mirror.close()
        self.store.close()


def end(staged: StagedUpdate | None) -> bool:
    """Be through with a hand-over, as the local server is after a confirmation."""
    assert staged is not None
    staged.close()
    return staged.finish()


@pytest.fixture
def upstream(tmp_path: Path, run: Any, hands: Any) -> Iterator[Upstream]:
    made = Upstream(tmp_path / "trainer", run, hands)
    yield made
    made.close()


@pytest.fixture
def follower(tmp_path: Path, upstream: Upstream, hands: Any) -> Iterator[Follower]:
    upstream.publish(3)
    made = Follower(tmp_path / "inferencer", upstream, hands)
    yield made
    made.close()


# Hops


async def test_a_hop_is_answered_timed_and_shown(follower: Follower) -> None:
    follower.ledger.note_version(1)
    follower.ledger._seen_at[1] = 97.5
    anchor, patch = follower.upstream.manifests[:2]
    assert await follower.hop(anchor) == HopApplied(anchor.version, anchor.root)
    assert follower.value("patch_density_ratio") == 0.0, "an anchor is no patch"
    assert await follower.hop(patch) == HopApplied(patch.version, patch.root)
    assert follower.value("patch_density_ratio") == patch.changed_count / patch.element_count
    assert follower.value("update_seconds_count", stage="verify") == 2.0
    assert follower.value("update_seconds_sum", stage="fetch") == 2.5
    first, second = follower.ledger.versions.values()
    assert (first["kind"], first["fetch_seconds"]) == ("anchor", 2.5)
    assert (second["kind"], second["root"], second["fetch_seconds"]) == ("patch", patch.root.hex(), None)
    assert not follower.ledger.last_update_failed


async def test_a_hop_that_cannot_be_made_is_told_and_the_node_is_not_ready(follower: Follower) -> None:
    first, _, third = follower.upstream.manifests
    await follower.hop(first)
    assert await follower.hop(third) == HopFailed(THREE, "base_mismatch", ONE)
    assert follower.ledger.last_update_failed
    await follower.hop(follower.upstream.manifests[1])
    assert not follower.ledger.last_update_failed
    assert list(follower.ledger.versions) == [1, 2]


async def test_a_hop_is_prepared_while_it_arrives_unless_it_is_dropped(follower: Follower) -> None:
    first, second, third = follower.upstream.manifests
    await follower.hop(first)
    for manifest, is_dropped in ((second, False), (third, True)):
        data = follower.upstream.store.chunk_list(manifest.blob_id)
        assert data is not None
        follower.store.put_chunk_list(manifest.blob_id, data)
        await follower.table[PrepareHop](PrepareHop(manifest), follower.posted.append)
        if is_dropped:
            await follower.table[DropPreparation](DropPreparation(), follower.posted.append)
        assert await follower.hop(manifest) == HopApplied(manifest.version, manifest.root)
    assert follower.posted == []
    assert follower.mirror.prepared_count == 1


# Engines


async def test_an_engine_waits_for_the_order_and_then_gets_everything(follower: Follower) -> None:
    waiting = asyncio.create_task(follower.ask(None, 60.0))
    await follower.hop(follower.upstream.manifests[0])
    await asyncio.sleep(0)
    assert not waiting.done(), "the mirror moved, but no hand-over was ordered"
    await follower.hand_over(ONE)
    staged = await waiting
    assert staged is not None
    assert (staged.kind, staged.base_version, staged.version) == (UpdateKind.FULL, None, ONE)
    assert os.fstat(staged.descriptor).st_size >= staged.size_bytes
    assert end(staged)


async def test_an_engine_that_missed_versions_is_swapped_once(follower: Follower) -> None:
    await follower.follow(1)
    await follower.follow(2)
    staged = await follower.ask(ONE)
    assert staged is not None
    assert (staged.kind, staged.base_version, staged.version) == (UpdateKind.RECORDS, ONE, THREE)
    assert end(staged)


async def test_an_engine_that_is_current_waits_in_vain(follower: Follower) -> None:
    assert await follower.ask(None) is None
    await follower.follow(2)
    assert await follower.ask(TWO) is None
    assert isinstance(await follower.hop(follower.upstream.manifests[2]), HopApplied)
    assert await follower.ask(THREE) is None, "the mirror may have moved on between order and request"


async def test_an_engine_that_served_another_run_gets_everything(follower: Follower) -> None:
    """Its version has the name of one of ours, or a later one; records would never fit it."""
    await follower.follow(2)
    assert follower.mirror.held is not None
    ours, other = follower.mirror.held.root, Digest(bytes(32))
    assert await follower.ask(TWO, root=ours) is None
    follower.posted.clear()
    for version, root in ((TWO, other), (ONE, other), (THREE, other), (THREE, None)):
        staged = await follower.ask(version, root=root)
        assert staged is not None
        assert (staged.kind, staged.version) == (UpdateKind.FULL, TWO)
        end(staged)
    assert follower.posted == []
    staged = await follower.ask(ONE, root=follower.upstream.manifests[0].root)
    assert staged is not None
    assert staged.kind is UpdateKind.RECORDS
    end(staged)


async def test_a_restarted_engine_gets_a_full_load_of_what_is_current(follower: Follower) -> None:
    await follower.follow(2)
    assert end(await follower.ask(None))
    await follower.handlers.confirm(EngineConfirmation(TWO, True, TWO, ""))
    staged = await follower.ask(None)
    assert staged is not None
    assert (staged.kind, staged.version) == (UpdateKind.FULL, TWO)
    end(staged)


async def test_a_restarted_node_serves_engines_before_any_news(
    tmp_path: Path, follower: Follower, hands: Any, upstream: Upstream
) -> None:
    await follower.follow(2)
    follower.close()
    again = Follower(tmp_path / "inferencer", upstream, hands)
    try:
        staged = await again.ask(None)
        assert staged is not None
        assert staged.version == TWO
        end(staged)
    finally:
        again.close()


async def test_an_engine_that_outlived_its_daemon_is_heard_to_be_current(
    tmp_path: Path, follower: Follower, hands: Any, upstream: Upstream
) -> None:
    """It has nothing to confirm, so without this the machine would wait for it until the swap's deadline."""
    await follower.follow(2)
    follower.close()
    again = Follower(tmp_path / "inferencer", upstream, hands)
    try:
        assert await again.ask(TWO) is None
        assert again.posted == [EngineApplied(TWO)]
        await again.hand_over(TWO)
        assert await again.ask(TWO) is None
        assert await again.ask(TWO) is None
        assert again.posted == [EngineApplied(TWO)] * 2
        end(await again.ask(ONE))
        assert again.posted == [EngineApplied(TWO)] * 2
        assert again.ledger.fields["engine_version"] == 2
    finally:
        again.close()


async def test_a_confirmation_reaches_machine_metrics_and_status(follower: Follower) -> None:
    await follower.handlers.confirm(EngineConfirmation(TWO, True, TWO, ""))
    assert follower.posted == [EngineApplied(TWO)]
    assert follower.ledger.fields["engine_version"] == 2
    assert not follower.ledger.last_update_failed


@pytest.mark.parametrize("held", [ONE, None])
async def test_a_failed_hand_over_is_reported_with_what_the_engine_holds(
    follower: Follower, held: Version | None
) -> None:
    await follower.handlers.confirm(EngineConfirmation(TWO, False, held, "engine_lost"))
    assert follower.posted == [EngineFailed(held, "engine_lost")]
    assert follower.ledger.last_update_failed


async def test_who_copies_what_the_node_holds_is_no_engine_that_failed(follower: Follower) -> None:
    await follower.handlers.confirm(EngineConfirmation(TWO, True, TWO, ""))
    await follower.handlers.confirm(EngineConfirmation(TWO, False, None, "copied"))
    assert follower.posted == [EngineApplied(TWO)]
    assert not follower.ledger.last_update_failed


async def test_an_engine_that_lost_its_weights_makes_the_node_not_ready_until_it_confirms_again(
    follower: Follower,
) -> None:
    await follower.follow(2)
    await follower.handlers.confirm(EngineConfirmation(TWO, True, TWO, ""))
    follower.handlers.lose_engine("it was started again")
    assert follower.posted[-1] == EngineFailed(None, "it was started again")
    assert follower.ledger.last_update_failed
    await follower.handlers.confirm(EngineConfirmation(TWO, True, TWO, ""))
    assert follower.posted[-1] == EngineApplied(TWO)
    assert not follower.ledger.last_update_failed


async def test_an_engine_is_not_believed_what_it_was_never_handed(follower: Follower) -> None:
    """G1: such a version would be reported as applied."""
    await follower.follow(2)
    end(await follower.ask(THREE))
    assert follower.posted == []
    await follower.handlers.confirm(EngineConfirmation(TWO, True, THREE, ""))
    await follower.handlers.confirm(EngineConfirmation(TWO, False, THREE, "own"))
    await follower.handlers.confirm(EngineConfirmation(TWO, True, ONE, ""))
    first, second, third = follower.posted
    assert isinstance(first, EngineFailed)
    assert first.version is None
    assert "holds 0.3" in first.reason
    assert second == EngineFailed(None, "own")
    assert isinstance(third, EngineFailed)
    assert third.version == ONE
    assert follower.ledger.last_update_failed


async def test_a_loan_that_was_withdrawn_is_not_taken_for_a_success(follower: Follower) -> None:
    await follower.follow(1)
    staged = await follower.ask(None)
    follower.mirror.loans.patience_seconds = 0.0
    follower.mirror.loans.end_all()
    await follower.follow(1)
    assert not end(staged)
    assert follower.mirror.loans.withdrawn_count == 1


# When nothing can be handed over


async def test_records_the_disk_refuses_are_told_once_and_not_in_a_circle(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-DSK-1: the engine asks again at once, so the wait has to be here."""
    calls: list[Version | None] = []

    def refuse(engine_version: Version | None, engine_root: Digest | None) -> StagedUpdate | None:
        calls.append(engine_version)
        raise StorageError("no room", "enospc")

    monkeypatch.setattr(follower.mirror, "stage", refuse)
    await follower.hand_over(TWO)
    started = time.monotonic()
    assert await follower.ask(ONE, 0.2) is None
    assert time.monotonic() - started >= 0.19
    assert calls == [ONE]
    assert follower.posted == [EngineFailed(ONE, "enospc")]


async def test_an_engine_waits_while_the_mirror_is_lost_and_gets_the_next_order(follower: Follower) -> None:
    await follower.hand_over(THREE)
    waiting = asyncio.create_task(follower.ask(None, 60.0))
    await asyncio.sleep(0)
    await asyncio.get_running_loop().run_in_executor(follower.threads, lambda: None)
    await follower.follow(1)
    staged = await waiting
    assert staged is not None
    assert staged.version == ONE
    end(staged)


async def test_an_engine_that_goes_while_its_update_is_staged_leaves_no_loan(follower: Follower) -> None:
    """A loan nobody gives back would stop the mirror for minutes."""
    reached, go_on = threading.Event(), threading.Event()
    stage = follower.mirror.stage

    def stage_slowly(engine_version: Version | None, engine_root: Digest | None) -> StagedUpdate | None:
        reached.set()
        assert go_on.wait(10)
        return stage(engine_version, engine_root)

    await follower.follow(1)
    follower.mirror.stage = stage_slowly  # type: ignore[method-assign]
    asking = asyncio.create_task(follower.ask(None, 60.0))
    await asyncio.to_thread(reached.wait, 10)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    go_on.set()
    await asyncio.get_running_loop().run_in_executor(follower.threads, lambda: None)
    await asyncio.sleep(0)
    assert follower.mirror.loans._open == set()
