"""Slots and caps as transfers feel them; the rules are the core's."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import numpy as np
import pytest

from pulsenet.ids import Digest, PeerId
from pulsenet.node.uploads import LEASE_SECONDS, SLOTS_START, WAITING_PER_PEER_MAX
from pulsenet.wire.messages import GetChunks
from pulsenetd.network import pacing
from pulsenetd.network.pacing import Gate, NoSlotError, UploadDesk, find_no_kind

PEERS = [PeerId(bytes([number]) * 32) for number in range(1, 60)]
T = TypeVar("T")


async def hold(desk: UploadDesk, peer_id: PeerId, release: asyncio.Event, log: list[PeerId]) -> None:
    async with desk.enter(peer_id, "patch") as upload:
        log.append(peer_id)
        await release.wait()
        upload.note_sent(1 << 20)


async def test_transfers_wait_for_a_slot_and_get_it_in_turn() -> None:
    desk, release, log = UploadDesk(), asyncio.Event(), list[PeerId]()
    async with asyncio.TaskGroup() as tasks:
        for peer_id in PEERS[: SLOTS_START + 2]:
            tasks.create_task(hold(desk, peer_id, release, log))
        await asyncio.sleep(0)
        assert log == PEERS[:SLOTS_START]
        release.set()
    assert log == PEERS[: SLOTS_START + 2]


async def test_a_transfer_that_holds_its_slot_for_long_gives_it_up_to_one_that_waits() -> None:
    """A-PEER-2: slow readers keep nobody out."""
    now = 0.0

    desk, release, log = UploadDesk(clock=lambda: now), asyncio.Event(), list[PeerId]()
    async with asyncio.TaskGroup() as tasks:
        for peer_id in PEERS[: SLOTS_START - 1]:
            tasks.create_task(hold(desk, peer_id, release, log))

        async def hold_on() -> None:
            nonlocal now
            async with desk.enter(PEERS[40], "anchor") as upload:
                now = 2 * LEASE_SECONDS
                await upload.pace(1 << 20)  # nobody waits
                tasks.create_task(hold(desk, PEERS[50], release, log))
                await asyncio.sleep(0)
                await upload.pace(1 << 20)

        with pytest.raises(NoSlotError):
            await hold_on()
        await asyncio.sleep(0)
        assert log[-1] == PEERS[50]
        release.set()


async def test_who_finds_no_slot_in_time_is_sent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "WAIT_SECONDS_MAX", 0.05)

    desk, release, log = UploadDesk(), asyncio.Event(), list[PeerId]()
    async with asyncio.TaskGroup() as tasks:
        for peer_id in PEERS[:SLOTS_START]:
            tasks.create_task(hold(desk, peer_id, release, log))
        await asyncio.sleep(0)
        with pytest.raises(NoSlotError):
            await hold(desk, PEERS[50], release, log)
        release.set()
    await hold(desk, PEERS[50], release, log)


async def test_a_reader_that_hangs_up_leaves_the_queue() -> None:
    desk, release, log = UploadDesk(), asyncio.Event(), list[PeerId]()
    async with asyncio.TaskGroup() as tasks:
        for peer_id in PEERS[:SLOTS_START]:
            tasks.create_task(hold(desk, peer_id, release, log))
        await asyncio.sleep(0)
        waiting = [tasks.create_task(hold(desk, PEERS[50], release, log)) for _ in range(WAITING_PER_PEER_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(NoSlotError):
            await hold(desk, PEERS[50], release, log)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        release.set()
    assert PEERS[50] not in log
    await hold(desk, PEERS[50], release, log)


async def test_a_slot_given_to_a_reader_that_hangs_up_at_that_moment_is_free_again() -> None:
    desk, release, log = UploadDesk(), asyncio.Event(), list[PeerId]()
    release.set()
    first = asyncio.create_task(hold(desk, PEERS[0], release, log))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    for _ in range(3):
        await asyncio.gather(*(hold(desk, peer_id, release, log) for peer_id in PEERS[: SLOTS_START + 3]))
    assert desk._uploads.serving_count == 0
    assert desk._uploads.waiting_count == 0


async def test_a_cap_is_kept_by_all_transfers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-PEER-2, on a fake clock: sleeping is what moves it."""
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)

    gate = Gate(1_000_000, lambda: now)

    async def send() -> None:
        for _ in range(10):
            await gate.take(1 << 20)

    await asyncio.gather(*(send() for _ in range(4)))
    assert 40 * (1 << 20) / now == pytest.approx(1_000_000, rel=0.05)


async def test_what_waits_passes_one_after_another_at_about_the_size_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight streams that passed at once took the whole line for a moment, and nothing for eight times as long."""
    now = 0.0
    began: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    gate = Gate(1_000_000, lambda: now)

    async def receive(size_bytes: int) -> None:
        async with gate.passing() as passage:
            began.append(now)
            passage.size_bytes = size_bytes

    for _ in range(2):
        await asyncio.gather(*(receive(500_000) for _ in range(8)))
    assert np.diff(began[2:]) == pytest.approx([0.5] * 13, abs=0.01)
    # What did not come, or came short, is no debt.
    before = now
    with pytest.raises(OSError, match="gone"):
        async with gate.passing():
            raise OSError("gone")
    await receive(100)
    await receive(100)
    assert now - before == pytest.approx(0.5, abs=0.1)


async def test_nobody_waits_for_bytes_that_did_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """After chunks of 1 MB the first small one counted as large, and the next waited for all of that."""
    now = 0.0
    began: list[float] = []
    really_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        await really_sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    gate = Gate(1_000_000, lambda: now)

    async def receive(size_bytes: int) -> None:
        async with gate.passing() as passage:
            began.append(now)
            await really_sleep(0)
            passage.size_bytes = size_bytes

    await receive(1_000_000)
    await receive(1_000_000)
    await asyncio.gather(receive(100), receive(100))
    assert began[3] - began[2] < 2 * pacing.LOOK_SECONDS


async def test_without_a_cap_nothing_waits() -> None:
    gate = Gate(0)
    await gate.take(1 << 40)
    async with gate.passing() as passage:
        passage.size_bytes = 1 << 40


async def test_nobody_looked_is_other() -> None:
    assert await find_no_kind(GetChunks((Digest(bytes(32)),))) == "other"
