"""Both ends of the hand-off on a real socket: the server in an event loop, the client in threads."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import mmap
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import ServerThread, wait_until

from pulsenet.chain.records import RolloutBatch
from pulsenet.codec.changes import Changes
from pulsenet.errors import LocalProtocolError, PulsenetError, RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.local import protocol
from pulsenet.local.changed_parts import ChangedPartWriter, compute_size_bytes_max
from pulsenet.local.client import Client
from pulsenet.local.framing import encode_frame
from pulsenet.local.handover import WholeParts
from pulsenet.local.parts import PartLayout, SealedPart
from pulsenet.local.protocol import PublishDone, PublishStatus, UpdateKind
from pulsenet.local.rollouts import Sample, pack_rollouts
from pulsenet.local.shared_memory import Region, SnapshotWriter, create_memory, seal_snapshot, write_snapshot
from pulsenet.local.sockets import Channel, socket_path
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.wire.schema import encode_value
from pulsenetd.local import link
from pulsenetd.local import server as local_server
from pulsenetd.local.server import EngineConfirmation, LocalHooks, LocalServer, SnapshotOffer
from pulsenetd.storage.parts import PublishFailedError
from pulsenetd.storage.spools import write_unnamed
from pulsenetd.storage.staging import StagedUpdate

TABLE = make_table([TensorSpec("a", "BF16", (8,)), TensorSpec("b", "F32", (4,))])
ROOT = Digest(bytes(range(32)))
DONE = PublishDone(PublishStatus.COMMITTED, Version(0, 5), 32, 7, 2, 12, "")


def make_snapshot(fill: int = 1) -> int:
    return write_snapshot(TABLE, [(0, 0, bytes([fill]) * 16), (1, 0, bytes([fill]) * 16)])


class Daemon:
    """A server in a thread of its own; its hooks are plain attributes a test may replace."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.offers: list[SnapshotOffer] = []
        self.taken: list[dict[int, bytes]] = []
        self.inodes: list[int] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.confirmations: list[EngineConfirmation] = []
        self.outcome: PublishDone | None = DONE
        self.staged: Callable[[], StagedUpdate] | None = None
        self.batches: tuple[protocol.SignedBatch, ...] = ()
        self.submitted: list[protocol.SubmitRollouts] = []
        self.settled: list[tuple[int, bool]] = []
        self.checks: list[tuple[PeerId, int, int]] = []
        self.status: Callable[[], Mapping[str, Any]] = lambda: {"version": "0.5"}
        self.waiting = threading.Event()
        self.cancelled = threading.Event()
        self.pending: list[asyncio.Future[PublishDone]] = []
        self.base_number: int | None = None
        hooks = LocalHooks(
            on_snapshot=self._on_snapshot,
            on_engine_request=self._on_engine_request,
            on_confirm=self._on_confirm,
            on_rollouts=self._on_rollouts,
            on_take_rollouts=self._on_take_rollouts,
            on_rollouts_settled=self._on_rollouts_settled,
            on_checks=lambda *told: self.checks.append(told),
            on_status=self._on_status,
        )
        self.server = LocalServer(directory, hooks, role="trainer", **options)
        self._thread = ServerThread(self.server)
        self.stop = self._thread.stop

    def resolve(self, done: PublishDone) -> None:
        self._thread.loop.call_soon_threadsafe(self.pending.pop(0).set_result, done)

    async def _on_snapshot(self, offer: SnapshotOffer) -> asyncio.Future[PublishDone]:
        self.offers.append(offer)
        offer.parts.base_number = self.base_number
        loop = asyncio.get_running_loop()
        future: asyncio.Future[PublishDone] = loop.create_future()
        if self.outcome is None:
            self.pending.append(future)
        elif self.outcome.status is PublishStatus.NOT_PUBLISHER:
            future.set_result(self.outcome)
        else:
            loop.run_in_executor(None, self._encode, offer, future, self.outcome)
        return future

    def _encode(self, offer: SnapshotOffer, future: asyncio.Future[PublishDone], outcome: PublishDone) -> None:
        """Do what a publisher's thread does, but for the encoding."""
        try:
            for part in offer.parts.take():
                self.taken.append({index: part.view(index).tobytes() for index in part.tensor_indices})
                self.inodes.append(os.fstat(part._region._descriptor).st_ino)
                self.may_go_on.wait(10)
        except PublishFailedError as error:
            outcome = PublishDone(PublishStatus.FAILED, None, 0, 0, 0, 0, error.code)
        future.get_loop().call_soon_threadsafe(future.set_result, outcome)

    async def _on_engine_request(self, _: Version | None, root: Digest | None, seconds: float) -> StagedUpdate | None:
        if self.staged is None:
            self.waiting.set()
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            return None
        return self.staged()

    async def _on_confirm(self, confirmation: EngineConfirmation) -> None:
        self.confirmations.append(confirmation)

    async def _on_rollouts(self, rollouts: protocol.SubmitRollouts) -> protocol.RolloutsTaken:
        self.submitted.append(rollouts)
        return protocol.RolloutsTaken(True, "")

    async def _on_rollouts_settled(self, batches: Sequence[protocol.SignedBatch], is_delivered: bool) -> None:
        self.settled.append((len(batches), is_delivered))

    async def _on_take_rollouts(self, count_max: int, _: float) -> tuple[protocol.SignedBatch, ...]:
        taken, self.batches = self.batches[:count_max], self.batches[count_max:]
        return taken

    async def _on_status(self) -> Mapping[str, Any]:
        return self.status()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client.connect(daemon.directory) as made:
        yield made


