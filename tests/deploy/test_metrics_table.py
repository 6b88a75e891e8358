"""docs/metrics.md and the code name the same series, types, labels and label values."""

from __future__ import annotations

import re

import pytest
from exported import ROOT, TARGET_LABELS, VALUES

from pulsenetd import metrics
from pulsenetd.metrics import Metrics

DOCUMENT = ROOT / "docs" / "metrics.md"

HINT = "give it a row in docs/metrics.md"

REASONED = {pair for pair in VALUES if pair[1] == "reason" and VALUES[pair] is metrics.REASONS}
"""Labels of far too many values for a table."""

LISTED = {pair: values for pair, values in VALUES.items() if pair not in REASONED and pair[1] not in TARGET_LABELS}


def read_section(heading: str) -> list[list[str]]:
    """Return the cells of the rows of a section's table, without its head."""
    section = DOCUMENT.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def read_exported() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return type and labels of every series of a node, by its name at ``/metrics``."""
    collectors = Metrics().registry._collector_to_names
    return {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, tuple(collector._labelnames))  # type: ignore[attr-defined]
        for collector in collectors
        for family in collector.collect()
    }


def read_documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    return {row[0].strip("`"): (row[1], tuple(re.findall(r"`(\w+)`", row[2]))) for row in read_section("Series")}


def test_every_series_has_a_row_and_every_row_a_series() -> None:
    exported, documented = read_exported(), read_documented()
    missing = exported.keys() - documented.keys()
    assert not missing, f"{HINT}: {', '.join(sorted(missing))}"
    gone = documented.keys() - exported.keys()
    assert not gone, f"docs/metrics.md names what no node exports: {', '.join(sorted(gone))}"
    assert documented == exported


def test_each_series_has_one_row_that_says_everything() -> None:
    rows = read_section("Series")
    names = [row[0] for row in rows]
    assert len(set(names)) == len(names)
    for name, _, _, unit, meaning, worry in rows:
        assert all((unit, meaning, worry)), f"{name}: unit, meaning and when to worry"


def test_names_end_in_the_unit_of_their_row() -> None:
    for name, kind, _, unit, _, _ in read_section("Series"):
        stem = name.strip("`").removesuffix("_total")
        for word, suffixes in {
            "seconds": ("_seconds",),
            "Unix time": ("_timestamp_seconds",),
            "bytes": ("_bytes",),
            "ratio": ("_ratio",),
        }.items():
            if unit == word:
                assert stem.endswith(suffixes), name
        assert name.strip("`").endswith("_total") == (kind == "counter"), name


def test_no_label_is_one_that_scrapers_set() -> None:
    """Prometheus would keep its own and call ours exported_job."""
    for name, (_, labels) in read_exported().items():
        assert not TARGET_LABELS & set(labels), name


def test_every_label_is_known_here() -> None:
    labels = {(name, label) for name, (_, names) in read_exported().items() for label in names}
    assert labels == LISTED.keys() | REASONED, "add it to VALUES in exported.py"


@pytest.mark.parametrize(("series", "label"), sorted(LISTED))
def test_label_values_are_those_of_the_code(series: str, label: str) -> None:
    rows = {row[0]: row[1] for row in read_section("Labels")}
    head = f"`{label}` of `{series}`"
    assert head in rows, HINT
    documented = set(re.findall(r"`([a-z0-9_-]+)`", rows[head]))
    assert documented - {"other"} == {str(value) for value in LISTED[series, label]} - {"other"}


def test_no_label_row_is_about_nothing() -> None:
    heads = [row[0] for row in read_section("Labels")]
    assert sorted(heads) == sorted(f"`{label}` of `{series}`" for series, label in LISTED)


def test_the_reasons_of_the_disk_are_reasons_and_begin_at_zero() -> None:
    assert set(metrics.DISK_REASONS) <= metrics.REASONS
    registry = Metrics().registry
    for reason in metrics.DISK_REASONS:
        assert registry.get_sample_value("pulsenet_rejected_total", {"reason": reason}) == 0.0
    for reason in metrics.RESTARTS:
        assert registry.get_sample_value("pulsenet_p2pd_restarts_total", {"reason": reason}) == 0.0
    for reason in metrics.DISK_REASONS:
        assert f"`{reason}`" in DOCUMENT.read_text()
