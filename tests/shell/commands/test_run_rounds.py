"""The constants of rounds are signed as the specification says, and shown as people read them."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.round_settings import RoundSettings
from pulsenet.outer.settings import Algorithm, Combination, OuterSettings
from pulsenetd import cli
from pulsenetd.commands.run_rounds import describe_algorithm


def bits(value: float) -> int:
    found: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return found


def test_a_run_has_no_rounds_unless_it_names_an_algorithm(create: Any, read_descriptor: Any) -> None:
    assert create() == (0, "")
    descriptor = read_descriptor()
    assert (descriptor.algorithm, descriptor.constants, descriptor.open_trainers_max) == ("none", (), 0)
    assert describe_algorithm(descriptor) == {"algorithm": "none"}


def test_reals_are_signed_as_the_bits_of_their_fp32_value(create: Any, read_descriptor: Any) -> None:
    given = "--algorithm pulseloco --inner-steps 4 --learning-rate 0.5 --momentum-factor 0.8 --clip-norm-ratio 3"
    closing = "--contributions-min 2 --contribution-wait-seconds 0 --open-trainers 7 --all-gather-ratio-min 2.5"
    assert create(*given.split(), *closing.split()) == (0, "")
    descriptor = read_descriptor()
    constants = dict(descriptor.constants)
    assert list(constants) == sorted(constants)
    assert constants["learning_rate"] == bits(0.5)
    assert constants["momentum_factor"] == bits(0.8)
    assert constants["clip_norm_ratio"] == bits(3.0)
    assert descriptor.open_trainers_max == 7
    settings = OuterSettings.from_constants(descriptor.algorithm, descriptor.constants)
    assert (settings.algorithm, settings.inner_steps) == (Algorithm.PULSELOCO, 4)
    closed = RoundSettings.of(descriptor)
    assert constants["all_gather_ratio_min"] == bits(2.5)
    assert closed.all_gather_ratio_min == 2.5
    assert (closed.contributions_min, closed.contribution_wait_seconds, closed.clip_norm_ratio) == (2, 0, 3.0)


def test_a_new_run_of_pulseloco_flushes_unless_it_is_told_not_to(create: Any, read_descriptor: Any) -> None:
    assert create("--algorithm", "pulseloco") == (0, "")
    descriptor = read_descriptor()
    settings = OuterSettings.from_constants(descriptor.algorithm, descriptor.constants)
    assert (settings.flush_interval, settings.flush_mantissa_bits) == (8, 1)
    assert RoundSettings.of(descriptor).all_gather_ratio_min == 10.0
    shown = describe_algorithm(descriptor)
    assert (shown["flush_interval"], shown["flush_mantissa_bits"]) == (8, 1)


@pytest.mark.parametrize(
    "options",
    ["--algorithm pulseloco --flush-interval 0", "--algorithm diloco", "--algorithm ddp"],
)
def test_runs_without_flushes_sign_nothing_that_older_versions_refuse(
    create: Any, read_descriptor: Any, options: str
) -> None:
    assert create(*options.split()) == (0, "")
    names = {name for name, _ in read_descriptor().constants}
    assert not names & {"flush_interval", "flush_mantissa_bits", "all_gather_ratio_min"}


def test_flushes_can_be_chosen(create: Any, read_descriptor: Any) -> None:
    given = "--algorithm pulseloco --flush-interval 16 --flush-mantissa-bits 23 --all-gather-ratio-min 9"
    assert create(*given.split()) == (0, "")
    descriptor = read_descriptor()
    settings = OuterSettings.from_constants(descriptor.algorithm, descriptor.constants)
    assert (settings.flush_interval, settings.flush_mantissa_bits) == (16, 23)
    assert RoundSettings.of(descriptor).all_gather_ratio_min == 9.0


def test_a_combination_is_signed_by_its_position(create: Any, read_descriptor: Any) -> None:
    assert create("--algorithm", "diloco", "--combination", "trimmed", "--trim-count", "1") == (0, "")
    descriptor = read_descriptor()
    settings = OuterSettings.from_constants(descriptor.algorithm, descriptor.constants)
    assert (settings.combination, settings.trim_count) == (Combination.TRIMMED, 1)
    shown = describe_algorithm(descriptor)
    assert (shown["algorithm"], shown["combination"], shown["trim_count"]) == ("diloco", "trimmed", 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--inner-steps 4", "--inner-steps: a run without rounds"),
        ("--open-trainers 4", "--open-trainers: a run without rounds"),
        ("--algorithm pulseloco --inner-steps 0", "pulsenet: --inner-steps is 0"),
        ("--algorithm pulseloco --learning-rate nan", "--learning-rate: nan"),
        ("--algorithm pulseloco --norm-max 1e38", "--norm-max"),
        ("--algorithm pulseloco --combination median", "needs dense contributions"),
        ("--algorithm pulseloco --contributions-min 0", "--contributions-min: 0"),
        ("--algorithm pulseloco --contributions-min 1025", "--contributions-min: 1025 is not from 1 to 1024"),
        ("--algorithm pulseloco --inner-steps 99999999999999999999", "--inner-steps: 99999999999999999999 is above"),
        ("--algorithm pulseloco --contribution-wait-seconds -1", "--contribution-wait-seconds: -1"),
        ("--algorithm pulseloco --all-gather-ratio-min -1", "--all-gather-ratio-min: -1"),
        ("--algorithm pulseloco --flush-interval -1", "--flush-interval is -1"),
        ("--algorithm pulseloco --flush-mantissa-bits 24", "--flush-mantissa-bits is 24"),
        (
            "--algorithm pulseloco --flush-interval 0 --flush-mantissa-bits 1",
            "--flush-mantissa-bits is 1, but --flush-interval is 0",
        ),
        ("--algorithm diloco --flush-interval 4", "--flush-interval is 4 with the algorithm diloco: only pulseloco"),
        ("--algorithm diloco --momentum-factor 1", "--momentum-factor is 1.0"),
        ("--algorithm gossip --roster-rounds 0", "--roster-rounds is 0"),
        ("--algorithm diloco --combination trimmed", "--trim-count: trimmed leaves nothing out"),
        ("--algorithm diloco --trim-count 2", "--trim-count is 2 with --combination mean: it goes with trimmed"),
        ("--algorithm pulseloco --open-trainers 99999", "--open-trainers: 99999"),
    ],
)
def test_what_no_run_can_have_is_refused_before_anything_is_written(
    create: Any, tmp_path: Path, options: str, text: str
) -> None:
    code, err = create(*options.split())
    assert code == 2
    assert text in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "pulsenet" / "mine").exists()


def test_the_rounds_of_a_run_are_shown(create: Any, capsys: pytest.CaptureFixture[str]) -> None:
    create("--algorithm", "pulseloco", "--inner-steps", "16")
    assert cli.main(["run", "show", "mine", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["algorithm"], shown["inner_steps"], shown["state_anchor_interval"]) == ("pulseloco", 16, 10)
    assert (shown["learning_rate"], shown["norm_max"]) == (0.7, 1e18)  # as they were typed, not as FP32 rounds them
    assert cli.main(["run", "show", "mine"]) == 0
    assert "contribution_wait_seconds  30" in capsys.readouterr().out


def test_constants_of_a_later_version_are_shown_as_they_are(create: Any, read_descriptor: Any) -> None:
    create("--algorithm", "pulseloco")
    later = replace(read_descriptor(), constants=(("inner_steps", 4), ("zeal", 9)))
    assert describe_algorithm(later)["constants"] == ["inner_steps = 4", "zeal = 9"]
