"""Draws benchmark figures as an SVG picture: bits per change of each encoding, beside the entropy bounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from pulsenet.errors import StorageError, UsageError

LABEL_WIDTH: Final = 150
BAR_WIDTH: Final = 480
VALUE_WIDTH: Final = 190
ROW_HEIGHT: Final = 26
TOP: Final = 56
BOTTOM: Final = 34

BOUND_COLOURS: Final = {"density": "#9a6700", "exponent": "#1a7f37"}


def check_plot_path(path: Path) -> None:
    """Refuse a picture that could not be written, before anything is measured.

    Raises:
        UsageError: Not an SVG file, or in no directory.
    """
    if path.suffix.lower() != ".svg":
        raise UsageError(f"--plot: {path} must end in .svg, the one picture format there is")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: {path.parent} is no directory: make it first")


def write_plot(figures: Mapping[str, Any], path: Path) -> None:
    """Write the picture of what ``measure_pairs`` returned.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        path.write_text(draw_plot(figures), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def draw_plot(figures: Mapping[str, Any]) -> str:
    """Return the picture as SVG."""
    codecs, bounds = figures["codecs"], figures["entropy_bits"]
    # Dense encodings are off any useful scale: their bars are cut.
    scale_end = max([*bounds.values(), *(min(codec["bits_per_change"], 60.0) for codec in codecs), 1.0]) * 1.05
    height = TOP + ROW_HEIGHT * len(codecs) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL_WIDTH + BAR_WIDTH + VALUE_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="15">Bits per changed value: {escape(str(figures["source"]))}</text>',
    ]
    for row, codec in enumerate(codecs):
        parts.append(_draw_bar(codec, TOP + row * ROW_HEIGHT, scale_end))
    for name, bits in bounds.items():
        x = LABEL_WIDTH + BAR_WIDTH * bits / scale_end
        colour = BOUND_COLOURS[name]
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - BOTTOM}" stroke="{colour}" '
            'stroke-dasharray="4 3"/>'
        )
    legend = "dashed: entropy bounds knowing "
    texts = (f'<tspan fill="{BOUND_COLOURS[name]}">the {name} ({bits:.2f})</tspan>' for name, bits in bounds.items())
    parts.append(f'<text x="8" y="{height - 12}" font-size="12">{legend}{" and ".join(texts)}</text>')
    return "\n".join((*parts, "</svg>", ""))


def _draw_bar(codec: Mapping[str, Any], top: int, scale_end: float) -> str:
    width = BAR_WIDTH * min(codec["bits_per_change"] / scale_end, 1.0)
    middle = top + ROW_HEIGHT // 2 + 4
    return (
        f'<text x="8" y="{middle}">{escape(codec["name"])}</text>'
        f'<rect x="{LABEL_WIDTH}" y="{top + 4}" width="{width:.1f}" height="{ROW_HEIGHT - 8}" fill="#0969da"/>'
        f'<text x="{LABEL_WIDTH + width + 6:.1f}" y="{middle}">{codec["bits_per_change"]:.2f} bits, '
        f"{codec['ratio']:,.0f}x smaller</text>"
    )
