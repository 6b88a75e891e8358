"""Faults have names, and each name brings its own trouble and no other."""

from __future__ import annotations

import pytest

from pulsenet.errors import UsageError
from pulsenet.testing.fakes import Chance
from pulsenet.testing.faults import ALL_FAULTS, Fault, draw_rates, format_faults, parse_faults
from pulsenet.testing.network import CALM, Faults


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("none", frozenset()),
        ("all", ALL_FAULTS),
        ("drop", {Fault.DROP}),
        ("crash,drop, one-way", {Fault.CRASH, Fault.DROP, Fault.ONE_WAY}),
    ],
)
def test_names_are_read_and_written_alike(text: str, kinds: frozenset[Fault]) -> None:
    assert parse_faults(text) == kinds
    assert parse_faults(format_faults(parse_faults(text))) == kinds


@pytest.mark.parametrize("text", ["", "everything", "drop,,crash", "none,drop"])
def test_an_unknown_name_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(UsageError, match=r"no fault is called .*; there are: drop, duplicate"):
        parse_faults(text)


def test_no_faults_are_a_calm_network() -> None:
    calm = draw_rates(Chance(1), frozenset())
    assert calm == Faults(latency_seconds_min=0.005, latency_seconds_max=0.005)
    assert calm.drop_per_mille == CALM.drop_per_mille == 0


def test_leaving_a_kind_out_changes_nothing_about_the_others() -> None:
    whole = draw_rates(Chance(7), ALL_FAULTS)
    part = draw_rates(Chance(7), ALL_FAULTS - {Fault.DROP})
    assert part.drop_per_mille == part.close_per_mille == part.lose_per_mille == 0
    assert (part.duplicate_per_mille, part.flip_per_mille) == (whole.duplicate_per_mille, whole.flip_per_mille)
    assert part.latency_seconds_max == whole.latency_seconds_max > 0.005
