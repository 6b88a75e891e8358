"""How far apart the trainers are: Euclidean distance of weights, Jensen-Shannon distance of predictions.

Nobody holds all weights in a run. Each trainer answers the same probe tokens and sends probabilities of a few bins for
each: the most likely tokens of the last common mean, and one bin for the rest. Merging tokens into bins can only bring
distributions closer, so the distance of the bins is a lower bound of the true one (SPEC outer, "Mixing").
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.outer.floats import FP32s

Floats = npt.NDArray[np.float64]

BIN_TOKENS_MAX: Final = 255
"""Tokens with a bin of their own."""
PROBE_TOKENS_MAX: Final = 4096
"""Positions of one probe: 2 MiB of answers."""
ROW_SUM_SLACK: Final = 0.02
"""How far from 1 a row of FP16 probabilities may sum: 256 roundings of 2^-11 each, and something to spare."""

_MAGIC: Final = b"PLSP"
_FORMAT_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sB3sQII")
PROBE_HEADER_SIZE_BYTES: Final = _HEADER.size


def mean_squared_distance(vectors: Sequence[Sequence[FP32s]]) -> float:
    """Return the squared Euclidean distance between two trainers' weights, mean over all pairs.

    Args:
        vectors: Of each trainer, its tensors, flat.

    Raises:
        LocalProtocolError: no trainers.
    """
    count = len(vectors)
    if count == 0:
        raise LocalProtocolError("a distance of nobody")
    if count == 1:
        return 0.0
    total = 0.0
    for tensors in zip(*vectors, strict=True):
        stacked = np.stack(tensors).astype(np.float64)
        # The sum over all pairs is M times the sum of squares around the mean.
        total += count * float(np.square(stacked - stacked.mean(axis=0)).sum())
    return total / (count * (count - 1) / 2)


def estimate_pair_square(square: float, contributor_count: int) -> float:
    """Return the mean squared distance between two of those whose mean was made, as one of them can tell.

    Of a pair it is exact: the other one is as far from the mean. Of more, the mean over all members of this estimate is
    exact.

    Args:
        square: Squared Euclidean distance from this member's vector to the mean.
        contributor_count: Members in the mean, 2 or more.

    Raises:
        LocalProtocolError: a mean of nobody else.
    """
    if contributor_count < 2:
        raise LocalProtocolError(f"a distance of {contributor_count} trainers")
    return square * 2.0 * contributor_count / (contributor_count - 1)


def js_distance(first: Floats, second: Floats) -> Floats:
    """Return the Jensen-Shannon distance of each row: the root of the divergence, logarithms of base 2, from 0 to 1.

    Args:
        first: Probabilities, (rows, bins) FP64; each row is brought to the sum 1.
        second: The same.
    """
    one, other = (_normalize(rows) for rows in (first, second))
    middle = (one + other) / 2
    divergence = (_relative_entropy(one, middle) + _relative_entropy(other, middle)) / 2
    return np.sqrt(np.clip(divergence, 0.0, 1.0))


def mean_js_distance(probabilities: Sequence[Floats]) -> float:
    """Return the Jensen-Shannon distance, mean over rows, then over all pairs of trainers; 0 for one alone."""
    pairs = [float(js_distance(one, other).mean()) for one, other in itertools.combinations(probabilities, 2)]
    return sum(pairs) / len(pairs) if pairs else 0.0


def choose_bins(probabilities: Floats, token_count: int = BIN_TOKENS_MAX) -> npt.NDArray[np.int64]:
    """Return the tokens with a bin of their own: each row's most likely ones, of equals the lowest, ascending.

    Args:
        probabilities: Of the common mean's prediction, (rows, vocabulary).
        token_count: Tokens of a row, fewer where the vocabulary is smaller.

    Returns:
        (rows, tokens) token ids.
    """
    order = np.argsort(-probabilities, axis=1, kind="stable")
    return np.sort(order[:, :token_count], axis=1)


def fill_bins(probabilities: Floats, bins: npt.NDArray[np.int64]) -> Floats:
    """Return the probabilities of the bins, the rest last: (rows, bins + 1)."""
    taken = np.take_along_axis(probabilities, bins, axis=1)
    rest = np.clip(probabilities.sum(axis=1, keepdims=True) - taken.sum(axis=1, keepdims=True), 0.0, None)
    return np.concatenate([taken, rest], axis=1)


def encode_probe(binned: Floats, *, round_index: int) -> bytes:
    """Return a trainer's answer to a probe: a header, then FP16 row by row.

    Args:
        binned: As :func:`fill_bins` returns them.
        round_index: Round whose common mean gave the bins.

    Raises:
        LocalProtocolError: more rows or bins than a probe may have, or no probabilities.
    """
    rows, bins = binned.shape
    if not 1 <= rows <= PROBE_TOKENS_MAX or not 2 <= bins <= BIN_TOKENS_MAX + 1:
        raise LocalProtocolError(f"a probe of {rows} tokens and {bins} bins")
    if _find_probe_fault(binned) is not None:
        raise LocalProtocolError(f"a probe holds {_find_probe_fault(binned)}")
    return _HEADER.pack(_MAGIC, _FORMAT_VERSION, bytes(3), round_index, rows, bins) + binned.astype("<f2").tobytes()


def peek_probe(data: bytes) -> tuple[int, int]:
    """Return how many tokens and bins an answer says it has; nothing else of it is looked at.

    Raises:
        RemoteProtocolError: ``probe-header``: it is too short.
    """
    if len(data) < PROBE_HEADER_SIZE_BYTES:
        raise RemoteProtocolError("probe-header", f"{len(data)} bytes")
    _, _, _, _, row_count, bin_count = _HEADER.unpack_from(data)
    return row_count, bin_count


def decode_probe(data: bytes, *, round_index: int, row_count: int, bin_count: int) -> Floats:
    """Return a trainer's probabilities, each row brought to the sum 1.

    Args:
        data: The answer.
        round_index: Round that is asked about.
        row_count: Tokens of the probe.
        bin_count: Bins, the rest included.

    Raises:
        RemoteProtocolError: ``probe-header`` for another probe or size, ``probe-values`` for what are no probabilities.
    """
    head = _HEADER.pack(_MAGIC, _FORMAT_VERSION, bytes(3), round_index, row_count, bin_count)
    size_bytes = PROBE_HEADER_SIZE_BYTES + 2 * row_count * bin_count
    if len(data) != size_bytes or data[:PROBE_HEADER_SIZE_BYTES] != head:
        raise RemoteProtocolError("probe-header", f"{len(data)} bytes, expected {size_bytes} of round {round_index}")
    found = np.frombuffer(data, "<f2", offset=PROBE_HEADER_SIZE_BYTES).reshape(row_count, bin_count).astype(np.float64)
    fault = _find_probe_fault(found)
    if fault is not None:
        raise RemoteProtocolError("probe-values", fault)
    return _normalize(found)


def _find_probe_fault(rows: Floats) -> str | None:
    if not bool(np.isfinite(rows).all()) or bool((rows < 0.0).any()):
        return "a value that is negative or not finite"
    worst = float(np.abs(rows.sum(axis=1) - 1.0).max())
    return f"a row whose sum is {worst:g} from 1" if worst > ROW_SUM_SLACK else None


def _normalize(rows: Floats) -> Floats:
    normalized: Floats = rows / rows.sum(axis=1, keepdims=True)
    return normalized


def _relative_entropy(rows: Floats, middle: Floats) -> Floats:
    # Where a probability is zero its term is zero, and the middle is positive wherever one of the two is.
    logarithms = np.log2(rows, where=rows > 0.0, out=np.zeros_like(rows)) - np.log2(
        middle, where=middle > 0.0, out=np.zeros_like(middle)
    )
    entropy: Floats = np.where(rows > 0.0, rows * logarithms, 0.0).sum(axis=1)
    return entropy
