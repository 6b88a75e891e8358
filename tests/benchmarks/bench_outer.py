"""Trainers together: PULSELoCo against dense DiLoCo on paired seeds.

Usage: python tests/benchmarks/bench_outer.py [--seeds 5] [--rounds 600] [--json FILE] [--write FILE] [--plot FILE]

What is asked. A held-back entry is late, not lost: what a trainer sent and its residual together are what it would have
sent under DiLoCo. At equal rounds on a falling loss PULSELoCo must therefore be behind, by its delay times the slope;
that says nothing of where training ends. The question is whether it ends elsewhere: whether late entries bias it, add
noise, or upset it. So both algorithms train until DiLoCo's loss is flat, and are compared there.

Protocol; learning rate, rounds and the form of the task were chosen on another seed (1000) by DiLoCo's loss and
PULSELoCo's density alone:

* Each seed has a model of its own, a Llama of 75 000 parameters trained on dialect A, the learning rate falling to
  nothing, and then fine-tuned on dialect B (``outer_tasks.DialectTask``): 4 trainers with a shard each, H 8, inner
  AdamW with a constant learning rate. Start and batches of a seed are the same under both algorithms.
* Forward and backward passes run on the BF16 cast of the masters. The loss is that of the compute weights a version
  would hold, on 512 held-out rows of dialect B, the same ones in all runs.
* The run is valid if DiLoCo's mean loss falls by more than 5 %, and by less than 0.3 % in the last quarter of the
  rounds. (The pilot: 10.3 % and 0.27 %, with densities of 2.1 to 5.0 %.)
* Primary figure: loss of PULSELoCo minus loss of DiLoCo after the last round, paired by seed, with Student's 95 %
  interval over the seeds. Promised: it includes 0 and is narrower than 1 % of the loss.
* Beside it: the same at 25, 50 and 75 % of the rounds, where the delay shows, and how many rounds earlier DiLoCo had
  the same loss.

Run four times, on the same seeds 0 to 4:

1. Without flushes (``--flush-interval 0``), fixed before any loss of PULSELoCo was seen. Expected from a delay of 15 to
   20 rounds (1 / (2 density)) and the pilot's last slope: +0.02 to +0.03 % of the loss. Found: +0.191 % +- 0.020 %.
   Two controls of an older script showed why: large weights wait for ever (docs/outer.md).
2. With ``--flush-interval 4``: every block passes whole once in 4 rounds, with 1 mantissa bit. Fixed before any of the
   seeds was run with it, from seed 1000 alone: there PULSELoCo ended +0.003 % of the loss above DiLoCo, without flushes
   +0.199 %. (That pilot let a fourth of every tensor pass in its turn, not a fourth of the blocks.) Chosen as the most
   flushes whose payload stays 17 times below dense FP32: 20.7 times there by the entropy of the values, so some 19
   encoded. Three other settings were run for 8 rounds to see their payload. Expected from a delay of 2 to 3 rounds:
   +0.003 to +0.004 %. Nothing else changed, but that the loss is looked at every 25 rounds, not 10.
   Found: +0.0024 % +- 0.0007 %, 17 times below dense, one to two rounds behind.
3. With half as many flushes, the default, because of their bytes. Expected: twice the delay, so +0.005 %.
   Found: +0.0044 % +- 0.0015 %, 25 times below dense, two to three rounds behind.
4. A control, ``--anneal-rounds 150``: the loss stands still at the end, so a delay should not show.
   Found: -0.0017 % +- 0.0010 %.

Density is what the gate passes of the blocks that do not pass whole. Bytes: *payload* is what one trainer sends, once,
encoded as for the transport; *received* is what it takes in, computed from the payload measured: everyone's payload
under PULSELoCo, a ring all-reduce of FP32 under DiLoCo (one a round) and DDP (one an inner step).

``--beside unflushed`` adds PULSELoCo without flushes; ``--beside delayed`` DiLoCo whose aggregates are applied
``--delay-rounds`` late, so that a delay acts alone; ``--beside ddp`` the loss under DDP, which has no outer momentum
and so moves a seventh as far a round. ``--task sums`` has the settings of earlier tries. With ``--keep FOLDER`` a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from outer_plot import draw_plot
from outer_report import SEEDS_MAX, format_table, summarize, verdicts
from outer_swarm import CONTROLS, Plan, RunFigures, SizeRow, Swarm
from outer_tasks import DialectTask, SumsTask, Task
from reporting import Figure, add_summary_option, replace_block, write_summary

BEGIN, END = "<!-- convergence: written by tests/benchmarks/bench_outer.py -->", "<!-- convergence: end -->"

LEARNING_RATES = {"dialects": 8e-7, "micro": 7e-7, "tiny": 3e-7, "smollm2": 3e-6}
"""So that the gate passes 1 to 6 % from round 3 on: SmolLM2's weights are some ten times as large."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; the defaults are the run that is reported."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--task", choices=["dialects", "sums"], default="dialects")
    parser.add_argument("--model", choices=["micro", "tiny", "smollm2"], default="micro", help="of the task sums")
    parser.add_argument("--start", choices=["annealed", "steep"], default="annealed", help="of the task sums")
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--inner-steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=4, help="rows an inner step of each trainer")
    parser.add_argument("--evaluate-interval", type=int, default=25, help="rounds between looks at the held-out loss")
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--pretrain-steps", type=int, default=None)
    parser.add_argument("--held-out-count", type=int, default=512)
    parser.add_argument("--beside", choices=["ddp", *CONTROLS], nargs="*", default=[])
    parser.add_argument("--delay-rounds", type=int, default=20, help="of the control delayed")
    parser.add_argument("--flush-interval", type=int, default=8, help="of PULSELoCo, rounds; 0: never")
    parser.add_argument("--flush-mantissa-bits", type=int, default=1, help="of PULSELoCo, where it flushes")
    parser.add_argument("--anneal-rounds", type=int, default=0, help="last rounds, while the rate falls to nothing")
    parser.add_argument("--processes", type=int, default=2, help="seeds that run at the same time; changes no figure")
    parser.add_argument("--keep", type=Path, default=None, help="folder of finished runs, which are not run again")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--write", type=Path, default=None, help="Markdown file whose marked part becomes the table")
    parser.add_argument("--plot", type=Path, default=None, help="SVG file")
    add_summary_option(parser)
    options = parser.parse_args(arguments)
    if not 1 <= options.seeds <= SEEDS_MAX:
        parser.error(f"--seeds is {options.seeds}: 1 to {SEEDS_MAX}")
    if options.write is not None and BEGIN not in options.write.read_text():
        parser.error(f"--write: {options.write} has no line {BEGIN}")
    return options


