"""The coordinator's daemon dies at every moment of a round at which its training process speaks to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from round_training import Training, check_equal_bits, tell_story
from swarm import Swarm, run_json

pytest.importorskip("torch")
pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]

RUN = "mortal"
LOOPBACK = "--listen=/ip4/127.0.0.1/tcp/0"
NAMES = ("first", "second")
MOMENTS = ("before-OfferContribution", "after-OfferContribution", "before-Checked", "before-Stepped", "after-Stepped")


class Story:
    """What happened, told once; the tests look at it."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.goal = 0
        self.deaths: dict[str, int] = {}
        """Round of the coordinator's training process at each death."""
        owner = swarm.home("owner")
        self.nodes = {
            name: swarm.add(name, "trainer", f"--run={RUN}", LOOPBACK, run=RUN, home="owner") for name in NAMES
        }
        keys = {
            name: run_json("keygen", str(node.data_dir / "identity.key"), home=owner)["public_key"]
            for name, node in self.nodes.items()
        }
        options = [f"--authority={keys['first']}", *(f"--trainer={keys[name]}" for name in NAMES)]
        constants = "--algorithm pulseloco --inner-steps 2 --contribution-wait-seconds 60 --state-anchor-interval 3"
        run_json("run", "create", RUN, *options, *constants.split(), home=owner)
        self.pauses: Path = swarm.directory / "pauses"
        self.pauses.mkdir()
        self.training = {
            "first": Training(swarm, self.nodes["first"], 0, "--pauses", self.pauses),
            "second": Training(swarm, self.nodes["second"], 1),
        }

    def tell(self) -> None:
        first, node = self.training["first"], self.nodes["first"]
        for each in self.nodes.values():
            each.start()
        for each in self.nodes.values():
            each.wait_ready()
        for training in self.training.values():
            training.start()
        first.wait("a round is over", lambda: first.round_index >= 1)
        for moment in MOMENTS:
            (self.pauses / moment).touch()
            first.wait(f"it is {moment}", lambda moment=moment: {"paused": moment} in first.told)
            self.deaths[moment] = first.round_index
            node.kill()
            node.start().wait_ready()
            (self.pauses / moment).unlink()
            goal = first.round_index + 2
            first.wait("it goes on", lambda goal=goal: first.round_index >= goal)
        self.goal = max(training.round_index for training in self.training.values()) + 2
        (self.swarm.directory / "goal").write_text(str(self.goal))
        for training in self.training.values():
            training.wait_end()


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with tell_story(Story) as told:
        yield told


def test_the_trainers_agree_on_every_round_whenever_it_died(story: Story) -> None:
    check_equal_bits(story.training.values(), story.goal)
    assert set(story.deaths) == set(MOMENTS)


def test_every_contribution_was_counted_once_and_none_was_lost(story: Story) -> None:
    for training in story.training.values():
        outcomes: list[Any] = [line["outcome"] for line in training.told if "outcome" in line]
        assert outcomes.count("counted") == story.goal, outcomes
        assert set(outcomes) <= {"counted", "deferred"}
        assert {line["contributors"] for line in training.told if line.get("outcome") == "counted"} == {2}
