"""Real ``pulsenet`` processes on loopback: started, asked, felled and cleaned up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from free_ports import find_free_port

COMMAND: Final = shutil.which("pulsenet", path=str(Path(sys.executable).parent)) or "pulsenet"
START_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 45.0
POLL_SECONDS: Final = 0.05
LOG_TAIL_LINES: Final = 40

Value = TypeVar("Value")

open_swarms: list[Swarm] = []
"""Swarms whose logs are shown when a test fails."""


def wait_until(what: str, read: Callable[[], Value | None], seconds: float = SETTLE_SECONDS) -> Value:
    """Return the first thing ``read`` returns that is neither ``None`` nor false; fail when the time is up."""
    give_up_at = time.monotonic() + seconds
    while True:
        value = read()
        if value is not None and value is not False:
            return value
        if time.monotonic() > give_up_at:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(POLL_SECONDS)


def make_environment(home: Path) -> dict[str, str]:
    """Return this process's environment, without its own settings of pulsenet, for nodes that live in ``home``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PULSENET_")}
    return {**kept, "XDG_DATA_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def run_command(
    *arguments: str, home: Path, environment: Mapping[str, str] | None = None, seconds: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        [COMMAND, *arguments],
        env={**make_environment(home), **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def run_json(*arguments: str, home: Path) -> Any:
    """Run a command that must succeed, and return the JSON it prints."""
    done = run_command(*arguments, "--json", home=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Node:
    """One ``pulsenet join``, which may be killed and started again."""

    def __init__(self, swarm: Swarm, name: str, role: str, home: Path, options: Sequence[str], data_dir: Path) -> None:
        self.name = name
        self.role = role
        self.data_dir = data_dir
        self._swarm = swarm
        self._home = home
        self._options = tuple(options)
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = swarm.directory / f"{name}.log"

    # Life

    def start(self) -> Node:
        """Start the process; it gets a process group of its own, like a command in a terminal."""
        command = [COMMAND, "join", "--role", self.role, "--data-dir", str(self.data_dir), *self._options]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=make_environment(self._home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def wait_ready(self, seconds: float = START_SECONDS) -> Node:
        """Wait until this very process answers for its status."""
        self.wait_status("the node answers", lambda status: status["pid"] == self.pid, seconds)
        return self

    @property
    def pid(self) -> int:
        """Process id of the running node."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill -9, and take the body away."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def send_signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the node, or to its whole process group as a terminal does."""
        if group:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def wait_exit(self, seconds: float) -> int:
        """Return the exit code; fail if the process outlives the time."""
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds:.0f} s") from None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Ask the node to leave; return its exit code and the seconds it took."""
        started = time.monotonic()
        self.send_signal(number)
        return self.wait_exit(20), time.monotonic() - started

    def clean_up(self) -> None:
        """Kill whatever is left of the node."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        for pid in self.find_p2pd():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # Looking at it

    @property
    def log(self) -> str:
        """Everything the node printed since its first start."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def metrics_url(self) -> str:
        """Where the node says its endpoint is."""
        url = json.loads((self.data_dir / "node.json").read_text())["metrics_url"]
        assert isinstance(url, str)
        return url

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of the node's HTTP endpoint."""
        try:
            with urllib.request.urlopen(self.metrics_url + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def read_status(self) -> dict[str, Any] | None:
        """Return the node's status, or ``None`` while nobody answers."""
        try:
            code, body = self.get("/status")
        except (OSError, ValueError):
            return None
        return dict(json.loads(body)) if code == 200 else None

    @property
    def status(self) -> dict[str, Any]:
        """The node's status."""
        status = self.read_status()
        assert status is not None, f"{self.name} does not answer"
        return status

    def wait_status(
        self, what: str, holds: Callable[[dict[str, Any]], object], seconds: float = SETTLE_SECONDS
    ) -> dict[str, Any]:
        """Return the first status for which ``holds``; fail at once if the process ends."""

        def read() -> dict[str, Any] | None:
            assert self.is_running, f"{self.name} ended while waiting: {what}"
            status = self.read_status()
            return status if status is not None and holds(status) else None

        return wait_until(f"{self.name}: {what}", read, seconds)

    def wait_log(self, text: str, seconds: float = START_SECONDS) -> str:
        """Wait until the node has printed this; return everything it printed."""

        def read() -> str | None:
            assert self.is_running, f"{self.name} ended before it said {text!r}"
            return self.log if text in self.log else None

        return wait_until(f"{self.name} says {text!r}", read, seconds)

    def wait_applied(self, number: int, seconds: float = SETTLE_SECONDS) -> dict[str, Any]:
        """Wait until the node reports this version as applied."""
        return self.wait_status(
            f"version {number} is applied", lambda status: status["applied_version"] == number, seconds
        )

    def read_root(self, number: int) -> str:
        """Return the root the node reports for a version."""
        roots = [facts["root"] for facts in self.status["versions"] if facts["version"] == number]
        assert roots, f"{self.name} reports nothing of version {number}"
        return str(roots[0])

    def find_p2pd(self) -> list[int]:
        """Return the process ids of every p2pd that works for this directory."""
        marker = str(self.data_dir / "p2pd").encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                # A zombie has no command line; a node names its directory without the socket's.
                if marker in command and b"p2pd" in command.split(b"\0")[0]:
                    found.append(int(entry.name))
        return found

    def find_sockets(self) -> list[Path]:
        """Return the socket files in the node's directory."""
        return [path for path in self.data_dir.rglob("*") if path.is_socket()]


class Swarm:
    """Nodes that are cleaned up together. Each home is a machine's ``$XDG_DATA_HOME``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes: dict[str, Node] = {}

    def home(self, name: str = "home") -> Path:
        """Return the data home of one pretended machine."""
        path = self.directory / name
        path.mkdir(exist_ok=True)
        return path

    def add(self, name: str, role: str, *options: str, run: str = "local", home: str = "home") -> Node:
        """Describe a node; it does not run yet."""
        data_dir = self.home(home) / "pulsenet" / run / name
        assert len(os.fsencode(data_dir)) < 75, f"{data_dir} is too deep for p2pd's sockets"
        node = Node(self, f"{run}-{name}", role, self.home(home), options, data_dir)
        self.nodes[node.name] = node
        return node

    def clean_up(self) -> None:
        """Kill every process that is left."""
        for node in self.nodes.values():
            node.clean_up()

    def describe(self) -> Iterator[tuple[str, str]]:
        """Return the end of every log and the status of what runs, for a failed test."""
        for name, node in self.nodes.items():
            yield f"log of {name}", "\n".join(node.log.splitlines()[-LOG_TAIL_LINES:])
            status = node.read_status() if node.is_running else None
            if status is not None:
                shown = {key: value for key, value in status.items() if key != "versions"}
                yield f"status of {name}", json.dumps(shown, indent=1)


@contextmanager
def open_swarm(parent: Path = Path("/tmp")) -> Iterator[Swarm]:
    """Lend a swarm and leave nothing of it behind; everything is kept below ``parent``."""
    # Not below pytest's directory: socket paths are short.
    directory = Path(tempfile.mkdtemp(prefix="pulse-", dir=parent))
    swarm = Swarm(directory)
    open_swarms.append(swarm)
    try:
        yield swarm
    finally:
        open_swarms.remove(swarm)
        swarm.clean_up()
        shutil.rmtree(directory, ignore_errors=True)


class Gate:
    """TCP relays in front of nodes that can be told to hold back all traffic after so many bytes."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._budget_size_bytes = -1
        self._budget_lock = threading.Lock()
        self._is_closed = False
        self._sockets: list[socket.socket] = []

    def relay(self) -> tuple[str, str]:
        """Open a relay; return the options that place a node behind it."""
        target_port = find_free_port()
        listener = socket.create_server(("127.0.0.1", 0))
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener, target_port), daemon=True).start()
        front_port = listener.getsockname()[1]
        return f"--listen=/ip4/127.0.0.1/tcp/{target_port}", f"--announce=/ip4/127.0.0.1/tcp/{front_port}"

    def hold_after(self, size_bytes: int) -> None:
        """Let so many bytes through, then none until :meth:`release`."""
        with self._budget_lock:
            self._budget_size_bytes = size_bytes

    @property
    def is_holding(self) -> bool:
        """Whether traffic is being held back."""
        return not self._is_open.is_set()

    def release(self) -> None:
        """Let everything through again."""
        with self._budget_lock:
            self._budget_size_bytes = -1
            self._is_open.set()

    def close(self) -> None:
        """End every connection."""
        self._is_closed = True
        self.release()
        for one in self._sockets:
            _shut(one)
            one.close()

    def _accept(self, listener: socket.socket, target_port: int) -> None:
        while not self._is_closed:
            try:
                front, _ = listener.accept()
            except OSError:
                return
            try:
                behind = socket.create_connection(("127.0.0.1", target_port))
            except OSError:
                front.close()
                continue
            self._sockets += (front, behind)
            for source, sink in ((front, behind), (behind, front)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self._pass(len(data))
                sink.sendall(data)
        _shut(source)
        _shut(sink)

    def _pass(self, size_bytes: int) -> None:
        with self._budget_lock:
            if self._budget_size_bytes >= 0:
                self._budget_size_bytes = max(0, self._budget_size_bytes - size_bytes)
                if self._budget_size_bytes == 0:
                    self._is_open.clear()
        self._is_open.wait()


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
