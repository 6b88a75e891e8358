"""Names and memories of a model matched with a version's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from pulsenet.errors import IntegrityError, StructureError
from pulsenet.ids import Version
from pulsenet.serving import targets
from pulsenet.serving.engine import FullUpdate
from pulsenet.serving.targets import Target, compute_model_root, find_targets

MakeFull = Callable[[Mapping[str, torch.Tensor], Version], FullUpdate]


class Holder(torch.nn.Module):
    """A module with these buffers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def test_a_model_that_lacks_tensors_is_refused_by_count_and_first_five(make_full: MakeFull) -> None:
    """A-NAME-3 (a)."""
    state = {f"w{number}": torch.ones(1) for number in range(8)}
    table = make_full(state, Version(0, 1)).table
    model = Holder({"w0": torch.ones(1)})
    with pytest.raises(StructureError, match=r"engine lacks tensors of the version: 7 \(w1, w2, w3, w4, w5, …\)"):
        find_targets(model, table, vocabulary_size=None)


def test_a_version_that_lacks_tensors_is_refused_by_count_and_first_five(make_full: MakeFull) -> None:
    """A-NAME-3 (b)."""
    table = make_full({"w": torch.ones(1)}, Version(0, 1)).table
    model = Holder({"w": torch.ones(1), "bias": torch.ones(1)})
    with pytest.raises(StructureError, match=r"version lacks tensors of the engine: 1 \(bias\)"):
        find_targets(model, table, vocabulary_size=None)


def test_a_model_that_ties_what_the_version_holds_apart_is_refused(make_full: MakeFull) -> None:
    """A-NAME-1."""
    table = make_full({"a": torch.ones(2), "b": torch.zeros(2)}, Version(0, 1)).table
    shared = torch.ones(2)
    with pytest.raises(StructureError, match="ties b to a"):
        find_targets(Holder({"a": shared, "b": shared}), table, vocabulary_size=None)


def test_another_dtype_is_refused(make_full: MakeFull) -> None:
    table = make_full({"a": torch.ones(2, dtype=torch.bfloat16)}, Version(0, 1)).table
    with pytest.raises(StructureError, match=r"a is torch\.float32 in the engine and BF16"):
        find_targets(Holder({"a": torch.ones(2)}), table, vocabulary_size=None)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1,)])
def test_another_shape_is_refused(shape: tuple[int, ...], make_full: MakeFull) -> None:
    table = make_full({"a": torch.ones(2)}, Version(0, 1)).table
    with pytest.raises(StructureError, match="shape"):
        find_targets(Holder({"a": torch.ones(shape)}), table, vocabulary_size=None)


def test_the_canonical_name_may_be_missing_if_an_alias_is_there(make_full: MakeFull) -> None:
    shared = torch.ones(2)
    table = make_full({"a": shared, "b": shared}, Version(0, 1)).table
    ((target,),) = find_targets(Holder({"b": torch.zeros(2)}), table, vocabulary_size=None)
    assert target.name == "b"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_bits_and_bytes_go_to_their_row_major_places(
    dtype: torch.dtype, is_transposed: bool, make_full: MakeFull, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "BLOCK_SIZE_BYTES", 16)
    wanted = (torch.arange(12).reshape(3, 4) % 2).to(dtype)
    memory = torch.zeros(4, 3, dtype=dtype).t() if is_transposed else torch.zeros(3, 4, dtype=dtype)
    full = make_full({"a": wanted}, Version(0, 1))
    found = find_targets(Holder({"a": memory}), full.table, vocabulary_size=None)
    ((target,),) = found
    target.write_bytes(full.tensor_bytes(0))
    assert memory.tolist() == wanted.tolist()
    assert compute_model_root(found, full.table) == full.root

    indices = np.array([1, 6], dtype=np.uint32)
    new_bits = full.table.view(full.region, 0)[[0, 2]]
    assert target.count_other_bits(indices, full.table.view(full.region, 0)[indices]) == 0
    target.write_bits(indices, new_bits)
    flat = wanted.reshape(-1).clone()
    flat[[1, 6]] = flat[[0, 2]]
    assert memory.reshape(-1).tolist() == flat.tolist()
    assert target.count_other_bits(indices, new_bits) == 0


def test_old_bits_are_compared_as_bits() -> None:
    zeros = Target("a", torch.tensor([0.0, -0.0, float("nan")]).view(torch.int32))
    indices = np.arange(3, dtype=np.uint32)
    assert zeros.count_other_bits(indices, np.array([0x80000000, 0x80000000, 0x7FC00000], dtype=np.uint32)) == 1


def test_two_copies_of_a_tied_weight_that_differ_have_no_root(make_full: MakeFull) -> None:
    shared = torch.ones(2)
    table = make_full({"a": shared, "b": shared}, Version(0, 1)).table
    found = find_targets(Holder({"a": torch.ones(2), "b": torch.zeros(2)}), table, vocabulary_size=None)
    with pytest.raises(IntegrityError, match="copies of tied weight a differ"):
        compute_model_root(found, table)
