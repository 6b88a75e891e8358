"""Tasks on the local socket: the training process sends them, an engine's process takes them."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from pulsenet.errors import RemoteProtocolError
from pulsenet.local import protocol
from pulsenet.local.protocol import GivenTask, TasksQueued
from pulsenetd.local.link import Link


class TasksHook(Protocol):
    """What the node does with tasks."""

    async def send(self, contents: Sequence[str], lease_ms: int) -> TasksQueued:
        """Queue tasks for the inferencers, all or none."""

    def take(self, count_max: int, wait_seconds: float) -> Coroutine[Any, Any, tuple[GivenTask, ...]]:
        """Get tasks from a trainer, waiting so long for the first; cancelled if the process goes."""


async def answer_tasks(hook: TasksHook | None, link: Link, message: protocol.SendTasks | protocol.TakeTasks) -> None:
    """Answer one request.

    Raises:
        RemoteProtocolError: ``message-unexpected`` on a node without tasks, such as a seed.
    """
    if hook is None:
        raise RemoteProtocolError("message-unexpected", "this node is no trainer and no inferencer: it has no tasks")
    if isinstance(message, protocol.SendTasks):
        await link.send(await hook.send(message.contents, message.lease_ms))
        return
    given = await link.wait_for(partial(hook.take, message.count_max), message.timeout_ms)
    await link.send(protocol.TasksGiven(given))
