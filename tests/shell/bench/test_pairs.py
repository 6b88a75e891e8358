"""Checkpoints become pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pulsenet.errors import StructureError, UsageError
from pulsenetd.bench.pairs import open_pair


def test_two_checkpoints_become_regions_of_one_table(tmp_path: Path) -> None:
    weights = {"b": np.arange(40, dtype=np.float16), "a": np.arange(3, dtype=np.int64)}
    save_file(weights, tmp_path / "old.safetensors")
    save_file({**weights, "b": weights["b"] + 1}, tmp_path / "new.safetensors")
    with open_pair(tmp_path / "old.safetensors", tmp_path / "new.safetensors") as pair:
        assert [spec.name for spec in pair.table.tensors] == ["a", "b"]
        assert pair.tensor_views(0)[0].tolist() == pair.tensor_views(0)[1].tolist() == [0, 1, 2]
        assert pair.tensor_views(1)[1].view(np.float16).tolist() == (weights["b"] + 1).tolist()


def test_checkpoints_of_different_models_are_refused(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, np.float16)}, tmp_path / "old.safetensors")
    save_file({"a": np.zeros(4, np.float16)}, tmp_path / "new.safetensors")
    with (
        pytest.raises(StructureError, match="differ"),
        open_pair(tmp_path / "old.safetensors", tmp_path / "new.safetensors"),
    ):
        pass


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent"), open_pair(tmp_path / "absent", tmp_path / "absent"):
        pass
