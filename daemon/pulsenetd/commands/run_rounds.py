"""Options of ``pulsenet run create`` for trainers that train together, and how ``run show`` prints them."""

from __future__ import annotations

import argparse
import math
from typing import Any, Final

from pulsenet import limits
from pulsenet.chain.records import ALGORITHM_NONE, Descriptor
from pulsenet.errors import ConfigError, RemoteProtocolError, UsageError
from pulsenetd import config
from pulsenetd.commands import run_mixing

ALGORITHMS: Final = (ALGORITHM_NONE, "pulseloco", "diloco", "ddp", run_mixing.ALGORITHM)
COMBINATIONS: Final = ("mean", "median", "trimmed")

CONSTANTS: Final[tuple[tuple[str, type, str], ...]] = (
    ("inner_steps", int, "inner steps of a round (8)"),
    ("learning_rate", float, "of the outer optimizer (0.7)"),
    ("momentum_factor", float, "of the outer optimizer (0.9)"),
    ("missed_rounds_max", int, "rounds missed in a row before a residual is given up (2)"),
    ("clip_norm_ratio", float, "cut norms to this multiple of the median; 0 cuts none (0)"),
    ("norm_max", float, "refuse contributions of a larger norm (1e18)"),
    ("combination", str, "how contributions are combined: mean, median, trimmed (mean)"),
    ("trim_count", int, "with trimmed: left out on each side (0)"),
    ("state_anchor_interval", int, "rounds between state anchors (10)"),
    ("flush_interval", int, "rounds in which every block passes the gate whole once; 0: never (8)"),
    ("flush_mantissa_bits", int, "mantissa bits of values that pass so; the rest waits (1)"),
    ("contributions_min", int, "contributions without which no round closes (1)"),
    ("contribution_wait_seconds", int, "then wait so long for the other trainers (30)"),
    (
        "all_gather_ratio_min",
        float,
        "sum by slice where whole contributions save less than this; 0: never (17, with flushes 10)",
    ),
)
"""Name in the descriptor, type of the option, help with the default of the specification."""

FLUSH_INTERVAL: Final = 8
"""Of new runs: every block in turn, so that PULSELoCo follows DiLoCo by a few rounds (docs/outer.md). Without it in the
descriptor, as in older runs, nothing is flushed."""

FLUSH_MANTISSA_BITS: Final = 1
"""Of new runs: with these two, payloads are still some 27 times below dense FP32."""

FLUSH_ALL_GATHER_RATIO_MIN: Final = 10.0
"""Of new runs with flushes: sums of cut values encode badly, so that slices save from 6 trainers on (docs/outer.md)."""

COUNT_MAX: Final = (1 << 31) - 1
"""Of inner steps, rounds and seconds."""

_CLOSING: Final = ("contributions_min", "contribution_wait_seconds", "all_gather_ratio_min")
"""Constants that govern when a round closes and what travels, not what it computes."""


def add_options(create: argparse.ArgumentParser) -> None:
    """Add the algorithm and its constants to ``run create``."""
    together = create.add_argument_group("training together")
    together.add_argument(
        "--algorithm", choices=ALGORITHMS, default=ALGORITHM_NONE, help="how trainers train together (none)"
    )
    together.add_argument(
        "--open-trainers", type=int, default=0, metavar="N", help="unlisted trainers admitted a round"
    )
    for name, kind, text in CONSTANTS:
        choices = COMBINATIONS if name == "combination" else None
        metavar = None if choices else "N" if kind is int else "X"
        together.add_argument(
            config.flag_name(name), type=kind, default=None, choices=choices, metavar=metavar, help=text
        )
    run_mixing.add_options(create)


