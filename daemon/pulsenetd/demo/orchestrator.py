"""``pulsenet demo``: starts a whole swarm as real processes, watches it, and judges the outcome.

::

    this process ── trainer's node      ── p2pd        (pulsenet join --role trainer)
                 ├─ training process                   (GRPO; publishes, takes rollouts)
                 ├─ inferencer's node   ── p2pd        (pulsenet join --role inferencer), once per inferencer
                 └─ engine process                     (samples from the weights it received)

With ``--engine vllm`` an inferencer's node starts a vLLM and keeps it current, and the engine process only asks it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from pulsenetd.demo import command_lines
from pulsenetd.demo.comparison import Comparison, compare_weights, compute_root
from pulsenetd.demo.node_status import NodeWatch
from pulsenetd.demo.processes import Children, DemoError, run_together
from pulsenetd.demo.progress import STAGES, VLLM_STAGES, Progress, Screen
from pulsenetd.demo.reports import Applied, Compared, EngineFound, Finished, Loaded, Published, Report, Sampled
from pulsenetd.demo.settings import SETTINGS, VLLM_START_SECONDS_MAX, DemoSettings
from pulsenetd.demo.stage import Stopped, explain, open_workdir, say, stop_on_signals
from pulsenetd.demo.vllm_stage import VllmEngines, end_engines, prepare_vllm
from pulsenetd.words import say_count, say_size

NODE_START_SECONDS_MAX: Final = 90.0
SILENCE_SECONDS_MAX: Final = 180.0
"""No report from any process for so long means that something hangs."""
TICK_SECONDS: Final = 0.2
TRAINER_SEED: Final = 11
FIRST_PHASE: Final = "first version published; in a new environment nodes compile their loops now, half a minute"
"""Nothing else is said until the first patch: the nodes say it in their logs."""

_TRAINER: Final = "trainer"


@dataclass(slots=True)
class _Swarm:
    """What one run of the demonstration knows while it lasts."""

    settings: DemoSettings
    versions: int
    workdir: Path
    children: Children
    progress: Progress
    watches: dict[str, NodeWatch]
    """By inferencer."""
    vllm: VllmEngines | None = None
    """``None``: the engines are in the processes that sample."""
    loaded: set[str] = field(default_factory=set)
    finished: dict[str, Finished] = field(default_factory=dict)
    """By process: the trainer and each inferencer."""
    sample_count: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    """When a process last reported something."""


def run_demo(
    model: str,
    versions: int | None,
    inferencers: int,
    workdir: Path | None,
    json_output: bool,
    *,
    vllm_python: str | None = None,
) -> int:
    """Run the demonstration and return its exit code: 0 only if all inferencers are bit-identical.

    Args:
        model: A key of :data:`~pulsenetd.demo.settings.SETTINGS`.
        versions: Optimiser steps to publish, beyond the first whole version; ``None`` takes the model's own.
        inferencers: How many inferencer nodes to start.
        workdir: Where keys, stores, logs and weights go and stay; ``None`` takes a temporary directory, which is
            removed unless something fails.
        json_output: Print one JSON object on standard output, and progress on standard error.
        vllm_python: Interpreter that has vLLM, empty for the one that runs this; ``None`` takes engines of our own.

    Raises:
        UsageError: ``workdir`` holds an earlier run, or there is no vLLM.
        StorageError: There is too little space for it.
    """
    settings = SETTINGS[model]
    console = Console(stderr=json_output)
    started_at = time.monotonic()
    names = tuple(f"inferencer-{index}" for index in range(1, inferencers + 1))
    vllm = None if vllm_python is None else prepare_vllm(vllm_python, names)
    with open_workdir(workdir, _needed_size_bytes(settings, inferencers)) as directory, stop_on_signals():
        progress = Progress(names, stages=STAGES if vllm is None else VLLM_STAGES)
        watches = {
            name: NodeWatch(command_lines.node_directory(directory.path, "inferencer", index))
            for index, name in enumerate(names, 1)
        }
        title = f"pulsenet demo: {settings.title}, GRPO on small sums, {say_count(inferencers, 'inferencer')}"
        title += "" if vllm is None else f" with vLLM {vllm.version}"
        try:
            with Children(directory.path / "logs") as children:
                wanted_count = versions or settings.versions
                swarm = _Swarm(settings, wanted_count, directory.path, children, progress, watches, vllm)
                with Screen(console, title, progress) as screen:
                    _run_swarm(swarm, screen)
                    received = {name: watch.read_received_bytes() for name, watch in watches.items()}
            comparisons, root = _compare(swarm)
        except DemoError as error:
            explain(console, error, directory.path)
            directory.is_kept = True
            return 1
        except Stopped as stopped:
            return 128 + stopped.number
        finally:
            if vllm is not None:
                end_engines(watch.data_directory for watch in watches.values())
        summary = _summarise(swarm, comparisons, root, received, time.monotonic() - started_at)
        directory.is_kept = directory.is_kept or not summary["identical"]
        if json_output:
            print(json.dumps(summary))
        else:
            _print_summary(console, summary, comparisons)
        if directory.is_kept:
            say(console, f"logs and weights are in {directory.path}")
        return 0 if summary["identical"] else 1


def _run_swarm(swarm: _Swarm, screen: Screen) -> None:
    """Start everything, and follow it until every process has written its weights."""
    _create_run(swarm, screen)
    _start_trainer(swarm)
    if swarm.vllm is None:
        _start_engines(swarm)
        _start_nodes(swarm, screen)
        swarm.progress.phase = "loading models"
    else:
        # vLLM starts from a model directory, as everywhere: the trainer writes the one it starts from
        log = swarm.children.logs / f"{_TRAINER}.log"
        _wait_until(swarm, screen, lambda: _TRAINER in swarm.loaded, "the trainer did not load its model", log)
        _start_nodes(swarm, screen)
        _start_askers(swarm, swarm.vllm)
        swarm.progress.phase = "vLLM starts: about a minute"
    wanted = {_TRAINER, *swarm.watches}
    final_file = swarm.workdir / "final-version"
    while set(swarm.finished) != wanted:
        _follow(swarm, screen)
        silence_seconds_max = SILENCE_SECONDS_MAX if swarm.vllm is None else VLLM_START_SECONDS_MAX
        if time.monotonic() - swarm.heard_at > silence_seconds_max:
            missing = ", ".join(sorted(wanted - set(swarm.finished)))
            log = swarm.children.logs / f"{_TRAINER}-node.log"
            raise DemoError(f"nothing happened for {silence_seconds_max:.0f} s; not finished: {missing}", log)
        if _TRAINER in swarm.finished and not final_file.exists():
            # only now do the engines know which version is their last
            last = swarm.finished[_TRAINER]
            partial = final_file.with_suffix(".partial")
            partial.write_text(f"{last.epoch}.{last.number}")
            partial.rename(final_file)
    swarm.progress.phase = "comparing weights"
    screen.update()


def _create_run(swarm: _Swarm, screen: Screen) -> None:
    """Make one key per node and the private run that lists them."""
    swarm.progress.phase = "creating keys and the run"
    screen.update()
    environment = command_lines.environment(swarm.workdir, os.environ, threads=1)
    directories = [command_lines.node_directory(swarm.workdir, "trainer", 1)]
    directories += [watch.data_directory for watch in swarm.watches.values()]
    printed = run_together([command_lines.keygen(path / "identity.key") for path in directories], environment)
    authority, *inferencers = [str(json.loads(text)["peer_id"]) for text in printed]
    run_together([command_lines.create_run(authority=authority, inferencers=inferencers)], environment)


def _count_cores(swarm: _Swarm) -> int:
    """Return how many threads compute: a small model gains nothing from a second, and loses much on busy cores."""
    return min(command_lines.core_count(), swarm.settings.threads_max)


def _count_prompts(swarm: _Swarm) -> int:
    """Return how many questions each inferencer asks in one batch: together enough for a step."""
    return -(-swarm.settings.prompts_per_step // len(swarm.watches))


def _start_trainer(swarm: _Swarm) -> None:
    """Start the training process."""
    cores = _count_cores(swarm)
    (swarm.workdir / "weights").mkdir()
    command = command_lines.training_process(
        model=swarm.settings.name,
        data_directory=command_lines.node_directory(swarm.workdir, "trainer", 1),
        versions=swarm.versions,
        output=swarm.workdir / "weights" / f"{_TRAINER}.safetensors",
        threads=cores,
        seed=TRAINER_SEED,
        base=None if swarm.vllm is None else swarm.workdir / "base",
        rollouts_seconds=None if swarm.vllm is None else VLLM_START_SECONDS_MAX,
    )
    environment = command_lines.environment(swarm.workdir, os.environ, threads=cores)
    swarm.children.start(_TRAINER, command, environment, may_exit=True)


def _start_engines(swarm: _Swarm) -> None:
    """Start the engines; they load their models while the nodes come up."""
    # while they sample the trainer waits, so together they may use all cores
    threads = max(1, _count_cores(swarm) // len(swarm.watches))
    environment = command_lines.environment(swarm.workdir, os.environ, threads=threads)
    for index, (name, watch) in enumerate(swarm.watches.items(), 1):
        command = command_lines.engine_process(
            model=swarm.settings.name,
            data_directory=watch.data_directory,
            prompts=_count_prompts(swarm),
            output=swarm.workdir / "weights" / f"{name}.safetensors",
            final_file=swarm.workdir / "final-version",
            threads=threads,
            seed=TRAINER_SEED + index,
        )
        swarm.children.start(name, command, environment, may_exit=True)


def _start_askers(swarm: _Swarm, vllm: VllmEngines) -> None:
    """Start the processes that ask the vLLMs, which the nodes start."""
    environment = command_lines.environment(swarm.workdir, os.environ, threads=1)
    for index, (name, watch) in enumerate(swarm.watches.items(), 1):
        command = command_lines.vllm_process(
            model=swarm.settings.name,
            data_directory=watch.data_directory,
            url=vllm.url(name),
            prompts=_count_prompts(swarm),
            weights=swarm.workdir / "weights",
            final_file=swarm.workdir / "final-version",
            seed=TRAINER_SEED + index,
        )
        swarm.children.start(name, command, environment, may_exit=True)


def _join_inferencer(swarm: _Swarm, name: str) -> list[str]:
    """Return the command of an inferencer's node."""
    data_directory = swarm.watches[name].data_directory
    if swarm.vllm is None:
        return command_lines.join("inferencer", data_directory)
    return command_lines.join_vllm(
        data_directory,
        python=swarm.vllm.python,
        base=swarm.workdir / "base",
        port=swarm.vllm.ports[name],
        context_tokens_max=swarm.settings.context_tokens_max,
    )


