"""Theta in host memory and the spool of a round's blobs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from pulsenet.errors import StorageError
from pulsenet.training import round_blobs
from pulsenet.training.round_blobs import BlobSpool, HostTheta


class Counting:
    """A state elsewhere: each read is a copy."""

    round_index, state_root = 0, None

    def __init__(self) -> None:
        self.read: list[int] = []

    def theta(self, tensor_index: int) -> np.ndarray:
        self.read.append(tensor_index)
        return np.full(2, tensor_index, np.float32)

    def momentum(self, tensor_index: int) -> np.ndarray:
        raise AssertionError("a blob needs no momentum")


def test_theta_is_read_once_while_a_tensor_is_in_work_and_little_is_held() -> None:
    state = Counting()
    theta = HostTheta(state, 5)
    assert len(theta) == 5
    for index in (0, 0, 1, 0, 1, 2, 1, 2, 3):
        assert theta[index].tolist() == [index, index]
    assert state.read == [0, 1, 2, 3]
    theta[0]
    assert state.read[-1] == 0
    assert [one[0] for one in theta[1:3]] == [1.0, 2.0]
    for outside in (5, -1):
        with pytest.raises(IndexError):
            theta[outside]


def test_blobs_come_back_and_leave_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_blobs, "READ_SIZE_BYTES", 3)
    spool = BlobSpool(tmp_path)
    first = spool.add([b"abc", memoryview(b"defg"), b""])
    second = spool.add([])
    third = spool.add([b"xyz"])
    assert list(spool.read(first)) == [b"abc", b"def", b"g"]
    assert list(spool.read(second)) == []
    assert b"".join(spool.read(third)) == b"xyz"
    assert b"".join(spool.read(first)) == b"abcdefg"
    assert list(tmp_path.iterdir()) == []
    spool.close()
    spool.close()


def test_a_disk_that_fails_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="missing"):
        BlobSpool(tmp_path / "missing")
    spool = BlobSpool(None)
    blob = spool.add([b"abcdef"])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError) as caught:
        spool.add([b"more"])
    assert caught.value.reason == "enospc"
    monkeypatch.setattr(os, "pread", full)
    with pytest.raises(StorageError):
        list(spool.read(blob))
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    with pytest.raises(StorageError, match="cut short"):
        list(spool.read(blob))
    spool.close()
