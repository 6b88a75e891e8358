"""A real vLLM, started and looked after by a real node, follows a real trainer."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm import Swarm, open_swarm, wait_until

import pulsenet
from pulsenetd.engines.vllm_process import PROCESS_NAME, end_left

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))

from attach_alone import make_latent
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


@pytest.fixture(name="swarm")
def swarm_fixture() -> Iterator[Swarm]:
    """Lend each test a run of its own, whose first version is 0.1."""
    with open_swarm() as opened:
        yield opened


@pytest.fixture(name="leave_no_engine", autouse=True)
def leave_no_engine_fixture(swarm: Swarm) -> Iterator[None]:
    """End the server of a node that is killed because its test failed: it would serve on, as it should."""
    yield
    swarm.clean_up()
    for path in swarm.directory.rglob(PROCESS_NAME):
        end_left(path)


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


def write_tokenizer(directory: Path) -> None:
    """Give a model directory a tokenizer of one word per token, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(256)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} w2 {% endfor %}"
    tokenizer.save_pretrained(directory)


def ask_openai(port: int, path: str, body: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the JSON objects of an answer, whole or streamed, and its headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    text = json.dumps({"max_tokens": 8, "ignore_eos": True, **body})
    connection.request("POST", f"/v1/{path}", text, {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    assert response.status == 200, data
    if not body.get("stream"):
        return [json.loads(data)], response.headers
    events = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events], response.headers


def check_openai(port: int, version: str) -> None:
    """Ask all that an application may, and expect one version."""
    expected = {"version_first": version, "version_last": version, "exact": True}
    messages = {"messages": [{"role": "user", "content": "w3 w4 w5"}]}
    for path, body in (("completions", {"prompt": "w3 w4 w5", "n": 2}), ("chat/completions", messages)):
        (answer,), headers = ask_openai(port, path, body)
        assert answer["pulsenet"] == expected
        assert (headers["x-pulsenet-version-first"], headers["x-pulsenet-version-last"]) == (version, version)
        assert answer["usage"]["completion_tokens"] == 8 * len(answer["choices"])
        events, _ = ask_openai(port, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        stamped = [event for event in events if "pulsenet" in event]
        assert [event["pulsenet"] for event in stamped] == [expected] * (len(answer["choices"]) + 1)
        assert stamped[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_a_supervised_vllm_follows_dies_and_comes_back(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = make_model("llama")
    base = save_checkpoint(model, swarm.directory / "base")
    write_tokenizer(base)
    port, openai_port = free_port(), free_port()
    trainer = swarm.add("trainer", "trainer").start().wait_ready()
    node = swarm.add(
        "inferencer",
        "inferencer",
        *("--engine", "vllm", "--engine-python", VLLM_PYTHON, "--openai-port", str(openai_port), "--serve", "--"),
        *("--model", str(base), "--dtype", "bfloat16", "--max-model-len", "1024"),
        *("--port", str(port), "--enforce-eager", "--enable-scale-out"),
    ).start()
    server = Server(port, None, node.data_dir / "vllm.log")  # type: ignore[arg-type]
    publisher: Any = pulsenet.attach_publisher(data_dir=trainer.data_dir)

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
    check_openai(openai_port, "0.3")

    # The engine's process dies; its successor starts from what the node verified, and is attached before it is ready.
    first = read_server_pid(node.data_dir)
    engine = find_engine_process(first)
    os.kill(first if engine is None else engine, signal.SIGKILL)
    wait_until("the node is not ready", lambda: node.get("/readyz")[0] == 503, 60.0)
    wait_until("another server", lambda: read_server_pid(node.data_dir) != first, START_SECONDS)
    wait_for(3)
    assert server.generate(PROMPT, 16) == answer
    check_openai(openai_port, "0.3")
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


@pytest.mark.nightly
def test_a_model_that_cannot_be_patched_is_loaded_again_for_every_version(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention: vLLM computes other weights from the published ones when it loads them."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = make_latent()
    base = save_checkpoint(model, swarm.directory / "base")
    write_tokenizer(base)
    port = free_port()
    trainer = swarm.add("trainer", "trainer").start().wait_ready()
    node = swarm.add(
        "inferencer",
        "inferencer",
        *("--engine", "vllm", "--engine-python", VLLM_PYTHON, "--engine-reload", "--serve", "--"),
        *("--model", str(base), "--dtype", "bfloat16", "--max-model-len", "512"),
        *("--port", str(port), "--enforce-eager", "--enable-scale-out"),
    ).start()
    server = Server(port, None, node.data_dir / "vllm.log")  # type: ignore[arg-type]
    publisher: Any = pulsenet.attach_publisher(data_dir=trainer.data_dir)
    publisher.publish(model, step=1, wait=True)
    if torch.cpu._is_amx_tile_supported():
        # vLLM 0.32 throws the projection away there once it is packed, and its own reload fails on what is left.
        text = "nor could a load be checked: start vLLM again from the newest version instead"
        node.wait_log(text, START_SECONDS)
        assert server.ask("GET", "/weight_info") == {"weight_version": "default"}
        assert server.generate(PROMPT, 16).spans == (("default", 0, 16),), "it serves on, with what it was started from"
        assert node.get("/readyz")[0] == 503
        assert node.stop()[0] == 143
        publisher.close()
        return
    answers = []
    for number in (1, 2, 3):
        if number > 1:
            change_weights(model, number)
            publisher.publish(model, step=number, wait=True)
        node.wait_applied(number, START_SECONDS)
        wait_until("the node is ready", lambda: node.get("/readyz")[0] == 200, START_SECONDS)
        assert server.ask("GET", "/weight_info") == {"weight_version": f"0.{number}"}
        answers.append(server.generate(PROMPT, 16))
    assert [answer.spans for answer in answers] == [((f"0.{number}", 0, 16),) for number in (1, 2, 3)]
    assert answers[0].logprobs != answers[1].logprobs != answers[2].logprobs
    assert node.stop()[0] == 143
    publisher.close()
