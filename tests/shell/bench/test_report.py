"""Figures for people."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import StorageError, UsageError
from pulsenetd.bench.plot import check_plot_path, draw_plot, write_plot
from pulsenetd.bench.report import print_report

FIGURES: dict[str, Any] = {
    "source": "old & new",
    "pairs": 1,
    "elements": 1_000_000,
    "changes": 6_000,
    "density_ratio": 0.006,
    "dense_bytes": 2_000_000,
    "entropy_bits": {"density": 10.5, "exponent": 7.25},
    "cores": 2,
    "memory": {
        f"{kind}_mb_s{suffix}": 12_345.0 for kind in ("copy", "read", "compare") for suffix in ("", "_all_cores")
    },
    "codecs": [
        {
            "name": name,
            "bytes": size,
            "ratio": 2_000_000 / size,
            "bits_per_change": size * 8 / 6_000,
            "encode_mb_s": speed,
            "decode_mb_s": speed,
            "encode_all_cores_mb_s": speed,
            "decode_all_cores_mb_s": speed,
        }
        for name, size, speed in (("plain", 9_000, 2_345.6), ("dense", 1_500_000, None))
    ],
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_the_table_has_every_codec_and_the_bounds(stream: io.StringIO) -> None:
    print_report(FIGURES, stream)
    text = stream.getvalue()
    for part in (
        "old & new",
        "0.6000%",
        "10.50",
        "7.25",
        "plain",
        "9,000",
        "222.2",
        "12.00",
        "2,346",
        "dense",
        "12,345",
    ):
        assert part in text


def test_plain_output_has_no_control_characters_and_straight_columns() -> None:
    stream = io.StringIO()
    print_report(FIGURES, stream)
    assert "\x1b" not in stream.getvalue()
    rows = [line for line in stream.getvalue().splitlines() if line.startswith(("encoding", "plain", "dense"))]
    assert len(rows) == 3
    assert len({len(row) for row in rows}) == 1


def test_the_picture_is_valid_and_shows_all_bars_and_bounds() -> None:
    root = ElementTree.fromstring(draw_plot(FIGURES))  # noqa: S314
    space = "{http://www.w3.org/2000/svg}"
    text = " ".join(root.itertext())
    assert "old & new" in text
    assert "12.00 bits, 222x smaller" in text
    assert len(root.findall(f"{space}line")) == 2
    background, plain, dense = (float(bar.get("width", "0").rstrip("%")) for bar in root.findall(f"{space}rect"))
    assert background == 100
    assert 0 < plain < dense <= 480


def test_a_picture_without_changes_is_drawn_too() -> None:
    codecs = [{**codec, "bits_per_change": 0.0} for codec in FIGURES["codecs"]]
    empty = {**FIGURES, "codecs": codecs, "entropy_bits": {"density": 0.0, "exponent": 0.0}}
    ElementTree.fromstring(draw_plot(empty))  # noqa: S314


def test_only_svg_in_a_directory_that_exists_is_taken(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.svg"):
        check_plot_path(tmp_path / "plot.png")
    with pytest.raises(UsageError, match="no directory"):
        check_plot_path(tmp_path / "absent" / "plot.svg")
    check_plot_path(tmp_path / "plot.svg")


def test_a_picture_that_cannot_be_written_is_a_storage_failure(tmp_path: Path) -> None:
    write_plot(FIGURES, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
    with pytest.raises(StorageError, match="cannot write"):
        write_plot(FIGURES, tmp_path)
