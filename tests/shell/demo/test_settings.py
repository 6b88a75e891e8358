"""The settings agree with the models and with the command line."""

import pytest

from pulsenet.errors import UsageError
from pulsenetd.cli import build_parser
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
