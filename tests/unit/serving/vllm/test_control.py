"""The control routes, against a small HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import ConfigError, UnavailableError
from pulsenet.serving.vllm import control as control_module
from pulsenet.serving.vllm.control import EngineGoneError, HttpControl

REPLIES: dict[str, tuple[int, bytes]] = {}
SEEN: list[tuple[str, str, Any]] = []
HELD: dict[str, threading.Event] = {}
"""Routes that answer only once their event is set."""


class Handler(BaseHTTPRequestHandler):
    """Writes down every request and answers what the test said."""

    def do_POST(self) -> None:
        size_bytes = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(size_bytes)
        SEEN.append((self.command, self.path, json.loads(data) if data else None))
        if self.path in HELD:
            HELD[self.path].wait(30)
        status, body = REPLIES.get(self.path.partition("?")[0], (200, b"{}"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def control() -> Iterator[HttpControl]:
    REPLIES.clear()
    SEEN.clear()
    HELD.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield HttpControl(f"http://127.0.0.1:{server.server_address[1]}/", timeout_seconds=5.0)
    for event in HELD.values():
        event.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_each_call_is_one_request_to_its_route(control: HttpControl) -> None:
    REPLIES["/get_world_size"] = 200, b'{"world_size": 2}'
    REPLIES["/weight_info"] = 200, b'{"weight_version": "0.7"}'
    assert control.count_ranks() == 2
    assert control.label() == "0.7"
    assert not control.is_sleeping()
    REPLIES["/is_sleeping"] = 200, b'{"is_sleeping": true}'
    assert control.is_sleeping()
    control.attach({"order": "attach"})
    control.open()
    control.order({"order": "stage"})
    control.pause()
    control.close("0.8")
    control.close(None)
    control.set_label("0.8")
    control.reload(Path("/versions/0.9"))
    REPLIES["/weight_checker"] = 200, b'{"checksums": [{"a": "1"}]}'
    assert control.checksums() == [{"a": "1"}]
    control.resume()
    assert SEEN == [
        ("GET", "/get_world_size", None),
        ("GET", "/health", None),
        ("GET", "/weight_info", None),
        ("GET", "/is_sleeping", None),
        ("GET", "/is_sleeping", None),
        ("POST", "/init_weight_transfer_engine", {"init_info": {"order": "attach"}}),
        ("POST", "/start_weight_update", None),
        ("POST", "/update_weights", {"update_info": {"order": "stage"}}),
        ("POST", "/pause?mode=keep&clear_cache=true", None),
        ("POST", "/finish_weight_update", {"weight_version": "0.8"}),
        ("POST", "/finish_weight_update", {"weight_version": None}),
        ("POST", "/update_weight_version", {"new_version": "0.8"}),
        ("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/versions/0.9"}}),
        ("POST", "/weight_checker", {"action": "checksum"}),
        ("POST", "/resume", None),
    ]


def test_checksums_of_a_large_model_are_read_as_a_whole(control: HttpControl) -> None:
    checksums = [{f"model.layers.{number}.self_attn.qkv_proj.weight": "0" * 64 for number in range(10_000)}]
    REPLIES["/weight_checker"] = 200, json.dumps({"checksums": checksums}).encode()
    assert control.checksums() == checksums


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b"Not Found", "VLLM_SERVER_DEV_MODE=1"),
        (500, b"Weight transfer not configured", "--weight-transfer-config"),
        (500, b"boom", "answers /resume with 500: boom"),
        (200, b"<html>", "something else than JSON"),
    ],
)
def test_a_refusal_says_what_to_change(status: int, body: bytes, reason: str, control: HttpControl) -> None:
    REPLIES["/resume"] = status, body
    with pytest.raises(UnavailableError, match=reason):
        control.resume()


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"world_size": 0}', b'{"world_size": true}', b'{"world_size": "2"}'])
def test_a_world_size_that_is_none_is_refused(body: bytes, control: HttpControl) -> None:
    REPLIES["/get_world_size"] = 200, body
    with pytest.raises(UnavailableError, match="states a world size"):
        control.count_ranks()


def test_an_engine_that_is_away_is_said_to_be() -> None:
    control = HttpControl("http://127.0.0.1:1", timeout_seconds=1.0)
    with pytest.raises(EngineGoneError, match=r"does not answer /resume: [^[]+$"):
        control.resume()
    with pytest.raises(EngineGoneError, match="does not answer /health"):
        control.label()


def test_an_answer_that_will_never_come_is_not_waited_for(
    control: HttpControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's server holds a request to an engine that died for ever; its health says so."""
    monkeypatch.setattr(control_module, "HEALTH_SECONDS", 0.01)
    HELD["/update_weights"] = threading.Event()
    REPLIES["/health"] = 503, b""
    with pytest.raises(EngineGoneError, match="is dead: start vLLM again"):
        control.order({"order": "commit"})
    with pytest.raises(EngineGoneError, match="is dead"):
        control.label()
    assert ("GET", "/weight_info", None) not in SEEN


def test_an_answer_that_takes_long_is_waited_for_while_the_engine_lives(
    control: HttpControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "HEALTH_SECONDS", 0.01)
    HELD["/update_weights"] = threading.Event()

    def answer_after_two_looks() -> None:
        while SEEN.count(("GET", "/health", None)) < 2:
            threading.Event().wait(0.01)
        HELD["/update_weights"].set()

    thread = threading.Thread(target=answer_after_two_looks)
    thread.start()
    control.order({"order": "commit"})
    thread.join()


def test_an_engine_that_stays_silent_and_alive_is_given_up_in_time(
    control: HttpControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "HEALTH_SECONDS", 0.01)
    impatient = HttpControl(control.url, timeout_seconds=0.05)
    HELD["/resume"] = threading.Event()
    with pytest.raises(UnavailableError, match=r"does not answer /resume: silent for") as caught:
        impatient.resume()
    assert not isinstance(caught.value, EngineGoneError)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "https://127.0.0.1:8000", "http://", "http://127.0.0.1:x", "http://127.0.0.1:80/v1"]
)
def test_what_is_no_url_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL of an engine"):
        HttpControl(url)


def test_an_engine_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="not on this machine"):
        HttpControl("http://10.0.0.1:8000")
    assert HttpControl("http://[::1]:8000").url == "http://[::1]:8000"
    assert HttpControl("http://localhost").url == "http://localhost"
