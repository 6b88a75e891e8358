"""Log lines cannot be forged by the words of a peer."""

from __future__ import annotations

import json
import logging

import pytest

from pulsenetd import logs


def test_control_characters_are_escaped_and_length_is_bounded() -> None:
    assert logs.printable("a\nINFO forged\x1b[31m") == "a\\nINFO forged\\x1b[31m"
    assert len(logs.printable("x" * 10_000)) < 2_100


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
