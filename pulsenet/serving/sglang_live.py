"""Patches for an SGLang server's live weights, by the loader that it lets a user bring.

The node's side. Transactions, checks and answers are those of the vLLM adapter
(:mod:`pulsenet.serving.vllm.engine`); only how orders reach the workers differs. SGLang calls a custom loader only
when it is idle or paused, so whatever must not wait for that goes by a file. The routes and their rules are those of
SGLang 0.5.23's sources; none of it ever ran on SGLang itself (docs/engines.md).
"""

from __future__ import annotations

import base64
import json
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pulsenet.errors import StructureError, UnavailableError
from pulsenet.serving.sglang import LOAD_SECONDS_MAX, Routes
from pulsenet.serving.vllm.engine import UpdateTimes, VllmEngine
from pulsenet.serving.vllm.exchange import PAUSED_NAME, Order, write_whole

HOOK: Final = "pulsenet.serving.sglang_hook.load_weights"
ORDER_NAME: Final = "pulsenet-order"
BACKGROUND_NAME: Final = "order.json"
"""In the private directory: an order that needs no pause."""
ACKNOWLEDGE_SECONDS_MAX: Final = 30.0
"""A rank takes an order in the background at once, unless it compares or stages at that moment."""
POLL_SECONDS: Final = 0.005
PROBE_SECONDS: Final = 1.0
_SINGLE: Final = {"pp_size": "pipeline stages", "dp_size": "replicas", "nnodes": "machines"}


class SglangPatchEngine(VllmEngine):
    """An :class:`pulsenet.Engine` that patches a running SGLang in place, two-phase.

    SGLang must run on this machine and as this user, with
    ``--custom-weight-loader pulsenet.serving.sglang_hook.load_weights`` and a model directory as ``--model-path``.

    Args:
        url: Such as ``http://127.0.0.1:30000``.
        directory: Private directory of this node; the workers read and write in it.
        api_key: SGLang's ``--admin-api-key``, or ``--api-key`` if there is no other.
        on_times: Told how long each committed update took.

    Raises:
        ConfigError: The URL is none of an SGLang server.
        StorageError: The directory cannot be used, or another node uses it.
    """

    def __init__(
        self,
        url: str,
        directory: Path | str,
        *,
        api_key: str | None = None,
        on_times: Callable[[UpdateTimes], None] | None = None,
    ) -> None:
        super().__init__(SglangControl(url, Path(directory), api_key), directory, on_times=on_times)


