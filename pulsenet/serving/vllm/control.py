"""vLLM's control routes, as the node uses them; a few small requests per update, on loopback."""

from __future__ import annotations

import http.client
import json
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from pulsenet.errors import ConfigError, UnavailableError

REQUEST_SECONDS_MAX: Final = 120.0
"""One order's time: a full update of a large model is written inside one request."""
RELOAD_SECONDS_MAX: Final = 1800.0
"""A large model is read from disk inside one request."""
PROBE_SECONDS_MAX: Final = 5.0
HEALTH_SECONDS: Final = 1.0
"""An answer that takes longer is waited for as long as the engine lives: how often that is looked at."""
REPLY_SIZE_BYTES_MAX: Final = 1 << 20
CHECKSUMS_SIZE_BYTES_MAX: Final = 64 << 20
"""One of each parameter of each rank: some hundred bytes, ten thousand times."""

HEALTH_PATH: Final = "/health"
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class EngineGoneError(UnavailableError):
    """The engine died, or its server is ending or away: it answers again once it was started anew."""


class EngineAsleepError(UnavailableError):
    """The engine lives, and stands still for somebody else."""


class Control(Protocol):
    """What the node asks of an engine besides orders to its ranks.

    Every method raises :class:`pulsenet.errors.UnavailableError` when the engine does not do it.
    """

    @property
    def url(self) -> str:
        """Where a watchdog reaches the engine; empty if it cannot."""

    def count_ranks(self) -> int:
        """Return how many ranks the engine has, replicas included."""

    def attach(self, order: Mapping[str, Any]) -> None:
        """Give every rank the order ATTACH."""

    def open(self) -> None:
        """Begin an update."""

    def order(self, order: Mapping[str, Any]) -> None:
        """Give every rank an order of the update that is open."""

    def close(self, label: str | None) -> None:
        """End the update; with a label, it names the weights from here on."""

    def set_label(self, label: str) -> None:
        """Name the weights."""

    def reload(self, place: Path | None) -> None:
        """Let the engine load a model directory, or again what it loaded last, as it did when it started. Slow."""

    def checksums(self) -> object:
        """Return the engine's own checksums of all its parameters, packed ones too; equal bits give equal ones."""

    def label(self) -> str:
        """Return the name of the weights."""

    def is_sleeping(self) -> bool:
        """Say whether the engine stands still: asleep, without its weights maybe, or paused."""

    def pause(self) -> None:
        """Hold every request where it is and forget all cached keys and values."""

    def resume(self) -> None:
        """Let requests go on; does nothing if they do."""


