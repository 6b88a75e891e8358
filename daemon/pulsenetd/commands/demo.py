"""``pulsenet demo``: a whole swarm on this machine, training a real model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from pulsenet.errors import UsageError
from pulsenetd.commands.run_mixing import VARIANTS
from pulsenetd.config import environment_name

_EXAMPLES = (
    ("pulsenet demo --model tiny", "under a minute"),
    ("pulsenet demo --inferencers 4 --versions 8", "SmolLM2-135M on sums"),
    ("pulsenet demo --trainers 3 --model tiny", "trainers that train together, one is killed"),
    ("pulsenet demo --trainers 4 --algorithm gossip --model tiny", "the same, mixing with whoever is there"),
)


def add_parser(commands: Any) -> None:
    """Add ``demo`` to the command line."""
    parser = commands.add_parser("demo", help="run a trainer and inferencers here, on a real model", examples=_EXAMPLES)
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2", help="tiny takes under a minute")
    parser.add_argument(
        "--versions", type=int, default=None, metavar="N", help="optimiser steps, one version each (default 16, tiny 8)"
    )
    parser.add_argument("--inferencers", type=int, default=None, metavar="N", help="inferencer nodes (default 2)")
    parser.add_argument(
        "--trainers", type=int, default=1, metavar="N", help="more than one: they train together, one is cut off"
    )
    parser.add_argument("--algorithm", choices=("pulseloco", "gossip"), default=None, help="how (default pulseloco)")
    parser.add_argument(
        "--variant",
        choices=VARIANTS,
        default=None,
        metavar="NAME",
        help=f"with --algorithm gossip: {', '.join(VARIANTS)}",
    )
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help="with --trainers: rounds (default 12)")
    parser.add_argument(
        "--engine", choices=("torch", "vllm"), default="torch", help="what samples: a torch module, or a real vLLM"
    )
    parser.add_argument(
        "--engine-python",
        default=None,
        metavar="FILE",
        help="interpreter that has vLLM (env PULSENET_ENGINE_PYTHON; default: this one)",
    )
    parser.add_argument("--workdir", default=None, metavar="DIR", help="keep logs, keys and weights here")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run_command=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    for name, most in (("versions", 100_000), ("inferencers", 64)):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"--{name}: {value} is not from 1 to {most}")
    if arguments.engine != "vllm" and arguments.engine_python is not None:
        raise UsageError("--engine-python goes with --engine vllm")
    if arguments.trainers != 1:
        return _demo_together(arguments)
    for name in ("algorithm", "variant"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} says how several trainers train together: give --trainers as well")
    if arguments.rounds is not None:
        raise UsageError("--rounds counts the rounds of several trainers: give --trainers as well")
    from pulsenetd.demo.settings import check_packages

    check_packages(arguments.model)
    from pulsenetd.demo.orchestrator import run_demo

    return run_demo(
        model=arguments.model,
        versions=arguments.versions,
        inferencers=2 if arguments.inferencers is None else arguments.inferencers,
        workdir=Path(arguments.workdir) if arguments.workdir else None,
        json_output=arguments.json,
        vllm_python=_find_python(arguments),
    )


def _find_python(arguments: argparse.Namespace) -> str | None:
    """Return the interpreter that has vLLM, empty for this one; ``None`` if no vLLM is wanted."""
    if arguments.engine != "vllm":
        return None
    return arguments.engine_python or os.environ.get(environment_name("engine_python"), "")


def _demo_together(arguments: argparse.Namespace) -> int:
    from pulsenetd.demo.together import settings

    if not settings.TRAINERS_MIN <= arguments.trainers <= settings.TRAINERS_MAX:
        raise UsageError(f"--trainers: {arguments.trainers} is not from 1 to {settings.TRAINERS_MAX}")
    rounds = settings.ROUNDS_DEFAULT if arguments.rounds is None else arguments.rounds
    if not settings.ROUNDS_MIN <= rounds <= 100_000:
        raise UsageError(
            f"--rounds: {rounds} is not from {settings.ROUNDS_MIN} to 100000: "
            f"a trainer is killed in round {settings.KILL_IN_ROUND} and has to be seen coming back"
        )
    if arguments.variant is not None and arguments.algorithm != "gossip":
        raise UsageError("--variant goes with --algorithm gossip")
    if arguments.engine == "vllm":
        raise UsageError("--engine vllm is for one trainer: with --trainers nobody samples")
    for name in ("versions", "inferencers"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} is for one trainer: with --trainers, versions follow the rounds")
    from pulsenetd.demo.settings import check_packages

    check_packages(arguments.model)
    from pulsenetd.demo.together.orchestrator import run_together_demo

    return run_together_demo(
        model=arguments.model,
        trainers=arguments.trainers,
        rounds=rounds,
        workdir=Path(arguments.workdir) if arguments.workdir else None,
        json_output=arguments.json,
        algorithm=arguments.algorithm or "pulseloco",
        variant=arguments.variant,
    )
