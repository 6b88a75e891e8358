"""``pulsenet config show``: every value, where it came from, and no secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pulsenetd import cli, config


@pytest.fixture(autouse=True)
def _no_options_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for item in config.fields():
        monkeypatch.delenv(config.environment_name(item.name), raising=False)


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["config", "show", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_every_value_is_shown_as_the_file_would_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = show(capsys)
    assert (code, err) == (0, "")
    lines = dict(line.split(" = ", 1) for line in out.splitlines())
    assert set(lines) == {item.name for item in config.fields()}
    assert lines["role"] == '"trainer"'
    assert lines["wait"] == "false"


def test_each_origin_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text('role = "seed"\nlog_level = "debug"\nworker_threads = 4\n')
    monkeypatch.setenv("PULSENET_CONFIG", str(file))
    monkeypatch.setenv("PULSENET_LOG_LEVEL", "error")
    code, out, _ = show(capsys, "--origin", "--worker-threads", "8", "--bootstrap", BOOTSTRAP, "--wait")
    assert code == 0
    lines = out.splitlines()
    assert f'role = "seed"   # file {file}' in lines
    assert 'log_level = "error"   # environment PULSENET_LOG_LEVEL' in lines
    assert "worker_threads = 8   # flag --worker-threads" in lines
    assert "wait = true   # flag --wait" in lines
    assert "metrics_port = 0   # default" in lines
    code, out, _ = show(capsys, "--json", "--config", str(file))
    rows: dict[str, Any] = json.loads(out)
    assert rows["role"] == {"value": "seed", "origin": f"file {file}"}


BOOTSTRAP = "/ip4/10.0.0.1/tcp/4001/p2p/12D3KooWEoXLxN2cbmGAUmVBmmZL4R6pEyjMmFtfMYkVQRFqQGJd"


def test_a_token_is_never_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSENET_TOKEN", "pulse1secret")
    for arguments in ((), ("--json",), ("--origin",)):
        code, out, _ = show(capsys, *arguments)
        assert code == 0
        assert "secret" not in out
        assert "(hidden)" in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('roel = "seed"', ["'roel'", "did you mean role?"]),
        ("worker_threads = 0", ["worker_threads", "0", "1 to"]),
        ("no TOML", ["is not valid TOML"]),
    ],
)
def test_a_file_that_is_wrong_is_one_line_and_78(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    code, out, err = show(capsys, "--config", str(file))
    assert (code, out) == (78, "")
    assert len(err.splitlines()) == 1
    for word in (*words, str(file)):
        assert word in err


def test_an_unknown_variable_is_named_with_its_neighbour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSENET_LOGLEVEL", "debug")
    code, _, err = show(capsys)
    assert code == 78
    assert "PULSENET_LOGLEVEL; did you mean PULSENET_LOG_LEVEL?" in err
