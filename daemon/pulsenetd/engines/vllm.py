"""The thread that keeps a vLLM current: attaches, applies each version, and takes note when the engine is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from pulsenet import limits
from pulsenet.errors import ConfigError, PulsenetError, StorageError, StructureError, UnavailableError
from pulsenet.ids import Version
from pulsenet.local.client import Client
from pulsenet.local.protocol import UpdateKind
from pulsenet.serving.engine import FullUpdate, apply_update
from pulsenet.serving.files import FilesEngine
from pulsenet.serving.subscriber import Subscriber
from pulsenet.serving.vllm.control import Control, EngineAsleepError, EngineGoneError, HttpControl
from pulsenet.serving.vllm.engine import UpdateTimes, VllmEngine
from pulsenet.serving.vllm.reload import ReloadEngine
from pulsenet.serving.vllm.stamps import MIDDLEWARE
from pulsenetd.engines.openai_upstream import Upstream
from pulsenetd.engines.vllm_process import (
    LOG_NAME,
    PROCESS_NAME,
    Process,
    ServerArguments,
    ServerProcess,
    Start,
    pick_port,
    recall,
    remember,
)
from pulsenetd.logs import logger

UPDATE_WAIT_SECONDS: Final = 1.0
"""Between two looks at the engine."""
START_SECONDS_MAX: Final = 1800.0
"""A large model loads for minutes, and compiles."""
START_POLL_SECONDS: Final = 0.5
SILENCE_SECONDS_MAX: Final = 60.0
"""A server that answered before and does not for so long is ended."""
GONE_SECONDS_MAX: Final = 5.0
"""So long a server may take to end by itself after its engine died: it may wait for the engine for ever."""
HEALTHY_SECONDS: Final = 120.0
"""A server that lived so long starts again with the shortest pause."""
CONNECT_SECONDS_MAX: Final = 10.0
SHUTDOWN_SECONDS_MAX: Final = 60.0


class Server(Protocol):
    """Where the engine is, and its process if it is ours."""

    def url(self) -> str:
        """Return where the engine listens, starting it if it does not run.

        Raises:
            PulsenetError: It cannot be started now.
        """

    def note_healthy(self) -> None:
        """The engine answered."""

    def note_silent(self) -> None:
        """The engine did not answer."""

    def note_gone(self) -> None:
        """The server says that its engine is dead, or takes no connection."""

    def stop(self) -> None:
        """End it if it is ours."""


class AttachedServer:
    """A vLLM that somebody else runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    def url(self) -> str:
        """Return the URL that was given."""
        return self._url

    def note_healthy(self) -> None:
        """Nothing to do."""

    def note_silent(self) -> None:
        """Nothing to do."""

    def note_gone(self) -> None:
        """Nothing to do."""

    def stop(self) -> None:
        """It is not ours to end."""


