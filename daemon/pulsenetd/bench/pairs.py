"""What is measured: pairs of an old and a new version in the dense layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from pulsenet.tensors.params import ParameterTable
from pulsenetd.files.offline import check_same_tensors
from pulsenetd.files.safetensors_files import open_model

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two versions of one model."""

    table: ParameterTable
    old: Bytes
    """In the table's dense layout, padding zero."""
    new: Bytes

    def tensor_views(self, tensor_index: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
        """Return one tensor of both versions as bits of its width."""
        return self.table.view(self.old, tensor_index), self.table.view(self.new, tensor_index)


@contextmanager
def open_pair(old: Path, new: Path) -> Iterator[Pair]:
    """Copy two safetensors files or directories into temporary files, and yield them as a pair.

    Raises:
        UsageError: A model is missing.
        StructureError: The models do not hold the same tensors.
        StorageError: A file is damaged, or there is no room for the copies.
    """
    old_model, new_model = open_model(old), open_model(new)
    check_same_tensors(f"{old} and {new}", old_model.table, new_model.table)
    with TemporaryDirectory(prefix="pulsenet-bench-") as directory:
        old_region, _ = old_model.copy_to_region(Path(directory))
        new_region, _ = new_model.copy_to_region(Path(directory))
        yield Pair(new_model.table, old_region, new_region)
