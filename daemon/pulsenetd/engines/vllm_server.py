"""Where a vLLM is that a node keeps current: one that somebody else runs, or one that the node starts and ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from pulsenet import limits
from pulsenet.errors import ConfigError, StorageError, UnavailableError
from pulsenet.local.client import Client
from pulsenet.local.protocol import COPIED, UpdateKind
from pulsenet.local.update import Update
from pulsenet.serving.engine import FullUpdate, apply_update
from pulsenet.serving.files import FilesEngine
from pulsenet.serving.vllm.control import HttpControl
from pulsenet.serving.vllm.stamps import MIDDLEWARE
from pulsenetd.engines.vllm_process import (
    LOG_NAME,
    PROCESS_NAME,
    Process,
    ServerArguments,
    ServerProcess,
    Start,
    bound_log,
    find_reason,
    pick_port,
    recall,
    remember,
)
from pulsenetd.logs import logger

START_SECONDS_MAX: Final = 1800.0
"""A large model loads for minutes, and compiles."""
SILENCE_SECONDS_MAX: Final = 60.0
"""A server that answered before and does not for so long is ended."""
GONE_SECONDS_MAX: Final = 5.0
"""So long a server may take to end by itself after its engine died: it may wait for the engine for ever."""
HEALTHY_SECONDS: Final = 120.0
"""A server that lived so long starts again with the shortest pause."""
CONNECT_SECONDS_MAX: Final = 10.0
UPDATE_WAIT_SECONDS: Final = 1.0
"""For the version that the node holds."""


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
        log: File that the server writes to.
        write_checkpoint: Writes what the node holds as a model directory; ``None`` if it holds nothing.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self,
        arguments: ServerArguments,
        start: Start,
        memory: Path,
        log: Path,
        write_checkpoint: Callable[[], Path | None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arguments = arguments
        self._start = start
        self._memory = memory
        self._log = log
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
        """Forget earlier deaths once the server has lived for a while, and keep its log within bounds."""
        bound_log(self._log)
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
        bound_log(self._log)
        # A server that ended may have had half of a version; its successor starts from what the node verified.
        checkpoint = self._write_checkpoint() if self._start_count > 1 else None
        self._port = self._arguments.port or pick_port()
        self._process = self._start(self._arguments.build(self._port, None if checkpoint is None else str(checkpoint)))
        remember(self._memory, self._process.pid, self._port, self._arguments)
        logger.info("vLLM starts from %s", checkpoint or self._arguments.model)

    def _note_death(self, text: str, now: float) -> None:
        reason = find_reason(self._log)
        said = f" ({reason})" if reason else ""
        logger.warning("vLLM %s%s: started again in %.0f s; see %s", text, said, self._pause_seconds, self._log)
        self.stop()
        self._retry_at = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, limits.RETRY_SECONDS_MAX)


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
        if update is None:
            return None
        try:
            with update:
                return _write_model(update, data_directory / "engine" / "checkpoint", model)
        except StorageError as error:
            logger.warning(
                "no checkpoint of version %s can be written (%s): vLLM starts from %s", update.version, error, model
            )
            return None
        finally:
            # Left unsaid, it would be an engine that was lost with the version in its hands.
            with suppress(UnavailableError):
                client.confirm(None, False, COPIED)


def _write_model(update: Update, directory: Path, model: str) -> Path | None:
    if update.kind is not UpdateKind.FULL:
        return None
    region = update.open_region()
    try:
        files = FilesEngine(directory, companions=model)
        try:
            apply_update(files, FullUpdate(update.version, update.root, update.table, region.bytes))
            return files.current.resolve()
        finally:
            files.close()
    finally:
        region.close()


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
    log = data_directory / LOG_NAME
    return SupervisedServer(
        arguments,
        start or partial(ServerProcess, python=python, log=log),
        data_directory / PROCESS_NAME,
        log,
        lambda: write_checkpoint(data_directory, arguments.model),
    )