def open_memories() -> int:
    """Return how many snapshots this process, which is both ends, holds open."""
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return sum("pulsenet" in name and "memfd" in name for name in names)


# Who may attach, and where


def test_the_socket_is_private_and_goes_with_the_server(daemon: Daemon, client: Client) -> None:
    path = socket_path(daemon.directory)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert client.role == "trainer"
    daemon.stop()
    assert not path.exists()


def test_other_users_may_be_allowed(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, allowed_uids=frozenset({12345}))
    path = socket_path(tmp_path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o711
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    Client.connect(tmp_path).close()
    daemon.stop()


def test_a_user_who_is_not_allowed_is_refused(daemon: Daemon, monkeypatch: Any) -> None:
    monkeypatch.setattr(local_server, "read_peer_uid", lambda _: 54321)
    with pytest.raises(RemoteProtocolError, match="user 54321 may not attach"):
        Client.connect(daemon.directory, timeout_seconds=0.1)
    assert daemon.server.refused_count == 1


def test_a_refusal_over_a_file_whose_name_is_no_text_ends_no_node(daemon: Daemon, monkeypatch: Any) -> None:
    def fail(_: socket.socket) -> int:
        raise StorageError(os.fsdecode(b"no \xff"))

    with monkeypatch.context() as patched:
        patched.setattr(local_server, "read_peer_uid", fail)
        with pytest.raises(RemoteProtocolError, match="no "):
            Client.connect(daemon.directory, timeout_seconds=0.1)
    with Client.connect(daemon.directory) as client:
        assert client.status() == {"version": "0.5"}


def test_a_server_of_another_user_is_not_trusted(daemon: Daemon, monkeypatch: Any) -> None:
    monkeypatch.setattr("pulsenet.local.sockets.read_peer_uid", lambda _: 54321)
    with pytest.raises(UnavailableError, match="served by user 54321"):
        Client.connect(daemon.directory, timeout_seconds=0.0)


def test_a_data_directory_with_a_long_path_works(tmp_path: Path) -> None:
    """``sun_path`` has 108 bytes; data directories have no such limit."""
    directory = tmp_path / ("d" * 100) / ("e" * 100)
    directory.mkdir(parents=True)
    before = os.getcwd()
    daemon = Daemon(directory)
    with Client.connect(directory) as client:
        assert client.status() == {"version": "0.5"}
    daemon.stop()
    assert os.getcwd() == before


def test_a_socket_left_by_a_crash_is_replaced(tmp_path: Path) -> None:
    """A-PROC-3."""
    path = socket_path(tmp_path)
    path.parent.mkdir(mode=0o755)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    daemon = Daemon(tmp_path)
    Client.connect(tmp_path).close()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    daemon.stop()


def test_a_socket_that_cannot_be_bound_is_a_storage_error(tmp_path: Path) -> None:
    socket_path(tmp_path).mkdir(parents=True)
    with pytest.raises(StorageError, match="cannot listen at"):
        Daemon(tmp_path)


def test_without_a_daemon_connecting_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"no daemon answers at .*daemon\.sock"):
        Client.connect(tmp_path, timeout_seconds=0.1)


def test_a_library_of_another_version_is_told_so(daemon: Daemon) -> None:
    channel = Channel(socket_path(daemon.directory), 5.0)
    channel.send(protocol.Attach(99, "future"), timeout_seconds=5.0)
    refusal = channel.receive(5.0).message
    assert isinstance(refusal, protocol.LocalRefusal)
    assert (refusal.code, "same pulsenet" in refusal.detail) == ("version", True)
    channel.close()


def test_too_many_processes_are_refused(daemon: Daemon, client: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(local_server, "CONNECTIONS_MAX", 1)
    with pytest.raises(RemoteProtocolError, match="busy"):
        Client.connect(daemon.directory, timeout_seconds=0.0)
    assert client.status()


# Publishing


def test_a_snapshot_crosses_without_a_copy_and_its_outcome_comes_back(daemon: Daemon, client: Client) -> None:
    descriptor = make_snapshot(7)
    result = client.publish(TABLE, descriptor, 42, True)
    assert (result.status, result.version, result.encoded_size_bytes) == (PublishStatus.COMMITTED, Version(0, 5), 7)
    assert (result.raw_size_bytes, result.changed_count, result.element_count) == (32, 2, 12)
    (offer,) = daemon.offers
    assert (offer.trainer_step, offer.parts.table) == (42, TABLE)
    assert daemon.taken == [{0: b"\x07" * 16, 1: b"\x07" * 16}]
    assert daemon.inodes == [os.fstat(descriptor).st_ino]
    os.close(descriptor)


def test_without_waiting_a_publish_is_queued_unless_it_is_refused(daemon: Daemon, client: Client) -> None:
    descriptor = make_snapshot()
    daemon.outcome = None
    assert client.publish(TABLE, descriptor, 1).status is PublishStatus.QUEUED
    daemon.outcome = PublishDone(PublishStatus.NOT_PUBLISHER, None, 0, 0, 0, 0, "not_publisher")
    assert client.publish(TABLE, descriptor, 2).status is PublishStatus.NOT_PUBLISHER
    assert [offer.generation for offer in daemon.offers] == [1, 2]
    os.close(descriptor)


def test_a_newer_publish_may_overtake_one_that_waits(daemon: Daemon, client: Client) -> None:
    daemon.outcome = None
    descriptor = make_snapshot()
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(client.publish(TABLE, descriptor, 1, True)))
    first.start()
    wait_until(lambda: len(daemon.pending) == 1)
    assert client.publish(TABLE, descriptor, 2).status is PublishStatus.QUEUED
    daemon.resolve(PublishDone(PublishStatus.REPLACED, None, 0, 0, 0, 0, ""))
    first.join(10)
    assert results[0].status is PublishStatus.REPLACED
    os.close(descriptor)


