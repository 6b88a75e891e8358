"""The OpenAI port against a stand-in for vLLM's server: what passes, what is refused, who is told what went wrong."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from pulsenet.errors import UnavailableError
from pulsenet.ids import Version
from pulsenetd.engines import openai_server
from pulsenetd.engines.openai_server import OpenAiServer
from pulsenetd.engines.openai_upstream import Upstream
from pulsenetd.errors import AddressInUseError
from pulsenetd.metrics import Metrics

ANSWER = json.dumps({"id": "cmpl-1", "choices": [{"text": "5", "finish_reason": "length"}]}).encode()
EXACT = {"version_first": "0.3", "version_last": "0.4", "exact": True}
STAMPS = b"x-pulsenet-version-first: 0.3\r\nx-pulsenet-version-last: 0.4\r\n"
JSON = {"Content-Type": "application/json"}


def reply(body: bytes, *, status: str = "200 OK", headers: bytes = STAMPS) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status.encode(),
        len(body),
        headers,
        body,
    )


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine:
    """A server of one script: what it does with a connection once it has read a request."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.label = "0.3"
        self.work: Callable[[socket.socket], None] = lambda connection: connection.sendall(reply(ANSWER))
        self.gone = threading.Event()
        """Set when a connection was closed or shut by the other side."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (piece := connection.recv(65_536)):
                    self.gone.set()
                    return
                head += piece
            head, _, body = head.partition(b"\r\n\r\n")
            size = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
            )
            while len(body) < size:
                # A request that is cut amid its body comes to an end here, too.
                if not (piece := connection.recv(65_536)):
                    self.gone.set()
                    return
                body += piece
            self.requests.append(head + b"\r\n\r\n" + body)
            try:
                self.work(connection)
            except OSError:
                self.gone.set()

    def wait_until_gone(self, connection: socket.socket) -> None:
        """Wait for the other side's end of a connection."""
        try:
            connection.recv(1)
        finally:
            self.gone.set()

    def find(self) -> Upstream:
        return Upstream(self.url, Version(0, 3), lambda: self.label)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def server(engine: Engine) -> Iterator[OpenAiServer]:
    server = OpenAiServer("127.0.0.1", 0, lambda: engine.find())
    yield server
    server.close()


