"""What the counters say is what crossed the wire (A-OBS-3)."""

from __future__ import annotations

import os
from typing import Final

import pytest
from lab_swarm import LabNode, RandomModel, open_lab_swarm
from namespaces import Lab, Link, list_congestion_controls
from synthetic import MEGABYTE, connect

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(1200)]

MODEL_SIZE_BYTES: Final = int(os.environ.get("PULSENET_TEST_BYTES_MODEL", 64 * MEGABYTE))
VERSIONS: Final = 4
"""256 MB after the first; the case names 1 GB, which only takes longer."""
SHARE_MAX: Final = 0.02


def count(node: LabNode) -> dict[str, int]:
    counted = node.status["bytes"]
    return {way: sum(size for name, size in counted.items() if name.startswith(way)) for way in ("received", "sent")}


def test_counters_agree_with_the_payload_of_the_wire_under_loss() -> None:
    congestion = "bbr" if "bbr" in list_congestion_controls() else ""
    link = Link(delay_ms=5, loss_up=0.05, loss_down=0.05, congestion=congestion)
    model = RandomModel(MODEL_SIZE_BYTES)
    with Lab([Link(delay_ms=5, congestion=congestion), link]) as lab, open_lab_swarm(lab) as swarm:
        publisher = swarm.start_publisher().wait_ready(120)
        reader = swarm.start_reader(1).wait_ready(120)
        with connect(publisher.data_dir) as client:
            reader.wait_held(model.publish_step(client), 300)
            before = {node.name: (count(node), lab.count_tcp_payload(node.index)) for node in (publisher, reader)}
            link_before = lab.received_size_bytes(1)
            for _ in range(VERSIONS):
                reader.wait_held(model.publish_step(client), 300)
            after = {node.name: (count(node), lab.count_tcp_payload(node.index)) for node in (publisher, reader)}
        moved = VERSIONS * model.size_bytes
        for name, way in (("publisher", "sent"), (reader.name, "received")):
            counted, carried = (after[name][index][way] - before[name][index][way] for index in (0, 1))
            print(f"{name} {way}: counters {counted}, wire {carried}, ratio {counted / carried:.4f}, moved {moved}")
            assert carried >= moved, "a connection was closed meanwhile, and what it carried is not known"
            assert abs(counted - carried) <= SHARE_MAX * carried
        # What TCP sent again is in the link's count alone, and what arrived twice at us has a counter of its own.
        assert lab.received_size_bytes(1) - link_before > moved
        assert sum(reader.count("pulsenet_wasted_bytes_total").values()) <= SHARE_MAX * moved