def test_a_snapshot_that_is_not_sealed_or_does_not_fit_is_our_own_fault(client: Client) -> None:
    unsealed = create_memory("test", TABLE.layout_size_bytes)
    with pytest.raises(LocalProtocolError, match="handoff-unsealed"):
        client.publish(TABLE, unsealed, 1)
    other = make_table([TensorSpec("a", "BF16", (9,))])
    sealed = make_snapshot()
    with pytest.raises(LocalProtocolError, match="handoff-size"):
        client.publish(other, sealed, 1)
    os.close(unsealed)
    os.close(sealed)


@pytest.fixture
def attach_as_liar(daemon: Daemon) -> Iterator[Callable[[], Channel]]:
    with ExitStack() as stack:

        def attach() -> Channel:
            channel = Channel(socket_path(daemon.directory), 5.0)
            stack.callback(channel.close)
            channel.send(protocol.Attach(protocol.PROTOCOL_VERSION, "liar"), timeout_seconds=5.0)
            channel.receive(5.0)
            return channel

        yield attach


@pytest.mark.parametrize("fault", ["unsealed", "short", "no tensors", "too many", "no memory"])
def test_a_lying_process_loses_its_connection_and_the_daemon_its_memory(
    daemon: Daemon, attach_as_liar: Callable[[], Channel], fault: str
) -> None:
    before = open_memories()
    channel = attach_as_liar()
    channel.send(protocol.OfferSnapshot(1, TABLE.encode(), False, True), timeout_seconds=5.0)
    assert isinstance(channel.receive(5.0).message, protocol.PartWanted)
    descriptor: int | None = None
    if fault == "unsealed":
        descriptor = create_memory("pulsenet-test", TABLE.layout_size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    elif fault != "no memory":
        descriptor = make_snapshot()
    tensor_count = {"short": 1, "no tensors": 0, "too many": 3}.get(fault, 2)
    channel.send(protocol.SnapshotPart(tensor_count), descriptor=descriptor, timeout_seconds=5.0)
    refusal = channel.receive(5.0).message
    assert isinstance(refusal, protocol.LocalRefusal)
    assert (
        refusal.code
        == {
            "unsealed": "handoff-unsealed",
            "short": "handoff-size",
            "no tensors": "handoff-part",
            "too many": "handoff-part",
            "no memory": "handoff-descriptor",
        }[fault]
    )
    with pytest.raises(UnavailableError):
        channel.receive(5.0)
    if descriptor is not None:
        os.close(descriptor)
    with pytest.raises(PublishFailedError, match="cut_short"):
        list(daemon.offers[0].parts.take())
    assert daemon.taken == []
    assert daemon.server.refused_count == 1
    wait_until(lambda: open_memories() <= before)
    Client.connect(daemon.directory).close()


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("not asked for", "handoff-changes"),
        ("huge", "handoff-size"),
        ("short", "handoff-size"),
        ("truncated", "handoff-changes"),
        ("unsealed", "handoff-unsealed"),
        ("too many", "handoff-part"),
    ],
)
def test_a_process_that_lies_about_changes_loses_its_connection_and_the_daemon_its_memory(
    daemon: Daemon, attach_as_liar: Callable[[], Channel], fault: str, code: str
) -> None:
    before = open_memories()
    daemon.base_number = None if fault == "not asked for" else 1
    channel = attach_as_liar()
    origin = protocol.Origin(bytes(16), 2)
    channel.send(protocol.OfferSnapshot(1, TABLE.encode(), False, True, origin), timeout_seconds=5.0)
    assert channel.receive(5.0).message == protocol.PartWanted(1, daemon.base_number)
    assert daemon.offers[0].parts.origin == origin
    layout = PartLayout(TABLE, 0, 2)
    writer = ChangedPartWriter(layout)
    for index, spec in enumerate(TABLE.tensors):
        writer.write_listed(index, np.zeros(1, spec.index_dtype), np.zeros(1, spec.bits_dtype))
    descriptor, size_bytes = writer.seal()
    if fault in ("unsealed", "truncated"):
        os.close(descriptor)
        size_bytes = compute_size_bytes_max(layout) if fault == "unsealed" else 64
        descriptor = create_memory("pulsenet-test", size_bytes)
        if fault == "truncated":
            os.pwrite(descriptor, struct.pack("<QQ", 1, 1), 0)
            seal_snapshot(descriptor)
    size_bytes = {"huge": compute_size_bytes_max(layout) + 1, "short": size_bytes - 1}.get(fault, size_bytes)
    message = protocol.ChangedPart(3 if fault == "too many" else 2, size_bytes)
    channel.send(message, descriptor=descriptor, timeout_seconds=5.0)
    refusal = channel.receive(5.0).message
    assert isinstance(refusal, protocol.LocalRefusal)
    assert refusal.code == code
    os.close(descriptor)
    with pytest.raises(PublishFailedError, match="cut_short"):
        list(daemon.offers[0].parts.take())
    assert daemon.server.refused_count == 1
    wait_until(lambda: open_memories() <= before)
    Client.connect(daemon.directory).close()


