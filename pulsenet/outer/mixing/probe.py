"""Answers to a probe: which tokens have bins, what an answer's bytes say, what several of them come to.

The distances themselves are in :mod:`pulsenet.outer.mixing.disagreement` (SPEC outer, "Probe").
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, compute_digest
from pulsenet.outer.mixing.disagreement import (
    BIN_TOKENS_MAX,
    PROBE_TOKENS_MAX,
    Floats,
    decode_probe,
    js_distance,
    peek_probe,
)

_BINS_DOMAIN: Final = b"pulsenet probe bins 1"
_SHAPE: Final = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one trainer said, and of what."""

    batch: Digest
    """Of the tokens that were answered."""
    bins: Digest
    """As :func:`name_bins` returns it."""
    data: bytes = b""
    """As :func:`pulsenet.outer.mixing.disagreement.encode_probe` returns it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the answers of one round come to."""

    distance: float | None
    """Jensen-Shannon distance, mean over tokens, then over pairs; ``None`` where no two answers can be compared."""
    pair_count: int


def name_bins(bins: npt.NDArray[np.int64]) -> Digest:
    """Return the digest that names the tokens with bins of their own.

    Args:
        bins: Token ids, (rows, tokens), ascending in each row, below 2^32.
    """
    return compute_digest(_BINS_DOMAIN + _SHAPE.pack(*bins.shape) + bins.astype("<u4").tobytes())


def read_answer(data: bytes, round_index: int) -> Floats:
    """Return a trainer's probabilities, whatever their number.

    Raises:
        RemoteProtocolError: ``probe-header`` or ``probe-values``.
    """
    row_count, bin_count = peek_probe(data)
    if not 1 <= row_count <= PROBE_TOKENS_MAX or not 2 <= bin_count <= BIN_TOKENS_MAX + 1:
        raise RemoteProtocolError("probe-header", f"{row_count} tokens of {bin_count} bins")
    return decode_probe(data, round_index=round_index, row_count=row_count, bin_count=bin_count)


def compare_answers(answers: Sequence[Answer], round_index: int) -> Comparison:
    """Return how far apart the trainers of a round are; answers of other bins or batches are not compared.

    Args:
        answers: One of each trainer, in an order that decides nothing but how sums round.
        round_index: Of the round.

    Raises:
        RemoteProtocolError: as :func:`read_answer`.
    """
    groups: dict[tuple[Digest, Digest, tuple[int, ...]], list[Floats]] = {}
    for answer in answers:
        found = read_answer(answer.data, round_index)
        groups.setdefault((answer.batch, answer.bins, found.shape), []).append(found)
    pairs = [
        float(js_distance(one, other).mean())
        for group in groups.values()
        for one, other in itertools.combinations(group, 2)
    ]
    return Comparison(sum(pairs) / len(pairs) if pairs else None, len(pairs))
