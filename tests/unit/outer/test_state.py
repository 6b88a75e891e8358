import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.state import compute_state_root
from pulsenet.tensors.params import ParameterTable, TensorSpec

HASHES = [(bytes([1] * 16), bytes([2] * 16)), (bytes([3] * 16), bytes([4] * 16))]


def test_the_root_tells_every_part_of_the_state_apart(table: ParameterTable) -> None:
    swapped = [(HASHES[0][1], HASHES[0][0]), HASHES[1]]
    renamed = ParameterTable((TensorSpec("a", "F32", (2, 3)), TensorSpec("c", "F32", ())))
    reshaped = ParameterTable((TensorSpec("a", "F32", (3, 2)), TensorSpec("b", "F32", ())))
    roots = {
        compute_state_root(table, round_index=1, hashes=HASHES),
        compute_state_root(table, round_index=2, hashes=HASHES),
        compute_state_root(table, round_index=1, hashes=swapped),
        compute_state_root(table, round_index=1, hashes=HASHES[::-1]),
        compute_state_root(renamed, round_index=1, hashes=HASHES),
        compute_state_root(reshaped, round_index=1, hashes=HASHES),
    }
    assert len(roots) == 6
    assert compute_state_root(table, round_index=1, hashes=list(HASHES)) in roots


@pytest.mark.parametrize(
    ("round_index", "hashes"),
    [(-1, HASHES), (0, HASHES[:1]), (0, [(b"short", bytes(16)), HASHES[1]])],
)
def test_what_is_no_state_has_no_root(
    table: ParameterTable, round_index: int, hashes: list[tuple[bytes, bytes]]
) -> None:
    with pytest.raises(LocalProtocolError):
        compute_state_root(table, round_index=round_index, hashes=hashes)


def test_masters_are_fp32() -> None:
    table = ParameterTable((TensorSpec("a", "BF16", (2,)),))
    with pytest.raises(LocalProtocolError, match="F32"):
        compute_state_root(table, round_index=0, hashes=HASHES[:1])
