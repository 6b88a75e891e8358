"""Publishing from a training loop through a real local server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from servers import wait_until

from pulsenet.chain.records import RolloutBatch
from pulsenet.errors import ConfigError, LocalProtocolError, UnavailableError
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local.protocol import PublishDone, PublishStatus, SignedBatch, TasksQueued
from pulsenet.local.rollouts import Sample, pack_rollouts
from pulsenet.tensors.bf16 import bits_to_float32
from pulsenet.training import publisher as publisher_module
from pulsenet.training.publisher import CopyProgress, Publisher, attach_publisher
from pulsenet.training.rollout_checks import LogprobCheck
from pulsenet.training.snapshot import collect_tensors
from pulsenet.wire.schema import encode_value

Serve = Callable[[Path], None]


def test_a_model_arrives_whole_in_the_dense_layout(serve: Serve, node: Any, tmp_path: Path) -> None:
    serve(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
    with attach_publisher(data_dir=tmp_path) as publisher:
        result = publisher.publish(model, step=3, wait=True)
    assert result.status is PublishStatus.COMMITTED
    assert result.version == Version(0, 1)
    ((step, table, region),) = node.offers
    expected_table, tensors = collect_tensors(model)
    assert step == 3
    assert table == expected_table
    for index, (_, data) in enumerate(tensors):
        assert table.view(region, index).tobytes() == data


@pytest.mark.parametrize("step", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_any_integer_counts_steps(step: Any, serve: Serve, node: Any, tmp_path: Path) -> None:
    serve(tmp_path)
    with attach_publisher(data_dir=tmp_path) as publisher:
        publisher.publish(torch.nn.Linear(2, 2), step=step, wait=True)
        for other in (1.0, "3", None):
            with pytest.raises(ConfigError, match="is no integer"):
                publisher.publish(torch.nn.Linear(2, 2), step=other)  # type: ignore[arg-type]
    assert [offer[0] for offer in node.offers] == [3]


def test_training_may_go_on_at_once(serve: Serve, node: Any, tmp_path: Path) -> None:
    serve(tmp_path)
    model = torch.nn.Linear(2, 2)
    with attach_publisher(data_dir=tmp_path) as publisher:
        before = dict(collect_tensors(model)[1])
        publisher.publish(model, step=1)
        with torch.no_grad():
            model.weight.zero_()
        publisher.publish(model, step=2)
        wait_until(lambda: len(node.offers) == 2)
    (_, table, first), (_, _, second) = sorted(node.offers, key=lambda offer: offer[0])
    assert table.view(first, table.index_of("weight")).tobytes() == before["weight"]
    assert not table.view(second, table.index_of("weight")).any()


def test_no_memory_and_no_descriptor_stays_behind(
    serve: Serve, tmp_path: Path, open_descriptors: Callable[[], int]
) -> None:
    serve(tmp_path)
    with attach_publisher(data_dir=tmp_path) as publisher:
        publisher.publish(torch.nn.Linear(2, 2), step=0, wait=True)
        before = open_descriptors()
        for step in range(1, 10):
            publisher.publish(torch.nn.Linear(2, 2), step=step, wait=True)
        assert open_descriptors() <= before


@pytest.mark.parametrize("status", [PublishStatus.NOT_PUBLISHER, PublishStatus.REPLACED, PublishStatus.FAILED])
def test_what_the_daemon_says_is_the_result(status: PublishStatus, serve: Serve, node: Any, tmp_path: Path) -> None:
    serve(tmp_path)
    node.outcome = PublishDone(status, None, 0, 0, 0, 0, "why: because")
    with attach_publisher(data_dir=tmp_path) as publisher:
        result = publisher.publish(torch.nn.Linear(2, 2), step=0, wait=True)
    assert (result.status, result.reason) == (status, "why: because")


def test_progress_counts_up_to_the_whole_model(serve: Serve, tmp_path: Path) -> None:
    serve(tmp_path)
    seen: list[CopyProgress] = []
    with attach_publisher(data_dir=tmp_path, on_progress=seen.append) as publisher:
        publisher.publish(torch.nn.Linear(4, 3), step=0)
    assert [(progress.tensor_name, progress.tensor_count) for progress in seen] == [("bias", 1), ("weight", 2)]
    assert [progress.copied_size_bytes for progress in seen] == [6, 30]
    assert {(progress.tensor_count_total, progress.size_bytes) for progress in seen} == {(2, 30)}


def test_a_daemon_that_goes_away_is_a_result(serve: Serve, node: Any, tmp_path: Path) -> None:
    serve(tmp_path)
    with attach_publisher(data_dir=tmp_path) as publisher:
        publisher._client.path.unlink()  # type: ignore[union-attr]
        publisher._client._idle.pop().close()  # type: ignore[union-attr]
        result = publisher.publish(torch.nn.Linear(2, 2), step=0)
    assert result.status is PublishStatus.FAILED
    assert result.reason.startswith("unreachable: ")
    assert node.offers == []


def test_without_a_daemon_attach_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="start it with 'pulsenet join --role trainer'"):
        attach_publisher()


def test_attach_finds_the_daemon_of_the_run(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    serve(tmp_path / "pulsenet" / "mine" / "trainer")
    with attach_publisher("mine") as publisher:
        assert publisher.status() == {"role": "trainer", "offers": 0}


def make_batch(number: int) -> SignedBatch:
    packed = pack_rollouts(Version(0, 1), Version(0, 2), [Sample([1], [2, 3], [-0.5, -1.0], float(number))])
    fields = {name: getattr(packed, name) for name in packed.__slots__}
    batch = RolloutBatch(run_id=RunId(bytes(32)), sequence=number, **fields)
    return SignedBatch(PeerId(bytes(32)), number, 0, encode_value(batch))


def test_rollouts_come_one_after_another_until_the_time_is_up(serve: Serve, node: Any, tmp_path: Path) -> None:
    serve(tmp_path)
    node.batches = [make_batch(number) for number in range(5)]
    with attach_publisher(data_dir=tmp_path) as publisher:
        rewards = [batch.samples[0].reward for batch in publisher.rollouts(count_max=2, timeout_seconds=0.0)]
        assert rewards == [0.0, 1.0, 2.0, 3.0, 4.0]
        node.batches = [make_batch(7)]
        assert next(publisher.rollouts()).samples[0].reward == 7.0


def test_a_batch_handed_out_twice_by_a_daemon_that_died_is_yielded_once(
    serve: Serve, node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "RECEIVED_COUNT_MAX", 2)
    serve(tmp_path)
    node.batches = [make_batch(number) for number in (1, 2, 1, 3, 2)]
    with attach_publisher(data_dir=tmp_path) as publisher:
        assert [batch.sequence for batch in publisher.rollouts(timeout_seconds=0.0)] == [1, 2, 3]
        assert len(publisher._received) == 2


def test_stale_samples_are_left_out_and_a_batch_of_them_is_none(serve: Serve, node: Any, tmp_path: Path) -> None:
    samples = [Sample([1], [2], [-0.5], float(number), version_first=Version(0, number)) for number in (3, 5)]
    packed = pack_rollouts(Version(0, 5), Version(0, 5), samples)
    fields = {name: getattr(packed, name) for name in packed.__slots__}
    data = encode_value(RolloutBatch(run_id=RunId(bytes(32)), sequence=1, **fields))
    serve(tmp_path)
    node.batches = [SignedBatch(PeerId(bytes(32)), number, number, data) for number in (3, 4, 6)]
    with attach_publisher(data_dir=tmp_path) as publisher:
        batches = publisher._attached().take_rollouts()
    assert [[sample.reward for sample in batch.samples] for batch in batches] == [[3.0, 5.0], [5.0]]
    assert [batch.stale_count for batch in batches] == [0, 1]


def test_a_batch_whose_logprobs_cannot_be_reproduced_is_counted_and_not_yielded(
    serve: Serve, node: Any, tmp_path: Path
) -> None:
    serve(tmp_path)
    node.batches = [make_batch(number) for number in range(4)]

    def compute(sample: Sample) -> list[float] | None:
        return {0.0: [-0.5, -1.0], 1.0: [-3.0, -1.0]}.get(sample.reward)

    check = LogprobCheck(compute, share=1.0)
    with attach_publisher(data_dir=tmp_path) as publisher:
        batches = list(publisher.rollouts(timeout_seconds=0.0, check=check))
    assert [batch.sequence for batch in batches] == [0, 2, 3]
    assert node.checks == [(PeerId(bytes(32)), 1, 0), (PeerId(bytes(32)), 1, 1)]


def test_tasks_are_queued_with_an_id_each(serve: Serve, node: Any, tmp_path: Path) -> None:
    serve(tmp_path)
    busy, wrong = TasksQueued((), "busy: full", 20), TasksQueued((), "a lease of 0 s", 0)
    with attach_publisher(data_dir=tmp_path) as publisher:
        node.tasks.answers = [busy]
        ids = publisher.send_tasks([{"prompt": 1}, {"prompt": 2}], lease_seconds=2.0, timeout_seconds=10.0)
        assert [(task.task_id, task.content, task.lease_ms) for task in node.tasks.given] == [
            (ids[0], '{"prompt": 1}', 2_000),
            (ids[1], '{"prompt": 2}', 2_000),
        ]
        node.tasks.answers = [busy]
        with pytest.raises(UnavailableError, match="full"):
            publisher.send_tasks([{}])
        node.tasks.answers = [wrong]
        with pytest.raises(LocalProtocolError, match="lease of 0"):
            publisher.send_tasks([{}])


@pytest.mark.parametrize("blocking", [False, True])
def test_a_large_model_crosses_in_parts(
    serve: Serve, node: Any, tmp_path: Path, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsenet.local.parts.PART_SIZE_BYTES_MIN", 64)
    serve(tmp_path)
    state = {f"{index:02d}": torch.randn(index % 7, 5) for index in range(20)}
    seen: list[CopyProgress] = []
    with attach_publisher(data_dir=tmp_path, on_progress=seen.append) as publisher:
        result = publisher.publish(state, step=1, blocking=blocking, timeout_seconds=20.0)
        wait_until(lambda: node.offers)
    # A blocking publish waits for its outcome without being told to.
    assert result.status is (PublishStatus.COMMITTED if blocking else PublishStatus.QUEUED)
    ((_, table, region),) = node.offers
    for index, (_, data) in enumerate(collect_tensors(state)[1]):
        assert table.view(region, index).tobytes() == data
    assert [progress.tensor_count for progress in seen] == list(range(1, 21))
    assert seen[-1].copied_size_bytes == seen[-1].size_bytes == table.size_bytes


class Sharded(torch.Tensor):
    """As a sharded tensor shows itself."""

    gathered: list[int] = []  # noqa: RUF012

    def full_tensor(self) -> torch.Tensor:
        self.gathered.append(self.numel())
        return torch.zeros(self.shape)

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_other_ranks_gather_and_do_not_publish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(publisher_module, "is_first_rank", lambda: False)
    state = {"a": torch.zeros(3).as_subclass(Sharded), "b": torch.zeros(2)}
    with attach_publisher(data_dir=tmp_path) as publisher:
        result = publisher.publish(state, step=0)
        assert result.status is PublishStatus.NOT_PUBLISHER
        assert Sharded.gathered == [3]
        with pytest.raises(LocalProtocolError, match="ask on rank 0"):
            next(publisher.rollouts())


@pytest.mark.parametrize("status", [PublishStatus.COMMITTED, PublishStatus.NOT_PUBLISHER])
def test_rank_0_gathers_every_tensor_once_whatever_becomes_of_the_publish(
    status: PublishStatus, serve: Serve, node: Any, tmp_path: Path
) -> None:
    """A gather ends only if every rank calls it, and the others call it for every tensor."""
    serve(tmp_path)
    Sharded.gathered.clear()
    node.outcome = PublishDone(status, None, 0, 0, 0, 0, "")
    state = {str(size): torch.zeros(size).as_subclass(Sharded) for size in (1, 2, 3)}
    with attach_publisher(data_dir=tmp_path) as publisher:
        assert publisher.publish(state, step=0, wait=True).status is status
        assert Sharded.gathered == [1, 2, 3]
        publisher._client.path.unlink()  # type: ignore[union-attr]
        publisher._client._idle.pop().close()  # type: ignore[union-attr]
        assert publisher.publish(state, step=0).status is PublishStatus.FAILED
    assert Sharded.gathered == [1, 2, 3] * 2


def test_a_model_that_cannot_be_published_is_refused_before_anything_is_sent(
    serve: Serve, node: Any, tmp_path: Path
) -> None:
    serve(tmp_path)
    with attach_publisher(data_dir=tmp_path) as publisher, pytest.raises(ConfigError, match="complex64"):
        publisher.publish({"w": torch.zeros(1, dtype=torch.complex64)}, step=0)
    assert node.offers == []


def test_a_dead_daemons_socket_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "daemon.sock").touch()
    with pytest.raises(UnavailableError):
        attach_publisher(data_dir=tmp_path, timeout_seconds=0.0)


def test_a_strided_parameter_arrives_as_its_values(serve: Serve, node: Any, tmp_path: Path) -> None:
    """A-DT-3."""
    serve(tmp_path)
    with attach_publisher(data_dir=tmp_path) as publisher:
        assert isinstance(publisher, Publisher)
        publisher.publish({"w": torch.arange(6.0).reshape(2, 3).t()}, step=0, wait=True)
    _, table, region = node.offers[0]
    assert bits_to_float32(table.view(region, 0)).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
