"""Slots kept free of bulk transfers."""

from __future__ import annotations

import asyncio

from pulsenetd.network.lanes import Lanes


async def test_bulk_leaves_room_for_small_requests_and_all_wait_their_turn() -> None:
    lanes = Lanes(3, 2)
    running: list[str] = []
    release = asyncio.Event()

    async def hold(name: str, *, bulk: bool) -> None:
        async with lanes.enter(bulk=bulk):
            running.append(name)
            await release.wait()

    tasks = [asyncio.create_task(hold(name, bulk=True)) for name in ("bulk1", "bulk2", "bulk3")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert running == ["bulk1", "bulk2"]
    tasks += [asyncio.create_task(hold(name, bulk=False)) for name in ("small1", "small2")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert running == ["bulk1", "bulk2", "small1"]
    assert lanes.bulk_free == 0
    release.set()
    await asyncio.gather(*tasks)
    assert len(running) == 5
    assert lanes.bulk_free == 2
