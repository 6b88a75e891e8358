"""A reader nobody can dial: it learns so, says what to set, follows, and serves over connections it opened."""

from __future__ import annotations

import pytest
from lab_swarm import PORT, LabNode, RandomModel, open_lab_swarm
from namespaces import Lab, Link
from synthetic import MEGABYTE, connect

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(400)]


def wait_finding(node: LabNode, expected: bool) -> None:
    node.wait_status(f"reachable is {expected}", lambda status: status["reachability"]["reachable"] is expected, 120)


def test_a_reader_nobody_can_dial_follows_and_serves_over_connections_it_opened() -> None:
    model = RandomModel(2 * MEGABYTE)
    with Lab([Link()] * 3) as lab, open_lab_swarm(lab) as swarm:
        publisher = swarm.start_publisher().wait_ready(120)
        # What it announces is closed, as behind a router that forwards nothing.
        hidden = swarm.start_reader(1, f"--listen=/ip4/127.0.0.1/tcp/{PORT}").wait_ready(120)
        away = swarm.start_reader(2).wait_ready(120)
        with connect(publisher.data_dir) as client:
            first = model.publish_step(client)
            for reader in (hidden, away):
                reader.wait_held(first, 120)
            wait_finding(publisher, True)
            wait_finding(hidden, False)
            where = lab.address(1)
            assert f"peers cannot dial this node at {where} port {PORT} (connection refused)" in hidden.log
            assert f"--listen /ip4/0.0.0.0/tcp/{PORT} --announce /ip4/{where}/tcp/{PORT}" in hidden.log
            lab.cut(2)
            second = model.publish_step(client)
            hidden.wait_held(second, 60)
        publisher.kill()
        publisher.kill_p2pd()
        lab.mend(2)
        away.wait_held(second, 120)
        assert away.read_root(second) == model.root
        assert hidden.count_bytes("sent") >= model.size_bytes
