"""The programs of docs/trl.md, as they stand there: TRL trains on what an inferencer samples, over real nodes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swarm import Swarm, make_environment

from pulsenet.tensors.digest import compute_region_root
from pulsenet.training.snapshot import take_snapshot

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trl"))

from trl_models import save_checkpoint

TRL_PYTHON = os.environ.get("TRL_PYTHON", "")
"""Interpreter of an environment with TRL and pulsenet; .ci/trl makes one."""

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "trl.md"
STEPS = 4
TRAIN_SECONDS = 400.0

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.trl,
    pytest.mark.skipif(not TRL_PYTHON, reason="TRL_PYTHON does not name an interpreter that has TRL; see .ci/trl"),
]


def read_programs() -> tuple[str, str]:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2, "the document has a trainer and an inferencer; say here what the others are for"
    return blocks[0], blocks[1]


@contextmanager
def run_beside(*command: str, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def compute_root(folder: Path) -> str:
    """Return the root of a saved model's BF16 cast."""
    from transformers import LlamaForCausalLM

    snapshot = take_snapshot(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))
    region = np.zeros(snapshot.table.layout_size_bytes, np.uint8)
    for index, offset_bytes, data in snapshot.blocks():
        start = snapshot.table.offsets[index] + offset_bytes
        region[start : start + data.size] = data
    return compute_region_root(snapshot.table, region).hex()


def read_logs(text: str) -> list[dict[str, Any]]:
    """Return what the Trainer printed at each step."""
    return [json.loads(line.replace("'", '"')) for line in text.splitlines() if re.match(r"\{'loss'", line)]


def test_the_programs_of_the_document_train(swarm: Swarm) -> None:
    checkpoint = save_checkpoint(swarm.directory / "checkpoint")
    paths = [swarm.directory / "train.py", swarm.directory / "sample.py"]
    for path, program in zip(paths, read_programs(), strict=True):
        path.write_text(program)
    environment = {
        **make_environment(swarm.home()),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    trainer = swarm.add("trainer", "trainer").start().wait_ready()
    inferencer = swarm.add("inferencer", "inferencer", "--engine", "none").start().wait_ready()
    log = swarm.directory / "sample.log"
    with run_beside(sys.executable, str(paths[1]), str(checkpoint), environment=environment, log=log) as sampler:
        done = subprocess.run(
            [TRL_PYTHON, str(paths[0]), str(checkpoint), str(STEPS)],
            env=environment,
            cwd=swarm.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRAIN_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{log.read_text()[-3000:]}"
        assert sampler.poll() is None, log.read_text()

        # Version 1 is what training started from.
        status = inferencer.wait_applied(STEPS + 1)
        assert status["engine_version"] == STEPS + 1
        assert inferencer.read_root(STEPS + 1) == compute_root(swarm.directory / "out" / "final")
    steps = read_logs(done.stdout)
    assert len(steps) == STEPS
    for step in steps:
        assert math.isfinite(float(step["loss"]))
        assert float(step["grad_norm"]) > 0
        assert 0 < float(step["sampling/importance_sampling_ratio/max"]) <= 2.0
    assert trainer.status["rollouts"]["tasks"]["done"] >= 4 * STEPS