def _start_nodes(swarm: _Swarm, screen: Screen) -> None:
    """Start all nodes side by side; they find each other through the run file."""
    environment = command_lines.environment(swarm.workdir, os.environ, threads=1)
    swarm.progress.phase = "starting nodes"
    trainer_directory = command_lines.node_directory(swarm.workdir, "trainer", 1)
    watches = {_TRAINER: NodeWatch(trainer_directory), **swarm.watches}
    logs = {}
    for name, watch in watches.items():
        if name == _TRAINER:
            command, further = command_lines.join("trainer", watch.data_directory), environment
        else:
            command = _join_inferencer(swarm, name)
            further = environment if swarm.vllm is None else command_lines.vllm_environment(environment)
        logs[name] = swarm.children.start(f"{name}-node", command, further).log
    for name, watch in watches.items():
        _wait_until(swarm, screen, watch.is_up, f"the node of {name} did not start", logs[name])


def _wait_until(swarm: _Swarm, screen: Screen, is_true: Callable[[], bool], complaint: str, log: Path) -> None:
    give_up_at = time.monotonic() + NODE_START_SECONDS_MAX
    while not is_true():
        if time.monotonic() > give_up_at:
            raise DemoError(f"{complaint} within {NODE_START_SECONDS_MAX:.0f} s", log)
        _follow(swarm, screen)


