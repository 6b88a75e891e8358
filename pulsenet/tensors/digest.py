"""Digests of tensors and the root of a version (SPEC codec, "Root")."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3

from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest
from pulsenet.tensors.params import ParameterTable, Region

ROOT_DOMAIN = b"pulsenet-root-v1\0"
"""Starts the root's preimage, so that no other BLAKE3 input can equal it."""

TENSOR_HASH_SIZE_BYTES = 16


def hash_tensor(data: bytes | bytearray | memoryview | npt.NDArray[Any]) -> bytes:
    """Return the XXH3-128 of a tensor's dense little-endian row-major bytes, big-endian, 16 bytes."""
    if isinstance(data, np.ndarray):
        return xxhash.xxh3_128_digest(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    return xxhash.xxh3_128_digest(data)


def compute_root(table: ParameterTable, hashes: Sequence[bytes]) -> Digest:
    """Return the root of the version whose tensors, in table order, have these hashes.

    Aliases and excluded names do not enter it: tied and untied holders of the same weights agree.

    Raises:
        LocalProtocolError: not one hash of 16 bytes per tensor.
    """
    if len(hashes) != len(table.tensors):
        raise LocalProtocolError(f"{len(hashes)} hashes for {len(table.tensors)} tensors")
    hasher = blake3(ROOT_DOMAIN + struct.pack("<I", len(table.tensors)))
    for spec, tensor_hash in zip(table.tensors, hashes, strict=True):
        if len(tensor_hash) != TENSOR_HASH_SIZE_BYTES:
            raise LocalProtocolError(f"hash of {spec.name!r} has {len(tensor_hash)} bytes")
        name, dtype = spec.name.encode(), spec.dtype.encode()
        hasher.update(struct.pack("<H", len(name)) + name + struct.pack("<B", len(dtype)) + dtype)
        hasher.update(struct.pack(f"<B{len(spec.shape)}Q", len(spec.shape), *spec.shape) + tensor_hash)
    return Digest(hasher.digest())


def compute_region_root(table: ParameterTable, region: Region) -> Digest:
    """Return the root of the weights in ``region`` (spec-codec 3).

    Args:
        table: Names, dtypes and shapes.
        region: The dense layout of ``table``, flat, as bytes.
    """
    return compute_root(table, [hash_tensor(table.view(region, index)) for index in range(len(table.tensors))])
