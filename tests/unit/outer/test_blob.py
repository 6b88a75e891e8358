from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.codec.contribution import HEADER_SIZE_BYTES
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.blob import decode_blob, encode_blob, inspect_blob
from pulsenet.outer.checks import Expected, compute_norm
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.tensors.params import ParameterTable, TensorSpec

THETA = [np.linspace(-1, 1, 6, dtype=np.float32), np.ones(1, np.float32)]


def test_a_sparse_contribution_comes_back(
    table: ParameterTable, make_contribution: Callable[..., Contribution]
) -> None:
    blob = b"".join(encode_blob(make_contribution(), table, THETA))
    assert decode_blob(blob, table, THETA, is_dense=False).same_as(make_contribution())


def test_a_dense_contribution_comes_back_whatever_the_blocks(
    table: ParameterTable, make_contribution: Callable[..., Contribution], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.array([1, 0x80000000, 0x7F7FFFFF, 0, 5, 6], np.uint32).view(np.float32)
    dense = make_contribution(entries=(Entries(0, None, values), Entries(1, None, np.zeros(1, np.float32))))
    blob = b"".join(encode_blob(dense, table, THETA))
    assert decode_blob(blob, table, THETA, is_dense=True).same_as(dense)
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 4)
    blob = b"".join(encode_blob(dense, table, THETA))
    assert decode_blob(blob, table, THETA, is_dense=True).same_as(dense)


def test_a_dense_blob_with_gaps_is_refused(
    table: ParameterTable, make_contribution: Callable[..., Contribution]
) -> None:
    blob = b"".join(encode_blob(make_contribution(), table, THETA))
    with pytest.raises(RemoteProtocolError, match="shape"):
        decode_blob(blob, table, THETA, is_dense=True)


def cut(data: bytes, size_bytes: int) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(data), size_bytes):
        yield view[start : start + size_bytes]


Make = Callable[..., Contribution]


@pytest.mark.parametrize("size_bytes", [1, 7, 1000])
def test_looking_into_a_blob_finds_what_it_says(
    table: ParameterTable, make_contribution: Make, expected: Expected, size_bytes: int
) -> None:
    contribution = make_contribution()
    blob = b"".join(encode_blob(contribution, table, THETA))
    content = inspect_blob(cut(blob, size_bytes), expected, THETA)
    assert (content.reason, content.detail) == ("", "")
    assert (content.entry_count, content.norm) == (3, compute_norm(contribution))
    assert content.inner_step_count == 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round_index": 4}, "decode"),
        ({"state_root": Digest(bytes(32))}, "base"),
        ({"inner_step_count": 0}, "shape"),
        ({"entries": (Entries(0, np.array([1], np.uint32), np.array([np.inf], np.float32)),)}, "finite"),
        ({"entries": (Entries(0, np.array([1], np.uint32), np.array([9.0], np.float32)),)}, "norm"),
    ],
)
def test_each_fault_of_a_blob_has_the_reason_of_its_rejection(
    table: ParameterTable, make_contribution: Make, expected: Expected, changes: dict[str, object], reason: str
) -> None:
    blob = b"".join(encode_blob(make_contribution(**changes), table, THETA))
    content = inspect_blob([blob], expected, THETA)
    assert content.reason == reason
    assert content.detail


def test_bytes_that_are_no_contribution_are_rejected(
    table: ParameterTable, make_contribution: Make, expected: Expected
) -> None:
    blob = b"".join(encode_blob(make_contribution(), table, THETA))
    for data in (b"", blob[:30], blob[:-1], blob + b"\1", b"X" + blob[1:]):
        assert inspect_blob([data], expected, THETA).reason == "decode"
    other = ParameterTable((TensorSpec("a", "F32", (2, 3)), TensorSpec("c", "F32", ())))
    assert inspect_blob([blob], replace(expected, table=other), THETA).reason == "shape"
    assert inspect_blob([blob], replace(expected, is_dense=True), THETA).reason == "shape"


def test_a_header_of_another_kind_is_rejected_before_more_is_read(expected: Expected) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(HEADER_SIZE_BYTES)
        raise AssertionError("asked for more than the header")

    content = inspect_blob(pieces(), expected, THETA)
    assert (content.reason, content.entry_count, content.norm, content.inner_step_count) == ("decode", 0, 0.0, 0)
