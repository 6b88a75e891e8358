"""An engine kept current through a real local server."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from servers import wait_until

from pulsenet.errors import (
    ConfigError,
    IntegrityError,
    LocalProtocolError,
    PatchMismatchError,
    PulsenetError,
    RemoteProtocolError,
    StorageError,
    StructureError,
    UnavailableError,
)
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.local.client import Client
from pulsenet.local.protocol import GivenTask, RolloutsTaken
from pulsenet.local.rollouts import Sample
from pulsenet.serving.files import FilesEngine
from pulsenet.serving.in_process import InProcessEngine
from pulsenet.serving.subscriber import attach_engine
from pulsenet.training.snapshot import collect_tensors

Serve = Callable[[Path], None]


def make_model() -> torch.nn.Linear:
    return torch.nn.Linear(4, 3, dtype=torch.bfloat16)


def holds(model: torch.nn.Module, weights: Any) -> bool:
    _, tensors = collect_tensors(model)
    return all(
        np.array_equal(weights.table.view(weights.region, index).view(np.uint8), np.frombuffer(data, np.uint8))
        for index, (_, data) in enumerate(tensors)
    )


def test_an_engine_follows_full_and_record_updates(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    serve(tmp_path)
    model = make_model()
    engine = InProcessEngine(model)
    updated: list[Version] = []
    node.staged = [weights[0].stage_full(), weights[2].stage_from(weights[0])]
    with attach_engine(engine, data_dir=tmp_path, on_update=updated.append) as subscriber:
        assert subscriber.step() == Version(0, 0)
        assert holds(model, weights[0])
        assert subscriber.step() == Version(0, 2)
        assert holds(model, weights[2])
        assert subscriber.step() is None
    assert node.asked == [None, Version(0, 0), Version(0, 2)]
    assert node.asked_roots == [None, weights[0].root, weights[2].root]
    assert [(item.version, item.ok, item.held) for item in node.confirmations] == [
        (Version(0, 0), True, Version(0, 0)),
        (Version(0, 2), True, Version(0, 2)),
    ]
    assert updated == [Version(0, 0), Version(0, 2)]


def test_the_files_engine_follows_too(serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path) -> None:
    serve(tmp_path)
    engine = FilesEngine(tmp_path / "engine")
    node.staged = [weights[0].stage_full(), weights[1].stage_from(weights[0])]
    with attach_engine(engine, data_dir=tmp_path) as subscriber:
        subscriber.step()
        assert subscriber.step() == Version(0, 1)
    engine.close()
    assert (tmp_path / "engine" / "current").resolve().name == "0.1"


def test_files_of_an_earlier_process_are_named_with_their_root(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    """They may be of another run, which had a version of the same name."""
    serve(tmp_path)
    node.staged = [weights[1].stage_full()]
    for _ in range(2):
        engine = FilesEngine(tmp_path / "engine")
        with attach_engine(engine, data_dir=tmp_path) as subscriber:
            subscriber.step()
        engine.close()
    assert node.asked == [None, Version(0, 1)]
    assert node.asked_roots == [None, weights[1].root]


def test_a_failure_is_seen_by_both_sides_and_the_next_try_mends_it(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    """A-APP-3."""
    serve(tmp_path)
    model = make_model()
    engine = InProcessEngine(model)
    wrong = Digest(bytes(32))
    node.staged = [
        weights[0].stage_full(),
        weights[1].stage_from(weights[0], root=wrong),
        weights[1].stage_from(weights[0]),
    ]
    with attach_engine(engine, data_dir=tmp_path) as subscriber:
        subscriber.step()
        with pytest.raises(IntegrityError, match="have root"):
            subscriber.step()
        assert engine.version == Version(0, 0)
        assert holds(model, weights[0])
        assert dict(subscriber.failures) == {"root_mismatch": 1}
        assert isinstance(subscriber.last_failure, IntegrityError)
        subscriber.step()
    assert engine.version == Version(0, 1)
    assert holds(model, weights[1])
    failed = node.confirmations[1]
    assert (failed.ok, failed.held) == (False, Version(0, 0))
    assert failed.reason.startswith("root_mismatch: weights of version 0.1 have root")
    assert node.asked == [None, Version(0, 0), Version(0, 0)]


def test_bits_that_are_others_after_the_update_are_counted_and_handed_over_in_full(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    """A-APP-3: memory that is written to by somebody else, or weights that the model has moved."""
    serve(tmp_path)
    model = make_model()

    class Undermined(InProcessEngine):
        def commit(self) -> None:
            super().commit()
            if self.version == Version(0, 1):
                model.weight.detach().view(torch.uint16)[0, 0] ^= 1

    changed = weights[1].table.view(weights[1].region, weights[1].table.index_of("weight"))[0]
    assert changed != weights[0].table.view(weights[0].region, weights[0].table.index_of("weight"))[0]
    engine = Undermined(model)
    node.staged = [weights[0].stage_full(), weights[1].stage_from(weights[0]), weights[2].stage_full()]
    with attach_engine(engine, data_dir=tmp_path) as subscriber:
        subscriber.step()
        with pytest.raises(IntegrityError, match=r"read back hold other bits than version 0\.1 wrote"):
            subscriber.step()
        assert engine.version is None
        assert dict(subscriber.failures) == {"read_back": 1}
        subscriber.step()
    assert engine.version == Version(0, 2)
    assert holds(model, weights[2])
    failed = node.confirmations[1]
    assert (failed.ok, failed.held) == (False, None)
    assert failed.reason.startswith("read_back: ")
    assert node.asked == [None, Version(0, 0), None]


@pytest.mark.parametrize("loss", ["bits", "file"])
def test_files_that_are_no_longer_the_version_are_written_in_full(
    loss: str, serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    """Records that start from them would be refused for ever."""
    serve(tmp_path)
    engine = FilesEngine(tmp_path / "engine")
    node.staged = [weights[0].stage_full(), weights[1].stage_from(weights[0]), weights[1].stage_full()]
    with attach_engine(engine, data_dir=tmp_path) as subscriber:
        subscriber.step()
        file = engine.current / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.unlink()
        if loss == "bits":
            file.write_bytes(data)
        with pytest.raises(PulsenetError):
            subscriber.step()
        assert engine.version is None
        assert subscriber.step() == Version(0, 1)
    engine.close()
    assert node.asked == [None, Version(0, 0), None]
    assert node.confirmations[1].held is None


def test_a_model_that_somebody_else_changed_is_loaded_in_full(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    serve(tmp_path)
    model = make_model()
    engine = InProcessEngine(model)
    node.staged = [weights[0].stage_full(), weights[1].stage_from(weights[0]), weights[1].stage_full()]
    with attach_engine(engine, data_dir=tmp_path) as subscriber:
        subscriber.step()
        with torch.no_grad():
            model.weight.zero_()
        with pytest.raises(PatchMismatchError, match="do not hold the old bits"):
            subscriber.step()
        assert engine.version is None
        subscriber.step()
    assert holds(model, weights[1])
    assert dict(subscriber.failures) == {"base_mismatch": 1}


def test_another_structure_is_refused_and_named(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    """A-NAME-3."""
    serve(tmp_path)
    node.staged = [weights[0].stage_full()]
    engine = InProcessEngine(torch.nn.Linear(4, 3, bias=False, dtype=torch.bfloat16))
    with attach_engine(engine, data_dir=tmp_path) as subscriber, pytest.raises(StructureError, match=r"1 \(bias\)"):
        subscriber.step()
    assert node.confirmations[0].reason.startswith("structure: ")
    assert node.confirmations[0].held is None


def test_an_engines_own_error_is_reported_and_raised(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    serve(tmp_path)

    def drop_cache(version: Version) -> None:
        raise RuntimeError("cache is in use")

    node.staged = [weights[0].stage_full()]
    engine = InProcessEngine(make_model(), on_applied=drop_cache)
    with attach_engine(engine, data_dir=tmp_path) as subscriber, pytest.raises(RuntimeError, match="cache is in use"):
        subscriber.step()
    assert node.confirmations[0].reason == "engine: cache is in use"
    assert node.confirmations[0].ok is False


def test_the_loop_goes_on_after_a_failure_and_ends_when_closed(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    serve(tmp_path)
    arrived, failures = threading.Event(), []

    def notice(error: PulsenetError) -> None:
        failures.append(type(error))

    node.staged = [weights[1].stage_from(weights[0]), weights[1].stage_full()]
    engine = InProcessEngine(make_model())
    with attach_engine(engine, data_dir=tmp_path, on_update=lambda _: arrived.set(), on_failure=notice) as subscriber:
        subscriber.start()
        subscriber.start()
        assert arrived.wait(30)
        with engine.weights() as version:
            assert version == Version(0, 1)
    assert [failure.__name__ for failure in failures] == ["PatchMismatchError"]
    assert dict(subscriber.failures) == {"base_mismatch": 1}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_ended_the_loop_is_told_and_it_can_be_started_again(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    serve(tmp_path)
    arrived, versions = threading.Event(), []

    def notice(version: Version) -> None:
        versions.append(version)
        if len(versions) == 1:
            raise RuntimeError("the log is full")
        arrived.set()

    node.staged = [weights[0].stage_full(), weights[1].stage_from(weights[0])]
    with attach_engine(InProcessEngine(make_model()), data_dir=tmp_path, on_update=notice) as subscriber:
        subscriber.start()
        assert subscriber._thread is not None
        subscriber._thread.join(30)
        assert str(subscriber.last_failure) == "the log is full"
        subscriber.start()
        assert arrived.wait(30)
    assert versions == [Version(0, 0), Version(0, 1)]
    with pytest.raises(LocalProtocolError, match="closed"):
        subscriber.start()


def test_a_callback_may_end_the_loop_it_is_called_from(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    serve(tmp_path)
    node.staged = [weights[1].stage_from(weights[0])]
    subscriber = attach_engine(
        InProcessEngine(make_model()), data_dir=tmp_path, on_failure=lambda _: subscriber.close()
    )
    subscriber.start()
    assert subscriber._thread is not None
    subscriber._thread.join(30)
    assert not subscriber._thread.is_alive()
    assert isinstance(subscriber.last_failure, PatchMismatchError)
    subscriber.close()


def test_a_wait_may_be_for_ever(serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path) -> None:
    serve(tmp_path)
    node.staged = [weights[0].stage_full()]
    with attach_engine(InProcessEngine(make_model()), data_dir=tmp_path) as subscriber:
        assert subscriber.step(float("inf")) == Version(0, 0)


def test_an_update_whose_memory_is_gone_says_so(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    serve(tmp_path)
    node.staged = [weights[0].stage_full(), weights[1].stage_from(weights[0])]
    with Client(tmp_path) as client:
        full = client.next_update(None)
        assert full is not None
        full.open_region().close()
        with pytest.raises(LocalProtocolError, match=r"to 0\.0 was closed, or its region opened before"):
            full.open_region()
        assert client.confirm(full.version, ok=True)
        records = client.next_update(full.version)
        assert records is not None
        records.close()
        with pytest.raises(LocalProtocolError, match="was closed"):
            records.read_changes()


def test_a_daemon_that_comes_back_is_followed_on(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsenet.serving.subscriber.UPDATE_WAIT_SECONDS", 0.1)
    serve(tmp_path)
    arrived, away = threading.Event(), threading.Event()
    engine = InProcessEngine(make_model())
    node.staged = [weights[0].stage_full()]
    with attach_engine(engine, data_dir=tmp_path, on_failure=lambda _: away.set()) as subscriber:
        subscriber.step()
        subscriber._on_update = lambda _: arrived.set()
        path = subscriber._client.path
        path.rename(path.with_name("away"))
        subscriber._client._drop_engine()
        subscriber.start()
        assert away.wait(30)
        assert isinstance(subscriber.last_failure, UnavailableError)
        node.staged = [weights[1].stage_from(weights[0])]
        path.with_name("away").rename(path)
        assert arrived.wait(30)
        assert engine.version == Version(0, 1)
    assert node.asked[:2] == [None, Version(0, 0)]


def test_no_descriptor_stays_behind(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path, open_descriptors: Callable[[], int]
) -> None:
    serve(tmp_path)
    engine = InProcessEngine(make_model())
    with attach_engine(engine, data_dir=tmp_path) as subscriber:
        node.staged = [weights[0].stage_full()]
        subscriber.step()
        before = open_descriptors()
        for _ in range(5):
            node.staged = [weights[1].stage_from(weights[0]), weights[0].stage_full()]
            subscriber.step()
            subscriber.step()
        assert open_descriptors() <= before


@pytest.mark.parametrize("is_running", [False, True])
def test_closing_closes_the_engines_connection(
    serve: Serve,
    node: Any,
    weights: Sequence[Any],
    tmp_path: Path,
    open_descriptors: Callable[[], int],
    is_running: bool,
) -> None:
    """Whether it waits for an update or not; a traceback that is kept keeps no descriptor."""
    serve(tmp_path)
    before = open_descriptors()
    node.staged = [weights[0].stage_full()]
    applied = threading.Event()
    subscriber = attach_engine(InProcessEngine(make_model()), data_dir=tmp_path, on_update=lambda _: applied.set())
    if is_running:
        subscriber.start()
        assert applied.wait(30)
    else:
        subscriber.step()
    subscriber.close()
    wait_until(lambda: open_descriptors() <= before)


def test_rollouts_are_stamped_and_handed_over(serve: Serve, node: Any, tmp_path: Path) -> None:
    serve(tmp_path)
    with attach_engine(InProcessEngine(make_model()), data_dir=tmp_path) as subscriber:
        taken = subscriber.submit_rollouts(
            [Sample([1, 2], [3], [-0.25], 1.0)],
            version_first=Version(0, 3),
            version_last=Version(0, 4),
            metadata={"task": "sum"},
        )
        assert subscriber.status()["role"] == "trainer"
    assert taken.accepted
    (batch,) = node.rollouts
    assert (batch.version_first, batch.version_last) == (Version(0, 3), Version(0, 4))
    assert batch.metadata == '{"task": "sum"}'


def test_tasks_come_one_after_another_and_are_answered_by_a_batch(serve: Serve, node: Any, tmp_path: Path) -> None:
    serve(tmp_path)
    node.tasks.given = [
        GivenTask(PeerId(bytes(32)), bytes([number]) * 16, content, 1_000)
        for number, content in enumerate(['{"prompt": 0}', "no JSON", '{"prompt": 2}'])
    ]
    with attach_engine(InProcessEngine(make_model()), data_dir=tmp_path) as subscriber:
        tasks = list(subscriber.tasks(count_max=2, timeout_seconds=0.0))
        assert [(task.content, task.lease_seconds) for task in tasks] == [({"prompt": 0}, 1.0), ({"prompt": 2}, 1.0)]
        samples, version = [Sample([1], [2], [-0.25], 1.0)], Version(0, 3)
        subscriber.submit_rollouts(samples, version_first=version, version_last=version, tasks=tasks)
        assert next(subscriber.tasks(timeout_seconds=0.0), None) is None
        node.tasks.given = [GivenTask(PeerId(bytes(32)), bytes(16), "{}", 1_000)]
        assert next(subscriber.tasks()).content == {}
    assert node.rollouts[0].task_ids == (bytes(16), bytes([2]) * 16)


def test_a_node_without_tasks_says_so(serve: Serve, node: Any, tmp_path: Path) -> None:
    node.tasks = None
    serve(tmp_path)
    with (
        attach_engine(InProcessEngine(make_model()), data_dir=tmp_path) as subscriber,
        pytest.raises(RemoteProtocolError, match="has no tasks"),
    ):
        next(subscriber.tasks())


def test_a_busy_daemon_is_asked_again_while_there_is_time(serve: Serve, node: Any, tmp_path: Path) -> None:
    serve(tmp_path)
    busy = RolloutsTaken(False, "busy: full", 20)
    samples, version = [Sample([1], [2], [-0.25], 1.0, {"right": 1.0})], Version(0, 3)
    with attach_engine(InProcessEngine(make_model()), data_dir=tmp_path) as subscriber:
        submit = partial(subscriber.submit_rollouts, samples, version_first=version, version_last=version)
        node.rollout_answers = [busy]
        assert submit() == busy
        node.rollout_answers = [busy, busy]
        assert submit(timeout_seconds=10.0, logprob_bits=16).accepted
        node.rollout_answers = [RolloutsTaken(False, "rollouts-shape")]
        assert not submit(timeout_seconds=10.0).accepted
    assert len(node.rollouts) == 5
    assert (node.rollouts[1].logprob_bits, node.rollouts[1].part_names) == (16, ("right",))


def test_without_a_daemon_attach_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="start it with 'pulsenet join --role inferencer --run mine'"):
        attach_engine(InProcessEngine(make_model()), "mine")


def test_a_process_without_descriptors_is_no_reason_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    client = Client(tmp_path)
    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(UnavailableError, match="Too many open files"):
        client.next_update(None)


def test_a_failure_of_a_file_with_an_odd_name_is_told_too(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path
) -> None:
    serve(tmp_path)

    class Full(InProcessEngine):
        def commit(self) -> None:
            raise StorageError("no room in /models/\udcff", "enospc")

    node.staged = [weights[0].stage_full()]
    with (
        attach_engine(Full(make_model()), data_dir=tmp_path) as subscriber,
        pytest.raises(StorageError, match="no room"),
    ):
        subscriber.step()
    assert node.confirmations[0].reason == "enospc: no room in /models/\\udcff"
