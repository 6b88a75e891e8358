"""The OpenAI API of the engine beside this node, with the weight versions of each answer: ``--openai-port``.

Threads, as :mod:`pulsenetd.admin`: a request waits for the engine, not for the node's event loop. Only these routes
are passed on; an engine's control routes have no password and stay where they are.
"""

from __future__ import annotations

import errno
import http.client
import io
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import urlsplit

from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenetd.engines.openai_answers import Stamp, StreamStamper, encode_error, stamp_body
from pulsenetd.engines.openai_clients import HangUpWatch, Incoming, MemoryBudget
from pulsenetd.engines.openai_upstream import Upstream, find_stamp, read_stamp
from pulsenetd.errors import AddressInUseError
from pulsenetd.http_hosts import find_family, join_host, takes_host
from pulsenetd.listening import ListeningServer
from pulsenetd.logs import logger

ROUTES: Final = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET"}
CONNECTIONS_MAX: Final = 256
"""Each has a thread; who comes later is told to come again."""
BODY_SIZE_BYTES_MAX: Final = 8 << 20
"""Of a request; a prompt of a million token ids is as large."""
BODIES_SIZE_BYTES_MAX: Final = 64 << 20
"""Of all requests that are being read or passed on; who comes later is told to come again."""
HEAD_SECONDS_MAX: Final = 30.0
"""For the whole head of a request, the wait for it included: drops of it hold no connection."""
BODY_SECONDS_MAX: Final = 60.0
LINGER_SECONDS_MAX: Final = 5.0
"""For what a client still sends after it was refused."""
ANSWER_SIZE_BYTES_MAX: Final = 64 << 20
"""Of an answer that is not streamed: it is held in memory once."""
ANSWERS_SIZE_BYTES_MAX: Final = 256 << 20
"""Of all of those at one time."""
IDLE_SECONDS_MAX: Final = 30.0
"""For a request's next bytes, and for a client to take bytes of an answer."""
SILENCE_SECONDS_MAX: Final = 600.0
"""For the engine's next bytes: a full update holds requests up for as long as it takes."""
CONNECT_SECONDS_MAX: Final = 5.0
PIECE_SIZE_BYTES: Final = 1 << 16
RETRY_SECONDS: Final = 5
"""What a client that comes too early is told to wait."""
ROUTE_NAMES: Final = {"/v1/completions": "completions", "/v1/chat/completions": "chat", "/v1/models": "models"}
"""What requests are counted as; else ``other``."""
REQUEST_HEADERS: Final = ("Content-Type", "Authorization", "Accept", "X-Request-Id")
"""Passed on to the engine; vLLM checks the key of ``--api-key`` itself."""


