"""Restarting p2pd: when, how often, and when to give up."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from pulsenet import limits
from pulsenet.errors import UnavailableError
from pulsenetd.errors import P2pdError, exit_code
from pulsenetd.network.supervisor import (
    DEATH_WINDOW_SECONDS,
    DEATHS_MAX,
    PING_INTERVAL_SECONDS,
    PING_TIMEOUT_SECONDS,
    PINGS_MISSED_MAX,
    Loss,
    RestartPolicy,
    Supervisor,
    watch_process,
)


def test_waits_double_and_are_jittered_downward() -> None:
    policy = RestartPolicy(lambda: 0.0)
    assert [policy.record_death(0.0) for _ in range(4)] == [0.25, 0.5, 1.0, 2.0]
    policy = RestartPolicy(lambda: 0.999)
    assert policy.record_death(0.0) == pytest.approx(limits.RETRY_SECONDS_MIN, rel=0.01)


def test_the_fifth_death_within_five_minutes_is_the_last() -> None:
    """A-PROC-1."""
    policy = RestartPolicy(lambda: 0.5)
    assert all(policy.record_death(float(number)) is not None for number in range(DEATHS_MAX - 1))
    assert policy.record_death(10.0) is None


def test_old_deaths_are_forgotten() -> None:
    policy = RestartPolicy(lambda: 0.0)
    for number in range(20):
        assert policy.record_death(number * (DEATH_WINDOW_SECONDS + 1)) == 0.25


class Process:
    """A p2pd that a test lets die or hang."""

    def __init__(self) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.answers = True
        self.pinged_thrice = asyncio.Event()
        self.ping_count = 0

    async def wait_exit(self) -> int:
        return await asyncio.shield(self.exited)

    async def ping(self, timeout_seconds: float) -> None:
        self.ping_count += 1
        if self.ping_count == 3:
            self.pinged_thrice.set()
        if not self.answers:
            raise UnavailableError("no answer")


@pytest.mark.parametrize(("status", "words"), [(-9, "p2pd was killed by signal 9"), (2, "p2pd ended with status 2")])
async def test_the_end_of_the_process_is_noticed_at_once(status: int, words: str) -> None:
    process = Process()
    asyncio.get_running_loop().call_later(0.05, process.exited.set_result, status)
    started = time.monotonic()
    assert await watch_process(process) == Loss("died", words)
    assert time.monotonic() - started < 1.0


async def test_a_process_that_does_not_answer_twice_counts_as_gone_but_once_does_not() -> None:
    process = Process()
    watch = asyncio.create_task(watch_process(process, ping_interval_seconds=0.01))
    await process.pinged_thrice.wait()
    assert not watch.done()
    process.answers = False
    loss = await asyncio.wait_for(watch, 5)
    assert loss.reason == "hung"
    assert "does not answer" in loss.text


def test_a_hang_is_noticed_within_fifteen_seconds() -> None:
    """A-PROC-1: the answer to one ping, then two that never come."""
    assert PINGS_MISSED_MAX * (PING_INTERVAL_SECONDS + PING_TIMEOUT_SECONDS) < 15


async def test_a_failed_restart_is_tried_again_and_each_counts() -> None:
    deaths = asyncio.Queue[Loss]()
    slept: list[float] = []
    failures = [UnavailableError("not yet"), None]

    async def restart() -> None:
        failure = failures.pop(0)
        if failure is not None:
            raise failure

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    supervisor = Supervisor(
        watch=deaths.get,
        restart=restart,
        policy=RestartPolicy(lambda: 0.0),
        clock=lambda: 0.0,
        sleep=sleep,
    )
    running = asyncio.create_task(supervisor.run())
    deaths.put_nowait(Loss("died", "killed"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert slept == [0.25, 0.5]
    assert supervisor.restart_count == 1
    assert supervisor.restarts == {"died": 1, "failed": 1}
    assert supervisor.is_healthy
    failures.extend(UnavailableError("never") for _ in range(9))
    deaths.put_nowait(Loss("died", "killed"))
    with pytest.raises(P2pdError, match="5 times within 5 minutes, last: never") as caught:
        await running
    assert exit_code(caught.value) == 7
    assert not supervisor.is_healthy


async def test_a_p2pd_that_dies_at_once_again_and_again_is_told_once_and_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A-PROC-1: also one that cannot be started at all; waits double in between, the last line names the cause."""
    caplog.set_level(logging.WARNING)
    slept: list[float] = []

    async def watch() -> Loss:
        return Loss("died", "p2pd ended with status 1")

    async def restart() -> None:
        raise P2pdError("p2pd cannot run: no memory")

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    supervisor = Supervisor(
        watch=watch, restart=restart, policy=RestartPolicy(lambda: 0.0), clock=lambda: 0.0, sleep=sleep
    )
    with pytest.raises(P2pdError, match="5 times within 5 minutes, last: p2pd cannot run: no memory"):
        await supervisor.run()
    assert slept == [0.25, 0.5, 1.0, 2.0]
    assert supervisor.restarts == {"failed": 4}
    assert [record.getMessage() for record in caplog.records] == [
        "p2pd ended with status 1: restarting in 0.2 s",
        "p2pd cannot run: no memory: restarting in 0.5 s",
    ]
