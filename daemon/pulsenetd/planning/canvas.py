"""Two sheets that take the same strokes: one writes SVG, the other PNG, with nothing but numpy and zlib."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final, Protocol
from xml.sax.saxutils import escape

import numpy as np

from pulsenetd.planning.letters import LETTER_HEIGHT, LETTER_WIDTH, letter

Point = tuple[float, float]

TEXT_SIZE: Final = 13
DASH: Final = 7.0
"""Length of a dash; gaps are as long."""

_FINE: Final = 2
"""Pixels are made of so many squared, so that slanting lines are smooth."""
_DOT: Final = 3
"""Fine pixels of a dot of a letter: letters are about as large as SVG's."""


class Canvas(Protocol):
    """A sheet with its origin at the top left; colours are like ``#0969da``."""

    def line(self, points: Sequence[Point], colour: str, *, dashed: bool = False, width: int = 1) -> None:
        """Draw through the points."""

    def text(self, x: float, y: float, text: str, colour: str = "#000000") -> None:
        """Write from the left end of a base line."""

    def to_bytes(self) -> bytes:
        """Return the file."""


class SvgCanvas:
    """Collects elements."""

    def __init__(self, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'font-family="sans-serif" font-size="{TEXT_SIZE}">',
            '<rect width="100%" height="100%" fill="white"/>',
        ]

    def line(self, points: Sequence[Point], colour: str, *, dashed: bool = False, width: int = 1) -> None:
        """Draw through the points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{DASH:g}"' if dashed else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>')

    def text(self, x: float, y: float, text: str, colour: str = "#000000") -> None:
        """Write from the left end of a base line."""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{escape(text)}</text>')

    def to_bytes(self) -> bytes:
        """Return the file."""
        return "\n".join((*self._parts, "</svg>", "")).encode()


class PngCanvas:
    """Sets pixels."""

    def __init__(self, width: int, height: int) -> None:
        self._pixels = np.full((height * _FINE, width * _FINE, 3), 255, np.uint8)

    def line(self, points: Sequence[Point], colour: str, *, dashed: bool = False, width: int = 1) -> None:
        """Draw through the points."""
        corners = np.asarray(points, np.float64)
        lengths = np.concatenate(([0.0], np.cumsum(np.hypot(*np.diff(corners, axis=0).T))))
        at = np.arange(0.0, lengths[-1], 0.5 / _FINE)
        if dashed:
            at = at[at // DASH % 2 == 0]
        across = np.arange(width * _FINE) - (width * _FINE - 1) / 2
        for down in across:
            for right in across:
                self._set(
                    np.interp(at, lengths, corners[:, 0]) * _FINE + right,
                    np.interp(at, lengths, corners[:, 1]) * _FINE + down,
                    colour,
                )

    def text(self, x: float, y: float, text: str, colour: str = "#000000") -> None:
        """Write from the left end of a base line."""
        for place, character in enumerate(text):
            rows, columns = np.nonzero(np.kron(letter(character), np.ones((_DOT, _DOT), np.bool_)))
            left = x * _FINE + place * (LETTER_WIDTH + 1) * _DOT
            self._set(columns + left, rows + (y * _FINE - LETTER_HEIGHT * _DOT), colour)

    def to_bytes(self) -> bytes:
        """Return the file."""
        height, width = self._pixels.shape[0] // _FINE, self._pixels.shape[1] // _FINE
        squares = self._pixels.reshape(height, _FINE, width, _FINE, 3)
        pixels = squares.mean(axis=(1, 3)).astype(np.uint8).reshape(height, width * 3)
        # Each row begins with its filter: 0, none.
        rows = np.concatenate((np.zeros((height, 1), np.uint8), pixels), axis=1)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
            for name, body in parts
        )

    def _set(self, x: np.ndarray, y: np.ndarray, colour: str) -> None:
        """Set what lies on the sheet."""
        columns, rows = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
        height, width, _ = self._pixels.shape
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        self._pixels[rows[inside], columns[inside]] = tuple(bytes.fromhex(colour.removeprefix("#")))
