"""A training process's connection for rounds, on a real socket: what it may say, and what it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from servers import RawProcess, ServerThread, hooks_of, refusal, wait_until

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import Contribution, SliceName, StateAnchor
from pulsenet.errors import RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId, RunId, compute_digest
from pulsenet.local import rounds_protocol as local
from pulsenet.local.client import Client
from pulsenet.local.rounds_client import RoundsConnection
from pulsenet.local.shared_memory import Region
from pulsenet.node.effects import (
    CheckContribution,
    Fate,
    RestoreState,
    RunInnerSteps,
    StepState,
    StoreStateAnchor,
    SumSlices,
)
from pulsenet.node.events import Event, InnerStepsDone, SlicesSummed, TrainingAttached, TrainingLost
from pulsenet.outer.inner_state import SLOTS_MAX, Slot, encode_slots
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenetd.handlers.training import TrainingDesk
from pulsenetd.local.rounds import RoundsHook
from pulsenetd.local.server import LocalServer
from pulsenetd.metrics import Metrics
from pulsenetd.outer.pace import Pace
from pulsenetd.storage.round_blobs import RoundBlobs
from pulsenetd.storage.store import Store

TABLE = make_table([TensorSpec("a", "F32", (64,))])
ROOT = compute_digest(b"state 0")
ZERO = Digest(bytes(32))
CONTRIBUTION = Contribution(RunId(ZERO), 0, PeerId(ZERO), 0, ROOT, ZERO, 8, 1, 64, 0, 1)
ANCHOR = StateAnchor(RunId(ZERO), 0, 4, ROOT, ZERO, ZERO, 8)


class Daemon:
    """A server with a desk in a thread of its own; the machine behind the desk is the test."""

    def __init__(self, directory: Path, run: Any, store: Store) -> None:
        self.directory, self.store, self.peer_id = directory, store, run.publisher.peer_id
        self.metrics = Metrics()
        self.threads = ThreadPoolExecutor(2)
        self.heard: list[Event] = []
        self.damages = 0
        self.residuals: list[float] = []
        self.settings: local.RoundSettingsReply | None = local.RoundSettingsReply(
            "pulseloco", (("inner_steps", 4),), run.publisher.peer_id
        )
        self.is_rebuilding = False
        self.ledger = Ledger(run.trust())
        self.desk = TrainingDesk(
            run.trust(),
            self.ledger,
            run.publisher.peer_id,
            self.metrics,
            pace=Pace(lambda measured: None),
            post=self.heard.append,
            settle=lambda: asyncio.sleep(0),
        )
        hook = RoundsHook(
            desk=self.desk,
            settings=self._settings,
            check_masters=self._check_masters,
            make_blobs=lambda: RoundBlobs(store),
            on_damage=self._note_damage,
            on_residual=self.residuals.append,
            threads=self.threads,
            metrics=self.metrics,
        )
        self.server = LocalServer(directory, hooks_of(rounds=hook), role="trainer")
        self._thread = ServerThread(self.server)

    async def _settings(self) -> local.RoundSettingsReply:
        if self.settings is None:
            raise RemoteProtocolError("no-rounds", "the run names no outer algorithm")
        return self.settings

    async def _check_masters(self, table: ParameterTable, self_test: Digest) -> None:
        if self.is_rebuilding:
            raise UnavailableError("the machines are built anew")
        if self_test != SELF_TEST_DIGEST:
            raise RemoteProtocolError("self-test", self_test.hex())

    def _note_damage(self) -> None:
        self.damages += 1

    def order(self, effect: Any) -> None:
        """Let the machine order something."""
        self._thread.execute(self.desk.table()[type(effect)](effect, self.heard.append))

    def stop(self) -> None:
        self._thread.stop()
        self.threads.shutdown()


class Process(RawProcess):
    def open(self, round_index: int = 0) -> None:
        assert self.ask(local.OpenRounds(TABLE.encode(), SELF_TEST_DIGEST)) == local.RoundsOpened()
        assert self.ask(local.HoldState(round_index, ROOT)) == local.Waiting()

    def offer(self, blob: local.BlobTaken, **changes: Any) -> Any:
        fields = {
            "round_index": 0,
            "base_state_root": ROOT,
            "blob_id": blob.blob_id,
            "encoded_size_bytes": blob.encoded_size_bytes,
            "entry_count": 2,
            "element_count": 64,
            "norm_bits": 0x3F80_0000,
            "codec_id": 1,
        }
        return self.ask(local.OfferContribution(**{**fields, **changes}))


@pytest.fixture
def daemon(tmp_path: Path, run: Any, store: Store) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "node", run, store)
    yield made
    made.stop()


@pytest.fixture
def process(daemon: Daemon) -> Iterator[Process]:
    with closing(Process(daemon.directory)) as made:
        yield made


def test_the_settings_are_told_before_anything_is_opened(daemon: Daemon, process: Process) -> None:
    assert process.ask(local.GetRoundSettings()) == daemon.settings
    daemon.settings = None
    assert refusal(process.ask(local.GetRoundSettings())) == "no-rounds"


async def test_a_node_that_trains_nothing_says_so(tmp_path: Path, daemon: Daemon) -> None:
    server = LocalServer(tmp_path / "other", hooks_of(), role="seed")
    server.listen()
    serving = asyncio.create_task(server.serve())
    other = await asyncio.to_thread(Process, tmp_path / "other")
    assert refusal(await asyncio.to_thread(other.ask, local.GetRoundSettings())) == "not-trainer"
    other.close()
    serving.cancel()


def test_a_round_from_the_first_message_to_the_end_of_the_process(daemon: Daemon, process: Process) -> None:
    process.open()
    assert daemon.heard == [TrainingAttached(0, ROOT, None)]
    assert process.ask(local.AwaitOrder(0)) == local.NoOrder()
    daemon.order(RunInnerSteps(0, 4))
    assert process.ask(local.AwaitOrder(1_000)) == local.GoOn(0)
    data = bytes(range(256)) * 20
    assert process.put(data[:4_000], is_last=False) == local.BlobTaken(None, 4_000)
    taken = process.put(data[4_000:], is_first=False)
    assert daemon.store.is_complete(taken.blob_id)
    assert process.offer(taken) == local.Waiting()
    assert daemon.heard[1:] == [InnerStepsDone(0)]
    process.close()
    wait_until(lambda: daemon.heard[-1] == TrainingLost())


def test_an_order_reaches_a_process_that_waits_for_one(daemon: Daemon, process: Process) -> None:
    process.open()
    process.send(local.AwaitOrder(20_000))
    daemon.order(StoreStateAnchor(0))
    assert process.receive().message == local.AnchorOrder(0)
    taken = process.put(b"a whole state")
    answer = local.AnchorStored(0, ROOT, taken.blob_id, taken.encoded_size_bytes)
    assert process.ask(answer) == local.Waiting()


def test_a_process_that_dies_while_it_waits_is_noticed(daemon: Daemon, process: Process) -> None:
    process.open()
    process.send(local.AwaitOrder(300_000))
    process.close()
    wait_until(lambda: TrainingLost() in daemon.heard)
    again = Process(daemon.directory)
    again.open()
    again.close()


def test_only_one_process_takes_part_at_a_time(daemon: Daemon, process: Process) -> None:
    process.open()
    second = Process(daemon.directory)
    assert refusal(second.ask(local.OpenRounds(TABLE.encode(), SELF_TEST_DIGEST))) == "busy"
    second.close()
    assert process.ask(local.AwaitOrder(0)) == local.NoOrder(), "the first goes on"
    assert TrainingLost() not in daemon.heard
    process.close()
    wait_until(lambda: TrainingLost() in daemon.heard)
    third = Process(daemon.directory)
    third.open()
    third.close()


def test_arithmetic_that_would_diverge_is_refused_and_the_place_is_free_again(daemon: Daemon, process: Process) -> None:
    assert refusal(process.ask(local.OpenRounds(TABLE.encode(), Digest(bytes(32))))) == "self-test"
    wait_until(lambda: daemon.desk._owner is None)
    second = Process(daemon.directory)
    second.open()
    second.close()


def test_a_node_that_is_building_itself_anew_is_left_and_found_again(daemon: Daemon, process: Process) -> None:
    daemon.is_rebuilding = True
    with pytest.raises(UnavailableError):
        process.ask(local.OpenRounds(TABLE.encode(), SELF_TEST_DIGEST))
    daemon.is_rebuilding = False
    second = Process(daemon.directory)
    second.open()
    second.close()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (local.HoldState(0, ROOT), "message-unexpected"),
        (local.AwaitOrder(0), "message-unexpected"),
        (local.FetchBlobPart(ROOT, 0, 10), "message-unexpected"),
    ],
)
def test_nothing_is_taken_before_the_rounds_are_open(process: Process, message: Any, code: str) -> None:
    assert refusal(process.ask(message)) == code


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (local.HoldState(1, None), "schema"),
        (local.HoldState(None, ROOT), "schema"),
        (local.FetchBlobPart(ROOT, 0, 0), "handoff-size"),
        (local.FetchBlobPart(ROOT, 0, local.PART_SIZE_BYTES_MAX + 1), "handoff-size"),
        (local.PutBlobPart(0, True), "handoff-size"),
        (local.PutBlobPart(10, True), "handoff-descriptor"),
        (local.Stepped(1, ROOT), "message-unexpected"),
        (local.StepFailed(0, "memory"), "message-unexpected"),
        (local.Checked(ROOT, ""), "message-unexpected"),
        (local.Restored(0, ROOT), "message-unexpected"),
        (local.RestoreRefused("decode"), "message-unexpected"),
        (local.AnchorRefused(0, "enospc"), "message-unexpected"),
        (local.AnchorStored(0, ROOT, ROOT, 10), "not-found"),
        (local.Waiting(), "message-unexpected"),
        (local.TellResidual(0x7FC0_0000), "schema"),
        (local.TellResidual(0xBF80_0000), "schema"),
        (local.TellResidual(1 << 32), "schema"),
    ],
)
def test_what_breaks_the_protocol_costs_the_connection_only(
    daemon: Daemon, process: Process, message: Any, code: str
) -> None:
    process.open()
    assert refusal(process.ask(message)) == code
    wait_until(lambda: TrainingLost() in daemon.heard)
    again = Process(daemon.directory)
    again.open()
    again.close()


def test_a_contribution_is_offered_with_the_blob_that_was_put(process: Process) -> None:
    process.open()
    taken = process.put(b"contribution")
    assert refusal(process.offer(taken, encoded_size_bytes=11)) == "not-found"


def test_memory_of_another_size_than_said_is_refused(process: Process) -> None:
    process.open()
    assert refusal(process.put(b"short", said_size_bytes=4_096)) == "handoff-size"


def test_a_blob_larger_than_any_of_these_masters_is_refused(daemon: Daemon, process: Process) -> None:
    process.open()
    assert refusal(process.put(bytes((1 << 20) + 1_000))) == "handoff-size"
    assert len(daemon.store.chunk_digests()) == 0


def test_an_anchor_of_ddp_may_hold_all_that_an_optimizer_keeps(daemon: Daemon, process: Process) -> None:
    daemon.settings = local.RoundSettingsReply("ddp", (), daemon.peer_id)
    process.open()
    slots = [Slot(f"slot{index}", (64,), np.ones(64, np.float32)) for index in range(SLOTS_MAX)]
    data = bytes(4 * 64) + encode_slots(slots).tobytes() + bytes(1 << 20)
    assert isinstance(process.put(data), local.BlobTaken)
    assert refusal(process.put(data + bytes(4 * 64 * SLOTS_MAX))) == "handoff-size"


def test_what_the_gate_holds_back_is_passed_on(daemon: Daemon, process: Process) -> None:
    process.open()
    assert process.ask(local.TellResidual(0x3F00_0000)) == local.Waiting()
    assert daemon.residuals == [0.5]


def test_abstaining_is_heard(daemon: Daemon, process: Process) -> None:
    process.open()
    daemon.order(RunInnerSteps(0, 4))
    assert process.ask(local.AbstainRound(0, "finite")) == local.Waiting()
    assert InnerStepsDone(0) in daemon.heard


def test_a_full_disk_is_said_once_and_counted_and_costs_nothing_else(
    daemon: Daemon, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pulsenet")
    process.open()

    def refuse(size_bytes: int) -> None:
        raise StorageError("no room", "enospc")

    process.put(b"first part", is_last=False)
    require, daemon.store.require_space = daemon.store.require_space, refuse  # type: ignore[method-assign]
    for _ in range(3):
        assert process.put(b"second part") == local.BlobRefused("enospc")
    daemon.store.require_space = require  # type: ignore[method-assign]
    assert daemon.metrics.registry.get_sample_value("pulsenet_rejected_total", {"reason": "enospc"}) == 3.0
    taken = process.put(b"a blob of its own")
    texts = [record.getMessage() for record in caplog.records]
    assert sum("was not taken" in text for text in texts) == 1, "each attempt is counted, the first is told"
    assert "blobs are taken again, after 3 that were not" in texts
    assert taken.encoded_size_bytes == len(b"a blob of its own")
    assert process.offer(taken) == local.Waiting()


@pytest.mark.parametrize("error", [StorageError("no shared memory", "memory"), KeyboardInterrupt()])
def test_a_blob_that_was_given_up_is_no_part_of_the_next(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The process had no memory for its third part, or was interrupted while it encoded that."""
    monkeypatch.setattr(local, "PART_SIZE_BYTES_MAX", 16)

    def fail_amid() -> Iterator[bytes]:
        yield bytes(40)
        raise error

    with closing(RoundsConnection.connect(Client(daemon.directory), 5.0)) as connection:
        connection.open(TABLE, SELF_TEST_DIGEST)
        with pytest.raises(type(error)):
            connection.put_blob(fail_amid())
        blob = connection.put_blob([b"a blob of two parts"])
        assert blob.size_bytes == 19
        assert b"".join(connection.fetch_blob(blob.blob_id, 19)) == b"a blob of two parts"


