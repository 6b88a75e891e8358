"""DDP between machines: real daemons, real training processes, and one process beside them that has all the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from round_training import Training, check_equal_bits, tell_story
from swarm import Swarm, run_json

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

RUN = "baseline"
LOOPBACK = "--listen=/ip4/127.0.0.1/tcp/0"
NAMES = ("first", "second", "third")
INNER_STEPS = 2


class Story:
    """What happened, told once; the tests look at it."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.goal = self.killed_at = 0
        self.seen: dict[str, Any] = {}
        owner = swarm.home("owner")
        self.nodes = {
            name: swarm.add(name, "trainer", f"--run={RUN}", LOOPBACK, run=RUN, home="owner") for name in NAMES
        }
        self.reader = swarm.add("reader", "inferencer", f"--run={RUN}", LOOPBACK, run=RUN, home="owner")
        keys = {
            name: run_json("keygen", str(node.data_dir / "identity.key"), home=owner)["public_key"]
            for name, node in self.nodes.items()
        }
        # One authority, so that the two other trainers read the mean from slices.
        options = [f"--authority={keys['first']}", *(f"--trainer={keys[name]}" for name in NAMES)]
        constants = (
            f"--algorithm ddp --inner-steps {INNER_STEPS} --contribution-wait-seconds 3 --state-anchor-interval 4"
        )
        run_json("run", "create", RUN, *options, *constants.split(), home=owner)
        # As in test_rounds.py: trainers that hurry leave no processor to a node that starts.
        self.training = {
            name: Training(swarm, self.nodes[name], seed, "--step-seconds", 0.2) for seed, name in enumerate(NAMES)
        }

    def tell(self) -> None:
        first, third = self.training["first"], self.training["third"]
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            node.wait_ready()
        self.reader.start()
        for training in self.training.values():
            training.start()
        third.wait("it counted three times", lambda: third.counted >= 3)
        third.kill()
        third.node.kill()
        self.killed_at, counted = third.round_index, third.counted
        # Beyond two anchors: what third held leads on by no receipt that is kept.
        first.wait("it went on", lambda: first.round_index >= self.killed_at + 9)
        third.checkpoint.unlink()
        third.node.start().wait_ready()
        third.start()
        third.wait("it counts again", lambda: third.counted >= counted + 2)
        self.goal = max(training.round_index for training in self.training.values()) + 2
        (self.swarm.directory / "goal").write_text(str(self.goal))
        for training in self.training.values():
            training.wait_end()
        self.seen["reader"] = self.reader.wait_status(
            "it follows the trainers",
            lambda status: status["applied_version"] == self.goal // INNER_STEPS * INNER_STEPS + 1,
        )
        _, self.seen["metrics"] = self.nodes["first"].get("/metrics")

    def list_counted(self) -> dict[int, list[tuple[int, int]]]:
        """Return seed and number of the batches of each round, as the trainers told them."""
        counted: dict[int, set[tuple[int, int]]] = {}
        size: dict[int, int] = {}
        open_offers: list[tuple[int, int, int]] = []
        for seed, training in enumerate(self.training.values()):
            for line in training.told:
                if "offers" in line:
                    open_offers.append((line["offers"][0], seed, line["offers"][1]))
                elif "outcome" in line:
                    round_index, batch_index = line["offered"]
                    open_offers.remove((round_index, seed, batch_index))
                    if line["outcome"] != "counted":
                        continue
                    counted.setdefault(round_index, set()).add((seed, batch_index))
                    if line["round_index"] == round_index + 1:
                        size[round_index] = line["contributors"]
        # Whoever was killed did not hear whether its last gradient was counted. Its next life may come to the same
        # round, on the way to a state anchor: what counts there is what was sent first.
        for round_index, seed, batch_index in open_offers:
            found = counted.get(round_index, set())
            if len(found) < size.get(round_index, 0) and seed not in {other for other, _ in found}:
                found.add((seed, batch_index))
        assert {index: len(found) for index, found in counted.items()} == size
        return {index: sorted(found) for index, found in sorted(counted.items())}


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with tell_story(Story) as told:
        yield told


def test_all_trainers_hold_equal_bits_after_every_inner_step(story: Story) -> None:
    check_equal_bits(story.training.values(), story.goal)
    weights = [torch.load(one.checkpoint, weights_only=True)["model"] for one in story.training.values()]
    for name, tensor in weights[0].items():
        assert all(torch.equal(tensor, other[name]) for other in weights[1:]), name


def test_one_process_on_all_batches_ends_at_the_same_weights(story: Story) -> None:
    from round_trainer import compute_loss, draw_batch, make_model

    counted = story.list_counted()
    assert list(counted) == list(range(story.goal)), "no round without a gradient"
    assert {len(members) for members in counted.values()} >= {2, 3}
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for members in counted.values():
        compute_loss(model, torch.cat([draw_batch(*member) for member in members])).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = torch.load(story.training["first"].checkpoint, weights_only=True)["model"]
    start = make_model().state_dict()
    for name, tensor in model.state_dict().items():
        moved = (tensor - start[name]).abs().max()
        assert (tensor - found[name]).abs().max() < 1e-4 * moved, [
            training.told for training in story.training.values()
        ]
        assert moved > 1e-4


def test_the_others_went_on_without_the_one_that_was_killed(story: Story) -> None:
    alone = [members for index, members in story.list_counted().items() if index > story.killed_at + 1]
    assert [0, 1] in [[seed for seed, _ in members] for members in alone]


def test_a_trainer_that_comes_back_with_nothing_joins_by_a_state_anchor(story: Story) -> None:
    """It has neither weights nor moments, and no receipts lead on from its start; the rounds it then counts in have the
    bits of the others."""
    told = story.training["third"].told
    starts = [line for line in told if "caught_up" in line]
    assert len(starts) == 2
    counted = [line["offered"][0] for line in told[told.index(starts[1]) :] if line.get("outcome") == "counted"]
    assert len(counted) >= 2
    assert counted[0] >= story.killed_at + 9
    assert not any("resumed_at" in line for line in told)


def test_inferencers_get_a_version_for_as_many_inner_steps_as_a_round_has(story: Story) -> None:
    assert story.seen["reader"]["applied_version"] == story.goal // INNER_STEPS * INNER_STEPS + 1
    assert f"pulsenet_round_index {float(story.goal)}" in story.seen["metrics"]
