"""A vLLM server that the node starts, looks after and ends: ``--engine vllm --serve -- <vLLM arguments>``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final, Protocol

from pulsenet.errors import ConfigError, StorageError, UnavailableError
from pulsenet.serving.vllm.exchange import write_whole
from pulsenet.serving.vllm.plugin import BACKEND
from pulsenetd.logs import logger

STOP_SECONDS_MAX: Final = 20.0
"""After this long the server's processes are killed."""
KILL_SECONDS_MAX: Final = 10.0
"""A process that hangs in the kernel, in a driver of its GPU mostly, does not end even so: it is left."""
STOP_POLL_SECONDS: Final = 0.05
LOG_NAME: Final = "vllm.log"
PROCESS_NAME: Final = "vllm.json"
"""Which server this node started last."""
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
LOG_SIZE_BYTES_MAX: Final = 64 << 20
"""A server writes some lines for every request, and serves for months."""
LOG_TAIL_BYTES: Final = 65_536
REASON_CHARACTERS_MAX: Final = 300
_EXCEPTION: Final = r"(?:\w+\.)*\w*(?:Error|Exception): .*"
_REASON: Final = re.compile(rf"(?:^|[\s\]])({_EXCEPTION})$|\(({_EXCEPTION})\)$")
"""An exception's last line, behind what vLLM writes before each line of a worker; or in brackets, as Python says that a
module is missing."""
_FOLLOW_UP: Final = "root cause"
"""vLLM's server says of a worker that failed: see root cause above."""