def _follow(swarm: _Swarm, screen: Screen) -> None:
    """Wait one tick, take in what the processes report, and notice those that died."""
    time.sleep(TICK_SECONDS)
    while not swarm.children.reports.empty():
        name, report = swarm.children.reports.get()
        swarm.heard_at = time.monotonic()
        _take_in(swarm, name, report)
    swarm.children.check()
    screen.update()


def _take_in(swarm: _Swarm, name: str, report: Report) -> None:
    """Enter one report into what is known."""
    progress = swarm.progress
    if isinstance(report, Loaded):
        swarm.loaded.add(name)
    elif isinstance(report, Published):
        progress.add_published(report)
        done = len(progress.rows) - 1
        progress.phase = f"training: {done} of {swarm.versions} versions published" if done else FIRST_PHASE
    elif isinstance(report, Applied):
        progress.add_applied(name, report, swarm.watches[name].read_stage_seconds())
    elif isinstance(report, Sampled):
        swarm.sample_count += report.sample_count
    elif isinstance(report, EngineFound):
        progress.phase = f"{name}: {report.name} serves"
    elif isinstance(report, Compared) and swarm.vllm is not None:
        swarm.vllm.compared[name] = report
    elif isinstance(report, Finished):
        swarm.finished[name] = report


def _compare(swarm: _Swarm) -> tuple[dict[str, Comparison], str]:
    """Return each inferencer's comparison, and the root of the trainer's own file."""
    folder = swarm.workdir / "weights"
    trainer = folder / f"{_TRAINER}.safetensors"
    root = compute_root(trainer)
    if swarm.vllm is not None:
        # its memory was compared where it is; what it holds has the root under which the node was given it
        comparisons = {
            name: Comparison(swarm.finished[name].root, compared.is_identical, compared.difference)
            for name, compared in swarm.vllm.compared.items()
        }
    else:
        comparisons = compare_weights(trainer, {name: folder / f"{name}.safetensors" for name in swarm.watches}, root)
    for name in swarm.watches:
        published_root = swarm.finished[name].root
        if published_root != root:
            text = f"it was published as root {published_root[:16]}, the trainer's file has {root[:16]}"
            comparisons[name] = Comparison(comparisons[name].root, False, text)
    return comparisons, root


