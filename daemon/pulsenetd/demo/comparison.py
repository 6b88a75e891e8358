"""The end of the demonstration: do all inferencers hold the trainer's weights, bit by bit?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pulsenet.errors import PulsenetError
from pulsenetd.files.safetensors_files import TensorFiles, open_model


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing one inferencer's weights with the trainer's gave."""

    root: str
    """Root of the inferencer's weights, hexadecimal; empty when they cannot be read."""
    is_identical: bool
    difference: str
    """Where they differ first, for a person; empty when they do not."""


def compute_root(path: Path) -> str:
    """Return the root of a safetensors file, hexadecimal."""
    return open_model(path).compute_root().hex()


def compare_weights(trainer: Path, inferencers: Mapping[str, Path], expected_root: str) -> dict[str, Comparison]:
    """Compare every inferencer's file with the trainer's, by root and byte by byte.

    Args:
        trainer: The BF16 weights as the training process cast and wrote them itself.
        inferencers: By name, the weights as each engine wrote them out of its own memory.
        expected_root: Of the trainer's file, hexadecimal.
    """
    found: dict[str, Comparison] = {}
    reference = open_model(trainer)
    for name, path in inferencers.items():
        try:
            held = open_model(path)
        except PulsenetError as error:
            found[name] = Comparison("", False, str(error))
            continue
        root = held.compute_root().hex()
        difference = _find_difference(reference, held)
        if not difference and root != expected_root:
            difference = f"root {root[:16]}, expected {expected_root[:16]}"
        found[name] = Comparison(root, not difference, difference)
    return found


def _find_difference(reference: TensorFiles, held: TensorFiles) -> str:
    """Return where two models differ first, or nothing."""
    if reference.table.tensors != held.table.tensors:
        return "they have other tensors"
    for index, spec in enumerate(reference.table.tensors):
        mine, theirs = reference.tensor_bytes(index), held.tensor_bytes(index)
        if not np.array_equal(mine, theirs):
            return f"{spec.name} differs in {int(np.count_nonzero(mine != theirs))} of {spec.size_bytes} bytes"
    return ""