def test_blobs_are_read_part_by_part(daemon: Daemon, process: Process) -> None:
    process.open()
    data = bytes(range(256)) * 8
    taken = process.put(data)
    found = b""
    for offset, is_last in ((0, False), (1_000, False), (2_000, True)):
        process.send(local.FetchBlobPart(taken.blob_id, offset, 1_000))
        frame = process.receive()
        assert isinstance(frame.message, local.BlobPart)
        assert frame.message.is_last is is_last
        region = Region.open_snapshot(frame.take_descriptor(), frame.message.size_bytes)
        found += region.bytes.tobytes()
        region.close()
    assert found == data
    assert process.ask(local.FetchBlobPart(taken.blob_id, len(data), 10)) == local.NoBlobPart("range")
    assert process.ask(local.FetchBlobPart(ROOT, 0, 10)) == local.NoBlobPart("not-found")
    assert daemon.damages == 0


def test_a_blob_that_rotted_is_fetched_again(daemon: Daemon, process: Process) -> None:
    process.open()
    taken = process.put(b"soon to be rotten")
    (chunk,) = (daemon.store.directory / "chunks").glob("*/*")
    chunk.write_bytes(b"rotten")
    assert process.ask(local.FetchBlobPart(taken.blob_id, 0, 100)) == local.NoBlobPart("damaged")
    assert daemon.damages == 1


