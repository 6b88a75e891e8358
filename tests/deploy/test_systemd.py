"""The unit is accepted by systemd's own tools, starts a command that parses, and ends as the node's exit codes mean."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from exported import ROOT

from pulsenetd import keeper
from pulsenetd.cli import build_parser
from pulsenetd.errors import EXIT_CODES

SYSTEMD = ROOT / "deploy" / "systemd"
UNIT = (SYSTEMD / "pulsenet@.service").read_text()

EXPOSURE_MAX = 20
"""Tenths of systemd's measure, from 0 (closed) to 100; a unit without any hardening has 96."""


def read_setting(name: str) -> str:
    """Return the value of a line of the unit."""
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit with a program that exists where the tests run; everything else is as it is installed."""
    path = tmp_path / "pulsenet@test.service"
    path.write_text(UNIT.replace("/opt/pulsenet/bin/pulsenet", shutil.which("true") or "/bin/true"))
    return path


def test_the_unit_is_accepted_by_systemd(installed: Path) -> None:
    done = run("systemd-analyze", "verify", str(installed))
    complaints = [line for line in done.stderr.splitlines() if "pulsenet@test" in line]
    assert not complaints, "\n".join(complaints)


def test_the_unit_is_closed_to_what_a_node_does_not_need(installed: Path) -> None:
    done = run("systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE_MAX}", str(installed))
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd measures no files")
    assert done.returncode == 0, done.stdout[-400:] + done.stderr


def test_the_user_is_made_by_systemd() -> None:
    path = SYSTEMD / "pulsenet.sysusers.conf"
    done = run("systemd-sysusers", "--dry-run", str(path))
    assert done.returncode == 0, done.stderr
    assert f"u {read_setting('User')} " in path.read_text()


def test_the_command_parses() -> None:
    program, *arguments = read_setting("ExecStart").split()
    assert program.endswith("/pulsenet")
    build_parser().parse_args(arguments)


def test_nothing_is_started_again_that_a_restart_does_not_cure() -> None:
    """The unit and --supervise agree on every exit code."""
    prevented = {int(code) for code in read_setting("RestartPreventExitStatus").split()}
    assert {2, 78} <= prevented, "command line and configuration"
    codes = {code for _, code in EXIT_CODES}
    assert prevented == codes - keeper.PASSING_CODES
    assert read_setting("Restart") == "on-failure"


def test_a_node_that_was_stopped_did_not_fail() -> None:
    assert set(read_setting("SuccessExitStatus").split()) == {"130", "143"}


def test_the_node_is_asked_for_signs_of_life() -> None:
    assert read_setting("Type") == "notify"
    assert read_setting("WatchdogSec") == "10min"
    assert "MemoryDenyWriteExecute" not in re.sub(r"^#.*$", "", UNIT, flags=re.MULTILINE), "numba compiles"
