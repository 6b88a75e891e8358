"""What an operator allows is what a node moves, in both directions."""

from __future__ import annotations

import time

import pytest
from lab_swarm import RandomModel, Transfer, open_lab_swarm
from namespaces import Lab, Link
from synthetic import MEGABYTE, connect

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(400)]

MODEL_SIZE_BYTES = 16 * MEGABYTE
CAP = 1 * MEGABYTE
"""Bytes a second."""
SETTLED_SIZE_BYTES = 4 * MEGABYTE
"""What passes before the measurement begins."""


@pytest.mark.parametrize("capped", ["upload", "download"])
def test_a_cap_is_held_within_ten_percent(capped: str) -> None:
    model = RandomModel(MODEL_SIZE_BYTES)
    option = f"--{capped}-limit=1M"
    with Lab([Link(), Link()]) as lab, open_lab_swarm(lab) as swarm:
        publisher = swarm.start_publisher(*[option] * (capped == "upload")).wait_ready(120)
        reader = swarm.start_reader(1, *[option] * (capped == "download")).wait_ready(120)
        with connect(publisher.data_dir) as client:
            transfer = Transfer(publisher, reader)
            number = model.publish_step(client)
            transfer.wait_received(SETTLED_SIZE_BYTES)
            before, started = transfer.received_size_bytes, time.monotonic()
            transfer.wait_received(model.size_bytes)
            pace = (transfer.received_size_bytes - before) / (time.monotonic() - started)
            reader.wait_held(number, 120)
    print(f"{capped}: {pace / CAP:.3f} of the cap")
    assert 0.9 * CAP <= pace <= 1.1 * CAP
