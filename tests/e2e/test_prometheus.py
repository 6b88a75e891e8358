"""A real Prometheus, with the rules and queries of deploy/, watches the run that compose.yaml describes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from free_ports import find_free_port
from swarm import COMMAND, Node, Swarm, make_environment, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RUN = "demo"
ANYWHERE = "--listen=/ip4/127.0.0.1/tcp/0"
SECONDS = 180.0
SERIES_MAX = 500

Samples = dict[str, float]
"""Instances and their values."""


def set_up(swarm: Swarm) -> tuple[Path, int]:
    """Make the run by the script of the compose file; return the run file and the trainer's port."""
    port, run_file = find_free_port(), swarm.directory / "run-file" / "run.json"
    run_file.parent.mkdir()
    environment = {
        **make_environment(swarm.home("trainer")),
        "PATH": f"{Path(COMMAND).parent}:{os.environ['PATH']}",
        "RUN": RUN,
        "ADDRESS": f"/dns4/localhost/tcp/{port}",
        "RUN_FILE": str(run_file),
    }
    script = ["sh", str(DEPLOY / "compose" / "setup.sh"), "--open-inferencers", "8"]
    for _ in range(2):
        # The second time it finds everything made, as when containers are started again.
        done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    return run_file, port


@contextmanager
def running(*command: str, log: Path, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in the background."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


class Prometheus:
    """A running Prometheus and what it answers."""

    def __init__(self, url: str, nodes: dict[str, Node]) -> None:
        self.url = url
        self.names = {node.metrics_url.removeprefix("http://"): name for name, node in nodes.items()}

    def get(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
            return json.loads(answer.read())["data"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def ask(self, query: str) -> Samples:
        """Return the values of a query, by name of the node."""
        result = self.get("/api/v1/query", query=query)["result"]
        return {
            self.names.get(one["metric"].get("instance", ""), one["metric"].get("role", "")): float(one["value"][1])
            for one in result
        }

    def wait(self, query: str, *names: str) -> Samples:
        """Wait until a query has a result for each of these names."""
        return wait_until(query, lambda: samples if set(samples := self.ask(query)) >= set(names) else None, SECONDS)


def write_configuration(directory: Path, nodes: dict[str, Node]) -> Path:
    """Write what deploy/prometheus has, for these nodes and with a scrape every second."""
    shutil.copytree(DEPLOY / "prometheus" / "rules", directory / "rules")
    targets = [
        {"targets": [node.metrics_url.removeprefix("http://")], "labels": {"run": RUN, "role": node.role}}
        for node in nodes.values()
    ]
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules/recording.yml", "rules/alerts.yml"],
        "scrape_configs": [{"job_name": "pulsenet", "static_configs": targets}],
    }
    path = directory / "prometheus.yml"
    path.write_text(json.dumps(configuration))  # JSON is YAML
    return path


@contextmanager
def open_prometheus(directory: Path, nodes: dict[str, Node]) -> Iterator[Prometheus]:
    address = f"127.0.0.1:{find_free_port()}"
    with running(
        "prometheus",
        f"--config.file={write_configuration(directory, nodes)}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address={address}",
        log=directory / "prometheus.log",
    ):
        opened = Prometheus(f"http://{address}", nodes)
        wait_until("Prometheus answers", opened.is_ready, SECONDS)
        yield opened


def check_rules_and_dashboard(prometheus: Prometheus) -> None:
    """Every rule is evaluated and every query of the dashboard answered without an error."""
    rules = [rule for group in prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert rules
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] == "err"} == {}
    panels = json.loads((DEPLOY / "grafana" / "pulsenet.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    answered = 0
    for query in queries:
        shown = query.replace("$__rate_interval", "15s").replace("$run", ".*").replace("$instance", ".*")
        try:
            answered += bool(prometheus.get("/api/v1/query", query=shown)["result"])
        except urllib.error.HTTPError as error:
            with error:
                pytest.fail(f"{shown}: {error.read().decode()}")
    assert answered > len(queries) / 2, "most of them have something to show"


def check_bandwidth(prometheus: Prometheus, nodes: dict[str, Node]) -> None:
    """Chunks arrive at readers, leave the trainer, and are counted as the nodes count them."""
    rates = prometheus.wait(
        'pulsenet:bytes:rate5m{direction="received", role!="trainer"} > 0', "seed", "inferencer", "reader"
    )
    assert all(rate > 0 for rate in rates.values())
    prometheus.wait('rate(pulsenet_blob_bytes_total{direction="sent", kind="patch"}[30s]) > 0', "trainer")
    scraped = prometheus.wait(
        'pulsenet_bytes_total{direction="received", kind="chunk"}', "seed", "inferencer", "reader"
    )
    for name in ("seed", "inferencer", "reader"):
        assert 0 < scraped[name] <= nodes[name].status["bytes"]["received_chunk"]


def check_size(prometheus: Prometheus) -> None:
    """A-OBS-1: what is scraped stays small, whatever was counted so far."""
    samples = prometheus.wait("scrape_samples_scraped > 0", "trainer", "seed", "inferencer", "reader")
    assert max(samples.values()) <= SERIES_MAX


def check_lag(prometheus: Prometheus, reader: Node) -> None:
    """A node that hears nothing is found to lag by what others of the run heard, and catches up again."""
    prometheus.wait("pulsenet:version_lag:run <= 2", "seed", "inferencer", "reader")
    prometheus.wait("pulsenet_version_lag <= 2", "seed", "inferencer", "reader")
    (p2pd, *_) = reader.find_p2pd()
    os.kill(p2pd, signal.SIGSTOP)
    prometheus.wait("pulsenet:version_lag:run > 2", "reader")
    # The node finds that p2pd hangs, and starts another.
    prometheus.wait('pulsenet_p2pd_restarts_total{reason="hung"} > 0', "reader")
    prometheus.wait("pulsenet:version_lag:run <= 2", "reader")


def test_prometheus_sees_bandwidth_and_lag_of_a_live_run(swarm: Swarm, tmp_path: Path) -> None:
    """A-OBS-1, A-OBS-2"""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    run_file, port = set_up(swarm)
    nodes = {
        "trainer": swarm.add(
            "trainer",
            "trainer",
            f"--run-file={run_file}",
            f"--listen=/ip4/127.0.0.1/tcp/{port}",
            run=RUN,
            home="trainer",
        )
    }
    for name, role in (("seed", "seed"), ("inferencer", "inferencer"), ("reader", "inferencer")):
        nodes[name] = swarm.add(name, role, f"--run-file={run_file}", "--wait", ANYWHERE, run=RUN, home=name)
    for node in nodes.values():
        node.start()
    for node in nodes.values():
        node.wait_ready(SECONDS)
    toy = [sys.executable, str(DEPLOY / "compose" / "toy_trainer.py"), str(nodes["trainer"].data_dir), "0.5"]
    with (
        running(*toy, log=swarm.directory / "toy.log", environment=make_environment(swarm.home("trainer"))),
        open_prometheus(tmp_path, nodes) as prometheus,
    ):
        nodes["reader"].wait_status("a version is applied", lambda status: status["applied_version"], SECONDS)
        check_bandwidth(prometheus, nodes)
        check_rules_and_dashboard(prometheus)
        check_lag(prometheus, nodes["reader"])
        check_size(prometheus)
        nodes["inferencer"].kill()
        prometheus.wait("up == 0", "inferencer")
        prometheus.wait('ALERTS{alertname="PulsenetNodeDown", alertstate="pending"}', "inferencer")
