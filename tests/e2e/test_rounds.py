"""Trainers on machines of their own train together: real daemons, real training processes, rounds between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from round_training import Training, check_equal_bits, tell_story
from swarm import Swarm, run_json

pytestmark = pytest.mark.e2e
pytest.importorskip("torch")

RUN = "together"
LOOPBACK = "--listen=/ip4/127.0.0.1/tcp/0"


class Story:
    """What happened, told once; the tests look at it."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.seen: dict[str, Any] = {}
        self.goal = 0
        owner = swarm.home("owner")
        names = ("first", "second", "third")
        # An authority that trains nothing: it votes and countersigns, so that two of three are enough.
        self.nodes = {
            name: swarm.add(name, "trainer", f"--run={RUN}", LOOPBACK, run=RUN, home="owner") for name in names
        }
        self.voter = swarm.add("voter", "seed", f"--run={RUN}", LOOPBACK, run=RUN, home="owner")
        self.inferencer = swarm.add("reader", "inferencer", f"--run={RUN}", LOOPBACK, run=RUN, home="owner")
        keys = {
            name: run_json("keygen", str(node.data_dir / "identity.key"), home=owner)["public_key"]
            for name, node in {**self.nodes, "voter": self.voter}.items()
        }
        options = [f"--authority={keys[name]}" for name in ("first", "second", "voter")]
        options += [f"--trainer={keys[name]}" for name in names]
        constants = "--algorithm pulseloco --inner-steps 2 --contribution-wait-seconds 3 --state-anchor-interval 4"
        run_json("run", "create", RUN, *options, *constants.split(), home=owner)
        # Trainers that hurry leave no processor to a node that starts.
        self.training = {
            name: Training(swarm, self.nodes[name], seed, "--step-seconds", 0.2) for seed, name in enumerate(names)
        }

    def tell(self) -> None:
        first, third = self.training["first"], self.training["third"]
        for node in (*self.nodes.values(), self.voter):
            node.start()
        for node in (*self.nodes.values(), self.voter):
            node.wait_ready()
        self.inferencer.start()
        for training in self.training.values():
            training.start()
        third.wait("it counted twice", lambda: third.counted >= 2)
        third.kill()
        third.node.kill()
        self.seen["killed at"], counted = third.round_index, third.counted
        first.wait("it went on", lambda: first.round_index >= third.round_index + 2)
        # A training process waits a few seconds for news, which comes from peers.
        third.node.start().wait_ready().wait_status("it has peers again", lambda status: status["peers"] >= 3)
        third.start()
        third.wait("it counts again", lambda: third.counted > counted)
        self.goal = goal = max(training.round_index for training in self.training.values()) + 2
        (self.swarm.directory / "goal").write_text(str(goal))
        for training in self.training.values():
            training.wait_end()
        self.seen["status"] = {
            name: node.wait_status("it is at the goal", lambda status: status["round_index"] == goal)
            for name, node in self.nodes.items()
        }
        self.seen["voter"] = self.voter.wait_status("it knows all", lambda status: status["round_index"] == goal)
        _, self.seen["metrics"] = self.nodes["first"].get("/metrics")
        self.seen["reader"] = self.inferencer.wait_status(
            "it follows the trainers", lambda status: status["applied_version"] == goal + 1
        )
        self.seen["status line"] = run_json("status", "--run", RUN, home=self.swarm.home("owner"))


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with tell_story(Story) as told:
        yield told


def test_all_trainers_hold_equal_bits_after_every_round(story: Story) -> None:
    check_equal_bits(story.training.values(), story.goal)
    assert story.goal >= 5
    roots = [training.roots for training in story.training.values()]
    assert len({told[index] for told in roots for index in told}) == story.goal + 1, "every round moves the state"


def test_a_killed_trainer_goes_on_from_its_checkpoint(story: Story) -> None:
    """A-LOC-4, and the resume of section 6.10: what it missed is replayed, and it counts again."""
    told = story.training["third"].told
    (resumed,) = [line for line in told if "resumed_at" in line]
    # It saves after each step, and a step may go through several rounds: its last one was saved, or the one before.
    last = [line for line in told[: told.index(resumed)] if "offered" in line][-1]
    assert resumed["resumed_at"] in (last["offered"][0], last["round_index"])
    assert last["round_index"] == story.seen["killed at"]
    after = told[told.index(resumed) + 1]
    assert after["caught_up"] >= 2
    assert "counted" in [line["outcome"] for line in told[told.index(after) :] if "outcome" in line]


def test_the_others_went_on_without_it(story: Story) -> None:
    for name in ("first", "second"):
        outcomes = [line["outcome"] for line in story.training[name].told if "outcome" in line]
        assert set(outcomes) <= {"counted", "missed", "deferred"}
        assert outcomes.count("counted") >= story.goal // 2


def test_an_authority_that_trains_nothing_knows_the_rounds(story: Story) -> None:
    assert story.seen["voter"]["rounds_phase"] == "watching"
    assert story.seen["voter"]["round_contributors"] >= 1


def test_inferencers_follow_the_trainers_with_no_extra_code(story: Story) -> None:
    """The start of the rounds is version 1, and each round makes the next."""
    assert story.seen["reader"]["applied_version"] == story.goal + 1
    assert story.seen["reader"]["engine_version"] == story.goal + 1


def test_the_rounds_are_shown_and_counted(story: Story) -> None:
    assert story.seen["status"]["first"]["rounds_behind"] == 0
    counted = story.training["first"].counted
    assert f'pulsenet_contributions_total{{fate="counted"}} {float(counted)}' in story.seen["metrics"]
    assert f"pulsenet_round_index {float(story.goal)}" in story.seen["metrics"]
    assert story.seen["status"]["first"]["residual_norm"] > 0.0, "the gate holds something back"
    trainers = [node for node in story.seen["status line"]["nodes"] if node["role"] == "trainer"]
    assert {node["round_index"] for node in trainers} == {story.goal}


def test_the_private_run_takes_rounds_up_when_a_training_process_asks(swarm: Swarm) -> None:
    """Two lines and no configuration; the node that was there keeps its address and its process."""
    node = swarm.add("trainer", "trainer").start().wait_ready()
    before = node.status
    assert "round_index" not in before
    (swarm.directory / "goal").write_text("2")
    training = Training(swarm, node, seed=3)
    training.start()
    try:
        training.wait_end()
    finally:
        training.kill()
    after = node.wait_status("two rounds are over", lambda status: status.get("round_index") == 2)
    assert (after["pid"], after["addresses"], after["revision"]) == (before["pid"], before["addresses"], 1)
    assert training.counted == 2
    # Rounds this short may overtake the publishing of one; the newest is always published.
    node.wait_applied(3)
    shown = run_json("run", "show", "local", home=swarm.home())
    assert (shown["algorithm"], shown["inner_steps"]) == ("pulseloco", 8)
