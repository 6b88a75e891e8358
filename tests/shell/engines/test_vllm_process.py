"""A server's arguments, and its processes from start to end."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from pulsenet.errors import ConfigError, StorageError, UnavailableError
from pulsenetd.engines import vllm_process
from pulsenetd.engines.vllm_process import (
    ServerArguments,
    ServerProcess,
    bound_log,
    find_reason,
    pick_port,
    recall,
    remember,
)


def test_the_node_adds_what_the_adapter_needs_and_leaves_the_rest() -> None:
    built = ServerArguments(["--model", "/base", "--dtype", "bfloat16"]).build(8123)
    assert built == [
        *("--model", "/base", "--dtype", "bfloat16"),
        *("--weight-transfer-config", '{"backend": "pulsenet"}'),
        *("--port", "8123", "--host", "127.0.0.1"),
    ]
    given = ServerArguments(["--model=/base", "--port=9", "--host", "localhost"])
    assert given.port == 9
    assert given.build(9) == [
        *("--model=/base", "--port=9", "--host", "localhost"),
        *("--weight-transfer-config", '{"backend": "pulsenet"}'),
    ]


def test_a_server_of_another_directory_keeps_the_name_clients_know() -> None:
    built = ServerArguments(["--model=/base", "--port", "9"]).build(9, "/written")
    assert "--model=/base" not in built
    assert built[-4:] == ["--model", "/written", "--served-model-name", "/base"]
    named = ServerArguments(["--model", "/base", "--port", "9", "--served-model-name", "mine"]).build(9, "/written")
    assert named.count("--served-model-name") == 1
    assert named[-2:] == ["--model", "/written"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "--model at least"),
        (["--model"], "--model at least"),
        (["--model", "/base", "--host", "10.0.0.1"], "no password"),
        (["--model", "/base", "--host=::"], "no password"),
        (["--model", "/base", "--port", "http"], "is no port"),
        (["--model", "/base", "--weight-transfer-config", "{}"], "the node's to give"),
    ],
)
def test_arguments_that_cannot_work_are_refused(given: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServerArguments(given)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("INFO started\n", ""),
        ("Traceback (most recent call last):\ntorch.OutOfMemoryError: no room\n", "torch.OutOfMemoryError: no room"),
        ("ValueError: first\nINFO on it goes\nKeyError: 'last'\nINFO ended\n", "KeyError: 'last'"),
        ("OSError: old\n" + "INFO x\n" * vllm_process.LOG_TAIL_BYTES, ""),
        ("ValueError: " + "x" * 1000, "ValueError: " + "x" * 288),
        ("ValueError: no place (of 2)\n", "ValueError: no place (of 2)"),
        (
            "python3: Error while finding module 'vllm.x' (ModuleNotFoundError: No module named 'vllm')\n",
            "ModuleNotFoundError: No module named 'vllm'",
        ),
    ],
)
def test_the_last_error_of_a_log_is_found_at_its_end(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "log").write_text(text)
    assert find_reason(tmp_path / "log") == reason
    assert find_reason(tmp_path / "none") == ""


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """Return an interpreter that stands for vLLM: it says its environment and starts a worker that ignores SIGTERM."""
    script = tmp_path / "python"
    script.write_text(
        f"""#!{sys.executable}
import os, signal, subprocess, sys, time
print("dev", os.environ["VLLM_SERVER_DEV_MODE"], *sys.argv[1:], flush=True)
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
worker = subprocess.Popen([sys.executable, "-c", code])
print("worker", worker.pid, flush=True)
time.sleep(60)
"""
    )
    script.chmod(0o755)
    return str(script)


def read_worker(log: Path) -> int:
    give_up_at = time.monotonic() + 60
    while "worker" not in (text := log.read_text()):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    return int(text.split("worker ")[1].split()[0])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("extra", [[], ["--stubborn"]])
def test_a_server_is_ended_with_everything_it_started(
    extra: list[str], fake_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "STOP_SECONDS_MAX", 0.5)
    log = tmp_path / "vllm.log"
    process = ServerProcess(["--model", "/base", *extra], python=fake_python, log=log)
    worker = read_worker(log)
    assert process.exit_code() is None
    assert is_running(process.pid)
    process.stop()
    give_up_at = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert not is_running(worker)
    assert process.exit_code() is not None
    process.stop()
    assert log.read_text().startswith("dev 1 -m vllm.entrypoints.openai.api_server --model /base")


def test_a_server_that_will_not_end_by_itself_is_killed_with_all_it_started(fake_python: str, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    process = ServerProcess(["--stubborn"], python=fake_python, log=log)
    worker = read_worker(log)
    arguments = ServerArguments(["--model", "/base"])
    remember(tmp_path / "vllm.json", process.pid, 8123, arguments)
    found = recall(tmp_path / "vllm.json", arguments)
    assert found is not None
    process.kill()
    assert process.exit_code() == -signal.SIGKILL
    found[0].kill()
    give_up_at = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert not is_running(worker)


def test_a_server_that_cannot_be_killed_is_said_and_left(
    fake_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that hangs in the kernel; here no signal reaches it."""
    process = ServerProcess([], python=fake_python, log=tmp_path / "log")
    read_worker(tmp_path / "log")
    remember(tmp_path / "vllm.json", process.pid, 8123, ServerArguments(["--model", "/base"]))
    found = recall(tmp_path / "vllm.json", ServerArguments(["--model", "/base"]))
    assert found is not None
    with monkeypatch.context() as unheard:
        unheard.setattr(vllm_process, "KILL_SECONDS_MAX", 0.1)
        unheard.setattr(vllm_process, "STOP_SECONDS_MAX", 0.1)
        unheard.setattr(os, "killpg", lambda pid, number: None)
        for left in (process, found[0]):
            caplog.clear()
            left.stop()
            assert f"vLLM (process {process.pid}) was killed and does not end" in caplog.text
            assert left.exit_code() is None
    process.kill()
    assert process.exit_code() == -signal.SIGKILL


