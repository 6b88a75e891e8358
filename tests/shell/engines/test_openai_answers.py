"""Versions in answers, whole and streamed, however the stream is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import Version
from pulsenetd.engines import openai_answers
from pulsenetd.engines.openai_answers import Stamp, StreamStamper, encode_error, stamp_body
from pulsenetd.engines.openai_upstream import Upstream, find_stamp, read_stamp

EXACT = {"version_first": "0.57", "version_last": "0.58", "exact": True}
ENCLOSING = Stamp("0.5", "0.6", is_exact=False)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def read_events(data: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


STREAM = b"".join(
    [
        event({"choices": [{"index": 0, "text": "a", "finish_reason": None}]}),
        event({"choices": [{"index": 0, "text": 'a "finish_reason" in the text'}]}),
        b": x-pulsenet-versions 0.57 0.58\n\n",
        event({"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]}),
        event({"choices": [], "usage": {"total_tokens": 3}}),
        b"data: [DONE]\n\n",
    ]
)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_the_end_of_a_stream_says_what_the_engine_stated(size: int) -> None:
    stamper = StreamStamper(lambda: ENCLOSING)
    out = b"".join(stamper.feed(STREAM[start : start + size]) for start in range(0, len(STREAM), size))
    out += stamper.finish()
    events = read_events(out)
    assert ["pulsenet" in entry for entry in events[:-1]] == [False, False, True, True]
    assert events[2]["pulsenet"] == events[3]["pulsenet"] == EXACT
    assert events[2]["choices"][0]["text"] == "b"
    assert events[-1] == "[DONE]"
    assert stamper.is_done
    assert b": x-pulsenet" not in out


def test_a_stream_of_an_engine_that_states_nothing_is_stamped_with_what_encloses_it() -> None:
    stamper = StreamStamper(lambda: ENCLOSING)
    events = read_events(stamper.feed(STREAM.replace(b": x-pulsenet-versions 0.57 0.58", b": x-pulsenet-versions bad")))
    assert events[2]["pulsenet"] == {"version_first": "0.5", "version_last": "0.6", "exact": False}
    unknown = StreamStamper(lambda: None)
    assert "pulsenet" not in read_events(unknown.feed(STREAM.replace(b": x-pulsenet-versions 0.57 0.58", b":")))[2]


def test_other_lines_pass_as_they_are() -> None:
    lines = b'event: x\ndata: no json with "usage"\ndata: [1]\n\ndata: {"choices": 1, "usage": 1}\nid: 3\n'
    stamper = StreamStamper(lambda: ENCLOSING)
    assert stamper.feed(lines + b"data: cut") == lines
    assert stamper.finish() == b"data: cut"
    assert not stamper.is_done


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_answers, "LINE_SIZE_BYTES_MAX", 100)
    stamper = StreamStamper(lambda: None)
    assert stamper.feed(b"x" * 100) == b""
    with pytest.raises(RemoteProtocolError, match="more than 100 bytes"):
        stamper.feed(b"x")


def test_a_body_that_is_no_object_passes_as_it_is() -> None:
    assert json.loads(stamp_body(b'{"id": "a"}', Stamp("0.57", "0.58", is_exact=True))) == {
        "id": "a",
        "pulsenet": EXACT,
    }
    for body in (b"", b"[1]", b"nothing", b"[" * 100_000):
        assert stamp_body(body, ENCLOSING) == body


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")]
)
def test_errors_have_the_shape_that_clients_know(status: int, kind: str) -> None:
    error = json.loads(encode_error(status, "a_code", "a cause"))["error"]
    assert error == {"message": "a cause", "type": kind, "param": None, "code": "a_code"}


def test_only_whole_stamps_of_versions_count() -> None:
    headers = {"x-pulsenet-version-first": "0.57", "x-pulsenet-version-last": "0.58"}
    assert read_stamp(headers.get) == Stamp("0.57", "0.58", is_exact=True)
    for name in headers:
        assert read_stamp({**headers, name: "default"}.get) is None
        assert read_stamp({key: value for key, value in headers.items() if key != name}.get) is None


def test_an_answer_is_enclosed_by_the_labels_around_it() -> None:
    labels = ["0.5", "0.6", "0.4", "default"]
    found = [find_stamp(Upstream("", Version(0, 5), lambda label=label: label)) for label in labels]
    assert found == [Stamp("0.5", "0.5", is_exact=True), Stamp("0.5", "0.6", is_exact=False), None, None]

    def fail() -> str:
        raise UnavailableError("gone")

    assert find_stamp(Upstream("", Version(0, 5), fail)) is None
