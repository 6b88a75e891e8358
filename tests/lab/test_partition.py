"""Two halves that lived on without each other for ten minutes are one again within a minute of the cable's return."""

from __future__ import annotations

import time

import pytest
from lab_swarm import RandomModel, open_lab_swarm
from namespaces import Lab, Link
from synthetic import MEGABYTE, connect

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.nightly]

OUTAGE_SECONDS = 600.0
HEAL_SECONDS_MAX = 60.0


@pytest.mark.timeout(1_200)
def test_a_reader_without_cable_for_ten_minutes_is_current_a_minute_after_its_return() -> None:
    """A-NET-5: nobody is left to talk to on one side; three readers keep the publisher company on the other."""
    model = RandomModel(1 * MEGABYTE)
    with Lab([Link()] * 4) as lab, open_lab_swarm(lab) as swarm:
        publisher = swarm.start_publisher().wait_ready()
        readers = [swarm.start_reader(index).wait_ready(120) for index in (1, 2, 3)]
        away, near = readers[0], readers[1:]
        with connect(publisher.data_dir) as client:
            first = model.publish_step(client)
            for reader in readers:
                reader.wait_held(first, 120)
            process_ids = [(node.pid, node.find_p2pd()) for node in readers]
            lab.cut(1)
            cut_at = time.monotonic()
            for reader in near:
                reader.wait_held(model.publish_step(client), 60)
            away.wait_status("it hears nobody", lambda status: status["peers"] == 0, 120)
            time.sleep(max(0.0, OUTAGE_SECONDS - (time.monotonic() - cut_at)))
            lab.mend(1)
            mended_at = time.monotonic()
            away.wait_status("it has peers", lambda status: status["peers"] > 0, HEAL_SECONDS_MAX)
            print(f"peers {time.monotonic() - mended_at:.0f} s after the cable came back")
            away.wait_held(3, HEAL_SECONDS_MAX - (time.monotonic() - mended_at))
            print(f"current {time.monotonic() - mended_at:.0f} s after the cable came back")
            assert away.read_root(3) == model.root
            assert [node.pid for node in readers] == [pid for pid, _ in process_ids], "no restart of a node"