def choose_algorithm(arguments: argparse.Namespace) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return the algorithm and the constants to sign, ascending by name: reals as the bits of their FP32 value.

    Raises:
        UsageError: A constant that no run can have, or one without rounds.
    """
    from pulsenet.outer.floats import fp32_to_bits
    from pulsenet.outer.settings import Algorithm, Combination, OuterSettings

    given = {name: value for name, _, _ in CONSTANTS if (value := getattr(arguments, name)) is not None}
    mixing = run_mixing.take_given(arguments)
    if arguments.algorithm == ALGORITHM_NONE:
        if given or mixing or arguments.open_trainers:
            flag = config.flag_name(next(iter((*given, *mixing)), "open_trainers"))
            raise UsageError(f"{flag}: a run without rounds has no such constant; give --algorithm pulseloco")
        return ALGORITHM_NONE, ()
    for name, value in (*given.items(), *mixing.items()):
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{config.flag_name(name)}: {value} is no finite number")
        if isinstance(value, int) and value > COUNT_MAX:
            raise UsageError(f"{config.flag_name(name)}: {value} is above {COUNT_MAX}")
    if arguments.algorithm == run_mixing.ALGORITHM:
        return run_mixing.ALGORITHM, run_mixing.choose_constants(given | mixing)
    if mixing:
        raise UsageError(f"{config.flag_name(next(iter(mixing)))} goes with --algorithm gossip")
    if arguments.algorithm == Algorithm.PULSELOCO:
        given.setdefault("flush_interval", FLUSH_INTERVAL)
        if given["flush_interval"] > 0:
            given.setdefault("flush_mantissa_bits", FLUSH_MANTISSA_BITS)
            given.setdefault("all_gather_ratio_min", FLUSH_ALL_GATHER_RATIO_MIN)
    closing = {name: given.pop(name) for name in _CLOSING if name in given}
    for name, value in closing.items():
        # A receipt lists no more: the rounds would never close.
        least, most = (1, limits.ROUND_MEMBERS_MAX) if name == "contributions_min" else (0, COUNT_MAX)
        if not least <= value <= most:
            raise UsageError(f"{config.flag_name(name)}: {value} is not from {least} to {most}")
    if "all_gather_ratio_min" in closing:
        closing["all_gather_ratio_min"] = fp32_to_bits(closing["all_gather_ratio_min"])
    if "combination" in given:
        given["combination"] = Combination(given["combination"])
        if given["combination"] is Combination.TRIMMED and not given.get("trim_count"):
            raise UsageError("--trim-count: trimmed leaves nothing out without it; say how many on each side")
    try:
        settings = OuterSettings(algorithm=Algorithm(arguments.algorithm), **given)
    except ConfigError as error:
        raise UsageError(run_mixing.name_flags(str(error), CONSTANTS)) from error
    return arguments.algorithm, tuple(sorted((*settings.to_constants(), *closing.items())))


def describe_algorithm(descriptor: Descriptor) -> dict[str, Any]:
    """Return what ``run show`` prints of the rounds; a constant this version does not know is shown as it is.

    Constants are signed as FP32. They are shown by the fewest digits that mean the same bits, as they were typed.
    """
    import numpy as np

    shown = _describe(descriptor)
    return {name: float(str(np.float32(value))) if type(value) is float else value for name, value in shown.items()}


def _describe(descriptor: Descriptor) -> dict[str, Any]:
    from pulsenet.chain.round_settings import RoundSettings
    from pulsenet.outer.settings import OuterSettings

    shown: dict[str, Any] = {"algorithm": descriptor.algorithm}
    if descriptor.algorithm == ALGORITHM_NONE:
        return shown
    shown["open_trainers_max"] = descriptor.open_trainers_max
    try:
        if descriptor.algorithm == run_mixing.ALGORITHM:
            return {**shown, **run_mixing.describe(descriptor.constants)}
        settings: Any = OuterSettings.from_constants(descriptor.algorithm, descriptor.constants)
        closing: Any = RoundSettings.of(descriptor)
    except (ConfigError, RemoteProtocolError):
        return {**shown, "constants": [f"{name} = {value}" for name, value in descriptor.constants]}
    for name, _, _ in CONSTANTS:
        value = getattr(closing if name in _CLOSING else settings, name)
        shown[name] = str(value) if name == "combination" else value
    return shown
