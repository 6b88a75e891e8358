"""Tasks on the local socket: the training process sends them, an engine's process takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pulsenet.errors import RemoteProtocolError
from pulsenet.local import protocol
from pulsenet.local.protocol import GivenTask, TasksQueued
from pulsenetd.local.link import Link


class TasksHook(Protocol):
    """What the node does with tasks."""

    async def send(self, contents: Sequence[str], lease_ms: int) -> TasksQueued:
        """Queue tasks for the inferencers, all or none."""

    async def take(self, count_max: int, wait_seconds: float) -> tuple[GivenTask, ...]:
        """Get tasks from a trainer, waiting so long for the first; cancelled if the process goes."""


async def answer_tasks(
    hook: TasksHook | None, link: Link, message: protocol.SendTasks | protocol.TakeTasks, wait_seconds_max: float
) -> None:
    """Answer one request.

    Raises:
        RemoteProtocolError: ``message-unexpected`` on a node without tasks, such as a seed.
    """
    if hook is None:
        raise RemoteProtocolError("message-unexpected", "this node is no trainer and no inferencer: it has no tasks")
    if isinstance(message, protocol.SendTasks):
        await link.send(await hook.send(message.contents, message.lease_ms))
        return
    seconds = min(message.timeout_ms / 1000, wait_seconds_max)
    await link.send(protocol.TasksGiven(await link.unless_closed(hook.take(message.count_max, seconds))))
