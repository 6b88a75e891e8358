"""Training processes of the end-to-end tests: started, killed, and read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from swarm import Node, Swarm, make_environment, open_swarm, wait_until

WAIT_SECONDS = 200.0
"""Long enough for a machine that does other things; a round takes a second or two."""

SCRIPT = Path(__file__).with_name("round_trainer.py")


class Training:
    """The training process beside a trainer's daemon, and what it printed."""

    def __init__(self, swarm: Swarm, node: Node, seed: int, *options: object, script: Path = SCRIPT) -> None:
        self.node, self._seed, self._options, self._script = node, seed, options, script
        self._swarm = swarm
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = swarm.directory / f"{node.name}-training.log"
        self.checkpoint = swarm.directory / f"{node.name}.checkpoint"

    def start(self) -> None:
        options = ["--data-dir", self.node.data_dir, "--checkpoint", self.checkpoint, "--seed", self._seed]
        command = [sys.executable, self._script, *options, "--goal", self._swarm.directory / "goal", *self._options]
        with self.log_path.open("ab") as log:
            environment = make_environment(self._swarm.home())
            self._process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        """Kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait_end(self) -> None:
        assert self._process is not None
        assert self._process.wait(WAIT_SECONDS) == 0, self.log_path.read_text()[-3000:]

    @property
    def told(self) -> list[dict[str, Any]]:
        """Every line it printed, of all its lives."""
        lines = self.log_path.read_text().splitlines() if self.log_path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    @property
    def round_index(self) -> int:
        return max((line.get("round_index", 0) for line in self.told), default=0)

    @property
    def roots(self) -> dict[int, str]:
        """State root by round, of the newest life that reached it."""
        return {line["round_index"]: line["root"] for line in self.told if "round_index" in line}

    @property
    def counted(self) -> int:
        """How many contributions of this trainer were counted, as far as it heard."""
        return sum(line.get("outcome") == "counted" for line in self.told)

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        def read() -> bool:
            assert self._process is not None
            assert self._process.poll() in (None, 0), self.log_path.read_text()[-3000:]
            return holds()

        wait_until(f"{self.node.name}: {what}", read, WAIT_SECONDS)


class Story(Protocol):
    """What trainers did together, told once; the tests of a file look at it."""

    training: dict[str, Training]

    def tell(self) -> None:
        """Let it happen."""
        ...


Told = TypeVar("Told", bound=Story)


@contextmanager
def tell_story(make: Callable[[Swarm], Told]) -> Iterator[Told]:
    """Yield a story that was told in a swarm of its own, which ends with it."""
    with open_swarm() as swarm:
        story = make(swarm)
        try:
            story.tell()
            yield story
        finally:
            for training in story.training.values():
                training.kill()


def check_equal_bits(trainings: Iterable[Training], goal: int) -> None:
    """Require one state root of each round from all who reached it, and that all reached the goal."""
    roots = [training.roots for training in trainings]
    for round_index in range(1, goal + 1):
        assert len({told[round_index] for told in roots if round_index in told}) == 1, f"round {round_index}"
    assert len({told[goal] for told in roots}) == 1
