"""A store, a small model and a publisher, on a disk that can lose power at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import Kind, Manifest, SignedRecord
from pulsenet.chain.signing import seal
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.local.shared_memory import Bytes, Region, SnapshotWriter
from pulsenet.node.effects import Commit, EncodeSkip, EncodeSnapshot, StoreAnchor
from pulsenet.node.events import AnchorStored, Committed, PatchEncoded, SkipEncoded
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenet.wire.chunks import ChunkCutter
from pulsenetd.storage.disk import Data, Disk
from pulsenetd.storage.parts import PartQueue
from pulsenetd.storage.publishing import Publisher
from pulsenetd.storage.store import Store

RUN_ID = RunId(bytes(32))
SIGNER = PeerId(bytes(range(32)))


class PowerCut(BaseException):
    """The machine is off: nothing after this ran."""


@dataclass
class CuttingDisk(Disk):
    """Counts the steps of durable writes and cuts the power before, or in the middle of, one of them.

    What was not synced by then may be anything: :meth:`lose_unsynced` leaves files short or filled with zeros and
    forgets renames, as file systems do.
    """

    cut_at: int | None = None
    steps: list[tuple[str, Path | None]] = field(default_factory=list)
    unsynced: dict[Path, int] = field(default_factory=dict)
    unnamed: dict[Path, Path] = field(default_factory=dict)

    def _step(self, name: str, path: Path | None) -> None:
        if self.cut_at is not None and len(self.steps) >= self.cut_at:
            raise PowerCut(name)
        self.steps.append((name, path))

    def write(self, path: Path, data: Data) -> None:
        try:
            self._step("write", path)
        except PowerCut:
            super().write(path, bytes(data)[: len(data) // 2])
            raise
        super().write(path, data)
        self.unsynced[path] = len(data)

    def fsync(self, path: Path) -> None:
        self._step("fsync", path)
        super().fsync(path)
        self.unsynced.pop(path, None)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename", target)
        super().rename(source, target)
        self.unnamed[target] = source

    def sync_directory(self, path: Path) -> None:
        self._step("sync_directory", path)
        super().sync_directory(path)
        # A copy, made in one step: several threads sync at once.
        for target in list(self.unnamed):
            if target.parent == path:
                del self.unnamed[target]

    def remove(self, path: Path) -> None:
        self._step("remove", path)
        super().remove(path)
        self.unnamed.pop(path, None)

    def before_commit(self) -> None:
        self._step("before_commit", None)

    def after_commit(self) -> None:
        self._step("after_commit", None)

    def lose_unsynced(self, how: str) -> None:
        """Bring the directory into a state the cut may have left; ``how`` is ``kept``, ``zeros`` or ``unnamed``."""
        for path, size_bytes in self.unsynced.items():
            if how == "zeros" and path.exists():
                path.write_bytes(bytes(size_bytes))
        for target, source in self.unnamed.items():
            if how == "unnamed" and target.exists():
                target.rename(source)


def make_manifest(**changes: object) -> Manifest:
    fields = Manifest(
        run_id=RUN_ID,
        revision=0,
        term=0,
        kind=Kind.ANCHOR,
        base_version=None,
        version=Version(0, 1),
        base_root=None,
        root=Digest(bytes(32)),
        table_digest=Digest(bytes(32)),
        blob_id=Digest(bytes(32)),
        raw_size_bytes=0,
        encoded_size_bytes=0,
        changed_count=0,
        element_count=0,
        codec_id=0,
        trainer_step=0,
        previous=None,
    )
    return replace(fields, **changes)  # type: ignore[arg-type]


def sign_manifest(manifest: Manifest) -> SignedRecord:
    return seal(manifest, lambda _: bytes(64), SIGNER)


TABLE = make_table(
    [
        TensorSpec("model.embed.weight", "BF16", (300, 40)),
        TensorSpec("model.layer.weight", "BF16", (64, 50)),
        TensorSpec("model.norm.weight", "F32", (50,)),
        TensorSpec("scale", "BF16", ()),
        TensorSpec("unused", "BF16", (0, 3)),
        TensorSpec("positions", "I64", (7,)),
    ]
)


class Model:
    """Weights that change a little at each step, always the same way for one seed."""

    def __init__(self, seed: int = 0, table: ParameterTable = TABLE) -> None:
        self.table = table
        self._draw = np.random.default_rng(seed)
        self.bytes: Bytes = np.zeros(table.layout_size_bytes, np.uint8)
        for index, spec in enumerate(table.tensors):
            view = table.view(self.bytes, index)
            view[:] = self._draw.integers(0, 1 << 15, spec.element_count).astype(view.dtype)

    def step(self, *, share: float = 0.01) -> None:
        for index, spec in enumerate(self.table.tensors):
            view = self.table.view(self.bytes, index)
            changed = self._draw.random(spec.element_count) < share
            view[changed] += 1

    def parts(self) -> PartQueue:
        """The whole model, in one part for each tensor."""
        queue = PartQueue(self.table)
        for index in range(len(self.table.tensors)):
            self.put_part(queue, index)
        return queue

    def put_part(self, queue: PartQueue, index: int) -> None:
        layout = queue.next_layout(1)
        assert layout.first == index
        writer = SnapshotWriter(self.table, layout)
        writer.write_block(index, 0, self.table.view(self.bytes, index).tobytes())
        queue.put(layout, Region.open_snapshot(writer.seal(), layout.size_bytes))


class Node:
    """A publisher with the part of the trainer's machine the pipeline needs."""

    def __init__(self, directory: Path, disk: Disk | None = None) -> None:
        self.store = Store.open(directory, disk=disk)
        self.publisher = Publisher(self.store, directory / "spools")
        self.number = 0
        self.generation = 0
        self.roots: dict[Version, Digest] = {}

    @property
    def version(self) -> Version | None:
        held = self.publisher.committed
        return None if held is None else held.version

    def encode(self, model: Model, kind: Kind | None = None) -> PatchEncoded:
        self.generation += 1
        self.publisher.offer(self.generation, model.parts())
        return self.encode_offered(self.generation, kind)

    def encode_offered(self, generation: int, kind: Kind | None = None) -> PatchEncoded:
        chosen = kind or (Kind.ANCHOR if self.version is None else Kind.PATCH)
        event = self.publisher.encode_snapshot(EncodeSnapshot(generation, chosen))
        assert isinstance(event, PatchEncoded), event
        return event

    def publish(self, model: Model, kind: Kind | None = None) -> Manifest:
        return self.publish_encoded(model, kind, lambda: self.encode(model, kind))

    def publish_encoded(self, model: Model, kind: Kind | None, encode: Callable[[], PatchEncoded]) -> Manifest:
        before = self.publisher.committed
        event = encode()
        is_patch = before is not None and kind is not Kind.ANCHOR
        number = 1 if before is None else before.version.number + 1
        manifest = make_manifest(
            kind=Kind.PATCH if is_patch else Kind.ANCHOR,
            base_version=before.version if is_patch and before else None,
            base_root=before.root if is_patch and before else None,
            version=Version(0, number),
            root=event.root,
            table_digest=model.table.digest,
            blob_id=event.blob_id,
            raw_size_bytes=event.raw_size_bytes,
            encoded_size_bytes=event.encoded_size_bytes,
            changed_count=event.changed_count,
            element_count=event.element_count,
            codec_id=event.codec_id,
        )
        self.commit(manifest, event.generation)
        return manifest

    def commit(self, manifest: Manifest, generation: int | None) -> None:
        records = (sign_manifest(manifest),)
        answer = self.publisher.commit(Commit(generation, manifest.version, manifest.root, records, ()))
        assert answer == Committed(manifest.version)

    def add_anchor(self) -> Manifest:
        held = self.publisher.committed
        assert held is not None
        event = self.publisher.store_anchor(StoreAnchor(held.version))
        assert isinstance(event, AnchorStored), event
        manifest = make_manifest(
            version=held.version,
            root=held.root,
            table_digest=held.table_digest,
            blob_id=event.blob_id,
            encoded_size_bytes=event.encoded_size_bytes,
        )
        self.commit(manifest, None)
        return manifest

    def add_skip(self, base: Manifest) -> Manifest:
        held = self.publisher.committed
        assert held is not None
        event = self.publisher.encode_skip(EncodeSkip(base.version, held.version))
        assert isinstance(event, SkipEncoded), event
        manifest = make_manifest(
            kind=Kind.SKIP,
            base_version=base.version,
            base_root=base.root,
            version=held.version,
            root=held.root,
            table_digest=held.table_digest,
            blob_id=event.blob_id,
            encoded_size_bytes=event.encoded_size_bytes,
            changed_count=event.changed_count,
            element_count=TABLE.element_count,
            raw_size_bytes=TABLE.size_bytes,
            codec_id=event.codec_id,
        )
        self.commit(manifest, None)
        return manifest

    def close(self) -> None:
        self.publisher.close()
        self.store.close()


@contextmanager
def make_node() -> Iterator[Node]:
    """Make a publisher for as long as one example lasts."""
    with TemporaryDirectory() as directory:
        made = Node(Path(directory))
        try:
            yield made
        finally:
            made.close()


def copy_blob(source: Store, target: Store, manifest: Manifest) -> None:
    """Do what a fetch does."""
    record = sign_manifest(manifest)
    target.put_record(record)
    data = source.chunk_list(manifest.blob_id)
    assert data is not None
    target.put_chunk_list(manifest.blob_id, data)
    for _, digest in target.missing_chunks(manifest.blob_id):
        chunk = source.chunk(digest)
        assert chunk is not None
        target.put_chunks({digest: chunk})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "publisher")
    yield made
    made.close()


@pytest.fixture
def kit() -> Any:
    """The classes and functions above: test folders are no packages, so tests cannot import them."""
    return SimpleNamespace(
        ChunkCutter=ChunkCutter,
        CuttingDisk=CuttingDisk,
        Model=Model,
        Node=Node,
        PowerCut=PowerCut,
        TABLE=TABLE,
        copy_blob=copy_blob,
        make_node=make_node,
        make_manifest=make_manifest,
        sign_manifest=sign_manifest,
    )
