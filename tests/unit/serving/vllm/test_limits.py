"""Engines that cannot be patched are refused with the reason and what to change."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pulsenet.errors import StorageError
from pulsenet.serving.vllm.limits import find_checkpoint, find_obstacle


def make_config(**changes: Any) -> Any:
    values = {"quantization": None, "use_mla": False, "data_parallel_size": 1, "lora_config": None} | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(quantization=values["quantization"], use_mla=values["use_mla"]),
        parallel_config=SimpleNamespace(data_parallel_size=values["data_parallel_size"]),
        lora_config=values["lora_config"],
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"quantization": "fp8"}, r"quantises its weights \(fp8\)"),
        ({"use_mla": True}, "latent attention"),
        ({"data_parallel_size": 2}, "data-parallel"),
        ({"lora_config": object()}, "--enable-lora"),
    ],
)
def test_what_cannot_be_patched_is_said(changes: dict[str, Any], reason: str) -> None:
    found = find_obstacle(make_config(**changes), torch.nn.Linear(2, 2))
    assert bool(found) == bool(reason)
    if reason:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)


def test_packed_copies_beside_the_weights_are_found() -> None:
    """The weights of such a head can be patched and compared, and are not what it computes with."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].cpu_linear = torch.nn.functional.linear
    assert find_obstacle(make_config(), model) == ""
    model[1].cpu_linear = lambda x, weight, bias: x
    assert "packed copies of 1 layers (first 1)" in find_obstacle(make_config(), model)


def test_a_directory_is_its_own_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(SimpleNamespace(model=str(tmp_path), revision=None)) == tmp_path


def test_a_model_of_the_hub_is_looked_up_on_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(model: str, *, revision: str | None, local_files_only: bool) -> str:
        asked.append((model, revision, local_files_only))
        if revision is None:
            raise FileNotFoundError("not cached")
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert find_checkpoint(SimpleNamespace(model="org/model", revision="main")) == tmp_path
    with pytest.raises(StorageError, match=r"org/model is not on this machine \(not cached\)"):
        find_checkpoint(SimpleNamespace(model="org/model", revision=None))
    assert asked == [("org/model", "main", True), ("org/model", None, True)]
