"""Stage seconds and received bytes come from a node's own metrics endpoint."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulsenetd.admin import AdminServer
from pulsenetd.demo.node_status import NodeWatch
from pulsenetd.metrics import Metrics


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[Metrics]:
    made = Metrics()
    server = AdminServer("127.0.0.1", 0, metrics=made.text, live=dict, ready=dict, status=dict)
    (tmp_path / "node.json").write_text(json.dumps({"metrics_url": server.url}))
    yield made
    server.close()


def test_stage_seconds_are_what_was_added_since_the_last_reading(metrics: Metrics, tmp_path: Path) -> None:
    watch = NodeWatch(tmp_path)
    metrics.observe("fetch", 0.5)
    metrics.observe("decode", 0.25)
    assert watch.is_up()
    assert watch.read_stage_seconds() == {"fetch": 0.5, "decode": 0.25}
    metrics.observe("fetch", 2.0)
    assert watch.read_stage_seconds() == {"fetch": 2.0}
    assert watch.read_stage_seconds() == {}


def test_received_bytes_are_summed_over_kinds(metrics: Metrics, tmp_path: Path) -> None:
    metrics.count("bytes_received", "patch", 1000)
    metrics.count("bytes_received", "chunk-list", 24)
    metrics.count("bytes_sent", "patch", 5)
    assert NodeWatch(tmp_path).read_received_bytes() == 1024


@pytest.mark.parametrize("text", [None, "{}", "no json", '{"metrics_url": "http://127.0.0.1:9"}'])
def test_a_node_that_does_not_answer_is_not_up(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "node.json").write_text(text)
    watch = NodeWatch(tmp_path)
    assert not watch.is_up()
    assert watch.read_stage_seconds() == {}
    assert watch.read_received_bytes() == 0
