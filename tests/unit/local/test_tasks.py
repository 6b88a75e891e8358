"""Tasks between JSON objects and what travels."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.ids import PeerId
from pulsenet.local.protocol import TASKS_PER_CALL_MAX, GivenTask
from pulsenet.local.tasks import Task, encode_tasks, read_task

PEER = PeerId(bytes(32))


def test_a_task_comes_back_as_it_was() -> None:
    (text,) = encode_tasks([{"prompt": [1, 2], "count": 8}])
    task = read_task(GivenTask(PEER, bytes(16), text, 1_500))
    assert task == Task(PEER, bytes(16), {"prompt": [1, 2], "count": 8}, 1.5)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([], "0 tasks"),
        ([{}] * (TASKS_PER_CALL_MAX + 1), "1025 tasks"),
        ([{}, {"a": b""}], "task 1 is no JSON"),
        (["text"], "task 0 is no JSON"),
        ([{"a": "x" * 66_000}], "task 0 has 66009 bytes"),
    ],
)
def test_tasks_that_cannot_travel_are_our_own_fault(contents: list[Any], message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        encode_tasks(contents)


@pytest.mark.parametrize("content", ["", "[", "[]", "7", "[" * 60_000])
def test_a_task_that_is_no_object_is_none(content: str) -> None:
    assert read_task(GivenTask(PEER, bytes(16), content, 1)) is None
