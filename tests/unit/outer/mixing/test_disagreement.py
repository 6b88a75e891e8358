import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.outer.mixing.disagreement import (
    BIN_TOKENS_MAX,
    PROBE_HEADER_SIZE_BYTES,
    PROBE_TOKENS_MAX,
    choose_bins,
    decode_probe,
    encode_probe,
    fill_bins,
    js_distance,
    mean_js_distance,
    mean_squared_distance,
)

law = settings(derandomize=True, deadline=None, max_examples=60)


def predictions(seed: int, rows: int, vocabulary: int, *, sharpness: float = 3.0) -> np.ndarray:
    logits = sharpness * np.random.default_rng(seed).normal(size=(rows, vocabulary))
    odds = np.exp(logits)
    return odds / odds.sum(axis=1, keepdims=True)


def test_distances_of_distributions_known_by_hand() -> None:
    certain, other = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    assert js_distance(certain, other).tolist() == [1.0]
    assert js_distance(certain, certain).tolist() == [0.0]
    # Of (1, 0) and (1/2, 1/2): (log2(4/3) + (log2(2/3) + 1) / 2) / 2 bits, by hand.
    expected = math.sqrt((math.log2(4 / 3) + (math.log2(2 / 3) + 1) / 2) / 2)
    assert js_distance(certain, np.array([[0.5, 0.5]]))[0] == pytest.approx(expected, rel=1e-12)


@law
@given(st.integers(0, 1 << 32), st.integers(2, 30))
def test_it_is_a_distance(seed: int, vocabulary: int) -> None:
    one, two, three = (predictions(seed + place, 5, vocabulary) for place in range(3))
    assert np.allclose(js_distance(one, two), js_distance(two, one), rtol=0, atol=1e-12)
    assert (js_distance(one, two) <= js_distance(one, three) + js_distance(three, two) + 1e-12).all()
    assert (js_distance(one, two) <= 1.0).all()


@law
@given(st.integers(0, 1 << 32), st.sampled_from([10, 256, 257, 600]), st.floats(0.1, 6.0))
def test_what_probes_show_is_a_lower_bound(seed: int, vocabulary: int, sharpness: float) -> None:
    """Merging tokens brings distributions closer; FP16 moves each probability by 2^-11 of itself at most."""
    mean, one, two = (predictions(seed + place, 4, vocabulary, sharpness=sharpness) for place in range(3))
    bins = choose_bins(mean)
    true = js_distance(one, two)
    binned = js_distance(fill_bins(one, bins), fill_bins(two, bins))
    assert (binned <= true + 1e-9).all()
    shown = [
        decode_probe(
            encode_probe(fill_bins(own, bins), round_index=3), round_index=3, row_count=4, bin_count=bins.shape[1] + 1
        )
        for own in (one, two)
    ]
    assert (js_distance(*shown) <= true + 2e-3).all()
    if vocabulary <= BIN_TOKENS_MAX:
        assert np.allclose(binned, true, rtol=0, atol=1e-9)


def test_bins_are_the_likeliest_tokens_ascending_and_the_lowest_of_equals() -> None:
    assert choose_bins(np.array([[0.1, 0.4, 0.1, 0.4]]), 3).tolist() == [[0, 1, 3]]
    found = fill_bins(np.array([[0.1, 0.4, 0.2, 0.3]]), np.array([[1, 3]]))
    assert found.tolist() == [[0.4, 0.3, pytest.approx(0.3)]]
    assert choose_bins(predictions(0, 2, 1_000)).shape == (2, BIN_TOKENS_MAX)


def test_a_probe_of_256_tokens_takes_131_kilobytes() -> None:
    mean = predictions(1, 256, 300)
    data = encode_probe(fill_bins(mean, choose_bins(mean)), round_index=9)
    assert len(data) == PROBE_HEADER_SIZE_BYTES + 131_072
    back = decode_probe(data, round_index=9, row_count=256, bin_count=256)
    assert np.allclose(back, fill_bins(mean, choose_bins(mean)), rtol=2e-3, atol=1e-6)


def test_probes_that_are_none_are_not_sent() -> None:
    with pytest.raises(LocalProtocolError):
        encode_probe(np.full((PROBE_TOKENS_MAX + 1, 2), 0.5), round_index=0)
    with pytest.raises(LocalProtocolError):
        encode_probe(np.full((1, BIN_TOKENS_MAX + 2), 1 / 257), round_index=0)
    with pytest.raises(LocalProtocolError):
        encode_probe(np.array([[0.5, 0.1]]), round_index=0)
    with pytest.raises(LocalProtocolError):
        encode_probe(np.array([[float("nan"), 1.0]]), round_index=0)


def test_hostile_answers_are_refused() -> None:
    data = encode_probe(np.array([[0.5, 0.25, 0.25]]), round_index=1)
    expected = {"round_index": 1, "row_count": 1, "bin_count": 3}
    head = data[:PROBE_HEADER_SIZE_BYTES]
    assert decode_probe(data, **expected).tolist() == [[0.5, 0.25, 0.25]]
    for broken in (b"", data[:-1], data + b"\0", b"X" + data[1:]):
        with pytest.raises(RemoteProtocolError, match="probe-header"):
            decode_probe(broken, **expected)
    with pytest.raises(RemoteProtocolError, match="probe-header"):
        decode_probe(data, round_index=2, row_count=1, bin_count=3)
    for row in ([math.nan, 0.5, 0.5], [math.inf, 0, 0], [-0.5, 0.75, 0.75], [0.5, 0.5, 0.5], [0, 0, 0]):
        with pytest.raises(RemoteProtocolError, match="probe-values"):
            decode_probe(head + np.array(row, "<f2").tobytes(), **expected)


def test_squared_distance_is_the_mean_over_pairs_and_sums_over_tensors() -> None:
    generator = np.random.default_rng(2)
    trainers = [
        [generator.normal(size=7).astype(np.float32), generator.normal(size=3).astype(np.float32)] for _ in range(4)
    ]
    pairs = [
        sum(float(np.sum((a.astype(np.float64) - b) ** 2)) for a, b in zip(one, other, strict=True))
        for one, other in combinations(trainers, 2)
    ]
    assert mean_squared_distance(trainers) == pytest.approx(np.mean(pairs))
    assert mean_squared_distance(trainers[:1]) == 0.0
    with pytest.raises(LocalProtocolError):
        mean_squared_distance([])


def test_the_distance_of_many_is_the_mean_over_rows_then_pairs() -> None:
    certain, other = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])
    assert mean_js_distance([certain, other, other]) == pytest.approx(1 / 3)
    assert mean_js_distance([certain]) == 0.0
