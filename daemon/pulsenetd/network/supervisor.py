"""Keeps p2pd alive: notices that it died or hangs, restarts it with back-off, gives up in the end (A-PROC-1)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, Protocol

from pulsenet import limits
from pulsenet.errors import UnavailableError
from pulsenetd.errors import AddressInUseError, P2pdError

logger: Final = logging.getLogger("pulsenet.supervisor")

DEATHS_MAX: Final = 5
"""Deaths within the window after which the node gives up."""
DEATH_WINDOW_SECONDS: Final = 300.0

PING_INTERVAL_SECONDS: Final = 2.0
PING_TIMEOUT_SECONDS: Final = 5.0
PINGS_MISSED_MAX: Final = 2
"""Unanswered pings in a row that mean p2pd hangs; one alone happens on a machine at full load."""


class WatchedProcess(Protocol):
    """What the watch needs of p2pd."""

    async def wait_exit(self) -> int:
        """Return the exit status once the process has ended."""
        ...

    async def ping(self, timeout_seconds: float) -> None:
        """Return once it answered, else raise UnavailableError."""
        ...


class RestartPolicy:
    """When to restart and when to give up: pure arithmetic.

    Args:
        draw: Uniform in [0, 1): jitter, so that nodes felled by one cause do not come back as one.
    """

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._deaths: deque[float] = deque()

    def record_death(self, now: float) -> float | None:
        """Take a death at monotonic time ``now``; return the seconds to wait before a restart, ``None`` to give up."""
        while self._deaths and now - self._deaths[0] > DEATH_WINDOW_SECONDS:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) >= DEATHS_MAX:
            return None
        longest_seconds = min(limits.RETRY_SECONDS_MAX, limits.RETRY_SECONDS_MIN * 2.0 ** (len(self._deaths) - 1))
        return longest_seconds * (0.5 + self._draw() / 2)


async def watch_process(
    process: WatchedProcess,
    *,
    ping_interval_seconds: float = PING_INTERVAL_SECONDS,
    ping_timeout_seconds: float = PING_TIMEOUT_SECONDS,
) -> str:
    """Return, once p2pd has ended or stopped answering, which of the two it was."""
    exited = asyncio.create_task(process.wait_exit())
    missed_count = 0
    try:
        while True:
            await asyncio.wait({exited}, timeout=ping_interval_seconds)
            if exited.done():
                return _describe_exit(exited.result())
            try:
                await process.ping(ping_timeout_seconds)
            except UnavailableError:
                missed_count += 1
            else:
                missed_count = 0
            if missed_count >= PINGS_MISSED_MAX and not exited.done():
                return f"p2pd does not answer ({missed_count} tries of {ping_timeout_seconds:g} s)"
    finally:
        exited.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await exited


class Supervisor:
    """Watches p2pd and has it restarted.

    Args:
        watch: Returns why p2pd is gone, once it is.
        restart: Brings up a new one and everything on it.
        policy: Waits and limit.
        clock: Monotonic seconds.
        on_change: Told ``True`` when the network is up again and ``False`` when it went down.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        *,
        watch: Callable[[], Awaitable[str]],
        restart: Callable[[], Awaitable[None]],
        policy: RestartPolicy,
        clock: Callable[[], float],
        on_change: Callable[[bool], None] = lambda _: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._watch = watch
        self._restart = restart
        self._policy = policy
        self._clock = clock
        self._on_change = on_change
        self._sleep = sleep
        self.is_healthy = True
        """Whether p2pd answers; a node without it is not ready."""
        self.restart_count = 0

    async def run(self) -> NoReturn:
        """Watch and restart until cancelled.

        Raises:
            P2pdError: p2pd died too often, or cannot run any more.
        """
        while True:
            reason = await self._watch()
            self.is_healthy = False
            self._on_change(False)
            await self._bring_back(reason)
            self.is_healthy = True
            self.restart_count += 1
            logger.info("p2pd is back")
            self._on_change(True)

    async def _bring_back(self, reason: str) -> None:
        while True:
            delay_seconds = self._policy.record_death(self._clock())
            if delay_seconds is None:
                raise P2pdError(
                    f"p2pd died {DEATHS_MAX} times within {DEATH_WINDOW_SECONDS / 60:.0f} minutes, last: {reason}; "
                    "look for memory shortage or a damaged hivemind install, then start the node again"
                )
            logger.warning("%s: restarting in %.1f s", reason, delay_seconds)
            await self._sleep(delay_seconds)
            try:
                await self._restart()
            except (UnavailableError, AddressInUseError) as error:
                reason = str(error)
            else:
                return


def _describe_exit(status: int) -> str:
    if status < 0:
        return f"p2pd was killed by signal {-status}"
    return f"p2pd ended with status {status}"
