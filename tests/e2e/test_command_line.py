"""The installed command as a person meets it: help, mistakes, pipes, and a line that says what to do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from swarm import COMMAND, Swarm, make_environment, run_command

from pulsenetd.identity import load_or_create, to_libp2p_text

pytestmark = pytest.mark.e2e

SCREEN_COLUMNS = 100
PEER = "12D3KooWELH8s3aTF93abUfQZ7LbLzCayr9Qjv9A5P5AugqPN2cn"


def run_at(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, home=home, environment={"COLUMNS": str(SCREEN_COLUMNS)})


def check_refusal(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line on standard error with cause and next step, nothing on standard output that looks like success."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("pulsenet: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["examples:", "pulsenet join --role trainer", "PULSENET_"]),
        (["join", "--help"], ["examples:", "PULSENET_", "(default 127.0.0.1)", "20 % of what is free"]),
        (["run", "--help"], ["create", "admit", "revoke", "promote"]),
        (["run", "create", "--help"], ["--authority"]),
        (["status", "--help"], ["--json"]),
        (["patch", "make", "--help"], ["--output"]),
        (["config", "show", "--help"], ["--origin"]),
        (["verify", "--help"], ["--root"]),
        (["keygen", "--help"], ["0600"]),
        (["demo", "--help"], ["--inferencers"]),
        (["--version"], ["pulsenet 0."]),
    ],
)
def test_help_goes_to_standard_output(tmp_path: Path, arguments: Sequence[str], words: Sequence[str]) -> None:
    """A-CLI-1."""
    done = run_at(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    for word in words:
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND"]),
        (["--nonsense"], ["--help"]),
        (["join", "--nonsense"], ["--nonsense"]),
        (["join", "--rol", "trainer"], ["--rol"]),
        (["join", "--role", "foo"], ["--role", "'foo'", "trainer, inferencer, seed"]),
        (["join", "--bootstrap"], ["--bootstrap"]),
        (["join", "--bootstrap", "1.2.3.4:55"], ["--bootstrap", "1.2.3.4:55", "/ip4/"]),
        (["join", "--metrics-port", "70000"], ["--metrics-port", "70000", "65535"]),
        (["join", "--listen", "/ip4/1.2.3.4/tcp/70000"], ["--listen", "70000"]),
        (["join", "--announce", "/ip4/1.2.3.4/tcp/0"], ["--announce", "port 0"]),
        (["join", "--start-timeout-seconds", "soon"], ["--start-timeout-seconds", "soon"]),
        (["join", "--store-limit-bytes", "much"], ["--store-limit-bytes", "20G"]),
        (["join", "--token", "pulse1abc"], ["--token"]),
        (["join", "--run", "../etc"], ["--run", "'../etc'"]),
        (["run", "create", "mine"], ["--authority", "keygen"]),
        (["run", "create", "mine", "--authority", "zz"], ["'zz'"]),
        (["keygen", "/dev/null"], ["/dev/null", "never overwritten"]),
        (["verify", "x", "--root", "12"], ["--root", "64"]),
    ],
)
def test_a_bad_value_is_refused_before_anything_happens(
    tmp_path: Path, arguments: Sequence[str], words: Sequence[str]
) -> None:
    """A-CLI-1, A-CLI-2, A-NET-4."""
    check_refusal(run_at(tmp_path, *arguments), 2, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["join", "--run", "nosuch", "--role", "inferencer"], 78, ["nosuch", "pulsenet run create"]),
        (["join", "--config", "/nonexistent.toml"], 78, ["/nonexistent.toml", "--config"]),
        (["join", "--run-file", "/nonexistent.json"], 78, ["/nonexistent.json"]),
        (["run", "show", "nosuch"], 78, ["nosuch", "pulsenet run create"]),
        (["status", "--data-dir", "/nonexistent"], 1, ["/nonexistent", "pulsenet join"]),
        (["join", "--data-dir", "/dev/null/node"], 6, ["/dev/null/node"]),
        (["keygen", "/dev/null/key"], 6, ["/dev/null"]),
        (["verify", "/nonexistent"], 2, ["/nonexistent"]),
        (["patch", "show", "/nonexistent"], 2, ["/nonexistent"]),
    ],
)
def test_what_is_missing_is_named_with_the_next_step(
    tmp_path: Path, arguments: Sequence[str], code: int, words: Sequence[str]
) -> None:
    """A-CLI-5."""
    check_refusal(run_at(tmp_path, *arguments), code, *words)


def test_a_run_is_created_on_a_machine_that_has_none(tmp_path: Path) -> None:
    key = run_at(tmp_path, "keygen", str(tmp_path / "keys" / "trainer.key"))
    assert key.returncode == 0, key.stderr
    created = run_at(tmp_path, "run", "create", "mine", "--authority", key.stdout.strip())
    assert (created.returncode, created.stderr) == (0, "")
    assert "join token: pulse1" in created.stdout
    assert (tmp_path / "pulsenet" / "mine").stat().st_mode & 0o077 == 0
    shown = run_at(tmp_path, "run", "show", "mine")
    assert key.stdout.strip() in shown.stdout
    check_refusal(run_at(tmp_path, "run", "create", "mine", "--authority", key.stdout.strip()), 78, "mine", "exists")


def test_a_token_without_an_address_is_refused_before_any_network_use(tmp_path: Path) -> None:
    """A-CLI-2: nothing says where the run is."""
    key = run_at(tmp_path, "keygen", str(tmp_path / "trainer.key")).stdout.strip()
    created = run_at(tmp_path, "run", "create", "mine", "--authority", key, "--json")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for role in ("inferencer", "seed"):
        done = run_at(elsewhere, "join", "--role", role, "--token", json.loads(created.stdout)["token"])
        check_refusal(done, 2, "--bootstrap", "no address", "--wait")
        assert "listening" not in done.stdout


def test_a_traceback_is_shown_only_with_debug(tmp_path: Path) -> None:
    """A-CLI-5."""
    assert "Traceback" not in run_at(tmp_path, "run", "show", "nosuch").stderr
    for arguments in (["--debug", "run", "show", "nosuch"], ["run", "show", "nosuch", "--debug"]):
        assert "ConfigError" in run_at(tmp_path, *arguments).stderr


def test_a_directory_that_cannot_be_written_is_refused_before_joining(tmp_path: Path) -> None:
    """A-DSK-4. Root ignores permission bits, so the directory is on a read-only mount of its own."""
    directory = tmp_path / "node"
    directory.mkdir()
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$2" join --data-dir "$1"'
    wrapper = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", script]
    probe = subprocess.run([*wrapper[:-3], "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no mount namespace here: {probe.stderr.decode().strip()}")
    done = subprocess.run(
        [*wrapper, "sh", str(directory), COMMAND],
        env=make_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    check_refusal(done, 6, str(directory), "ead-only")
    assert list(directory.iterdir()) == []


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    """A-NET-2."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_at(tmp_path, "join", "--listen", f"/ip4/127.0.0.1/tcp/{port}")
        check_refusal(done, 4, str(port), "--listen")
        assert "listening" not in done.stdout


