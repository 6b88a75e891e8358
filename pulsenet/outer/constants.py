"""How a descriptor signs the constants of an outer algorithm, whichever it is.

Integers and flags stand as they are, reals as their FP32 bits, and a choice as its place among all choices; what a
field holds follows from its type.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import fields
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import numpy as np

from pulsenet.errors import ConfigError
from pulsenet.outer.floats import fp32_from_bits, fp32_to_bits

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NORM_MAX: Final = 1e30
"""Of what one trainer sends: sums must stay inside FP32."""


def check_constants(settings: DataclassInstance, counts: Iterable[str]) -> None:
    """Round the reals of new settings to FP32, and refuse what no outer algorithm can have.

    Args:
        settings: Of an outer optimiser with momentum; only their bits are signed.
        counts: Fields that are at least 1.

    Raises:
        ConfigError: with the field that is wrong.
    """
    for name, kind in _kinds_of(type(settings)).items():
        if kind is float:
            with np.errstate(all="ignore"):
                rounded = float(np.float32(getattr(settings, name)))
            if not math.isfinite(rounded) or rounded < 0.0:
                raise ConfigError(f"{name} is {getattr(settings, name)}, which is no finite FP32 value from 0")
            object.__setattr__(settings, name, rounded)
    values: dict[str, Any] = {name: getattr(settings, name) for name in (*counts, "momentum_factor", "norm_max")}
    for name in counts:
        if values[name] < 1:
            raise ConfigError(f"{name} is {values[name]}: it is at least 1")
    if values["momentum_factor"] >= 1.0:
        raise ConfigError(f"momentum_factor is {values['momentum_factor']}: it is below 1")
    if not 0.0 < values["norm_max"] <= NORM_MAX:
        raise ConfigError(f"norm_max is {values['norm_max']}: it is above 0, and sums must stay inside FP32, so 1e30")


def encode_constants(settings: DataclassInstance, left_out: Collection[str] = ()) -> tuple[tuple[str, int], ...]:
    """Return the descriptor's constants, ascending by name, without the fields ``left_out``."""
    constants = []
    for name, kind in _kinds_of(type(settings)).items():
        if name not in left_out:
            value = getattr(settings, name)
            if kind is float:
                value = fp32_to_bits(value)
            elif issubclass(kind, StrEnum):
                value = tuple(kind).index(value)
            constants.append((name, int(value)))
    return tuple(sorted(constants))


def decode_constants(
    settings_type: type[DataclassInstance], constants: Iterable[tuple[str, int]], left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Return the fields that a descriptor's constants give; fields ``left_out`` are none of them.

    Raises:
        ConfigError: a name or value this code does not know: peers would step differently.
    """
    kinds = {name: kind for name, kind in _kinds_of(settings_type).items() if name not in left_out}
    return {name: _decode(name, kinds.get(name), value) for name, value in constants}


def _decode(name: str, kind: type | None, value: int) -> object:
    if kind is None:
        raise ConfigError(f"the run has the outer constant {name!r}, which this version does not know")
    if kind is float:
        if not 0 <= value < 1 << 32:
            raise ConfigError(f"the outer constant {name!r} is {value}, not the bits of an FP32 value")
        return float(fp32_from_bits(value))
    if kind is bool:
        if value not in (0, 1):
            raise ConfigError(f"the outer constant {name!r} is {value}: it is 0 or 1")
        return bool(value)
    if issubclass(kind, StrEnum):
        choices = tuple(kind)
        if not 0 <= value < len(choices):
            raise ConfigError(f"the outer constant {name} has the unknown value {value}")
        return choices[value]
    return value


@cache
def _kinds_of(settings_type: type[DataclassInstance]) -> dict[str, type]:
    hints = get_type_hints(settings_type)
    return {field.name: hints[field.name] for field in fields(settings_type)}
