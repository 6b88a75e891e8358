import numpy as np
import pytest

from pulsenet.codec.indices import (
    NARROW_ESCAPE,
    WIDE_ESCAPE,
    decode_gaps,
    decode_gaps_twin,
    decode_ranks,
    decode_ranks_twin,
    encode_gaps,
    encode_gaps_twin,
    encode_ranks,
    encode_ranks_twin,
)


def positions(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ([0], [0]),
        ([254], [254]),
        ([255], [255, 0]),
        ([510], [255, 255, 0]),
        ([0, 1, 2], [0, 0, 0]),
        ([3, 260], [3, 255, 1]),
        ([], []),
    ],
)
def test_gap_is_escapes_and_a_last_code(values: list[int], codes: list[int]) -> None:
    for encode in (encode_gaps, encode_gaps_twin):
        encoded = encode(positions(*values), NARROW_ESCAPE)
        assert encoded.tolist() == codes
        assert encoded.dtype == np.uint8
    for decode in (decode_gaps, decode_gaps_twin):
        found = decode(np.array(codes, np.uint8), NARROW_ESCAPE, 1 << 20, len(values))
        assert found is not None
        assert found.tolist() == values


def test_wide_gaps_escape_at_65535() -> None:
    values = positions(65_534, 65_535, 200_000)
    codes = [65_534, 0, 65_535, 65_535, 200_000 - 65_536 - 2 * 65_535]
    assert encode_gaps(values, WIDE_ESCAPE).tolist() == encode_gaps_twin(values, WIDE_ESCAPE).tolist() == codes
    for decode in (decode_gaps, decode_gaps_twin):
        found = decode(np.array(codes, np.uint16), WIDE_ESCAPE, 200_001, 3)
        assert found is not None
        assert np.array_equal(found, values)


@pytest.mark.parametrize(
    ("codes", "element_count", "count"),
    [
        ([5], 5, 1),  # A-APP-5: index = numel
        ([255, 255], 1000, 1),  # the gap never ends
        ([3, 255], 1000, 1),  # an open gap after the last
        ([1, 1], 1000, 1),  # more positions than stated
        ([1], 1000, 2),  # fewer than stated
        ([], 1000, 1),
        ([255, 0], 255, 1),
        ([200], 10, 1),
        ([0] * 11, 10, 11),
        ([3], 1000, 0),
        ([255], 1000, 0),
    ],
)
def test_codes_that_do_not_name_the_stated_positions_are_refused(
    codes: list[int], element_count: int, count: int
) -> None:
    for decode in (decode_gaps, decode_gaps_twin):
        assert decode(np.array(codes, np.uint8), NARROW_ESCAPE, element_count, count) is None


@pytest.mark.parametrize(
    ("ranks", "encoded"),
    [
        ([0], "00"),
        ([127], "7f"),
        ([128], "8001"),
        ([16_383, 32_768], "ff7f808001"),
        ([0, 129, 130], "00800100"),
        ([], ""),
        ([(1 << 20) - 1], "ffff3f"),
    ],
)
def test_rank_gaps_are_leb128(ranks: list[int], encoded: str) -> None:
    for encode in (encode_ranks, encode_ranks_twin):
        assert encode(positions(*ranks)).tobytes().hex() == encoded
    for decode in (decode_ranks, decode_ranks_twin):
        found = decode(np.frombuffer(bytes.fromhex(encoded), np.uint8), 1 << 20, len(ranks))
        assert found is not None
        assert found.tolist() == ranks


@pytest.mark.parametrize(
    ("encoded", "rank_count", "count"),
    [
        ("05", 5, 1),  # beyond the last change
        ("8000", 10, 1),  # not the shortest form
        ("80", 10, 1),  # cut
        ("0080", 10, 1),  # cut after the last
        ("80808001", 1 << 20, 1),  # four bytes
        ("0000", 10, 1),  # more than stated
        ("00", 10, 2),  # fewer than stated
        ("0000", 1, 2),
        ("09", 5, 1),
        ("05", 10, 0),
        ("80", 10, 0),
    ],
)
def test_ranks_that_do_not_decode_are_refused(encoded: str, rank_count: int, count: int) -> None:
    for decode in (decode_ranks, decode_ranks_twin):
        assert decode(np.frombuffer(bytes.fromhex(encoded), np.uint8), rank_count, count) is None
