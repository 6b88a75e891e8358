"""Every command explains itself, and every failure is one line and its documented exit code."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulsenet.errors import ConfigError, IntegrityError, PulsenetError, StorageError, UnavailableError, UsageError
from pulsenetd import cli
from pulsenetd.commands import demo, verify
from pulsenetd.errors import AddressInUseError, DirectoryLockedError, NoBootstrapError, P2pdError


def list_commands(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return the words of every command and of every group of commands."""
    yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from list_commands(child, (*words, name))


COMMANDS = list(list_commands(cli.build_parser()))


def test_the_commands_are_those_that_are_documented() -> None:
    documented = {"join", "demo", "keygen", "verify", "status", "run create", "run admit", "run revoke", "run promote"}
    documented |= {"run show", "run countersign", "patch make", "patch apply", "patch show", "config show"}
    assert documented <= {" ".join(words) for words in COMMANDS}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_printed_and_is_no_failure(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: {' '.join(('pulsenet', *words))}")
    assert printed.err == ""


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("pulsenet ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND", "pulsenet --help"]),
        (["surprise"], ["'surprise'", "'join'"]),
        (["join", "--role", "leader"], ["--role", "'leader'", "trainer, inferencer, seed"]),
        (["join", "--metrics-port", "99999"], ["--metrics-port", "99999", "0 to 65535"]),
        (["join", "--no-such-option"], ["--no-such-option", "pulsenet"]),
        (["join", "--listen", "localhost:4001"], ["--listen", "localhost:4001", "/ip4/"]),
        (["join", "--bootstrap", "/ip4/10.0.0.1/tcp/1"], ["--bootstrap", "/p2p/"]),
        (["run", "admit", "mine", "KEY", "--role", "owner"], ["--role", "'owner'", "'trainer', 'inferencer'"]),
        (["run", "admit", "mine", "KEY"], ["--role"]),
        (["run", "create"], ["NAME", "pulsenet run create --help"]),
        (["patch", "make", "a", "b"], ["-o/--output"]),
        (["patch", "make", "a", "b", "-o", "c", "--codec", "zip"], ["--codec", "'zip'", "'auto'"]),
        (["verify", "model", "--root", "123"], ["--root", "'123'", "64 hexadecimal digits"]),
        (["demo", "--inferencers", "65"], ["--inferencers", "65", "1 to 64"]),
        (["demo", "--versions", "many"], ["--versions", "'many'"]),
    ],
)
def test_a_usage_error_names_option_value_and_what_is_allowed(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("pulsenet: ")
    for word in words:
        assert word in printed.err


# Failures of a command


class Failing:
    """``verify`` that fails as a test asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def run(self, error: BaseException, *arguments: str) -> int:
        def fail(parsed: argparse.Namespace) -> int:
            raise error

        self._monkeypatch.setattr(verify, "_verify", fail)
        return cli.main([*arguments, "verify", "model"])


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PulsenetError("text"), 1),
        (UnavailableError("text"), 1),
        (UsageError("text"), 2),
        (NoBootstrapError("text"), 3),
        (AddressInUseError("text"), 4),
        (DirectoryLockedError("text", "locked"), 4),
        (IntegrityError("text"), 5),
        (StorageError("text"), 6),
        (P2pdError("text"), 7),
        (ConfigError("text"), 78),
    ],
)
def test_a_failure_is_one_line_and_its_exit_code(
    failing: Failing, error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing.run(error) == code
    assert capsys.readouterr().err == "pulsenet: text\n"


def test_several_lines_stay_lines_and_control_characters_are_escaped(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing.run(NoBootstrapError("none:\n  /ip4/10.0.0.1\x1b[31m")) == 3
    assert capsys.readouterr().err == "pulsenet: none:\npulsenet:   /ip4/10.0.0.1\\x1b[31m\n"


def test_debug_shows_where_it_failed(failing: Failing) -> None:
    with pytest.raises(StorageError, match="text"):
        failing.run(StorageError("text"), "--debug")


def test_what_the_system_refused_is_one_line_too(failing: Failing, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing.run(PermissionError(13, "Permission denied", "/root/x")) == 1
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert "Permission denied: '/root/x'" in printed
    with pytest.raises(PermissionError):
        failing.run(PermissionError(13, "Permission denied"), "--debug")


@pytest.mark.parametrize(("words", "extra"), [(("verify", "demo"), "daemon"), (("demo",), "demo")])
def test_what_the_library_alone_lacks_is_named_with_what_brings_it(
    failing: Failing,
    words: tuple[str, ...],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``pip install`` without an extra brings the command, and not all that it imports."""

    def lack(parsed: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'rich.console'", name="rich.console")

    monkeypatch.setattr(demo, "_demo", lack)
    monkeypatch.setattr(verify, "_verify", lack)
    assert cli.main(words) == 1
    assert capsys.readouterr().err == (
        f"pulsenet: this needs rich, which is not installed: pip install 'pulsenet[{extra}]'\n"
    )
    with pytest.raises(ModuleNotFoundError):
        cli.main(["--debug", *words])
    with pytest.raises(ModuleNotFoundError):  # a bug of ours
        failing.run(ModuleNotFoundError("No module named 'pulsenetd.x'", name="pulsenetd.x"))


def test_an_interrupt_is_no_traceback(failing: Failing, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing.run(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_a_bug_is_not_hidden(failing: Failing) -> None:
    with pytest.raises(ZeroDivisionError):
        failing.run(ZeroDivisionError())


@pytest.mark.parametrize(("closed", "code"), [("<&- >&-", 0), (">&- 2>&-", 0), ("<&- >&- 2>&-", 0)])
def test_streams_that_the_caller_closed_are_no_failure(closed: str, code: int, tmp_path: Path) -> None:
    script = f'"{sys.executable}" -m pulsenetd.cli config show {closed}'
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_closed_streams_lend_their_numbers_to_no_other_file() -> None:
    code = "from pulsenetd import cli; cli.main(['status']); print(open('/dev/zero', 'rb').fileno(), file=OUT)"
    script = f'exec 9>&1; "{sys.executable}" -c "OUT = open(9, \'w\'); {code}" <&- >&- 2>&-'
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, timeout=60, check=False)
    assert int(done.stdout) > 2


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pulsenetd.cli", "run", "create", "mine", "--authority", "aa" * 32],
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path / "sch\u00fcler"), "PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"sch\xfcler" in done.stdout


def test_a_reader_that_left_is_no_failure(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "pulsenetd.cli", "config", "show"],
            stdout=output,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
