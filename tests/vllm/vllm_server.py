"""A real vLLM server in processes of its own, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS_MAX = 480.0
REQUEST_SECONDS_MAX = 120.0


@dataclass(frozen=True, slots=True)
class Generated:
    """One finished request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    cached_count: int
    """Prompt tokens taken from the prefix cache."""
    spans: tuple[tuple[str, int, int], ...]
    """(label of the weights, first token, end) over the output tokens."""


@dataclass(slots=True)
class Server:
    """A server that answers."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, seconds: float = REQUEST_SECONDS_MAX) -> Any:
        """Send one request and return the answer's JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {data[:500]!r}")
        return json.loads(data) if data else None

    def generate(self, prompt: Sequence[int], count: int, seconds: float = REQUEST_SECONDS_MAX) -> Generated:
        """Return ``count`` greedy tokens after ``prompt``."""
        body = {
            "token_ids": list(prompt),
            "sampling_params": {"max_tokens": count, "temperature": 0.0, "logprobs": 1, "ignore_eos": True},
            "stream": False,
        }
        reply = self.ask("POST", "/inference/v1/generate", body, seconds)
        (choice,) = reply["choices"]
        usage = reply.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return Generated(
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(entry["logprob"] for entry in choice["logprobs"]["content"]),
            finish_reason=choice["finish_reason"],
            cached_count=details.get("cached_tokens") or 0,
            spans=tuple((span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()),
        )

    def descendants(self) -> list[int]:
        """Return the process ids of the engine behind the server."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
        return found[1:]

    def is_paused(self) -> bool:
        """Say whether the scheduler stands still."""
        return bool(self.ask("GET", "/is_paused")["is_paused"])

    def stop(self, patience_seconds: float = 20.0) -> None:
        """End the server and all that it started.

        Args:
            patience_seconds: How long it may take by itself. One that waits for a dead engine never ends.
        """
        pids = self.descendants()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def server_environment(**further: str) -> dict[str, str]:
    """Return the environment a CPU server needs."""
    return {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))).rstrip(
            os.pathsep
        ),
        **further,
    }


def server_command(model: Path, port: int, *arguments: str) -> list[str]:
    """Return the command of a server with the adapter."""
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", str(model), "--skip-tokenizer-init", "--dtype", "bfloat16", "--max-model-len", "1024"),
        *(
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--enforce-eager",
            "--enable-prompt-tokens-details",
            "--enable-scale-out",
        ),
        *("--weight-transfer-config", '{"backend": "pulsenet"}', "--disable-log-stats"),
        *("--middleware", "pulsenet.serving.vllm.stamps.VersionStamps"),
        *arguments,
    ]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_server(model: Path, log: Path, *arguments: str, **environment: str) -> Server:
    """Start a server and return it once it is healthy."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            server_command(model, port, *arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=server_environment(**environment),
        )
    server = Server(port, process, log)
    try:
        _wait_until_healthy(server)
    except BaseException:  # a test that takes too long ends here too, and would leave the server behind
        server.stop(patience_seconds=1.0)
        raise
    return server


def _wait_until_healthy(server: Server) -> None:
    give_up_at = time.monotonic() + START_SECONDS_MAX
    while True:
        with contextlib.suppress(OSError, RuntimeError, http.client.HTTPException):
            server.ask("GET", "/health", seconds=2.0)
            return
        if server.process.poll() is not None or time.monotonic() > give_up_at:
            raise RuntimeError(f"vLLM did not start: {server.log.read_text()[-3000:]}")
        time.sleep(0.25)


@contextlib.contextmanager
def running_server(model: Path, log: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    """Run a server while the block runs."""
    server = start_server(model, log, *arguments, **environment)
    try:
        yield server
    finally:
        server.stop()
