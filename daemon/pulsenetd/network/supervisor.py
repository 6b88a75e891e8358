"""Keeps p2pd alive: notices that it died or hangs, restarts it with back-off, gives up in the end (A-PROC-1)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Loss:
    """Why p2pd has to be started anew."""

    reason: str
    """``died`` or ``hung``; of a restart that did not succeed, ``failed``."""
    text: str
    """The same for people."""

    def __str__(self) -> str:
        return self.text


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
) -> Loss:
    """Return, once p2pd has ended or stopped answering, which of the two it was.

    An end is noticed at once; a hang ``PINGS_MISSED_MAX * (interval + timeout)`` seconds after the last answer at most,
    14 s by default.
    """
    exited = asyncio.create_task(process.wait_exit())
    missed_count = 0
    try:
        while True:
            await asyncio.wait({exited}, timeout=ping_interval_seconds)
            if exited.done():
                return Loss("died", _describe_exit(exited.result()))
            try:
                await process.ping(ping_timeout_seconds)
            except UnavailableError:
                missed_count += 1
            else:
                missed_count = 0
            if missed_count >= PINGS_MISSED_MAX and not exited.done():
                return Loss("hung", f"p2pd does not answer ({missed_count} tries of {ping_timeout_seconds:g} s)")
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
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        *,
        watch: Callable[[], Awaitable[Loss]],
        restart: Callable[[], Awaitable[None]],
        policy: RestartPolicy,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._watch = watch
        self._restart = restart
        self._policy = policy
        self._clock = clock
        self._sleep = sleep
        self.is_healthy = True
        """Whether p2pd answers; a node without it is not ready."""
        self.restarts: Counter[str] = Counter()
        """Losses after which p2pd came back and tries that failed, by :class:`Loss` reason; ``stuck`` where it was
        replaced alive, because it would not dial."""

    @property
    def restart_count(self) -> int:
        """How often p2pd was lost and brought back."""
        return self.restarts["died"] + self.restarts["hung"]

    async def run(self) -> NoReturn:
        """Watch and restart until cancelled.

        Raises:
            P2pdError: p2pd died too often, or could not be started so often.
        """
        while True:
            loss = await self._watch()
            self.is_healthy = False
            await self._bring_back(loss)
            self.restarts[loss.reason] += 1
            self.is_healthy = True
            logger.info("p2pd is back")

    async def _bring_back(self, loss: Loss) -> None:
        told = ""
        while True:
            delay_seconds = self._policy.record_death(self._clock())
            if delay_seconds is None:
                raise P2pdError(
                    f"p2pd died {DEATHS_MAX} times within {DEATH_WINDOW_SECONDS / 60:.0f} minutes, last: {loss}; "
                    "look for memory shortage or a damaged hivemind install, then start the node again"
                )
            # the same cause again and again is told once; the last line of a node that gives up names it
            logger.log(
                logging.DEBUG if loss.text == told else logging.WARNING, "%s: restarting in %.1f s", loss, delay_seconds
            )
            told = loss.text
            await self._sleep(delay_seconds)
            try:
                await self._restart()
            except (UnavailableError, AddressInUseError, P2pdError) as error:
                # a binary that cannot run now may be one that is being upgraded
                self.restarts["failed"] += 1
                loss = Loss("failed", str(error))
            else:
                return


def _describe_exit(status: int) -> str:
    if status < 0:
        return f"p2pd was killed by signal {-status}"
    return f"p2pd ended with status {status}"
