"""Runs one change of the disk again and again in children, each of which meets another failure; run by its test.

A child is forked, told at which call to fail and how, and carries the change out on real files. Whatever became of it,
its parent opens what is left as a restarted node does, says whether that is the old state or the new, and carries
the change out once more without failures. The calls are counted by ``fail_points.c``, SQLite's own among them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pulsenet.chain.records import Descriptor, Kind, Manifest
from pulsenet.codec.changes import Changes
from pulsenet.errors import PulsenetError
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import Commit, EncodeSnapshot
from pulsenet.node.events import Committed, HopApplied, PatchEncoded
from pulsenet.serving.engine import FullUpdate, RecordsUpdate
from pulsenet.serving.files import FilesEngine
from pulsenet.tensors.digest import compute_region_root
from pulsenet.wire.schema import decode_value
from pulsenetd import identity, runs
from pulsenetd.storage.mirror import Mirror
from pulsenetd.storage.orphans import Needs, release_orphans
from pulsenetd.storage.shelf import RolloutShelf, ShelfEntry
from pulsenetd.storage.store import Store

MODES: Final = {"kill before": 1, "kill within": 2, "kill after": 3, "eio": 4, "enospc": 5, "short": 6}
KILLED: Final = 137
REFUSED: Final = 3
"""Exit code of a child that was told, by one of our own errors, that the disk refused."""

MEBIBYTE: Final = 1 << 20


def load_kit() -> Any:
    """Return the classes of the storage tests: test folders are no packages."""
    spec = importlib.util.spec_from_file_location("storage_kit", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


KIT: Final = load_kit()


@dataclass(frozen=True)
class Scenario:
    """A change from an old state of ``node`` to a new one. Everything takes the directory that ``node`` is in."""

    prepare: Callable[[Path], None]
    change: Callable[[Path], None]
    look: Callable[[Path], str]
    """Opens what is left, as a start does: returns ``old`` or ``new``, or raises."""


# A node's store: a blob of two chunks, its manifest and a state in one commit, then the release of the blob before.


def noise(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def put_version(store: Store, number: int, data: bytes) -> Digest:
    with store.writing_blob() as writer:
        writer.feed(data)
        blob_id = writer.finish().blob_id
    manifest = KIT.make_manifest(version=Version(0, number), blob_id=blob_id)
    store.commit([KIT.sign_manifest(manifest)], [("version", b"%d" % number)])
    return Digest(blob_id)


def prepare_store(root: Path) -> None:
    store = Store.open(root / "node")
    put_version(store, 1, noise(MEBIBYTE + 5, 1))
    store.close()


def change_store(root: Path) -> None:
    store = Store.open(root / "node")
    try:
        old = {manifest.version.number: (digest, manifest.blob_id) for digest, manifest in store.manifests()}
        put_version(store, 2, noise(MEBIBYTE + 9, 2))
        if 1 in old:
            store.release([old[1][1]], [old[1][0]], now=0.0)
    finally:
        store.close()


def look_at_store(root: Path) -> str:
    store = Store.open(root / "node")
    try:
        number = int(store.state("version") or b"0")
        needed = frozenset(digest for digest, manifest in store.manifests() if manifest.version.number == number)
        release_orphans(store, [Needs((Manifest,), needed)], now=0.0)
        named = {manifest.version.number: manifest.blob_id for _, manifest in store.manifests()}
        assert sorted(named) == [number], "whoever is killed before the release says no more what was to go"
        assert b"".join(store.read_blob(named[number])) == noise(MEBIBYTE + (5 if number == 1 else 9), number)
        chunk_lists = [store.read_list(blob_id) for blob_id in named.values()]
        held = {digest for chunk_list in chunk_lists if chunk_list for digest in chunk_list.digests}
        assert len(store.chunk_digests()) == len(held), "orphans stayed"
        assert not list(root.rglob("*.partial"))
        return {1: "old", 2: "new"}[number]
    finally:
        store.close()


# A publisher: encode, store, commit, move the baseline.


def make_model(step_count: int) -> Any:
    model = KIT.Model()
    for _ in range(step_count):
        model.step(share=0.3)
    return model


def prepare_publisher(root: Path) -> None:
    node = KIT.Node(root / "node")
    node.publish(make_model(0))
    node.close()


def change_publisher(root: Path) -> None:
    node = KIT.Node(root / "node")

    def commit(manifest: Manifest, generation: int) -> None:
        order = Commit(generation, manifest.version, manifest.root, (KIT.sign_manifest(manifest),), ())
        answer = node.publisher.commit(order)
        if not isinstance(answer, Committed):
            raise PulsenetError(str(answer))

    try:
        if node.publisher.restore() == Version(0, 1):
            model = make_model(1)
            node.publisher.offer(1, model.parts())
            event = node.publisher.encode_snapshot(EncodeSnapshot(1, Kind.PATCH))
            if not isinstance(event, PatchEncoded):
                raise PulsenetError(str(event))
            node.commit = commit
            node.publish_encoded(model, Kind.PATCH, lambda: event)
    finally:
        node.close()


def look_at_publisher(root: Path) -> str:
    node = KIT.Node(root / "node")
    try:
        version = node.publisher.restore()
        assert version is not None
        model = make_model(version.number - 1)
        assert node.publisher.committed.root == compute_region_root(model.table, model.bytes)
        return {1: "old", 2: "new"}[version.number]
    finally:
        node.close()


# An inferencer: fetch a patch, apply it to the mirror, remember what the mirror holds.


def prepare_mirror(root: Path) -> None:
    publisher = KIT.Node(root / "publisher")
    first = publisher.publish(make_model(0))
    store = Store.open(root / "node")
    KIT.copy_blob(publisher.store, store, first)
    mirror = Mirror(store, root / "node" / "spools")
    assert isinstance(mirror.apply_hop(first), HopApplied)
    mirror.close()
    store.close()
    publisher.publish(make_model(1))
    publisher.close()


def change_mirror(root: Path) -> None:
    publisher = Store.open(root / "publisher")
    store = Store.open(root / "node")
    mirror = Mirror(store, root / "node" / "spools")
    try:
        if mirror.restore() == Version(0, 2):
            return
        (second,) = [manifest for _, manifest in publisher.manifests() if manifest.version.number == 2]
        KIT.copy_blob(publisher, store, second)
        answer = mirror.apply_hop(second)
        held = mirror.held
        assert held is not None, answer
        assert mirror.verify()
        # In the process that failed, too: the old weights or the new ones.
        assert held.version == (second.version if isinstance(answer, HopApplied) else second.base_version), answer
        if not isinstance(answer, HopApplied):
            raise PulsenetError(answer.reason)
    finally:
        mirror.close()
        store.close()
        publisher.close()


def look_at_mirror(root: Path) -> str:
    store = Store.open(root / "node")
    mirror = Mirror(store, root / "node" / "spools")
    try:
        version = mirror.restore()
        assert version is not None
        assert mirror.verify()
        model = make_model(version.number - 1)
        assert mirror.held is not None
        assert mirror.held.root == compute_region_root(model.table, model.bytes)
        return {1: "old", 2: "new"}[version.number]
    finally:
        mirror.close()
        store.close()


# Files for people and for engines that load from disk.


def full_update(number: int) -> FullUpdate:
    model = make_model(number - 1)
    return FullUpdate(Version(0, number), compute_region_root(model.table, model.bytes), model.table, model.bytes)


def records_update() -> RecordsUpdate:
    old, new = full_update(1), full_update(2)

    def changes() -> Any:
        for index in range(len(old.table.tensors)):
            before, after = (old.table.view(update.region, index) for update in (old, new))
            indices = (before != after).nonzero()[0]
            if indices.size:
                yield Changes(index, indices.astype("uint32"), before[indices], after[indices])

    return RecordsUpdate(old.version, new.version, new.root, new.table, changes)


def prepare_files(root: Path) -> None:
    engine = FilesEngine(root / "node")
    engine.stage(full_update(1))
    engine.commit()
    engine.close()


def change_files(root: Path) -> None:
    engine = FilesEngine(root / "node")
    try:
        if engine.version != Version(0, 2):
            engine.stage(records_update())
            engine.commit()
    finally:
        engine.close()


def change_files_in_full(root: Path) -> None:
    engine = FilesEngine(root / "node")
    try:
        engine.stage(full_update(2))
        engine.commit()
    finally:
        engine.close()


def look_at_files(root: Path) -> str:
    engine = FilesEngine(root / "node")
    try:
        assert engine.version is not None
        engine.read_back()
        left = [path.name for path in (root / "node" / "versions").iterdir() if path.name.startswith(".")]
        assert not left, left
        return {1: "old", 2: "new"}[engine.version.number]
    finally:
        engine.close()


# The owner's machine: a revision of the run's descriptor.


# A real key: what nobody signed does not count.
_OWNERS_KEY: Final = Ed25519PrivateKey.from_private_bytes(bytes(32))
OWNER: Final = PeerId(_OWNERS_KEY.public_key().public_bytes_raw())


def prepare_run(root: Path) -> None:
    key = PeerId(bytes(32))
    descriptor = runs.genesis(
        "crash",
        nonce=bytes(16),
        owner=OWNER,
        authorities=[key],
        trainers=[key],
        inferencers=[],
        open_inferencers_max=0,
        private=False,
        anchor_interval=10,
        publish_interval_min_ms=0,
    )
    runs.create_run(
        root / "node", descriptor, sign=_OWNERS_KEY.sign, owner=OWNER, bootstraps=(), secret=b"", expires_at_ms=None
    )


def change_run(root: Path) -> None:
    if len(runs.load_descriptors(root / "node")) == 1:
        runs.revise(
            root / "node",
            lambda now: replace(now, inferencers=(PeerId(bytes(32)),)),
            sign=_OWNERS_KEY.sign,
            owner=OWNER,
        )
    file = runs.read_run_file(root / "node" / "run.json")
    runs.write_run_file(root / "node" / "run.json", replace(file, bootstraps=("/ip4/192.0.2.1/tcp/1",)))


def look_at_run(root: Path) -> str:
    records = [decode_value(Descriptor, record.payload) for record in runs.load_descriptors(root / "node")]
    file = runs.read_run_file(root / "node" / "run.json")
    assert [record.revision for record in records] == list(range(len(records)))
    assert file.bootstraps in ((), ("/ip4/192.0.2.1/tcp/1",))
    assert not file.bootstraps or len(records) == 2
    return "new" if len(records) == 2 and file.bootstraps else "old"


# A node's key, and what is kept of rollouts.


def prepare_key(root: Path) -> None:
    (root / "node").mkdir()


def change_key(root: Path) -> None:
    identity.load_or_create(root / "node" / "identity.key")


def look_at_key(root: Path) -> str:
    path = root / "node" / "identity.key"
    if not path.exists():
        return "old"
    assert path.stat().st_mode & 0o077 == 0
    identity.load(path)
    return "new"


def shelve(root: Path, sequence: int) -> None:
    shelf = RolloutShelf.open(root / "node" / "rollouts.sqlite")
    try:
        if len(shelf.entries()) < sequence:
            entry = ShelfEntry(OWNER, sequence, 7, 100_000)
            shelf.add(entry, noise(100_000, sequence), b"%d" % sequence)
    finally:
        shelf.close()


def prepare_shelf(root: Path) -> None:
    (root / "node").mkdir()
    shelve(root, 1)


def look_at_shelf(root: Path) -> str:
    shelf = RolloutShelf.open(root / "node" / "rollouts.sqlite")
    try:
        entries = shelf.entries()
        assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
        assert shelf.marks() == {OWNER: b"%d" % len(entries)}
        assert all(shelf.read(entry.name) == noise(100_000, entry.sequence) for entry in entries)
        assert not list((root / "node").glob("*.damaged"))
        return {1: "old", 2: "new"}[len(entries)]
    finally:
        shelf.close()


SCENARIOS: Final = {
    "store": Scenario(prepare_store, change_store, look_at_store),
    "publisher": Scenario(prepare_publisher, change_publisher, look_at_publisher),
    "mirror": Scenario(prepare_mirror, change_mirror, look_at_mirror),
    "files": Scenario(prepare_files, change_files, look_at_files),
    "files-full": Scenario(prepare_files, change_files_in_full, look_at_files),
    "run": Scenario(prepare_run, change_run, look_at_run),
    "key": Scenario(prepare_key, change_key, look_at_key),
    "rollouts": Scenario(prepare_shelf, lambda root: shelve(root, 2), look_at_shelf),
}


class Runner:
    """Carries out one scenario below one directory."""

    def __init__(self, library: Path, scenario: Scenario, directory: Path) -> None:
        self._points = ctypes.CDLL(str(library))
        self._points.fail_points_names.restype = ctypes.c_char_p
        self._scenario = scenario
        self._template = directory / "template"
        self._place = directory / "place"
        self._template.mkdir()
        scenario.prepare(self._template)

    def _lay_out(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self._template, self._place, symlinks=True)

    def list_calls(self) -> list[str]:
        """Return what the change does to the disk, call by call."""
        self._lay_out()
        assert self._scenario.look(self._place) == "old"
        self._lay_out()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with os.fdopen(writer, "wb") as file:
                code = self._change_failing(-1, "none")
                file.write(self._points.fail_points_names())
            os._exit(code)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            text = file.read().decode()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert self._scenario.look(self._place) == "new"
        return text.splitlines()

    def fail_at(self, point: int, mode: str) -> tuple[str, str]:
        """Return how the child ended and what state was left."""
        self._lay_out()
        child = os.fork()
        if child == 0:
            os._exit(self._change_failing(point, mode))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        ended = {0: "done", KILLED: "killed", REFUSED: "refused"}.get(code, f"exit {code}")
        left = self._scenario.look(self._place)
        self._scenario.change(self._place)
        assert self._scenario.look(self._place) == "new", "the change could not be carried out afterwards"
        return ended, left

    def _change_failing(self, point: int, mode: str) -> int:
        self._arm(point, MODES.get(mode, 0))
        try:
            self._scenario.change(self._place)
        except PulsenetError:
            return REFUSED
        except BaseException as error:
            print(f"{mode} at {point}: {error!r}", file=sys.stderr, flush=True)
            return 1
        finally:
            self._points.fail_points_disarm()
        return 0

    def _arm(self, point: int, mode: int) -> None:
        self._points.fail_points_arm(str(self._place / "node").encode(), ctypes.c_long(point), mode)


def main(library: str, name: str, directory: str, seed: str, count: str) -> None:
    """Print, as JSON, how many calls there are and what came of each failure.

    Args:
        library: ``fail_points.c``, compiled; this process was started with it.
        name: Which scenario.
        directory: An empty one.
        seed: Chooses the failures, if not all are tried.
        count: How many failures are tried; 0 for all.
    """
    runner = Runner(Path(library), SCENARIOS[name], Path(directory))
    calls = runner.list_calls()
    failures = [(point, mode) for point in range(len(calls)) for mode in MODES]
    if int(count):
        failures = sorted(random.Random(int(seed)).sample(failures, min(int(count), len(failures))))
    outcomes: dict[str, int] = {}
    broken = []
    for point, mode in failures:
        try:
            ended, left = runner.fail_at(point, mode)
        except Exception as error:
            ended, left = "restart failed", repr(error)
        outcomes[f"{ended}, {left}"] = outcomes.get(f"{ended}, {left}", 0) + 1
        if ended not in ("done", "killed", "refused") or left not in ("old", "new"):
            broken.append(f"{mode} at {point} ({calls[point]}): {ended}, {left}")
    print(json.dumps({"calls": len(calls), "failures": len(failures), "outcomes": outcomes, "broken": broken}))


if __name__ == "__main__":
    main(*sys.argv[1:])