class ServerArguments:
    """What the operator gave for vLLM, with what the node needs to know of it.

    Args:
        given: Arguments of ``vllm.entrypoints.openai.api_server``.

    Raises:
        ConfigError: They lack a model, or open the control routes to other machines.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self.given = tuple(given)
        model = _find_value(given, "--model")
        if not model:
            raise ConfigError("--serve needs vLLM's arguments after '--', with --model at least")
        self.model = model
        host = _find_value(given, "--host")
        if host is not None and host not in LOOPBACK:
            raise ConfigError(
                f"--host {host} would open vLLM's control routes, which have no password, to other machines: leave it "
                "out and put a proxy before /v1"
            )
        transfer = _find_value(given, "--weight-transfer-config")
        if transfer is not None:
            raise ConfigError("--weight-transfer-config is the node's to give: leave it out")
        port = _find_value(given, "--port")
        if port is not None and not port.isdecimal():
            raise ConfigError(f"--port {port} is no port")
        self.port = int(port) if port else None
        """``None``: the node picks a free one."""

    def build(self, port: int, model: str | None = None) -> list[str]:
        """Return the arguments for a server on this port, with another model directory if one is given."""
        rest = [*self.given, "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
        if self.port is None:
            rest += ["--port", str(port)]
        if _find_value(self.given, "--host") is None:
            rest += ["--host", "127.0.0.1"]
        if model is None:
            return rest
        replaced = _replace_value(rest, "--model", model)
        if _find_value(self.given, "--served-model-name") is None:
            replaced += ["--served-model-name", self.model]  # clients go on asking for the name they know
        return replaced


class Process(Protocol):
    """One life of a server."""

    @property
    def pid(self) -> int:
        """Process id of the server, and of its session."""

    def exit_code(self) -> int | None:
        """Return how it ended; ``None`` while it runs."""

    def stop(self) -> None:
        """End it and everything it started. Blocks."""

    def kill(self) -> None:
        """The same at once: for one that will not end by itself. One that cannot be killed is said and left."""


class ServerProcess:
    """One life of a server and of every process it starts.

    Args:
        arguments: For vLLM.
        python: Interpreter in whose environment vLLM and pulsenet are installed.
        log: Where its output goes, appended.

    Raises:
        StorageError: The log cannot be written.
        ConfigError: The interpreter cannot be started.
    """

    def __init__(self, arguments: Sequence[str], *, python: str, log: Path) -> None:
        # Through env(1), which adds to the environment as it is: the routes that pause and patch are development ones.
        command = ["env", "VLLM_SERVER_DEV_MODE=1", python, "-m", "vllm.entrypoints.openai.api_server", *arguments]
        try:
            output: IO[bytes] = log.open("ab")
        except OSError as error:
            raise StorageError(f"{log} cannot be written: {error.strerror}") from error
        with output:
            try:
                # A session of its own: its workers end with it, and Ctrl-C in our terminal does not reach it.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return how it ended; ``None`` while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End it and everything it started. Blocks."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS_MAX)
        # Also after an orderly end: a worker may have been left behind.
        self.kill()

    def kill(self) -> None:
        """The same at once."""
        self._signal(signal.SIGKILL)
        try:
            self._process.wait(KILL_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            _say_unkillable(self.pid)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class AdoptedProcess:
    """A server that an earlier life of the node started and left behind when it was killed."""

    def __init__(self, pid: int, begun: str) -> None:
        self.pid = pid
        self._begun = begun

    def exit_code(self) -> int | None:
        """Return 1 once it is gone: how it ended, only its parent would know."""
        return None if _read_begun(self.pid) == self._begun else 1

    def stop(self) -> None:
        """End it and everything it started. Blocks."""
        self._signal(signal.SIGTERM)
        give_up_at = time.monotonic() + STOP_SECONDS_MAX
        while self.exit_code() is None and time.monotonic() < give_up_at:
            time.sleep(STOP_POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        """The same at once."""
        self._signal(signal.SIGKILL)
        give_up_at = time.monotonic() + KILL_SECONDS_MAX
        while self.exit_code() is None:
            if time.monotonic() >= give_up_at:
                _say_unkillable(self.pid)
                return
            time.sleep(STOP_POLL_SECONDS)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _say_unkillable(pid: int) -> None:
    logger.error(
        "vLLM (process %d) was killed and does not end: it hangs in the kernel, and what it holds, memory of GPUs too, "
        "stays taken; see dmesg, and restart the machine if it stays",
        pid,
    )


def bound_log(log: Path, size_bytes_max: int = LOG_SIZE_BYTES_MAX) -> None:
    """Begin a log anew that has become long, and keep what was in it beside it: a server runs for months.

    The server goes on writing at the end, wherever that is, because it appends. Where the disk has no room for both, or
    takes nothing, only the newer is kept.
    """
    try:
        if not log.is_file() or log.stat().st_size <= size_bytes_max:
            return
        before = log.with_name(log.name + ".1")
        try:
            shutil.copyfile(log, before)
        except OSError:
            before.unlink(missing_ok=True)
        os.truncate(log, 0)
    except OSError as error:
        logger.debug("the log %s cannot be begun anew: %s", log, error)


def find_reason(log: Path) -> str:
    """Return the last error that a server wrote into its log, one printable line; empty if there is none."""
    try:
        with log.open("rb") as source:
            source.seek(max(0, source.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = source.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        found = _REASON.search(line)
        if found and _FOLLOW_UP not in line:
            return "".join(one if one.isprintable() else "?" for one in (found[1] or found[2])[:REASON_CHARACTERS_MAX])
    return ""


def remember(path: Path, pid: int, port: int, arguments: ServerArguments) -> None:
    """Write down which server this node started, for its next life.

    Raises:
        StorageError: The file cannot be written.
    """
    value = {"pid": pid, "begun": _read_begun(pid), "port": port, "arguments": list(arguments.given)}
    write_whole(path, json.dumps(value).encode())


def recall(path: Path, arguments: ServerArguments) -> tuple[AdoptedProcess, int] | None:
    """Return the server that an earlier life of this node left running, and its port.

    One that was started with other arguments is ended instead.
    """
    left = _read_memory(path)
    if left is None:
        return None
    process, port, given = left
    if given != arguments.given:
        process.stop()
        return None
    return process, port


def end_left(path: Path) -> None:
    """End the server that a node left running when it was killed. Blocks."""
    left = _read_memory(path)
    if left is not None:
        left[0].stop()


def _read_memory(path: Path) -> tuple[AdoptedProcess, int, tuple[str, ...]] | None:
    """Return the server that is remembered, its port and its arguments; ``None`` if it is gone."""
    try:
        match json.loads(path.read_bytes()):
            case {"pid": int(pid), "begun": str(begun), "port": int(port), "arguments": list(given)}:
                process = AdoptedProcess(pid, begun)
            case _:
                return None
    except (OSError, ValueError):
        return None
    return None if process.exit_code() is not None else (process, port, tuple(given))


def _read_begun(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks: what tells it from a later one of the same id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def pick_port() -> int:
    """Return a port of loopback that nobody listens on now.

    Raises:
        UnavailableError: The system gives none.
    """
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return int(listener.getsockname()[1])
    except OSError as error:
        raise UnavailableError(f"no port of this machine can be had: {error.strerror}") from error


def _find_value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the last value given for a flag, as ``--flag value`` or ``--flag=value``."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == flag:
            found = arguments[index + 1] if index + 1 < len(arguments) else ""
        elif argument.startswith(f"{flag}="):
            found = argument.removeprefix(f"{flag}=")
    return found


def _replace_value(arguments: Sequence[str], flag: str, value: str) -> list[str]:
    """Return the arguments with another value for a flag."""
    kept: list[str] = []
    skips = False
    for argument in arguments:
        if skips:
            skips = False
        elif argument == flag:
            skips = True
        elif not argument.startswith(f"{flag}="):
            kept.append(argument)
    return [*kept, flag, value]


Start = Callable[[Sequence[str]], Process]
