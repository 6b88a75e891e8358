"""A daemon's local server in a thread, with a node behind it that a test can look into."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from servers import ServerThread

from pulsenet.codec.changes import Changes, encode_changes
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.local import protocol
from pulsenet.local.protocol import PublishDone, PublishStatus, UpdateKind
from pulsenet.local.shared_memory import Region
from pulsenet.tensors.digest import compute_region_root
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.snapshot import take_snapshot
from pulsenetd.local.server import EngineConfirmation, LocalHooks, LocalServer, SnapshotOffer
from pulsenetd.storage.parts import PublishFailedError
from pulsenetd.storage.staging import StagedUpdate


@dataclass
class TaskDesk:
    """Tasks of a node that queues what it is sent, and gives it out again."""

    answers: list[protocol.TasksQueued] = field(default_factory=list)
    """Given before anything is queued."""
    given: list[protocol.GivenTask] = field(default_factory=list)

    async def send(self, contents: Sequence[str], lease_ms: int) -> protocol.TasksQueued:
        if self.answers:
            return self.answers.pop(0)
        first = len(self.given)
        ids = tuple((first + place).to_bytes(16, "big") for place in range(len(contents)))
        for task_id, content in zip(ids, contents, strict=True):
            self.given.append(protocol.GivenTask(PeerId(bytes(32)), task_id, content, lease_ms))
        return protocol.TasksQueued(ids, "", 0)

    async def take(self, count_max: int, wait_seconds: float) -> tuple[protocol.GivenTask, ...]:
        taken, self.given = self.given[:count_max], self.given[count_max:]
        return tuple(taken)


@dataclass
class Node:
    """Answers a local server's questions from lists."""

    offers: list[tuple[int, ParameterTable, bytes]] = field(default_factory=list)
    """Step, table and bytes of each snapshot that came whole."""
    failures: list[str] = field(default_factory=list)
    """Why the others did not."""
    outcome: PublishDone = field(
        default_factory=lambda: PublishDone(PublishStatus.COMMITTED, Version(0, 1), 10, 5, 1, 5, "")
    )
    staged: list[StagedUpdate] = field(default_factory=list)
    asked: list[Version | None] = field(default_factory=list)
    asked_roots: list[Digest | None] = field(default_factory=list)
    confirmations: list[EngineConfirmation] = field(default_factory=list)
    rollouts: list[protocol.SubmitRollouts] = field(default_factory=list)
    rollout_answers: list[protocol.RolloutsTaken] = field(default_factory=list)
    """Given before every batch is accepted."""
    settled: list[tuple[int, bool]] = field(default_factory=list)
    checks: list[tuple[PeerId, int, int]] = field(default_factory=list)
    tasks: TaskDesk | None = field(default_factory=lambda: TaskDesk())
    batches: list[protocol.SignedBatch] = field(default_factory=list)

    async def on_snapshot(self, offer: SnapshotOffer) -> asyncio.Future[PublishDone]:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[PublishDone] = loop.create_future()
        if self.outcome.status is PublishStatus.NOT_PUBLISHER:
            outcome.set_result(self.outcome)
            return outcome

        def read() -> None:
            table = offer.parts.table
            weights = np.zeros(table.layout_size_bytes, np.uint8)
            try:
                for part in offer.parts.take():
                    for index in part.tensor_indices:
                        table.view(weights, index)[:] = part.view(index)
            except PublishFailedError as error:
                self.failures.append(error.code)
                return
            self.offers.append((offer.trainer_step, table, weights.tobytes()))
            loop.call_soon_threadsafe(outcome.set_result, self.outcome)

        loop.run_in_executor(None, read)
        return outcome

    async def on_engine_request(
        self, held: Version | None, root: Digest | None, timeout_seconds: float
    ) -> StagedUpdate | None:
        self.asked.append(held)
        self.asked_roots.append(root)
        return self.staged.pop(0) if self.staged else None

    async def on_confirm(self, confirmation: EngineConfirmation) -> None:
        self.confirmations.append(confirmation)

    async def on_rollouts(self, rollouts: protocol.SubmitRollouts) -> protocol.RolloutsTaken:
        self.rollouts.append(rollouts)
        return self.rollout_answers.pop(0) if self.rollout_answers else protocol.RolloutsTaken(True, "")

    async def on_rollouts_settled(self, batches: Sequence[protocol.SignedBatch], is_delivered: bool) -> None:
        self.settled.append((len(batches), is_delivered))

    def on_checks(self, peer_id: PeerId, checked_count: int, mismatched_count: int) -> None:
        self.checks.append((peer_id, checked_count, mismatched_count))

    async def on_take_rollouts(self, count_max: int, timeout_seconds: float) -> tuple[protocol.SignedBatch, ...]:
        taken, self.batches = self.batches[:count_max], self.batches[count_max:]
        return tuple(taken)

    async def on_status(self) -> Mapping[str, Any]:
        return {"role": "trainer", "offers": len(self.offers)}


