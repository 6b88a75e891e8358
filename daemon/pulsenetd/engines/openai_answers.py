"""Puts the versions that wrote an answer into it, and words errors as OpenAI's API does. Bytes in, bytes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pulsenet.errors import RemoteProtocolError
from pulsenet.serving.vllm.exchange import parse_version
from pulsenet.serving.vllm.stamps import STREAM_COMMENT

FIELD: Final = "pulsenet"
"""Of every answer, beside OpenAI's own fields."""
LINE_SIZE_BYTES_MAX: Final = 4 << 20
"""Of an event stream: one event with its logprobs."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The versions of one answer, as ``epoch.number``."""

    first: str
    """Wrote the oldest token."""
    last: str
    """Wrote the newest."""
    is_exact: bool
    """The engine said so itself. Otherwise the versions enclose those that wrote the answer."""

    def to_json(self) -> dict[str, Any]:
        """Return the field's value."""
        return {"version_first": self.first, "version_last": self.last, "exact": self.is_exact}


def encode_error(status: int, code: str, message: str) -> bytes:
    """Return an error as OpenAI's API words it."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def stamp_body(body: bytes, stamp: Stamp) -> bytes:
    """Return an answer's JSON object with the field in it; anything else as it is."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body
    return json.dumps({**value, FIELD: stamp.to_json()}).encode() if isinstance(value, dict) else body


class StreamStamper:
    """Puts the field into the events of a stream that end a choice, and into the one that sums up its usage.

    Args:
        find_stamp: Called where the engine has not said which versions it was; ``None`` leaves an event as it is.
    """

    def __init__(self, find_stamp: Callable[[], Stamp | None]) -> None:
        self._find_stamp = find_stamp
        self._stated: Stamp | None = None
        self._rest = b""
        self.is_done = False
        """Whether the stream said that it is over."""

    def feed(self, data: bytes) -> bytes:
        """Take what came; return whole lines for the application.

        Raises:
            RemoteProtocolError: A line is longer than any event.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_SIZE_BYTES_MAX:
            raise RemoteProtocolError("too-large", f"an event of more than {LINE_SIZE_BYTES_MAX} bytes")
        return b"".join(self._convert(line) for line in lines)

    def finish(self) -> bytes:
        """Return what is left after the last whole line."""
        rest, self._rest = self._rest, b""
        return rest

    def _convert(self, line: bytes) -> bytes:
        if line.startswith(STREAM_COMMENT):
            self._note(line.removeprefix(STREAM_COMMENT))
            return b""
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self.is_done = True
            # Cheap first: all but a few events have neither.
            elif b'"finish_reason"' in data or b'"usage"' in data:
                return b"data: " + self._stamp(data) + b"\n"
        return line + b"\n"

    def _note(self, text: bytes) -> None:
        words = text.decode("ascii", "replace").split()
        if len(words) == 2 and all(parse_version(word) is not None for word in words):
            self._stated = Stamp(words[0], words[1], is_exact=True)

    def _stamp(self, data: bytes) -> bytes:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return data
        if not isinstance(value, dict) or not _is_end(value):
            return data
        stamp = self._stated or self._find_stamp()
        return data if stamp is None else json.dumps({**value, FIELD: stamp.to_json()}).encode()


def _is_end(event: dict[str, Any]) -> bool:
    """Say whether an event ends a choice, or has the usage after all of them."""
    choices = event.get("choices")
    if not isinstance(choices, list):
        return False
    if not choices:
        return event.get("usage") is not None
    return any(isinstance(choice, dict) and choice.get("finish_reason") is not None for choice in choices)
