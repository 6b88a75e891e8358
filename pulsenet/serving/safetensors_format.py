"""The safetensors file format: header in, header out, whole files written durably.

Headers are checked before anything is read or mapped by them, so a damaged or hostile file costs a refusal, never
memory.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pulsenet.errors import LocalProtocolError, StorageError
from pulsenet.tensors.params import TensorSpec

HEADER_SIZE_BYTES_MAX: Final = 100_000_000
"""The format's own limit on its JSON header."""

WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
"""Files of a model directory that hold weights; the others (configuration, tokenizer) go with any version."""

MARKER_NAME: Final = "pulsenet.json"
"""Says which version the files engine wrote beside it: of no other weights."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor's bytes lie."""

    path: Path
    spec: TensorSpec
    offset_bytes: int
    """From the start of the file."""


def read_header(path: Path) -> list[TensorPlace]:
    """Parse and check the header of one safetensors file.

    Raises:
        StorageError: The file is shorter than its header says, or tensors overlap or leave holes.
    """
    try:
        with path.open("rb") as file:
            file_size_bytes = os.fstat(file.fileno()).st_size
            header_size_bytes = int.from_bytes(file.read(8), "little")
            if file_size_bytes < 8 or header_size_bytes > min(HEADER_SIZE_BYTES_MAX, file_size_bytes - 8):
                raise StorageError(
                    f"{path} is no safetensors file or is cut short: copy or download it again", "damaged"
                )
            raw = file.read(header_size_bytes)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} has a damaged header ({error}): copy or download it again", "damaged") from error
    if not isinstance(header, dict):
        raise StorageError(f"{path} has a damaged header (not an object): copy or download it again", "damaged")
    header.pop("__metadata__", None)
    data_start = 8 + header_size_bytes
    places = [_parse_entry(path, name, entry, data_start) for name, entry in header.items()]
    end = data_start
    for place in sorted(places, key=lambda place: (place.offset_bytes, place.spec.size_bytes)):
        if place.offset_bytes != end:
            raise StorageError(
                f"{path} is damaged: tensor {place.spec.name} overlaps another or follows a hole", "damaged"
            )
        end += place.spec.size_bytes
    if end != file_size_bytes:
        raise StorageError(f"{path} is damaged: {file_size_bytes} bytes, but its header describes {end}", "damaged")
    return places


def encode_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the length and JSON header of a safetensors file that holds ``specs`` in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset_bytes = 0
    for spec in specs:
        end = offset_bytes + spec.size_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset_bytes, end]}
        offset_bytes = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)  # the format asks that data start at a multiple of 8
    return len(raw).to_bytes(8, "little") + raw


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return ``specs`` in the order in which a file keeps every tensor aligned: wide elements first, then by name."""
    return sorted(specs, key=lambda spec: (-spec.element_size_bytes, spec.name))


def write_safetensors(
    path: Path, specs: Iterable[TensorSpec], tensors: Iterable[bytes | memoryview], metadata: Mapping[str, str]
) -> None:
    """Write a new file, durable when this returns; the name must be free. ``tensors`` come in the order of ``specs``.

    Raises:
        StorageError: The name is taken, or the disk refused; what was written is removed.
    """
    try:
        with path.open("xb") as file:
            file.write(encode_header(specs, metadata))
            for data in tensors:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as error:
        raise StorageError(f"{path} already exists: remove it or choose another name") from error
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error.strerror}", name_refusal(error)) from error


def map_file(path: Path, *, writable: bool = False) -> mmap.mmap:
    """Map a whole file, read-only or shared for writing.

    Raises:
        StorageError: The file cannot be opened or mapped.
    """
    try:
        with path.open("r+b" if writable else "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be mapped: {error}") from error


def copy_companions(source: Path, destination: Path) -> None:
    """Copy what belongs to a model but is no weight: configuration, tokenizer, licence. Directories are left."""
    for file in sorted(source.iterdir()):
        is_weight = file.suffix in WEIGHT_SUFFIXES or file.name.endswith((".index.json", ".partial"))
        is_left = is_weight or file.name == MARKER_NAME
        if file.is_file() and not is_left and not (destination / file.name).exists():
            shutil.copyfile(file, destination / file.name)


def name_refusal(error: OSError) -> str:
    """Return the stable reason of what the disk refused."""
    return "enospc" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io"


def sync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, refusing a name given twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _parse_entry(path: Path, name: str, entry: object, data_start: int) -> TensorPlace:
    """Check one tensor's entry of a header."""
    match entry:
        # Exactly integers: Python would take true for 1, and 1.0 for a length until the first read.
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if all(
            type(number) is int for number in (*shape, begin, end)
        ):
            pass
        case _:
            raise StorageError(
                f"{path} has a damaged header entry for tensor {name}: copy or download it again", "damaged"
            )
    try:
        spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
    except (LocalProtocolError, TypeError) as error:
        raise StorageError(f"{path}: {error}; this file is damaged or of an unknown kind", "damaged") from error
    size_bytes = spec.size_bytes
    if begin < 0 or end - begin != size_bytes:
        raise StorageError(
            f"{path}: tensor {name} takes {end - begin} bytes where its shape needs {size_bytes}", "damaged"
        )
    return TensorPlace(path=path, spec=spec, offset_bytes=data_start + begin)
