"""Every command line the demonstration runs, as a person would type it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pulsenetd.config import ENVIRONMENT_PREFIX

RUN_NAME: Final = "demo"
LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"

PULSENET: Final = (sys.executable, "-m", "pulsenetd.cli")
"""The ``pulsenet`` command of this very installation, whatever PATH says."""


def keygen(key_file: Path) -> list[str]:
    """Return the command that makes a node's key."""
    return [*PULSENET, "keygen", str(key_file), "--json"]


def create_run(*, authority: str, inferencers: Sequence[str]) -> list[str]:
    """Return the command that creates the private run; keys are peer ids."""
    listed = [argument for key in inferencers for argument in ("--inferencer", key)]
    return [*PULSENET, "run", "create", RUN_NAME, "--private", "--authority", authority, *listed, "--json"]


def create_rounds_run(
    *,
    trainers: Sequence[str],
    inferencers: Sequence[str],
    inner_steps: int,
    algorithm: str = "pulseloco",
    variant: str | None = None,
) -> list[str]:
    """Return the command that creates the private run of several trainers, each of which may lead it."""
    listed = [argument for key in trainers for argument in ("--authority", key, "--trainer", key)]
    listed += [argument for key in inferencers for argument in ("--inferencer", key)]
    rules = ["--algorithm", algorithm, "--inner-steps", str(inner_steps)]
    if algorithm == "gossip":
        rules += [] if variant is None else ["--variant", variant]
        # A trainer is killed amid a round: its partner waits for it once, and not for long.
        rules += ["--mix1-wait-seconds", "5", "--mix2-wait-seconds", "10", "--roster-rounds", "4"]
    else:
        # In so few rounds nothing waits for long: the demonstration is of what the gate saves.
        rules += ["--flush-interval", "0"]
    return [*PULSENET, "run", "create", RUN_NAME, "--private", *listed, *rules, "--json"]


def join(role: str, data_directory: Path) -> list[str]:
    """Return the command that runs one node."""
    options = ["--run", RUN_NAME, "--data-dir", str(data_directory), "--listen", LOOPBACK, "--worker-threads", "2"]
    if role == "inferencer":
        # our own process holds the weights; the node need not write files beside it
        options += ["--engine", "none", "--wait"]
    return [*PULSENET, "join", "--role", role, *options]


def join_vllm(data_directory: Path, *, python: str, base: Path, port: int, context_tokens_max: int) -> list[str]:
    """Return the command of an inferencer's node that starts a vLLM and keeps it current; prompts are token ids."""
    options = ["--run", RUN_NAME, "--data-dir", str(data_directory), "--listen", LOOPBACK, "--worker-threads", "2"]
    options += ["--wait", "--engine", "vllm", "--engine-python", python, "--serve", "--"]
    served = ["--model", str(base), "--dtype", "bfloat16", "--max-model-len", str(context_tokens_max)]
    served += ["--port", str(port), "--skip-tokenizer-init", "--enable-scale-out", "--enforce-eager"]
    return [*PULSENET, "join", "--role", "inferencer", *options, *served]


def join_rounds(role: str, data_directory: Path) -> list[str]:
    """Return the command that runs one node of the demonstration of rounds; an inferencer keeps files current."""
    options = ["--run", RUN_NAME, "--data-dir", str(data_directory), "--listen", LOOPBACK, "--worker-threads", "2"]
    return [*PULSENET, "join", "--role", role, *options, "--wait"]


def rounds_process(
    *,
    model: str,
    data_directory: Path,
    rounds: int,
    shard: int,
    checkpoint: Path,
    output: Path,
    threads: int,
    algorithm: str,
    until: Path | None = None,
) -> list[str]:
    """Return the command of one of several training loops; with ``until`` it also goes on until that file exists."""
    return [
        *(sys.executable, "-m", "pulsenetd.demo.together.trainer"),
        *("--model", model, "--data-dir", str(data_directory), "--rounds", str(rounds), "--shard", str(shard)),
        *("--checkpoint", str(checkpoint), "--output", str(output), "--threads", str(threads)),
        *("--algorithm", algorithm),
        *(() if until is None else ("--until", str(until))),
    ]


def training_process(
    *,
    model: str,
    data_directory: Path,
    versions: int,
    output: Path,
    threads: int,
    seed: int,
    base: Path | None = None,
    rollouts_seconds: float | None = None,
) -> list[str]:
    """Return the command of the training loop beside the trainer's node.

    Args:
        base: Where it writes the weights it starts from, as a model directory.
        rollouts_seconds: Its longest wait for samples; ``None``: its own.
    """
    further = [] if base is None else ["--base", str(base)]
    further += [] if rollouts_seconds is None else ["--rollouts-seconds", str(rollouts_seconds)]
    return [
        *(sys.executable, "-m", "pulsenetd.demo.trainer"),
        *("--model", model, "--data-dir", str(data_directory), "--versions", str(versions)),
        *("--output", str(output), "--threads", str(threads), "--seed", str(seed)),
        *further,
    ]


def vllm_process(
    *, model: str, data_directory: Path, url: str, prompts: int, weights: Path, final_file: Path, seed: int
) -> list[str]:
    """Return the command of the process that asks a vLLM for samples."""
    return [
        *(sys.executable, "-m", "pulsenetd.demo.vllm_inferencer"),
        *("--model", model, "--data-dir", str(data_directory), "--url", url, "--prompts", str(prompts)),
        *("--weights", str(weights), "--final-file", str(final_file), "--seed", str(seed)),
    ]


def engine_process(
    *, model: str, data_directory: Path, prompts: int, output: Path, final_file: Path, threads: int, seed: int
) -> list[str]:
    """Return the command of the engine beside an inferencer's node."""
    return [
        *(sys.executable, "-m", "pulsenetd.demo.inferencer"),
        *("--model", model, "--data-dir", str(data_directory), "--prompts", str(prompts)),
        *("--output", str(output), "--final-file", str(final_file), "--threads", str(threads), "--seed", str(seed)),
    ]


def environment(workdir: Path, inherited: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """Return the environment of a child: our data home, and none of the user's own pulsenet settings."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    return kept | {
        "XDG_DATA_HOME": str(workdir / "data"),
        "OMP_NUM_THREADS": str(threads),
        # threads that wait must not spin: the processes share a few cores
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def vllm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a node that starts a vLLM: several share this machine, and nobody counts them."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the models are small
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine takes the same cores
        "VLLM_NO_USAGE_STATS": "1",
        **environment,
    }


def node_directory(workdir: Path, role: str, index: int) -> Path:
    """Return the data directory of the ``index``-th node of a role, counted from 1, as ``pulsenet join`` names it."""
    return workdir / "data" / "pulsenet" / RUN_NAME / (role if index == 1 else f"{role}-{index}")


def core_count() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))