class SupervisedServer:
    """A vLLM that this node starts, and starts again from the newest version when it dies.

    Args:
        arguments: What the operator gave.
        start: Starts a server.
        memory: File in which the running server is remembered: a node that was killed finds it again.
        write_checkpoint: Writes what the node holds as a model directory; ``None`` if it holds nothing.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self,
        arguments: ServerArguments,
        start: Start,
        memory: Path,
        write_checkpoint: Callable[[], Path | None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arguments = arguments
        self._start = start
        self._memory = memory
        self._write_checkpoint = write_checkpoint
        self._monotonic = monotonic
        self._process: Process | None = None
        self._port = 0
        self._started_at = 0.0
        self._start_count = 0
        self._retry_at = 0.0
        self._pause_seconds = limits.RETRY_SECONDS_MIN
        self._is_healthy = False
        self._silent_since: float | None = None
        self._gone_since: float | None = None

    def url(self) -> str:
        """Return where the server listens; start it if none runs.

        Raises:
            UnavailableError: It died a moment ago, or takes too long to start.
        """
        now = self._monotonic()
        if self._process is not None:
            code = self._process.exit_code()
            if code is not None:
                self._note_death(f"ended with exit code {code}", now)
            elif not self._is_healthy and now - self._started_at > START_SECONDS_MAX:
                self._note_death(f"did not start within {START_SECONDS_MAX:.0f} s", now)
            elif self._silent_since is not None and now - self._silent_since > SILENCE_SECONDS_MAX:
                self._note_death(f"has not answered for {SILENCE_SECONDS_MAX:.0f} s", now)
            elif self._gone_since is not None and now - self._gone_since > GONE_SECONDS_MAX:
                # It waits for its engine for ever, and for that also when it is asked to end.
                self._process.kill()
                self._note_death("has lost its engine and does not end by itself", now)
        if self._process is None:
            if now < self._retry_at:
                raise UnavailableError(f"vLLM is started again in {self._retry_at - now:.0f} s")
            self._begin(now)
        return f"http://127.0.0.1:{self._port}"

    def note_healthy(self) -> None:
        """Forget earlier deaths once the server has lived for a while."""
        self._silent_since = self._gone_since = None
        if not self._is_healthy:
            self._is_healthy = True
            logger.info("vLLM serves on port %d (process %d)", self._port, self._process.pid if self._process else 0)
        if self._monotonic() - self._started_at > HEALTHY_SECONDS:
            self._pause_seconds = limits.RETRY_SECONDS_MIN

    def note_silent(self) -> None:
        """Take note of since when a server that has answered before does not."""
        if self._is_healthy and self._silent_since is None:
            self._silent_since = self._monotonic()

    def note_gone(self) -> None:
        """Take note of since when a server that has answered before has no engine."""
        self.note_silent()
        if self._is_healthy and self._gone_since is None:
            self._gone_since = self._monotonic()

    def stop(self) -> None:
        """End the server and its workers."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def _begin(self, now: float) -> None:
        self._started_at, self._is_healthy, self._silent_since = now, False, None
        self._gone_since = None
        left = recall(self._memory, self._arguments) if self._start_count == 0 else None
        self._start_count += 1
        if left is not None:
            self._process, self._port = left
            logger.info("vLLM runs already (process %d)", self._process.pid)
            return
        # A server that ended may have had half of a version; its successor starts from what the node verified.
        checkpoint = self._write_checkpoint() if self._start_count > 1 else None
        self._port = self._arguments.port or pick_port()
        self._process = self._start(self._arguments.build(self._port, None if checkpoint is None else str(checkpoint)))
        remember(self._memory, self._process.pid, self._port, self._arguments)
        logger.info("vLLM starts from %s", checkpoint or self._arguments.model)

    def _note_death(self, text: str, now: float) -> None:
        logger.warning("vLLM %s: started again in %.0f s", text, self._pause_seconds)
        self.stop()
        self._retry_at = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, limits.RETRY_SECONDS_MAX)


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
        self._thread = threading.Thread(target=self.run, name="vllm-engine", daemon=True)
        self._client: Client | None = None
        self._engine: VllmEngine | ReloadEngine | None = None
        self._control: Control | None = None
        self._url = ""
        self._told = ""
        self._is_ready: bool | None = None
        self._upstream: Upstream | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; an update in work is finished first. Blocks."""
        self._stop.set()
        if self._client is not None:
            self._client.close()
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


def write_checkpoint(data_directory: Path, model: str) -> Path | None:
    """Write the version the node holds as a model directory, with the files that belong to the model.

    Args:
        data_directory: The node's.
        model: Directory that vLLM was started from.

    Returns:
        The directory; ``None`` if the node holds no version, or the model is not a directory of this machine.
    """
    if not Path(model).is_dir():
        return None
    with Client.connect(data_directory, timeout_seconds=CONNECT_SECONDS_MAX) as client:
        update = client.next_update(None, UPDATE_WAIT_SECONDS)
        if update is None or update.kind is not UpdateKind.FULL:
            return None
        files: FilesEngine | None = None
        try:
            with update:
                region = update.open_region()
                try:
                    files = FilesEngine(data_directory / "engine" / "checkpoint", companions=model)
                    apply_update(
                        files,
                        FullUpdate(update.version, update.root, update.table, region.bytes),
                    )
                    return files.current.resolve()
                finally:
                    region.close()
        except StorageError as error:
            logger.warning(
                "no checkpoint of version %s can be written (%s): vLLM starts from %s", update.version, error, model
            )
            return None
        finally:
            if files is not None:
                files.close()


def check_server(url: str, serve: Sequence[str]) -> None:
    """Refuse options that describe no engine.

    Raises:
        ConfigError: The message says what is wrong.
    """
    if serve:
        ServerArguments(serve)
    elif url:
        HttpControl(url)


def find_reload_model(is_allowed: bool, companions: str, serve: Sequence[str]) -> Path | None:
    """Return the model directory beside whose files versions are written for vLLM to load; ``None`` if it may not.

    Raises:
        ConfigError: It is no directory of this machine.
    """
    if not is_allowed:
        return None
    model = Path(companions or ServerArguments(serve).model)
    if not model.is_dir():
        raise ConfigError(f"--engine-reload needs a model directory, and {model} is none: name it with --companions")
    return model


def make_server(
    url: str,
    serve: tuple[str, ...],
    *,
    python: str,
    data_directory: Path,
    start: Start | None = None,
    states_versions: bool = False,
) -> Server:
    """Return the server that the operator's options describe; errors as :func:`check_server`.

    Args:
        url: Of a server that runs already.
        serve: Arguments of one to start; empty: none.
        python: Interpreter that has vLLM.
        data_directory: The node's.
        start: Starts a server.
        states_versions: Whether a server that is started says with each answer which versions wrote it.
    """
    if not serve:
        return AttachedServer(url)
    arguments = ServerArguments((*serve, "--middleware", MIDDLEWARE) if states_versions else serve)

    def start_process(built: object) -> ServerProcess:
        assert isinstance(built, list)
        return ServerProcess(built, python=python, log=data_directory / LOG_NAME)

    return SupervisedServer(
        arguments,
        start or start_process,
        data_directory / PROCESS_NAME,
        lambda: write_checkpoint(data_directory, arguments.model),
    )
