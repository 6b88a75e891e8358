"""Trainers on machines of their own mix without a barrier: real daemons, real training processes, one killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from round_training import Training, tell_story
from swarm import Swarm, run_json, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
pytest.importorskip("torch")

RUN = "mixing"
LOOPBACK = "--listen=/ip4/127.0.0.1/tcp/0"
NAMES = ("first", "second", "third")
SCRIPT = Path(__file__).with_name("mix_trainer.py")
STUCK_SECONDS = 1.5
"""A Mix2 that is open for so long waits for somebody."""


class Mixer(Training):
    """A training process that mixes, and its reports."""

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [line for line in self.told if "mix2_count" in line]

    @property
    def mixed_count(self) -> int:
        """Rounds in which somebody else's values came."""
        return sum(max(line["mix1_count"], line["mix2_count"]) > 1 for line in self.reports)

    @property
    def has_mixed_again(self) -> bool:
        """Whether somebody else's values came in a Mix2 since it came back."""
        lines = iter(self.told)
        return any("resumed_at" in line for line in lines) and any(line.get("mix2_count", 0) > 1 for line in lines)

    def has_reported(self, round_index: int) -> bool:
        return any(line["round_index"] == round_index for line in self.reports)


class Story:
    """What happened, told once; the tests look at it."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.seen: dict[str, Any] = {}
        self.goal = 0
        owner = swarm.home("owner")
        self.nodes = {
            name: swarm.add(name, "trainer", f"--run={RUN}", LOOPBACK, run=RUN, home="owner") for name in NAMES
        }
        keys = {
            name: run_json("keygen", str(node.data_dir / "identity.key"), home=owner)["public_key"]
            for name, node in self.nodes.items()
        }
        options = [f"--authority={keys[name]}" for name in NAMES] + [f"--trainer={keys[name]}" for name in NAMES]
        constants = "--algorithm gossip --variant local_m1_m2 --inner-steps 4 --roster-rounds 4 --probe-interval 2"
        waits = "--mix1-wait-seconds 3 --mix2-wait-seconds 15"
        run_json("run", "create", RUN, *options, *constants.split(), *waits.split(), home=owner)
        self.training: dict[str, Mixer] = {
            name: Mixer(swarm, self.nodes[name], seed, "--step-seconds", "0.1", script=SCRIPT)
            for seed, name in enumerate(NAMES)
        }

    def tell(self) -> None:
        third = self.training["third"]
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            node.wait_ready()
        for training in self.training.values():
            training.start()
        for training in self.training.values():
            training.wait("it mixed twice", lambda training=training: training.mixed_count >= 2)  # type: ignore[misc]
        self._fell_a_partner()
        others = [self.training[name] for name in NAMES if name != "third"]
        for training in others:
            training.wait("it goes on", lambda training=training: self._went_on(training))  # type: ignore[misc]
        third.node.start().wait_ready()
        third.start()
        third.wait("it mixes again", lambda: third.has_mixed_again)
        # What a probe came to, members read in the roster after it.
        for name, node in self.nodes.items():
            wait_until(f"{name} knows what a probe came to", lambda node=node: node.status["disagreement"], 60.0)  # type: ignore[misc]
        self.goal = max(training.round_index for training in self.training.values()) + 3
        (self.swarm.directory / "goal").write_text(str(self.goal))
        for training in self.training.values():
            training.wait_end()
        self.seen["status"] = {name: node.status for name, node in self.nodes.items()}
        self.seen["metrics"] = {name: node.get("/metrics")[1] for name, node in self.nodes.items()}

    def _fell_a_partner(self) -> None:
        """Hold the third process up until somebody waits for it in Mix2, then kill it and its node."""
        third = self.training["third"]
        for _ in range(20):
            third.send_signal(signal.SIGSTOP)
            stuck = self._find_stuck()
            if stuck is not None:
                break
            third.send_signal(signal.SIGCONT)  # it was the odd one out: another round, another matching
            time.sleep(0.3)
        else:
            raise AssertionError("nobody ever waited for the third trainer in Mix2")
        name, round_index = stuck
        bystander = next(other for other in NAMES if other not in (name, "third"))
        self.seen |= {"partner": name, "round": round_index, "bystander": bystander}
        third.kill()
        third.node.kill()

    def _find_stuck(self) -> tuple[str, int] | None:
        give_up_at, since = time.monotonic() + 8.0, dict[str, tuple[int, float]]()
        while time.monotonic() < give_up_at:
            for name, other in (("first", "second"), ("second", "first")):
                status = self.nodes[name].status
                place = status["mixing_round"]
                if not self._waits(status) or not self.training[other].has_reported(place):
                    since.pop(name, None)
                elif since.setdefault(name, (place, time.monotonic()))[0] != place:
                    since[name] = (place, time.monotonic())
                elif time.monotonic() - since[name][1] > STUCK_SECONDS:
                    return name, place
            time.sleep(0.1)
        return None

    @staticmethod
    def _waits(status: dict[str, Any]) -> bool:
        """Whether a partner's values are all that is missing; the other one may be slow too, until it has reported."""
        mix1, mix2 = status["mixing_mix1"], status["mixing_mix2"]
        return bool(status["mixing_phase"] == "mixing" and mix1 != "open" and mix2 == "open")

    def _went_on(self, training: Mixer) -> bool:
        return training.has_reported(self.seen["round"]) and training.round_index >= self.seen["round"] + 3


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with tell_story(Story) as told:
        yield told


def report_of(story: Story, name: str, round_index: int) -> dict[str, Any]:
    (found,) = [line for line in story.training[name].reports if line["round_index"] == round_index]
    return found


def test_a_partner_that_dies_in_mix2_costs_its_values_and_nothing_else(story: Story) -> None:
    """A-GOS-1: the other side ends the round with its own value, and so does the run."""
    report = report_of(story, story.seen["partner"], story.seen["round"])
    assert report["mix2_count"] == 1
    assert report["mix2_reason"] in ("late", "lost")
    assert report["is_listed"]
    assert report_of(story, story.seen["bystander"], story.seen["round"])["mix2_reason"] == "", "nobody else waited"


def test_no_round_is_aborted(story: Story) -> None:
    for name in ("first", "second"):
        rounds = [line["round_index"] for line in story.training[name].reports]
        assert rounds == sorted(set(rounds))
        assert rounds[-1] == story.goal - 1


def test_the_killed_one_comes_back_and_mixes(story: Story) -> None:
    third = story.training["third"]
    (resumed,) = [line for line in third.told if "resumed_at" in line]
    assert resumed["resumed_at"] <= story.seen["round"]
    assert third.has_mixed_again


def test_mixing_is_shown_and_counted(story: Story) -> None:
    for name in NAMES:
        status = story.seen["status"][name]
        assert status["mixing_variant"] == "local_m1_m2"
        assert status["consensus"] is False
        assert 0.0 < status["utilization_ratio"] <= 1.0
        assert 0.0 < status["disagreement"] < 1.0, "an answer of every second round was compared"
        assert status["disagreement_round"] % 2 == 0
        assert "pulsenet_mixes_total" in story.seen["metrics"][name]
    texts = story.seen["metrics"].values()
    assert any("pulsenet_rosters_total 0.0" not in text for text in texts)
    assert any('pulsenet_probes_total{outcome="compared"}' in text for text in texts), "by the coordinator"
    # The one that was killed counts anew, and may have been the odd one out in every probe since.
    assert any('pulsenet_probes_total{outcome="answered"}' in text for text in texts)
    assert all("pulsenet_disagreement NaN" not in text for text in texts)
