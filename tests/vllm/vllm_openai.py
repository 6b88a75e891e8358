"""The node's OpenAI port before a real engine, and an application's requests to it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from pulsenet.serving.vllm.control import HttpControl
from pulsenetd.engines.openai_server import OpenAiServer
from pulsenetd.engines.openai_upstream import Upstream

REQUEST_SECONDS_MAX = 120.0


@contextmanager
def open_port(served: Any) -> Iterator[str]:
    """Serve the OpenAI routes of an engine while the block runs."""
    control = HttpControl(served.server.url)
    server = OpenAiServer("127.0.0.1", 0, lambda: Upstream(served.server.url, served.held.version, control.label))
    try:
        yield server.url
    finally:
        server.close()


def ask(url: str, path: str, *, count: int = 0) -> Any:
    """Return the answer to one request; ``count`` asks for so many tokens."""
    connection, response = _send(url, path, count, is_stream=False)
    body = response.read()
    connection.close()
    assert response.status == 200, body
    return json.loads(body)


def read_stream(url: str, *, count: int) -> Iterator[Any]:
    """Yield the events of a streamed completion; ending early hangs up."""
    connection, response = _send(url, "/completions", count, is_stream=True)
    try:
        assert response.status == 200
        while line := response.readline():
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data: "):
                yield json.loads(data)
        raise AssertionError("the stream ended without saying so")
    finally:
        response.close()
        connection.close()


def _send(
    url: str, path: str, count: int, *, is_stream: bool
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=REQUEST_SECONDS_MAX)
    if not count:
        connection.request("GET", parts.path + path)
        return connection, connection.getresponse()
    # Token ids, because the tests' models have no tokenizer.
    body = {"prompt": list(range(40)), "max_tokens": count, "temperature": 0.0, "ignore_eos": True, "stream": is_stream}
    connection.request("POST", parts.path + path, json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()
