"""What is mended in hivemind, and that it needed mending."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pulsenetd.network import hivemind_repairs

EARLIER_EXPIRY = """
import time
from hivemind.utils import timed_storage
from hivemind.dht.storage import DHTLocalStorage
if {guarded}:
    from pulsenetd.network import hivemind_repairs
    hivemind_repairs.load_now()
now = 1000.0
timed_storage.get_dht_time = lambda: now
storage = DHTLocalStorage()
assert storage.store(1, b"new", 1200.0)
assert not storage.store(1, b"old", 1100.0)
assert storage.store_subkey(2, b"peer", b"new", 1200.0)
assert not storage.store_subkey(2, b"peer", b"old", 1100.0)
now = 1150.0
first, second = storage.get(1), storage.get(2)
print(first is not None and first.value == b"new", second is not None and b"peer" in second.value)
"""


@pytest.fixture(autouse=True)
def _real_clock() -> Iterator[None]:
    hivemind_repairs.load_now()
    yield
    hivemind_repairs.set_clock(time.time)


def test_a_node_does_without_what_only_hiveminds_training_needs() -> None:
    """torch would take two seconds and 240 MiB of every node."""
    script = "import sys; from pulsenetd.network.hivemind_repairs import load_now; load_now(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert {"hivemind.p2p", "hivemind.dht.node"} <= loaded
    assert not {"torch", "hivemind.averaging", "hivemind.optim", "hivemind.moe"} & loaded


@pytest.mark.parametrize(("guarded", "printed"), [(False, "False False"), (True, "True True")])
def test_a_refused_store_with_an_earlier_expiry_deletes_the_newer_record_unless_guarded(
    guarded: bool, printed: str
) -> None:
    """Regression: the first case shows hivemind's bug, so this test says when the guard is needed no more."""
    script = EARLIER_EXPIRY.format(guarded=guarded)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == printed


def test_the_guard_is_installed_once_and_lets_growing_expiries_through() -> None:
    from hivemind.utils.timed_storage import TimedStorage

    before = TimedStorage.store
    hivemind_repairs.guard_expiry()
    assert TimedStorage.store is before
    storage = TimedStorage()
    soon = time.time() + 100
    assert storage.store("key", 1, soon)
    assert not storage.store("key", 2, soon)
    assert storage.store("key", 3, soon + 1)
    assert storage.get("key").value == 3


def test_the_cache_refresh_queue_may_still_move_entries_earlier() -> None:
    from hivemind.dht.node import CacheRefreshQueue

    queue = CacheRefreshQueue()
    queue.store("a", 20.0, 20.0)
    queue.store("b", 10.0, 10.0)
    assert queue.top()[0] == "b"


def test_the_clock_reaches_every_module_that_copied_it() -> None:
    import hivemind.dht.node
    import hivemind.dht.protocol
    import hivemind.dht.routing
    import hivemind.utils.timed_storage

    hivemind_repairs.set_clock(lambda: 42.0)
    modules = (hivemind.dht.node, hivemind.dht.protocol, hivemind.dht.routing, hivemind.utils.timed_storage)
    assert [module.get_dht_time() for module in modules] == [42.0] * 4


async def test_a_search_that_is_given_up_leaves_no_task_behind() -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.traverse import traverse_dht

    asked, said = asyncio.Event(), []

    async def ask(peer: Any, queries: Any) -> Any:
        asked.set()
        await never.wait()

    never, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: said.append(context["message"]))
    options = {"beam_size": 4, "num_workers": 2, "queries_per_call": 3, "get_neighbors": ask}
    search = asyncio.create_task(traverse_dht([DHTID(1)], [DHTID(2)], **options))
    await asked.wait()
    search.cancel()
    with pytest.raises(asyncio.CancelledError):
        await search
    del search
    for _ in range(3):
        await asyncio.sleep(0)  # for the tasks that were cancelled with it
    gc.collect()
    assert said == []


RANKS = {"listed": 2, "also listed": 2, "third": 2, "known": 1}


def make_storage(subkeys_max: int = 3, size_bytes_max: int = 1_000) -> Any:
    return hivemind_repairs.make_storage(subkeys_max, size_bytes_max, lambda key, subkey: RANKS.get(subkey, 0))


def held(storage: Any) -> set[Any]:
    return {key for key, _ in storage.get(1).value.items()}


