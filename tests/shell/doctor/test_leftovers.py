"""What a killed node leaves behind is named and cleared; a running one is left alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pulsenet.errors import StorageError
from pulsenetd.doctor.findings import Grade, Subject
from pulsenetd.doctor.leftovers import is_running, look_at_leftovers
from pulsenetd.storage.disk import DirectoryLock


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node that was killed."""
    node = tmp_path / "n"
    (node / "p2pd").mkdir(parents=True)
    (node / "local").mkdir()
    (node / "chunks" / "ab").mkdir(parents=True)
    for path in (node / "p2pd" / "control.sock", node / "local" / "daemon.sock"):
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    (node / "node.json").write_text("{}")
    (node / "chunks" / "ab" / "abc.1-2.partial").touch()
    (node / "identity.key").touch()
    DirectoryLock.acquire(node).release()
    return node


def test_stale_files_are_named_and_cleared(node: Path) -> None:
    (finding,) = look_at_leftovers(Subject(node.parent, nodes=(node,)))
    assert finding.grade is Grade.WARN
    assert "4 files of a process that is gone" in finding.text
    assert finding.repair is not None
    assert "4 stale files deleted" in finding.repair()
    assert sorted(path.name for path in node.rglob("*") if not path.is_dir()) == ["identity.key", "lock"]
    (finding,) = look_at_leftovers(Subject(node.parent, nodes=(node,)))
    assert finding.grade is Grade.OK


def test_a_running_node_is_left_alone(node: Path) -> None:
    (before,) = look_at_leftovers(Subject(node.parent, nodes=(node,)))
    assert not is_running(node)
    lock = DirectoryLock.acquire(node)
    try:
        assert is_running(node)
        (finding,) = look_at_leftovers(Subject(node.parent, nodes=(node,)))
        assert finding.grade is Grade.OK
        assert before.repair is not None
        with pytest.raises(StorageError, match="in use"):
            before.repair()
    finally:
        lock.release()
    assert (node / "node.json").exists()


def test_asking_takes_the_lock_from_nobody(node: Path) -> None:
    assert not is_running(node)
    DirectoryLock.acquire(node).release()


def test_a_directory_that_never_ran_has_nothing_stale(tmp_path: Path) -> None:
    (finding,) = look_at_leftovers(Subject(tmp_path, nodes=(tmp_path / "none", tmp_path)))
    assert finding.grade is Grade.OK


def test_what_was_left_half_written_in_a_runs_directory_is_named_and_cleared(tmp_path: Path) -> None:
    """There a key of the owner's may be, and only nodes that start there look."""
    left = tmp_path / "mine" / f".owner.key.{'0a' * 8}.partial"
    left.parent.mkdir()
    left.touch()
    assert look_at_leftovers(Subject(tmp_path))[0].grade is Grade.OK, "it may be in work"
    os.utime(left, (1_000_000_000.0, 1_000_000_000.0))
    (finding,) = look_at_leftovers(Subject(tmp_path))
    assert finding.grade is Grade.WARN
    assert str(tmp_path / "mine") in finding.text
    assert left.name in finding.text
    assert finding.repair is not None
    assert "1 unfinished files deleted" in finding.repair()
    assert not left.exists()