class SglangControl:
    """What :class:`pulsenet.serving.vllm.control.Control` promises, of an SGLang server.

    Args:
        url: Of the server.
        directory: The private directory.
        api_key: As above.
        timeout_seconds: For one request.
        acknowledge_seconds_max: For one order in the background.
    """

    def __init__(
        self,
        url: str,
        directory: Path,
        api_key: str | None = None,
        *,
        timeout_seconds: float = LOAD_SECONDS_MAX,
        acknowledge_seconds_max: float = ACKNOWLEDGE_SECONDS_MAX,
    ) -> None:
        self._routes = Routes(url, api_key, timeout_seconds)
        self._directory = directory
        self._acknowledge_seconds_max = acknowledge_seconds_max
        self._rank_count: int | None = None

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self._routes.url

    def count_ranks(self) -> int:
        """Return SGLang's tensor-parallel size.

        Raises:
            StructureError: It was started in a way that cannot be patched; the message says how.
        """
        settings = self._routes.settings()
        check_settings(settings)
        self._rank_count = int(settings.get("tp_size", 1))
        return self._rank_count

    def attach(self, order: Mapping[str, Any]) -> None:
        """Give every rank the order ATTACH, between two steps: the loader is the model's own code.

        Raises:
            StructureError: The model SGLang was started from is no directory of this machine.
        """
        model = self._routes.model_path()
        if not order.get("checkpoint") and not Path(model).is_dir():
            raise StructureError(f"SGLang was started from {model!r}: start it from a model directory of this machine")
        self._give({**order, "checkpoint": order.get("checkpoint") or model})

    def open(self) -> None:
        """Let every rank note that an update begins."""
        self._tell({"what": "open"})

    def order(self, order: Mapping[str, Any]) -> None:
        """Give every rank an order: by SGLang's call if the node paused it, for it may write; else in the background.

        An engine that serves has nothing to write: what is committed then changes no weight, and what is rolled back
        was not committed.
        """
        if order["order"] in (Order.COMMIT, Order.ROLLBACK) and self._is_paused():
            self._give(order)
        else:
            self._tell({"what": "order", "order": dict(order)})

    def close(self, label: str | None) -> None:
        """Let every rank finish, and name the weights."""
        self._tell({"what": "close"})
        if label is not None:
            self.set_label(label)

    def set_label(self, label: str) -> None:
        """Name the weights."""
        self._routes.set_label(label)

    def label(self) -> str:
        """Return the name of the weights."""
        return self._routes.label()

    def reload(self, place: Path | None) -> None:
        """:class:`pulsenet.serving.SglangEngine` does that."""
        raise UnavailableError("an SGLang that cannot be patched is kept current by SglangEngine")

    def checksums(self) -> object:
        """Not asked of an SGLang that is patched."""
        return None

    def is_sleeping(self) -> bool:
        """SGLang does not say; memory that it released and took back is found by its old bits."""
        return False

    def pause(self) -> None:
        """Put running requests back into the queue; their keys and values are dropped with the commit."""
        self._routes.pause()

    def resume(self) -> None:
        """Let requests go on."""
        self._routes.resume()

    def _find_rank_count(self) -> int:
        return self.count_ranks() if self._rank_count is None else self._rank_count

    def _is_paused(self) -> bool:
        return (self._directory / PAUSED_NAME).exists()

    def _give(self, order: Mapping[str, Any]) -> None:
        """Let SGLang call the hook on every rank. It calls no loader while it computes, so it is paused meanwhile."""
        payloads = [encode_order(order)] * self._find_rank_count()
        was_paused = self._is_paused()
        if not was_paused:
            self._routes.pause("in_place")
        try:
            self._routes.call_loader(HOOK, payloads, must_flush=order["order"] != Order.ATTACH)
        finally:
            if not was_paused:
                self._routes.resume()

    def _tell(self, message: Mapping[str, Any]) -> None:
        """Put an order into the directory until every rank has taken it."""
        rank_count, identifier = self._find_rank_count(), secrets.token_hex(8)
        path = self._directory / BACKGROUND_NAME
        write_whole(path, json.dumps({**message, "id": identifier}).encode())
        try:
            self._await_acknowledgements(identifier, rank_count)
        finally:
            path.unlink(missing_ok=True)

    def _await_acknowledgements(self, identifier: str, rank_count: int) -> None:
        give_up_at = time.monotonic() + self._acknowledge_seconds_max
        probe_at = time.monotonic() + PROBE_SECONDS
        waiting = set(range(rank_count))
        while True:
            waiting = {rank for rank in waiting if not self._has_taken(rank, identifier)}
            if not waiting:
                return
            now = time.monotonic()
            if now >= give_up_at:
                raise UnavailableError(f"rank {min(waiting)} of SGLang at {self.url} takes no order: see SGLang's log")
            if now >= probe_at:
                probe_at = now + PROBE_SECONDS
                self.label()  # raises if SGLang is gone
            time.sleep(POLL_SECONDS)

    def _has_taken(self, rank: int, identifier: str) -> bool:
        try:
            return acknowledgement_path(self._directory, rank).read_bytes() == identifier.encode()
        except OSError:
            return False


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse an SGLang that cannot be patched in place.

    Raises:
        StructureError: The message says why, and what to change.
    """
    if HOOK not in (settings.get("custom_weight_loader") or ()):
        raise StructureError(f"SGLang does not know the loader: start it with --custom-weight-loader {HOOK}")
    for name, text in _SINGLE.items():
        if int(settings.get(name) or 1) > 1:
            raise StructureError(f"SGLang runs {settings[name]} {text}: start one SGLang for each, with its own node")
    if settings.get("quantization"):
        raise StructureError(f"SGLang quantises its weights ({settings['quantization']}): start it without")
    if settings.get("speculative_algorithm"):
        raise StructureError("SGLang serves with a draft model, which patches do not reach: start it without")
    if settings.get("enable_lora") or settings.get("lora_paths"):
        raise StructureError("SGLang serves LoRA adapters, with which patches were never tested: start it without")


def acknowledgement_path(directory: Path, rank: int) -> Path:
    """Return where a rank writes which order it took last."""
    return directory / f"taken-{rank}"


def call_resume(url: str) -> None:
    """Let the requests of an SGLang go on whose node died; one with a key refuses, and waits for the next node."""
    Routes(url, None, LOAD_SECONDS_MAX).resume()


def encode_order(order: Mapping[str, Any]) -> str:
    """Return an order as SGLang passes it to a custom loader: one named tensor of bytes.

    SGLang takes tensors in Python's object format, which its workers read with a list of allowed names. This spells the
    one value that is needed, ``[(ORDER_NAME, torch.ByteTensor([...]))]``; pulsenet itself never reads that format.
    """
    text = json.dumps(dict(order)).encode()
    numbers = b"".join(b"K" + bytes((byte,)) for byte in text)
    name = ORDER_NAME.encode()
    spelled = (
        b"\x80\x02"  # protocol 2
        + b"]X"
        + struct.pack("<I", len(name))
        + name
        + b"ctorch\nByteTensor\n"
        + b"]("
        + numbers
        + b"e"  # a list of all bytes
        + b"\x85R"  # ByteTensor(list)
        + b"\x86a."  # (name, tensor), appended
    )
    return base64.b64encode(spelled).decode()
