"""Loads hivemind, late and repaired.

Importing hivemind takes its time and installs its own log handler, so nothing imports it at start:
:func:`load` does, in a worker thread, and applies seven repairs that must hold process-wide:

* of its packages only those are loaded that a node needs, which know nothing of torch;
* its log lines go through our logger;
* a store with an earlier expiry no longer schedules the deletion of the newer record;
* its notion of time can be corrected by the measured clock offset;
* p2pd gets a session of its own: Ctrl-C in a terminal reaches the node, which then ends p2pd in order;
* a search in the DHT that is given up leaves no task behind that waits for its end;
* a node that a peer names among the near ones to the node itself is left out.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

logger: Final = logging.getLogger("pulsenet.hivemind")

_CLOCK_MODULES: Final = (
    "hivemind.utils.timed_storage",
    "hivemind.dht.routing",
    "hivemind.dht.protocol",
    "hivemind.dht.node",
)
"""Every module of hivemind's DHT that copied the name ``get_dht_time`` when it was imported."""


async def load() -> ModuleType:
    """Return the ``hivemind`` module, imported in a worker thread the first time, repaired."""
    return await asyncio.to_thread(load_now)


def load_now() -> ModuleType:
    """Return the ``hivemind`` module, repaired; blocks for a moment the first time."""
    with warnings.catch_warnings():
        # protobuf deprecates habits of what was generated for hivemind: nothing we can act on
        warnings.simplefilter("ignore")
        _leave_training_out()
        hivemind = importlib.import_module("hivemind")
        importlib.import_module("hivemind.dht.node")
    _route_logs()
    guard_expiry()
    detach_p2pd()
    end_searches()
    leave_out_self()
    return hivemind


def _leave_training_out() -> None:
    """Let hivemind's packages be imported one by one, unless the process has imported hivemind itself.

    ``import hivemind`` imports all of it, and so torch: two seconds and 240 MiB. p2p and the DHT use neither of the
    two names that still stand in the way, one for futures between processes and one for tensors.
    """
    spec = importlib.util.find_spec("hivemind")
    if spec is None or "hivemind" in sys.modules:
        return
    sys.modules["hivemind"] = importlib.util.module_from_spec(spec)
    for name, missing in (("mpfuture", "MPFuture"), ("tensor_descr", "TensorDescriptor")):
        module = ModuleType(f"hivemind.utils.{name}")
        setattr(module, missing, type(missing, (), {}))
        sys.modules[module.__name__] = module


class _Overlay:
    """A module with some of its names replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self._module = module
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._module, name)


def detach_p2pd() -> None:
    """Have hivemind start p2pd in a session of its own.

    hivemind offers no option for it and finds ``asyncio.subprocess`` through its module's own name ``asyncio``.
    """
    daemon_module: Any = importlib.import_module("hivemind.p2p.p2p_daemon")
    if isinstance(daemon_module.asyncio, _Overlay):
        return
    start = functools.partial(asyncio.create_subprocess_exec, start_new_session=True)
    daemon_module.asyncio = _Overlay(asyncio, subprocess=_Overlay(asyncio.subprocess, create_subprocess_exec=start))


def end_searches() -> None:
    """Have a search that is cancelled, at the latest when the node stops, cancel what waits for its end.

    hivemind leaves it pending, and asyncio logs "Task was destroyed but it is pending!" once it is collected.
    """
    module: Any = importlib.import_module("hivemind.dht.traverse")
    if isinstance(module.asyncio, _Overlay):
        return

    async def wait(tasks: list[asyncio.Task[Any]], **how: Any) -> Any:
        try:
            return await asyncio.wait(tasks, **how)
        except asyncio.CancelledError:
            tasks[-1].cancel()  # of a worker's two the one that waits; workers are all cancelled anyway
            raise

    module.asyncio = _Overlay(asyncio, wait=wait)


def leave_out_self() -> None:
    """Have a node not take itself for one of its peers.

    A peer that met it while it answered others names it when it only asks, as behind NAT; anybody may name it. hivemind
    asserts that nobody does.
    """
    node_type: Any = importlib.import_module("hivemind.dht.node").DHTNode
    filter_peers = node_type._filter_blacklisted  # of all answers
    if getattr(filter_peers, "leaves_out_self", False):
        return

    @functools.wraps(filter_peers)
    def filter_others(self: Any, peers: dict[Any, Any]) -> dict[Any, Any]:
        return {node_id: peer for node_id, peer in filter_peers(self, peers).items() if node_id != self.node_id}

    filter_others.leaves_out_self = True  # type: ignore[attr-defined]
    node_type._filter_blacklisted = filter_others


class _Forwarder(logging.Handler):
    """Passes hivemind's lines on: its warnings are about other people's machines, so they are debug lines here."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelno if record.levelno >= logging.ERROR else logging.DEBUG
        if logger.isEnabledFor(level):
            logger.log(level, "%s", record.getMessage())


