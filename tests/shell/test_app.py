"""A node that is told to stop leaves nothing behind, whatever it is at."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.token import encode_token
from pulsenet.errors import ConfigError
from pulsenet.ids import RunId
from pulsenet.local.directories import list_nodes
from pulsenetd import app, startup
from pulsenetd.app import Node
from pulsenetd.config import Config
from pulsenetd.network.stack import Network
from pulsenetd.rollouts import Rollouts
from pulsenetd.service_manager import ServiceManager
from pulsenetd.serving import Serving
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


def test_a_directory_of_another_run_is_refused_without_a_link_to_it(tmp_path: Path, run: Any) -> None:
    """Commands would take the other run's node for one of this run, too."""
    home, directory = tmp_path / "home", tmp_path / "node"
    store = Store.open(directory)
    store.put_record(run.genesis)
    store.close()
    other = replace(run.token, run_id=RunId(b"o" * 32))
    config = Config(role="trainer", data_dir=str(directory), token=encode_token(other))
    settled = startup.settle(config, {"XDG_DATA_HOME": str(home)}, say=print, now_ms=lambda: 0)
    node = Node(config, settled, ServiceManager.take_from({}, os.getpid(), time.monotonic), print)
    with pytest.raises(ConfigError, match="holds a node of another run"):
        asyncio.run(node.run())
    settled.lock.release()
    assert list_nodes(home / "pulsenet", None, "store.sqlite") == []


def test_rollouts_are_taken_until_no_peer_is_served_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that a peer just sent is stored by the rollouts' own threads and files."""
    is_serving, closed = asyncio.Event(), []

    async def serve(*_: Any) -> None:
        is_serving.set()
        await asyncio.Event().wait()

    async def close_network(network: Network) -> None:
        await really_close_network(network)
        closed.append("network")

    def close_rollouts(rollouts: Rollouts) -> None:
        really_close_rollouts(rollouts)
        closed.append("rollouts")

    really_close_network, really_close_rollouts = Network.close, Rollouts.close
    monkeypatch.setattr(app, "warm_up_aloud", lambda: None)
    monkeypatch.setattr(Serving, "run", serve)
    monkeypatch.setattr(Network, "close", close_network)
    monkeypatch.setattr(Rollouts, "close", close_rollouts)

    async def main() -> None:
        running = asyncio.create_task(make_node(tmp_path).run())
        await asyncio.wait({running, waiting := asyncio.create_task(is_serving.wait())}, return_when="FIRST_COMPLETED")
        assert waiting.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert closed == ["network", "rollouts"]


def test_who_reads_only_the_first_lines_of_a_node_does_not_end_it() -> None:
    """As ``pulsenet join | grep -m1 token`` does; the exit code is the node's own, too."""
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from pulsenetd.process import _say; _say('one'); _say('two'); sys.stdout.flush(); sys.exit(7)"
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (7, b"")