def test_a_metrics_port_in_use_is_named(tmp_path: Path) -> None:
    """A-OBS-5."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_refusal(run_at(tmp_path, "join", "--metrics-port", str(port)), 4, str(port), "--metrics-port")


def test_a_p2pd_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    """A-PROC-6."""
    started = time.monotonic()
    check_refusal(run_at(tmp_path, "join", "--p2pd", "/nonexistent/p2pd"), 7, "/nonexistent/p2pd")
    assert time.monotonic() - started < 15


def test_a_reader_that_leaves_early_breaks_nothing(tmp_path: Path) -> None:
    """A-CLI-4."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", '"$0" config show --json | head -1; "$0" status --json | head -1', COMMAND],
        env=make_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["{", "{"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_node_that_still_waits_for_its_run_leaves_at_once(swarm: Swarm, number: signal.Signals, code: int) -> None:
    """A-CLI-4: nothing was started yet, so a shell's own reading of the signal is enough."""
    node = swarm.add(f"early-{number}", "inferencer").start()
    node.wait_log("waiting for")
    found, seconds = node.stop(number)
    assert found == code
    assert seconds <= 4  # tests beside this one take the processor too
    assert "Traceback" not in node.log


def test_without_a_directory_the_first_free_one_is_taken(tmp_path: Path) -> None:
    """A-PROC-4."""
    environment = make_environment(tmp_path)
    waiting: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            process = subprocess.Popen(
                [COMMAND, "join", "--role", "inferencer"], env=environment, stdout=subprocess.PIPE, text=True
            )
            waiting.append(process)
            assert process.stdout is not None
            assert "waiting for" in process.stdout.readline()
        run = tmp_path / "pulsenet" / "local"
        keys = [load_or_create(run / name / "identity.key").peer_id for name in ("inferencer", "inferencer-2")]
        assert len({to_libp2p_text(key) for key in keys}) == 2
    finally:
        for process in waiting:
            process.terminate()
            process.communicate(timeout=10)
