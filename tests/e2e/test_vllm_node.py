"""A real vLLM, started and looked after by a real node, follows a real trainer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from swarm import Swarm, wait_until

import pulsenet.training

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))

from vllm_models import change_weights, make_model, save_checkpoint
from vllm_server import Server, free_port

VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")
"""Interpreter of an environment with vLLM and pulsenet; .ci/vllm makes one."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not VLLM_PYTHON, reason="VLLM_PYTHON does not name an interpreter that has vLLM"),
]

START_SECONDS = 240.0
PROMPT = list(range(40))


def find_engine_process(server_pid: int) -> int | None:
    """Return the process that holds the weights: the newest below the server."""
    found = [server_pid]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    named = [pid for pid in found[1:] if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
    return named[-1] if named else None


def read_server_pid(data_dir: Path) -> int:
    """Return the server that the node remembers."""
    return int(json.loads((data_dir / "vllm.json").read_text())["pid"])


def test_a_supervised_vllm_follows_dies_and_comes_back(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = make_model("llama")
    base = save_checkpoint(model, swarm.directory / "base")
    port = free_port()
    trainer = swarm.add("trainer", "trainer").start().wait_ready()
    node = swarm.add(
        "inferencer",
        "inferencer",
        *("--engine", "vllm", "--engine-python", VLLM_PYTHON, "--serve", "--"),
        *("--model", str(base), "--skip-tokenizer-init", "--dtype", "bfloat16", "--max-model-len", "1024"),
        *("--port", str(port), "--enforce-eager", "--enable-scale-out"),
    ).start()
    server = Server(port, None, node.data_dir / "vllm.log")  # type: ignore[arg-type]
    publisher: Any = pulsenet.training.attach(data_dir=trainer.data_dir)

    def publish(number: int) -> None:
        if number > 1:
            change_weights(model, number)
        assert publisher.publish(model, step=number, wait=True).version.number == number

    def wait_for(number: int) -> None:
        node.wait_applied(number, START_SECONDS)
        wait_until("the node is ready", lambda: node.get("/readyz")[0] == 200, START_SECONDS)
        assert server.ask("GET", "/weight_info") == {"weight_version": f"0.{number}"}

    publish(1)
    wait_for(1)
    publish(2)
    publish(3)
    wait_for(3)
    answer = server.generate(PROMPT, 16)
    assert answer.spans == (("0.3", 0, 16),)

    # The engine's process dies; its successor starts from what the node verified, and is attached before it is ready.
    first = read_server_pid(node.data_dir)
    engine = find_engine_process(first)
    os.kill(first if engine is None else engine, signal.SIGKILL)
    wait_until("the node is not ready", lambda: node.get("/readyz")[0] == 503, 60.0)
    wait_until("another server", lambda: read_server_pid(node.data_dir) != first, 120.0)
    wait_for(3)
    assert server.generate(PROMPT, 16) == answer
    checkpoint = node.data_dir / "engine" / "checkpoint" / "versions" / "0.3"
    assert (checkpoint / "model.safetensors").exists()

    # The node dies; the engine serves on and the next life of the node finds it.
    second = read_server_pid(node.data_dir)
    node.kill()
    assert server.generate(PROMPT, 16) == answer
    publish(4)
    node.start()
    wait_for(4)
    assert read_server_pid(node.data_dir) == second
    assert server.generate(PROMPT, 16) != answer

    assert node.stop()[0] == 143
    wait_until("the server ended with its node", lambda: not Path(f"/proc/{second}").exists(), 30.0)
    publisher.close()
    shutil.rmtree(base)
