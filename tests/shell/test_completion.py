"""Real shells complete what the parser knows."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from pulsenetd import cli
from pulsenetd.commands.completion import SHELLS
from pulsenetd.completion.shells import WRITERS
from pulsenetd.completion.words import Value, list_commands

COMMANDS = list(list_commands(cli.build_parser()))
CASES = [
    ("pulsenet ver", {"verify"}),
    ("pulsenet run sh", {"show"}),
    ("pulsenet join --role ", {"trainer", "inferencer", "seed"}),
    (
        "pulsenet --debug join --engi",
        {"--engine", "--engine-dir", "--engine-url", "--engine-python", "--engine-reload"},
    ),
    ("pulsenet run create mine --algorithm g", {"gossip"}),
    ("pulsenet status --run my", {"myrun"}),
    ("pulsenet run show my", {"myrun"}),
    ("pulsenet verify weig", {"weights"}),
    ("pulsenet completion z", {"zsh"}),
    ("pulsenet patch apply ", {"weights"}),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a file to name and a run that is known."""
    (tmp_path / "data" / "pulsenet" / "myrun").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "weights").touch()
    for shell, write in WRITERS.items():
        (tmp_path / f"pulsenet.{shell}").write_text(write(COMMANDS))
    return tmp_path


def run_in(place: Path, *command: str) -> str:
    done = subprocess.run(
        command,
        cwd=place / "work",
        env={"PATH": os.environ["PATH"], "HOME": str(place), "XDG_DATA_HOME": str(place / "data"), "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


def test_every_shell_has_a_writer() -> None:
    assert set(WRITERS) == set(SHELLS)


def test_options_that_name_files_runs_and_choices_are_known() -> None:
    join = next(command for command in COMMANDS if command.path == ("join",))
    kinds = {option.names[0]: option.value for option in join.options}
    assert (kinds["--config"], kinds["--data-dir"], kinds["--run"]) == (Value.FILE, Value.DIRECTORY, Value.RUN)
    assert (kinds["--wait"], kinds["--token"], kinds["--codec"]) == (Value.NONE, Value.ANY, Value.CHOICE)


@pytest.mark.parametrize(("line", "wanted"), CASES)
def test_bash_completes(place: Path, line: str, wanted: set[str]) -> None:
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    script = (
        f"compopt() {{ :; }}; source ../pulsenet.bash; COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _pulsenet; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert set(run_in(place, "bash", "--norc", "-c", script).split()) == wanted


def test_bash_completes_a_value_behind_an_equals_sign(place: Path) -> None:
    script = (
        "source ../pulsenet.bash; COMP_WORDS=(pulsenet join --codec = ti); COMP_CWORD=4; _pulsenet; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert run_in(place, "bash", "--norc", "-c", script).split() == ["tight"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(("line", "wanted"), CASES)
def test_fish_completes(place: Path, line: str, wanted: set[str]) -> None:
    found = run_in(place, "fish", "--no-config", "-c", f"source ../pulsenet.fish; complete -C '{line}'")
    assert {answer.split("\t")[0] for answer in found.splitlines()} == wanted


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(place: Path) -> None:
    """zsh completes only in its line editor, so that one is driven through a terminal."""
    leader, follower = pty.openpty()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "XDG_DATA_HOME": str(place / "data"),
        "TERM": "xterm",
    }
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], cwd=place / "work", env=environment, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)

    def type_in(keys: str, marks: set[str]) -> None:
        os.write(leader, keys.encode())
        shown, give_up_at = "", time.monotonic() + 60.0
        while any(mark not in shown for mark in marks):
            assert time.monotonic() < give_up_at, f"{keys!r}: {shown!r} lacks {marks}"
            if select.select([leader], [], [], 0.2)[0]:
                shown += os.read(leader, 65_536).decode(errors="replace")

    try:
        type_in("autoload -Uz compinit; compinit -u; source ../pulsenet.zsh; echo re''ady\n", {"ready"})
        for line, wanted in CASES:
            # The first Tab adds what all have in common, the second lists them.
            type_in(f"{line}\t" if len(wanted) == 1 else f"{line}\t\t", wanted)
            type_in("\x15echo do''ne\n", {"done"})
    finally:
        shell.kill()
        shell.wait(10)
        os.close(leader)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_the_script(shell: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert capsys.readouterr().out == (place / f"pulsenet.{shell}").read_text()
