"""Rebuilding a version from the store, and processes killed while they moved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsenet.errors import StorageError, UnavailableError
from pulsenet.ids import Digest, Version
from pulsenet.tensors.digest import compute_region_root
from pulsenetd.storage.mirror import STATE_KEY, Mirror
from pulsenetd.storage.rebuild import HeldVersion, rebuild, rebuild_last
from pulsenetd.storage.store import Store


def open_memories() -> int:
    """Return how many regions this process holds; each has several descriptors."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        # The descriptor that lists the folder is gone by now.
        with suppress(FileNotFoundError):
            if "memfd:pulsenet" in os.readlink(path):
                found.add(os.stat(path).st_ino)
    return len(found)


def publish(node: Any, model: Any, count: int) -> list[Any]:
    manifests = []
    for _ in range(count):
        manifests.append(node.publish(model))
        model.step()
    return manifests


def damage(store: Store, manifest: Any) -> None:
    (_, digest), *_ = store.read_list(manifest.blob_id).entries  # type: ignore[union-attr]
    path = next((store.directory / "chunks").glob(f"*/{digest.hex()}"))
    path.write_bytes(bytes(path.stat().st_size))


def held(manifest: Any, **changes: Any) -> HeldVersion:
    return replace(HeldVersion(manifest.version, manifest.root, manifest.table_digest), **changes)


def test_what_was_held_reads_back() -> None:
    value = HeldVersion(Version(3, 9), Digest(bytes(range(32))), Digest(bytes(32)))
    assert HeldVersion.decode(value.encode()) == value


def test_a_damaged_note_of_what_was_held_is_like_none(node: Any) -> None:
    for note in (b"", b"\xc1", b"\x93\x01\x02\x03"):
        node.store.save_state(STATE_KEY, note)
        assert rebuild_last(node.store, STATE_KEY, name="note") is None


def test_every_version_between_the_anchor_and_the_newest_can_be_rebuilt(node: Any, kit: Any) -> None:
    for manifest in publish(node, kit.Model(), 4):
        weights = rebuild(node.store, held(manifest), name="pulsenet-test")
        assert compute_region_root(weights.table, weights.region.bytes) == manifest.root
        assert weights.held == held(manifest)
        weights.region.close()


def test_a_version_with_another_root_is_not_passed_off_as_the_one_asked_for(node: Any, kit: Any) -> None:
    *_, last = publish(node, kit.Model(), 2)
    before = open_memories()
    with pytest.raises(UnavailableError, match="has root"):
        rebuild(node.store, held(last, root=Digest(bytes(32))), name="pulsenet-test")
    assert open_memories() == before


def test_damage_on_every_way_ends_with_what_is_missing(node: Any, kit: Any) -> None:
    first, second, third = publish(node, kit.Model(), 3)
    node.add_skip(first)
    damage(node.store, first)
    before = open_memories()
    with pytest.raises(UnavailableError, match="no_anchor"):
        rebuild(node.store, held(third), name="pulsenet-test")
    assert open_memories() == before
    assert second.version == Version(0, 2)


def test_a_hop_that_starts_from_other_weights_is_avoided(node: Any, kit: Any) -> None:
    """Two manifests for one base: the shorter one belongs to a history that was cut off."""
    _, second, third = publish(node, kit.Model(), 3)
    stray = replace(third, base_root=Digest(bytes(32)), encoded_size_bytes=1)
    node.store.put_record(kit.sign_manifest(stray))
    weights = rebuild(node.store, held(third), name="pulsenet-test")
    assert weights.held.root == third.root
    weights.region.close()
    assert second.root != third.root


def test_a_machine_without_memory_says_so(node: Any, kit: Any, monkeypatch: Any) -> None:
    first, second = publish(node, kit.Model(), 2)
    monkeypatch.setattr("pulsenet.local.shared_memory.read_available_memory_bytes", lambda: 100)
    with pytest.raises(StorageError) as caught:
        rebuild(node.store, held(second), name="pulsenet-test")
    assert caught.value.reason == "memory"
    assert first.version == Version(0, 1)


KILLED_CHILD = """
import os, signal, sys
from pathlib import Path
from pulsenet.codec.changes import apply_changes
from pulsenetd.storage import mirror as module
from pulsenetd.storage.store import Store

directory, number, point = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = Store.open(directory)
mirror = module.Mirror(store, directory / "spools")
assert mirror.restore() is not None
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
calls = []

def apply(view, changes):
    calls.append(changes)
    if point == "half" and len(calls) == 2:
        kill()
    apply_changes(view, changes)

module.apply_changes = apply
save_state = store.save_state
if point == "before-save":
    store.save_state = kill
if point == "after-save":
    store.save_state = lambda *values: (save_state(*values), kill())
mirror.apply_hop(next(m for _, m in store.manifests() if m.version.number == number))
"""


@pytest.mark.parametrize(
    ("point", "number"), [("half", 1), ("before-save", 1), ("after-save", 2)], ids=["half", "before-save", "after-save"]
)
def test_a_process_killed_while_it_applied_holds_the_old_version_or_the_new(
    tmp_path: Path, node: Any, kit: Any, point: str, number: int
) -> None:
    """A-APP-1, second half: kill -9 after half of the tensors, and around the moment the fact is kept."""
    model = kit.Model()
    first, versions = node.publish(model), {1: model.bytes.copy()}
    model.step()
    second, versions[2] = node.publish(model), model.bytes.copy()
    directory = tmp_path / "inferencer"
    store = Store.open(directory)
    for manifest in (first, second):
        kit.copy_blob(node.store, store, manifest)
    store.save_state(STATE_KEY, held(first).encode())
    store.close()
    child = subprocess.run([sys.executable, "-c", KILLED_CHILD, str(directory), "2", point], check=False, timeout=60)
    assert child.returncode == -signal.SIGKILL
    store = Store.open(directory)
    mirror = Mirror(store, directory / "spools")
    assert mirror.restore() == Version(0, number)
    weights = mirror._weights
    assert weights is not None
    assert np.array_equal(weights.region.bytes, versions[number])
    assert not list((directory / "spools").iterdir())
    mirror.close()
    store.close()


def test_rebuilding_twice_keeps_one_region(node: Any, kit: Any, tmp_path: Path) -> None:
    (first,) = publish(node, kit.Model(), 1)
    store = Store.open(tmp_path / "inferencer")
    kit.copy_blob(node.store, store, first)
    store.save_state(STATE_KEY, held(first).encode())
    mirror = Mirror(store, tmp_path / "inferencer" / "spools")
    before = open_memories()
    restore: Callable[[], Version | None] = mirror.restore
    assert [restore(), restore()] == [Version(0, 1)] * 2
    assert open_memories() == before + 1
    mirror.close()
    store.close()
