"""The root of the outer state: what all trainers must agree on after every round (SPEC outer, "State root")."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from blake3 import blake3

from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest
from pulsenet.tensors.digest import TENSOR_HASH_SIZE_BYTES
from pulsenet.tensors.params import ParameterTable

STATE_DOMAIN = b"pulsenet-state-v1\0"
"""Starts the root's preimage, so that no other BLAKE3 input can equal it."""


def compute_state_root(table: ParameterTable, *, round_index: int, hashes: Sequence[tuple[bytes, bytes]]) -> Digest:
    """Return the root of the state after ``round_index`` rounds.

    Args:
        table: FP32 masters.
        round_index: Rounds stepped so far.
        hashes: For each tensor in table order, XXH3-128 of theta's and of the momentum's little-endian bytes.

    Raises:
        LocalProtocolError: a table with other dtypes, a negative round, or not two hashes of 16 bytes a tensor.
    """
    if len(hashes) != len(table.tensors) or round_index < 0:
        raise LocalProtocolError(f"round {round_index}: {len(hashes)} hashes for {len(table.tensors)} tensors")
    hasher = blake3(STATE_DOMAIN + struct.pack("<QI", round_index, len(table.tensors)))
    for spec, pair in zip(table.tensors, hashes, strict=True):
        if spec.dtype != "F32":
            raise LocalProtocolError(f"master {spec.name!r} is {spec.dtype}: masters are F32")
        if any(len(one) != TENSOR_HASH_SIZE_BYTES for one in pair):
            raise LocalProtocolError(f"hashes of {spec.name!r} have {[len(one) for one in pair]} bytes")
        name = spec.name.encode()
        hasher.update(struct.pack("<H", len(name)) + name)
        hasher.update(struct.pack(f"<B{len(spec.shape)}Q", len(spec.shape), *spec.shape) + pair[0] + pair[1])
    return Digest(hasher.digest())
