"""Prints benchmark figures for people: a table on a terminal, plain columns elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TextIO

from rich.console import Console
from rich.table import Table

HEADINGS: Final = ("encoding", "bytes", "ratio", "bits/\nchange", "encode", "decode", "encode\nall", "decode\nall")


def print_report(figures: Mapping[str, Any], stream: TextIO) -> None:
    """Write what ``measure_pairs`` returned; speeds are MB of dense bytes per second."""
    rows = [_row(codec) for codec in figures["codecs"]]
    stream.write(_heading(figures) + "\n\n")
    if stream.isatty():
        table = Table(box=None, header_style="bold")
        for position, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if position == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console = Console(file=stream)
        # A narrow terminal wraps lines; figures are never cut.
        console.print(table, width=max(console.width, console.measure(table).minimum), crop=False)
    else:
        lines = (tuple(heading.replace("\n", " ") for heading in HEADINGS), *rows)
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
        for line in lines:
            first, *others = (
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            stream.write("  ".join((first, *others)) + "\n")
    if figures["memory"]["copy_mb_s"] is not None:
        stream.write("\n" + _footing(figures) + "\n")


def _row(codec: Mapping[str, Any]) -> tuple[str, ...]:
    speeds = ("encode_mb_s", "decode_mb_s", "encode_all_cores_mb_s", "decode_all_cores_mb_s")
    return (
        codec["name"],
        f"{codec['bytes']:,}",
        f"{codec['ratio']:,.1f}",
        f"{codec['bits_per_change']:.2f}",
        *(_speed(codec[name]) for name in speeds),
    )


def _speed(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def _heading(figures: Mapping[str, Any]) -> str:
    bounds = figures["entropy_bits"]
    return (
        f"{figures['source']}: {figures['dense_bytes']:,} dense bytes, {figures['changes']:,} of "
        f"{figures['elements']:,} elements changed ({figures['density_ratio']:.4%})\n"
        f"bounds, bits a change: {bounds['density']:.2f} knowing the density, "
        f"{bounds['exponent']:.2f} knowing the old exponents"
    )


def _footing(figures: Mapping[str, Any]) -> str:
    memory = figures["memory"]
    pairs = (("copy", "memory copy"), ("read", "bare read of both versions"), ("compare", "compare and compact"))
    rates = ", ".join(
        f"{text} {_speed(memory[f'{kind}_mb_s'])} ({_speed(memory[f'{kind}_mb_s_all_cores'])})" for kind, text in pairs
    )
    return (
        f"MB/s of dense bytes on 1 core and on all {figures['cores']}; decoding ends with the new weights in place.\n"
        f"Same run, MB/s, 1 core (all): {rates}."
    )