def test_every_answer_of_an_order_is_passed_on(daemon: Daemon, process: Process) -> None:
    """The desk's own tests look at what becomes of them."""
    process.open()
    daemon.order(StoreStateAnchor(0))
    assert process.ask(local.AwaitOrder(1_000)) == local.AnchorOrder(0)
    assert process.ask(local.AnchorRefused(0, "enospc")) == local.Waiting()
    daemon.ledger._finals[0] = SimpleNamespace(  # type: ignore[assignment]
        receipt=SimpleNamespace(base_state_root=ROOT, members=(), rejected=())
    )
    step, restore = StepState(0, (), Fate.MISSED), RestoreState(ANCHOR, True)
    for effect, kind, answer in (
        (CheckContribution(CONTRIBUTION, ROOT), local.CheckOrder, local.Checked(ROOT, "")),
        (SumSlices(0, (), (0, 1), ()), local.SumOrder, local.SumRefused(0, "decode")),
        (step, local.StepOrder, local.StepFailed(0, "memory")),
        (step, local.StepOrder, local.Stepped(1, ROOT)),
        (restore, local.RestoreOrder, local.RestoreRefused("decode")),
        (restore, local.RestoreOrder, local.Restored(4, ROOT)),
    ):
        daemon.order(effect)
        assert isinstance(process.ask(local.AwaitOrder(5_000)), kind)
        assert process.ask(answer) == local.Waiting()
    assert daemon.desk.held is not None
    assert daemon.desk.held.round_index == 4


