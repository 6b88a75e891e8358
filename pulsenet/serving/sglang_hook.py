"""The adapter inside each worker of SGLang: its ``--custom-weight-loader`` calls :func:`load_weights`.

Orders that write come by SGLang's own call, between two steps of its scheduler. That call waits for an engine that
serves to be idle, so orders that only read, or change nothing that is computed with, come by a file in the node's
directory, which a thread watches. Answers are files, as vLLM's workers write them; nothing here raises, because
SGLang does not catch what a loader raises. Never run on SGLang itself (docs/engines.md).
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from pulsenet.errors import StorageError
from pulsenet.serving.sglang_live import BACKGROUND_NAME, ORDER_NAME, acknowledgement_path, call_resume
from pulsenet.serving.vllm.exchange import check_private, write_whole
from pulsenet.serving.vllm.rank import RankWeights
from pulsenet.serving.vllm.servant import RankServant
from pulsenet.serving.vllm.watchdog import Watchdog

LOOK_SECONDS: Final = 0.02
"""How often the thread looks for an order in the background."""


class RankHook:
    """One worker's hands; what :func:`load_weights` calls.

    Args:
        find_place: Returns rank and number of ranks; asked at the first call, when SGLang's groups exist.
    """

    def __init__(self, find_place: Callable[[], tuple[int, int]]) -> None:
        self._find_place = find_place
        self._mutex = threading.Lock()
        self._model: torch.nn.Module | None = None
        self._seen = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.servant: RankServant | None = None
        self.watchdog: Watchdog | None = None

    def __call__(self, model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Carry out the order that the only tensor spells, as UTF-8 of JSON."""
        try:
            ((name, tensor),) = named_tensors
            if name != ORDER_NAME:
                raise ValueError(f"a tensor named {name!r}")
            order = json.loads(bytes(tensor.cpu().tolist()))
            with self._mutex:
                self._take(model, order)
        except Exception as error:
            # Nowhere to answer; the node hears silence, which counts as a failure of this rank.
            print(f"pulsenet: SGLang's loader was given something else than an order: {error}", flush=True)

    def look(self) -> None:
        """Carry out the order that lies in the node's directory, if it is a new one."""
        with self._mutex:
            servant = self.servant
            if servant is None or servant.directory is None:
                return
            try:
                raw = json.loads((servant.directory / BACKGROUND_NAME).read_bytes())
                identifier = str(raw["id"])
                if identifier == self._seen:
                    return
                # Also one that cannot be carried out is looked at once.
                self._seen = identifier
                match raw:
                    case {"what": "open" | "close"}:
                        servant.note_open(raw["what"] == "open")
                    case {"what": "order", "order": dict(order)}:
                        servant.take(order)
                    case _:
                        raise StorageError(f"an order of the node is damaged: {raw}", "damaged")
                write_whole(acknowledgement_path(servant.directory, servant.rank), identifier.encode())
            except FileNotFoundError:
                return
            except Exception as error:
                print(f"pulsenet: an order in the background cannot be carried out: {error}", flush=True)

    def close(self) -> None:
        """Stop the threads and let go of what is staged."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self.watchdog is not None:
            self.watchdog.stop()
        if self.servant is not None:
            self.servant.close()

    def _take(self, model: torch.nn.Module, order: Mapping[str, Any]) -> None:
        if self.servant is None:
            self._begin(model)
        assert self.servant is not None
        if model is not self._model:
            raise ValueError("a second model: drafts are not patched")
        is_new_place = self.servant.directory is None
        if is_new_place:
            # What an earlier node left there was meant for an earlier worker.
            directory = Path(str(order["directory"]))
            check_private(directory)
            self._seen = _read_id(directory / BACKGROUND_NAME)
        self.servant.take(order)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="pulsenet-orders", daemon=True)
            self._thread.start()
            self.watchdog = Watchdog(self.servant, resume=call_resume)
            self.watchdog.start()

    def _begin(self, model: torch.nn.Module) -> None:
        rank, world_size = self._find_place()
        device = next(model.parameters()).device
        self._model = model
        self.servant = RankServant(
            RankWeights(model),
            rank=rank,
            world_size=world_size,
            boot=secrets.token_hex(8),
            monotonic=time.monotonic,
            find_obstacle=lambda: "",  # the node asked SGLang for its settings
            find_checkpoint=_lack_checkpoint,
            guard=torch.inference_mode,
            synchronize=(lambda: None) if device.type == "cpu" else torch.accelerator.synchronize,
        )

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self.look()


def _read_id(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _lack_checkpoint() -> Path:
    raise StorageError("the order names no checkpoint: give node and engine one release of pulsenet")


def find_place() -> tuple[int, int]:
    """Return rank and number of ranks of this worker; pipelines and replicas are refused by the node."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


_HOOK = RankHook(find_place)


def load_weights(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Take an order; SGLang finds this by ``--custom-weight-loader pulsenet.serving.sglang_hook.load_weights``."""
    _HOOK(model, named_tensors)