def _route_logs() -> None:
    importlib.import_module("hivemind.utils.logging").use_hivemind_log_handler("nowhere")
    # hivemind renames a level of the whole process; the second name stays known to its own parser
    logging.addLevelName(logging.WARNING, "WARNING")
    hivemind_logger = logging.getLogger("hivemind")
    hivemind_logger.propagate = False
    hivemind_logger.handlers[:] = [_Forwarder()]
    hivemind_logger.setLevel(logging.INFO)


def guard_expiry() -> None:
    """Drop stores whose expiry does not grow before they reach hivemind's storage.

    ``TimedStorage.store`` refuses such a store but has by then already filed the earlier expiry in its
    heap, which later deletes the newer record. Records reach that method from remote stores, from cached
    answers and from the merge of look-up results, so the guard sits in the method itself.
    """
    timed_storage = importlib.import_module("hivemind.utils.timed_storage")
    storage_type = timed_storage.TimedStorage
    if getattr(storage_type.store, "guards_expiry", False):
        return
    unguarded = storage_type.store

    def store(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
        present = self.data.get(key)
        if present is not None and expiration_time <= present.expiration_time:
            return False
        return bool(unguarded(self, key, value, expiration_time))

    store.guards_expiry = True  # type: ignore[attr-defined]
    storage_type.store = store
    # this queue relies on moving an entry to an earlier time and is never asked to delete
    importlib.import_module("hivemind.dht.node").CacheRefreshQueue.store = unguarded


def set_clock(now: Callable[[], float]) -> None:
    """Make hivemind's DHT read the time from ``now`` (Unix seconds), in the whole process."""
    for name in _CLOCK_MODULES:
        importlib.import_module(name).get_dht_time = now  # type: ignore[attr-defined]


def make_storage(subkeys_max: int, size_bytes_max: int, rank_of: Callable[[Any, Any], int]) -> Any:
    """Return storage for a DHT node that bounds what it keeps under each key (A-DHT-7).

    Where a key is full, whoever is there stays: hivemind would drop what expires first, and so give the place to
    whoever dates its record furthest ahead. A newcomer takes the place of one of lower rank, or none.

    Args:
        subkeys_max: Subkeys under one key.
        size_bytes_max: Bytes of their values together: all of them are one answer, and one too large is no answer.
        rank_of: Says of a key and a subkey how much it matters; 0 is anybody.
    """
    storage_module = importlib.import_module("hivemind.dht.storage")
    base: Any = storage_module.DHTLocalStorage

    def fits(entries: Any, count: int, size_bytes: int) -> bool:
        held_size_bytes = sum(len(entry.value) for entry in entries.data.values())
        return len(entries.data) + count <= subkeys_max and held_size_bytes + size_bytes <= size_bytes_max

    def make_room(key: Any, entries: Any, subkey: Any, size_bytes: int) -> bool:
        held = entries.get(subkey)  # drops what expired, too
        count, grown_size_bytes = (1, size_bytes) if held is None else (0, max(size_bytes - len(held.value), 0))
        if fits(entries, count, grown_size_bytes) or not (count or grown_size_bytes):
            return True
        rank = rank_of(key, subkey)
        if rank == 0:
            return False  # at once: a flood must not have everybody ranked for each of its records
        ranks = {other: rank_of(key, other) for other in entries.data if other != subkey}
        lower = sorted((other for other in ranks if ranks[other] < rank), key=ranks.__getitem__)
        while lower and not fits(entries, count, grown_size_bytes):
            del entries[lower.pop(0)]
        return fits(entries, count, grown_size_bytes)

    def store_subkey(self: Any, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        present = self.get(key)
        entries = None if present is None else present.value
        if isinstance(entries, storage_module.DictionaryDHTValue) and not make_room(key, entries, subkey, len(value)):
            return False
        return bool(base.store_subkey(self, key, subkey, value, expiration_time))

    return type("BoundedStorage", (base,), {"store_subkey": store_subkey})()


def separate_directory(name: str) -> None:
    """Have the next DHT node speak under ``name``: only nodes of that name store, answer and route for it.

    hivemind names its procedures after the protocol's class. One name for all would mix the routing
    tables of different runs that share a bootstrap, and nodes of another run refuse our records.
    """
    node_module = importlib.import_module("hivemind.dht.node")
    base: Any = importlib.import_module("hivemind.dht.protocol").DHTProtocol
    # both are caches hivemind keeps per class and would otherwise inherit
    node_module.DHTProtocol = type(name, (base,), {"_rpc_handlers": None, "_stub_type": None})  # type: ignore[attr-defined]
