"""Keeps an SGLang server current through a directory of safetensors and its route that loads from disk.

Each version is written beside the one that is served. Then requests are retracted, the directory's ``current`` moves
on, SGLang loads it as a whole and the requests go on with new keys and values. The routes are those of SGLang's
documents; they were tested against a stand-in and never against SGLang itself (docs/engines.md).
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pulsenet.errors import ConfigError, IntegrityError, LocalProtocolError, PatchMismatchError, UnavailableError
from pulsenet.ids import Version
from pulsenet.serving.engine import EngineUpdate, RecordsUpdate, check_base, require_staged
from pulsenet.serving.files import FilesEngine

LOAD_SECONDS_MAX: Final = 1800.0
"""A large model is read from disk inside one request."""
REPLY_SIZE_BYTES_MAX: Final = 1 << 20


class SglangEngine:
    """An :class:`pulsenet.Engine` that serves by an SGLang server on this machine.

    SGLang does not give its weights back, so what is checked is the files' root and the label that SGLang reports. A
    server that was restarted, or loaded by somebody else, has another label and is loaded in full.

    Args:
        url: Such as ``http://127.0.0.1:30000``.
        directory: As in :class:`pulsenet.FilesEngine`; SGLang must reach it under the same path.
        companions: The model directory whose configuration and tokenizer go beside every version.
        api_key: SGLang's ``--admin-api-key``, or ``--api-key`` if there is no other.
        timeout_seconds: For one request.

    Raises:
        ConfigError: The URL is none of an SGLang server.
        StorageError: The directory cannot be used.
    """

    def __init__(
        self,
        url: str,
        directory: Path | str,
        *,
        companions: Path | str,
        api_key: str | None = None,
        timeout_seconds: float = LOAD_SECONDS_MAX,
    ) -> None:
        self._routes = Routes(url, api_key, timeout_seconds)
        self._files = FilesEngine(Path(directory).absolute(), companions=companions)
        self._version: Version | None = None
        self._staged: Version | None = None

    def close(self) -> None:
        """Let another process take the directory over; SGLang serves on."""
        self._files.close()

    @property
    def version(self) -> Version | None:
        """The version SGLang loaded last; ``None`` until this engine has loaded one, and after a failure."""
        return self._version

    def stage(self, update: EngineUpdate) -> None:
        """Write the whole new version beside the current one; see :meth:`FilesEngine.stage`."""
        self.rollback()
        if isinstance(update, RecordsUpdate):
            check_base(self._version, update)
            try:
                self._check_label()
            except IntegrityError as error:
                raise PatchMismatchError(str(error)) from error
        self._files.stage(update)
        self._staged = update.version

    def commit(self) -> None:
        """Let SGLang load the staged version while its requests wait.

        Raises:
            UnavailableError: SGLang did not pause, and nothing has changed; or it did not load or go on: then it is
                left paused until a full update was committed, and ``version`` is ``None``.
            StorageError: The directory did not take the version; SGLang serves the old one.
            LocalProtocolError: Nothing is staged.
        """
        version, held = require_staged(self._staged), self._version
        try:
            # Retracted and not kept in place: what was computed with the old weights must be forgotten.
            self._routes.pause()
            self._files.commit()
        except BaseException:
            if held is not None:
                with suppress(UnavailableError):
                    self._routes.resume()
            raise
        self._version = self._staged = None
        self._routes.load(self._files.current, str(version))
        label = self._routes.label()
        if label != str(version):
            raise UnavailableError(
                f"SGLang at {self._routes.url} was given version {version} and says that it holds '{label}': use a "
                "release whose /update_weights_from_disk takes weight_version"
            )
        self._routes.resume()
        self._version = version

    def rollback(self) -> None:
        """Remove the staged files; a load that failed is mended by a full update."""
        self._staged = None
        self._files.rollback()

    def read_back(self) -> None:
        """Compare SGLang's label, and the files' root; see :meth:`Engine.read_back`."""
        self._read_back(self._files.read_back)

    def read_back_sample(self) -> None:
        """Compare SGLang's label, and a sample of the files; see :meth:`Engine.read_back`."""
        self._read_back(self._files.read_back_sample)

    def _read_back(self, read_files: Callable[[], None]) -> None:
        if self._version is None:
            raise LocalProtocolError("no version is held: there is nothing to read back")
        self._check_label()
        held, self._version = self._version, None
        read_files()
        self._version = held

    def _check_label(self) -> None:
        """Make sure that SGLang holds what it was given last."""
        label = self._routes.label()
        if label != str(self._version):
            held, self._version = self._version, None
            raise IntegrityError(
                f"SGLang at {self._routes.url} says that it holds '{label}', not version {held}: it was restarted or "
                "loaded by somebody else, and is loaded in full"
            )


class Routes:
    """The routes of an SGLang server; each raises :class:`UnavailableError` if the server does not do it."""

    def __init__(self, url: str, api_key: str | None, timeout_seconds: float) -> None:
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url} is no URL of SGLang ({error}): give one like http://127.0.0.1:30000") from error
        if parts.scheme != "http" or host is None or parts.path or parts.query:
            raise ConfigError(f"{url} is no URL of SGLang: give one like http://127.0.0.1:30000")
        self._host, self._port = host, port or 80
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_seconds = timeout_seconds

    def pause(self, mode: str = "retract") -> None:
        """Compute nothing, with running requests put back into the queue or left in place; does no harm twice."""
        self._call("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Let requests go on."""
        self._call("POST", "/continue_generation", {})

    def load(self, path: Path, label: str) -> None:
        """Load a model directory into the weights, drop the caches and set the label.

        Raises:
            UnavailableError: SGLang does not answer, or did not load it.
        """
        body = {"model_path": str(path), "flush_cache": True, "weight_version": label}
        reply = self._call("POST", "/update_weights_from_disk", body)
        if reply.get("success") is not True:
            raise UnavailableError(f"SGLang at {self.url} did not load {path}: {reply.get('message')}")

    def label(self) -> str:
        """Return the name of the weights that are served."""
        return str(self._call("GET", "/model_info").get("weight_version"))

    def set_label(self, label: str) -> None:
        """Name the weights that are served; requests go on."""
        self._call("POST", "/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def model_path(self) -> str:
        """Return what SGLang was started from, or loaded last."""
        return str(self._call("GET", "/model_info").get("model_path"))

    def settings(self) -> dict[str, Any]:
        """Return how SGLang was started."""
        return self._call("GET", "/server_info")

    def call_loader(self, loader: str, payloads: Sequence[str], *, must_flush: bool) -> None:
        """Let every rank call a custom loader with its payload, inside the session that SGLang 0.5.23 wants."""
        self._call("POST", "/begin_weight_update", {"selector": "target"})
        try:
            body = {
                "serialized_named_tensors": list(payloads),
                "load_format": loader,
                "flush_cache": must_flush,
                "abort_all_requests": False,
                "selector": "target",
            }
            self._call("POST", "/update_weights_from_tensor", body)
        finally:
            self._call("POST", "/end_weight_update", {})

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, self._headers)
            response = connection.getresponse()
            reply = response.read(REPLY_SIZE_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise UnavailableError(f"SGLang at {self.url} does not answer {path}: {reason}") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            text = reply.decode("utf-8", "replace").strip()[:500]
            raise UnavailableError(f"SGLang at {self.url} answers {path} with {response.status}: {text}")
        try:
            value = json.loads(reply or b"{}")
        except ValueError as error:
            raise UnavailableError(f"SGLang at {self.url} answers {path} with something else than JSON") from error
        return value if isinstance(value, dict) else {}
