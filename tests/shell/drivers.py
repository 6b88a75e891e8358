"""Machines under a driver whose orders nobody carries out: a node without disk and network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from pulsenet.node.effects import Effect
from pulsenetd.driver import Driver, Handler, Post


class _Everything(dict[type[Effect], Handler]):
    """A handler for every order, which does nothing."""

    def __missing__(self, key: type[Effect]) -> Handler:
        async def ignore(effect: Effect, post: Post) -> None:
            pass

        return ignore


def make_driver(machines: Any, now_ms: int = 0, monotonic: Callable[[], float] = lambda: 0.0) -> Driver:
    return Driver(machines, _Everything(), monotonic=monotonic, wall_ms=lambda: now_ms)


@contextlib.asynccontextmanager
async def running(driver: Driver) -> AsyncIterator[Driver]:
    """Drive the machines as long as the block lasts."""
    task = asyncio.create_task(driver.run())
    try:
        yield driver
    finally:
        task.cancel()