class _RefusedError(Exception):
    """An answer that is an error of our own."""

    def __init__(self, status: int, code: str, message: str, *, closes: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.closes = closes
        """The rest of the request was not read, so that no other can follow it."""


class OpenAiServer:
    """Serves until :meth:`close`.

    Args:
        host: To listen on.
        port: To listen on; 0 picks a free one.
        find_upstream: Returns the engine; raises ``UnavailableError`` with the reason while it cannot be asked.
        count: Adds to a counter of the node: its name, its labels joined by ``-``, how much. From any thread.

    Raises:
        AddressInUseError: The port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        find_upstream: Callable[[], Upstream],
        *,
        count: Callable[[str, str, float], None] = lambda name, labels, value: None,
    ) -> None:
        self._watch = HangUpWatch()
        try:
            self._server = _Server((host, port), _make_handler(find_upstream, self._watch, count))
        except OSError as error:
            self._watch.close()
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror})"
            raise AddressInUseError(f"OpenAI port {port} on {host} {reason}; give another --openai-port") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="openai", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL for applications."""
        host, port = self._server.server_address[:2]
        return f"http://{join_host(str(host), int(port))}/v1"

    def close(self) -> None:
        """Take no more requests, cut those that run, and end connections that wait for another."""
        self._server.shutdown()
        self._server.server_close()
        self._watch.close()
        self._server.end_connections()
        self._thread.join()


class _Server(ListeningServer):
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = find_family(address[0])
        self._free = threading.Semaphore(CONNECTIONS_MAX)
        self._mutex = threading.Lock()
        self._open: set[socket.socket] = set()
        self.bodies = MemoryBudget(BODIES_SIZE_BYTES_MAX)
        self.answers = MemoryBudget(ANSWERS_SIZE_BYTES_MAX)
        super().__init__(address, handler)

    def end_connections(self) -> None:
        """Let no open connection ask again; what is being answered is sent."""
        with self._mutex:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            with self._mutex:
                self._open.add(request)
            try:
                super().process_request(request, client_address)
            except BaseException:
                self._forget(request)
                raise
            return
        body = encode_error(429, "too_many_requests", f"{CONNECTIONS_MAX} connections are open: try again")
        head = f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: {RETRY_SECONDS}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        request.setblocking(False)
        with suppress(OSError):
            request.send(head.encode() + body)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        with self._mutex:
            self._open.discard(request)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over clients that went away; anything else is a fault of ours."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("a request to the OpenAI port failed")


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request that was read, and the engine it goes to."""

    method: str
    path: str
    body: bytearray | None
    """Emptied once the engine has it."""
    upstream: Upstream


class _Handler(BaseHTTPRequestHandler):
    timeout = IDLE_SECONDS_MAX
    disable_nagle_algorithm = True
    protocol_version = "HTTP/1.1"
    server_version = "pulsenet"
    sys_version = ""
    find_upstream: Callable[[], Upstream]
    watch: HangUpWatch
    count: Callable[[str, str, float], None]
    server: _Server
    _taken_bytes = 0
    """Of the server's budget, by the body that is held."""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = Incoming(self.connection, IDLE_SECONDS_MAX)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        self._incoming.give_up_at = time.monotonic() + HEAD_SECONDS_MAX
        super().handle_one_request()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the library itself refuses, such as a head that is too long."""
        self.close_connection = True
        self._send(code, "application/json", encode_error(code, "bad_request", message or self.responses[code][0]))

    def log_message(self, format: str, *args: object) -> None:
        """Requests are too many to log."""

    def _serve(self) -> None:
        try:
            try:
                self._pass_on(self._read_request())
            finally:
                self._give_body_back()
        except _RefusedError as refusal:
            self.close_connection = self.close_connection or refusal.closes
            headers = {"Retry-After": str(RETRY_SECONDS)} if refusal.status in (429, 503) else {}
            body = encode_error(refusal.status, refusal.code, refusal.message)
            self._send(refusal.status, "application/json", body, headers)
            if refusal.closes:
                self._linger()

    def _linger(self) -> None:
        """Drop the rest of what was refused: closed at once, a client that still sends never sees the answer."""
        self._incoming.give_up_at = time.monotonic() + LINGER_SECONDS_MAX
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while self.rfile.read1(PIECE_SIZE_BYTES):
                pass

    def _read_request(self) -> _Asked:
        self._incoming.give_up_at = float("inf")
        path = _find_path(self.path)
        wanted = ROUTES.get(path)
        if wanted is None:
            raise _RefusedError(404, "not_found", f"no route {path}; there are {', '.join(ROUTES)}", closes=True)
        if wanted != self.command:
            raise _RefusedError(405, "method_not_allowed", f"{path} takes {wanted}", closes=True)
        if not takes_host(str(self.server.server_address[0]), self.headers.get("Host", "")):
            raise _RefusedError(403, "host_not_allowed", "ask for localhost or a loopback address", closes=True)
        if wanted != "POST":
            # Its body would be read as the next request, past whatever checks them on the way.
            self.close_connection = self.close_connection or self._has_body()
        body = self._read_body() if wanted == "POST" else None
        try:
            upstream = type(self).find_upstream()
        except UnavailableError as error:
            raise _RefusedError(503, "engine_not_ready", str(error)) from error
        return _Asked(wanted, path, body, upstream)

    def _has_body(self) -> bool:
        return "Transfer-Encoding" in self.headers or self.headers.get_all("Content-Length", ["0"]) != ["0"]

    def _read_body(self) -> bytearray:
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1 or not lengths[0].isdecimal():
            raise _RefusedError(
                411, "length_required", "give the body's size in one Content-Length header", closes=True
            )
        size = int(lengths[0]) if len(lengths[0]) < 20 else BODY_SIZE_BYTES_MAX + 1
        if size > BODY_SIZE_BYTES_MAX:
            raise _RefusedError(413, "body_too_large", f"a body of more than {BODY_SIZE_BYTES_MAX} bytes", closes=True)
        if self.headers.get_content_type() != "application/json":
            # What a page in a browser can send without asking has another type.
            raise _RefusedError(415, "unsupported_media_type", "the body must be application/json", closes=True)
        if not self.server.bodies.take(size):
            raise _RefusedError(429, "too_many_requests", "other requests fill the memory: try again", closes=True)
        self._taken_bytes = size
        body, give_up_at = bytearray(), time.monotonic() + BODY_SECONDS_MAX
        while len(body) < size:
            piece = self.rfile.read1(min(size - len(body), PIECE_SIZE_BYTES))
            if not piece or time.monotonic() > give_up_at:
                raise _RefusedError(408, "request_timeout", "the body did not come", closes=True)
            body += piece
        self.count("openai_bytes", "received", size)
        return body

    def _give_body_back(self) -> None:
        taken, self._taken_bytes = self._taken_bytes, 0
        self.server.bodies.give_back(taken)

    def _pass_on(self, asked: _Asked) -> None:
        parts = urlsplit(asked.upstream.url)
        engine = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CONNECT_SECONDS_MAX)
        try:
            try:
                engine.connect()
            except OSError as error:
                raise _RefusedError(
                    503, "engine_gone", f"the engine does not answer: {error.strerror or error}"
                ) from error
            assert isinstance(engine.sock, socket.socket)
            engine.sock.settimeout(SILENCE_SECONDS_MAX)
            with self.watch.over(self.connection, engine.sock):
                self._answer(asked, self._ask(asked, engine))
        finally:
            engine.close()

    def _ask(self, asked: _Asked, engine: http.client.HTTPConnection) -> http.client.HTTPResponse:
        headers = {name: self.headers[name] for name in REQUEST_HEADERS if self.headers[name]}
        try:
            engine.request(asked.method, asked.path, asked.body, headers)
            if asked.body is not None:
                # An answer takes a thousand times as long, and nothing of the question is needed for it.
                asked.body.clear()
                self._give_body_back()
            return engine.getresponse()
        except TimeoutError as error:
            self.close_connection = True
            raise _RefusedError(504, "engine_timeout", f"no answer within {SILENCE_SECONDS_MAX:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise _RefusedError(502, "engine_gone", f"the engine went away: {error or type(error).__name__}") from error

    def _answer(self, asked: _Asked, response: http.client.HTTPResponse) -> None:
        kind = response.getheader("Content-Type") or "application/octet-stream"
        if kind.startswith("text/event-stream"):
            self._stream(asked, response, kind)
            return
        if response.length is None and not response.chunked:
            # Its end would be that of the connection, which looks the same when the engine dies.
            raise _RefusedError(502, "engine_gone", "the engine's answer has no length")
        pieces: list[bytes] = []
        try:
            self._read_answer(response, pieces)
            self._send_answer(asked, response, kind, b"".join(pieces))
        finally:
            self.server.answers.give_back(sum(map(len, pieces)))

    def _read_answer(self, response: http.client.HTTPResponse, pieces: list[bytes]) -> None:
        """Read all of an answer into ``pieces``, whose bytes are taken of the budget also if this raises."""
        size = 0
        while True:
            try:
                piece = response.read(PIECE_SIZE_BYTES)
            except (OSError, http.client.HTTPException) as error:
                text = f"the engine went away: {error or type(error).__name__}"
                raise _RefusedError(502, "engine_gone", text) from error
            if not piece:
                break
            size += len(piece)
            if size > ANSWER_SIZE_BYTES_MAX:
                text = f"an answer of more than {ANSWER_SIZE_BYTES_MAX} bytes: stream it"
                raise _RefusedError(502, "answer_too_large", text)
            if not self.server.answers.take(len(piece)):
                raise _RefusedError(503, "too_many_answers", "other answers fill the memory: try again, or stream it")
            pieces.append(piece)
        if response.length:
            raise _RefusedError(502, "engine_gone", f"the engine went away {response.length} bytes before the end")

    def _send_answer(self, asked: _Asked, response: http.client.HTTPResponse, kind: str, body: bytes) -> None:
        headers = {}
        if response.status == 200:
            stamp = read_stamp(response.getheader) or find_stamp(asked.upstream)
            if stamp is None:
                raise _RefusedError(503, "engine_not_ready", "the engine's weights lost their version meanwhile")
            body = stamp_body(body, stamp)
            headers = stamp_headers(stamp)
        retry = response.getheader("Retry-After")
        self._send(response.status, kind, body, headers | ({"Retry-After": retry} if retry else {}))

    def _stream(self, asked: _Asked, response: http.client.HTTPResponse, kind: str) -> None:
        """Pass events on as they come. A client that takes none holds the engine's connection up, and nothing else."""
        self.send_response(response.status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-cache")
        is_chunked = self.request_version != "HTTP/1.0"
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self.end_headers()
        stamper, trouble = StreamStamper(lambda: find_stamp(asked.upstream)), ""
        try:
            while piece := _read_piece(response):
                self._write(stamper.feed(piece), is_chunked)
        except (UnavailableError, RemoteProtocolError) as error:
            trouble = str(error)
        rest = stamper.finish()
        if not stamper.is_done:
            # The head is sent: what went wrong can only be said as an event, and by the lack of [DONE].
            error_event = encode_error(502, "engine_gone", trouble or "the engine ended the stream early")
            rest += b"\n\ndata: " + error_event + b"\n\n"
        self._write(rest, is_chunked)
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin an answer, and count it."""
        route = ROUTE_NAMES.get(_find_path(getattr(self, "path", "")), "other")
        self.count("openai_requests", f"{route}-{code}", 1)
        super().send_response(code, message)

    def _write(self, data: bytes, is_chunked: bool) -> None:
        if data:
            self.count("openai_bytes", "sent", len(data))
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    def _send(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.count("openai_bytes", "sent", len(body))
        self.wfile.write(body)


def _read_piece(response: http.client.HTTPResponse) -> bytes:
    """Return what the engine sent next; nothing at the end.

    Raises:
        UnavailableError: It went away, or is silent.
    """
    try:
        return response.read1(PIECE_SIZE_BYTES)
    except TimeoutError as error:
        raise UnavailableError(f"the engine sent nothing for {SILENCE_SECONDS_MAX:.0f} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"the engine went away: {error or type(error).__name__}") from error


def _find_path(target: str) -> str:
    try:
        return urlsplit(target).path
    except ValueError:
        return target  # no URL: no route either


def stamp_headers(stamp: Stamp) -> dict[str, str]:
    """Return the headers that say which versions wrote an answer."""
    return {"X-Pulsenet-Version-First": stamp.first, "X-Pulsenet-Version-Last": stamp.last}


def _make_handler(
    find: Callable[[], Upstream], over: HangUpWatch, counter: Callable[[str, str, float], None]
) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        find_upstream = staticmethod(find)
        watch = over
        count = staticmethod(counter)

    return Handler
