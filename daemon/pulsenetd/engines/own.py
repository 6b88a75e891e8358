"""The engine of an inferencer's node itself: started once its local socket is served, and ended with the node."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Never

from pulsenet.errors import PulsenetError
from pulsenet.serving.files import FilesEngine
from pulsenet.serving.sglang import SglangEngine
from pulsenet.serving.subscriber import Subscriber, attach_engine
from pulsenet.serving.vllm.engine import UpdateTimes
from pulsenetd.config import Config
from pulsenetd.engines.openai_server import OpenAiServer
from pulsenetd.engines.thread import EngineThread
from pulsenetd.engines.vllm import VllmRunner
from pulsenetd.engines.vllm_server import find_reload_model, make_server
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics

RETRY_SECONDS: Final = 5.0
"""Pause before the engine's directory, or the node's socket, is tried again."""


class DiskEngine:
    """Keeps a directory current, or an SGLang by one: a subscriber like any other, in a thread of this process.

    Args:
        config: The engine is ``files`` or ``sglang``.
        data_directory: The node's.
    """

    def __init__(self, config: Config, data_directory: Path) -> None:
        self._config = config
        self._data_directory = data_directory
        self._directory = Path(config.engine_dir) if config.engine_dir else data_directory / "weights"
        self._thread = EngineThread(self._run, name=f"{config.engine}-engine")
        self._is_ending = threading.Event()
        self._subscriber: Subscriber | None = None

    @property
    def failure(self) -> Future[Never]:
        """Gets the error that ended its thread, if one does."""
        return self._thread.failure

    def start(self) -> None:
        """Start its thread."""
        self._thread.start()

    def _run(self) -> None:
        engine = self._open()
        if engine is None:
            return
        try:
            self._follow(engine)
        finally:
            engine.close()

    def _follow(self, engine: FilesEngine | SglangEngine) -> None:
        """Follow this node, once it can be reached: one that is busy with its start answers late."""
        name, told = self._config.engine, ""
        while not self._is_ending.is_set():
            try:
                self._subscriber = attach_engine(
                    engine,
                    data_dir=self._data_directory,
                    on_update=lambda version: logger.info("version %s is in %s", version, self._directory / "current"),
                    on_failure=lambda error: logger.warning("the %s engine: %s", name, error),
                )
            except PulsenetError as error:
                if str(error) != told:
                    told = str(error)
                    logger.warning("the %s engine cannot follow: %s; it tries again by itself", name, error)
                self._is_ending.wait(RETRY_SECONDS)
                continue
            if self._is_ending.is_set():
                self._subscriber.close()
            self._subscriber.run()
            return

    def _open(self) -> FilesEngine | SglangEngine | None:
        """Open the engine's directory, as often as it takes: a full disk or a lock may be gone in a minute.

        Returns:
            ``None`` once the node stops.
        """
        config = self._config
        companions = Path(config.companions) if config.companions else None
        told = ""
        while not self._is_ending.is_set():
            try:
                if config.engine == "sglang" and companions is not None:
                    return SglangEngine(config.engine_url, self._directory, companions=companions)
                return FilesEngine(self._directory, companions=companions)
            except PulsenetError as error:
                if str(error) != told:
                    told = str(error)
                    logger.error("the %s engine cannot start: %s; it is tried again by itself", config.engine, error)
            self._is_ending.wait(RETRY_SECONDS)
        return None

    def stop(self) -> None:
        """Stop its thread; an update in work is finished first."""
        self._is_ending.set()
        if self._subscriber is not None:
            self._subscriber.close()
        if self._thread.is_alive():
            self._thread.join(timeout=5)


class VllmEngine:
    """A vLLM beside the node, and the OpenAI API in front of it where one is asked for. Make it in a running loop.

    Args:
        config: The engine is ``vllm``.
        data_directory: The node's.
        on_lost: Told why the engine is gone, in the event loop.
    """

    def __init__(
        self,
        config: Config,
        data_directory: Path,
        ledger: Ledger,
        metrics: Metrics,
        on_lost: Callable[[str], None],
    ) -> None:
        self._config = config
        self._metrics = metrics
        loop = asyncio.get_running_loop()

        def note_ready(is_ready: bool) -> None:
            loop.call_soon_threadsafe(lambda: ledger.note(engine_ready=is_ready))

        def note_loss(reason: str) -> None:
            loop.call_soon_threadsafe(on_lost, reason)

        server = make_server(
            config.engine_url,
            config.serve,
            python=config.engine_python or sys.executable,
            data_directory=data_directory,
            states_versions=bool(config.openai_port),
        )
        self._runner = VllmRunner(
            data_directory,
            server,
            on_times=self._note_times,
            on_ready=note_ready,
            on_lost=note_loss,
            reload_from=find_reload_model(config.engine_reload, config.companions, config.serve),
        )
        self._openai: OpenAiServer | None = None

    def _note_times(self, times: UpdateTimes) -> None:
        self._metrics.observe("stage", times.stage_seconds)
        if times.pause_seconds:
            self._metrics.observe("pause", times.pause_seconds)

    @property
    def failure(self) -> Future[Never]:
        """Gets the error that ended its thread, if one does."""
        return self._runner.failure

    def start(self) -> None:
        """Start what runs it, and the API."""
        if self._config.openai_port:
            host, port = self._config.openai_host, self._config.openai_port
            self._openai = OpenAiServer(host, port, self._runner.find_upstream, count=self._metrics.count)
        self._runner.start()

    def stop(self) -> None:
        """Take no more requests, and stop it."""
        if self._openai is not None:
            self._openai.close()
        self._runner.stop()