def test_parts_and_offers_out_of_turn_are_refused(daemon: Daemon, attach_as_liar: Callable[[], Channel]) -> None:
    channel = attach_as_liar()
    descriptor = make_snapshot()
    channel.send(protocol.SnapshotPart(2), descriptor=descriptor, timeout_seconds=5.0)
    assert channel.receive(5.0).message == protocol.LocalRefusal("message-unexpected", "a part of nothing")
    channel = attach_as_liar()
    channel.send(protocol.OfferSnapshot(1, b"\xc0", False, True), timeout_seconds=5.0)
    refusal = channel.receive(5.0).message
    assert isinstance(refusal, protocol.LocalRefusal)
    assert refusal.code == "table-decode"
    assert daemon.offers == []
    channel = attach_as_liar()
    for _ in range(2):
        channel.send(protocol.OfferSnapshot(1, TABLE.encode(), False, True), timeout_seconds=5.0)
    assert isinstance(channel.receive(5.0).message, protocol.PartWanted)
    assert channel.receive(5.0).message == protocol.LocalRefusal("message-unexpected", "an offer inside another")
    os.close(descriptor)


def make_parts(count: list[int], *, fail_at: int | None = None) -> Callable[[], Generator[SealedPart]]:
    """One tensor in each part; ``count`` grows by one for each part made."""

    def make() -> Generator[SealedPart]:
        for index in range(2):
            if index == fail_at:
                raise StorageError("no memory", "memory")
            layout = PartLayout(TABLE, index, 1)
            writer = SnapshotWriter(TABLE, layout)
            writer.write_block(index, 0, bytes([index + 1]) * 16)
            count.append(index)
            with closing(SealedPart(layout, writer.seal())) as part:
                yield part

    return make


def test_parts_cross_one_after_another(daemon: Daemon, client: Client) -> None:
    before, made = open_memories(), []
    result = client.publish_from(TABLE, WholeParts(make_parts(made)), 42, True)
    assert result.status is PublishStatus.COMMITTED
    assert daemon.taken == [{0: b"\x01" * 16}, {1: b"\x02" * 16}]
    assert made == [0, 1]
    wait_until(lambda: open_memories() <= before)


def test_weights_that_are_no_consensus_are_offered_as_such(daemon: Daemon, client: Client) -> None:
    for consensus in (False, True):
        client.publish_from(TABLE, WholeParts(make_parts([])), 1, True, consensus=consensus)
        assert daemon.offers[-1].consensus is consensus


def test_a_blocking_publish_makes_no_more_than_the_part_after_the_one_in_work(daemon: Daemon, client: Client) -> None:
    daemon.may_go_on.clear()
    made: list[int] = []
    results: list[Any] = []
    table = make_table([TensorSpec(f"{index}", "U8", (1,)) for index in range(5)])
    before = open_memories()
    memories: list[int] = []

    def make() -> Generator[SealedPart]:
        for index in range(5):
            layout = PartLayout(table, index, 1)
            writer = SnapshotWriter(table, layout)
            writer.write_block(index, 0, bytes([index]))
            made.append(index)
            memories.append(open_memories() - before)
            with closing(SealedPart(layout, writer.seal())) as part:
                yield part

    publish = threading.Thread(
        target=lambda: results.append(client.publish_from(table, WholeParts(make), 1, is_blocking=True))
    )
    publish.start()
    wait_until(lambda: len(daemon.taken) == 1 and len(made) == 2)
    publish.join(0.2)
    assert (len(daemon.taken), made) == (1, [0, 1])
    daemon.may_go_on.set()
    publish.join(10)
    assert results[0].status is PublishStatus.COMMITTED
    assert len(daemon.taken) == 5
    # Both processes are this one: the part being made, and the one in work, which may be open at both ends.
    assert max(memories) <= 3
    wait_until(lambda: open_memories() <= before)


def test_without_blocking_all_parts_cross_before_the_first_is_encoded(daemon: Daemon, client: Client) -> None:
    daemon.may_go_on.clear()
    made: list[int] = []
    result = client.publish_from(TABLE, WholeParts(make_parts(made)), 1)
    assert (result.status, made) == (PublishStatus.QUEUED, [0, 1])
    daemon.may_go_on.set()
    wait_until(lambda: len(daemon.taken) == 2)


def test_a_process_that_dies_half_way_gives_its_publish_up(
    daemon: Daemon, attach_as_liar: Callable[[], Channel]
) -> None:
    before = open_memories()
    channel = attach_as_liar()
    channel.send(protocol.OfferSnapshot(1, TABLE.encode(), False, True), timeout_seconds=5.0)
    channel.receive(5.0)
    with closing(make_parts([])()) as parts:
        channel.send(protocol.SnapshotPart(1), descriptor=next(parts).descriptor, timeout_seconds=5.0)
        channel.receive(5.0)
    channel.close()
    with pytest.raises(PublishFailedError, match="cut_short"):
        list(daemon.offers[0].parts.take())
    wait_until(lambda: open_memories() <= before)


