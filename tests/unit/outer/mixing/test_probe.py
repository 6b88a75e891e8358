"""What answers to a probe come to: who can be compared, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import compute_digest
from pulsenet.outer.mixing.disagreement import (
    PROBE_HEADER_SIZE_BYTES,
    encode_probe,
    estimate_pair_square,
    mean_js_distance,
    mean_squared_distance,
)
from pulsenet.outer.mixing.probe import Answer, Comparison, compare_answers, name_bins, read_answer

BATCH, OTHER = compute_digest(b"batch"), compute_digest(b"other")
BINS = name_bins(np.array([[1, 5], [0, 7]]))


def answer(*rows: list[float], batch: bytes = BATCH, bins: bytes = BINS, round_index: int = 8) -> Answer:
    return Answer(batch, bins, encode_probe(np.array(rows), round_index=round_index))  # type: ignore[arg-type]


CERTAIN, UNSURE = ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]), ([0.5, 0.5, 0.0], [0.25, 0.25, 0.5])


def test_the_distance_is_the_mean_over_tokens_and_pairs() -> None:
    found = compare_answers([answer(*CERTAIN), answer(*UNSURE), answer(*CERTAIN)], 8)
    assert found.pair_count == 3
    assert found.distance == pytest.approx(mean_js_distance([np.array(CERTAIN), np.array(UNSURE), np.array(CERTAIN)]))
    assert compare_answers([answer(*UNSURE), answer(*UNSURE)], 8) == Comparison(0.0, 1)


def test_answers_of_other_bins_batches_or_sizes_are_not_compared() -> None:
    other_bins = answer(*UNSURE, bins=name_bins(np.array([[1, 5], [0, 8]])))
    alone = [answer(*CERTAIN), other_bins, answer(*UNSURE, batch=OTHER), answer(UNSURE[0])]
    assert compare_answers(alone, 8) == Comparison(None, 0)
    assert compare_answers([], 8) == Comparison(None, 0)
    pairs = compare_answers([*alone, answer(*CERTAIN), other_bins], 8)
    assert pairs == Comparison(0.0, 2), "partners of Mix1 that share bins with nobody else"


def test_the_name_of_bins_tells_them_apart_by_token_and_place() -> None:
    names = {
        name_bins(np.array(bins)) for bins in ([[1, 5], [0, 7]], [[1, 5], [0, 6]], [[1, 5, 0, 7]], [[0, 7], [1, 5]])
    }
    assert len(names) == 4
    assert name_bins(np.array([[1, 5], [0, 7]], np.int64)) == BINS


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "probe-header"),
        (bytes(PROBE_HEADER_SIZE_BYTES), "probe-header"),
        (answer(*CERTAIN, round_index=9).data, "probe-header"),
        (answer(*CERTAIN).data[:-1], "probe-header"),
        (answer(*CERTAIN).data + b"\0", "probe-header"),
        (answer(*CERTAIN).data[:16] + b"\xff\xff\xff\xff" + answer(*CERTAIN).data[20:], "probe-header"),
        (answer(*CERTAIN).data[:-2] + b"\0\x3c", "probe-values"),
        (answer(*CERTAIN).data[:-2] + b"\xff\x7f", "probe-values"),
    ],
)
def test_an_answer_that_is_none_is_refused(data: bytes, code: str) -> None:
    with pytest.raises(RemoteProtocolError, match=code):
        read_answer(data, 8)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_distances_to_the_mean_tell_those_between_trainers(count: int) -> None:
    vectors = np.random.default_rng(count).normal(size=(count, 50)).astype(np.float32)
    squares = np.square(vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)).sum(axis=1)
    told = [estimate_pair_square(float(square), count) for square in squares]
    assert np.mean(told) == pytest.approx(mean_squared_distance([[one] for one in vectors]))
    if count == 2:
        assert told[0] == pytest.approx(told[1]), "of a pair each of the two knows it exactly"


def test_alone_nobody_is_apart_from_anybody() -> None:
    with pytest.raises(LocalProtocolError, match="1 trainers"):
        estimate_pair_square(1.0, 1)