def test_subkeys_are_bounded_and_who_is_there_stays_however_far_ahead_others_are_dated() -> None:
    """A-DHT-7."""
    storage = make_storage()
    soon = time.time() + 100
    taken = [storage.store_subkey(1, number, b"value", soon + number) for number in range(10)]
    assert taken == [True] * 3 + [False] * 7
    assert held(storage) == {0, 1, 2}
    assert storage.store_subkey(1, 1, b"value", soon + 50), "who is there renews its record"
    assert storage.store_subkey(2, 9, b"value", soon), "another key has room of its own"


def test_what_matters_takes_the_place_of_what_matters_less_and_never_the_other_way() -> None:
    """A-DHT-7."""
    storage = make_storage()
    soon = time.time() + 100
    for subkey in ("1", "2", "3"):
        storage.store_subkey(1, subkey, b"value", soon)
    for subkey in ("known", "listed", "also listed"):
        assert storage.store_subkey(1, subkey, b"value", soon)
    assert held(storage) == {"known", "listed", "also listed"}
    assert not storage.store_subkey(1, "4", b"value", soon + 100)
    assert storage.store_subkey(1, "third", b"value", soon)
    assert held(storage) == {"third", "listed", "also listed"}


def test_values_under_one_key_are_bounded_together_and_growing_ones_as_well() -> None:
    """A-DHT-7: one answer holds them all."""
    storage = make_storage(subkeys_max=100, size_bytes_max=250)
    soon = time.time() + 100
    assert [storage.store_subkey(1, subkey, bytes(100), soon) for subkey in ("1", "2", "3")] == [True, True, False]
    assert storage.store_subkey(1, "1", bytes(100), soon + 1)
    assert not storage.store_subkey(1, "1", bytes(151), soon + 2)
    assert storage.store_subkey(1, "listed", bytes(200), soon)
    assert held(storage) == {"listed"}
    assert not storage.store_subkey(1, "also listed", bytes(100), soon)


def test_places_of_what_expired_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = make_storage()
    soon = time.time() + 100
    for subkey in ("1", "2", "3"):
        storage.store_subkey(1, subkey, b"value", soon + int(subkey))
    hivemind_repairs.set_clock(lambda: soon + 2.5)
    try:
        assert storage.store_subkey(1, "4", b"value", soon + 200)
        assert held(storage) == {"3", "4"}
    finally:
        hivemind_repairs.set_clock(time.time)


def test_hiveminds_lines_go_through_our_logger_and_its_warnings_are_not_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="pulsenet.hivemind"):
        logging.getLogger("hivemind.dht").warning("a peer is unreachable")
        logging.getLogger("hivemind.dht").error("broken %s", "thing")
    # pytest listens at every logger: only what reached ours counts
    ours = [(record.name, record.getMessage()) for record in caplog.records if record.name.startswith("pulsenet")]
    assert ours == [("pulsenet.hivemind", "broken thing")]
    assert logging.getLevelName(logging.WARNING) == "WARNING"


def test_directories_of_different_names_share_no_procedures() -> None:
    import hivemind.dht.node

    original = hivemind.dht.node.DHTProtocol
    try:
        hivemind_repairs.separate_directory("NameA")
        first = hivemind.dht.node.DHTProtocol
        hivemind_repairs.separate_directory("NameB")
        second = hivemind.dht.node.DHTProtocol
        assert first._get_handle_name(None, "rpc_find") == "NameA.rpc_find"
        assert second._get_handle_name(None, "rpc_find") == "NameB.rpc_find"
        first._collect_rpc_handlers()
        assert second._rpc_handlers is None
    finally:
        hivemind.dht.node.DHTProtocol = original


async def test_p2pd_is_started_in_a_session_of_its_own() -> None:
    """Ctrl-C in a terminal goes to every process of the session's foreground group (A-CLI-4)."""
    from hivemind.p2p import p2p_daemon

    first = p2p_daemon.asyncio
    hivemind_repairs.detach_p2pd()
    assert p2p_daemon.asyncio is first
    assert p2p_daemon.asyncio.Future is asyncio.Future
    child = await p2p_daemon.asyncio.subprocess.create_subprocess_exec(
        sys.executable, "-c", "import os; print(os.getsid(0))", stdout=subprocess.PIPE
    )
    printed, _ = await child.communicate()
    assert int(printed) != os.getsid(0)
