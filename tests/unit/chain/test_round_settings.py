"""Round constants from a descriptor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.round_settings import RoundSettings
from pulsenet.errors import RemoteProtocolError


def test_what_is_not_named_keeps_its_default(make_run: Callable[..., Any]) -> None:
    assert RoundSettings.of(make_run().descriptor) == RoundSettings()


def test_named_constants_are_taken_and_others_left_alone(make_run: Callable[..., Any]) -> None:
    constants = (
        ("all_gather_ratio_min", 0),
        ("clip_norm_ratio", 0x4000_0000),
        ("inner_steps", 16),
        ("lr", 0x3F33_3333),
    )
    assert RoundSettings.of(make_run(constants=constants).descriptor) == RoundSettings(
        inner_steps=16, clip_norm_ratio=2.0, all_gather_ratio_min=0.0
    )


def test_a_round_of_ddp_is_one_inner_step_and_keeps_nothing(make_run: Callable[..., Any]) -> None:
    settings = RoundSettings.of(make_run(algorithm="ddp", constants=(("inner_steps", 16),)).descriptor)
    assert settings == RoundSettings(inner_steps=1, keeps_uncounted=False)


@pytest.mark.parametrize(
    "constant",
    [
        ("inner_steps", 0),
        ("missed_rounds_max", 0),
        ("contributions_min", 0),
        ("state_anchor_interval", 0),
        ("clip_norm_ratio", 0x7F80_0000),
        ("clip_norm_ratio", 0x7FC0_0000),
        ("clip_norm_ratio", 0xBF80_0000),
        ("clip_norm_ratio", 1 << 32),
        ("all_gather_ratio_min", 0x7F80_0000),
        ("all_gather_ratio_min", 0xBF80_0000),
    ],
)
def test_what_cannot_be_is_refused(make_run: Callable[..., Any], constant: tuple[str, int]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        RoundSettings.of(replace(make_run().descriptor, constants=(constant,)))
    assert caught.value.code == "schema"


@pytest.mark.parametrize(
    "name",
    ["inner_steps", "missed_rounds_max", "contributions_min", "contribution_wait_seconds", "state_anchor_interval"],
)
@pytest.mark.parametrize("value", [1, 7])
def test_each_count_may_be_one_and_is_read_by_its_name(make_run: Callable[..., Any], name: str, value: int) -> None:
    settings = RoundSettings.of(make_run(constants=((name, value),)).descriptor)
    assert settings == replace(RoundSettings(), **{name: value})


def test_minus_zero_is_a_ratio_of_nothing(make_run: Callable[..., Any]) -> None:
    assert RoundSettings.of(make_run(constants=(("clip_norm_ratio", 1 << 31),)).descriptor).clip_norm_ratio == 0.0


def test_no_waiting_at_all_is_allowed(make_run: Callable[..., Any]) -> None:
    run = make_run(constants=(("contribution_wait_seconds", 0),))
    assert RoundSettings.of(run.descriptor).contribution_wait_seconds == 0
