"""What a rank does when its node is gone."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pulsenet.errors import UnavailableError
from pulsenet.serving.vllm import watchdog
from pulsenet.serving.vllm.exchange import LOCK_NAME, PAUSED_NAME, Answer, Order, Outcome, State
from pulsenet.serving.vllm.watchdog import Action, Watchdog, decide, is_locked


def answer(state: State, held: str | None = "0.1", root: str | None = "aa") -> Answer:
    return Answer(0, 2, "boot", "t", Order.COMMIT, Outcome.DONE, state, True, held, root)


READY, STAGED = answer(State.READY), answer(State.STAGED)


@pytest.mark.parametrize(
    ("rank", "state", "answers", "is_paused", "action"),
    [
        (0, State.COMMITTED, [READY, READY], True, Action.ROLL_BACK),
        (1, State.COMMITTED, [READY, READY], True, Action.ROLL_BACK),
        (0, State.READY, [READY, STAGED], True, Action.RESUME),
        (1, State.READY, [READY, READY], True, Action.NOTHING),
        (0, State.READY, [READY, READY], False, Action.NOTHING),
        (0, State.READY, [READY, answer(State.COMMITTED)], True, Action.NOTHING),
        (0, State.READY, [READY, None], True, Action.NOTHING),
        (0, State.READY, [READY, answer(State.READY, held="0.2", root="bb")], True, Action.NOTHING),
        (0, State.READY, [answer(State.READY, None), answer(State.READY, None)], True, Action.RESUME),
        (0, State.UNKNOWN, [answer(State.UNKNOWN, None), answer(State.UNKNOWN, None)], True, Action.NOTHING),
    ],
)
def test_each_rank_puts_back_its_own_and_the_first_resumes_for_all(
    rank: int, state: State, answers: list[Answer | None], is_paused: bool, action: Action
) -> None:
    assert decide(rank, state, answers, is_paused=is_paused) is action


def test_an_engine_whose_weights_are_a_mix_is_resumed_in_no_case() -> None:
    """A-APP-1."""
    states = [State.READY, State.STAGED, State.COMMITTED, State.UNKNOWN, State.NEW]
    for first, second in itertools.product(states, states):
        for held in ("0.1", "0.2"):
            action = decide(0, first, [answer(first), answer(second, held)], is_paused=True)
            is_whole = {first, second} <= {State.READY, State.STAGED} and held == "0.1"
            assert (action is Action.RESUME) == is_whole


class Servant(SimpleNamespace):
    """A rank that says what the test wants and writes down what it is asked."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__(
            directory=directory, rank=0, state=State.READY, engine_url="http://127.0.0.1:1", rolled_back=0, forgot=False
        )

    def others(self) -> list[Answer | None]:
        return [answer(self.state)]

    def roll_back_alone(self) -> None:
        self.rolled_back += 1
        self.state = State.READY

    def is_commit_forgotten(self, seconds_max: float) -> bool:
        return bool(self.forgot)


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the URLs that were resumed."""
    urls: list[str] = []

    class Control:
        def __init__(self, url: str) -> None:
            self._url = url

        def resume(self) -> None:
            urls.append(self._url)
            if len(urls) == 1:
                raise UnavailableError("not yet")

    monkeypatch.setattr(watchdog, "HttpControl", Control)
    return urls


def test_a_commit_is_put_back_then_the_engine_resumed_as_often_as_it_takes(tmp_path: Path, resumed: list[str]) -> None:
    servant: Any = Servant(tmp_path)
    servant.state = State.COMMITTED
    (tmp_path / PAUSED_NAME).write_text("t")
    dog = Watchdog(servant)
    dog.look()
    assert (servant.rolled_back, resumed) == (1, [])
    dog.look()
    assert resumed == ["http://127.0.0.1:1"]
    assert (tmp_path / PAUSED_NAME).exists()
    dog.look()
    assert len(resumed) == 2
    assert not (tmp_path / PAUSED_NAME).exists()
    dog.look()
    assert len(resumed) == 2


def test_a_node_is_gone_when_nobody_holds_its_lock_or_it_forgot_a_commit(tmp_path: Path) -> None:
    servant: Any = Servant(None)
    dog = Watchdog(servant)
    assert not dog.is_node_gone()
    servant.directory = tmp_path
    assert dog.is_node_gone()
    with (tmp_path / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(tmp_path / LOCK_NAME)
        assert not dog.is_node_gone()
        servant.forgot = True
        assert dog.is_node_gone()
    assert not is_locked(tmp_path / LOCK_NAME)
    assert not is_locked(tmp_path / "none")
    assert len(os.listdir("/proc/self/fd")) < 200


def test_an_engine_without_descriptors_does_not_take_its_node_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    (tmp_path / LOCK_NAME).touch()
    monkeypatch.setattr(os, "open", refuse)
    assert is_locked(tmp_path / LOCK_NAME)


def test_a_look_that_fails_is_not_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.03)
    servant: Any = Servant(tmp_path)
    (tmp_path / PAUSED_NAME).write_text("t")
    faults = [RuntimeError("no device")]

    def list_others() -> list[Answer | None]:
        if faults:
            raise faults.pop()
        return [READY]

    servant.others = list_others
    dog = Watchdog(servant)
    dog.start()
    give_up_at = time.monotonic() + 30
    while (tmp_path / PAUSED_NAME).exists() and time.monotonic() < give_up_at:
        time.sleep(0.01)
    dog.stop()
    assert len(resumed) == 2
    assert "cannot look after the engine: no device" in capsys.readouterr().out


def test_the_thread_waits_out_a_grace_and_stops_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: list[str]
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.03)
    servant: Any = Servant(tmp_path)
    servant.state = State.COMMITTED
    (tmp_path / PAUSED_NAME).write_text("t")
    dog = Watchdog(servant)
    looks = []
    is_node_gone = dog.is_node_gone

    def note() -> bool:
        looks.append(servant.rolled_back)
        return is_node_gone()

    monkeypatch.setattr(dog, "is_node_gone", note)
    dog.start()
    while (tmp_path / PAUSED_NAME).exists():
        pass
    dog.stop()
    assert servant.rolled_back == 1
    assert looks[:3] == [0, 0, 0]
