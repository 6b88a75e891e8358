"""docs/metrics.md and the code name the same series, types, labels and label values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pulsenetd import metrics
from pulsenetd.handlers.reporting import PEER_KINDS
from pulsenetd.metrics import Metrics

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

HINT = "give it a row in docs/metrics.md"

LABEL_VALUES = {
    # (series, label): what the code counts under, apart from "other"
    ("pulsenet_peers", "kind"): frozenset(PEER_KINDS),
    ("pulsenet_bytes_total", "direction"): frozenset(metrics.DIRECTIONS),
    ("pulsenet_bytes_total", "kind"): metrics.KINDS,
    ("pulsenet_blob_bytes_total", "direction"): frozenset(metrics.DIRECTIONS),
    ("pulsenet_blob_bytes_total", "kind"): metrics.BLOB_KINDS,
    ("pulsenet_p2pd_restarts_total", "reason"): metrics.RESTARTS,
    ("pulsenet_rollouts_total", "outcome"): metrics.ROLLOUTS,
    ("pulsenet_tasks_total", "outcome"): metrics.TASKS,
    ("pulsenet_rollout_checks_total", "outcome"): metrics.CHECKS,
    ("pulsenet_contributions_total", "fate"): metrics.FATES,
    ("pulsenet_wasted_inner_steps_total", "reason"): metrics.WASTES,
    ("pulsenet_slices_total", "outcome"): metrics.SLICES,
    ("pulsenet_votes_total", "outcome"): metrics.VOTES,
    ("pulsenet_update_seconds", "stage"): frozenset(metrics.STAGES),
}
"""Every label but reasons, which are far too many for a table."""

REASONED = {
    ("pulsenet_wasted_bytes_total", "reason"),
    ("pulsenet_rejected_total", "reason"),
    ("pulsenet_retries_total", "reason"),
}


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


def test_every_label_is_known_here() -> None:
    labels = {(name, label) for name, (_, names) in read_exported().items() for label in names}
    assert labels == LABEL_VALUES.keys() | REASONED, "add it to LABEL_VALUES above"


@pytest.mark.parametrize(("series", "label"), sorted(LABEL_VALUES))
def test_label_values_are_those_of_the_code(series: str, label: str) -> None:
    rows = {row[0]: row[1] for row in read_section("Labels")}
    head = f"`{label}` of `{series}`"
    assert head in rows, HINT
    documented = set(re.findall(r"`([a-z_-]+)`", rows[head]))
    assert documented - {"other"} == {str(value) for value in LABEL_VALUES[series, label]} - {"other"}


def test_no_label_row_is_about_nothing() -> None:
    heads = [row[0] for row in read_section("Labels")]
    assert sorted(heads) == sorted(f"`{label}` of `{series}`" for series, label in LABEL_VALUES)


def test_the_reasons_of_the_disk_are_reasons_and_begin_at_zero() -> None:
    assert set(metrics.DISK_REASONS) <= metrics.REASONS
    registry = Metrics().registry
    for reason in metrics.DISK_REASONS:
        assert registry.get_sample_value("pulsenet_rejected_total", {"reason": reason}) == 0.0
    for reason in metrics.RESTARTS:
        assert registry.get_sample_value("pulsenet_p2pd_restarts_total", {"reason": reason}) == 0.0
    for reason in metrics.DISK_REASONS:
        assert f"`{reason}`" in DOCUMENT.read_text()
