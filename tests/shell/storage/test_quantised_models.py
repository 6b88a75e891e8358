"""FP8 weights beside their FP32 scales, as checkpoints hold them: file, patch, mirror and file again, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pulsenet.codec.patch import decode_patch
from pulsenet.node.events import HopApplied
from pulsenet.training.snapshot import collect_tensors
from pulsenetd.files import offline
from pulsenetd.files.safetensors_files import open_model
from pulsenetd.storage.mirror import Mirror
from pulsenetd.storage.store import Store

State = dict[str, torch.Tensor]

BLOCK = 128
"""Rows and columns that share a scale where scales are block-wise."""

SCALES = {
    "model.layers.0.mlp.down_proj.weight_scale_inv",
    "model.layers.0.self_attn.q_proj.weight_scale",
    "model.layers.1.experts.0.weight_scale",
}

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def choose_scales(largest: torch.Tensor, dtype: torch.dtype, *, is_frozen: bool) -> torch.Tensor:
    """What a stored value is multiplied by: it fills the format's range, or is a power of two with room above."""
    scales = largest.clamp(min=1e-12) / torch.finfo(dtype).max
    return torch.exp2(torch.ceil(torch.log2(scales)) + 1) if is_frozen else scales


class Trainer:
    """FP32 masters, and the checkpoint that is made of them after each step."""

    def __init__(self, *, is_frozen: bool) -> None:
        self._draw = torch.Generator().manual_seed(7)
        self._is_frozen = is_frozen
        self._frozen: State = {}
        self._masters = {
            "model.layers.0.mlp.down_proj": self._random(300, 260),
            "model.layers.0.self_attn.q_proj": self._random(200, 96),
            "model.layers.1.experts.0": self._random(64, 64),
        }
        self._norm = torch.ones(260)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._draw) * 0.02

    def step(self) -> None:
        for master in self._masters.values():
            master += torch.randn(master.shape, generator=self._draw) * 1e-4

    def checkpoint(self) -> State:
        down, query, experts = self._masters
        state: State = {"model.norm.weight": self._norm.to(torch.bfloat16)}
        # As DeepSeek: a scale for each block, named weight_scale_inv.
        scales = self._scales(down + ".weight_scale_inv", self._block_maxima(self._masters[down]), E4M3, state)
        rows, columns = self._masters[down].shape
        spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        state[down + ".weight"] = (self._masters[down] / spread).to(E4M3)
        # As compressed-tensors: one for each output channel, and a number for the activations.
        maxima = self._masters[query].abs().amax(1, keepdim=True)
        scales = self._scales(query + ".weight_scale", maxima, E4M3, state)
        state[query + ".weight"] = (self._masters[query] / scales).to(E4M3)
        state[query + ".input_scale"] = torch.tensor(0.25)
        # One for the tensor.
        scales = self._scales(experts + ".weight_scale", self._masters[experts].abs().amax(), E5M2, state)
        state[experts + ".weight"] = (self._masters[experts] / scales).to(E5M2)
        return state

    def _scales(self, name: str, maxima: torch.Tensor, dtype: torch.dtype, state: State) -> torch.Tensor:
        scales = choose_scales(maxima, dtype, is_frozen=self._is_frozen)
        state[name] = self._frozen.setdefault(name, scales) if self._is_frozen else scales
        return state[name]

    @staticmethod
    def _block_maxima(master: torch.Tensor) -> torch.Tensor:
        rows, columns = (math.ceil(size / BLOCK) for size in master.shape)
        blocks = [
            master[BLOCK * row : BLOCK * (row + 1), BLOCK * column : BLOCK * (column + 1)].abs().max()
            for row in range(rows)
            for column in range(columns)
        ]
        return torch.stack(blocks).reshape(rows, columns)


def same(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and torch.equal(first[name].reshape(-1).view(torch.uint8), second[name].reshape(-1).view(torch.uint8))
        for name in first
    )


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[Store, Mirror]]:
    store = Store.open(tmp_path / "inferencer")
    made = Mirror(store, tmp_path / "inferencer" / "spools")
    yield store, made
    made.close()
    store.close()


def write_checkpoints(directory: Path, *, is_frozen: bool) -> list[Path]:
    trainer = Trainer(is_frozen=is_frozen)
    paths = []
    for number in range(4):
        paths.append(directory / f"{number}.safetensors")
        save_file(trainer.checkpoint(), paths[-1])
        trainer.step()
    return paths


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_mirror_follows_a_model_of_fp8_weights_and_fp32_scales(
    is_frozen: bool, node: Any, kit: Any, mirror: tuple[Store, Mirror], tmp_path: Path
) -> None:
    store, follower = mirror
    changed_scales = set()
    for path in write_checkpoints(tmp_path, is_frozen=is_frozen):
        opened = open_model(path)
        region, _ = opened.copy_to_region(tmp_path)
        model = kit.Model(table=opened.table)
        model.bytes[:] = region
        before = None if node.version is None else follower._weights.region.bytes.copy()  # type: ignore[union-attr]
        manifest = node.publish(model)
        kit.copy_blob(node.store, store, manifest)
        assert follower.apply_hop(manifest) == HopApplied(manifest.version, manifest.root)
        assert follower._weights is not None
        assert np.array_equal(follower._weights.region.bytes, region)
        if before is not None:
            assert 0 < manifest.encoded_size_bytes < model.table.size_bytes // 3
            for changes in decode_patch(store.read_blob(manifest.blob_id), model.table, before):
                name = model.table.tensors[changes.tensor_index].name
                changed_scales |= {name} if "scale" in name else set()
    assert follower.verify()
    # Frozen scales cost nothing; those made anew for each version travel beside the weights, as tensors of their own.
    assert changed_scales == (set() if is_frozen else SCALES)


@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("codec", ["tight", "plain", "absolute"])
def test_patch_files_between_fp8_checkpoints_give_the_same_files(is_frozen: bool, codec: str, tmp_path: Path) -> None:
    paths = write_checkpoints(tmp_path, is_frozen=is_frozen)
    held = paths[0]
    for number, path in enumerate(paths[1:]):
        offline.patch_make(held, path, tmp_path / "p", codec=codec)
        out = tmp_path / f"out-{number}.safetensors"
        offline.patch_apply(held, tmp_path / "p", out)
        assert same(load_file(out), load_file(path))
        assert offline.verify(out)["root"] == offline.verify(path)["root"]
        assert set(offline.verify(out)["elements_by_dtype"]) == {"BF16", "F32", "F8_E4M3", "F8_E5M2"}
        held = out


def test_a_training_process_hands_over_what_the_file_holds_if_it_keeps_the_scales(tmp_path: Path) -> None:
    state = Trainer(is_frozen=False).checkpoint()
    save_file(state, tmp_path / "model.safetensors")
    expected = open_model(tmp_path / "model.safetensors").table
    table, tensors = collect_tensors(state, keep=("*scale*",))
    assert table == expected
    assert {name: data for name, data in tensors if "weight" in name} == {
        name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in state.items()
        if "weight" in name
    }
    # A scale is a parameter like any other: it is rounded to BF16 unless it is named.
    assert collect_tensors(state)[0] != expected
