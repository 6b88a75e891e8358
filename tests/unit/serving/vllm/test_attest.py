"""What the map reaches is compared with the checkpoint, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pulsenet.errors import IntegrityError, StorageError, StructureError
from pulsenet.ids import Version
from pulsenet.serving.engine import FullUpdate
from pulsenet.serving.vllm.attest import Checkpoint, RegionTensors, attest, overwrite
from pulsenet.serving.vllm.map import trace_map
from pulsenet.tensors.params import TensorSpec, make_table

Published = Callable[..., dict[str, torch.Tensor]]


def save(state: dict[str, torch.Tensor], path: Path, *, without: tuple[str, ...] = ()) -> None:
    save_file({name: tensor.clone() for name, tensor in state.items() if name not in without}, path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_loaded_a_checkpoint_equals_it(
    ranks: int, served_model: Any, make_published: Published, make_full: Callable[..., FullUpdate], tmp_path: Path
) -> None:
    state = make_published(1)
    update = make_full(state, Version(0, 1))
    save(state, tmp_path / "one.safetensors", without=("head", "q", "scale"))
    save({name: state[name] for name in ("q", "scale")}, tmp_path / "two.safetensors")
    checkpoint = Checkpoint(tmp_path, update.table)
    assert checkpoint.compute_root() == update.root
    for rank in range(ranks):
        model = served_model(rank, ranks)
        model.load_weights(state.items())
        mapped = trace_map(model, update.table)
        attest(mapped, checkpoint, "the file")
        attest(mapped, RegionTensors(update.table, update.region.copy()), "it")


def test_one_other_bit_is_found_and_named(
    served_model: Any, make_published: Published, make_full: Callable[..., FullUpdate], tmp_path: Path
) -> None:
    state = make_published(2)
    update = make_full(state, Version(0, 1))
    save(state, tmp_path / "model.safetensors", without=("head",))
    model = served_model()
    model.load_weights(state.items())
    with torch.no_grad():
        model.conv.view(torch.int16)[3, 4] ^= 1
        model.qkv[8] = -model.qkv[8]
    with pytest.raises(IntegrityError, match=r"other bits than its checkpoint for tensors: 2 \(conv, k\)"):
        attest(trace_map(model, update.table), Checkpoint(tmp_path, update.table), "its checkpoint")


def test_a_repack_of_the_same_shape_is_found(
    served_model: Any, make_published: Published, make_full: Callable[..., FullUpdate], tmp_path: Path
) -> None:
    """As experts on a CPU: the map alone believes it."""
    state = make_published(3)
    update = make_full(state, Version(0, 1))
    save(state, tmp_path / "model.safetensors", without=("head",))
    model = served_model()
    model.load_weights(state.items())
    with torch.no_grad():
        model.down.copy_(model.down.reshape(2, 4, 8).transpose(0, 1).reshape(8, 8).clone())
    with pytest.raises(IntegrityError, match=r"for tensors: 1 \(down\)"):
        attest(trace_map(model, update.table), Checkpoint(tmp_path, update.table), "its checkpoint")


def test_negative_zero_and_nan_are_bits(served_model: Any, make_full: Callable[..., FullUpdate]) -> None:
    """A-ENC-1, A-ENC-2."""
    norm = torch.tensor([0.0, float("nan")] * 4)
    update = make_full({"norm": norm}, Version(0, 1))
    model = served_model()
    mapped = trace_map(model, update.table)
    overwrite(mapped, RegionTensors(update.table, update.region.copy()))
    attest(mapped, RegionTensors(update.table, update.region.copy()), "it")
    assert torch.equal(model.norm.view(torch.int32), norm.view(torch.int32))
    with torch.no_grad():
        model.norm[0] = -0.0
    with pytest.raises(IntegrityError, match="norm"):
        attest(mapped, RegionTensors(update.table, update.region.copy()), "it")


def test_overwriting_equals_loading(
    served_model: Any, make_published: Published, make_full: Callable[..., FullUpdate], get_bits: Any, fresh_bits: Any
) -> None:
    state = make_published(4, tied=False)
    update = make_full(state, Version(0, 1))
    model = served_model(1, 2, tied=False)
    overwrite(trace_map(model, update.table), RegionTensors(update.table, update.region.copy()))
    with torch.no_grad():
        model.embed[10:] = model.head[10:] = 0
    assert get_bits(model) == fresh_bits(state, 1, 2, tied=False)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    table = make_table([TensorSpec("weight", "BF16", (2, 2)), TensorSpec("none", "BF16", (0,))])
    with pytest.raises(StorageError, match="no safetensors files"):
        Checkpoint(tmp_path, table)
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(StructureError, match="has no tensor none"):
        Checkpoint(tmp_path, table)
    none = torch.zeros(0, dtype=torch.bfloat16)
    save_file({"weight": torch.zeros(2, 2), "none": none}, tmp_path / "model.safetensors")
    with pytest.raises(StructureError, match=r"weight is F32 \[2, 2\].*BF16 \[2, 2\]"):
        Checkpoint(tmp_path, table)
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    save_file({"weight": weight, "none": none}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, table)
    assert checkpoint.tensor_bytes(0).size == 0
    assert checkpoint.tensor_bytes(1).tobytes() == weight.view(torch.uint8).numpy().tobytes()
    assert np.shares_memory(checkpoint.tensor_bytes(1), checkpoint.tensor_bytes(1))