def test_a_slice_counts_as_stored_only_if_it_was_put(daemon: Daemon, process: Process) -> None:
    process.open()
    daemon.ledger._finals[0] = SimpleNamespace(  # type: ignore[assignment]
        receipt=SimpleNamespace(base_state_root=ROOT, members=(), rejected=())
    )
    daemon.order(SumSlices(0, (), (0, 1), (0,)))
    assert isinstance(process.ask(local.AwaitOrder(5_000)), local.SumOrder)
    taken = process.put(b"a slice")
    names = (local.SliceBlob(0, taken.blob_id, taken.encoded_size_bytes), local.SliceBlob(1, ROOT, 9))
    assert process.ask(local.Summed(0, names)) == local.Waiting()
    assert SlicesSummed(0, tuple((n.slice_index, SliceName(n.blob_id, n.encoded_size_bytes)) for n in names)) in (
        daemon.heard
    )
    daemon.order(SumSlices(0, (), (0, 1), (0,)))
    process.ask(local.AwaitOrder(5_000))
    assert refusal(process.ask(local.Summed(0, (local.SliceBlob(0, ROOT, 9), names[1])))) == "not-found"


def test_a_disk_that_deletes_nothing_costs_neither_the_process_nor_the_node_anything(
    daemon: Daemon, process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process.open()
    process.put(bytes(1 << 20) + b"amid a blob", is_last=False)

    def refuse(*_: object) -> None:
        raise StorageError("cannot delete: Read-only file system", "readonly")

    monkeypatch.setattr(daemon.store._chunks, "remove", refuse)
    process.close()
    with closing(Process(daemon.directory)) as another:
        wait_until(lambda: "could not be deleted" in caplog.text)
        another.open()
        monkeypatch.setattr(RoundBlobs, "let_go", refuse)
        daemon.ledger._finals[0] = SimpleNamespace(  # type: ignore[assignment]
            receipt=SimpleNamespace(base_state_root=ROOT, members=(), rejected=())
        )
        daemon.order(StepState(0, (), Fate.MISSED))
        assert isinstance(another.ask(local.AwaitOrder(5_000)), local.StepOrder)
        assert another.ask(local.Stepped(1, compute_digest(b"state 1"))) == local.Waiting()


def test_what_begins_like_a_contribution_and_is_none_is_refused(daemon: Daemon, process: Process) -> None:
    process.open()
    assert refusal(process.put(b"PLSC but nothing of the kind")) == "decode"
    assert len(daemon.store.blob_ids()) == 0
