from typing import Any

import numpy as np
import pytest

from pulsenet.errors import ConfigError
from pulsenet.outer.settings import Algorithm, Combination, OuterSettings


def test_constants_are_signed_as_bits_and_come_back() -> None:
    settings = OuterSettings(
        algorithm=Algorithm.DILOCO,
        learning_rate=0.1,
        combination=Combination.TRIMMED,
        trim_count=1,
        clip_norm_ratio=2.5,
    )
    constants = settings.to_constants()
    assert [name for name, _ in constants] == sorted(name for name, _ in constants)
    assert dict(constants)["learning_rate"] == int(np.float32(0.1).view(np.uint32))
    assert OuterSettings.from_constants("diloco", constants) == settings
    assert settings.learning_rate == float(np.float32(0.1))


def test_what_a_descriptor_does_not_name_has_its_default() -> None:
    settings = OuterSettings.from_constants("pulseloco", (("contributions_min", 3), ("inner_steps", 16)))
    assert (settings.inner_steps, settings.missed_rounds_max, settings.is_dense) == (16, 2, False)
    assert (settings.learning_rate, settings.momentum_factor) == (float(np.float32(0.7)), float(np.float32(0.9)))


def test_without_flushes_older_versions_can_take_part() -> None:
    """They refuse a constant they do not know, so it is signed only where it changes what is computed."""
    assert not {name for name, _ in OuterSettings().to_constants()} & {"flush_interval", "flush_mantissa_bits"}
    flushing = OuterSettings(flush_interval=4, flush_mantissa_bits=1)
    assert flushing.to_constants()[2:4] == (("flush_interval", 4), ("flush_mantissa_bits", 1))
    assert OuterSettings.from_constants("pulseloco", flushing.to_constants()) == flushing
    assert flushing.cuts_values
    assert not OuterSettings(flush_interval=4).cuts_values


@pytest.mark.parametrize(
    ("algorithm", "constants"),
    [
        ("pulseloco", (("flush_interval", 4), ("flush_mantissa_bits", 24))),
        ("pulseloco", (("flush_mantissa_bits", 1),)),
        ("diloco", (("flush_interval", 4),)),
        ("ddp", (("flush_interval", 4),)),
        ("gossip", ()),
        ("pulseloco", (("warp_factor", 9),)),
        ("pulseloco", (("learning_rate", -1),)),
        ("pulseloco", (("combination", 9),)),
        ("pulseloco", (("combination", 1),)),
        ("pulseloco", (("inner_steps", 0),)),
        ("pulseloco", (("momentum_factor", 0x3F800000),)),
        ("pulseloco", (("learning_rate", 0x7FC00000),)),
        ("pulseloco", (("clip_norm_ratio", 0x3F000000),)),
        ("pulseloco", (("norm_max", 0x7F000000),)),
        ("diloco", (("trim_count", 1),)),
    ],
)
def test_settings_no_run_can_have_are_refused(algorithm: str, constants: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ConfigError):
        OuterSettings.from_constants(algorithm, constants)


@pytest.mark.parametrize(
    "fields",
    [
        {"algorithm": Algorithm.DILOCO, "combination": Combination.TRIMMED, "trim_count": -1},
        {"flush_interval": -1},
        {"flush_interval": 4, "flush_mantissa_bits": -1},
    ],
)
def test_no_count_is_below_0(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        OuterSettings(**fields)


def test_settings_may_be_on_their_bounds() -> None:
    assert OuterSettings(clip_norm_ratio=1.0).clip_norm_ratio == 1.0
    assert OuterSettings(flush_interval=4, flush_mantissa_bits=0).cuts_values
