import numpy as np
import pytest
import xxhash

from pulsenet.errors import LocalProtocolError
from pulsenet.tensors.digest import compute_region_root, compute_root, hash_tensor
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

MIXED = make_table(
    [
        TensorSpec("bias", "F32", (3,)),
        TensorSpec("empty", "BF16", (0, 5)),
        TensorSpec("scalar", "BF16", ()),
        TensorSpec("steps", "I64", (2,)),
    ]
)


def filled(table: ParameterTable, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, table.layout_size_bytes, np.uint8)


def test_hash_is_the_same_for_bytes_and_arrays_of_any_layout() -> None:
    values = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert hash_tensor(values) == hash_tensor(values.tobytes()) == xxhash.xxh3_128(values.tobytes()).digest()
    assert hash_tensor(values.T) == hash_tensor(np.ascontiguousarray(values.T).tobytes())
    assert hash_tensor(np.zeros((0, 3), np.uint16)) == hash_tensor(b"")


def test_root_over_scalar_empty_and_mixed_tensors_needs_only_their_bytes() -> None:
    """A-DT-1, A-DT-2."""
    region = filled(MIXED)
    hashes = [hash_tensor(MIXED.view(region, index)) for index in range(4)]
    root = compute_region_root(MIXED, region)
    assert root == compute_root(MIXED, hashes)
    for start, end in ((12, 64), (66, 128)):
        region[start:end] ^= 0xFF  # padding between tensors is not part of any
    assert compute_region_root(MIXED, region) == root


@pytest.mark.parametrize("offset", [0, 11, 64, 65, 128, 143])
def test_every_byte_of_every_tensor_enters_the_root(offset: int) -> None:
    region = filled(MIXED)
    before = compute_region_root(MIXED, region)
    region[offset] ^= 1
    assert compute_region_root(MIXED, region) != before


def test_name_dtype_and_shape_enter_the_root() -> None:
    roots = {
        compute_root(make_table([TensorSpec(name, dtype, shape)]), [bytes(16)])
        for name, dtype, shape in (
            ("a", "BF16", (2, 3)),
            ("b", "BF16", (2, 3)),
            ("a", "F16", (2, 3)),
            ("a", "BF16", (3, 2)),
            ("a", "BF16", (6,)),
        )
    }
    assert len(roots) == 5


def test_tied_and_untied_holders_of_the_same_weights_agree() -> None:
    """A-NAME-1: aliases and excluded names do not enter the root."""
    specs = [TensorSpec("embed", "BF16", (4,))]
    tied = make_table(specs, aliases=[("lm_head", "embed")], excluded=["cache"])
    assert compute_root(tied, [bytes(16)]) == compute_root(make_table(specs), [bytes(16)])


def test_wrong_number_or_size_of_hashes_is_refused() -> None:
    table = make_table([TensorSpec("a", "BF16", (1,))])
    with pytest.raises(LocalProtocolError, match="0 hashes for 1"):
        compute_root(table, [])
    with pytest.raises(LocalProtocolError, match="15 bytes"):
        compute_root(table, [bytes(15)])
