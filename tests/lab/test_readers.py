"""Many readers of one publisher: they share what they have, so that it does not pay for each of them."""

from __future__ import annotations

import os
import time

import pytest
from lab_swarm import RandomModel, open_lab_swarm
from namespaces import Lab, Link
from synthetic import connect

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(900)]

READER_COUNT = 8
MODEL_SIZE_BYTES = 20_000_000
LINK = Link(up_mbps=20, down_mbps=40)
"""Readers upload as much as the publisher: together they cover the demand."""
PAYLOADS_MAX = 2.5
START_SECONDS = 400


def test_eight_readers_cost_the_publisher_few_payloads() -> None:
    model = RandomModel(MODEL_SIZE_BYTES)
    with Lab([LINK] * (1 + READER_COUNT)) as lab, open_lab_swarm(lab) as swarm:
        publisher = swarm.start_publisher().wait_ready(START_SECONDS)
        readers = [swarm.start_reader(1 + index) for index in range(READER_COUNT)]
        for reader in readers:
            reader.wait_ready(START_SECONDS)
        with connect(publisher.data_dir) as client:
            number = model.publish_step(client)
            for reader in readers:
                reader.wait_held(number, 240)
            before = [node.count_bytes("sent") for node in (publisher, *readers)]
            number, started = model.publish_step(client), time.monotonic()
            for reader in readers:
                reader.wait_held(number, 240)
            seconds = time.monotonic() - started
        sent = [
            (node.count_bytes("sent") - earlier) / model.size_bytes
            for node, earlier in zip((publisher, *readers), before, strict=True)
        ]
        assert all(reader.read_root(number) == model.root for reader in readers)
    shares = ", ".join(f"{one:.2f}" for one in sent[1:])
    print(
        f"publisher sent {sent[0]:.2f} payloads, readers {shares}; {seconds:.0f} s; load {os.getloadavg()[0]:.0f}; "
        f"the first version cost {before[0] / model.size_bytes:.2f}"
    )
    assert sum(sent) <= READER_COUNT * 1.25
    assert sent[0] <= PAYLOADS_MAX