def test_a_server_that_ends_says_how(fake_python: str, tmp_path: Path) -> None:
    process = ServerProcess([], python=fake_python, log=tmp_path / "log")
    read_worker(tmp_path / "log")
    os.kill(process.pid, signal.SIGKILL)
    while process.exit_code() is None:
        time.sleep(0.01)
    assert process.exit_code() == -signal.SIGKILL
    process.stop()


def test_a_server_of_an_earlier_life_is_recalled_and_can_be_ended(fake_python: str, tmp_path: Path) -> None:
    arguments = ServerArguments(["--model", "/base"])
    process = ServerProcess(["--model", "/base"], python=fake_python, log=tmp_path / "log")
    read_worker(tmp_path / "log")
    remember(tmp_path / "vllm.json", process.pid, 8123, arguments)
    found = recall(tmp_path / "vllm.json", arguments)
    assert found is not None
    adopted, port = found
    assert (adopted.pid, port, adopted.exit_code()) == (process.pid, 8123, None)
    assert recall(tmp_path / "vllm.json", ServerArguments(["--model", "/other"])) is None
    assert adopted.exit_code() == 1
    assert process.exit_code() is not None
    assert recall(tmp_path / "vllm.json", arguments) is None
    process.stop()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "1", "begun": "1", "port": 1, "arguments": []}'])
def test_a_damaged_memory_of_a_server_is_none(text: str, tmp_path: Path) -> None:
    arguments = ServerArguments(["--model", "/base"])
    assert recall(tmp_path / "none", arguments) is None
    (tmp_path / "vllm.json").write_text(text)
    assert recall(tmp_path / "vllm.json", arguments) is None
    # The process id belongs to somebody else by now: this very process.
    value = {"pid": os.getpid(), "begun": "1", "port": 1, "arguments": ["--model", "/base"]}
    (tmp_path / "vllm.json").write_text(json.dumps(value))
    assert recall(tmp_path / "vllm.json", arguments) is None
    with pytest.raises(StorageError, match="cannot be written"):
        remember(tmp_path / "none" / "vllm.json", os.getpid(), 1, arguments)


def test_what_cannot_be_started_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        ServerProcess([], python=sys.executable, log=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be started"):
        ServerProcess([], python=sys.executable, log=tmp_path / "log")


def test_a_log_that_grew_long_is_begun_anew_under_the_server_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, before = tmp_path / "vllm.log", tmp_path / "vllm.log.1"
    bound_log(log, 50)
    with log.open("ab", buffering=0) as server:
        server.write(b"a" * 50)
        bound_log(log, 50)
        assert (log.stat().st_size, before.exists()) == (50, False)
        server.write(b"a")
        bound_log(log, 50)
        server.write(b"go on")
        assert (log.read_bytes(), before.read_bytes()) == (b"go on", b"a" * 51)

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(shutil, "copyfile", refuse)
        server.write(b"b" * 50)
        bound_log(log, 50)
    assert (log.read_bytes(), before.exists()) == (b"", False), "a full disk is no reason to let it grow"


def test_a_free_port_is_picked() -> None:
    assert 1024 <= pick_port() <= 65_535


def test_a_machine_without_a_free_descriptor_gives_no_port_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the node: what ends is tried again later."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(vllm_process.socket, "socket", refuse)
    with pytest.raises(UnavailableError, match="Too many open files"):
        pick_port()
