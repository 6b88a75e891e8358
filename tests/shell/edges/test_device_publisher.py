"""Publishing what changed, from a model through a real local server into a real pipeline."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from servers import ServerThread, hooks_of, wait_until

from pulsenet.chain.records import Kind, Manifest
from pulsenet.chain.signing import seal
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.local.handover import PublishResult
from pulsenet.local.protocol import PublishDone, PublishStatus
from pulsenet.node.effects import Commit, EncodeSnapshot
from pulsenet.node.events import Committed, EncodeFailed, PatchEncoded
from pulsenet.tensors.digest import compute_region_root
from pulsenet.training import device_baseline
from pulsenet.training.publisher import CopyProgress, Publisher, attach_publisher
from pulsenet.training.snapshot import take_snapshot
from pulsenetd.local.server import LocalServer, SnapshotOffer
from pulsenetd.storage.parts import Part, PartQueue
from pulsenetd.storage.publishing import Publisher as Pipeline
from pulsenetd.storage.store import Store


class Daemon:
    """A local server, a store and a publisher's pipeline, with the machine's order: one in work, one waiting."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.may_work = threading.Event()
        self.may_work.set()
        self.fail_next = False
        self.manifests: list[Manifest] = []
        self.kinds: list[set[str]] = []
        """Of the parts of each publish that was encoded."""
        self.start()

    def start(self) -> None:
        self.store = Store.open(self.directory / "store")
        self.pipeline = Pipeline(self.store, self.directory / "spools")
        self.pipeline.restore()
        self._waiting: tuple[SnapshotOffer, asyncio.Future[PublishDone]] | None = None
        self._is_busy = False
        self._threads = ThreadPoolExecutor(1)
        self._server = ServerThread(LocalServer(self.directory, hooks_of(self._on_snapshot), role="trainer"))

    def stop(self) -> None:
        self.may_work.set()
        self._server.stop()
        self._threads.shutdown()
        self.pipeline.close()
        self.store.close()

    async def _on_snapshot(self, offer: SnapshotOffer) -> asyncio.Future[PublishDone]:
        outcome: asyncio.Future[PublishDone] = asyncio.get_running_loop().create_future()
        self.pipeline.offer(offer.generation, offer.parts)
        if self._waiting is not None:
            replaced, replaced_outcome = self._waiting
            self.pipeline.drop(replaced.generation)
            replaced_outcome.set_result(PublishDone(PublishStatus.REPLACED, None, 0, 0, 0, 0, ""))
        self._waiting = (offer, outcome)
        self._go_on()
        return outcome

    def _go_on(self) -> None:
        if self._waiting is None or self._is_busy:
            return
        (offer, outcome), self._waiting = self._waiting, None
        self._is_busy = True
        working = asyncio.get_running_loop().run_in_executor(self._threads, self._publish, offer)

        def finish(done: asyncio.Future[PublishDone]) -> None:
            outcome.set_result(done.result())
            self._is_busy = False
            self._go_on()

        working.add_done_callback(finish)

    def _publish(self, offer: SnapshotOffer) -> PublishDone:
        self.may_work.wait(60)
        held = self.pipeline.committed
        kind = Kind.ANCHOR if held is None or held.table_digest != offer.parts.table.digest else Kind.PATCH
        self._note_kinds(offer.parts)
        encoded = self.pipeline.encode_snapshot(EncodeSnapshot(offer.generation, kind))
        if self.fail_next:
            self.fail_next = False
            self.pipeline.drop(offer.generation)
            encoded = EncodeFailed(offer.generation, "enospc")
        if isinstance(encoded, EncodeFailed):
            return PublishDone(PublishStatus.FAILED, None, 0, 0, 0, 0, encoded.reason)
        manifest = self._describe(encoded, kind, offer)
        record = seal(manifest, lambda _: bytes(64), PeerId(bytes(32)))
        answer = self.pipeline.commit(Commit(offer.generation, manifest.version, manifest.root, (record,), ()))
        assert isinstance(answer, Committed)
        self.manifests.append(manifest)
        sizes = (encoded.raw_size_bytes, encoded.encoded_size_bytes, encoded.changed_count, encoded.element_count)
        return PublishDone(PublishStatus.COMMITTED, manifest.version, *sizes, "")

    def _note_kinds(self, parts: PartQueue) -> None:
        kinds: set[str] = set()
        self.kinds.append(kinds)
        take = parts.take

        def note() -> Iterator[Any]:
            for part in take():
                kinds.add("whole" if isinstance(part, Part) else "changed")
                yield part

        parts.take = note  # type: ignore[method-assign]

    def _describe(self, encoded: PatchEncoded, kind: Kind, offer: SnapshotOffer) -> Manifest:
        held = self.pipeline.committed
        base = held if kind is Kind.PATCH else None
        return Manifest(
            run_id=RunId(bytes(32)),
            revision=0,
            term=0,
            kind=kind,
            base_version=None if base is None else base.version,
            version=Version(0, 1 if held is None else held.version.number + 1),
            base_root=None if base is None else base.root,
            root=encoded.root,
            table_digest=Digest(offer.parts.table.digest),
            blob_id=encoded.blob_id,
            raw_size_bytes=encoded.raw_size_bytes,
            encoded_size_bytes=encoded.encoded_size_bytes,
            changed_count=encoded.changed_count,
            element_count=encoded.element_count,
            codec_id=encoded.codec_id,
            trainer_step=offer.trainer_step,
            previous=None,
        )

    def read_blob(self, number: int) -> bytes:
        return b"".join(self.store.read_blob(self.manifests[number].blob_id))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.stop()


