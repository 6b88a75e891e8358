"""An HTTP server that only reads: bounded in connections, in time and in what a request may say.

It runs in a thread of its own, so that it answers even when the event loop is stuck.
"""

from __future__ import annotations

import contextlib
import errno
import io
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import parse_qsl

from pulsenet.errors import PulsenetError
from pulsenetd.errors import AddressInUseError
from pulsenetd.http_hosts import find_family, is_loopback_host, is_name, join_host, takes_host
from pulsenetd.listening import ListeningServer
from pulsenetd.logs import logger

REQUEST_SECONDS_MAX: Final = 10.0
"""For a request to arrive whole, and again for its answer to leave."""

REQUEST_SIZE_BYTES_MAX: Final = 32 << 10
CONNECTIONS_MAX: Final = 64
"""Further ones are closed at once."""
FIELDS_MAX: Final = 8
TEXT: Final = "text/plain; charset=utf-8"

SAFETY_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""With every answer: nothing from elsewhere, in no frame, readable by no other origin, kept nowhere."""


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, beside the path."""

    query: Mapping[str, str]
    is_local: bool
    """Whether it comes from a program of this machine, and in no other name."""


Answer = tuple[int, str, bytes]
"""Status, content type and body."""

Route = Callable[[Request], Answer]


class _TooLargeError(Exception):
    """A request is longer than anybody needs."""


class Server(ListeningServer):
    """Listens at once; serves the given paths until :meth:`stop`.

    Args:
        host: Address to listen on.
        port: Port; 0 lets the system choose.
        routes: What answers each path. Called from threads of the server.
        seconds_max: For a request to arrive, and for its answer to leave.

    Raises:
        AddressInUseError: The port is taken, or cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        *,
        seconds_max: float = REQUEST_SECONDS_MAX,
    ) -> None:
        self.address_family = find_family(host)
        self.routes = routes
        self.seconds_max = seconds_max
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._connections: set[socket.socket] = set()
        self._thread: threading.Thread | None = None
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(
                    f"metrics port {port} on {host} is in use; stop its owner or give --metrics-port 0"
                ) from error
            raise AddressInUseError(f"cannot listen on {host}:{port} for metrics: {error}") from error

    @property
    def url(self) -> str:
        """Address people and scrapers use."""
        host, port = self.server_address[:2]
        return f"http://{join_host(str(host), int(port))}"

    def start(self) -> None:
        """Serve in a thread."""
        self._thread = threading.Thread(target=self.serve_forever, name="admin", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and listening; connections that are open end."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
        self.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread, while there are few."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()  # no thread could be had
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        self._connections.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.discard(request)
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say why a request failed, unless the other side is simply gone."""
        logger.debug("a request to the metrics port failed", exc_info=True)


class _Reader(io.RawIOBase):
    """What arrives on a connection, each request within its time and size."""

    def __init__(self, connection: socket.socket, seconds_max: float) -> None:
        self._connection = connection
        self._seconds_max = seconds_max
        self.begin()

    def begin(self) -> None:
        """A request may begin."""
        self._until = time.monotonic() + self._seconds_max
        self._left = REQUEST_SIZE_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise _TooLargeError
        left_seconds = self._until - time.monotonic()
        if left_seconds <= 0:
            raise TimeoutError
        self._connection.settimeout(left_seconds)
        count = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "pulsenet"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._reader = _Reader(self.connection, self.server.seconds_max)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._reader.begin()
        try:
            super().handle_one_request()
        except _TooLargeError:
            self.requestline, self.command = "", ""
            self.send_error(431)

    def do_GET(self) -> None:
        if self.headers.get("Transfer-Encoding") or self.headers.get("Content-Length", "0") != "0":
            self.close_connection = True  # a body is not read, so what follows is no request
        if not takes_host(str(self.server.server_address[0]), self.headers.get("Host", "")):
            # Not by a name of its own: a page in a browser could lead that here and read the answer.
            self._send(403, TEXT, b"ask for localhost or a loopback address\n")
            return
        path, _, query = self.path.partition("?")
        route = self.server.routes.get(path)
        if route is None:
            known = ", ".join(sorted(self.server.routes))
            self._send(404, TEXT, f"nothing here; try {known}\n".encode())
            return
        try:
            fields = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=FIELDS_MAX, errors="replace"))
        except ValueError:
            self._send(400, TEXT, b"too many fields\n")
            return
        try:
            answer = route(Request(fields, self._is_local()))
        except PulsenetError as error:
            answer = 503, TEXT, f"{error}\n".encode()  # a disk that fails, and whoever asks wants to know it
        self._send(*answer)

    def _is_local(self) -> bool:
        """Say whether a program of this machine asks; a page in a browser here, whose own name leads here, is none."""
        host = self.headers.get("Host", "")
        return is_loopback_host(str(self.client_address[0])) and not (host and is_name(host))

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._send(405, TEXT, b"this port only reads: GET or HEAD\n", Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no proper request, without repeating any of it."""
        self.close_connection = True
        self.request_version = self.protocol_version  # else what has no version would be answered without a status
        self._send(code, TEXT, f"{self.responses.get(code, ('error',))[0]}\n".encode())

    def _send(self, status: int, content_type: str, body: bytes, **headers: str) -> None:
        self.connection.settimeout(self.server.seconds_max)
        self.send_response(status)
        for name, value in {**SAFETY_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are too many to log."""