def test_a_copy_that_fails_half_way_gives_the_publish_up(daemon: Daemon, client: Client) -> None:
    before = open_memories()
    daemon.outcome = None
    with pytest.raises(StorageError, match="no memory"):
        client.publish_from(TABLE, WholeParts(make_parts([], fail_at=1)), 1)
    wait_until(lambda: daemon.server._connection_count == 0)
    with pytest.raises(PublishFailedError, match="cut_short"):
        list(daemon.offers[0].parts.take())
    assert open_memories() <= before


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_publish_that_ends_early_asks_for_no_further_part(daemon: Daemon, client: Client, is_blocking: bool) -> None:
    daemon.outcome = None
    made: list[int] = []
    results: list[Any] = []
    resolved = threading.Event()

    def make() -> Generator[SealedPart]:
        with closing(make_parts(made)()) as parts:
            for part in parts:
                yield part
                assert resolved.wait(10)

    def publish() -> None:
        results.append(client.publish_from(TABLE, WholeParts(make), 1, True, is_blocking=is_blocking))

    thread = threading.Thread(target=publish)
    thread.start()
    wait_until(lambda: daemon.offers and daemon.offers[0].parts.waiting_count)
    daemon.resolve(PublishDone(PublishStatus.REPLACED, None, 0, 0, 0, 0, ""))
    daemon.offers[0].parts.close()
    resolved.set()
    thread.join(10)
    assert results[0].status is PublishStatus.REPLACED
    assert len(made) == (1 if is_blocking else 2)


def test_a_publish_without_tensors_is_one(daemon: Daemon, client: Client) -> None:
    table = make_table([])
    assert client.publish_from(table, WholeParts(make_parts([])), 1, True).status is PublishStatus.COMMITTED
    assert daemon.taken == []


def test_a_daemon_that_dies_half_way_is_tried_again_if_the_parts_can_be_made_again(
    daemon: Daemon, client: Client
) -> None:
    daemon.outcome = None
    made: list[int] = []
    successor: list[Daemon] = []

    def make() -> Generator[SealedPart]:
        with closing(make_parts(made)()) as parts:
            for part in parts:
                yield part
                if not successor:
                    daemon.stop()
                    successor.append(Daemon(daemon.directory))

    result = client.publish_from(TABLE, WholeParts(make), 1, True, timeout_seconds=20)
    assert (result.status, made) == (PublishStatus.COMMITTED, [0, 1, 0, 1])
    made.clear()
    daemon = successor.pop()
    result = client.publish_from(TABLE, WholeParts(make), 1, True, is_repeatable=False, timeout_seconds=20)
    assert (result.status, made) == (PublishStatus.FAILED, [0, 1])
    assert result.reason.startswith("unreachable: ")
    successor.pop().stop()


def test_a_daemon_that_is_away_is_a_result_not_an_exception(daemon: Daemon, client: Client) -> None:
    descriptor = make_snapshot()
    daemon.stop()
    started = time.monotonic()
    result = client.publish(TABLE, descriptor, 1)
    assert (result.status, result.reason.split(":")[0]) == (PublishStatus.FAILED, "unreachable")
    assert time.monotonic() - started < 1.0, "the optimiser waited"
    result = client.publish(TABLE, descriptor, 1, True, timeout_seconds=0.2)
    assert (result.status, result.reason.split(":")[0]) == (PublishStatus.FAILED, "unreachable")
    os.close(descriptor)


def test_a_refused_publish_is_a_result_too(daemon: Daemon, monkeypatch: Any) -> None:
    monkeypatch.setattr(local_server, "read_peer_uid", lambda _: 54321)
    descriptor = make_snapshot()
    with Client(daemon.directory) as client:
        result = client.publish(TABLE, descriptor, 1, True)
    assert (result.status, result.reason.split(":")[0]) == (PublishStatus.FAILED, "user")
    os.close(descriptor)


def test_a_waiting_publish_outlasts_a_restart_before_it_was_taken(tmp_path: Path) -> None:
    client = Client(tmp_path)
    descriptor = make_snapshot()
    results: list[Any] = []
    publish = threading.Thread(
        target=lambda: results.append(client.publish(TABLE, descriptor, 1, True, timeout_seconds=20))
    )
    publish.start()
    publish.join(0.2)
    daemon = Daemon(tmp_path)
    publish.join(10)
    assert results[0].status is PublishStatus.COMMITTED
    client.close()
    daemon.stop()
    os.close(descriptor)


def test_a_daemon_that_dies_after_taking_a_snapshot_leaves_the_outcome_unknown(daemon: Daemon, client: Client) -> None:
    daemon.outcome = None
    descriptor = make_snapshot()
    results: list[Any] = []
    publish = threading.Thread(target=lambda: results.append(client.publish(TABLE, descriptor, 1, True)))
    publish.start()
    wait_until(lambda: daemon.pending and daemon.offers[0].parts.is_whole)
    daemon.stop()
    publish.join(10)
    assert results[0].status is PublishStatus.FAILED
    assert results[0].reason.startswith("outcome_unknown: ")
    again = Daemon(daemon.directory)
    assert client.publish(TABLE, descriptor, 2, True).status is PublishStatus.COMMITTED
    again.stop()
    os.close(descriptor)


def test_a_process_that_dies_leaves_its_publish_in_work(daemon: Daemon) -> None:
    daemon.outcome = None
    descriptor = make_snapshot()
    client = Client.connect(daemon.directory)
    assert client.publish(TABLE, descriptor, 1).status is PublishStatus.QUEUED
    client.close()
    os.close(descriptor)
    assert not daemon.pending[0].cancelled()
    (part,) = daemon.offers[0].parts.take()
    assert part.tensor_indices == range(2)


def test_a_hundred_publishes_leave_no_memory_behind(daemon: Daemon, client: Client) -> None:
    before = open_memories()
    for step in range(100):
        descriptor = make_snapshot()
        client.publish(TABLE, descriptor, step, True)
        os.close(descriptor)
    assert open_memories() <= before