def stage(
    kind: UpdateKind, base: Version | None, version: Version, root: Digest, table: ParameterTable, data: bytes
) -> StagedUpdate:
    """Put bytes where an engine reads them."""
    region = Region.create("test", len(data))
    region.bytes[:] = np.frombuffer(data, dtype=np.uint8)
    descriptor = region.reopen_for_reading()
    region.close()
    return StagedUpdate(kind, base, version, root, table, len(data), descriptor, lambda: True)


@dataclass(frozen=True)
class Weights:
    """One version of a small model."""

    version: Version
    table: ParameterTable
    region: np.ndarray[Any, np.dtype[np.uint8]]

    @property
    def root(self) -> Digest:
        return compute_region_root(self.table, self.region)

    def stage_full(self) -> StagedUpdate:
        return stage(UpdateKind.FULL, None, self.version, self.root, self.table, self.region.tobytes())

    def stage_from(self, old: Weights, *, root: Digest | None = None) -> StagedUpdate:
        pieces = []
        for tensor_index, spec in enumerate(self.table.tensors):
            before, after = (weights.table.view(weights.region, tensor_index) for weights in (old, self))
            indices = np.flatnonzero(before != after)
            if indices.size:
                changed = indices.astype(spec.index_dtype)
                pieces.append(encode_changes(Changes(tensor_index, changed, before[indices], after[indices])))
        root = self.root if root is None else root
        return stage(UpdateKind.RECORDS, old.version, self.version, root, self.table, b"".join(pieces))


def make_weights(number: int) -> Weights:
    model = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    snapshot = take_snapshot(model)
    region = np.zeros(snapshot.table.layout_size_bytes, dtype=np.uint8)
    for tensor_index, offset_bytes, data in snapshot.blocks():
        start = snapshot.table.offsets[tensor_index] + offset_bytes
        region[start : start + data.size] = data
    return Weights(Version(0, number), snapshot.table, region)


@pytest.fixture(name="stage")
def stage_fixture() -> Callable[..., StagedUpdate]:
    return stage


@pytest.fixture
def weights() -> Sequence[Weights]:
    return [make_weights(number) for number in range(4)]


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def serve(node: Node) -> Iterator[Callable[[Path], None]]:
    """Start a local server for a data directory; it ends with the test."""
    stops: list[Callable[[], None]] = []

    def start(directory: Path) -> None:
        hooks = LocalHooks(
            on_snapshot=node.on_snapshot,
            on_engine_request=node.on_engine_request,
            on_confirm=node.on_confirm,
            on_rollouts=node.on_rollouts,
            on_take_rollouts=node.on_take_rollouts,
            on_rollouts_settled=node.on_rollouts_settled,
            on_checks=node.on_checks,
            tasks=node.tasks,
            on_status=node.on_status,
        )
        directory.mkdir(parents=True, exist_ok=True)
        stops.append(ServerThread(LocalServer(directory, hooks, role="trainer")).stop)

    yield start
    for stop in stops:
        stop()
    for staged in node.staged:
        staged.close()


@pytest.fixture
def open_descriptors() -> Callable[[], int]:
    """Count this process's open files."""
    return lambda: len(os.listdir("/proc/self/fd"))
