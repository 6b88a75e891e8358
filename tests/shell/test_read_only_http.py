"""The port that only reads: other methods, huge and slow requests, and crowds get nowhere."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from pulsenet.errors import StorageError
from pulsenetd.read_only_http import REQUEST_SIZE_BYTES_MAX, SAFETY_HEADERS, Answer, Request, Server

HOST = b"Host: localhost\r\n"


@contextlib.contextmanager
def serve(*, seconds_max: float = 5.0, connections_max: int = 8) -> Iterator[Server]:
    def echo(request: Request) -> Answer:
        return 200, "text/plain", repr(sorted(request.query.items())).encode()

    def slow(_: Request) -> Answer:
        return 200, "text/plain", bytes(64 << 20)

    def fail(_: Request) -> Answer:
        raise StorageError("database store.sqlite: disk I/O error", "io")

    server = Server("127.0.0.1", 0, {"/echo": echo, "/much": slow, "/failing": fail}, seconds_max=seconds_max)
    server._places = threading.BoundedSemaphore(connections_max)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def connect(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(server.server_address[:2], timeout=20) as connection:  # type: ignore[arg-type]
        yield connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def ask(server: Server, request: bytes) -> bytes:
    with connect(server) as connection:
        with contextlib.suppress(OSError):  # dropped before all was sent
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


def test_a_page_may_load_nothing_from_elsewhere_and_be_framed_by_nobody() -> None:
    with serve() as server:
        head, _, body = ask(server, b"GET /echo?a=1&b HTTP/1.1\r\n" + HOST + b"\r\n").partition(b"\r\n\r\n")
    assert body == b"[('a', '1'), ('b', '')]"
    for name, value in SAFETY_HEADERS.items():
        assert f"{name}: {value}".encode() in head
    policy = SAFETY_HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert b"Python" not in head


def test_what_keeps_the_node_from_answering_is_said() -> None:
    with serve() as server:
        head, _, body = ask(server, b"GET /failing HTTP/1.1\r\n" + HOST + b"\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert body == b"database store.sqlite: disk I/O error\n"


def test_the_head_alone_is_as_long_and_has_no_body() -> None:
    with serve() as server:
        answer = ask(server, b"HEAD /echo?a=1 HTTP/1.1\r\n" + HOST + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"Content-Length: 12\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_refused_and_what_follows_is_no_request(method: str) -> None:
    smuggled = b"GET /echo HTTP/1.1\r\n" + HOST + b"\r\n"
    with serve() as server:
        answer = ask(server, method.encode() + b" /echo HTTP/1.1\r\n" + HOST + b"\r\n" + smuggled)
    assert answer.startswith(b"HTTP/1.1 405")
    assert b"Allow: GET, HEAD\r\n" in answer
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"<script>alert(1)</script> / HTTP/1.1\r\n\r\n",
        b"<script>alert(1)</script>\r\n\r\n",
        b"BREW /echo HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_request_is_not_repeated(request_bytes: bytes) -> None:
    with serve() as server:
        answer = ask(server, request_bytes)
    assert answer.split()[1] in (b"400", b"501")
    assert b"script" not in answer.replace(b"script-src", b"")
    assert b"text/html" not in answer


def test_a_body_ends_the_connection() -> None:
    smuggled = b"GET /echo?smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
    with serve() as server:
        for body in (b"Content-Length: %d\r\n" % len(smuggled), b"Transfer-Encoding: chunked\r\n"):
            answer = ask(server, b"GET /echo HTTP/1.1\r\n" + HOST + body + b"\r\n" + smuggled)
            assert answer.count(b"HTTP/1.1 200") == 1
            assert b"smuggled" not in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /echo?" + b"a" * (2 * REQUEST_SIZE_BYTES_MAX) + b" HTTP/1.1\r\n\r\n",
        b"GET /echo HTTP/1.1\r\n" + b"X: %s\r\n" % (b"a" * (2 * REQUEST_SIZE_BYTES_MAX)) + b"\r\n",
        b"GET /echo HTTP/1.1\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
    ],
)
def test_a_huge_request_is_not_read(request_bytes: bytes) -> None:
    with serve() as server:
        answer = ask(server, request_bytes)
        # What was not read may make the system drop the answer on its way.
        assert not answer or answer.split()[1] == b"431"
        assert ask(server, b"GET /echo HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_too_many_fields_are_refused() -> None:
    with serve() as server:
        answer = ask(server, b"GET /echo?" + b"&".join(b"a=1" for _ in range(50)) + b" HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")


def test_several_requests_may_come_over_one_connection() -> None:
    with serve() as server:
        answer = ask(server, b"GET /echo?1 HTTP/1.1\r\n\r\nGET /echo?2 HTTP/1.1\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 2


def test_who_sends_a_byte_now_and_then_is_dropped() -> None:
    stop = threading.Event()
    with serve(seconds_max=0.5) as server, connect(server) as connection:

        def drip() -> None:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /echo HTTP/1.1\r\nX: ")
                while not stop.wait(0.05):
                    connection.sendall(b"a")

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert read_all(connection) == b""  # else the socket's own limit ends this with an error
        stop.set()
        dripping.join()


def test_who_reads_nothing_is_dropped_and_holds_nobody_up() -> None:
    with serve(seconds_max=0.5, connections_max=2) as server, connect(server) as connection:
        connection.sendall(b"GET /much HTTP/1.1\r\n\r\n")
        assert ask(server, b"GET /echo HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")
        connection.settimeout(20)
        # Its place is free again once the answer could not leave.
        for _ in range(2):
            assert server._places.acquire(timeout=20)


def test_a_crowd_is_turned_away_and_the_next_is_served() -> None:
    with serve(connections_max=2) as server:
        with connect(server) as first, connect(server) as second:
            first.sendall(b"GET /echo HTTP/1.1\r\n")
            second.sendall(b"GET /echo HTTP/1.1\r\n")
            with connect(server) as third:
                assert read_all(third) == b""
            for one in (first, second):
                one.sendall(b"\r\n")
                assert one.recv(20).startswith(b"HTTP/1.1 200")
        for _ in range(2):
            assert server._places.acquire(timeout=20)


def test_a_place_is_free_again_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serve(connections_max=1) as server:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            assert ask(server, b"GET /echo HTTP/1.1\r\n" + HOST + b"\r\n") == b""
        assert ask(server, b"GET /echo HTTP/1.1\r\n" + HOST + b"\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "host", ["page.example", "127.0.0.1.page.example", "localhost.page.example:80", "[2001:db8::1]"]
)
def test_a_host_of_another_name_gets_nothing(host: str) -> None:
    with serve() as server:
        answer = ask(server, b"GET /echo HTTP/1.1\r\nHost: " + host.encode() + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403")
    assert b"[(" not in answer


@pytest.mark.parametrize(("host", "is_local"), [("localhost", True), ("[::1]:80", True), ("page.example:80", False)])
def test_a_page_whose_name_leads_to_an_open_port_is_no_program_of_this_machine(host: str, is_local: bool) -> None:
    """A browser here asks from loopback for it, and it could read what is shown to this machine alone."""
    server = Server("0.0.0.0", 0, {"/": lambda request: (200, "text/plain", str(request.is_local).encode())})  # noqa: S104
    server.start()
    try:
        port = server.server_address[1]
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\nHost: " + host.encode() + b"\r\n\r\n")
            answer = read_all(connection)
    finally:
        server.stop()
    assert answer.endswith(str(is_local).encode())
