"""Both sheets take the same strokes and write files that others read."""

from __future__ import annotations

import struct
import zlib
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from pulsenetd.planning.canvas import PngCanvas, SvgCanvas


def read_png(data: bytes) -> NDArray[np.uint8]:
    """Return the pixels of an RGB picture without filters."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    parts, at = [], 8
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size) == (zlib.crc32(name + body),)
        parts.append((name, body))
        at += size + 12
    assert [name for name, _ in parts] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *form = struct.unpack(">IIBBBBB", parts[0][1])
    assert form == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(parts[1][1]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_png_has_the_line_where_it_was_drawn() -> None:
    canvas = PngCanvas(40, 30)
    canvas.line([(5, 10), (35, 10)], "#ff0000", width=2)
    pixels = read_png(canvas.to_bytes())
    assert pixels.shape == (30, 40, 3)
    assert tuple(pixels[10, 20]) == (255, 0, 0)
    assert (pixels[[3, 20]] == 255).all()
    assert (pixels[:, [1, 38]] == 255).all()


def test_dashes_leave_gaps() -> None:
    canvas = PngCanvas(100, 10)
    canvas.line([(0, 5), (100, 5)], "#000000", dashed=True)
    darkest = read_png(canvas.to_bytes()).min(axis=(0, 2))
    assert darkest.min() < 200
    assert (darkest == 255).sum() > 30


def test_text_is_written_above_its_base_line() -> None:
    canvas = PngCanvas(60, 40)
    canvas.text(10, 30, "HI", "#0000ff")
    rows, columns = np.nonzero((read_png(canvas.to_bytes()) != 255).any(axis=2))
    assert rows.max() <= 30
    assert rows.min() >= 18
    assert columns.min() == 10


def test_what_lies_off_the_sheet_is_left_out() -> None:
    canvas = PngCanvas(20, 20)
    canvas.line([(-50, -50), (70, -10)], "#000000")
    canvas.text(15, 100, "far below")
    assert (read_png(canvas.to_bytes()) == 255).all()


def test_svg_is_xml_with_every_stroke() -> None:
    canvas = SvgCanvas(40, 30)
    canvas.line([(5, 10), (35, 10)], "#ff0000", dashed=True)
    canvas.text(1, 2, "a < b")
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(canvas.to_bytes())]  # noqa: S314
    assert tags == ["rect", "polyline", "text"]