def make_task(options: argparse.Namespace) -> Task:
    """Return the task with its learning rate."""
    rate = options.learning_rate or LEARNING_RATES["dialects" if options.task == "dialects" else options.model]
    sizes = {"learning_rate": rate, "held_out_count": options.held_out_count}
    if options.pretrain_steps is not None:
        sizes["pretrain_steps"] = options.pretrain_steps
    if options.task == "dialects":
        return DialectTask(**sizes)
    return SumsTask(options.model, options.start, **sizes)


def make_plan(options: argparse.Namespace) -> Plan:
    """Return what all runs have in common."""
    return Plan(
        trainers=options.trainers,
        inner_steps=options.inner_steps,
        rounds=options.rounds,
        batch_size=options.batch_size,
        evaluate_interval=options.evaluate_interval,
        delay_rounds=options.delay_rounds,
        flush_interval=options.flush_interval,
        flush_mantissa_bits=options.flush_mantissa_bits,
        anneal_rounds=options.anneal_rounds,
    )


def name_algorithms(options: argparse.Namespace) -> list[str]:
    """Return what is compared, and the controls beside it."""
    return ["pulseloco", "diloco", *options.beside]


def describe(options: argparse.Namespace, algorithm: str) -> dict[str, Any]:
    """Return what the figures of a run depend on, beside its seed."""
    plan = asdict(make_plan(options))
    names = ("task", "model", "start", "pretrain_steps", "held_out_count")
    if algorithm != "pulseloco":
        del plan["flush_interval"], plan["flush_mantissa_bits"]
    if algorithm != "delayed":
        del plan["delay_rounds"]
    rate = make_task(options).learning_rate
    return {**plan, **{name: getattr(options, name) for name in names}, "learning_rate": rate}


