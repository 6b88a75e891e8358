"""A minute in the lab: what every change must still get over a bad link (A-CHK-1)."""

from __future__ import annotations

import pytest
from lab_swarm import RandomModel, Transfer, open_lab_swarm
from namespaces import Lab, Link
from synthetic import MEGABYTE, connect

from pulsenet.node.windows import WINDOW_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.timeout(240)]

MODEL_SIZE_BYTES = 8 * MEGABYTE
HOME_LINK = Link(up_mbps=5, down_mbps=20, delay_ms=50, loss_up=0.05, loss_down=0.05)
LOST_SIZE_BYTES = WINDOW_SECONDS * HOME_LINK.down_mbps * 1e6 / 8
"""What may be under way when a connection is given up. After five seconds without a cable TCP is silent for up to ten,
and for twenty where the first packet it tries then is lost: the reader takes such a connection for a dead one."""


def test_a_patch_crosses_a_lossy_home_link_whose_cable_is_pulled_in_the_middle() -> None:
    model = RandomModel(MODEL_SIZE_BYTES)
    with Lab([Link(), HOME_LINK]) as lab, open_lab_swarm(lab) as swarm:
        publisher = swarm.start_publisher().wait_ready()
        reader = swarm.start_reader(1).wait_ready()
        with connect(publisher.data_dir) as client:
            reader.wait_held(model.publish_step(client), 60)
            transfer = Transfer(publisher, reader)
            number = model.publish_step(client)
            transfer.wait_received(2 * MEGABYTE)
            lab.cut_for(1, seconds=5)
            reader.wait_held(number, 90)
            assert reader.read_root(number) == model.root
            assert transfer.received_size_bytes <= 1.25 * model.size_bytes
            assert transfer.sent_size_bytes <= 1.25 * model.size_bytes + LOST_SIZE_BYTES
