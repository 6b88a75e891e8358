"""A run made by its owner, joined by token from other machines, kept alive by a seed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from swarm import Node, Swarm, run_json, wait_until
from synthetic import MEGABYTE, SyntheticModel, connect

from pulsenet.errors import UnavailableError
from pulsenet.ids import Version
from pulsenet.local.client import Client
from pulsenet.local.rollouts import ReceivedRollouts, Sample, pack_rollouts
from pulsenet.local.tasks import encode_tasks

pytestmark = pytest.mark.e2e

MODEL_SIZE_BYTES = 4 * MEGABYTE
LOOPBACK = "--listen=/ip4/127.0.0.1/tcp/0"


def add_joined(swarm: Swarm, name: str, role: str, run: str, token: str, *bootstraps: str) -> Node:
    """Describe a node on a machine of its own, which knows nothing but the token and the bootstraps."""
    options = [f"--token={token}", f"--run={run}", LOOPBACK, *(f"--bootstrap={address}" for address in bootstraps)]
    return swarm.add(name, role, *options, run=run, home=f"{run}-{name}")


def create_run(swarm: Swarm, run: str, *options: str) -> tuple[Node, str]:
    """Create a run and describe its trainer, on the owner's machine; return the trainer and the join token."""
    home = swarm.home(f"{run}-owner")
    trainer = swarm.add("trainer", "trainer", f"--run={run}", LOOPBACK, run=run, home=home.name)
    key = run_json("keygen", str(trainer.data_dir / "identity.key"), home=home)["public_key"]
    created = run_json("run", "create", run, "--authority", key, *options, home=home)
    return trainer, created["token"]


def read_address(node: Node) -> str:
    """Return where a node listens, as it told its operator."""
    lines = wait_until(
        f"{node.name} says where it listens",
        lambda: [line.split()[1] for line in node.log.splitlines() if line.startswith("listening ")],
    )
    return lines[0]


def wait_stored(seed: Node, number: int) -> None:
    """Wait until the seed holds everything that leads to a version; patches come before their anchor."""
    seed.wait_status(
        f"all of version {number} is stored",
        lambda status: status["phase"] == "current" and status["latest_seen_version"] == number,
    )


def admit(swarm: Swarm, run: str, key: str) -> None:
    """List a key as an inferencer, on the owner's machine."""
    admitted = run_json("run", "admit", run, key, "--role", "inferencer", home=swarm.home(f"{run}-owner"))
    assert admitted["complete"]


def make_batch(number: int) -> Any:
    version = Version(0, number)
    return pack_rollouts(version, version, [Sample([1, 2], [3, 4, 5], [-0.1, -0.2, -0.3], 1.0)], {"origin": "test"})


def follow_from_seed_alone(swarm: Swarm, run: str, token: str, seed: Node, model: SyntheticModel, number: int) -> None:
    """A fresh inferencer, for whom the seed is the whole world, ends at the newest version."""
    fresh = add_joined(swarm, "fresh", "inferencer", run, token, read_address(seed))
    fresh.start().wait_ready()
    fresh.wait_applied(number)
    assert fresh.read_root(number) == model.root
    weights = str(fresh.data_dir / "weights" / "current")
    assert run_json("verify", weights, home=swarm.home())["root"] == model.root


def test_a_seed_keeps_a_public_run_alive_and_only_listed_inferencers_rollouts_count(swarm: Swarm) -> None:
    model = SyntheticModel(MODEL_SIZE_BYTES)
    trainer, token = create_run(swarm, "open", "--anchor-interval", "3")
    trainer.start().wait_ready()
    address = read_address(trainer)
    seed = add_joined(swarm, "seed", "seed", "open", token, address).start()
    worker = add_joined(swarm, "worker", "inferencer", "open", token, address).start()
    seed.wait_ready()
    worker.wait_ready()
    with connect(trainer.data_dir) as client:
        numbers = [model.publish_step(client) for _ in range(5)]
        assert numbers == [1, 2, 3, 4, 5]
        worker.wait_applied(5)
        _check_refused_rollouts(client, worker)
        admit(swarm, "open", worker.status["peer_id"])
        trainer.wait_status("the owner's revision is read", lambda status: status["revision"] == 1)
        # Other machines learn of it with the next head.
        assert model.publish_step(client) == 6
        for node in (worker, seed):
            node.wait_status("the revision arrived", lambda status: status["revision"] == 1)
        _check_counted_rollouts(client, worker)
        _check_task(client, worker)
    worker.wait_applied(6)
    wait_stored(seed, 6)
    assert trainer.stop()[0] == 143
    assert worker.stop()[0] == 143
    follow_from_seed_alone(swarm, "open", token, seed, model, 6)