def run_one(options: argparse.Namespace, folder: Path, algorithm: str, seed: int) -> RunFigures:
    """Return the figures of an algorithm on a seed, as kept in ``folder`` or new; the same in whichever process.

    Raises:
        ValueError: what is kept is of another plan.
    """
    torch.set_num_threads(1)
    plan, kept = describe(options, algorithm), folder / f"{algorithm}-{seed}.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["plan"] != plan:
            raise ValueError(f"{kept} is of another plan: {found['plan']}, not {plan}")
        found["figures"]["sizes"] = [SizeRow(**row) for row in found["figures"]["sizes"]]
        return RunFigures(**found["figures"])
    figures = Swarm(make_task(options), load_start(options, folder, seed), algorithm, seed, make_plan(options)).train()
    write_whole(kept, json.dumps({"plan": plan, "figures": asdict(figures)}).encode())
    print(f"seed {seed} {algorithm}: loss {figures.loss:.5f} in {figures.seconds:.0f} s", file=sys.stderr, flush=True)
    return figures


def load_start(options: argparse.Namespace, folder: Path, seed: int) -> Any:
    """Return the pretrained model of a seed, made once for all algorithms."""
    path = folder / f"start-{seed}.pickle"
    if not path.exists():
        write_whole(path, pickle.dumps(make_task(options).make_start(seed)))
    return pickle.loads(path.read_bytes())  # noqa: S301 - written above


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that nobody sees half of."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)


def run_all(options: argparse.Namespace) -> dict[str, list[RunFigures]]:
    """Return the figures by algorithm, seeds in order."""
    names, seeds = name_algorithms(options), range(options.first_seed, options.first_seed + options.seeds)
    jobs = list(itertools.product(names, seeds))
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        work = functools.partial(run_one, options, folder)
        if options.processes == 1:
            found = [work(*job) for job in jobs]
        else:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(options.processes, mp_context=context))
            found = list(pool.map(work, *zip(*jobs, strict=True)))
    return {name: [figures for figures in found if figures.algorithm == name] for name in names}


def describe_flushes(plan: Plan) -> str:
    """Return what PULSELoCo flushes, for people."""
    if plan.flush_interval == 0:
        return "no flushes"
    return f"each block flushed once in {plan.flush_interval} rounds with {plan.flush_mantissa_bits} mantissa bits"


def choose_figure(summary: dict[str, Any], plan: Plan) -> Figure:
    """Return the row: where training ends, and what it sent for that."""
    mean, half_width = (100 * part for part in summary["difference_ratio"])
    return Figure(
        f"PULSELoCo, {plan.rounds} rounds of {plan.trainers} trainers: payload {summary['payload_ratio']:.1f} times "
        "below dense FP32",
        f"loss {mean:+.4f} % ± {half_width:.4f} % of DiLoCo's",
    )


def main(arguments: list[str] | None = None) -> int:
    """Run all; return 1 if a promise is not kept."""
    options = parse_arguments(arguments)
    task, plan = make_task(options), make_plan(options)
    runs = run_all(options)
    summary = summarize(runs, plan, floor=task.floor)
    kept = verdicts(summary)
    heading = (
        f"Task {task.name}, {summary['element_count']} parameters, {plan.trainers} trainers, H {plan.inner_steps}, "
        f"{plan.rounds} rounds, {options.seeds} paired seeds, learning rate {task.learning_rate:g}, "
        f"{plan.batch_size} rows a step, {describe_flushes(plan)}."
    )
    table = format_table(summary, heading)
    print(table)
    write_summary(options.summary, [choose_figure(summary, plan)])
    for promise, holds in kept.items():
        print(f"{'holds' if holds else 'FAILS'}: {promise}")
    if options.json is not None:
        detail = {name: [asdict(run) for run in listed] for name, listed in runs.items()}
        options.json.write_text(json.dumps({"summary": summary, "holds": kept, "runs": detail}, indent=1))
    if options.write is not None:
        replace_block(options.write, BEGIN, END, table)
    if options.plot is not None:
        options.plot.write_text(draw_plot(summary))
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
