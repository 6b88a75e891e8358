"""Decides whether a training process keeps a device baseline, and lends it to one publish at a time."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import torch

from pulsenet.errors import ConfigError
from pulsenet.training.device_baseline import DeviceBaseline
from pulsenet.training.snapshot import Sharded, Snapshot

DeviceBaselineChoice = bool | Literal["auto"]
"""``"auto"``: for models on a CUDA device that has room for twice the baseline, and not for sharded ones."""

ROOM_FACTOR: Final = 2
"""Free memory that ``"auto"`` asks for, in baselines: training, which was there first, may still grow."""


class BaselineKeeper:
    """Keeps the device baseline of the model that is published.

    Args:
        choice: Whether to keep one.

    Raises:
        ConfigError: ``choice`` is something else.
    """

    def __init__(self, choice: DeviceBaselineChoice) -> None:
        if choice not in (True, False, "auto"):
            raise ConfigError(f'device_baseline is True, False or "auto", not {choice!r}')
        self._choice = choice
        self._mutex = threading.Lock()
        self._baseline: DeviceBaseline | None = None

    @contextmanager
    def lend(self, snapshot: Snapshot) -> Iterator[DeviceBaseline | None]:
        """Lend the baseline of a snapshot's model, made anew if it is another model's.

        ``None``: there is none, or another thread publishes with it. Either way whole weights are right.

        Raises:
            ConfigError: One was asked for and the device has no room.
        """
        if not self._is_wanted(snapshot) or not self._mutex.acquire(blocking=False):
            yield None
            return
        try:
            yield self._find(snapshot)
        finally:
            self._mutex.release()

    def give_up(self, why: str) -> None:
        """Let go of the baseline, warn, and keep none any more; called by whom it is lent to."""
        self._baseline = None
        self._choice = False
        warnings.warn(f"no device baseline is kept any more ({why}): whole weights are handed over", stacklevel=3)

    def _is_wanted(self, snapshot: Snapshot) -> bool:
        if any(isinstance(source, Sharded) for source in snapshot.sources):
            return False
        if self._choice == "auto":
            return any(source.device.type == "cuda" for source in snapshot.sources)
        return bool(self._choice)

    def _find(self, snapshot: Snapshot) -> DeviceBaseline | None:
        if self._baseline is not None and self._baseline.fits(snapshot):
            return self._baseline
        # The old one goes first, so that there is room.
        self._baseline = None
        if self._choice == "auto" and (missing := _find_missing_room(snapshot)):
            self.give_up(missing)
            return None
        try:
            self._baseline = DeviceBaseline(snapshot)
        except torch.cuda.OutOfMemoryError as error:
            if self._choice != "auto":
                text = f"no room for the device baseline ({error}): free memory, or pass device_baseline=False"
                raise ConfigError(text) from error
            self.give_up(str(error))
        return self._baseline


def _find_missing_room(snapshot: Snapshot) -> str:
    """Return which device has too little room, for a person; the empty string if none has."""
    wanted: Counter[torch.device] = Counter()
    for spec, source in zip(snapshot.table.tensors, snapshot.sources, strict=True):
        if source.device.type == "cuda":
            wanted[source.device] += spec.size_bytes
    for device, size_bytes in wanted.items():
        free_size_bytes = read_free_size_bytes(device)
        if free_size_bytes < ROOM_FACTOR * size_bytes:
            return f"{device} has {free_size_bytes} bytes free, {ROOM_FACTOR} x {size_bytes} are wanted"
    return ""


def read_free_size_bytes(device: torch.device) -> int:
    """Return how much memory of a CUDA device this process can still take, in bytes."""
    free_size_bytes, _ = torch.cuda.mem_get_info(device)
    unused_size_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free_size_bytes) + int(unused_size_bytes)
