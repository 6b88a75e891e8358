"""The codec's promises about sizes, which no machine can change; speeds are for bench_codec.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_codec as bench
import pytest

from pulsenet.codec.patch import CODEC_CHOICES


def _check(lines: list[Any]) -> None:
    broken = [bench.format_line(line) for line in lines if line.passed is False]
    assert not broken, "\n".join(broken)
    unmeasured = [line.name for line in lines if line.passed is None]
    assert "tight" not in CODEC_CHOICES or not unmeasured, unmeasured


@pytest.mark.skipif(not (bench.TRACE / "trace.json").is_file(), reason="no recorded run beside the checkout")
def test_recorded_steps_cost_what_is_promised() -> None:
    names = bench.known("plain", "tight", "published")
    _check(list(bench.trace_lines(bench.measure_trace_sizes(bench.TRACE, names))))


def test_scattered_changes_cost_what_is_promised() -> None:
    """A-PRF-1"""
    _check(list(bench.scattered_lines()))


def test_no_input_makes_a_patch_grow_beyond_the_bound() -> None:
    _check(list(bench.bound_lines()))


def test_a_broken_promise_is_called_broken() -> None:
    assert bench.at_most("a", 1.0, 1.0).passed
    assert bench.at_most("a", 1.1, 1.0).passed is False
    assert bench.at_least("a", 1.0, 1.0).passed
    assert bench.at_least("a", 0.9, 1.0).passed is False
    assert bench.at_least("a", None, 1.0).passed is None
    assert "BROKEN" in bench.format_line(bench.at_most("a", 1.1, 1.0))


def test_tables_are_written_between_their_marks(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter\n")
    bench.replace_block(document, bench.BEGIN, bench.END, "new")
    assert document.read_text() == f"before\n{bench.BEGIN}\nnew\n{bench.END}\nafter\n"


def test_figures_of_cores_that_others_used_are_not_measured() -> None:
    figures: dict[str, Any] = {
        "cores": 2,
        "codecs": [
            {
                "name": name,
                "encode_mb_s": 4000.0,
                "decode_mb_s": 4000.0,
                "encode_all_cores_mb_s": 7000.0,
                "decode_all_cores_mb_s": 7000.0,
            }
            for name in ("plain", "tight")
        ],
        "memory": {
            f"{kind}_mb_s{cores}": rate
            for kind, rate in (("copy", 9000.0), ("read", 20_000.0), ("compare", 19_000.0))
            for cores in ("", "_all_cores")
        },
    }
    assert [line.passed for line in bench.speed_lines(figures)] == [True] * 8
    bench.drop_busy_figures(figures)
    assert [line.passed for line in bench.speed_lines(figures)] == [True] * 5 + [None] * 3
