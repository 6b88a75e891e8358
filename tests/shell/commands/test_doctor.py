"""``pulsenet doctor``: every check in one line, JSON with the same, an exit code that says whether anything fails."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pulsenet.chain.records import JoinToken
from pulsenet.chain.token import encode_token
from pulsenet.errors import StorageError
from pulsenet.ids import RunId
from pulsenetd import cli, runs
from pulsenetd.doctor import checks
from pulsenetd.doctor.checks import CHECKS, examine, exit_code
from pulsenetd.doctor.findings import Check, Finding, Subject, fail, ok, warn
from pulsenetd.identity import load_or_create
from pulsenetd.storage.store import Store

KEY = "12D3KooWELH8s3aTF93abUfQZ7LbLzCayr9Qjv9A5P5AugqPN2cn"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "pulsenet"


def test_a_machine_without_nodes_gets_a_line_for_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in lines} == {check.name for check in CHECKS}
    grades = {line.split()[0] for line in lines}
    assert grades <= {"ok", "warn", "fail"}
    assert code == int("fail" in grades)


def test_json_says_the_same(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    key = home / "local" / "trainer" / "identity.key"
    key.parent.mkdir(parents=True)
    load_or_create(key).path.chmod(0o644)
    assert cli.main(["doctor", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    keys = [one for one in said["findings"] if one["check"] == "keys"]
    assert keys == [
        {
            "check": "keys",
            "grade": "fail",
            "text": f"{key} is open to others (mode 0644)",
            "next_step": f"chmod 600 {key}",
            "can_repair": True,
        }
    ]


def test_nothing_is_changed_without_repair_and_everything_safe_with_it(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    node = home / "local" / "trainer"
    node.mkdir(parents=True)
    key = load_or_create(node / "identity.key").path
    key.chmod(0o644)
    (node / "node.json").write_text("{}")
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert f"chmod 600 {key} (or ask again with --repair)" in printed
    assert (key.stat().st_mode & 0o777, (node / "node.json").exists()) == (0o644, True)
    code = cli.main(["doctor", "--repair"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["fixed", "keys"], ["fixed", "leftovers"]]
    assert code == int(any(line.startswith("fail") for line in lines))
    assert (key.stat().st_mode & 0o777, (node / "node.json").exists()) == (0o600, False)
    assert cli.main(["doctor", "--repair", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["repaired"] == []


def test_a_run_a_token_or_a_directory_names_the_nodes_and_nothing_all(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    """Somebody whose nodes are of another run than 'local', or elsewhere, is told of them too."""
    own = tmp_path / "own"
    for node in (home / "local" / "seed", home / "mine" / "seed", home / "joined" / "seed", own):
        Store.open(node).close()
        load_or_create(node / "identity.key")
    token = JoinToken(RunId(b"m" * 32), 0, ("/ip4/127.0.0.1/tcp/1/p2p/" + KEY,), b"", None)
    for name in ("mine", "joined"):
        runs.write_run_file(home / name / "run.json", runs.RunFile(name, token, ()))
    (home / "local" / "run.json").write_text("damaged")
    (home / "mine" / "own@0").symlink_to(own)
    (home / "joined" / "own@0").symlink_to(own)

    def looked_at(*words: str) -> tuple[set[Path], bool]:
        cli.main(["doctor", "--read-all", *words])
        out = capsys.readouterr().out
        nodes = {Path(line.split()[2].rstrip(":")) for line in out.splitlines() if line.split()[1] == "stores"}
        return nodes, "tcp/1/p2p" in out

    mine = {home / "mine" / "seed", own}
    every = mine | {home / "joined" / "seed", home / "local" / "seed"}
    assert looked_at() == (every, False)
    assert looked_at("--run", "mine") == (mine, True)
    assert looked_at("--run", "local") == (set(), False), "a run file that is damaged is said, not passed over"
    assert looked_at("--token", encode_token(token)) == (every - {home / "local" / "seed"}, True)
    assert looked_at("--data-dir", str(own)) == ({own}, True)


def test_a_token_that_ended_and_a_run_that_is_not_here_are_said(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    """Both were answered as if nothing had been asked for."""
    token = JoinToken(RunId(b"m" * 32), 0, ("/ip4/127.0.0.1/tcp/1/p2p/" + KEY,), b"", 1_000)

    def ask(*words: str) -> list[str]:
        code = cli.main(["doctor", *words])
        lines = [line for line in capsys.readouterr().out.splitlines() if line.split()[1] == "bootstraps"]
        assert code == 1 or not any(line.startswith("fail") for line in lines)
        return lines

    ended = "the join token ended 1970-01-01 00:00 UTC"
    step = "ask a member for another: 'pulsenet run token NAME'"
    assert ask("--token", encode_token(token))[0] == f"fail  bootstraps  {ended}; {step}"
    runs.write_run_file(home / "mine" / "run.json", runs.RunFile("mine", token, ()))
    told = f"{ended}: nodes that joined by it start again, others cannot"
    assert ask("--token", encode_token(token))[0] == f"warn  bootstraps  {told}; {step}"
    assert ended not in str(ask("--token", encode_token(replace(token, expires_at_ms=None))))
    told = "no run 'typo' on this machine; give --token, or create it with 'pulsenet run create typo'"
    assert ask("--run", "typo") == [f"fail  bootstraps  {told}"]
    assert ask("--run", "local")[0].startswith("ok ")


def test_a_token_that_is_none_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--token", "pulse1..."]) == 2
    assert capsys.readouterr().err == "pulsenet: --token: not base32: was it copied whole?\n"


def test_a_repair_that_fails_says_why() -> None:
    def break_down() -> str:
        raise StorageError("the disk is gone")

    found = [("keys", fail("open", "close it", break_down)), ("disk", ok("fine"))]
    assert list(checks.repair(found)) == [("keys", False, "open: cannot be repaired: the disk is gone")]


def test_the_options_of_the_node_are_read_from_its_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "node.toml"
        file.write_text(f'listen = "/ip4/127.0.0.1/tcp/{port}"\nrole = "seed"\n')
        assert cli.main(["doctor", "--config", str(file)]) == 1
        assert f"{port} is in use by another program" in capsys.readouterr().out
        monkeypatch.setenv("PULSENET_METRICS_PORT", str(port))
        assert cli.main(["doctor"]) == 1
        assert "choose another with --metrics-port" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--bootstrap", "x"], ["--listen", "x"], ["--token", "x"]])
def test_a_bad_value_is_a_usage_error(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_check_that_fails_itself_is_a_finding_and_the_others_go_on() -> None:
    def break_down(_subject: Subject) -> Sequence[Finding]:
        raise StorageError("the disk is gone")

    broken, fine = Check("broken", break_down), Check("fine", lambda _: [ok("fine")])
    found = list(examine(Subject(Path("/nowhere")), [broken, fine]))
    assert [(name, finding.text) for name, finding in found] == [
        ("broken", "cannot be checked: the disk is gone"),
        ("fine", "fine"),
    ]


def test_only_a_failure_is_one() -> None:
    assert exit_code([ok("a"), warn("b", "c")]) == 0
    assert exit_code([ok("a"), fail("b", "c")]) == 1


def test_names_are_short_and_appear_once() -> None:
    names = [check.name for check in checks.CHECKS]
    assert len(names) == len(set(names))
    assert all(len(name) <= 11 for name in names)
