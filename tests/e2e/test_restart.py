"""Nodes that come back: what they held counts, and what came meanwhile is caught up with."""

from __future__ import annotations

import shutil

import pytest
from swarm import Swarm
from synthetic import MEGABYTE, SyntheticModel, connect

pytestmark = pytest.mark.e2e

MODEL_SIZE_BYTES = 2 * MEGABYTE


def test_an_inferencer_that_was_current_is_ready_again_and_follows_at_once(swarm: Swarm) -> None:
    model = SyntheticModel(MODEL_SIZE_BYTES)
    trainer = swarm.add("trainer", "trainer").start().wait_ready()
    inferencer = swarm.add("inferencer", "inferencer").start().wait_ready()
    with connect(trainer.data_dir) as client:
        assert model.publish_step(client) == 1
        inferencer.wait_applied(1)
        # Nothing new: its own files engine holds the version already and has nothing to confirm.
        assert inferencer.stop()[0] == 143
        inferencer.start().wait_applied(1)
        assert inferencer.get("/readyz")[0] == 200
        inferencer.kill()
        assert model.publish_step(client) == 2
        inferencer.start().wait_applied(2)
        assert inferencer.read_root(2) == model.root


def test_a_node_whose_directory_was_removed_ends_and_says_why(swarm: Swarm) -> None:
    node = swarm.add("trainer-9", "trainer").start().wait_ready()
    shutil.rmtree(node.data_dir)
    assert node.wait_exit(15) == 6
    assert "was removed or replaced under the running node: start it again" in node.log.splitlines()[-1]
    assert "Traceback" not in node.log
    assert node.find_p2pd() == []
