"""Transfers that are interrupted go on by chunk: what was verified is never asked for again (A-PROC-1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from lab_swarm import LabNode, LabSwarm, RandomModel, Transfer, open_lab_swarm
from namespaces import Lab, Link
from synthetic import MEGABYTE, connect

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(400)]

MODEL_SIZE_BYTES = 20 * MEGABYTE
LINK = Link(up_mbps=10, down_mbps=20, delay_ms=50, loss_up=0.05, loss_down=0.05)
RECEIVED_RATIO_MAX = 1.05
"""What arrived twice, over the payload: a chunk that arrived whole is not asked for again."""
SENT_RATIO_MAX = 1.6
"""What was sent, over the payload: streams that break lose what is on its way and in their buffers."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A publisher and the reader behind the bad link."""

    lab: Lab
    swarm: LabSwarm
    publisher: LabNode
    reader: LabNode
    model: RandomModel

    def interrupt(self, disturb: Callable[[], None], seconds_max: float) -> None:
        """Publish, disturb the transfer in its middle, wait for its end and look at what it cost."""
        with connect(self.publisher.data_dir) as client:
            transfer = Transfer(self.publisher, self.reader)
            number = self.model.publish_step(client)
            transfer.wait_received(6 * MEGABYTE)
            disturb()
            ended_at = time.monotonic()
            self.reader.wait_held(number, seconds_max)
            assert self.reader.read_root(number) == self.model.root
        sent, received = (
            size / self.model.size_bytes for size in (transfer.sent_size_bytes, transfer.received_size_bytes)
        )
        print(f"held {time.monotonic() - ended_at:.0f} s later; sent {sent:.3f}, received {received:.3f} payloads")
        assert received <= RECEIVED_RATIO_MAX
        assert sent <= SENT_RATIO_MAX


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Lend a pair of which the reader already holds the first version."""
    model = RandomModel(MODEL_SIZE_BYTES)
    with Lab([Link(), LINK]) as lab, open_lab_swarm(lab) as swarm:
        publisher = swarm.start_publisher().wait_ready()
        reader = swarm.start_reader(1).wait_ready()
        with connect(publisher.data_dir) as client:
            reader.wait_held(model.publish_step(client), 90)
        yield Pair(lab, swarm, publisher, reader, model)


def test_a_transfer_outlives_ten_seconds_without_cable(pair: Pair) -> None:
    pair.interrupt(lambda: pair.lab.cut_for(1, seconds=10), seconds_max=60)


def test_a_transfer_goes_on_after_a_minute_without_cable(pair: Pair) -> None:
    pair.interrupt(lambda: pair.lab.cut_for(1, seconds=60), seconds_max=90)


@pytest.mark.parametrize("side", ["publisher", "reader"])
def test_a_transfer_goes_on_after_p2pd_was_killed(pair: Pair, side: str) -> None:
    pair.interrupt(getattr(pair, side).kill_p2pd, seconds_max=90)


def test_a_transfer_goes_on_after_the_reader_got_another_address(pair: Pair) -> None:
    pair.interrupt(lambda: pair.lab.move(1), seconds_max=120)
