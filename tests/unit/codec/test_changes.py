import numpy as np
import pytest

from pulsenet.codec.changes import (
    Changes,
    apply_changes,
    check_changes_twin,
    compose_changes,
    decode_changes,
    encode_changes,
    undo_changes,
)
from pulsenet.errors import LocalProtocolError, PatchMismatchError, RemoteProtocolError
from pulsenet.tensors.params import TensorSpec, make_table

TABLE = make_table([TensorSpec("a", "BF16", (10,)), TensorSpec("b", "U8", (5,)), TensorSpec("c", "F64", (3,))])


def changes(rows: list[tuple[int, int, int]], tensor_index: int = 0, bits: type = np.uint16) -> Changes:
    indices, old, new = zip(*rows, strict=True) if rows else ((), (), ())
    return Changes(tensor_index, np.array(indices, np.uint32), np.array(old, bits), np.array(new, bits))


def view(*values: int) -> np.ndarray:
    return np.array(values, np.uint16)


def test_apply_writes_and_undo_puts_back_each_as_often_as_wanted() -> None:
    weights = view(10, 20, 30, 40)
    some = changes([(1, 20, 21), (3, 40, 0x8000)])
    apply_changes(weights, some)
    assert weights.tolist() == [10, 21, 30, 0x8000]
    undo_changes(weights, some)
    undo_changes(weights, some)
    assert weights.tolist() == [10, 20, 30, 40]
    assert len(some) == 2


def test_undo_ignores_what_stands_there() -> None:
    weights = view(10, 99)
    undo_changes(weights, changes([(0, 1, 2), (1, 3, 4)]))
    assert weights.tolist() == [1, 3]


def test_apply_to_another_base_writes_nothing() -> None:
    weights = view(10, 20, 30)
    with pytest.raises(PatchMismatchError, match="holds 0x1e at 2, the patch expects 0x1f"):
        apply_changes(weights, changes([(0, 10, 11), (2, 31, 32)]))
    assert weights.tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    "indices",
    [[3], [1, 1], [1, 0], [0, 0xFFFFFFFF], [2, 3]],
    ids=["numel", "duplicate", "unsorted", "minus-one", "second-outside"],
)
def test_bad_indices_are_refused_before_any_write(indices: list[int]) -> None:
    """A-APP-5."""
    bad = Changes(0, np.array(indices, np.uint32), view(*[7] * len(indices)), view(*[8] * len(indices)))
    for change in (apply_changes, undo_changes):
        weights = view(7, 7, 7)
        with pytest.raises(LocalProtocolError, match="outside"):
            change(weights, bad)
        assert weights.tolist() == [7, 7, 7]
    assert check_changes_twin(view(7, 7, 7), bad.indices, bad.old_bits)[0] == 1
    assert check_changes_twin(view(7), np.zeros(0, np.uint32), view()) == (0, 0)


@pytest.mark.parametrize(
    ("indices", "old", "new"),
    [
        (np.zeros(2, np.uint32), view(1), view(2)),  # A-APP-5: more indices than values
        (np.zeros(1, np.uint32), view(1), view(2, 3)),
        (np.zeros(1, np.int64), view(1), view(2)),  # a signed index could be -1
        (np.zeros(1, np.uint32), view(1), np.zeros(1, np.uint32)),
        (np.zeros(1, np.uint32), np.zeros(1, np.float32), np.zeros(1, np.float32)),
        (np.zeros((1, 1), np.uint32), np.zeros((1, 1), np.uint16), np.zeros((1, 1), np.uint16)),
    ],
)
def test_changes_of_another_form_cannot_be_made(indices: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError):
        Changes(0, indices, old, new)


def test_view_of_another_width_shape_or_without_write_access_is_refused() -> None:
    read_only = view(1, 2)
    read_only.setflags(write=False)
    for weights in (np.zeros(2, np.uint32), np.zeros((2, 2), np.uint16), read_only):
        with pytest.raises(LocalProtocolError):
            apply_changes(weights, changes([(0, 1, 2)]))


