"""Two trainers of one run share what an inferencer samples: each batch reaches one, an answer the one that asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import pytest
from swarm import Node, Swarm, run_json

import pulsenet
from pulsenet.ids import Version
from pulsenet.serving import Sample, Subscriber
from pulsenet.training import Publisher

pytestmark = pytest.mark.e2e

RUN = "shared"
NAMES = ("first", "second")
LOOPBACK = "--listen=/ip4/127.0.0.1/tcp/0"
VERSION = Version(0, 0)
BATCHES = 40
SHARE_MIN = 6
"""Of 40 batches that fall to one of two by chance, fewer than this come in one of a million runs."""

WAIT_SECONDS = 60.0


class NoEngine:
    """Nothing is served: the samples of this test come from nowhere."""

    version = None


class Party:
    """Two trainers and an inferencer, with both ends of the edges."""

    def __init__(self, swarm: Swarm, stack: ExitStack) -> None:
        owner = swarm.home("owner")
        roles = {**dict.fromkeys(NAMES, "trainer"), "sampler": "inferencer"}
        options = {"sampler": ("--engine", "none")}
        self.nodes: dict[str, Node] = {
            name: swarm.add(name, role, f"--run={RUN}", LOOPBACK, *options.get(name, ()), run=RUN, home="owner")
            for name, role in roles.items()
        }
        keys = {
            name: run_json("keygen", str(node.data_dir / "identity.key"), home=owner)["public_key"]
            for name, node in self.nodes.items()
        }
        listed = [f"--{kind}={keys[name]}" for name in NAMES for kind in ("authority", "trainer")]
        rounds = ["--algorithm", "pulseloco", "--inner-steps", "2"]
        run_json("run", "create", RUN, *listed, f"--inferencer={keys['sampler']}", *rounds, home=owner)
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            node.wait_ready()
        self.nodes["sampler"].wait_status("it knows both trainers", lambda status: status["peers"] >= len(NAMES))
        self.trainers: dict[str, Publisher] = {
            name: stack.enter_context(pulsenet.attach_publisher(data_dir=self.nodes[name].data_dir)) for name in NAMES
        }
        engine: Any = NoEngine()
        self.sampler: Subscriber = stack.enter_context(
            pulsenet.attach_engine(engine, data_dir=self.nodes["sampler"].data_dir)
        )

    def submit(self, group: int, **options: Any) -> None:
        """Send a group of samples of one prompt."""
        samples = [Sample([group], [group, place], [-0.5, -0.5], 0.0) for place in range(4)]
        taken = self.sampler.submit_rollouts(
            samples, version_first=VERSION, version_last=VERSION, timeout_seconds=WAIT_SECONDS, **options
        )
        assert taken.accepted, taken.reason

    def wait_delivered(self) -> None:
        """Wait until the sampler's node has nothing left to send."""
        self.nodes["sampler"].wait_status("all is sent", lambda status: status["rollouts"]["queue_batches"] == 0)

    def take(self, name: str) -> list[int]:
        """Return the groups that wait at a trainer; each must be whole."""
        groups = []
        for batch in self.trainers[name].rollouts(timeout_seconds=0.0):
            (group,) = {tuple(sample.prompt_tokens) for sample in batch.samples}
            assert [sample.completion_tokens[1] for sample in batch.samples] == [0, 1, 2, 3]
            groups.append(group[0])
        return groups


@pytest.fixture(scope="module")
def party(swarm: Swarm) -> Iterator[Party]:
    with ExitStack() as stack:
        yield Party(swarm, stack)


def test_each_batch_reaches_one_trainer_whole_and_both_get_their_share(party: Party) -> None:
    for group in range(BATCHES):
        party.submit(group)
    party.wait_delivered()
    first, second = (party.take(name) for name in NAMES)
    assert sorted(first + second) == list(range(BATCHES))
    assert min(len(first), len(second)) >= SHARE_MIN


def test_an_answer_goes_to_the_trainer_that_asked(party: Party) -> None:
    wanted = {name: range(100 * place, 100 * place + 8) for place, name in enumerate(NAMES, 1)}
    sent = {
        name: party.trainers[name].send_tasks([{"group": group} for group in groups]) for name, groups in wanted.items()
    }
    tasks = party.sampler.tasks(timeout_seconds=WAIT_SECONDS)
    for task in islice(tasks, sum(map(len, sent.values()))):
        party.submit(task.content["group"], tasks=[task])
    party.wait_delivered()
    for name, groups in wanted.items():
        assert sorted(party.take(name)) == list(groups)
        assert party.nodes[name].status["rollouts"]["tasks"]["done"] == len(groups)


def test_tasks_outlast_a_trainer_that_is_killed(party: Party) -> None:
    first = party.nodes["first"]
    sent = set(party.trainers["first"].send_tasks([{"group": 900 + place} for place in range(4)], lease_seconds=3600.0))
    (given,) = islice(party.sampler.tasks(count_max=1, timeout_seconds=WAIT_SECONDS), 1)
    first.kill()
    first.start()
    first.wait_ready()
    counts = {"waiting": 3, "leased": 1, "done": 0, "expired": 0, "given_up": 0}
    assert first.status["rollouts"]["tasks"] == counts
    # They come over the new connection; over none, the answer would go to the other trainer.
    rest = {task.task_id for task in islice(party.sampler.tasks(timeout_seconds=WAIT_SECONDS), 3)}
    assert {given.task_id} | rest == sent
    party.submit(given.content["group"], tasks=[given])
    party.wait_delivered()
    assert first.status["rollouts"]["tasks"] == {**counts, "waiting": 0, "leased": 3, "done": 1}
    assert party.take("first") == [given.content["group"]]


def test_the_share_of_a_trainer_that_is_gone_goes_to_the_other(party: Party) -> None:
    party.nodes["second"].kill()
    for group in range(BATCHES):
        party.submit(group)
    party.wait_delivered()
    groups = party.take("first")
    # A batch whose answer got lost is kept for the trainer that may have it, so none is counted twice.
    assert sorted(groups) == list(range(BATCHES))
