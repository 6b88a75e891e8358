"""What a node exports and what rules add to it; and whether a query asks for nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml
from promql import find_labels, find_selectors

from pulsenetd import metrics
from pulsenetd.handlers.reporting import PEER_KINDS
from pulsenetd.metrics import Metrics

ROOT: Final = Path(__file__).resolve().parents[2]
RULES: Final = ROOT / "deploy" / "prometheus" / "rules"

TARGET_LABELS: Final = frozenset({"job", "instance", "role", "run"})
"""What a scrape configuration adds."""

VALUES: Final = {
    **{
        (f"pulsenet_{name}_total", label): values
        for name, (_, labels) in metrics.COUNTERS.items()
        for label, values in labels.items()
    },
    ("pulsenet_peers", "kind"): frozenset(PEER_KINDS),
    ("pulsenet_update_seconds", "stage"): frozenset(metrics.STAGES),
    ("up", "job"): frozenset({"pulsenet"}),
    ("pulsenet_reachable", "role"): frozenset({"trainer", "inferencer", "seed"}),
}
"""Values each label may have."""


def read_series() -> dict[str, frozenset[str]]:
    """Return the labels of everything a query may ask a node for, by name."""
    series: dict[str, frozenset[str]] = {"up": frozenset()}
    for collector in Metrics().registry._collector_to_names:
        labels = frozenset(collector._labelnames)  # type: ignore[attr-defined]
        for family in collector.collect():
            if family.type == "histogram":
                series[f"{family.name}_bucket"] = labels | {"le"}
                series[f"{family.name}_sum"] = series[f"{family.name}_count"] = labels
            else:
                series[family.name + ("_total" if family.type == "counter" else "")] = labels
    return series


def read_rules(name: str) -> list[dict[str, Any]]:
    """Return the rules of a file in deploy/prometheus/rules."""
    return [rule for group in yaml.safe_load((RULES / name).read_text())["groups"] for rule in group["rules"]]


def read_known() -> dict[str, frozenset[str]]:
    """Return what :func:`read_series` does, and the series that recording rules add."""
    known = read_series()
    for rule in read_rules("recording.yml"):
        asked = [known[selector.name] for selector in find_selectors(rule["expr"])]
        known[rule["record"]] = frozenset().union(*asked)
    return known


def find_faults(query: str, known: dict[str, frozenset[str]]) -> list[str]:
    """Return what a query asks for that is nowhere."""
    faults, labels = [], set[str]()
    for selector in find_selectors(query):
        if selector.name not in known:
            faults.append(f"no series is called {selector.name}")
            continue
        labels |= known[selector.name]
        base = re.sub(r"_(bucket|sum|count)$", "", selector.name)
        for label, operator, value in selector.matchers:
            if value.startswith("$"):
                continue  # a variable of the dashboard
            if label not in known[selector.name] | TARGET_LABELS:
                faults.append(f"{selector.name} has no label {label}")
                continue
            allowed = VALUES.get((base, label))
            if allowed is None:
                faults.append(f"no values are known of {label} of {selector.name}")
                continue
            for one in value.split("|") if "~" in operator else [value]:
                if operator == "=~" and one.endswith(".*"):
                    one = one.removesuffix(".*")
                if one not in allowed:
                    faults.append(f"{label} of {selector.name} is never {one}")
    faults += [f"nothing has the label {label}" for label in find_labels(query) - labels - TARGET_LABELS]
    return faults
