"""A large patch over a bad link: whole, nearly nothing twice, about as fast as plain TCP carries it (A-CHK-1)."""

from __future__ import annotations

import os
from statistics import mean

import plain_tcp
import pytest
from lab_swarm import RandomModel, Transfer, open_lab_swarm
from namespaces import Lab, Link, list_congestion_controls
from synthetic import connect

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(600)]

MODEL_SIZE_BYTES = 20_000_000
SENT_RATIO_MAX = 1.25
GOODPUT_RATIO_MIN = 0.7


def test_twenty_megabytes_cross_ten_percent_loss_about_as_fast_as_plain_tcp() -> None:
    if "bbr" not in list_congestion_controls():
        pytest.skip("this kernel has no BBR")
    model = RandomModel(MODEL_SIZE_BYTES)
    link = Link(up_mbps=20, down_mbps=20, delay_ms=50, congestion="bbr")
    with Lab([Link(congestion="bbr"), link]) as lab, open_lab_swarm(lab) as swarm:
        publisher = swarm.start_publisher().wait_ready()
        reader = swarm.start_reader(1).wait_ready()
        with connect(publisher.data_dir) as client:
            reader.wait_held(model.publish_step(client), 90)
            lab.change(1, loss_down=0.1)
            reader.reconnect()
            plain = [plain_tcp.measure(lab, 0, 1, model.size_bytes)]
            transfer = Transfer(publisher, reader)
            number = model.publish_step(client)
            reader.wait_held(number, 120)
            plain.append(plain_tcp.measure(lab, 0, 1, model.size_bytes))
        facts = next(one for one in reader.status["versions"] if one["version"] == number)
        assert reader.read_root(number) == model.root
        sent = transfer.sent_size_bytes / model.size_bytes
    assert all(one.size_bytes == model.size_bytes and one.congestion == "bbr" for one in plain)
    plain_mbps = mean(one.mbps for one in plain)
    ours_mbps = model.size_bytes * 8 / 1e6 / facts["fetch_seconds"]
    ratio = ours_mbps / plain_mbps
    print(
        f"plain TCP {plain[0].mbps:.1f} and {plain[1].mbps:.1f} Mb/s, ours {ours_mbps:.1f}: ratio {ratio:.2f}; "
        f"sent {sent:.3f} payloads; load {os.getloadavg()[0]:.0f}"
    )
    assert sent <= SENT_RATIO_MAX
    assert ratio >= GOODPUT_RATIO_MIN
