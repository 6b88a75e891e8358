"""Models that cannot be patched in place are refused with a reason, in real engines of one process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.nightly]

SCRIPT = Path(__file__).with_name("attach_alone.py")


def attach(kind: str, path: Path) -> Any:
    """Start an engine of one process, attach its rank, and return the answer."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(SCRIPT), kind, str(path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_fp32_weights_stay_plain_and_are_taken(tmp_path: Path) -> None:
    """vLLM would pack them for oneDNN and drop the originals."""
    answer = attach("fp32", tmp_path)
    assert (answer["outcome"], answer["state"]) == ("done", "ready"), answer["reason"]


def test_experts_repacked_on_a_cpu_are_refused(tmp_path: Path) -> None:
    answer = attach("experts", tmp_path)
    assert answer["outcome"] == "refused"
    assert "expert" in answer["reason"] or "other bits" in answer["reason"] or "another form" in answer["reason"]


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    answer = attach("latent", tmp_path)
    assert (answer["outcome"], answer["code"]) == ("refused", "structure")
    assert "latent attention" in answer["reason"]


def test_another_dtype_is_refused_with_what_to_change(tmp_path: Path) -> None:
    """A-DT-1."""
    answer = attach("cast", tmp_path)
    assert answer["outcome"] == "refused"
    assert "--dtype" in answer["reason"]
