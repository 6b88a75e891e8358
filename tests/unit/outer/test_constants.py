"""Constants are signed by what their fields hold, and nothing that peers could read differently is taken."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pytest

from pulsenet.errors import ConfigError
from pulsenet.outer.constants import check_constants, decode_constants, encode_constants


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Settings:
    rate: float = 0.1
    momentum_factor: float = 0.5
    norm_max: float = 1.0
    count: int = 3
    is_on: bool = True
    colour: Colour = Colour.BLUE

    def __post_init__(self) -> None:
        check_constants(self, ("count",))


ENCODED = (
    ("colour", 1),
    ("count", 3),
    ("is_on", 1),
    ("momentum_factor", 0x3F000000),
    ("norm_max", 0x3F800000),
    ("rate", 0x3DCCCCCD),
)


def test_every_kind_of_field_comes_back_as_it_was() -> None:
    assert encode_constants(Settings()) == ENCODED
    assert Settings(**decode_constants(Settings, ENCODED)) == Settings()
    assert Settings().rate == float(np.float32(0.1))


def test_a_field_that_is_left_out_is_none_of_the_constants() -> None:
    assert "colour" not in dict(encode_constants(Settings(), {"colour"}))
    with pytest.raises(ConfigError, match="'colour', which this version does not know"):
        decode_constants(Settings, ENCODED, {"colour"})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("warp", 9, "does not know"),
        ("rate", -1, "not the bits of an FP32 value"),
        ("rate", 1 << 32, "not the bits of an FP32 value"),
        ("is_on", 2, "0 or 1"),
        ("colour", 2, "unknown value 2"),
        ("colour", -1, "unknown value -1"),
    ],
)
def test_what_is_not_known_is_refused(name: str, value: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        decode_constants(Settings, [(name, value)])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": -0.5}, "no finite FP32 value from 0"),
        ({"rate": 1e39}, "no finite FP32 value from 0"),
        ({"count": 0}, "count is 0: it is at least 1"),
        ({"momentum_factor": 1.0}, "below 1"),
        ({"norm_max": 0.0}, "norm_max is 0.0"),
        ({"norm_max": 2e30}, "inside FP32"),
    ],
)
def test_what_no_run_can_have_is_refused(changes: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings(**changes)  # type: ignore[arg-type]
