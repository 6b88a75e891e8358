"""``/metrics``, ``/livez``, ``/readyz``, ``/status`` and the status page: read-only, on loopback by default."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pulsenetd.page.document import ASSETS, draw_page, read_asset
from pulsenetd.read_only_http import TEXT, Answer, Request, Route, Server

Checks = Mapping[str, bool]
"""Name of a check to whether it holds."""


def check_port(host: str, port: int) -> None:
    """Find out early whether the server will be able to listen: loading the network takes seconds.

    Raises:
        AddressInUseError: it cannot.
    """
    Server(host, port, {}).stop()


class AdminServer:
    """Serves what the given functions say until :meth:`close`.

    Args:
        host: Address to listen on.
        port: Port; 0 lets the system choose.
        metrics: Returns the exposition text.
        live: Checks behind ``/livez``.
        ready: Checks behind ``/readyz``.
        status: Returns the node's state as plain values.
        history: Returns the samples of the last hours; without it there is no page.
        log: Returns the log lines of at least a level that hold a text.

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
        history: Callable[[], Mapping[str, Any]] | None = None,
        log: Callable[[str, str], Mapping[str, Any]] | None = None,
    ) -> None:
        self._status = status
        self._history = history
        self._log = log
        routes: dict[str, Route] = {
            "/metrics": lambda _: (200, "text/plain; version=0.0.4; charset=utf-8", metrics()),
            "/livez": lambda request: _answer_checks(live(), "verbose" in request.query),
            "/readyz": lambda request: _answer_checks(ready(), "verbose" in request.query),
            "/status": self._answer_status,
        }
        if history is not None and log is not None:
            routes["/"] = self._answer_page
            routes |= {path: _serve_file(name, content_type) for path, (name, content_type) in ASSETS.items()}
        self._server = Server(host, port, routes)
        self._server.start()

    @property
    def url(self) -> str:
        """Address people and scrapers use."""
        return self._server.url

    def close(self) -> None:
        """Stop serving."""
        self._server.stop()

    def _answer_status(self, request: Request) -> Answer:
        status = dict(self._status())
        if "history" in request.query and self._history is not None:
            status["history"] = self._history()
        if "log" in request.query:
            status["log"] = self._find_lines(request)
        return 200, "application/json", json.dumps(status).encode()

    def _answer_page(self, request: Request) -> Answer:
        assert self._history is not None
        status = {**self._status(), "history": self._history(), "log": self._find_lines(request)}
        return 200, "text/html; charset=utf-8", draw_page(status)

    def _find_lines(self, request: Request) -> Mapping[str, Any] | None:
        """Return the log lines asked for; none to other machines, whatever they hold."""
        if self._log is None or not request.is_local:
            return None
        return self._log(request.query.get("level", ""), request.query.get("text", ""))


def _answer_checks(checks: Checks, verbose: bool) -> Answer:
    status = 200 if all(checks.values()) else 503
    lines = [f"[{'+' if holds else '-'}] {name}" for name, holds in checks.items()]
    body = "\n".join(lines) if verbose or status != 200 else "ok"
    return status, TEXT, (body + "\n").encode()


def _serve_file(name: str, content_type: str) -> Route:
    return lambda _: (200, content_type, read_asset(name))
