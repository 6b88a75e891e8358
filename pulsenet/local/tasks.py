"""Tasks as the loops see them: what a training process wants sampled, and what an engine is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pulsenet import limits
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import PeerId
from pulsenet.local.protocol import TASKS_PER_CALL_MAX, GivenTask


@dataclass(frozen=True, slots=True)
class Task:
    """Work that this node holds until ``lease_seconds`` after it was taken; a batch that names it answers it."""

    trainer: PeerId
    """Whose it is, and where the answer goes."""
    task_id: bytes
    content: Mapping[str, Any]
    """Whatever the training process wrote."""
    lease_seconds: float


def encode_tasks(contents: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return contents as they travel.

    Raises:
        LocalProtocolError: Too many at once, one that is no JSON object, or one above 64 KiB.
    """
    encoded = []
    for position, content in enumerate(contents):
        try:
            text = json.dumps(dict(content), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise LocalProtocolError(f"task {position} is no JSON object: {error}") from error
        if len(text.encode()) > limits.TASK_SIZE_BYTES_MAX:
            size_bytes = len(text.encode())
            raise LocalProtocolError(f"task {position} has {size_bytes} bytes, {limits.TASK_SIZE_BYTES_MAX} allowed")
        encoded.append(text)
    if not 1 <= len(encoded) <= TASKS_PER_CALL_MAX:
        raise LocalProtocolError(f"{len(encoded)} tasks in one call, 1 to {TASKS_PER_CALL_MAX} allowed")
    return tuple(encoded)


def read_task(given: GivenTask) -> Task | None:
    """Return a task; ``None`` if its content is no JSON object, which its lease will have given up in time."""
    try:
        content = json.loads(given.content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    return Task(given.trainer, given.task_id, content, given.lease_ms / 1000)
