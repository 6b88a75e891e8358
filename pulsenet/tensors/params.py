"""The canonical parameter table: which tensors a version has, in which order and where (SPEC codec, "Parameter table").

A table lists tensors ascending by the UTF-8 bytes of their canonical names. Every memory region that holds a
whole version (snapshot, mirror) uses its *dense layout*: tensors in table order, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from mmap import mmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest, compute_digest
from pulsenet.tensors.table_format import RawTable, pack_table, unpack_table

Region = memoryview | bytearray | bytes | mmap | npt.NDArray[np.uint8]
"""Bytes in a table's dense layout."""

ELEMENT_SIZES_BYTES: Final = {
    "BF16": 2,
    "BOOL": 1,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "I8": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "U8": 1,
}
"""Bytes of one element by dtype, under the names safetensors uses."""

TENSOR_ALIGNMENT_BYTES: Final = 64
"""Every tensor of the dense layout starts at a multiple of this."""

UNSIGNED: Final[dict[int, np.dtype[Any]]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
"""Little-endian unsigned integers by their width in bytes."""

_DROPPED_SEGMENTS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
"""Name segments only wrappers make: torch.compile, FSDP, activation checkpointing, PEFT."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor.

    Raises:
        LocalProtocolError: an unknown dtype, or a name or shape beyond the limits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.dtype not in ELEMENT_SIZES_BYTES:
            raise LocalProtocolError(f"tensor {self.name!r} has the unknown dtype {self.dtype!r}")
        if len(self.shape) > limits.TENSOR_DIMENSIONS_MAX:
            raise LocalProtocolError(f"tensor {self.name!r} has {len(self.shape)} dimensions")
        # The product of the dimensions above zero is bounded too, so that views of empty tensors cannot overflow.
        if any(size < 0 for size in self.shape) or math.prod(max(size, 1) for size in self.shape) > (
            limits.TENSOR_ELEMENTS_MAX
        ):
            raise LocalProtocolError(f"tensor {self.name!r} has the impossible shape {self.shape}")

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def element_size_bytes(self) -> int:
        return ELEMENT_SIZES_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Dense bytes, without padding."""
        return self.element_count * self.element_size_bytes

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """Little-endian unsigned integer of the element's width: what views of the tensor hold."""
        return UNSIGNED[self.element_size_bytes]

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """Of positions in the tensor: see :func:`index_dtype`."""
        return index_dtype(self.element_count)


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """The tensors of a version, ascending by name; build one with :func:`make_table`.

    Raises:
        LocalProtocolError: names out of order or used twice, an alias of nothing, too many entries.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """(alias, canonical name) of tied weights, ascending by alias; only the canonical name has bytes."""
    excluded: tuple[str, ...] = ()
    """Non-persistent buffers, ascending: known to be left out."""
    offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Where each tensor starts in the dense layout, in bytes."""
    layout_size_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of the dense layout, padding included."""

    def __post_init__(self) -> None:
        if max(len(self.tensors), len(self.aliases), len(self.excluded)) > limits.TENSORS_MAX:
            raise LocalProtocolError(f"a parameter table has at most {limits.TENSORS_MAX} entries of a kind")
        names = [spec.name for spec in self.tensors]
        alias_names = [alias for alias, _ in self.aliases]
        for listed in (names, alias_names, list(self.excluded)):
            _check_ascending(listed)
        for name in (*alias_names, *self.excluded):
            _check_name(name)
        known = set(names)
        for alias, canonical in self.aliases:
            if alias in known or canonical not in known:
                raise LocalProtocolError(f"alias {alias!r} of {canonical!r} does not name one tensor twice")
        if taken := (known | set(alias_names)) & set(self.excluded):
            raise LocalProtocolError(f"excluded but listed as well: {sorted(taken)[:5]}")
        offsets, end = [], 0
        for spec in self.tensors:
            start = -(-end // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
            offsets.append(start)
            end = start + spec.size_bytes
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "layout_size_bytes", end)

    @property
    def element_count(self) -> int:
        return sum(spec.element_count for spec in self.tensors)

    @property
    def size_bytes(self) -> int:
        """Dense bytes of all tensors, without padding."""
        return sum(spec.size_bytes for spec in self.tensors)

    @property
    def digest(self) -> Digest:
        """BLAKE3 of :meth:`encode`."""
        return compute_digest(self.encode())

    def encode(self) -> bytes:
        """Return the table as canonical msgpack (SPEC codec, "Parameter table").

        Raises:
            LocalProtocolError: more than ``TABLE_SIZE_BYTES_MAX`` bytes.
        """
        data = pack_table(
            RawTable(
                tensors=[(spec.name, spec.dtype, list(spec.shape)) for spec in self.tensors],
                aliases=list(self.aliases),
                excluded=list(self.excluded),
            )
        )
        if len(data) > limits.TABLE_SIZE_BYTES_MAX:
            raise LocalProtocolError(f"the encoded parameter table has {len(data)} bytes")
        return data

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> ParameterTable:
        """Return the table that ``data`` encodes.

        Raises:
            RemoteProtocolError: ``table-too-large``, ``table-decode`` (not these bytes' shape), ``table-invalid``
                (a name, dtype, shape or order the rules forbid) or ``table-not-canonical``.
        """
        if len(data) > limits.TABLE_SIZE_BYTES_MAX:
            raise RemoteProtocolError("table-too-large", f"{len(data)} bytes")
        raw = unpack_table(bytes(data))
        try:
            table = cls(
                tensors=tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in raw.tensors),
                aliases=tuple(raw.aliases),
                excluded=tuple(raw.excluded),
            )
        except LocalProtocolError as error:
            raise RemoteProtocolError("table-invalid", str(error)) from error
        if table.encode() != data:
            raise RemoteProtocolError("table-not-canonical", "the same table has a shorter or ordered encoding")
        return table

    def index_of(self, name: str) -> int:
        """Return the position of the tensor called ``name``; an alias finds its canonical tensor.

        Raises:
            KeyError: no such tensor.
        """
        canonical = dict(self.aliases).get(name, name)
        key = canonical.encode()
        index = bisect_left(self.tensors, key, key=lambda spec: spec.name.encode())
        if index == len(self.tensors) or self.tensors[index].name != canonical:
            raise KeyError(name)
        return index

    def view(self, region: Region, tensor_index: int) -> npt.NDArray[Any]:
        """Return one tensor of ``region`` as a flat array of ``bits_dtype`` sharing the region's memory.

        Raises:
            LocalProtocolError: the region is smaller than the dense layout.
        """
        spec = self.tensors[tensor_index]
        flat = np.frombuffer(region, np.uint8)
        if flat.size < self.layout_size_bytes:
            raise LocalProtocolError(f"a region of {flat.size} bytes for a layout of {self.layout_size_bytes}")
        start = self.offsets[tensor_index]
        return flat[start : start + spec.size_bytes].view(spec.bits_dtype)


def index_dtype(element_count: int) -> np.dtype[Any]:
    """Return the dtype of positions among so many elements: uint32, or uint64 from 2^32 elements on."""
    return UNSIGNED[4] if element_count < 1 << 32 else UNSIGNED[8]


def make_table(
    specs: Iterable[TensorSpec], aliases: Iterable[tuple[str, str]] = (), excluded: Iterable[str] = ()
) -> ParameterTable:
    """Return the table of these tensors, sorted.

    Raises:
        LocalProtocolError: as :class:`ParameterTable`.
    """
    return ParameterTable(
        tensors=tuple(sorted(specs, key=lambda spec: spec.name.encode())),
        aliases=tuple(sorted(aliases, key=lambda pair: pair[0].encode())),
        excluded=tuple(sorted(excluded, key=str.encode)),
    )


def canonical_name(name: str) -> str:
    """Return the plain model's name of a parameter that wrappers renamed.

    Drops the segments of torch.compile (``_orig_mod``), FSDP (``_fsdp_wrapped_module``), activation
    checkpointing (``_checkpoint_wrapped_module``) and PEFT (``base_layer``) wherever they stand, and the leading
    ``module.`` of DDP and ``base_model.model.`` of PEFT. The last segment, the parameter's own name, always stays.
    """
    *path, leaf = name.split(".")
    path = [segment for segment in path if segment not in _DROPPED_SEGMENTS]
    while path[:1] == ["module"] or path[:2] == ["base_model", "model"]:
        path = path[1:] if path[0] == "module" else path[2:]
    return ".".join((*path, leaf))


def _check_name(name: str) -> None:
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"tensor name {name!r} is not valid Unicode") from error
    if not 0 < size_bytes <= limits.TENSOR_NAME_SIZE_BYTES_MAX:
        raise LocalProtocolError(f"tensor name {name[:64]!r} has {size_bytes} bytes")


def _check_ascending(names: list[str]) -> None:
    keys = [name.encode() for name in names]
    for before, after in pairwise(keys):
        if before >= after:
            raise LocalProtocolError(f"names not ascending or used twice: {before!r}, {after!r}")
