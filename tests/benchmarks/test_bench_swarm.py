"""The swarm benchmark measures, and writes tables and plot into its document."""

from __future__ import annotations

from pathlib import Path

import bench_swarm as bench


def test_figures_go_between_the_marks_and_the_plot_beside(tmp_path: Path) -> None:
    figures = bench.measure([2, 5], [2], 1)
    document = tmp_path / "scale.md"
    document.write_text("before\n\n<!-- figures -->\nold\n<!-- end of figures -->\n\nafter\n")
    bench.write(figures, document)
    text = document.read_text()
    assert text.startswith("before\n\n<!-- figures -->\n")
    assert text.endswith("<!-- end of figures -->\n\nafter\n")
    assert "old" not in text
    assert text.count("| patch 100 MB |") == 2
    assert text.count("| anchor 14 GB |") == 2
    assert (tmp_path / "scale.svg").read_text().count("<polyline") == 2
    assert all(row["ratio"] >= 1 for row in figures["model"])
