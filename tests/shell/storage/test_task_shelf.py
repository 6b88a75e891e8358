"""Tasks on a shelf: in order, durable, with the lease they had last, and apart from a damaged file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pulsenet.errors import StorageError
from pulsenet.ids import PeerId
from pulsenetd.storage.task_shelf import ShelvedTask, TaskShelf

ONE, TWO = PeerId(b"1" * 32), PeerId(b"2" * 32)
IDS = [bytes([number]) * 16 for number in range(3)]


def test_tasks_and_their_leases_outlive_the_process(tmp_path: Path) -> None:
    shelf = TaskShelf.open(tmp_path / "tasks.sqlite")
    shelf.add(list(zip(IDS, ["a", "ü", "c"], strict=True)), 5_000)
    shelf.note_leases(IDS[1:], ONE, [7_000, 8_000])
    shelf.note_leases(IDS[1:2], TWO, [9_000])
    shelf.remove(IDS[2:])
    shelf.close()
    shelf.close()
    shelf = TaskShelf.open(tmp_path / "tasks.sqlite")
    assert shelf.tasks() == [
        ShelvedTask(IDS[0], "a", 5_000, 0, None, 0),
        ShelvedTask(IDS[1], "ü", 5_000, 2, TWO, 9_000),
    ]
    shelf.close()


def test_tasks_are_stored_all_or_none(tmp_path: Path) -> None:
    shelf = TaskShelf.open(tmp_path / "tasks.sqlite")
    shelf.add([(IDS[0], "a")], 5_000)
    with pytest.raises(StorageError):
        shelf.add([(IDS[1], "b"), (IDS[0], "again")], 5_000)
    assert [task.content for task in shelf.tasks()] == ["a"]
    shelf.close()


def test_a_damaged_file_is_set_aside_and_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tasks.sqlite"
    path.write_bytes(b"no database" * 500)
    with caplog.at_level(logging.ERROR):
        shelf = TaskShelf.open(path)
    assert "tasks.damaged" in caplog.text
    assert shelf.tasks() == []
    shelf.add([(IDS[0], "a")], 5_000)
    shelf.close()
    assert (tmp_path / "tasks.damaged").exists()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        TaskShelf.open(tmp_path / "missing" / "tasks.sqlite")