def connect(server: OpenAiServer) -> http.client.HTTPConnection:
    port = int(server.url.removesuffix("/v1").rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    return connection


def ask(
    server: OpenAiServer,
    method: str = "POST",
    path: str = "/v1/completions",
    body: bytes | None = b"{}",
    headers: dict[str, str] = JSON,
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = connect(server)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def error_of(body: bytes) -> tuple[str, str]:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["type"], error["code"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_bears_the_versions_that_wrote_it(path: str, engine: Engine, server: OpenAiServer) -> None:
    """A-CACHE-3."""
    headers = {**JSON, "Authorization": "Bearer key", "X-Other": "1"}
    response, body = ask(server, path=f"{path}?a=1", body=b'{"prompt": [1]}', headers=headers)
    assert response.status == 200
    assert (response.headers["x-pulsenet-version-first"], response.headers["x-pulsenet-version-last"]) == ("0.3", "0.4")
    assert json.loads(body) == {**json.loads(ANSWER), "pulsenet": EXACT}
    head, _, sent = engine.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(f"POST {path} HTTP/1.1".encode())
    assert b"Authorization: Bearer key" in head
    assert b"X-Other" not in head
    assert sent == b'{"prompt": [1]}'


def test_an_engine_that_states_no_versions_is_asked_for_its_label_after_the_answer(
    engine: Engine, server: OpenAiServer
) -> None:
    """A-CACHE-3: a request that straddles an update is never stamped with one version alone."""

    def work(connection: socket.socket) -> None:
        engine.label = "0.4"
        connection.sendall(reply(ANSWER, headers=b""))

    engine.work = work
    response, body = ask(server)
    assert json.loads(body)["pulsenet"] == {**EXACT, "exact": False}
    assert response.headers["x-pulsenet-version-last"] == "0.4"
    engine.work, engine.label = (lambda connection: connection.sendall(reply(ANSWER, headers=b""))), "0.3"
    _, body = ask(server)
    assert json.loads(body)["pulsenet"] == {"version_first": "0.3", "version_last": "0.3", "exact": True}
    engine.label = "default"
    response, body = ask(server)
    assert (response.status, *error_of(body)) == (503, "server_error", "engine_not_ready")


def test_models_are_listed_with_the_version_that_is_served(engine: Engine, server: OpenAiServer) -> None:
    engine.work = lambda connection: connection.sendall(reply(b'{"object": "list", "data": []}', headers=b""))
    response, body = ask(server, "GET", "/v1/models", None)
    assert response.status == 200
    assert json.loads(body)["pulsenet"]["version_last"] == "0.3"
    assert engine.requests[0].startswith(b"GET /v1/models HTTP/1.1")


def test_a_stream_comes_as_it_is_made_and_ends_with_its_versions(engine: Engine, server: OpenAiServer) -> None:
    goes_on = threading.Event()

    def work(connection: socket.socket) -> None:
        connection.sendall(STREAM_HEAD + chunk(b'data: {"choices": [{"text": "a"}]}\n\n'))
        assert goes_on.wait(60)
        end = b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
        connection.sendall(chunk(b": x-pulsenet-versions 0.3 0.4\n\n" + end) + b"0\r\n\r\n")

    engine.work = work
    connection = connect(server)
    connection.request("POST", "/v1/completions", b'{"stream": true}', JSON)
    response = connection.getresponse()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.readline() == b'data: {"choices": [{"text": "a"}]}\n'
    goes_on.set()
    events = [line.removeprefix(b"data: ") for line in response.read().splitlines() if line]
    assert json.loads(events[0])["pulsenet"] == EXACT
    assert events[1:] == [b"[DONE]"]
    # The connection is whole and serves the next request.
    engine.work = lambda connection: connection.sendall(reply(ANSWER))
    connection.request("POST", "/v1/completions", b"{}", JSON)
    assert connection.getresponse().status == 200
    connection.close()


def test_a_client_of_the_old_protocol_gets_its_stream_without_chunks(engine: Engine, server: OpenAiServer) -> None:
    engine.work = lambda connection: connection.sendall(STREAM_HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    port = int(server.url.removesuffix("/v1").rsplit(":", 1)[1])

    def send_on(client: socket.socket) -> None:
        while True:
            client.sendall(bytes(1 << 16))

    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        received = b"".join(iter(lambda: client.recv(4096), b""))
    assert received.endswith(b"\r\n\r\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    "end",
    [
        b"",
        b"0\r\n\r\n",
        b"garbage",
        b"5\r\nda",
    ],
)
def test_a_stream_that_is_cut_says_so_as_an_event(end: bytes, engine: Engine, server: OpenAiServer) -> None:
    engine.work = lambda connection: connection.sendall(STREAM_HEAD + chunk(b'data: {"choices": []}\n\nda') + end)
    response, body = ask(server)
    assert response.status == 200
    last = body.strip().splitlines()[-1]
    assert error_of(last.removeprefix(b"data: ")) == ("server_error", "engine_gone")
    assert b"[DONE]" not in body


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_hangs_up_cancels_its_request(is_stream: bool, engine: Engine, server: OpenAiServer) -> None:
    """At once, also while the engine has nothing to send."""
    asked = threading.Event()

    def work(connection: socket.socket) -> None:
        if is_stream:
            connection.sendall(STREAM_HEAD + chunk(b": x\n"))
        asked.set()
        engine.wait_until_gone(connection)

    engine.work = work
    connection = connect(server)
    connection.request("POST", "/v1/completions", b"{}", JSON)
    assert asked.wait(60)
    if is_stream:
        assert connection.getresponse().readline() == b": x\n"
    assert not engine.gone.is_set()
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert engine.gone.wait(60)


def test_what_the_engine_refuses_passes_as_it_said_it(engine: Engine, server: OpenAiServer) -> None:
    text = b'{"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}}'
    engine.work = lambda connection: connection.sendall(
        reply(text, status="404 Not Found", headers=b"Retry-After: 7\r\n")
    )
    response, body = ask(server)
    assert (response.status, body) == (404, text)
    assert response.headers["Retry-After"] == "7"
    assert "x-pulsenet-version-first" not in response.headers


def test_an_engine_that_is_not_ready_is_said_with_the_reason(engine: Engine, server: OpenAiServer) -> None:
    def fail() -> Upstream:
        raise UnavailableError("vLLM is started again in 4 s")

    engine.find = fail  # type: ignore[method-assign]
    response, body = ask(server)
    assert (response.status, *error_of(body)) == (503, "server_error", "engine_not_ready")
    assert response.headers["Retry-After"] == "5"
    assert b"started again in 4 s" in body


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-", b"nonsense\r\n\r\n", reply(ANSWER)[:-3]])
def test_an_engine_that_goes_away_in_the_middle_is_said(sent: bytes, engine: Engine, server: OpenAiServer) -> None:
    engine.work = lambda connection: connection.sendall(sent)
    response, body = ask(server)
    assert (response.status, *error_of(body)) == (502, "server_error", "engine_gone")


def test_an_engine_nobody_listens_for_is_gone(engine: Engine, server: OpenAiServer) -> None:
    engine.find = lambda: Upstream("http://127.0.0.1:1", Version(0, 3), lambda: "0.3")  # type: ignore[method-assign]
    response, body = ask(server)
    assert (response.status, *error_of(body)) == (503, "server_error", "engine_gone")


def test_an_engine_that_stays_silent_is_given_up(
    engine: Engine, server: OpenAiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "SILENCE_SECONDS_MAX", 0.05)
    engine.work = engine.wait_until_gone
    response, body = ask(server)
    assert (response.status, *error_of(body)) == (504, "server_error", "engine_timeout")
    assert engine.gone.wait(60)
    engine.work = lambda connection: (connection.sendall(STREAM_HEAD), engine.wait_until_gone(connection))  # type: ignore[assignment,func-returns-value]
    _, body = ask(server)
    assert b"the engine sent nothing for" in body


def test_an_answer_too_large_to_hold_is_refused(
    engine: Engine, server: OpenAiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "ANSWER_SIZE_BYTES_MAX", len(ANSWER) - 1)
    response, body = ask(server)
    assert (response.status, *error_of(body)) == (502, "server_error", "answer_too_large")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("POST", "/pause", JSON, 404, "not_found"),
        ("POST", "/v1/../update_weights", JSON, 404, "not_found"),
        ("GET", "/v1/completions", {}, 405, "method_not_allowed"),
        ("POST", "/v1/models", JSON, 405, "method_not_allowed"),
        ("POST", "/v1/completions", {**JSON, "Transfer-Encoding": "chunked"}, 411, "length_required"),
        ("POST", "/v1/completions", {**JSON, "Content-Length": "-1"}, 411, "length_required"),
        ("POST", "/v1/completions", {**JSON, "Content-Length": "9" * 30}, 413, "body_too_large"),
        ("POST", "/v1/completions", {**JSON, "Content-Length": str((8 << 20) + 1)}, 413, "body_too_large"),
        ("POST", "/v1/completions", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("PUT", "/v1/completions", JSON, 501, "bad_request"),
        ("POST", "/v1/" + "a" * 70_000, JSON, 414, "bad_request"),
    ],
)
def test_requests_that_are_not_passed_on_are_refused_before_the_engine_hears_of_them(
    method: str, path: str, headers: dict[str, str], status: int, code: str, engine: Engine, server: OpenAiServer
) -> None:
    connection = connect(server)
    connection.putrequest(method, path)
    for name, value in (
        ({"Content-Length": "2"} | headers).items() if "Transfer-Encoding" not in headers else headers.items()
    ):
        connection.putheader(name, value)
    connection.endheaders(b"{}")
    response = connection.getresponse()
    assert (response.status, *error_of(response.read())) == (status, *error_of_status(status), code)
    # What was not read cannot be taken for another request.
    assert connection.sock is None or connection.sock.recv(1) == b""
    connection.close()
    assert engine.requests == []


def error_of_status(status: int) -> tuple[str, ...]:
    return ("server_error" if status >= 500 else "invalid_request_error",)


@pytest.mark.parametrize(
    ("path", "status", "code"), [("/v1/completions", 413, "body_too_large"), ("/v1/embeddings", 404, "not_found")]
)
def test_a_client_that_still_sends_what_is_refused_sees_why(
    path: str, status: int, code: str, engine: Engine, server: OpenAiServer
) -> None:
    """More than the system takes in for a server that does not read."""
    response, body = ask(server, path=path, body=b" " * (32 << 20))
    assert (response.status, *error_of(body)) == (status, "invalid_request_error", code)
    assert engine.requests == []


def test_a_client_that_never_stops_sending_is_not_heard_out(
    server: OpenAiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "LINGER_SECONDS_MAX", 0.0)
    port = int(server.url.removesuffix("/v1").rsplit(":", 1)[1])

    def send_on(client: socket.socket) -> None:
        while True:
            client.sendall(bytes(1 << 16))

    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n")
        assert b"".join(iter(lambda: client.recv(4096), b"")).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(ConnectionError):
            send_on(client)


def test_a_body_that_does_not_come_is_given_up(
    engine: Engine, server: OpenAiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "BODY_SECONDS_MAX", 0.0)
    response, body = ask(server)
    assert (response.status, *error_of(body)) == (408, "invalid_request_error", "request_timeout")
    assert engine.requests == []


def test_connections_beyond_the_limit_are_told_to_come_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "CONNECTIONS_MAX", 1)
    server = OpenAiServer("127.0.0.1", 0, lambda: engine.find())
    try:
        held = connect(server)
        held.request("POST", "/v1/completions", b"{}", JSON)
        assert held.getresponse().read()
        with socket.create_connection(("127.0.0.1", held.port), timeout=60) as further:
            head, _, body = b"".join(iter(lambda: further.recv(4096), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"Retry-After: 5" in head
        assert error_of(body) == ("rate_limit_error", "too_many_requests")
        held.request("POST", "/v1/completions", b"{}", JSON)
        assert held.getresponse().status == 200
        held.close()
    finally:
        server.close()


def test_a_fault_of_our_own_is_logged_and_clients_that_go_away_are_not(
    engine: Engine, server: OpenAiServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine.work = engine.wait_until_gone
    connection = connect(server)
    connection.request("POST", "/v1/completions", b"{}", JSON)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert engine.gone.wait(60)

    def fail() -> Upstream:
        raise KeyError("a bug")

    engine.find = fail  # type: ignore[method-assign]
    with pytest.raises(http.client.RemoteDisconnected):
        ask(server)
    assert caplog.text.count("a request to the OpenAI port failed") == 1
    assert "KeyError: 'a bug'" in caplog.text


def test_closing_cuts_what_runs(engine: Engine) -> None:
    asked = threading.Event()
    engine.work = lambda connection: (asked.set(), engine.wait_until_gone(connection))  # type: ignore[assignment,func-returns-value]
    server = OpenAiServer("127.0.0.1", 0, lambda: engine.find())
    connection = connect(server)
    connection.request("POST", "/v1/completions", b"{}", JSON)
    assert asked.wait(60)
    server.close()
    assert engine.gone.wait(60)
    assert connection.getresponse().status == 502
    connection.close()


def test_closing_ends_connections_that_wait_for_another_request(engine: Engine) -> None:
    server = OpenAiServer("127.0.0.1", 0, lambda: engine.find())
    asked, never_asked = connect(server), connect(server)
    asked.request("GET", "/v1/models")
    assert asked.getresponse().read()
    assert asked.sock is not None
    server.close()
    for connection in (asked, never_asked):
        assert connection.sock.recv(1) == b"", "closed by the server"
        connection.close()


def test_ipv6_is_listened_on_too(engine: Engine) -> None:
    try:
        server = OpenAiServer("::1", 0, lambda: engine.find())
    except AddressInUseError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    try:
        assert server.url.startswith("http://[::1]:")
        port = int(server.url.removesuffix("/v1").rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("::1", port, timeout=60)
        connection.request("POST", "/v1/completions", b"{}", JSON)
        response = connection.getresponse()
        assert (response.status, "pulsenet" in json.loads(response.read())) == (200, True)
        connection.request("GET", "/v1/models", headers={"Host": "page.example"})
        assert connection.getresponse().status == 403
        connection.close()
    finally:
        server.close()


def test_requests_that_together_fill_the_memory_are_told_to_come_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 256 connections with 8 MiB each, most would be turned away; what the engine has is held no longer."""
    monkeypatch.setattr(openai_server, "BODIES_SIZE_BYTES_MAX", 100)
    server = OpenAiServer("127.0.0.1", 0, lambda: engine.find())
    answers = threading.Event()

    def work(connection: socket.socket) -> None:
        assert answers.wait(60)
        connection.sendall(reply(ANSWER))

    engine.work = work
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 60\r\n\r\n"
    try:
        slow = connect(server)
        slow.sock.sendall(head + b"{")  # type: ignore[union-attr]
        while server._server.bodies.left_bytes == 100:
            threading.Event().wait(0.01)
        response, body = ask(server, body=b"{" + b" " * 58 + b"}")
        assert (response.status, *error_of(body)) == (429, "rate_limit_error", "too_many_requests")
        assert response.headers["Retry-After"] == "5"
        slow.sock.sendall(b" " * 58 + b"}")  # type: ignore[union-attr]
        while not engine.requests:
            threading.Event().wait(0.01)
        waiting = connect(server)
        waiting.request("POST", "/v1/completions", b"{" + b" " * 58 + b"}", JSON)
        while len(engine.requests) < 2:
            threading.Event().wait(0.01)
        answers.set()
        assert waiting.getresponse().status == 200
        slow.close()
        waiting.close()
        cut = connect(server)
        cut.sock.sendall(head)  # type: ignore[union-attr]
        cut.close()
        while server._server.bodies.left_bytes != 100:
            threading.Event().wait(0.01)
    finally:
        answers.set()
        server.close()


def test_answers_that_together_fill_the_memory_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "ANSWERS_SIZE_BYTES_MAX", len(ANSWER) - 1)
    server = OpenAiServer("127.0.0.1", 0, lambda: engine.find())
    try:
        response, body = ask(server)
        assert (response.status, *error_of(body)) == (503, "server_error", "too_many_answers")
        assert server._server.answers.left_bytes == len(ANSWER) - 1
        engine.work = lambda connection: connection.sendall(reply(b"{}"))
        assert ask(server)[0].status == 200
    finally:
        server.close()


def test_requests_and_bytes_are_counted(engine: Engine) -> None:
    metrics = Metrics()
    server = OpenAiServer("127.0.0.1", 0, lambda: engine.find(), count=metrics.count)
    try:
        _, body = ask(server, body=b'{"n": 1}')
        refused, text = ask(server, path="/pause")
        assert refused.status == 404
        engine.work = lambda connection: connection.sendall(STREAM_HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        _, stream = ask(server, path="/v1/chat/completions")
    finally:
        server.close()
    sample = metrics.registry.get_sample_value
    for route, status in (("completions", "200"), ("other", "404"), ("chat", "200")):
        assert sample("pulsenet_openai_requests_total", {"route": route, "status": status}) == 1
    assert sample("pulsenet_openai_bytes_total", {"direction": "received"}) == len(b'{"n": 1}') + len(b"{}")
    assert sample("pulsenet_openai_bytes_total", {"direction": "sent"}) == len(body) + len(text) + len(stream)


def test_a_port_in_use_is_said(engine: Engine) -> None:
    port = engine.listener.getsockname()[1]
    with pytest.raises(
        AddressInUseError, match=f"OpenAI port {port} on 127.0.0.1 is in use; give another --openai-port"
    ):
        OpenAiServer("127.0.0.1", port, lambda: engine.find())
    with pytest.raises(AddressInUseError, match="cannot be listened on"):
        OpenAiServer("203.0.113.1", 0, lambda: engine.find())


def exchange(server: OpenAiServer, data: bytes) -> bytes:
    """Send bytes, and return all that comes until the server hangs up."""
    connection = connect(server)
    try:
        assert connection.sock is not None
        connection.sock.sendall(data)
        received = b""
        while piece := connection.sock.recv(65_536):
            received += piece
        return received
    finally:
        connection.close()


@pytest.mark.parametrize("size", [b"Content-Length: 54", b"Transfer-Encoding: chunked", b"Transfer-Encoding:"])
def test_a_body_where_none_belongs_is_no_second_request(size: bytes, engine: Engine, server: OpenAiServer) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer x\r\n\r\n"
    answers = exchange(server, b"GET /v1/models HTTP/1.1\r\n" + size + b"\r\n\r\n" + hidden)
    assert answers.count(b"HTTP/1.1 200 ") == 1
    assert len(engine.requests) == 1


def test_a_target_that_is_no_url_is_answered(server: OpenAiServer, caplog: pytest.LogCaptureFixture) -> None:
    answer = exchange(server, b"GET http://[/v1/models HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert not caplog.records


@pytest.mark.parametrize("method", ["GET /v1/models", "POST /v1/completions"])
def test_a_page_whose_name_leads_here_gets_nothing(method: str, engine: Engine, server: OpenAiServer) -> None:
    """DNS rebinding: for the browser the request goes to the page's own origin."""
    verb, path = method.split()
    response, body = ask(server, verb, path, headers={**JSON, "Host": "page.example:8001"})
    assert (response.status, error_of(body)[1]) == (403, "host_not_allowed")
    assert not engine.requests
    for host in ("localhost", "127.0.0.1:8001", "[::1]:8001"):
        assert ask(server, verb, path, headers={**JSON, "Host": host})[0].status == 200


def test_a_port_that_is_open_to_other_machines_is_asked_by_any_name(engine: Engine) -> None:
    server = OpenAiServer("0.0.0.0", 0, engine.find)  # noqa: S104
    try:
        assert ask(server, "GET", "/v1/models", None, {"Host": "gpu.example"})[0].status == 200
    finally:
        server.close()


def test_a_head_that_drips_is_given_up(server: OpenAiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "HEAD_SECONDS_MAX", 0.0)
    assert exchange(server, b"GET /v1/models HTTP/1.1\r\nA") == b""
