"""The dashboard asks for what nodes export, and its panels lie beside each other."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from exported import ROOT, find_faults, read_known, read_series
from promql import find_selectors, read_parsed

GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "pulsenet.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in GRAPHS for target in panel["targets"]]

COLUMNS = 24
SHOWN = {
    # what issue 9 asks to be seen: series that show it
    "bandwidth by direction and kind": {"pulsenet_bytes_total", "pulsenet_blob_bytes_total"},
    "lag": {"pulsenet_version_lag", "pulsenet_version_age_seconds"},
    "versions": {"pulsenet_applied_version", "pulsenet_latest_seen_version", "pulsenet_mirror_version"},
    "stages of an update": {"pulsenet_update_seconds_sum", "pulsenet_update_seconds_bucket"},
    "density and ratio": {"pulsenet_patch_density_ratio", "pulsenet_patch_compression_ratio"},
    "rounds and contributors": {"pulsenet_round_index", "pulsenet_round_contributors"},
    "utilisation": {"pulsenet_utilization_ratio", "pulsenet_utilization_predicted_ratio"},
    "peers": {"pulsenet_peers"},
}
UNITS = {"short", "none", "s", "bytes", "Bps", "percentunit", "bool"}


@pytest.mark.parametrize(
    ("title", "query"), QUERIES, ids=[f"{title}-{index}" for index, (title, _) in enumerate(QUERIES)]
)
def test_queries_ask_for_what_nodes_export(title: str, query: str) -> None:
    # Not what rules record: the dashboard works without them.
    assert find_selectors(query)
    assert find_faults(query, read_series()) == []


@pytest.mark.parametrize(
    ("title", "query"), QUERIES, ids=[f"{title}-{index}" for index, (title, _) in enumerate(QUERIES)]
)
def test_a_real_parser_takes_the_queries(title: str, query: str) -> None:
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    shown = query.replace("$__rate_interval", "1m")
    assert read_parsed(parser.parse(shown), set()) == {one.name for one in find_selectors(query)}


@pytest.mark.parametrize("query", [query for _, query in QUERIES])
def test_queries_keep_to_the_chosen_run_and_nodes(query: str) -> None:
    for selector in find_selectors(query):
        assert {("run", "=~", "$run"), ("instance", "=~", "$instance")} <= set(selector.matchers)


def test_everything_that_must_be_seen_is_there() -> None:
    asked = {selector.name for _, query in QUERIES for selector in find_selectors(query)}
    for what, names in SHOWN.items():
        assert names <= asked, what


def test_panels_fill_the_grid_without_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= COLUMNS, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
    heights = {y for _, y in taken}
    assert heights == set(range(max(heights) + 1)), "no empty line"
    assert len(taken) == COLUMNS * len(heights), "every line is filled to its end"


def test_titles_fit_above_their_panels() -> None:
    # A column is a 24th of a window 1,280 wide, less the menu; Grafana writes titles at 14 px, about 7.5 a character.
    for panel in GRAPHS:
        assert 7.5 * len(panel["title"]) + 24 <= panel["gridPos"]["w"] * (1_280 - 56) / COLUMNS, panel["title"]


def test_panels_say_what_they_show() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in GRAPHS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        if panel["type"] == "timeseries":
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_legends_name_labels_that_the_query_leaves() -> None:
    known = read_series()
    for panel in GRAPHS:
        for target in panel["targets"]:
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            left = (
                {label.strip() for one in grouped for label in one.split(",")}
                if grouped
                else {"instance"}.union(*(known[one.name] for one in find_selectors(target["expr"])))
            )
            assert labels <= left, panel["title"]


def test_variables_are_those_the_queries_use() -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == variables.keys()
    for name in ("run", "instance"):
        # Chosen as a whole they also take nodes whose scraper gives them no such label.
        assert variables[name]["allValue"] == ".*"
        series = re.search(r"label_values\((\w+)", variables[name]["definition"])
        assert series is not None
        assert series[1] in read_series()


def test_alerts_are_drawn_by_the_names_they_have() -> None:
    (annotation,) = DASHBOARD["annotations"]["list"]
    assert 'alertname=~"Pulsenet.*"' in annotation["expr"]
    assert all(name.startswith("Pulsenet") for name in re.findall(r"alert: (\w+)", _read_alerts()))


def _read_alerts() -> str:
    return (ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml").read_text()


def test_grafana_is_given_the_data_source_and_the_dashboard() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert source["isDefault"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "pulsenet.yml").read_text())["providers"]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    mounted = {one.split(":")[1]: one.split(":")[0] for one in compose["services"]["grafana"]["volumes"] if "./" in one}
    assert (ROOT / mounted[provider["options"]["path"] + "/pulsenet.json"]).resolve() == GRAFANA / "pulsenet.json"
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]


def test_names_of_recorded_series_never_hide_those_of_nodes() -> None:
    assert not {name for name in read_known() if ":" in name} & read_series().keys()
