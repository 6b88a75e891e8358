"""Log lines cannot be forged by the words of a peer."""

from __future__ import annotations

import json
import logging

import pytest

from pulsenetd import logs


def test_control_characters_are_escaped_and_length_is_bounded() -> None:
    assert logs.printable("a\nINFO forged\x1b[31m") == "a\\nINFO forged\\x1b[31m"
    assert len(logs.printable("x" * 10_000)) < 2_100


@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_with_a_peers_words_is_escaped_line_by_line(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up("info", as_json=as_json)
    try:
        raise ValueError("12:00:00 warning: \x1b[31m red \x9b31m \u202e and so on" + "y" * 5_000)
    except ValueError:
        logs.logger.exception("broken by %s", "a\nforged line")
    logging.getLogger("pulsenet").handlers.clear()
    text = capsys.readouterr().err
    told = json.loads(text)["traceback"] if as_json else text
    assert "\\x1b[31m red \\x9b31m \\u202e" in told
    assert all(line.isprintable() and len(line) < 2_100 for line in told.split("\n"))
    assert "forged line" not in text.splitlines()


def test_text_and_json_forms(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("info", as_json=False)
    logs.logger.debug("hidden")
    logs.logger.info("plain")
    logs.logger.warning("careful")
    try:
        raise ValueError("why")
    except ValueError:
        logs.logger.exception("broken")
    text = capsys.readouterr().err
    assert "hidden" not in text
    assert "warning: careful" in text
    assert "ValueError: why" in text
    logs.set_up("debug", as_json=True)
    logs.logger.debug("seen")
    try:
        raise ValueError("why")
    except ValueError:
        logs.logger.exception("broken")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (lines[0]["level"], lines[0]["text"]) == ("debug", "seen")
    assert "ValueError" in lines[1]["traceback"]
    logging.getLogger("pulsenet").handlers.clear()