# Engines


def stage_full(owner: Region, given_back: list[bool]) -> Callable[[], StagedUpdate]:
    def give_back() -> bool:
        given_back.append(True)
        return len(given_back) == 1

    return lambda: StagedUpdate(
        kind=UpdateKind.FULL,
        base_version=None,
        version=Version(0, 5),
        root=ROOT,
        table=TABLE,
        size_bytes=TABLE.layout_size_bytes,
        descriptor=owner.reopen_for_reading(),
        give_back=give_back,
    )


def test_a_full_update_is_the_daemons_memory_itself(daemon: Daemon, client: Client) -> None:
    owner = Region.create("pulsenet-test", TABLE.layout_size_bytes)
    owner.bytes[:] = 9
    given_back: list[bool] = []
    daemon.staged = stage_full(owner, given_back)
    with client.next_update(None, 1.0) as update:  # type: ignore[union-attr]
        assert (update.kind, update.version, update.root, update.table) == (
            UpdateKind.FULL,
            Version(0, 5),
            ROOT,
            TABLE,
        )
        with pytest.raises(LocalProtocolError):
            update.read_changes()
        region = update.open_region()
        assert bytes(region.bytes) == b"\x09" * TABLE.layout_size_bytes
        region.close()
    assert not given_back
    assert client.confirm(Version(0, 5), True)
    assert given_back == [True]
    assert daemon.confirmations == [EngineConfirmation(Version(0, 5), True, Version(0, 5), "")]


