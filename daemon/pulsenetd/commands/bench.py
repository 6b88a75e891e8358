"""``pulsenet bench codec``: what each encoding costs on this machine, beside the layouts of public systems."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pulsenet.errors import UsageError

SYNTHETIC_SEED: Final = 7
SYNTHETIC_ELEMENTS: Final = 16_000_000

_DESCRIPTION = """\
Encode the step from checkpoint A to checkpoint B with every encoding, and with the layouts public systems use:
bytes, ratio to a full transfer, bits per change beside the entropy bounds, and speed. Every encoding must first
give B back bit for bit. Without A and B: a synthetic model that changes as recorded training runs do.
"""

_EXAMPLES = (
    ("pulsenet bench codec", "a synthetic model, no files needed"),
    ("pulsenet bench codec OLD NEW", "your own checkpoints"),
    ("pulsenet bench codec OLD NEW --plot codec.svg", "a picture too"),
)


def add_parser(commands: Any) -> None:
    """Add ``bench codec`` to the command line."""
    parser = commands.add_parser("bench", help="measure encodings on your own checkpoints", examples=_EXAMPLES[1:2])
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    codec = actions.add_parser(
        "codec",
        help="bytes, bits and speed of every encoding",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    codec.add_argument("old", metavar="A", nargs="?", help="safetensors file or directory")
    codec.add_argument("new", metavar="B", nargs="?", help="safetensors file or directory, some steps later")
    codec.add_argument("--trace", metavar="DIR", help="measure a recorded run instead")
    codec.add_argument("--view", choices=("off", "grid"), default="off", help="of the trace (default: off)")
    codec.add_argument("--steps", metavar="FIRST-LAST", default="20-36", help="of the trace (default: 20-36)")
    codec.add_argument(
        "--seconds", type=float, default=0.5, metavar="N", help="for each speed; 0 for sizes alone (default: 0.5)"
    )
    codec.add_argument("--json", action="store_true", help="print one JSON object")
    codec.add_argument("--plot", metavar="FILE", help="write a picture (.svg) too")
    codec.set_defaults(run_command=_codec)


def _codec(arguments: argparse.Namespace) -> int:
    from pulsenetd.bench.plot import check_plot_path, write_plot

    if (arguments.old is None) != (arguments.new is None):
        raise UsageError("bench codec takes two checkpoints, or none for a synthetic model")
    if arguments.old is not None and arguments.trace is not None:
        raise UsageError("bench codec takes checkpoints or --trace, not both")
    if not 0 <= arguments.seconds <= 60:
        raise UsageError(f"--seconds: {arguments.seconds:g} is not from 0 to 60")
    plot = None if arguments.plot is None else Path(arguments.plot)
    if plot is not None:
        check_plot_path(plot)
    # Before minutes are spent on what could not be shown.
    from pulsenetd.bench.report import print_report

    figures = _measure(arguments)
    _progress("")
    if plot is not None:
        write_plot(figures, plot)
    if arguments.json:
        print(json.dumps(figures))
    else:
        print_report(figures, sys.stdout)
    return 0


def _measure(arguments: argparse.Namespace) -> Mapping[str, Any]:
    from pulsenetd.bench.measure import measure_pairs
    from pulsenetd.bench.pairs import open_pair
    from pulsenetd.bench.synthetic import make_synthetic_pair
    from pulsenetd.bench.trace import Trace

    if arguments.trace is not None:
        first, last = _parse_steps(arguments.steps)
        trace = Trace(Path(arguments.trace), arguments.view)
        # The time is for all steps together.
        seconds = arguments.seconds / (last - first + 1)
        source = f"trace, view {arguments.view}, steps {first}-{last}"
        return {"source": source, **measure_pairs(trace.pairs(first, last), seconds=seconds, on_progress=_progress)}
    if arguments.old is not None:
        with open_pair(Path(arguments.old), Path(arguments.new)) as pair:
            figures = measure_pairs([pair], seconds=arguments.seconds, on_progress=_progress)
            return {"source": f"{arguments.old} to {arguments.new}", **figures}
    pair = make_synthetic_pair(seed=SYNTHETIC_SEED, element_count=SYNTHETIC_ELEMENTS)
    figures = measure_pairs([pair], seconds=arguments.seconds, on_progress=_progress)
    return {"source": f"synthetic step (seed {SYNTHETIC_SEED})", **figures}


def _parse_steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})-(\d{1,6})", text)
    if found is None or int(found[1]) > int(found[2]):
        raise UsageError(f"--steps: '{text}' is no range like 20-36")
    return int(found[1]), int(found[2])


def _progress(text: str) -> None:
    """Say on a terminal what is being measured; big checkpoints take minutes. No text wipes the line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Kmeasuring {text} ...\r" if text else "\r\033[K")
        sys.stderr.flush()
