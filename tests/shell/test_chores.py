"""Timers beside the machines: links, directory, the run's file."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.errors import ConfigError, RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import PeerId
from pulsenet.node.events import Event, HaveSeen, HeadSeen, PeerConnected, PeerLost
from pulsenetd import logs, runs
from pulsenetd.chores import HAVES_SECONDS, AddressWatch, DirectoryReader, LinkWatch, RunFileKeeper, repeat
from pulsenetd.network.addresses import join_address, select_announced
from pulsenetd.network.transport import PeerLink

ONE, TWO, OWN = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))
HERE, THERE = "/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/2"


def link(peer_id: PeerId, *, outbound: bool = False) -> PeerLink:
    return PeerLink(peer_id, (HERE,), outbound, None)


class FakeNetwork:
    """Connections and directory as a test set them."""

    def __init__(self) -> None:
        self.links: list[PeerLink] = []
        self.is_down = False
        self.is_healthy = True
        self.heads: list[bytes] = []
        self.haves: dict[int, list[bytes]] = {}
        self.dialled: list[tuple[PeerId, tuple[str, ...]]] = []
        self.dial_error: Exception | None = None
        self.listening: tuple[str, ...] = ()
        self.transport = self.directory = self.supervisor = self

    async def connected_peers(self) -> list[PeerLink]:
        if self.is_down:
            raise UnavailableError("p2pd is being restarted")
        return self.links

    async def listen_addresses(self, *, private_too: bool) -> tuple[str, ...]:
        return select_announced(self.listening, private_too=private_too)

    async def read_heads(self) -> list[bytes]:
        return self.heads

    async def read_haves(self, shard: int) -> list[bytes]:
        return self.haves.get(shard, [])

    async def dial(self, peer_id: PeerId, addresses: tuple[str, ...]) -> None:
        self.dialled.append((peer_id, addresses))
        if self.dial_error is not None:
            raise self.dial_error


@pytest.fixture
def network() -> Any:
    return FakeNetwork()


# Again and again


def test_work_is_repeated_through_outages_and_its_own_errors_end_it(hands: Any) -> None:
    at: list[float] = []
    faults = [None, UnavailableError("away"), None, ValueError("a bug")]

    async def work() -> None:
        at.append(asyncio.get_running_loop().time())
        fault = faults[len(at) - 1]
        if fault is not None:
            raise fault

    with pytest.raises(ValueError, match="a bug"):
        hands.run_quickly(lambda: repeat(20.0, work))
    assert [round(later - at[0]) for later in at] == [0, 20, 40, 60]


def test_a_disk_that_refuses_and_a_damaged_file_end_no_node_and_are_told_once(
    hands: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs.logger, "propagate", True)
    damaged = StorageError("000001.record is damaged; delete it", "damaged")
    faults: list[Exception | None] = [damaged, damaged, None, damaged, ConfigError("no run file"), ValueError("a bug")]

    async def work() -> None:
        fault = faults.pop(0)
        if fault is not None:
            raise fault

    with pytest.raises(ValueError, match="a bug"):
        hands.run_quickly(lambda: repeat(20.0, work))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "000001.record is damaged; delete it",
        "000001.record is damaged; delete it",
        "no run file",
    ]


# Links


async def test_connections_that_come_and_go_are_told_once(network: Any) -> None:
    told: list[Event] = []
    watch = LinkWatch(network, told.append)
    network.links = [link(ONE, outbound=True)]
    await watch.look()
    await watch.look()
    assert told == [PeerConnected(ONE, (HERE,), outbound=True)]
    network.links = [link(TWO)]
    await watch.look()
    assert told[1:] == [PeerConnected(TWO, (HERE,), outbound=False), PeerLost(ONE, "closed")]
    assert watch.connected == {TWO}
    assert watch.links == (link(TWO),)


async def test_every_connection_goes_with_p2pd_and_comes_back_with_it(network: Any) -> None:
    told: list[Event] = []
    watch = LinkWatch(network, told.append)
    network.links = [link(ONE)]
    await watch.look()
    network.is_down, network.is_healthy = True, False
    await watch.look()
    await watch.look()
    assert told[1:] == [PeerLost(ONE, "p2pd is being restarted")]
    assert watch.links == ()
    network.is_down, network.is_healthy = False, True
    await watch.look()
    assert told[2:] == [PeerConnected(ONE, (HERE,), outbound=False)]


async def test_a_p2pd_that_answers_late_once_loses_nobody(network: Any) -> None:
    """To a coordinator a lost peer is one whose contribution no round waits for: the round closed without everybody."""
    told: list[Event] = []
    watch = LinkWatch(network, told.append)
    network.links = [link(ONE)]
    await watch.look()
    network.is_down = True
    with pytest.raises(UnavailableError):
        await watch.look()
    network.is_down = False
    await watch.look()
    assert told == [PeerConnected(ONE, (HERE,), outbound=False)]
    assert watch.connected == {ONE}


# The directory


async def test_heads_of_the_directory_are_shown_as_nobodys(network: Any) -> None:
    told: list[Event] = []
    network.heads = [b"one", b"two"]
    await DirectoryReader(network, told.append, lambda bound: 0).read_heads()
    assert told == [HeadSeen(b"one", None), HeadSeen(b"two", None)]


async def test_every_shard_of_have_records_has_its_turn(network: Any) -> None:
    told: list[Event] = []
    network.haves = {shard: [bytes([shard])] for shard in range(limits.HAVE_SHARDS)}
    reader = DirectoryReader(network, told.append, lambda bound: bound - 1)
    for _ in range(limits.HAVE_SHARDS):
        await reader.read_haves()
    assert told == [HaveSeen(bytes([shard]), None) for shard in range(limits.HAVE_SHARDS)]


def test_a_newcomer_reads_every_shard_within_half_a_minute_and_then_one_now_and_then(network: Any, hands: Any) -> None:
    at: list[float] = []

    async def read_haves(shard: int) -> list[bytes]:
        at.append(asyncio.get_running_loop().time())
        if len(at) == limits.HAVE_SHARDS + 6:
            raise ValueError("enough")
        if len(at) == 3:
            raise UnavailableError("p2pd is being restarted")
        return []

    network.read_haves = read_haves
    reader = DirectoryReader(network, lambda _: None, random.Random(1).randrange)
    with pytest.raises(ValueError, match="enough"):
        hands.run_quickly(lambda: repeat(reader.haves_wait_seconds, reader.read_haves))
    assert at[limits.HAVE_SHARDS] - at[0] <= 25.0
    waits = [later - earlier for earlier, later in itertools.pairwise(at[limits.HAVE_SHARDS + 1 :])]
    assert min(waits) >= 0.75 * HAVES_SECONDS
    assert max(waits) <= 1.25 * HAVES_SECONDS
    assert len(set(waits)) == len(waits)


# The run's file


class Machine:
    """A run file that several nodes of one machine keep."""

    def __init__(self, path: Path, run: Any, network: Any) -> None:
        self.path, self.network = path, network
        runs.write_run_file(path, runs.RunFile("mine", run.token, ()))

    def keeper(self, peer_id: PeerId) -> RunFileKeeper:
        return RunFileKeeper(self.path, peer_id, self.network)

    @property
    def bootstraps(self) -> tuple[str, ...]:
        return runs.read_run_file(self.path).bootstraps


@pytest.fixture
def machine(tmp_path: Path, run: Any, network: Any) -> Machine:
    return Machine(tmp_path / "run.json", run, network)


async def test_nodes_of_one_machine_find_each_other_by_the_run_file(machine: Machine) -> None:
    machine.keeper(ONE).write((HERE,))
    machine.keeper(OWN).write((THERE,))
    assert machine.bootstraps == (join_address(THERE, OWN), join_address(HERE, ONE))
    assert machine.keeper(OWN).read() == (join_address(HERE, ONE),)
    await machine.keeper(OWN).dial_others(frozenset())
    await machine.keeper(OWN).dial_others(frozenset({ONE}))
    assert machine.network.dialled == [(ONE, (HERE,))]


def test_a_new_address_replaces_the_old_one_and_nothing_new_writes_nothing(machine: Machine) -> None:
    machine.keeper(ONE).write((HERE,))
    written = machine.path.stat().st_ino
    machine.keeper(ONE).write((HERE,))
    assert machine.path.stat().st_ino == written
    machine.keeper(ONE).write((THERE,))
    assert machine.bootstraps == (join_address(THERE, ONE),)


def test_the_run_file_is_bounded_and_keeps_the_newest_nodes(machine: Machine) -> None:
    for number in range(1, limits.ADDRESSES_MAX + 5):
        machine.keeper(PeerId(bytes([number]) * 32)).write((HERE,))
    assert len(machine.bootstraps) == limits.ADDRESSES_MAX
    assert machine.bootstraps[0] == join_address(HERE, PeerId(bytes([limits.ADDRESSES_MAX + 4]) * 32))


def test_nodes_that_start_together_all_stand_in_the_run_file(machine: Machine) -> None:
    """Each adds itself to what it read: without a lock, the last to write would drop the others."""
    peer_ids = [PeerId(bytes([number]) * 32) for number in range(1, 9)]
    start = threading.Barrier(len(peer_ids))

    def write(peer_id: PeerId) -> None:
        start.wait(10)
        machine.keeper(peer_id).write((HERE,))

    with ThreadPoolExecutor(len(peer_ids)) as pool:
        list(pool.map(write, peer_ids))
    assert set(machine.keeper(OWN).read()) == {join_address(HERE, peer_id) for peer_id in peer_ids if peer_id != OWN}


@pytest.mark.parametrize("content", [None, b"{}"])
async def test_a_run_file_that_is_gone_or_damaged_costs_nothing_but_its_bootstraps(
    machine: Machine, content: bytes | None
) -> None:
    machine.path.unlink()
    if content is not None:
        machine.path.write_bytes(content)
    assert machine.keeper(OWN).read() == ()
    await machine.keeper(OWN).dial_others(frozenset())
    assert machine.network.dialled == []


async def test_an_address_of_the_run_file_that_is_none_costs_nothing_but_itself(machine: Machine, run: Any) -> None:
    """People edit the file, and a newer version may write what this one does not know."""
    runs.write_run_file(machine.path, runs.RunFile("mine", run.token, ("nonsense", join_address(HERE, ONE))))
    await machine.keeper(OWN).dial_others(frozenset())
    assert machine.network.dialled == [(ONE, (HERE,))]
    machine.keeper(OWN).write((THERE,))
    assert machine.bootstraps == (join_address(THERE, OWN), join_address(HERE, ONE))


async def test_a_node_that_cannot_be_dialled_does_not_hide_the_next(machine: Machine) -> None:
    machine.keeper(ONE).write((HERE,))
    machine.keeper(TWO).write((THERE,))
    machine.network.dial_error = RemoteProtocolError("peer-id", "no peer id")
    await machine.keeper(OWN).dial_others(frozenset())
    assert {peer_id for peer_id, _ in machine.network.dialled} == {ONE, TWO}


# Where this node is dialled


async def test_other_addresses_are_told_to_others_and_to_nodes_of_this_machine(machine: Machine) -> None:
    """A machine gets another lease, or p2pd another port: others would go on dialling where nobody answers."""
    told: list[tuple[str, ...]] = []
    watch = AddressWatch(machine.network, machine.keeper(OWN), is_private=lambda: True, tell=told.append)
    machine.network.listening = (HERE, THERE)
    await watch.look()
    machine.network.listening = (THERE, HERE)  # the same
    await watch.look()
    assert told == [(HERE, THERE)]
    moved = "/ip4/10.0.0.9/tcp/1"
    machine.network.listening = (moved,)
    await watch.look()
    machine.network.listening = ()  # off the network
    await watch.look()
    assert told[1:] == [(moved,)]
    assert machine.bootstraps == (join_address(moved, OWN),)
    machine.path.unlink()
    machine.network.listening = (HERE,)
    await watch.look()
    assert told[2:] == [(HERE,)]


async def test_a_public_run_is_told_no_private_address_that_is_new(machine: Machine) -> None:
    told: list[tuple[str, ...]] = []
    watch = AddressWatch(machine.network, machine.keeper(OWN), is_private=lambda: False, tell=told.append)
    machine.network.listening = (HERE, "/ip4/9.9.9.9/tcp/1")
    await watch.look()
    assert told == [("/ip4/9.9.9.9/tcp/1",)]
    assert join_address(HERE, OWN) in machine.bootstraps