def test_changes_are_equal_by_tensor_and_content() -> None:
    one = changes([(1, 2, 3)])
    assert one == changes([(1, 2, 3)])
    assert one != changes([(1, 2, 3)], tensor_index=1)
    assert one != changes([(1, 2, 3)], bits=np.uint32)
    assert one != "something else"


def test_composition_keeps_what_differs_in_the_end() -> None:
    """A-ENC-5: a changes once, b changes and returns, c changes late."""
    first = changes([(0, 10, 11), (4, 40, 41)])
    second = changes([(2, 20, 21), (4, 41, 40), (6, 60, 61)])
    assert compose_changes(first, second) == changes([(0, 10, 11), (2, 20, 21), (6, 60, 61)])
    assert compose_changes(first, changes([])) == first
    assert compose_changes(changes([]), second) == second
    twice = compose_changes(changes([(5, 1, 2)]), changes([(5, 2, 3)]))
    assert twice == changes([(5, 1, 3)])


def test_composition_of_what_does_not_follow_is_refused() -> None:
    with pytest.raises(PatchMismatchError):
        compose_changes(changes([(0, 1, 2)]), changes([(0, 3, 4)]))
    with pytest.raises(LocalProtocolError):
        compose_changes(changes([]), changes([], tensor_index=1))
    with pytest.raises(LocalProtocolError):
        compose_changes(changes([]), changes([], bits=np.uint8))


def test_spool_of_several_records_comes_back_without_copying() -> None:
    written = [
        changes([(0, 1, 2), (9, 3, 4)]),
        changes([(4, 255, 0)], 1, np.uint8),
        changes([], 1, np.uint8),
        changes([(0, 1, 1 << 63), (1, 0, 1), (2, 5, 6)], 2, np.uint64),
    ]
    spool = bytearray().join(encode_changes(item) for item in written)
    assert len(spool) % 8 == 0
    found = list(decode_changes(spool, TABLE))
    assert found == written
    assert np.shares_memory(found[0].indices, np.frombuffer(spool, np.uint8))
    assert list(decode_changes(memoryview(bytes(spool)), TABLE)) == written
    assert list(decode_changes(b"", TABLE)) == []


def test_index_beyond_2_to_the_31_and_32_survives_the_spool() -> None:
    """A-DT-4."""
    for element_count, index in (((1 << 31) + 8, 2_147_483_653), ((1 << 32) + 8, (1 << 32) + 7)):
        table = make_table([TensorSpec("w", "BF16", (element_count,))])
        indices = np.array([3, index], table.tensors[0].index_dtype)
        far = Changes(0, indices, view(0, 0), view(1, 2))
        (found,) = decode_changes(encode_changes(far), table)
        assert found == far
        assert found.indices.tolist() == [3, index]


def test_every_cut_of_a_spool_is_refused() -> None:
    spool = encode_changes(changes([(0, 1, 2), (9, 3, 4), (9, 0, 0)][:2]))
    for size in range(1, len(spool)):
        with pytest.raises(RemoteProtocolError) as raised:
            list(decode_changes(spool[:size], TABLE))
        assert raised.value.code == "changes-truncated"


def test_no_flipped_bit_of_a_spool_passes_unnoticed_into_an_index() -> None:
    spool = encode_changes(changes([(0, 1, 2), (9, 3, 4)]))
    for position in range(len(spool) * 8):
        damaged = bytearray(spool)
        damaged[position >> 3] ^= 1 << (position & 7)
        try:
            found = list(decode_changes(damaged, TABLE))
        except RemoteProtocolError:
            continue
        for item in found:
            indices = item.indices.tolist()
            assert indices == sorted(set(indices))
            assert all(index < TABLE.tensors[item.tensor_index].element_count for index in indices)
