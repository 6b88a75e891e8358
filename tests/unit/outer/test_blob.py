from collections.abc import Callable

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError
from pulsenet.outer.blob import decode_blob, encode_blob
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.tensors.params import ParameterTable

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
