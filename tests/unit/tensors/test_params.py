import mmap

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import compute_digest
from pulsenet.tensors.params import (
    ELEMENT_SIZES_BYTES,
    ParameterTable,
    TensorSpec,
    canonical_name,
    make_table,
)


def spec(name: str = "w", dtype: str = "BF16", *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


@pytest.mark.parametrize(("dtype", "size"), sorted(ELEMENT_SIZES_BYTES.items()))
def test_sizes_follow_from_dtype_and_shape(dtype: str, size: int) -> None:
    tensor = spec("w", dtype, 3, 4)
    assert (tensor.element_count, tensor.element_size_bytes, tensor.size_bytes) == (12, size, 12 * size)
    assert tensor.bits_dtype == np.dtype(f"<u{size}")


def test_scalar_has_one_element_and_empty_tensors_none() -> None:
    """A-DT-2."""
    assert spec("s", "F32").element_count == 1
    assert spec("e", "BF16", 0, 5).size_bytes == spec("e", "BF16", 3, 0).size_bytes == 0


def test_indices_need_64_bits_from_2_to_the_32_elements_on() -> None:
    """A-DT-4."""
    assert spec("w", "U8", (1 << 32) - 1).index_dtype == np.uint32
    assert spec("w", "U8", 1 << 32).index_dtype == np.uint64
    assert spec("w", "BF16", (1 << 31) + 8).index_dtype == np.uint32


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("", "BF16", ()),
        ("n" * 513, "BF16", ()),
        ("\ud800", "BF16", ()),
        ("w", "bfloat16", ()),
        ("w", "BF16", (1,) * 9),
        ("w", "BF16", (-1,)),
        ("w", "BF16", (1 << 48, 2)),
        ("w", "BF16", (1 << 48, 2, 0)),
    ],
)
def test_impossible_tensor_is_refused(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(LocalProtocolError):
        TensorSpec(name, dtype, shape)


def test_table_is_sorted_by_utf8_bytes_and_laid_out_at_multiples_of_64() -> None:
    table = make_table([spec("é", "U8", 1), spec("z", "BF16", 33), spec("a", "F64", 1), spec("b", "U8", 0)])
    assert [tensor.name for tensor in table.tensors] == ["a", "b", "z", "é"]
    assert table.offsets == (0, 64, 64, 192)
    assert table.layout_size_bytes == 193
    assert (table.element_count, table.size_bytes) == (35, 75)


@pytest.mark.parametrize(
    ("names", "aliases", "excluded"),
    [
        (["a", "a"], [], []),
        (["a"], [("b", "c")], []),
        (["a", "b"], [("a", "b")], []),
        (["a"], [("b", "a"), ("b", "a")], []),
        (["a"], [], ["b", "b"]),
        (["a"], [], ["a"]),
        (["a"], [("b", "a")], ["b"]),
        (["a"], [("", "a")], []),
        (["a"], [], ["n" * 513]),
    ],
)
def test_contradictory_table_is_refused(names: list[str], aliases: list[tuple[str, str]], excluded: list[str]) -> None:
    with pytest.raises(LocalProtocolError):
        make_table([spec(name) for name in names], aliases, excluded)


def test_unsorted_table_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="not ascending"):
        ParameterTable((spec("b"), spec("a")))


def test_more_entries_than_the_limit_are_refused() -> None:
    tensor = spec()
    with pytest.raises(LocalProtocolError, match="at most"):
        ParameterTable((tensor,) * (limits.TENSORS_MAX + 1))


def test_encoding_comes_back_and_its_digest_names_the_table() -> None:
    table = make_table([spec("a", "F32", 2, 3), spec("b")], [("tied", "a")], ["cache"])
    assert ParameterTable.decode(table.encode()) == table
    assert ParameterTable.decode(memoryview(table.encode())).offsets == table.offsets
    assert table.digest == compute_digest(table.encode())
    assert make_table(table.tensors).digest != table.digest


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (
            make_table([spec("a", "F32", 300)]).encode().replace(b"\xcd\x01\x2c", b"\xce\0\0\x01\x2c"),
            "table-not-canonical",
        ),
        (make_table([spec("a", "F32")]).encode().replace(b"F32", b"F33"), "table-invalid"),
        (make_table([spec("a", "F32")]).encode()[:-1], "table-decode"),
    ],
)
def test_encoding_with_a_fault_is_refused_by_name(data: bytes, code: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        ParameterTable.decode(data)
    assert raised.value.code == code


def test_encoding_beyond_the_limit_is_refused_both_ways() -> None:
    long_name = "n" * 500
    table = make_table(spec(f"{long_name}{number:05}") for number in range(limits.TENSORS_MAX))
    with pytest.raises(LocalProtocolError, match="encoded parameter table"):
        table.encode()
    with pytest.raises(RemoteProtocolError) as raised:
        ParameterTable.decode(bytes(limits.TABLE_SIZE_BYTES_MAX + 1))
    assert raised.value.code == "table-too-large"


def test_index_of_finds_tensors_and_aliases() -> None:
    table = make_table([spec("a"), spec("b"), spec("d")], [("c", "a")])
    assert [table.index_of(name) for name in ("a", "b", "c", "d")] == [0, 1, 0, 2]
    for missing in ("0", "aa", "e"):
        with pytest.raises(KeyError):
            table.index_of(missing)


def test_views_share_the_memory_of_any_kind_of_region() -> None:
    table = make_table([spec("a", "U8", 3), spec("b", "BF16", 2), spec("c", "I64"), spec("d", "F32", 0)])
    array = np.zeros(table.layout_size_bytes, np.uint8)
    table.view(array, 1)[1] = 0x3F80
    assert array[66:68].tolist() == [0x80, 0x3F]
    shared = mmap.mmap(-1, table.layout_size_bytes)
    table.view(shared, 2)[0] = 7
    assert shared[128] == 7
    for region in (array.tobytes(), bytearray(array.tobytes()), memoryview(array.tobytes())):
        assert table.view(region, 1).tolist() == [0, 0x3F80]
        assert table.view(region, 3).size == 0


def test_region_smaller_than_the_layout_is_refused() -> None:
    table = make_table([spec("a", "U8", 65), spec("b")])
    with pytest.raises(LocalProtocolError, match="129 bytes for a layout of 130"):
        table.view(bytes(129), 0)


@pytest.mark.parametrize(
    "wrapped",
    [
        "model.layers.0.q_proj.weight",
        "_orig_mod.model.layers.0.q_proj.weight",
        "module.model.layers.0.q_proj.weight",
        "module._orig_mod.model.layers.0.q_proj.weight",
        "_orig_mod.module.model.layers.0.q_proj.weight",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.q_proj.weight",
        "model.layers._orig_mod.0._orig_mod.q_proj.weight",
        "model.layers.0._checkpoint_wrapped_module.q_proj.weight",
        "base_model.model.model.layers.0.q_proj.base_layer.weight",
        "module.base_model.model._orig_mod.model.layers.0.q_proj.base_layer.weight",
    ],
)
def test_wrapped_name_is_the_plain_models(wrapped: str) -> None:
    """A-NAME-2."""
    assert canonical_name(wrapped) == "model.layers.0.q_proj.weight"


def test_names_that_only_look_wrapped_stay() -> None:
    for name in ("module", "encoder.module.weight", "base_model.weight", "base_layer", "x._orig_mod_norm.weight"):
        assert canonical_name(name) == name