def _check_refused_rollouts(client: Client, worker: Node) -> None:
    """An unlisted key is refused, and its operator is told why."""
    with connect(worker.data_dir) as inferencer:
        assert inferencer.submit_rollouts(make_batch(5)).accepted
    wait_until("the refusal is told", lambda: "refused a rollout batch: untrusted" in worker.log)
    assert client.take_rollouts() == []


def _check_task(client: Client, worker: Node) -> None:
    """A task of the training process reaches an engine, and its answer ends it."""
    queued = client.send_tasks(encode_tasks([{"prompt": "2 + 3"}]), lease_seconds=60.0)
    with connect(worker.data_dir) as inferencer:
        (task,) = inferencer.take_tasks(4, timeout_seconds=30.0)
        assert (task.task_id, task.content) == (queued.task_ids[0], {"prompt": "2 + 3"})
        version = Version(0, 6)
        answer = pack_rollouts(version, version, [Sample([1], [2], [-0.1], 1.0)], tasks=[task])
        assert inferencer.submit_rollouts(answer).accepted
    (received,) = client.take_rollouts(timeout_seconds=30.0)
    assert received.task_ids == queued.task_ids
    assert client.status()["rollouts"]["tasks"]["done"] == 1


def _check_counted_rollouts(client: Client, worker: Node) -> None:
    """Each batch of a listed key arrives once."""
    with connect(worker.data_dir) as inferencer:
        for number in (4, 5, 6):
            assert inferencer.submit_rollouts(make_batch(number)).accepted
    received: list[ReceivedRollouts] = []

    def take() -> bool:
        received.extend(client.take_rollouts(timeout_seconds=1))
        return len(received) >= 3

    wait_until("the batches arrive", take)
    assert client.take_rollouts(timeout_seconds=1) == []
    assert [one.version_first for one in received] == [Version(0, number) for number in (4, 5, 6)]
    assert [list(sample.completion_tokens) for one in received for sample in one.samples] == [[3, 4, 5]] * 3


def test_a_seed_keeps_a_private_run_alive(swarm: Swarm) -> None:
    model = SyntheticModel(MODEL_SIZE_BYTES, seed=9)
    trainer, token = create_run(swarm, "closed", "--private")
    trainer.start().wait_ready()
    seed = add_joined(swarm, "seed", "seed", "closed", token, read_address(trainer)).start()
    # Who holds the token finds the run; only whom the owner lists is served (SPEC 3).
    hint = seed.wait_log("serves its members only")
    admit(swarm, "closed", re.search(r"admit NAME (\S+)", hint)[1])  # type: ignore[index]
    seed.wait_ready()
    fresh = add_joined(swarm, "fresh", "inferencer", "closed", token)
    admit(
        swarm,
        "closed",
        run_json("keygen", str(fresh.data_dir / "identity.key"), home=swarm.home("closed-fresh"))["peer_id"],
    )
    seed.wait_status("the seed knows both", lambda status: status["revision"] == 2)
    with connect(trainer.data_dir) as client:
        assert model.publish_step(client) == 1
        assert model.publish_step(client) == 2
    wait_stored(seed, 2)
    trainer.kill()
    follow_from_seed_alone(swarm, "closed", token, seed, model, 2)
    run_file = json.loads(Path(seed.data_dir.parent / "run.json").read_text())
    assert run_file["token"] == token
    with pytest.raises(UnavailableError):
        Client.connect(trainer.data_dir, timeout_seconds=0.2)