def refuse_memory(*_arguments: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def test_records_arrive_as_they_were_spooled(
    daemon: Daemon, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [Changes(0, np.array([1, 7], np.uint32), np.array([1, 2], np.uint16), np.array([3, 4], np.uint16))]

    def stage(items: list[Changes]) -> StagedUpdate:
        descriptor, size_bytes = write_unnamed(tmp_path, iter(items), on_size=lambda _: None)
        base, version = Version(0, 4), Version(0, 5)
        return StagedUpdate(
            UpdateKind.RECORDS, base, version, ROOT, TABLE, size_bytes, descriptor, give_back=lambda: True
        )

    for items in (records, []):
        daemon.staged = lambda items=items: stage(items)  # type: ignore[misc]
        update = client.next_update(Version(0, 4), 1.0)
        assert update is not None
        assert update.base_version == Version(0, 4)
        assert list(update.read_changes()) == items
        assert list(update.read_changes()) == items
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", refuse_memory)
            with pytest.raises(StorageError, match="Too many open files") if items else contextlib.nullcontext():
                list(update.read_changes())
        with pytest.raises(LocalProtocolError):
            update.open_region()
        update.close()
        assert client.confirm(Version(0, 5), True)


def test_records_of_another_size_are_refused(daemon: Daemon, client: Client, tmp_path: Path) -> None:
    def stage() -> StagedUpdate:
        descriptor, _ = write_unnamed(tmp_path, iter([]), on_size=lambda _: None)
        base, version = Version(0, 4), Version(0, 5)
        return StagedUpdate(UpdateKind.RECORDS, base, version, ROOT, TABLE, 64, descriptor, lambda: True)

    daemon.staged = stage
    with (
        client.next_update(Version(0, 4), 1.0) as update,  # type: ignore[union-attr]
        pytest.raises(RemoteProtocolError, match="handoff-size"),
    ):
        update.read_changes()


def test_waiting_for_an_update_ends_with_nothing_when_the_time_is_up(client: Client) -> None:
    assert client.next_update(Version(0, 5), 0.05) is None


def test_a_refused_update_is_reported_with_its_reason(daemon: Daemon, client: Client) -> None:
    """A-APP-3: the daemon learns that the engine failed, why, and what it holds."""
    owner = Region.create("pulsenet-test", TABLE.layout_size_bytes)
    daemon.staged = stage_full(owner, [])
    update = client.next_update(None, 1.0)
    assert update is not None
    update.close()
    client.confirm(Version(0, 4), False, "checksum: tensor a")
    assert daemon.confirmations == [EngineConfirmation(Version(0, 5), False, Version(0, 4), "checksum: tensor a")]


def test_a_withdrawn_hand_over_is_not_accepted(daemon: Daemon, client: Client) -> None:
    owner = Region.create("pulsenet-test", TABLE.layout_size_bytes)
    given_back = [True]
    daemon.staged = stage_full(owner, given_back)
    update = client.next_update(None, 1.0)
    assert update is not None
    assert not client.confirm(Version(0, 5), True)
    assert daemon.confirmations[0].ok is False
    assert daemon.confirmations[0].reason.startswith("withdrawn")
    update.close()


def test_confirming_nothing_is_our_own_fault(client: Client) -> None:
    with pytest.raises(LocalProtocolError, match="without an update"):
        client.confirm(Version(0, 1), True)


def test_a_confirmation_of_another_hand_over_is_not_accepted(daemon: Daemon) -> None:
    channel = Channel(socket_path(daemon.directory), 5.0)
    channel.send(protocol.Attach(protocol.PROTOCOL_VERSION, "engine"), timeout_seconds=5.0)
    channel.receive(5.0)
    channel.send(protocol.ConfirmUpdate(99, True, Version(0, 1), ""), timeout_seconds=5.0)
    assert channel.receive(5.0).message == protocol.Confirmed(False, "this hand-over is not open")
    assert daemon.confirmations == []
    channel.close()


@pytest.mark.parametrize("how", ["dies", "asks again"])
def test_an_engine_that_never_confirms_gives_its_loan_back(daemon: Daemon, how: str) -> None:
    owner = Region.create("pulsenet-test", TABLE.layout_size_bytes)
    given_back: list[bool] = []
    daemon.staged = stage_full(owner, given_back)
    client = Client.connect(daemon.directory)
    update = client.next_update(None, 1.0)
    assert update is not None
    update.close()
    daemon.staged = None
    if how == "dies":
        client._drop_engine()
    else:
        assert client.next_update(None, 0.01) is None
    wait_until(lambda: daemon.confirmations)
    assert given_back == [True]
    reason = "engine_lost" if how == "dies" else "superseded"
    assert daemon.confirmations == [EngineConfirmation(Version(0, 5), False, None, reason)]
    client.close()


def test_an_engine_that_dies_while_it_waits_ends_the_wait(daemon: Daemon) -> None:
    client = Client.connect(daemon.directory)
    failures: list[PulsenetError] = []

    def wait() -> None:
        try:
            client.next_update(None, 60.0)
        except PulsenetError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert daemon.waiting.wait(10)
    client.close()
    waiting.join(10)
    assert not waiting.is_alive()
    assert isinstance(failures[0], UnavailableError)
    assert daemon.cancelled.wait(10)


def test_an_engine_outlasts_a_restart_of_the_daemon(daemon: Daemon, client: Client) -> None:
    owner = Region.create("pulsenet-test", TABLE.layout_size_bytes)
    daemon.staged = stage_full(owner, [])
    update = client.next_update(None, 1.0)
    assert update is not None
    update.close()
    daemon.stop()
    with pytest.raises(UnavailableError):
        client.confirm(Version(0, 5), True)
    with pytest.raises(UnavailableError):
        client.next_update(Version(0, 5), 0.1)
    again = Daemon(daemon.directory)
    assert client.next_update(Version(0, 5), 0.05) is None
    again.stop()


# Rollouts and status


def test_rollouts_go_out_and_come_in(daemon: Daemon, client: Client) -> None:
    samples = (Sample([1, 2], [3], [-0.5], 1.0),)
    packed = pack_rollouts(Version(0, 1), Version(0, 2), samples, {"task": "sum"})
    assert client.submit_rollouts(packed).accepted
    assert daemon.submitted == [packed]
    fields = {name: getattr(packed, name) for name in protocol.SubmitRollouts.__slots__}
    batch = RolloutBatch(run_id=RunId(bytes(32)), sequence=3, **fields)
    peer_id = PeerId(bytes([5]) * 32)
    daemon.batches = (protocol.SignedBatch(peer_id, 3, 0, encode_value(batch)),) * 3
    received = client.take_rollouts(2)
    stamped = replace(samples[0], version_first=Version(0, 1), version_last=Version(0, 2))
    assert [(item.peer_id, item.sequence, item.samples) for item in received] == [(peer_id, 3, (stamped,))] * 2
    assert len(client.take_rollouts(2)) == 1
    assert client.take_rollouts(2, 0.01) == []
    # The daemon notes it after the reply has left.
    wait_until(lambda: daemon.settled == [(2, True), (1, True), (0, True)])


def test_batches_that_do_not_reach_the_process_are_given_back(daemon: Daemon) -> None:
    """The process asks, and is gone when the batches come: a reply larger than the socket's buffer finds nobody."""
    batch = bytes(1 << 20)
    daemon.batches = (protocol.SignedBatch(PeerId(bytes(32)), 1, 0, batch),) * 8
    channel = Channel(daemon.server.path, 5.0)
    channel.send(protocol.Attach(protocol.PROTOCOL_VERSION, "trainer"), timeout_seconds=5.0)
    channel.receive(5.0).close()
    channel.send(protocol.TakeRollouts(8, 0), timeout_seconds=5.0)
    wait_until(lambda: not daemon.batches)
    channel.close()
    wait_until(lambda: daemon.settled == [(8, False)])


def test_checks_are_told_and_have_to_add_up(daemon: Daemon, client: Client) -> None:
    client.tell_checks(PeerId(bytes(32)), 5, 2)
    assert daemon.checks == [(PeerId(bytes(32)), 5, 2)]
    with pytest.raises(RemoteProtocolError, match="6 of 5"):
        client.tell_checks(PeerId(bytes(32)), 5, 6)


def test_status_is_a_plain_object(daemon: Daemon, client: Client) -> None:
    daemon.status = lambda: {"version": Version(0, 1), "lag": 3}
    assert client.status() == {"version": "0.1", "lag": 3}


def test_a_hook_that_fails_costs_one_connection_and_says_why(daemon: Daemon, client: Client) -> None:
    def fail() -> Mapping[str, Any]:
        raise StorageError("the disk is gone")

    daemon.status = fail
    with pytest.raises(RemoteProtocolError, match="failed: the disk is gone"):
        client.status()
    daemon.status = lambda: {}
    assert client.status() == {}


def test_a_daemon_that_dies_amid_a_reply_is_away(tmp_path: Path) -> None:
    """As one that is killed while it hands rollouts out: whoever waits for it to come back waits on."""
    path = socket_path(tmp_path)
    path.parent.mkdir()
    attached = encode_frame(protocol.Attached(protocol.PROTOCOL_VERSION, "trainer"))
    reply = encode_frame(protocol.StatusReply("{}"))

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            for answer in (attached, reply[:-1]):
                connection.recv(4096)
                connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        with Client.connect(tmp_path) as client, pytest.raises(UnavailableError, match="closed the connection"):
            client.status()
        server.join(10)


def test_the_client_reconnects_by_itself(daemon: Daemon, client: Client) -> None:
    daemon.stop()
    with pytest.raises(UnavailableError):
        client.status()
    again = Daemon(daemon.directory)
    assert client.status() == {"version": "0.5"}
    again.stop()


class PatientDaemon(Daemon):
    """Has nothing, for as long as it is asked to wait for something."""

    async def _on_engine_request(self, _: Version | None, root: Digest | None, seconds: float) -> StagedUpdate | None:
        if seconds > 1.0:
            self.waiting.set()
        await asyncio.sleep(seconds)
        return None

    async def _on_take_rollouts(self, count_max: int, seconds: float) -> tuple[protocol.SignedBatch, ...]:
        self.waiting.set()
        await asyncio.sleep(seconds)
        return ()


FORKED = """
import os, sys
from pulsenet.local.client import Client

client = Client.connect(sys.argv[1])
client.next_update(None, 0.0)
is_child = os.fork() == 0
if is_child:
    with client:
        print(f"child {CALL_OF_CHILD}", flush=True)
else:
    sys.stdin.readline()
    print(f"parent {CALL_OF_PARENT}", flush=True)
    os.wait()
    client.close()
"""


@pytest.mark.parametrize(
    ("of_child", "of_parent"),
    [
        ("client.take_rollouts(1, 2.0)", "client.status()['version']"),
        ("client.next_update(None, 2.0)", "client.next_update(None, 0.0)"),
    ],
)
def test_a_process_that_was_forked_off_speaks_over_connections_of_its_own(
    tmp_path: Path, of_child: str, of_parent: str
) -> None:
    """A data loader's worker takes rollouts, say, while the training process publishes."""
    daemon = PatientDaemon(tmp_path)
    program = FORKED.replace("CALL_OF_CHILD", of_child).replace("CALL_OF_PARENT", of_parent)
    with contextlib.ExitStack() as stack:
        stack.callback(daemon.stop)
        command = [sys.executable, "-c", program, str(tmp_path)]
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(process.kill)
        wait_until(daemon.waiting.is_set)
        output, _ = process.communicate("\n", timeout=60)
    expected = ["child []", "parent 0.5"] if "rollouts" in of_child else ["child None", "parent None"]
    assert sorted(output.splitlines()) == expected


def test_a_closed_client_says_so(client: Client) -> None:
    client.close()
    client.close()
    with pytest.raises(UnavailableError, match="closed"):
        client.status()
    with pytest.raises(UnavailableError, match="closed"):
        client.next_update(None)


# Whatever else may arrive


def talk(daemon: Daemon, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(socket_path(daemon.directory)))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        # What the server did not read makes the end a reset; its reply comes first all the same.
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(4096):
                received += part
        return received


ATTACH = encode_frame(protocol.Attach(protocol.PROTOCOL_VERSION, "x"))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"framing"),
        (struct.pack("<IBB", 1 << 31, 1, 0), b"framing"),
        (ATTACH[:9], b"framing"),
        (encode_frame(protocol.GetStatus()), b"message-unexpected"),
        (ATTACH + encode_frame(protocol.NoUpdate()), b"message-unexpected"),
        (ATTACH + struct.pack("<IBB", 1, 200, 0) + b"\xc0", b"message-unknown"),
    ],
)
def test_bytes_that_are_no_request_end_the_connection_with_a_code(daemon: Daemon, data: bytes, code: bytes) -> None:
    assert code in talk(daemon, data)
    assert daemon.server.refused_count == 1
    Client.connect(daemon.directory).close()


