"""Batches on a shelf: in order, durable, and apart from a damaged file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pulsenet.errors import StorageError
from pulsenet.ids import PeerId
from pulsenetd.storage.shelf import RolloutShelf, ShelfEntry

ONE, TWO = PeerId(b"1" * 32), PeerId(b"2" * 32)


def entry(peer_id: PeerId, sequence: int, size_bytes: int = 4) -> ShelfEntry:
    return ShelfEntry(peer_id, sequence, 7, size_bytes)


def test_batches_stay_in_the_order_they_came_across_restarts(tmp_path: Path) -> None:
    shelf = RolloutShelf.open(tmp_path / "a.sqlite")
    listed = [entry(TWO, 2**63 - 1), entry(ONE, 5), entry(ONE, 3)]
    for number, one in enumerate(listed):
        shelf.add(one, b"abc%d" % number, b"mark %d" % number)
    shelf.close()
    shelf.close()
    shelf = RolloutShelf.open(tmp_path / "a.sqlite")
    assert shelf.entries() == listed
    assert shelf.read((ONE, 3)) == b"abc2"
    assert shelf.marks() == {TWO: b"mark 0", ONE: b"mark 2"}
    shelf.remove([(ONE, 5), (TWO, 2**63 - 1)])
    assert shelf.entries() == [entry(ONE, 3)]
    assert list(shelf.marks()) == [TWO, ONE], "marks outlive their batches"
    with pytest.raises(StorageError, match="not on the shelf"):
        shelf.read((ONE, 5))
    shelf.close()


def test_a_batch_and_its_mark_are_stored_both_or_neither(tmp_path: Path) -> None:
    shelf = RolloutShelf.open(tmp_path / "a.sqlite")
    shelf.add(entry(ONE, 1), b"abcd", b"first")
    with pytest.raises(StorageError):
        shelf.add(entry(ONE, 1), b"efgh", b"second", forgotten=ONE)
    assert shelf.marks() == {ONE: b"first"}
    shelf.add(entry(TWO, 1), b"efgh", b"second", forgotten=ONE)
    assert shelf.marks() == {TWO: b"second"}
    shelf.close()


@pytest.mark.parametrize("damage", [b"no database" * 500, None])
def test_a_damaged_file_is_set_aside_and_said_aloud(
    tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.sqlite"
    shelf = RolloutShelf.open(path)
    for number in range(50):
        shelf.add(entry(ONE, number), bytes(4000), b"mark")
    shelf.close()
    whole = bytearray(path.read_bytes())
    if damage is None:
        whole[4096:8192] = b"\xff" * 4096  # the root page of the batches
    path.write_bytes(damage or bytes(whole))
    with caplog.at_level(logging.ERROR):
        shelf = RolloutShelf.open(path)
    assert "a.damaged" in caplog.text
    assert shelf.entries() == []
    shelf.add(entry(ONE, 1), b"abcd", b"mark")
    shelf.close()
    assert (tmp_path / "a.damaged").exists()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        RolloutShelf.open(tmp_path / "missing" / "a.sqlite")
