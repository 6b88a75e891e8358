"""``pulsenet bench codec`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pulsenetd.cli import main
from pulsenetd.commands import bench


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[str, str]:
    generator = np.random.default_rng(1)
    weights = generator.standard_normal((500, 40)).astype(np.float16)
    save_file({"w": weights}, tmp_path / "a.safetensors")
    weights.reshape(-1)[::97] += np.float16(0.125)
    save_file({"w": weights}, tmp_path / "b.safetensors")
    return str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")


def test_json_has_the_documented_fields(checkpoints: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", *checkpoints, "--seconds", "0.001", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {"changes", "dense_bytes", "entropy_bits", "codecs"} <= figures.keys()
    assert figures["dense_bytes"] == 40_000
    assert figures["changes"] == len(range(0, 20_000, 97))
    assert figures["entropy_bits"].keys() == {"density", "exponent"}
    names = {codec["name"] for codec in figures["codecs"]}
    assert {"plain", "absolute", "dense", "published", "index_value_zstd", "xor_zstd"} <= names
    for codec in figures["codecs"]:
        assert {"name", "bytes", "ratio", "bits_per_change", "encode_mb_s", "decode_mb_s"} <= codec.keys()


def test_without_checkpoints_a_synthetic_model_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "SYNTHETIC_ELEMENTS", 300_000)
    plot = tmp_path / "plot.svg"
    assert main(["bench", "codec", "--seconds", "0", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("synthetic step (seed 7)")
    assert "published" in out
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.safetensors"], "two checkpoints"),
        (["a", "b", "--trace", "c"], "not both"),
        (["--trace", "absent"], "no trace"),
        (["--trace", ".", "--steps", "9"], "range"),
        (["--trace", ".", "--steps", "9-3"], "range"),
        (["--seconds", "-1"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--plot", "figures.png"], ".svg"),
        (["absent-a", "absent-b"], "absent-a"),
    ],
)
def test_wrong_use_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "codec", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
