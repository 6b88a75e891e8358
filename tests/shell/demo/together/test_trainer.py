"""One training process of several: what it reports, and that it goes on from its checkpoint."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import UnavailableError
from pulsenet.outer.settings import OuterSettings
from pulsenet.training import LocalExchange
from pulsenetd.demo.models import load_masters
from pulsenetd.demo.together import trainer
from pulsenetd.demo.together.settings import SETTINGS
from pulsenetd.demo.together.trainer import Learner


class Joined:
    """A member of a swarm in this process, with the end of a connection to a node."""

    def __init__(self, swarm: LocalExchange, index: int) -> None:
        self._member = swarm.member(index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)

    def close(self) -> None:
        pass


def make_learner(swarm: LocalExchange, shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Learner:
    monkeypatch.setattr(trainer, "join_rounds", lambda data_dir: Joined(swarm, int(data_dir.name)))
    model, tokenizer = load_masters("tiny")
    checkpoint = tmp_path / f"{shard}.pt"
    return Learner(
        model, tokenizer, SETTINGS["tiny"], data_directory=Path(str(shard)), shard=shard, checkpoint=checkpoint
    )


def read_reports(capsys: pytest.CaptureFixture[str], kind: str) -> list[dict[str, Any]]:
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [report for report in reports if report["report"] == kind]


def test_trainers_of_other_shards_end_with_equal_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm = LocalExchange(OuterSettings(inner_steps=2), 2)
    learners = [make_learner(swarm, shard, tmp_path, monkeypatch) for shard in (0, 1)]
    threads = [threading.Thread(target=learner.run, args=(2,)) for learner in learners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rounds = read_reports(capsys, "round")
    assert sorted(report["round_index"] for report in rounds) == [0, 0, 1, 1]
    assert {report["outcome"] for report in rounds} == {"counted"}
    assert {report["contributor_count"] for report in rounds} == {2}
    assert len({report["loss"] for report in rounds}) == 4
    assert learners[0].sync.state_root == learners[1].sync.state_root


def test_a_process_that_died_catches_up_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm = LocalExchange(OuterSettings(inner_steps=2), 1)
    make_learner(swarm, 0, tmp_path, monkeypatch).run(2)
    held = (tmp_path / "0.pt").read_bytes()
    make_learner(swarm, 0, tmp_path, monkeypatch).run(3)
    (tmp_path / "0.pt").write_bytes(held)
    capsys.readouterr()
    make_learner(swarm, 0, tmp_path, monkeypatch).run(4)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    resumed = {"report": "resumed", "checkpoint_round_index": 2, "round_index": 3}
    assert printed[0] == resumed
    assert [report["round_index"] for report in printed[1:]] == [3]


def test_a_receipt_that_is_late_is_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = LocalExchange(OuterSettings(inner_steps=1), 1)
    learner = make_learner(swarm, 0, tmp_path, monkeypatch)
    step, failures = learner.sync.step, [UnavailableError("no receipt yet"), UnavailableError("no receipt yet")]

    def step_late() -> Any:
        if failures:
            raise failures.pop()
        return step()

    monkeypatch.setattr(learner.sync, "step", step_late)
    learner.run(1)
    assert learner.sync.round_index == 1


def test_an_exchange_that_never_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner(LocalExchange(OuterSettings(inner_steps=1), 1), 0, tmp_path, monkeypatch)

    def fail() -> Any:
        raise UnavailableError("no receipt yet")

    monkeypatch.setattr(learner.sync, "step", fail)
    with pytest.raises(UnavailableError, match="no receipt yet"):
        learner.run(1)
