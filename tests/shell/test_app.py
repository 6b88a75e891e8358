"""A node that is told to stop leaves nothing behind, whatever it is at."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pulsenetd import app, startup
from pulsenetd.app import Node
from pulsenetd.config import Config
from pulsenetd.service_manager import ServiceManager
from pulsenetd.storage.store import Store


def make_node(home: Path) -> Node:
    config = Config(role="trainer")
    settled = startup.settle(config, {"XDG_DATA_HOME": str(home)}, say=print, now_ms=lambda: 0)
    return Node(config, settled, ServiceManager.take_from({}, os.getpid(), time.monotonic), print)


def test_a_store_that_is_being_opened_is_closed_before_the_node_gives_its_directory_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_opening, may_go_on = threading.Event(), threading.Event()
    opened: list[Store] = []

    def open_slowly(directory: Path, **options: Any) -> Store:
        is_opening.set()
        may_go_on.wait(10)
        opened.append(Store.open(directory, **options))
        return opened[0]

    monkeypatch.setattr(app, "Store", type("SlowStore", (), {"open": staticmethod(open_slowly)}))

    async def main() -> None:
        running = asyncio.create_task(make_node(tmp_path).run())
        await asyncio.to_thread(is_opening.wait, 10)
        running.cancel()
        await asyncio.sleep(0.05)
        assert not running.done(), "another process could open the store at the same time"
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert opened[0]._database._connection is None
