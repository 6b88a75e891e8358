"""Options of ``pulsenet run create --algorithm gossip``, and how ``run show`` prints them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, Final

from pulsenet.errors import ConfigError, UsageError
from pulsenetd import config

ALGORITHM: Final = "gossip"

VARIANTS: Final = ("diloco", "global_m1", "global_m1_local_m2", "global_m1_local_m2_subset", "local_m1_m2")

CONSTANTS: Final[tuple[tuple[str, type, str], ...]] = (
    ("variant", str, "who mixes what (global_m1_local_m2)"),
    ("mixes_momentum", bool, "mix the outer momentum too"),
    ("mixing_gate", bool, "send only entries that would change a BF16 cast"),
    ("roster_rounds", int, "rounds a roster is valid for (8)"),
    ("mix1_wait_seconds", int, "how long after the inner steps Mix1 is waited for (10)"),
    ("mix2_wait_seconds", int, "how long Mix2 is waited for (30)"),
    ("probe_interval", int, "rounds between probes of disagreement; 0: never (8)"),
    ("disagreement_max", float, "distance above which Mix2's subset is widened; 0: never (0)"),
    ("subset_ratio", float, "share of the elements in the first subset (0.43)"),
)
"""Name in the descriptor, type of the option, help with the default of the specification."""

SHARED: Final = frozenset({"inner_steps", "learning_rate", "momentum_factor", "norm_max"})
"""Constants that runs with rounds have as well."""


def add_options(create: argparse.ArgumentParser) -> None:
    """Add the constants of mixing to ``run create``."""
    mixing = create.add_argument_group("with --algorithm gossip")
    for name, kind, text in CONSTANTS:
        flag = config.flag_name(name)
        if kind is bool:
            mixing.add_argument(flag, action="store_true", default=None, help=text)
        elif name == "variant":
            mixing.add_argument(
                flag, choices=VARIANTS, default=None, metavar="NAME", help=f"{text}: {', '.join(VARIANTS)}"
            )
        else:
            mixing.add_argument(flag, type=kind, default=None, metavar="N" if kind is int else "X", help=text)


def take_given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the constants of mixing that were given."""
    return {name: value for name, _, _ in CONSTANTS if (value := getattr(arguments, name)) is not None}


def choose_constants(given: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the constants to sign.

    Args:
        given: By name, those of mixing and those shared with rounds.

    Raises:
        UsageError: A constant that no such run can have.
    """
    from pulsenet.outer.mixing.settings import MixingSettings, MixingVariant

    known = {name for name, _, _ in CONSTANTS} | SHARED
    foreign = [name for name in given if name not in known]
    if foreign:
        raise UsageError(f"{config.flag_name(foreign[0])}: a run that mixes has no such constant (--algorithm gossip)")
    if "variant" in given:
        given["variant"] = MixingVariant(given["variant"])
    try:
        return MixingSettings(**given).to_constants()
    except ConfigError as error:
        raise UsageError(name_flags(str(error), CONSTANTS)) from error


def name_flags(text: str, constants: Iterable[tuple[str, type, str]]) -> str:
    """Return what is wrong with constants with the flags that they were given by in the place of their names."""
    names = "|".join((*(name for name, _, _ in constants), *SHARED))
    return re.sub(rf"\b(?:{names})\b", lambda found: config.flag_name(found[0]), text)


def describe(constants: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    """Return what ``run show`` prints.

    Raises:
        ConfigError: a constant that this version does not know.
    """
    from pulsenet.outer.mixing.settings import MixingSettings

    settings = MixingSettings.from_constants(ALGORITHM, constants)
    names = (*sorted(SHARED), *(name for name, _, _ in CONSTANTS))
    return {name: str(value) if name == "variant" else value for name in names for value in [getattr(settings, name)]}
