"""The thread that keeps a vLLM current: attaches, applies each version, and takes note when the engine is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Never

from pulsenet import limits
from pulsenet.errors import PulsenetError, StructureError, UnavailableError
from pulsenet.ids import Version
from pulsenet.local.client import Client
from pulsenet.serving.subscriber import Subscriber
from pulsenet.serving.vllm.control import Control, EngineAsleepError, EngineGoneError, HttpControl
from pulsenet.serving.vllm.engine import UpdateTimes, VllmEngine
from pulsenet.serving.vllm.reload import ReloadEngine
from pulsenetd.engines.openai_upstream import Upstream
from pulsenetd.engines.thread import EngineThread
from pulsenetd.engines.vllm_server import CONNECT_SECONDS_MAX, Server
from pulsenetd.logs import logger

UPDATE_WAIT_SECONDS: Final = 1.0
"""Between two looks at the engine."""
SHUTDOWN_SECONDS_MAX: Final = 60.0


class VllmRunner:
    """Keeps one vLLM at the newest version, in a thread of its own.

    Args:
        data_directory: The node's; its local socket is asked for versions.
        server: Where the engine is.
        on_times: Told how long each update took.
        on_ready: Told whether the engine answers and holds a version, whenever that changes.
        on_lost: Told why, when an engine that held a version turns out to hold it no longer.
        make_control: Reaches an engine by its URL.
        reload_from: The model directory that vLLM was started from, if it may load versions from disk where its
            weights cannot be patched.
    """

    def __init__(
        self,
        data_directory: Path,
        server: Server,
        *,
        on_times: Callable[[UpdateTimes], None],
        on_ready: Callable[[bool], None],
        on_lost: Callable[[str], None],
        make_control: Callable[[str], Control] = HttpControl,
        reload_from: Path | None = None,
    ) -> None:
        self._data_directory = data_directory
        self._server = server
        self._on_times = on_times
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._make_control = make_control
        self._reload_from = reload_from
        self._stop = threading.Event()
        self._thread = EngineThread(self.run, name="vllm-engine")
        self._client: Client | None = None
        self._engine: VllmEngine | ReloadEngine | None = None
        self._control: Control | None = None
        self._url = ""
        self._told = ""
        self._is_ready: bool | None = None
        self._upstream: Upstream | None = None

    @property
    def failure(self) -> Future[Never]:
        """Gets the error that ended the thread, if one does."""
        return self._thread.failure

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; an update in work is finished first. Blocks."""
        self._stop.set()
        if self._client is not None:
            self._client.close()
        if self._thread.is_alive():  # not where the OpenAI port was taken: then nothing was started
            self._thread.join(SHUTDOWN_SECONDS_MAX)
        self._server.stop()

    def find_upstream(self) -> Upstream:
        """Return the engine for requests of applications; called from any thread.

        While an update is in work it is the version before: the engine holds requests up by itself for that long.

        Raises:
            UnavailableError: No engine answers, or none whose version is known; the message says why.
        """
        upstream = self._upstream
        if upstream is None:
            raise UnavailableError(self._told or "the engine has no version yet")
        return upstream

    def run(self) -> None:
        """Follow until :meth:`stop`, whatever happens to the engine."""
        pause_seconds = limits.RETRY_SECONDS_MIN
        try:
            while not self._stop.is_set():
                try:
                    self._follow_once()
                except PulsenetError as error:
                    self._note_ready(False)
                    self._note_upstream()
                    if self._stop.is_set():
                        return
                    if str(error) != self._told:
                        self._told = str(error)
                        logger.warning("vLLM: %s", error)
                    self._stop.wait(pause_seconds)
                    pause_seconds = min(2 * pause_seconds, limits.RETRY_SECONDS_MAX)
                else:
                    self._told, pause_seconds = "", limits.RETRY_SECONDS_MIN
                    self._note_ready(self._engine is not None and self._engine.version is not None)
                    self._note_upstream()
        finally:
            if self._engine is not None:
                self._engine.close()
            if self._client is not None:
                self._client.close()

    def _follow_once(self) -> None:
        """Look at the engine, and bring it one version forward if there is one."""
        engine = self._reach(self._server.url())
        held = engine.version
        try:
            engine.probe()
        except PulsenetError as error:
            if isinstance(error, EngineGoneError):
                self._server.note_gone()
            elif isinstance(error, EngineAsleepError):
                self._server.note_healthy()
            else:
                self._server.note_silent()
            if held is not None and engine.version is None:
                self._on_lost(str(error))
            raise
        self._server.note_healthy()
        if self._client is None:
            self._client = Client.connect(self._data_directory, timeout_seconds=CONNECT_SECONDS_MAX)
        try:
            Subscriber(self._client, engine, on_update=_say_applied).step(UPDATE_WAIT_SECONDS)
        except StructureError as error:
            if self._reload_from is None or isinstance(engine, ReloadEngine):
                raise
            logger.warning("vLLM cannot be patched and loads each version from disk instead: %s", error)
            self._turn_to_reloading(engine, self._reload_from)

    def _turn_to_reloading(self, engine: VllmEngine, model: Path) -> None:
        """Go on with an engine that is loaded instead of patched."""
        control = self._control
        assert control is not None
        engine.close()
        self._engine = None
        self._engine = ReloadEngine(
            control, engine.directory, model, on_times=self._on_times, on_survey=_say_how_much_is_compared
        )

    def _note_ready(self, is_ready: bool) -> None:
        if is_ready is not self._is_ready:
            self._is_ready = is_ready
            self._on_ready(is_ready)

    def _note_upstream(self) -> None:
        """Take note of whom applications may ask; an engine that refused an update serves on what it holds."""
        version = None if self._engine is None else self._engine.version
        if version is None or self._control is None:
            self._upstream = None
        elif self._upstream is None or (self._upstream.url, self._upstream.version) != (self._url, version):
            self._upstream = Upstream(self._url, version, self._control.label)

    def _reach(self, url: str) -> VllmEngine | ReloadEngine:
        """Return the engine at a URL; a server that was started anew may have another port."""
        if self._engine is not None and url != self._url:
            if self._engine.version is not None:
                self._on_lost("vLLM was started again")
            self._engine.close()
            self._engine = None
        if self._engine is None:
            self._control, self._url = self._make_control(url), url
            self._engine = VllmEngine(self._control, self._data_directory / "engine", on_times=self._on_times)
        return self._engine


def _say_applied(version: Version) -> None:
    logger.info("vLLM serves version %s", version)


def _say_how_much_is_compared(compared_count: int, element_count: int) -> None:
    share = 100 * compared_count / element_count
    logger.info("after each load %.0f %% of vLLM's weights are compared with the files; it packs the others", share)
