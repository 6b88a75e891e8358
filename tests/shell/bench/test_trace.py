"""A recorded run is replayed step by step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pulsenet.errors import StorageError, UsageError
from pulsenetd.bench.trace import Trace

STEPS = {1: {0: 7, 5: 8}, 2: {5: 9, 11: 1}, 3: {2: 4}}
"""New bits by flat index: "b" has 0 to 7, "a" 8 to 11."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    base = {"b": torch.zeros(2, 4, dtype=torch.bfloat16), "a": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(base, tmp_path / "base.safetensors")
    layout = [{"name": "b", "offset": 0, "numel": 8}, {"name": "a", "offset": 8, "numel": 4}]
    (tmp_path / "trace.json").write_text(json.dumps({"layout": layout, "steps": 3}))
    arrays = {}
    for step, changes in STEPS.items():
        gaps = np.diff(np.array(list(changes), np.uint32), prepend=np.uint32(0)).astype("<u4")
        bits = np.array(list(changes.values()), "<u2")
        arrays[f"g{step}"] = gaps.view(np.uint8).reshape(-1, 4).T
        arrays[f"v{step}"] = bits.view(np.uint8).reshape(-1, 2).T
    np.savez_compressed(tmp_path / "diffs_off.npz", **arrays)
    return tmp_path


def test_each_step_starts_where_the_one_before_ended(directory: Path) -> None:
    pairs = list(Trace(directory, "off").pairs(2, 3))
    assert [spec.name for spec in pairs[0].table.tensors] == ["a", "b"]
    (old_a, new_a), (old_b, new_b) = pairs[0].tensor_views(0), pairs[0].tensor_views(1)
    assert (old_b.tolist(), new_b.tolist()) == ([7, 0, 0, 0, 0, 8, 0, 0], [7, 0, 0, 0, 0, 9, 0, 0])
    assert (old_a.tolist(), new_a.tolist()) == ([0, 0, 0, 0], [0, 0, 0, 1])
    assert np.array_equal(pairs[0].new, pairs[1].old)
    assert pairs[1].tensor_views(1)[1].tolist() == [7, 0, 4, 0, 0, 9, 0, 0]


def test_what_is_no_trace_is_named(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(UsageError, match=r"lacks trace\.json"):
        Trace(tmp_path / "absent", "off")
    with pytest.raises(UsageError, match=r"lacks diffs_grid\.npz"):
        Trace(directory, "grid")


@pytest.mark.parametrize("steps", [(0, 1), (2, 1), (1, 4)])
def test_steps_the_trace_lacks_are_refused(directory: Path, steps: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="1 to 3"):
        next(Trace(directory, "off").pairs(*steps))


@pytest.mark.parametrize("name", ["trace.json", "diffs_off.npz"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"junk"])
def test_a_damaged_file_is_named(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    with pytest.raises(StorageError, match="damaged trace"):
        Trace(directory, "off")


def test_changes_outside_the_model_are_damage(directory: Path) -> None:
    arrays = dict(np.load(directory / "diffs_off.npz"))
    arrays["g1"] = np.full_like(arrays["g1"], 99)
    np.savez(directory / "diffs_off.npz", **arrays)
    with pytest.raises(StorageError, match="damaged trace"):
        next(Trace(directory, "off").pairs(1, 1))


def test_a_base_that_is_not_bf16_is_damage(directory: Path) -> None:
    base = {"b": torch.zeros(2, 4), "a": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(base, directory / "base.safetensors")
    with pytest.raises(StorageError, match="not BF16"):
        Trace(directory, "off")
