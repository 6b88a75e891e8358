"""Reads a recorded run: a base model and, for each optimiser step, which BF16 values changed.

A directory with ``trace.json`` (``layout``: name, offset and numel of each tensor in the flat order; ``steps``),
``base.safetensors`` (BF16), and ``diffs_<view>.npz`` with two arrays for each step t from 1: ``g<t>``, differences of
ascending flat indices (uint32 as rows of 4 byte planes), and ``v<t>``, the new bits (uint16 as 2 byte planes).
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.errors import StorageError, UsageError
from pulsenetd.bench.pairs import Pair
from pulsenetd.files.safetensors_files import TensorFiles, open_model

VIEWS: Final = ("off", "grid")
"""Where the FP32 masters start: anywhere in their rounding cells, or on the BF16 grid."""


class Trace:
    """One view of a recorded run.

    Raises:
        UsageError: No trace is there.
        StorageError: It is damaged.
    """

    def __init__(self, directory: Path, view: str) -> None:
        self._path = directory
        names = ("trace.json", "base.safetensors", f"diffs_{view}.npz")
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise UsageError(f"{directory} is no trace: it lacks {', '.join(missing)}")
        model = open_model(directory / "base.safetensors")
        self.table = model.table
        try:
            info: Any = json.loads((directory / "trace.json").read_bytes())
            self.step_count = int(info["steps"])
            offsets = {str(item["name"]): int(item["offset"]) for item in info["layout"]}
            self._starts = [offsets[spec.name] for spec in self.table.tensors]
            self._diffs = np.load(directory / f"diffs_{view}.npz")
        except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise self._damaged(error) from error
        self._flat = self._read_base(model)

    def pairs(self, first: int, last: int) -> Iterator[Pair]:
        """Yield the versions before and after each step from ``first`` to ``last``; once only.

        Raises:
            UsageError: The trace does not have these steps.
            StorageError: It is damaged.
        """
        if not 1 <= first <= last <= self.step_count:
            raise UsageError(f"steps {first}-{last}: the trace has 1 to {self.step_count}")
        for step in range(1, last + 1):
            old = self._region() if step >= first else None
            try:
                gaps = np.ascontiguousarray(self._diffs[f"g{step}"].T).view(np.uint32).ravel()
                bits = np.ascontiguousarray(self._diffs[f"v{step}"].T).view(np.uint16).ravel()
                self._flat[np.cumsum(gaps, dtype=np.uint32)] = bits
            except (ValueError, KeyError, IndexError, OSError, EOFError, zipfile.BadZipFile) as error:
                raise self._damaged(error) from error
            if old is not None:
                yield Pair(self.table, old, self._region())

    def _read_base(self, model: TensorFiles) -> npt.NDArray[np.uint16]:
        ends = [start + spec.element_count for start, spec in zip(self._starts, self.table.tensors, strict=True)]
        if min(self._starts, default=0) < 0 or any(spec.dtype != "BF16" for spec in self.table.tensors):
            raise self._damaged("the base is not BF16, or a tensor starts below 0")
        flat = np.zeros(max(ends, default=0), np.uint16)
        for tensor_index, (start, end) in enumerate(zip(self._starts, ends, strict=True)):
            flat[start:end] = np.frombuffer(model.tensor_bytes(tensor_index).tobytes(), "<u2")
        return flat

    def _region(self) -> npt.NDArray[np.uint8]:
        region = np.zeros(self.table.layout_size_bytes, np.uint8)
        for tensor_index, (start, spec) in enumerate(zip(self._starts, self.table.tensors, strict=True)):
            self.table.view(region, tensor_index)[:] = self._flat[start : start + spec.element_count]
        return region

    def _damaged(self, detail: object) -> StorageError:
        return StorageError(f"{self._path} is a damaged trace ({detail}): copy it again", "damaged")
