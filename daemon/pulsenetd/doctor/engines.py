"""Checks of what an inferencer's node works beside: the engine, its plugin, and the GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Final

from pulsenet.errors import UnavailableError
from pulsenetd.commands.status import read_status
from pulsenetd.doctor.findings import SECONDS_MAX, Finding, Subject, fail, ok, warn
from pulsenetd.doctor.leftovers import is_running
from pulsenetd.words import say_cause

ANSWER_SIZE_BYTES_MAX: Final = 1 << 20
INTERPRETER_SECONDS_MAX: Final = 30.0
"""An interpreter on a cold disk takes its time."""

GPU_QUERY: Final = ("name", "memory.total", "memory.free", "driver_version")
GPU_FREE_RATIO_MIN: Final = 0.1

_LOOK_INSIDE: Final = """
import importlib.metadata, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
plugins = [one.name for one in importlib.metadata.entry_points(group="vllm.general_plugins")]
print(json.dumps({**{name: version(name) for name in ("vllm", "pulsenet", "torch")}, "plugins": plugins}))
"""

Run = Callable[[Sequence[str], float], str]


def run_program(command: Sequence[str], seconds: float) -> str:
    """Return what a program prints.

    Raises:
        FileNotFoundError: There is no such program.
        UnavailableError: It failed; the message is the last line it wrote.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{command[0]} does not answer within {seconds:.0f} s") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UnavailableError(f"{command[0]} fails: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def fetch_json(url: str) -> dict[str, Any]:
    """Return the JSON object that an address of this machine answers; empty if it answers no object.

    Raises:
        OSError: Nobody answers.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=SECONDS_MAX) as answer:
        try:
            found = json.loads(answer.read(ANSWER_SIZE_BYTES_MAX))
        except ValueError:
            return {}
    return found if isinstance(found, dict) else {}


def look_at_engine(
    subject: Subject, run: Run = run_program, fetch: Callable[[str], dict[str, Any]] = fetch_json
) -> Sequence[Finding]:
    """Say whether vLLM can be used, answers, and what running nodes say of theirs."""
    findings = _ask_nodes(subject)
    if subject.engine == "vllm":
        findings += _look_at_interpreter(subject.engine_python or sys.executable, run)
        if subject.engine_url:
            findings.append(_knock(subject.engine_url.rstrip("/"), fetch))
    return findings or [ok(f"none to check: --engine {subject.engine}")]


def _look_at_interpreter(python: str, run: Run) -> list[Finding]:
    try:
        inside = json.loads(run([python, "-c", _LOOK_INSIDE], INTERPRETER_SECONDS_MAX))
    except (OSError, ValueError, UnavailableError) as error:
        return [fail(f"{python}: {say_cause(error)}", "give the interpreter that has vLLM with --engine-python")]
    if inside["vllm"] is None:
        return [fail(f"{python} has no vllm", "pip install vllm there, or give --engine-python FILE")]
    if "pulsenet" not in inside["plugins"]:
        return [
            fail(
                f"{python} has vllm {inside['vllm']}, which does not know pulsenet's plugin",
                "pip install pulsenet into the same environment, then start vLLM again",
            )
        ]
    return [ok(f"vllm {inside['vllm']}, torch {inside['torch']}, plugin of pulsenet {inside['pulsenet']}")]


def _knock(url: str, fetch: Callable[[str], dict[str, Any]]) -> Finding:
    try:
        version = fetch(f"{url}/version").get("version", "?")
        fetch(f"{url}/health")
    except urllib.error.HTTPError as error:
        return fail(f"{url} answers {error.code}: not a healthy vLLM", "look at vLLM's log")
    except OSError as error:
        return fail(f"{url}: nobody answers ({say_cause(error)})", "start vLLM, or correct --engine-url")
    return ok(f"{url}: vLLM {version} is healthy")


def _ask_nodes(subject: Subject) -> list[Finding]:
    found = []
    for node in (node for node in subject.nodes if is_running(node)):
        try:
            ready = read_status(node).get("engine_ready")
        except UnavailableError:
            continue  # 'node' says so
        if ready is not None:
            text = f"{node.name}: the engine {'holds a version' if ready else 'does not answer, or holds no version'}"
            found.append(ok(text) if ready else warn(text, f"look at {node}/vllm.log, or at the log of your vLLM"))
    return found


def look_at_gpu(subject: Subject, run: Run = run_program) -> Sequence[Finding]:
    """Say which GPUs the driver shows, and how much of their memory is free."""
    try:
        lines = run(["nvidia-smi", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"], SECONDS_MAX)
    except FileNotFoundError:
        if (subject.proc / "driver" / "nvidia").is_dir():
            return [warn("the driver is loaded, but there is no nvidia-smi", "install it from the driver's packages")]
        return [ok("none: fine for seeds and small models")]
    except UnavailableError as error:
        return [fail(str(error), "reload the driver or reboot; in a container, start it with --gpus all")]
    return [_judge_gpu([cell.strip() for cell in line.split(",")]) for line in lines.splitlines() if line.strip()] or [
        warn("nvidia-smi lists none", "look at CUDA_VISIBLE_DEVICES and at 'dmesg'")
    ]


def _judge_gpu(cells: Sequence[str]) -> Finding:
    name, total, free, driver = cells
    text = f"{name}, {free} of {total} MiB free, driver {driver}"
    if total.isdecimal() and free.isdecimal() and int(free) < GPU_FREE_RATIO_MIN * int(total):
        return warn(text, "full: fine if that is your engine or training loop, else end what 'nvidia-smi' lists")
    return ok(text)
