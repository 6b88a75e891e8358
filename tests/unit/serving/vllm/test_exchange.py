"""Orders and answers survive the way, and what is damaged is refused."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsenet.errors import StorageError
from pulsenet.ids import Version
from pulsenet.serving.vllm import exchange
from pulsenet.serving.vllm.exchange import (
    Answer,
    Order,
    Outcome,
    State,
    UpdateInfo,
    answer_path,
    check_private,
    decode_answer,
    describe_refusal,
    encode_answer,
    parse_version,
    read_answer,
    remove,
    write_answer,
    write_whole,
)

ANSWER = Answer(1, 2, "boot", "t1", Order.STAGE, Outcome.REFUSED, State.READY, True, "0.5", "ab", "structure", "why", 7)
COUNTS = st.integers(0, 2**40)


@given(
    rank=COUNTS,
    order=st.sampled_from(Order),
    outcome=st.sampled_from(Outcome),
    state=st.sampled_from(State),
    held=st.none() | st.text(max_size=9),
    reason=st.text(max_size=30),
    windows=st.lists(st.tuples(COUNTS, COUNTS, st.lists(COUNTS, max_size=3), st.lists(COUNTS, max_size=3)), max_size=3),
)
def test_an_answer_comes_back_as_it_was(
    rank: int,
    order: Order,
    outcome: Outcome,
    state: State,
    held: str | None,
    reason: str,
    windows: list[tuple[int, int, list[int], list[int]]],
) -> None:
    frozen = tuple((index, offset, tuple(sizes), tuple(strides)) for index, offset, sizes, strides in windows)
    answer = replace(
        ANSWER, rank=rank, order=order, outcome=outcome, state=state, held=held, reason=reason, windows=frozen
    )
    assert decode_answer(encode_answer(answer)) == answer


@pytest.mark.parametrize(
    "change",
    [
        {"order": "dance"},
        {"state": None},
        {"rank": -1},
        {"rank": True},
        {"changed_count": "7"},
        {"windows": [[1, 2]]},
        {"windows": None},
        {"further": 1},
    ],
)
def test_a_damaged_answer_is_refused(change: dict[str, object]) -> None:
    raw = json.loads(encode_answer(ANSWER)) | change
    with pytest.raises(StorageError, match="damaged"):
        decode_answer(json.dumps(raw).encode())


@given(data=st.binary(max_size=40))
def test_any_bytes_are_an_answer_or_refused(data: bytes) -> None:
    with pytest.raises(StorageError):
        decode_answer(data)


def test_the_newest_answer_of_a_rank_is_read_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_answer(tmp_path, 1) is None
    write_answer(tmp_path, ANSWER)
    write_answer(tmp_path, replace(ANSWER, transaction="t2"))
    assert read_answer(tmp_path, 1) == replace(ANSWER, transaction="t2")
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]
    answer_path(tmp_path, 1).write_bytes(b"{")
    assert read_answer(tmp_path, 1) is None
    monkeypatch.setattr(exchange, "ANSWER_SIZE_BYTES_MAX", 10)
    write_answer(tmp_path, ANSWER)
    assert read_answer(tmp_path, 1) is None


def test_what_the_disk_refuses_is_said_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "taken" / "by").mkdir(parents=True)
    with pytest.raises(StorageError, match="taken cannot be written: Is a directory"):
        write_whole(tmp_path / "taken", b"")
    with pytest.raises(StorageError, match="taken cannot be removed: Is a directory") as caught:
        remove(tmp_path / "taken")
    assert caught.value.reason == "io"
    assert describe_refusal("it", OSError(errno.ENOSPC, "No space left on device")).reason == "enospc"


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    check_private(private)
    private.chmod(0o770)
    with pytest.raises(StorageError, match="closed to others"):
        check_private(private)
    with pytest.raises(StorageError, match="cannot be read"):
        check_private(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is no directory"):
        check_private(tmp_path / "file")
    (tmp_path / "link").symlink_to(private)
    with pytest.raises(StorageError, match="is no directory"):
        check_private(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory to another user needs root")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(StorageError, match="belongs to user 12345"):
        check_private(tmp_path)


def test_an_order_comes_back_as_it_was() -> None:
    order = UpdateInfo(Order.STAGE, "t", "/x", version="0.2", base_version="0.1", root="ab", size_bytes=8, digest="cd")
    assert UpdateInfo.from_json(json.loads(json.dumps(order.to_json()))) == order


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"order": "stage", "transaction": "t"},
        {"order": "dance", "transaction": "t", "directory": "/x"},
        {"order": "stage", "transaction": 1, "directory": "/x"},
        {"order": "stage", "transaction": "t", "directory": "/x", "size_bytes": "8"},
        {"order": "stage", "transaction": "t", "directory": "/x", "size_bytes": True},
        {"order": "stage", "transaction": "t", "directory": "/x", "more": ""},
    ],
)
def test_a_damaged_order_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(StorageError, match="one release of pulsenet"):
        UpdateInfo.from_json(raw)


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.57", Version(0, 57)), ("2.0", Version(2, 0)), ("default", None), ("", None), ("1.x", None), ("-1.2", None)],
)
def test_a_label_is_a_version_or_none(text: str, version: Version | None) -> None:
    assert parse_version(text) == version
