"""The scrape configuration, the rules and their tests are accepted by promtool and ask for what nodes export."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from exported import ROOT, RULES, find_faults, read_known, read_rules
from promql import Selector, find_labels, find_selectors, read_parsed

from pulsenetd import metrics

PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = read_rules("alerts.yml")

RISKS = {
    # what issue 9 asks to be told of: alerts that tell
    "stale": "PulsenetStale",
    "fork": "PulsenetFork",
    "lag": "PulsenetLagging",
    "p2pd restarts": "PulsenetP2pdRestarts",
    "disk": "PulsenetDiskFull",
    "no peers": "PulsenetNoPeers",
    "round stuck": "PulsenetRoundStuck",
    "disagreement": "PulsenetDisagreement",
    "store trouble": "PulsenetStoreTrouble",
}


def run_promtool(*arguments: str, directory: Path = PROMETHEUS) -> str:
    """Run promtool; return what it says."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    assert "SUCCESS" in run_promtool("check", "config", "prometheus.yml")
    assert "rules found" in run_promtool("check", "rules", "recording.yml", "alerts.yml", directory=RULES)


def test_histories_raise_the_alerts_they_must_and_no_others() -> None:
    assert "SUCCESS" in run_promtool("test", "rules", "alerts_test.yml", directory=RULES)


def test_a_rule_that_tells_nothing_fails_its_history(tmp_path: Path) -> None:
    """The histories can fail: with a broken threshold they do."""
    for path in RULES.glob("*.yml"):
        text = path.read_text().replace("pulsenet_rounds_behind > 2", "pulsenet_rounds_behind > 3")
        (tmp_path / path.name).write_text(text)
    with pytest.raises(AssertionError, match="PulsenetRoundsBehind"):
        run_promtool("test", "rules", "alerts_test.yml", directory=tmp_path)


@pytest.mark.parametrize(
    "rule", [*read_rules("recording.yml"), *ALERTS], ids=lambda rule: rule.get("record") or rule["alert"]
)
def test_rules_ask_for_what_nodes_export(rule: dict[str, Any]) -> None:
    assert find_selectors(rule["expr"])
    assert find_faults(rule["expr"], read_known()) == []


def test_everything_that_must_be_told_of_has_an_alert_with_a_history() -> None:
    alerts = {rule["alert"] for rule in ALERTS}
    assert set(RISKS.values()) <= alerts
    tests = yaml.safe_load((RULES / "alerts_test.yml").read_text())["tests"]
    raised = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one.get("exp_alerts")}
    assert raised == alerts


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "warning")
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")


def test_metrics_and_files_that_alerts_mention_exist() -> None:
    text = (RULES / "alerts.yml").read_text()
    known = read_known()
    assert set(re.findall(r"\bpulsenet_[a-z0-9_]+", text)) <= known.keys()
    for document in set(re.findall(r"\bdocs/[a-z_]+\.md", text)):
        assert (ROOT / document).exists(), document


def test_the_scraper_finds_its_rules_and_labels_its_targets() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert {PROMETHEUS / name for name in config["rule_files"]} == {RULES / "recording.yml", RULES / "alerts.yml"}
    (static,) = [one for one in config["scrape_configs"] if one["job_name"] == "pulsenet"]
    for group in static["static_configs"]:
        assert set(group["labels"]) == {"run", "role"}


# The finder of names itself

QUERIES = {
    'sum by (kind) (rate(a_total{direction="sent"}[5m]))': [Selector("a_total", (("direction", "=", "sent"),))],
    'sum(rate(a:b{x=~"c|d", y!="{e}"}[5m] offset 1h)) without (y)': [
        Selector("a:b", (("x", "=~", "c|d"), ("y", "!=", "{e}")))
    ],
    "max_over_time(a[1h:5m]) > bool 1e3 and on (job) b == 0": [Selector("a"), Selector("b")],
    "a - on (job) group_right (x) (b >= 0)": [Selector("a"), Selector("b")],
    'label_replace(a, "x", "$1", "y", "(.*)") or vector(0)': [Selector("a")],
    "histogram_quantile(0.9, sum by (le) (rate(a_bucket[$__rate_interval])))": [Selector("a_bucket")],
    "1 - avg without (kind) (a) / NaN": [Selector("a")],
}


@pytest.mark.parametrize("query", QUERIES)
def test_selectors_are_found_in_every_shape_of_query(query: str) -> None:
    assert find_selectors(query) == QUERIES[query]


def test_labels_of_every_grouping_are_found() -> None:
    assert find_labels("sum by (a, b) (x) / on (c) group_left (d) y - ignoring(e) z") == {"a", "b", "c", "d", "e"}


def test_faults_are_found() -> None:
    known = read_known()
    assert find_faults("pulsenet_forc == 1", known) == ["no series is called pulsenet_forc"]
    assert find_faults('pulsenet_peers{kind="friend"}', known) == ["kind of pulsenet_peers is never friend"]
    assert find_faults('pulsenet_peers{king="known"}', known) == ["pulsenet_peers has no label king"]
    assert find_faults("sum by (kinf) (pulsenet_peers)", known) == ["nothing has the label kinf"]
    assert find_faults('sum by (kind) (pulsenet_peers{kind=~"known|outbound"})', known) == []


@pytest.mark.parametrize(
    "rule", [*read_rules("recording.yml"), *ALERTS], ids=lambda rule: rule.get("record") or rule["alert"]
)
def test_a_real_parser_finds_the_same_names(rule: dict[str, Any]) -> None:
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    assert read_parsed(parser.parse(rule["expr"]), set()) == {one.name for one in find_selectors(rule["expr"])}


def test_promtool_has_nothing_to_say_about_what_a_node_exports() -> None:
    """A-OBS-1"""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    node = metrics.Metrics()
    for name, (_, labels) in metrics.COUNTERS.items():
        for values in itertools.product(*(sorted(map(str, allowed)) for allowed in labels.values())):
            if name == "bytes":
                node.count(f"bytes_{values[0]}", values[1])
            elif name != "blob_bytes":
                node.count(name, "-".join(values))
    for stage in metrics.STAGES:
        node.observe(stage, 1.0)
    done = subprocess.run(["promtool", "check", "metrics"], input=node.text(), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
