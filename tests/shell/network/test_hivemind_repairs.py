"""What is mended in hivemind, and that it needed mending."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

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


def test_subkeys_are_bounded_and_the_first_to_expire_goes() -> None:
    """A-DHT-7."""
    storage = hivemind_repairs.make_storage(3)
    soon = time.time() + 100
    for number in range(10):
        assert storage.store_subkey(1, number, b"value", soon + number)
    assert sorted(key for key, _ in storage.get(1).value.items()) == [7, 8, 9]


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


def test_p2pd_is_started_in_a_session_of_its_own() -> None:
    """Ctrl-C in a terminal goes to every process of the session's foreground group (A-CLI-4)."""
    from hivemind.p2p import p2p_daemon

    async def read_session() -> int:
        child = await p2p_daemon.asyncio.subprocess.create_subprocess_exec(
            sys.executable, "-c", "import os; print(os.getsid(0))", stdout=subprocess.PIPE
        )
        printed, _ = await child.communicate()
        return int(printed)

    first = p2p_daemon.asyncio
    hivemind_repairs.detach_p2pd()
    assert p2p_daemon.asyncio is first
    assert p2p_daemon.asyncio.Future is asyncio.Future
    assert asyncio.run(read_session()) != os.getsid(0)
