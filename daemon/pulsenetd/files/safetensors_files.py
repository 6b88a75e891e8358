"""Opens models kept as safetensors: one file, a sharded directory with its index, or a plain directory.

Nothing is copied on opening: tensors are views of mapped files.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.errors import LocalProtocolError, StorageError, UsageError
from pulsenet.ids import Digest
from pulsenet.serving.engine import describe_names
from pulsenet.serving.safetensors_format import TensorPlace, map_file, name_refusal, read_header
from pulsenet.tensors.digest import compute_root, hash_tensor
from pulsenet.tensors.params import ParameterTable, make_table

Bytes = npt.NDArray[np.uint8]

OnProgress = Callable[[int, int], None]
"""Told how much of how much is done."""

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"

INDEX_SIZE_BYTES_MAX: Final = 64 << 20
"""An index names each tensor once: 65,536 names of 512 bytes fit."""


class TensorFiles:
    """An opened model: its table and, per tensor, a read-only view of its mapped file."""

    def __init__(self, files: Sequence[Path], places: Mapping[str, TensorPlace]) -> None:
        self.files = tuple(files)
        """Safetensors files that hold the tensors."""
        self.table: ParameterTable = make_table([place.spec for place in places.values()])
        self.places = tuple(places[spec.name] for spec in self.table.tensors)
        """In table order."""
        self._maps = {file: map_file(file) for file in self.files}

    def tensor_bytes(self, tensor_index: int) -> Bytes:
        """Return the bytes of one tensor: a flat read-only view of the mapped file."""
        place = self.places[tensor_index]
        if place.spec.size_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        mapping = self._maps[place.path]
        return np.frombuffer(mapping, dtype=np.uint8, count=place.spec.size_bytes, offset=place.offset_bytes)

    def compute_root(self, on_progress: OnProgress = lambda done, total: None) -> Digest:
        """Hash every tensor and return the root of the model.

        Args:
            on_progress: Told how many bytes of how many were hashed.
        """
        hashes, done = [], 0
        for index in range(len(self.table.tensors)):
            data = self.tensor_bytes(index)
            hashes.append(hash_tensor(data))
            done += data.size
            on_progress(done, self.table.size_bytes)
        return compute_root(self.table, hashes)

    def copy_to_region(
        self, directory: Path, on_progress: OnProgress = lambda done, total: None
    ) -> tuple[Bytes, Digest]:
        """Copy the model into a dense layout, and return that and the root.

        The region is a mapped temporary file in ``directory`` without a name: the system may write it out instead
        of keeping it in memory, and it is gone when the array is.

        Raises:
            StorageError: No space for the copy.
        """
        size_bytes = self.table.layout_size_bytes
        if size_bytes == 0:
            return np.empty(0, dtype=np.uint8), self.compute_root(on_progress)
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                # Reserve the space now: running out later would be a signal, not an error.
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                region = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size_bytes,))
        except OSError as error:
            text = f"cannot put {size_bytes} temporary bytes into {directory}: {error.strerror}"
            raise StorageError(text, name_refusal(error)) from error
        hashes, done = [], 0
        for tensor_index, offset_bytes in enumerate(self.table.offsets):
            data = self.tensor_bytes(tensor_index)
            region[offset_bytes : offset_bytes + data.size] = data
            hashes.append(hash_tensor(data))
            done += data.size
            on_progress(done, self.table.size_bytes)
        return region.view(np.ndarray), compute_root(self.table, hashes)


def open_model(path: Path) -> TensorFiles:
    """Map a safetensors file or directory.

    In a directory the index decides which files count; without one ``model.safetensors`` alone, and without that
    every ``*.safetensors``. A directory kept by the files engine is read through its ``current`` link.

    Raises:
        UsageError: Nothing is there, or it is no safetensors model.
        StorageError: A file is damaged or contradicts its index.
    """
    weight_map: dict[str, str] | None = None
    if path.is_dir():
        files, weight_map = _list_directory(path)
    elif path.is_file():
        files = [path]
    else:
        raise UsageError(f"{path} does not exist: give a .safetensors file or a directory that holds some")
    places: dict[str, TensorPlace] = {}
    for file in files:
        for place in read_header(file):
            if place.spec.name in places:
                other = places[place.spec.name].path
                raise StorageError(f"tensor {place.spec.name} is in both {other} and {file}: remove one", "damaged")
            places[place.spec.name] = place
    if weight_map is not None:
        _check_index(path, weight_map, places)
    try:
        return TensorFiles(files, places)
    except LocalProtocolError as error:
        raise StorageError(f"{path} cannot be used as a model: {error}", "damaged") from error


def _list_directory(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the safetensors files that count in a directory, and its index if there is one."""
    if (path / INDEX_NAME).is_file():
        weight_map = _read_index(path / INDEX_NAME)
        return [path / name for name in sorted(set(weight_map.values()))], weight_map
    if (path / SINGLE_NAME).is_file():
        return [path / SINGLE_NAME], None
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files, None
    if (path / "current").is_dir():
        return _list_directory((path / "current").resolve())
    raise UsageError(f"{path} holds no .safetensors files: give a model saved with safe serialization")


def _read_index(path: Path) -> dict[str, str]:
    """Return the tensor-to-file map of a sharded model's index."""
    damaged = f"{path} is no valid index: copy or download it again"
    try:
        if path.stat().st_size > INDEX_SIZE_BYTES_MAX:
            raise StorageError(damaged, "damaged")
        weight_map: Any = json.loads(path.read_bytes())["weight_map"]
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(damaged, "damaged") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise StorageError(damaged, "damaged")
    for name in weight_map.values():
        # An index from elsewhere must not make us read outside its directory.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise StorageError(f"{path} names {name!r}, which is no .safetensors file beside it", "damaged")
        if not (path.parent / name).is_file():
            raise StorageError(f"{path} names {name}, which is missing: copy or download it again", "damaged")
    return weight_map


def _check_index(path: Path, weight_map: Mapping[str, str], places: Mapping[str, TensorPlace]) -> None:
    """Refuse shards that hold other tensors than the index says."""
    wrong = [name for name, file in weight_map.items() if name not in places or places[name].path.name != file]
    wrong += [name for name in places if name not in weight_map]
    if wrong:
        raise StorageError(
            f"{path} and its index disagree on {describe_names(wrong)} tensors: copy or download the model again",
            "damaged",
        )
