"""A document typed into a shell, line by line, as its reader would: an empty home, and a terminal for each node."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from free_ports import find_free_port
from swarm import wait_until

READY: Final = re.compile(r"^(metrics |waiting for )", re.MULTILINE)
"""What a node says once the reader of a document may go on."""
SECONDS_MAX: Final = 120.0

PARSED_ONLY: Final = (
    (r"^python3 -m venv|^\. |^source |^pip install|^cd ", "installing: the environment of the tests has it"),
    (r"--engine vllm|--engine-python", "needs a vLLM"),
    (r"--watch\b", "goes on for ever; tests/shell/commands/test_status_watch.py"),
    (r"^pulsenet demo", "minutes; tests/e2e/test_demo.py"),
)
"""Lines that are not run here, and why. All are parsed by tests/test_documents.py."""


@dataclass(frozen=True, slots=True)
class Step:
    """A line for the shell, or a file to save."""

    line: str = ""
    file: str = ""
    content: str = ""


def read_steps(document: Path) -> list[Step]:
    """Return what a reader does: lines of ``sh`` blocks, and files named by a comment before a block."""
    found: list[Step] = []
    pattern = r"(?:<!-- file: (?P<file>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```"
    for block in re.finditer(pattern, document.read_text(), re.MULTILINE | re.DOTALL):
        if block["file"]:
            found.append(Step(file=block["file"], content=block["text"]))
        elif block["language"] == "sh":
            lines = block["text"].replace("\\\n", "").splitlines()
            found += [Step(line=line.strip()) for line in lines if line.strip()]
    return found


def why_not_run(line: str) -> str:
    """Return why a line is parsed only; empty if it is run."""
    return next((reason for pattern, reason in PARSED_ONLY if re.search(pattern, line)), "")


@dataclass
class Reader:
    """Somebody who types. Ports and names that stand for the reader's own are filled in."""

    home: Path
    printed: dict[str, str] = field(default_factory=dict)
    """What each line printed."""
    codes: dict[str, int] = field(default_factory=dict)
    key: str = ""
    token: str = ""
    _ports: dict[str, int] = field(default_factory=dict)
    _nodes: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """A fresh login: nothing of this process but where programs are."""
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        kept = {name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "LANG")}
        return {**kept, "PATH": path, "HOME": str(self.home), "PYTHONUNBUFFERED": "1"}

    @property
    def directory(self) -> Path:
        """Where the reader types."""
        path = self.home / "work"
        path.mkdir(exist_ok=True)
        return path

    def follow(self, document: Path) -> None:
        """Do everything a document says."""
        for step in read_steps(document):
            if step.file:
                (self.directory / step.file).write_text(step.content)
            elif not why_not_run(step.line):
                self.type(step.line)

    def type(self, line: str) -> str:
        """Type a line; return what it printed. A node goes on in the background."""
        filled = self._fill(line)
        if filled.startswith("pulsenet join"):
            return self._start(filled)
        if filled.startswith(("python ", "curl ")):
            self._settle()
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", filled],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        # 1 says that something of this machine fails, such as its memory.
        allowed = (0, 1) if filled.startswith("pulsenet doctor") else (0,)
        assert done.returncode in allowed, f"{filled}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, f"{filled}\n{done.stderr}"
        self.printed[line], self.codes[line] = done.stdout, done.returncode
        if filled.startswith("pulsenet keygen"):
            self.key = done.stdout.strip()
        self._note_token(done.stdout)
        if filled.startswith("python "):
            self._settle()
        return done.stdout

    def _start(self, command: str) -> str:
        log = self.home / f"terminal-{len(self._nodes)}.log"
        with log.open("wb") as output:
            node = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._nodes.append((node, log))

        def read() -> str | None:
            text = log.read_text(errors="replace")
            assert node.poll() is None, f"{command}\n{text}"
            return text if READY.search(text) else None

        said = wait_until(f"'{command}' is up", read, SECONDS_MAX)
        self._note_token(said)
        return said

    def _note_token(self, text: str) -> None:
        found = re.findall(r"\bpulse1[0-9a-zA-Z]{20,}", text)
        self.token = found[-1] if found else self.token

    def _fill(self, line: str) -> str:
        """Put this reader's keys, tokens and ports in the place of those of the document."""
        if "12D3KooW..." in line:
            assert self.key, f"no key was made before: {line}"
        if re.search(r"pulse1\.\.\.|\bTOKEN\b", line):
            assert self.token, f"no token was printed before: {line}"
        filled = line.replace("12D3KooW...", self.key).replace("pulse1...", self.token)
        filled = re.sub(r"\bTOKEN\b", self.token, filled)
        for port in re.findall(r"\b(4001|9471)\b", filled):
            filled = filled.replace(port, str(self._ports.setdefault(port, find_free_port())))
        return filled

    def _settle(self) -> None:
        """Wait until every inferencer has what the trainer published: a person is slower than that."""

        def lags() -> bool:
            nodes = [node for path in self.home.rglob("node.json") if (node := self._ask(path.parent))]
            newest = max((node.get("latest_seen_version") or 0 for node in nodes), default=0)
            return all((node.get("applied_version") or 0) >= newest for node in nodes if node["role"] == "inferencer")

        wait_until("everybody is current", lags, SECONDS_MAX)

    def _ask(self, directory: Path) -> dict[str, object]:
        with suppress(OSError, ValueError, KeyError):
            url = json.loads((directory / "node.json").read_text())["metrics_url"]
            with urllib.request.urlopen(f"{url}/status", timeout=5) as answer:
                return dict(json.loads(answer.read()))
        return {}

    def close(self) -> None:
        """End every node; each takes its p2pd along."""
        for node, _ in self._nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
        for node, _ in self._nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(15)
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait(10)

    def describe(self) -> Iterator[tuple[str, str]]:
        """Return what every terminal shows."""
        for node, log in self._nodes:
            yield f"{log.name} ({node.args!r})", "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def open_home() -> Path:
    """Make an empty home; not below pytest's directory, because socket paths are short."""
    return Path(tempfile.mkdtemp(prefix="pn-", dir="/tmp"))


def remove_home(home: Path) -> None:
    """Take it away."""
    shutil.rmtree(home, ignore_errors=True)
