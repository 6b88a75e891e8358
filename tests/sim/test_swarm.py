"""Whole swarms under drawn faults: rules hold after every event, and once faults stop everybody is current."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys

import pytest

from pulsenet.testing.faults import Fault
from pulsenet.testing.story import Plan, play

NODE_COUNT = 6
"""Enough for neighbours that are no publisher, and few enough for many seeds."""

FRESH_COUNT = 50

FRESH_SEED = int(datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")) * 10_000
"""Other seeds every day; the failure names them."""


def check(plan: Plan) -> None:
    """Play a story; a failure prints the command that plays it again."""
    outcome = play(plan)
    assert outcome.is_good, f"{outcome.violations or outcome.shortfall}\nagain: {plan.command}"


@pytest.mark.parametrize("seed", range(6))
def test_a_swarm_under_faults_ends_current_on_every_node(seed: int) -> None:
    check(Plan(seed, node_count=10))


@pytest.mark.parametrize("seed", range(FRESH_SEED, FRESH_SEED + FRESH_COUNT))
def test_fresh_seeds_hold_what_fixed_ones_do(seed: int) -> None:
    check(Plan(seed, NODE_COUNT))


@pytest.mark.parametrize("kind", list(Fault))
def test_every_fault_alone_is_borne(kind: Fault) -> None:
    check(Plan(1, NODE_COUNT, frozenset({kind}), steps=3))


def test_a_calm_swarm_refuses_nothing() -> None:
    outcome = play(Plan(2, NODE_COUNT, frozenset()))
    assert outcome.is_good
    assert outcome.troubles == {}
    assert outcome.rejected == {}
    assert outcome.versions == 7


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(FRESH_SEED + FRESH_COUNT, FRESH_SEED + FRESH_COUNT + 1_000))
def test_a_thousand_fresh_seeds(seed: int) -> None:
    check(Plan(seed, node_count=5 + seed % 16, steps=4 + seed % 9))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_nodes_under_every_fault(seed: int) -> None:
    check(Plan(seed, node_count=200))


def test_the_same_seed_gives_the_same_trace_in_another_process() -> None:
    script = (
        "import json, sys\n"
        "from pulsenet.testing.story import Plan, play\n"
        "seeds = map(int, sys.argv[1:])\n"
        f"print(json.dumps([play(Plan(seed, {NODE_COUNT}, steps=3)).trace_hash for seed in seeds]))\n"
    )
    traces = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", script, "3", "4"]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True, capture_output=True, text=True
        )
        traces.append(json.loads(done.stdout))
    assert traces[0] == traces[1]
    assert traces[0][0] != traces[0][1]
    assert play(Plan(3, NODE_COUNT, steps=3)).trace_hash == traces[0][0]
