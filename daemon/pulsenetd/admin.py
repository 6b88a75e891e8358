"""``/metrics``, ``/livez``, ``/readyz`` and ``/status`` over HTTP: read-only, on loopback by default.

The server runs in a thread of its own, so that it answers (and ``/livez`` can say no) even when the
event loop is stuck.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from pulsenetd.errors import AddressInUseError
from pulsenetd.http_hosts import find_family, join_host, takes_host

REQUEST_TIMEOUT_SECONDS: Final = 10.0

Checks = Mapping[str, bool]
"""Name of a check to whether it holds."""


def check_port(host: str, port: int) -> None:
    """Find out early whether the server will be able to listen: loading the network takes seconds.

    Raises:
        AddressInUseError: it cannot.
    """
    _listen(host, port, BaseHTTPRequestHandler).server_close()


class AdminServer:
    """Serves what the given functions say until :meth:`close`.

    Args:
        metrics: Returns the exposition text.
        live: Checks behind ``/livez``.
        ready: Checks behind ``/readyz``.
        status: Returns the node's state as plain values.

    Raises:
        AddressInUseError: The port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        metrics: Callable[[], bytes],
        live: Callable[[], Checks],
        ready: Callable[[], Checks],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        routes: dict[str, Callable[[bool], tuple[int, str, bytes]]] = {
            "/metrics": lambda _: (200, "text/plain; version=0.0.4; charset=utf-8", metrics()),
            "/livez": lambda verbose: _answer_checks(live(), verbose),
            "/readyz": lambda verbose: _answer_checks(ready(), verbose),
            "/status": lambda _: (200, "application/json", json.dumps(status()).encode()),
        }
        self._server = _listen(host, port, _make_handler(routes))
        self._thread = threading.Thread(target=self._server.serve_forever, name="admin", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address people and scrapers use."""
        host, port = self._server.server_address[:2]
        return f"http://{join_host(str(host), int(port))}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = find_family(address[0])
        super().__init__(address, handler)


def _listen(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> _Server:
    try:
        return _Server((host, port), handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"metrics port {port} on {host} is in use; stop its owner or give --metrics-port 0"
            ) from error
        raise AddressInUseError(f"cannot listen on {host}:{port} for metrics: {error}") from error


def _answer_checks(checks: Checks, verbose: bool) -> tuple[int, str, bytes]:
    status = 200 if all(checks.values()) else 503
    lines = [f"[{'+' if holds else '-'}] {name}" for name, holds in checks.items()]
    body = "\n".join(lines) if verbose or status != 200 else "ok"
    return status, "text/plain; charset=utf-8", (body + "\n").encode()


def _make_handler(
    routes: Mapping[str, Callable[[bool], tuple[int, str, bytes]]],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server: _Server
        timeout = REQUEST_TIMEOUT_SECONDS
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not takes_host(str(self.server.server_address[0]), self.headers.get("Host", "")):
                # Not by a name of its own: a page in a browser could lead that here and read the answer.
                self._send(403, "text/plain; charset=utf-8", b"ask for localhost or an IP address\n")
                return
            path, _, query = self.path.partition("?")
            route = routes.get(path)
            if route is None:
                known = ", ".join(sorted(routes))
                self._send(404, "text/plain; charset=utf-8", f"nothing here; try {known}\n".encode())
            else:
                self._send(*route("verbose" in query.split("&")))

        def _send(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are too many to log."""

    return Handler