def _summarise(
    swarm: _Swarm, comparisons: Mapping[str, Comparison], root: str, received: Mapping[str, int], seconds: float
) -> dict[str, Any]:
    """Return the summary as plain values."""
    rows = [row for _, row in sorted(swarm.progress.rows.items())]
    patches = [row.published for row in rows if not row.published.is_first]
    anchors = [row.published for row in rows if row.published.is_first]
    dense_bytes = sum(published.raw_size_bytes for published in patches)
    patch_bytes = sum(published.encoded_size_bytes for published in patches)
    shares = [published.changed_count / max(1, published.element_count) for published in patches]
    rewards = [published.reward for published in patches]
    third = max(1, len(rewards) // 3)
    lags = [row.lag_seconds for row in rows if row.lag_seconds is not None and not row.published.is_first]
    return {
        "identical": all(comparison.is_identical for comparison in comparisons.values()),
        "model": swarm.settings.name,
        "versions": len(patches),
        "inferencers": len(swarm.watches),
        "final_version": rows[-1].label if rows else None,
        "root": root,
        "dense_bytes": dense_bytes,
        "patch_bytes": patch_bytes,
        "ratio": round(dense_bytes / patch_bytes, 2) if patch_bytes else None,
        "anchor_bytes": sum(published.encoded_size_bytes for published in anchors),
        "received_bytes": dict(received),
        "density": round(sum(shares) / len(shares), 6) if shares else None,
        "lag_seconds": round(sum(lags) / len(lags), 3) if lags else None,
        "rollout_samples": swarm.sample_count,
        "reward_start": round(sum(rewards[:third]) / third, 4) if rewards else None,
        "reward_end": round(sum(rewards[-third:]) / third, 4) if rewards else None,
        "seconds": round(seconds, 1),
        **({} if swarm.vllm is None else {"engine": swarm.vllm.summarise(rows)}),
    }


def _print_summary(console: Console, summary: Mapping[str, Any], comparisons: Mapping[str, Comparison]) -> None:
    lines = []
    for name, comparison in comparisons.items():
        verdict = "bit-identical to the trainer" if comparison.is_identical else f"DIFFERS: {comparison.difference}"
        lines.append(f"{name:<14} version {summary['final_version']}, root {comparison.root[:16]}, {verdict}")
    dense, patches = say_size(summary["dense_bytes"]), say_size(summary["patch_bytes"])
    first = say_size(summary["anchor_bytes"])
    lines += [
        f"{'transfer':<14} {patches} of patches instead of {dense} dense: {summary['ratio']:.0f} times less",
        f"{'':<14} {say_count(summary['versions'], 'version')}, after {first} once for the first",
        f"{'changed':<14} {summary['density']:.2%} of the weights per version on average",
        f"{'training':<14} mean reward {summary['reward_start']:.2f} in the first third of the steps, "
        f"{summary['reward_end']:.2f} in the last ({summary['rollout_samples']} samples)",
        f"{'time':<14} {summary['seconds']:.0f} s in all; "
        f"{summary['lag_seconds']:.2f} s from publish() to the last engine on average",
    ]
    engine = summary.get("engine")
    if engine is not None:
        pauses = f"{say_count(engine['pauses'], 'update')} held requests up"
        if engine["pauses"]:
            pauses += f" for {engine['pause_ms_median']:.0f} ms (median), {engine['pause_ms_max']:.0f} ms at most"
        lines.append(f"{'engine':<14} {engine['name']}; {pauses}; all weights compared in its memory")
    say(console, "", *lines)


def _needed_size_bytes(settings: DemoSettings, inferencers: int) -> int:
    """Return the disk a run takes: per node an anchor, patches and the weights written at the end, and some room."""
    return 3 * settings.dense_size_bytes * (1 + inferencers)