@pytest.fixture(params=["host", "device"])
def publisher(daemon: Daemon, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    """Attached with a device baseline; compares by compiled loops, or by what an accelerator would run."""
    if request.param == "device":
        monkeypatch.setattr(device_baseline, "find_moved", device_baseline.find_moved_on_device)
    monkeypatch.setattr("pulsenet.local.parts.PART_SIZE_BYTES_MIN", 20_000)
    with attach_publisher(data_dir=daemon.directory, device_baseline=True) as made:
        yield made


class Model(torch.nn.Module):
    """Parameters and buffers of several dtypes."""

    def __init__(self, rows: int = 300) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed = torch.nn.Parameter(torch.randn(rows, 64, generator=generator))
        self.layers = torch.nn.ParameterList([torch.randn(64, 64, generator=generator) for _ in range(4)])
        self.half_width = torch.nn.Parameter(torch.randn(50, 60, generator=generator).half())
        self.eighth = torch.nn.Parameter(torch.randn(900, generator=generator).to(torch.float8_e4m3fn), False)
        self.register_buffer("bias", torch.randn(77, generator=generator))
        self.register_buffer("steps", torch.tensor(0))

    def step(self, rate: float = 3e-4) -> None:
        """Move every parameter, most by less than changes its BF16 bits."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dtype != torch.float8_e4m3fn:
                    parameter += torch.randn(parameter.shape).to(parameter.dtype) * rate
            self.steps += 1

    @property
    def root(self) -> Digest:
        plan = take_snapshot(self)
        region = np.zeros(plan.table.layout_size_bytes, np.uint8)
        for tensor_index, offset_bytes, data in plan.blocks():
            start = plan.table.offsets[tensor_index] + offset_bytes
            region[start : start + data.size] = data
        return compute_region_root(plan.table, region)


def publish(publisher: Publisher, model: Model, **options: Any) -> PublishResult:
    result = publisher.publish(model, step=int(model.steps), **{"wait": True, **options})
    assert result.status is PublishStatus.COMMITTED, result
    return result


def test_versions_and_blobs_are_those_of_whole_weights(
    daemon: Daemon, publisher: Publisher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = Model()
    other = Daemon(tmp_path_factory.mktemp("whole"))
    with attach_publisher(data_dir=other.directory) as whole:
        for step, rate in enumerate((3e-4, 0.0, 1.0, 3e-4)):
            for one in (publisher, whole):
                publish(one, model, blocking=step == 1)
            assert daemon.manifests == other.manifests
            assert daemon.manifests[-1].root == model.root
            assert daemon.read_blob(-1) == other.read_blob(-1)
            model.step(rate)
    other.stop()
    assert daemon.kinds == [{"whole"}, {"changed"}, {"changed"}, {"changed"}]
    assert other.kinds == [{"whole"}] * 4
    assert [manifest.kind for manifest in daemon.manifests] == [Kind.ANCHOR, Kind.PATCH, Kind.PATCH, Kind.PATCH]


def test_a_publish_replaced_while_it_waits_is_in_the_next(daemon: Daemon, publisher: Publisher) -> None:
    model = Model()
    publish(publisher, model)
    daemon.may_work.clear()
    for _ in range(4):
        model.step()
        assert publisher.publish(model, step=int(model.steps)).status is PublishStatus.QUEUED
    model.step()
    last = threading.Thread(target=publish, args=(publisher, model))
    last.start()
    # The first is in work, the last waits, those between are replaced: the daemon told both the same base.
    wait_until(lambda: daemon._waiting is not None and daemon._waiting[0].trainer_step == 5)
    daemon.may_work.set()
    last.join(120)
    assert [manifest.trainer_step for manifest in daemon.manifests] == [0, 1, 5]
    assert daemon.manifests[-1].root == model.root
    assert daemon.kinds == [{"whole"}, {"changed"}, {"changed"}]


def test_a_publish_that_failed_is_in_the_next(daemon: Daemon, publisher: Publisher) -> None:
    model = Model()
    publish(publisher, model)
    model.step()
    daemon.fail_next = True
    result = publisher.publish(model, step=1, wait=True)
    assert (result.status, result.reason) == (PublishStatus.FAILED, "enospc")
    model.step()
    publish(publisher, model)
    assert daemon.manifests[-1].root == model.root
    assert daemon.kinds[-1] == {"changed"}
    assert daemon.manifests[-1].base_version == Version(0, 1)


def test_a_hand_over_cut_off_half_way_is_in_the_next(daemon: Daemon, publisher: Publisher) -> None:
    model = Model()
    publish(publisher, model)
    model.step()

    def interrupt(progress: CopyProgress) -> None:
        if progress.tensor_count == 3:
            raise KeyboardInterrupt

    publisher._on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(model, step=1)
    publisher._on_progress = None
    model.step()
    publish(publisher, model)
    assert daemon.manifests[-1].root == model.root
    assert daemon.kinds[-1] == {"changed"}


def test_after_a_restart_of_the_daemon_whole_weights_are_handed_over_once(daemon: Daemon, publisher: Publisher) -> None:
    model = Model()
    publish(publisher, model)
    daemon.stop()
    daemon.start()
    for _ in range(2):
        model.step()
        publish(publisher, model, timeout_seconds=120.0)
        assert daemon.manifests[-1].root == model.root
    assert daemon.kinds == [{"whole"}, {"whole"}, {"changed"}]
    assert [manifest.kind for manifest in daemon.manifests] == [Kind.ANCHOR, Kind.PATCH, Kind.PATCH]


def test_what_another_process_publishes_is_no_base(daemon: Daemon, publisher: Publisher) -> None:
    model = Model()
    publish(publisher, model)
    other = Model()
    other.step(0.1)
    with attach_publisher(data_dir=daemon.directory, device_baseline=True) as second:
        publish(second, other)
        assert daemon.manifests[-1].root == other.root
        model.step()
        publish(publisher, model)
        assert daemon.manifests[-1].root == model.root
        model.step()
        publish(publisher, model)
    with attach_publisher(data_dir=daemon.directory) as third:
        publish(third, other)
    publish(publisher, model)
    assert daemon.manifests[-1].root == model.root
    kinds = [next(iter(kinds)) for kinds in daemon.kinds]
    assert kinds == ["whole", "whole", "whole", "changed", "whole", "whole"]


def test_another_table_starts_anew(daemon: Daemon, publisher: Publisher) -> None:
    publish(publisher, Model())
    model = Model(rows=301)
    publish(publisher, model)
    model.step()
    publish(publisher, model)
    assert daemon.manifests[-1].root == model.root
    assert daemon.kinds == [{"whole"}, {"whole"}, {"changed"}]


def test_a_baseline_that_the_daemon_lost_meanwhile_costs_a_second_try(
    daemon: Daemon, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    publish(publisher, model)
    model.step()
    encode = daemon.pipeline.encode_snapshot
    losses = itertools.count()

    def lose_first(effect: EncodeSnapshot) -> Any:
        if next(losses) == 0:
            daemon.pipeline._lose_baseline()
        return encode(effect)

    monkeypatch.setattr(daemon.pipeline, "encode_snapshot", lose_first)
    publish(publisher, model)
    assert daemon.manifests[-1].root == model.root
    assert daemon.kinds[-2:] == [set(), {"whole"}]
    model.step()
    publish(publisher, model)
    assert daemon.kinds[-1] == {"changed"}


def test_two_threads_publish_at_once(daemon: Daemon, publisher: Publisher) -> None:
    """One has the device baseline, the other hands over whole weights; then nobody's changes fit, and they do again."""
    model = Model()
    publish(publisher, model)
    inside, go_on = threading.Event(), threading.Event()

    def hold(progress: CopyProgress) -> None:
        if threading.current_thread() is first and not inside.is_set():
            inside.set()
            go_on.wait(60)

    publisher._on_progress = hold
    model.step()
    first = threading.Thread(target=publish, args=(publisher, model))
    first.start()
    assert inside.wait(60)
    second = threading.Thread(target=publish, args=(publisher, model))
    second.start()
    wait_until(lambda: daemon._waiting is not None)
    go_on.set()
    first.join(120)
    second.join(120)
    for _ in range(2):
        model.step()
        publish(publisher, model)
        assert daemon.manifests[-1].root == model.root
    assert daemon.kinds[-4:] == [{"changed"}, {"whole"}, {"whole"}, {"changed"}]


def test_a_device_without_room_to_compare_hands_whole_weights_over(
    daemon: Daemon, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    publish(publisher, model)
    model.step()

    def refuse(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_baseline, "find_moved", refuse)
    with pytest.warns(UserWarning, match="no device baseline is kept any more"):
        publish(publisher, model)
    assert daemon.manifests[-1].root == model.root
    model.step()
    publish(publisher, model)
    assert daemon.kinds[-1] == {"whole"}


def test_progress_is_told_for_changes_too(daemon: Daemon, publisher: Publisher) -> None:
    model = Model()
    publish(publisher, model)
    seen: list[CopyProgress] = []
    publisher._on_progress = seen.append
    publish(publisher, model)
    assert daemon.kinds[-1] == {"changed"}
    assert [progress.tensor_count for progress in seen] == list(range(1, 10))
    assert seen[-1].copied_size_bytes == seen[-1].size_bytes
