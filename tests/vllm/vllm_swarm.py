"""A publisher's model, a real engine and the node's side of it, in one place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_models import change_weights, make_model, save_checkpoint
from vllm_server import Generated, Server, running_server
from vllm_versions import Published

from pulsenet.ids import Version
from pulsenet.serving.engine import apply_update
from pulsenet.serving.vllm.control import HttpControl
from pulsenet.serving.vllm.engine import UpdateTimes, VllmEngine

SEED = 1
PROMPTS = [list(range(first, first + 40)) for first in range(0, 200, 40)]


@dataclass(slots=True)
class Served:
    """A running engine and all that a test does with it."""

    family: str
    ranks: int
    path: Path
    model: Any
    server: Server
    engine: VllmEngine
    held: Published
    times: list[UpdateTimes] = field(default_factory=list)

    def bring_forward(self, *, density: float = 0.02) -> Published:
        """Publish the next version and bring the engine to it."""
        following = self.make_next(density=density)
        apply_update(self.engine, following.records_from(self.held))
        self.held = following
        return following

    def make_next(self, *, density: float = 0.02) -> Published:
        """Publish the next version; the engine does not have it yet."""
        version = Version(self.held.version.epoch, self.held.version.number + 1)
        change_weights(self.model, version.number, density=density)
        return Published.take(self.model, version)

    def answers(self) -> list[Generated]:
        """Return greedy answers, one after the other so that no batch changes a sum."""
        return [self.server.generate(prompt, 16) for prompt in PROMPTS]

    def addresses(self) -> Any:
        """Return where every parameter of every rank lies."""
        return self.server.ask("POST", "/collective_rpc", {"method": "pulsenet_addresses"})["results"]

    def break_rank(self, method: str, rank: int) -> None:
        """Let one rank misbehave in its next commit."""
        self.server.ask("POST", "/collective_rpc", {"method": method, "args": [rank]})

    def checksums(self) -> Any:
        """Return vLLM's own checksums of all parameters."""
        return get_checksums(self.server)

    @contextmanager
    def fresh_engine(self, name: str) -> Iterator[Server]:
        """Run a second engine, started from the version that is held."""
        checkpoint = save_checkpoint(self.model, self.path / name)
        with running_server(
            checkpoint, self.path / f"{name}.log", *rank_arguments(self.ranks), **rank_environment(self.ranks)
        ) as server:
            yield server


def get_checksums(server: Server) -> Any:
    """Return vLLM's own checksums of a server's parameters."""
    return server.ask("POST", "/weight_checker", {"action": "checksum"})["checksums"]


def rank_arguments(ranks: int) -> tuple[str, ...]:
    """Return the arguments for that many ranks, and for the tests' hands in the workers."""
    parallel = ("--tensor-parallel-size", str(ranks)) if ranks > 1 else ()
    return (*parallel, "--worker-extension-cls", "vllm_extension.WorkerExtension")


def rank_environment(ranks: int) -> dict[str, str]:
    """Return the variables for that many ranks: each has a core of its own."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 else {}


@contextmanager
def open_served(family: str, ranks: int, path: Path) -> Iterator[Served]:
    """Start an engine from version 0.0 and attach the node's side."""
    model = make_model(family, SEED)
    checkpoint = save_checkpoint(model, path / "base")
    with running_server(checkpoint, path / "engine.log", *rank_arguments(ranks), **rank_environment(ranks)) as server:
        times: list[UpdateTimes] = []
        engine = VllmEngine(HttpControl(server.url), path / "node", on_times=times.append)
        try:
            held = Published.take(model, Version(0, 0))
            with held.as_full() as update:
                apply_update(engine, update)
            yield Served(family, ranks, path, model, server, engine, held, times)
        finally:
            engine.close()


class Load:
    """Requests that never stop while the block runs."""

    def __init__(self, server: Server, *, threads: int = 3, tokens: int = 48) -> None:
        self._server = server
        self._tokens = tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(threads)]
        self.finished: list[Generated] = []
        self.errors: list[BaseException] = []

    def _ask(self, index: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                prompt = [(index * 50 + count + position) % 256 for position in range(24)]
                self.finished.append(self._server.generate(prompt, self._tokens))
            except Exception as error:
                self.errors.append(error)
                return

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
