"""The log tail is bounded, printable, and says nothing that others must not read."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from pulsenet.chain.token import PREFIX
from pulsenetd.logs import TEXT_SIZE_MAX
from pulsenetd.status.log_tail import FILTER_SIZE_MAX, LINES_SHOWN_MAX, LogTail, find_hidden


def write(tail: LogTail, level: int, text: str, *values: object, error: BaseException | None = None) -> None:
    where = None if error is None else (type(error), error, error.__traceback__)
    tail.handle(logging.LogRecord("pulsenet", level, __file__, 1, text, values, where))


def texts(tail: LogTail, level: str = "debug", text: str = "") -> list[str]:
    return [line["text"] for line in tail.select(level, text)["lines"]]


def test_lines_are_filtered_by_level_and_text_newest_first() -> None:
    tail = LogTail({})
    write(tail, logging.DEBUG, "asked %d peers", 3)
    write(tail, logging.INFO, "Version 0.7 applied")
    write(tail, logging.WARNING, "the disk is full")
    write(tail, logging.CRITICAL, "stop")
    assert texts(tail) == ["stop", "the disk is full", "Version 0.7 applied", "asked 3 peers"]
    assert texts(tail, "info") == ["stop", "the disk is full", "Version 0.7 applied"]
    assert texts(tail, "error") == ["stop"]
    assert texts(tail, text="VERSION 0.7") == ["Version 0.7 applied"]
    found = tail.select("warning", "disk")
    assert (found["level"], found["text"], found["found_count"], found["kept_count"]) == ("warning", "disk", 1, 4)
    assert found["lines"][0]["level"] == "warning"
    assert tail.select()["lines"][0]["level"] == "error"
    assert tail.select("no level", "")["level"] == "debug"


def test_the_oldest_lines_go_and_an_answer_is_short() -> None:
    tail = LogTail({}, lines_max=LINES_SHOWN_MAX + 5)
    for number in range(3 * LINES_SHOWN_MAX):
        write(tail, logging.INFO, "line %d", number)
    found = tail.select()
    assert found["kept_count"] == found["found_count"] == LINES_SHOWN_MAX + 5
    assert len(found["lines"]) == LINES_SHOWN_MAX
    assert found["lines"][0]["number"] == 3 * LINES_SHOWN_MAX
    assert len(tail.select(text="x" * 10_000)["text"]) == FILTER_SIZE_MAX


def test_a_line_has_no_paths_no_tokens_and_no_end() -> None:
    tail = LogTail({"/home/me": "~", "/home/me/runs/node": "DATA-DIR", "/": "nothing"})
    write(tail, logging.INFO, "store in /home/me/runs/node/store.sqlite, key in /home/me/keys")
    write(tail, logging.INFO, "joined by %s now", f"{PREFIX}{'abcdefgh2345' * 9}")
    write(tail, logging.INFO, "x" * 100_000)
    write(tail, logging.INFO, "two\nlines\x1b[31m")
    printed = texts(tail)
    assert printed[3] == "store in DATA-DIR/store.sqlite, key in ~/keys"
    assert printed[2] == f"joined by {PREFIX}... now"
    assert len(printed[1]) <= TEXT_SIZE_MAX + 3
    assert printed[0] == "two\\nlines\\x1b[31m"


def test_an_error_is_named_without_its_traceback() -> None:
    tail = LogTail({})
    try:
        raise OSError(28, "No space left on device")
    except OSError as error:
        write(tail, logging.ERROR, "cannot write", error=error)
    assert texts(tail) == ["cannot write (OSError: [Errno 28] No space left on device)"]
    assert sys.exc_info() == (None, None, None)


def test_a_user_without_a_home_has_a_log_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert find_hidden(Path("/data/node")) == {"/data/node": "DATA-DIR", "/home/me": "~"}
    monkeypatch.setattr(Path, "home", fail)
    assert find_hidden(Path("/data/node")) == {"/data/node": "DATA-DIR"}