class HttpControl:
    """The routes of a vLLM server on this machine.

    Args:
        url: Such as ``http://127.0.0.1:8000``.
        timeout_seconds: For one request.

    Raises:
        ConfigError: The URL does not name a port of this machine.
    """

    def __init__(self, url: str, *, timeout_seconds: float = REQUEST_SECONDS_MAX) -> None:
        self._url = url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        try:
            parts = urlsplit(self._url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url} is no URL of an engine ({error}): give one like http://127.0.0.1:8000") from error
        if parts.scheme != "http" or host is None or parts.path or parts.query:
            raise ConfigError(f"{url} is no URL of an engine: give one like http://127.0.0.1:8000")
        if host not in LOOPBACK:
            raise ConfigError(
                f"{url} is not on this machine: weights cross by shared memory, and the control routes have no password"
            )
        self._host, self._port = host, port or 80

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self._url

    def count_ranks(self) -> int:
        """Return the world size that the server states.

        Raises:
            UnavailableError: It states none.
        """
        value = self._call("GET", "/get_world_size").get("world_size")
        if type(value) is not int or value < 1:
            raise UnavailableError(f"{self._url} states a world size of {value!r}")
        return value

    def attach(self, order: Mapping[str, Any]) -> None:
        """``POST /init_weight_transfer_engine``."""
        self._call("POST", "/init_weight_transfer_engine", {"init_info": dict(order)})

    def open(self) -> None:
        """``POST /start_weight_update``."""
        self._call("POST", "/start_weight_update")

    def order(self, order: Mapping[str, Any]) -> None:
        """``POST /update_weights``."""
        self._call("POST", "/update_weights", {"update_info": dict(order)})

    def close(self, label: str | None) -> None:
        """``POST /finish_weight_update``."""
        self._call("POST", "/finish_weight_update", {"weight_version": label})

    def set_label(self, label: str) -> None:
        """``POST /update_weight_version``."""
        self._call("POST", "/update_weight_version", {"new_version": label})

    def reload(self, place: Path | None) -> None:
        """``POST /collective_rpc``: each worker's ``reload_weights``."""
        body = {"method": "reload_weights", "kwargs": {} if place is None else {"weights_path": str(place)}}
        self._call("POST", "/collective_rpc", body, timeout_seconds=RELOAD_SECONDS_MAX)

    def checksums(self) -> object:
        """``POST /weight_checker``."""
        body, size_max = {"action": "checksum"}, CHECKSUMS_SIZE_BYTES_MAX
        return self._call("POST", "/weight_checker", body, reply_size_bytes_max=size_max).get("checksums")

    def label(self) -> str:
        """``GET /weight_info``, of an engine that lives: the server knows the label without it."""
        self._check_health()
        return str(self._call("GET", "/weight_info", timeout_seconds=PROBE_SECONDS_MAX).get("weight_version"))

    def is_sleeping(self) -> bool:
        """``GET /is_sleeping``, which vLLM affirms of a paused engine too."""
        return self._call("GET", "/is_sleeping", timeout_seconds=PROBE_SECONDS_MAX).get("is_sleeping") is True

    def pause(self) -> None:
        """``POST /pause``: requests in flight are kept, caches dropped."""
        self._call("POST", "/pause?mode=keep&clear_cache=true")

    def resume(self) -> None:
        """``POST /resume``."""
        self._call("POST", "/resume")

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_seconds: float | None = None,
        reply_size_bytes_max: int = REPLY_SIZE_BYTES_MAX,
    ) -> dict[str, Any]:
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
            self._wait_for_answer(connection, seconds)
            response = connection.getresponse()
            reply = response.read(reply_size_bytes_max)
        except ConnectionError as error:
            raise EngineGoneError(self._describe(path, error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(self._describe(path, error)) from error
        finally:
            connection.close()
        if response.status != 200:
            raise UnavailableError(_explain(self._url, path, response.status, reply))
        try:
            value = json.loads(reply or b"{}")
        except ValueError as error:
            raise UnavailableError(f"the engine at {self._url} answers {path} with something else than JSON") from error
        return value if isinstance(value, dict) else {}

    def _wait_for_answer(self, connection: http.client.HTTPConnection, seconds: float) -> None:
        """Wait for the first byte, as long as the engine lives.

        vLLM's server never answers what it had asked an engine that then died, and does not end before it has.
        """
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        give_up_at = time.monotonic() + seconds
        while not poll.poll(1000 * min(seconds, HEALTH_SECONDS)):
            if time.monotonic() >= give_up_at:
                raise TimeoutError(f"silent for {seconds:.0f} s")
            self._check_health()

    def _check_health(self) -> None:
        """Raise :class:`EngineGoneError` if the server says that its engine is dead, or takes no connection."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=PROBE_SECONDS_MAX)
        try:
            connection.request("GET", HEALTH_PATH)
            response = connection.getresponse()
            response.read(REPLY_SIZE_BYTES_MAX)
        except ConnectionError as error:
            raise EngineGoneError(self._describe(HEALTH_PATH, error)) from error
        except (OSError, http.client.HTTPException):
            return  # busy: whoever waits for an answer has a deadline of its own
        finally:
            connection.close()
        if response.status == http.client.SERVICE_UNAVAILABLE:
            raise EngineGoneError(f"the engine behind {self._url} is dead: start vLLM again")

    def _describe(self, path: str, error: Exception) -> str:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return f"the engine at {self._url} does not answer {path}: {reason}"


def _explain(url: str, path: str, status: int, reply: bytes) -> str:
    """Return what an answer that is no success means, and what to do."""
    text = reply.decode("utf-8", "replace").strip()[:500]
    if status == 404:
        return f"the engine at {url} has no route {path}: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
    if "Weight transfer not configured" in text or "weight_transfer_config" in text:
        return (
            f"the engine at {url} takes no patches: start it with --weight-transfer-config "
            '\'{"backend": "pulsenet"}\' and pulsenet installed beside it'
        )
    return f"the engine at {url} answers {path} with {status}: {text}"
