"""The constants of mixing are signed as the specification says, and shown as people read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.outer.mixing.settings import MixingSettings, MixingVariant
from pulsenetd import cli
from pulsenetd.commands.run_mixing import CONSTANTS, SHARED, VARIANTS
from pulsenetd.commands.run_rounds import describe_algorithm

Create = Callable[..., tuple[int, str]]


def test_the_variants_are_those_of_the_settings() -> None:
    assert tuple(str(variant) for variant in MixingVariant) == VARIANTS
    known = {name for name, _ in MixingSettings().to_constants()}
    assert known == {name for name, _, _ in CONSTANTS} | SHARED


def test_a_run_that_mixes_is_signed_with_what_was_given(create: Create, read_descriptor: Any) -> None:
    given = "--algorithm gossip --variant local_m1_m2 --inner-steps 4 --learning-rate 0.5 --mixes-momentum"
    more = "--roster-rounds 3 --mix1-wait-seconds 2 --mix2-wait-seconds 5 --probe-interval 0 --subset-ratio 0.25"
    assert create(*given.split(), *more.split()) == (0, "")
    descriptor = read_descriptor()
    settings = MixingSettings.from_constants(descriptor.algorithm, descriptor.constants)
    assert settings == MixingSettings(
        variant=MixingVariant.LOCAL_M1_M2,
        inner_steps=4,
        learning_rate=0.5,
        mixes_momentum=True,
        roster_rounds=3,
        mix1_wait_seconds=2,
        mix2_wait_seconds=5,
        probe_interval=0,
        subset_ratio=0.25,
    )
    shown = describe_algorithm(descriptor)
    assert (shown["algorithm"], shown["variant"], shown["mixes_momentum"]) == ("gossip", "local_m1_m2", True)
    assert shown["mixing_gate"] is False


def test_a_run_that_mixes_shows_its_defaults(create: Create, capsys: pytest.CaptureFixture[str]) -> None:
    assert create("--algorithm", "gossip") == (0, "")
    assert cli.main(["run", "show", "mine", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["variant"] == "global_m1_local_m2"
    assert shown["inner_steps"] == 8
    assert "missed_rounds_max" not in shown, "a constant of rounds"


def test_a_constant_that_is_not_known_is_shown_as_it_is(create: Create, read_descriptor: Any) -> None:
    create("--algorithm", "gossip")
    later = replace(read_descriptor(), constants=(("zeal", 9),))
    assert describe_algorithm(later)["constants"] == ["zeal = 9"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--algorithm gossip --missed-rounds-max 3", "--missed-rounds-max: a run that mixes has no such constant"),
        ("--algorithm pulseloco --variant diloco", "--variant goes with --algorithm gossip"),
        ("--variant diloco", "--variant: a run without rounds has no such constant"),
        ("--algorithm gossip --roster-rounds 0", "--roster-rounds is 0"),
        ("--algorithm gossip --disagreement-max nan", "--disagreement-max: nan is no finite number"),
        ("--algorithm gossip --variant diloco --mixes-momentum", "--mixes-momentum with the --variant diloco"),
        ("--algorithm gossip --subset-ratio 1.5", "--subset-ratio is 1.5"),
    ],
)
def test_constants_that_no_run_can_have_are_refused(options: str, message: str, create: Create) -> None:
    code, error = create(*options.split())
    assert code == 2
    assert message in error
