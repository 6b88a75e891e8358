"""The final judgement: equal bits pass, anything else is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pulsenetd.demo.comparison import compare_weights, compute_root


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    return write(tmp_path / "trainer.safetensors", a=torch.zeros(4, dtype=torch.bfloat16), b=torch.ones(2, 3))


def test_equal_bits_are_identical(trainer: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy.safetensors"
    copied.write_bytes(trainer.read_bytes())
    root = compute_root(trainer)
    comparison = compare_weights(trainer, {"one": copied}, root)["one"]
    assert comparison.is_identical
    assert comparison.root == root
    assert comparison.difference == ""


def test_negative_zero_is_a_difference_and_is_located(trainer: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.safetensors", a=torch.full((4,), -0.0, dtype=torch.bfloat16), b=torch.ones(2, 3))
    comparison = compare_weights(trainer, {"one": other}, compute_root(trainer))["one"]
    assert not comparison.is_identical
    assert comparison.difference == "a differs in 4 of 8 bytes"
    assert comparison.root != compute_root(trainer)


def test_other_tensors_are_a_difference(trainer: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.safetensors", a=torch.zeros(4, dtype=torch.bfloat16))
    comparison = compare_weights(trainer, {"one": other}, compute_root(trainer))["one"]
    assert not comparison.is_identical
    assert "other tensors" in comparison.difference


def test_an_unreadable_file_is_a_difference(trainer: Path, tmp_path: Path) -> None:
    comparison = compare_weights(trainer, {"one": tmp_path / "absent.safetensors"}, compute_root(trainer))["one"]
    assert not comparison.is_identical
    assert "absent" in comparison.difference


def test_another_root_than_the_published_one_is_a_difference(trainer: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy.safetensors"
    copied.write_bytes(trainer.read_bytes())
    comparison = compare_weights(trainer, {"one": copied}, "ab" * 32)["one"]
    assert not comparison.is_identical
    assert "abababab" in comparison.difference
