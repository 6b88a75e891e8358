"""``pulsenet sim``: a whole swarm in this process on virtual time, under faults, checked after every event."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from pulsenet.errors import UsageError

if TYPE_CHECKING:
    from pulsenet.testing.story import Outcome, Plan
    from pulsenet.testing.world import World

TELL_SECONDS: Final = 5.0
"""Between two lines about a story that is still being played."""

_DESCRIPTION = """\
Play a story of a swarm: one trainer publishes, inferencers and seeds follow over home lines, and the seed decides
what goes wrong. The node rules are the real ones; clock, network, disks and engines are simulated. After every event
it is checked that versions only rise, that equal versions are equal bits, that nothing unverified is served and that
buffers keep their bounds; once the faults stop, everybody must reach the newest version. The same seed gives the same
story on every machine. What is modelled and what is not: docs/simulation.md, in pulsenet's source archive.
"""

_EPILOG = """\
Exit codes: 0 all well, 1 a rule was broken or somebody did not arrive, 2 usage
"""

_EXAMPLES = (
    ("pulsenet sim --seed 7", "twelve nodes under all faults"),
    ("pulsenet sim --nodes 200 --faults none --json", "a large swarm in fair weather"),
    ("pulsenet sim --seed 1 --runs 100", "a hundred stories"),
)


def add_parser(commands: Any) -> None:
    """Add ``sim`` to the command line."""
    parser = commands.add_parser(
        "sim",
        help="a simulated swarm under faults",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        examples=_EXAMPLES,
    )
    parser.add_argument("--seed", type=int, metavar="N", help="decides everything (default: drawn, and printed)")
    parser.add_argument("--nodes", type=int, default=12, metavar="N", help="trainer included (default: 12)")
    parser.add_argument(
        "--faults", default="all", metavar="KINDS", help="'none', 'all' or a list with commas (default: all)"
    )
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="versions under faults (default: 6)")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="seeds from --seed on (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a run")
    parser.set_defaults(run_command=_sim)


def _sim(arguments: argparse.Namespace) -> int:
    from pulsenet.testing.faults import parse_faults
    from pulsenet.testing.story import Plan, play

    if not 1 <= arguments.runs <= 1_000_000:
        raise UsageError(f"--runs: {arguments.runs} is not from 1 to 1000000")
    faults = parse_faults(arguments.faults)
    first = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    bad_count = 0
    for seed in range(first, first + arguments.runs):
        plan = Plan(seed, arguments.nodes, faults, arguments.steps)
        outcome = play(plan, on_event=_watch(plan))
        bad_count += not outcome.is_good
        print(json.dumps(_as_json(outcome)) if arguments.json else _as_text(outcome), flush=True)
    return 1 if bad_count else 0


def _watch(plan: Plan, monotonic: Callable[[], float] = time.monotonic) -> Callable[[World], None]:
    """Return what says every few seconds, on standard error, how far a story is."""
    told_at = monotonic()

    def tell(world: World) -> None:
        nonlocal told_at
        if monotonic() - told_at < TELL_SECONDS:
            return
        told_at = monotonic()
        print(
            f"seed {plan.seed}: {len(world.versions)} of up to {plan.steps + 1} versions, "
            f"{world.event_count:,} events, {world.now:.0f} virtual seconds",
            file=sys.stderr,
            flush=True,
        )

    return tell


def _as_json(outcome: Outcome) -> dict[str, Any]:
    plan = outcome.plan
    figures = {field.name: getattr(outcome, field.name) for field in fields(outcome) if field.name != "plan"}
    return {
        "seed": plan.seed,
        "nodes": plan.node_count,
        "faults": sorted(plan.faults),
        "steps": plan.steps,
        "command": plan.command,
        **figures,
    }


def _as_text(outcome: Outcome) -> str:
    lines = [
        f"seed {outcome.plan.seed}: {'all well' if outcome.is_good else 'FAILED'}",
        f"  {outcome.versions} versions, {outcome.event_count} events, {outcome.virtual_seconds:.0f} virtual seconds",
        f"  everybody current {outcome.heal_seconds:.0f} s after the faults"
        if outcome.converged
        else "  not everybody became current",
        f"  the publisher uploaded each blob {outcome.publisher_payloads:.2f} times",
        f"  trouble: {_list(outcome.troubles)}",
        f"  refused: {_list(outcome.rejected)}",
        f"  trace {outcome.trace_hash}",
    ]
    lines += [f"  violation: {text}" for text in outcome.violations]
    lines += [f"  shortfall: {outcome.shortfall}"] if outcome.shortfall else []
    return "\n".join(lines if outcome.is_good else [*lines, f"  again: {outcome.plan.command}"])


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
