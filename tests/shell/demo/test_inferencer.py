"""The engine process: it samples once per version, survives its node's absence, and stops at the last version."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import UnavailableError
from pulsenet.ids import Version
from pulsenet.local.protocol import RolloutsTaken
from pulsenet.local.rollouts import Sample
from pulsenet.serving.engine import FullUpdate, apply_update
from pulsenet.tensors.digest import compute_region_root
from pulsenet.training.snapshot import take_snapshot
from pulsenetd.demo import inferencer
from pulsenetd.demo.inferencer import WatchedEngine, Worker
from pulsenetd.demo.models import load_empty, load_masters
from pulsenetd.demo.reports import Applied, Report, Sampled, read_report
from pulsenetd.demo.rollouts import Sampler
from pulsenetd.demo.settings import SETTINGS


def make_full_update(number: int) -> FullUpdate:
    """Return the tiny model's first weights as a whole version."""
    masters, _ = load_masters("tiny")
    snapshot = take_snapshot(masters)
    region = np.zeros(snapshot.table.layout_size_bytes, dtype=np.uint8)
    for tensor_index, offset_bytes, data in snapshot.blocks():
        start = snapshot.table.offsets[tensor_index] + offset_bytes
        region[start : start + data.size] = data
    root = compute_region_root(snapshot.table, region)
    return FullUpdate(version=Version(0, number), root=root, table=snapshot.table, region=region)


class ScriptedSubscriber:
    """Stands in for the node: each call of ``step`` does the next thing of a script."""

    def __init__(self, engine: WatchedEngine, script: Iterable[Callable[[], Version | None]]) -> None:
        self.engine = engine
        self.script = iter(script)
        self.submitted: list[tuple[Version, int]] = []
        self.accepts = True

    def step(self, timeout_seconds: float) -> Version | None:
        return next(self.script)()

    def submit_rollouts(self, samples: list[Sample], *, version_first: Version, version_last: Version) -> RolloutsTaken:
        assert version_first == version_last
        self.submitted.append((version_first, len(samples)))
        return RolloutsTaken(self.accepts, "" if self.accepts else "rate")


def make_worker(script: Callable[[WatchedEngine], Iterable[Callable[[], Version | None]]]) -> Any:
    model, tokenizer = load_empty("tiny")
    engine = WatchedEngine(model)
    subscriber = ScriptedSubscriber(engine, script(engine))
    sampler = Sampler(model, tokenizer, seed=1)
    worker = Worker(SETTINGS["tiny"], subscriber, engine, sampler, random.Random(1), 2)  # type: ignore[arg-type]
    return worker, subscriber, model


def read_reports(capsys: pytest.CaptureFixture[str]) -> list[Report | None]:
    return [read_report(line) for line in capsys.readouterr().out.splitlines()]


def test_one_batch_per_version_until_the_last_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    final_file = tmp_path / "final"

    def script(engine: WatchedEngine) -> Iterable[Callable[[], Version | None]]:
        def load(number: int) -> Version:
            apply_update(engine, make_full_update(number))
            return Version(0, number)

        def finish() -> None:
            final_file.write_text("0.2")

        return [lambda: None, lambda: load(1), lambda: None, lambda: load(2), finish]

    worker, subscriber, model = make_worker(script)
    assert worker.follow(final_file) == Version(0, 2)
    assert subscriber.submitted == [(Version(0, 1), 16), (Version(0, 2), 16)]
    assert worker.engine.root == make_full_update(2).root.hex()
    kinds = [type(report) for report in read_reports(capsys)]
    assert kinds == [Applied, Sampled, Applied, Sampled]
    masters, _ = load_masters("tiny")
    for mine, theirs in zip(model.parameters(), masters.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16))


def test_a_node_that_is_away_is_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inferencer, "RETRY_SECONDS", 0.0)
    final_file = tmp_path / "final"
    final_file.write_text("0.1")

    def script(engine: WatchedEngine) -> Iterable[Callable[[], Version | None]]:
        def fail() -> None:
            raise UnavailableError("the daemon went away")

        def load() -> Version:
            apply_update(engine, make_full_update(1))
            return Version(0, 1)

        return [fail, load]

    worker, subscriber, _ = make_worker(script)
    assert worker.follow(final_file) == Version(0, 1)
    assert subscriber.submitted == []
    assert "the daemon went away" in capsys.readouterr().err


def test_refused_rollouts_are_said_and_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    final_file = tmp_path / "final"

    def script(engine: WatchedEngine) -> Iterable[Callable[[], Version | None]]:
        def load() -> Version:
            apply_update(engine, make_full_update(1))
            return Version(0, 1)

        return [load, lambda: final_file.write_text("0.1") and None]

    worker, subscriber, _ = make_worker(script)
    subscriber.accepts = False
    worker.follow(final_file)
    captured = capsys.readouterr()
    assert "refused by the node: rate" in captured.err
    assert "sampled" not in captured.out