def test_a_connection_that_only_opens_and_closes_is_no_offence(daemon: Daemon) -> None:
    assert talk(daemon, b"") == b""
    assert talk(daemon, ATTACH)[6:] == encode_value(protocol.Attached(protocol.PROTOCOL_VERSION, "trainer"))
    assert daemon.server.refused_count == 0


def test_a_server_that_may_open_no_more_files_goes_on(daemon: Daemon, monkeypatch: Any) -> None:
    accept, refusals = socket.socket.accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def refuse_first(listener: socket.socket) -> Any:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    monkeypatch.setattr(local_server, "ACCEPT_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(socket.socket, "accept", refuse_first)
    Client.connect(daemon.directory).close()
    assert not refusals


def test_a_process_that_stops_in_the_middle_is_let_go(daemon: Daemon, monkeypatch: Any) -> None:
    monkeypatch.setattr(link, "FRAME_SECONDS_MAX", 0.1)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(socket_path(daemon.directory)))
        connection.sendall(ATTACH[:4])
        assert connection.recv(10) == b""


def test_a_process_that_does_not_read_its_replies_is_let_go(daemon: Daemon, monkeypatch: Any) -> None:
    monkeypatch.setattr(link, "FRAME_SECONDS_MAX", 0.2)
    text = "x" * 1_000_000
    daemon.status = lambda: {"text": text}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(socket_path(daemon.directory)))
        connection.sendall(ATTACH + encode_frame(protocol.GetStatus()) * 2)
        wait_until(lambda: daemon.server._connection_count == 1)
        wait_until(lambda: daemon.server._connection_count == 0)
    daemon.status = lambda: {"ok": True}
    with Client.connect(daemon.directory) as client:
        assert json.dumps(client.status()) == '{"ok": true}'
