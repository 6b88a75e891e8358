"""The casts of bench_views.py agree with torch's, and the script runs on the tiny model."""

from __future__ import annotations

import json
from typing import Any

import bench_views as bench
import numpy as np
import pytest
import torch

FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
DOCUMENT = f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter\n"


def _edge_values() -> np.ndarray:
    """FP32 values of every sign, exponent and upper mantissa, each exact, at half a step and just beside both."""
    high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (high[:, None] | low).reshape(-1).view(np.float32)


def _to_torch(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    bits = torch.from_numpy(values).to(dtype)
    return bits.view(torch.uint8 if bits.element_size() == 1 else torch.uint16).numpy()


@pytest.mark.parametrize("dtype", list(FP8))
def test_fp8_casts_have_torchs_bits_after_saturation(dtype: str) -> None:
    values = _edge_values()
    limit = torch.finfo(FP8[dtype]).max
    clamped = np.clip(values, -limit, limit)
    np.testing.assert_array_equal(bench.cast_to_fp8_bits(values, dtype), _to_torch(clamped, FP8[dtype]))


@pytest.mark.parametrize("dtype", list(FP8))
@pytest.mark.parametrize("scale_exponent", [-126, -9, 5, 126])
def test_fp8_scales_multiply_before_the_cast(dtype: str, scale_exponent: int) -> None:
    values = _edge_values()
    values = values[np.isfinite(values)]
    limit = torch.finfo(FP8[dtype]).max
    # Exact in FP64, and clamped before it narrows: one rounding in all, unless FP32 calls it less than normal.
    scaled = np.clip(np.ldexp(values.astype(np.float64), scale_exponent), -limit, limit)
    expected = _to_torch(scaled.astype(np.float32), FP8[dtype])
    np.testing.assert_array_equal(bench.cast_to_fp8_bits(values, dtype, scale_exponent), expected)


@pytest.mark.parametrize("dtype", list(FP8))
def test_fp8_casts_return_every_finite_pattern_that_they_are_given(dtype: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(bits).view(FP8[dtype]).to(torch.float32).numpy()
    finite = np.isfinite(values)
    np.testing.assert_array_equal(bench.cast_to_fp8_bits(values, dtype)[finite], bits[finite])


def test_fp16_casts_have_torchs_bits() -> None:
    values = _edge_values()
    mine, theirs = bench.cast_to_fp16_bits(values), _to_torch(values, torch.float16)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(mine[number], theirs[number])
    assert np.isnan(mine[~number].view(np.float16)).all()


@pytest.mark.parametrize("dtype", list(FP8))
def test_a_scale_is_the_largest_power_of_two_that_keeps_the_largest_weight_finite(dtype: str) -> None:
    limit = torch.finfo(FP8[dtype]).max
    generator = np.random.default_rng(5)
    largest = [*np.ldexp(generator.uniform(0.5, 1, 200), generator.integers(-90, 90, 200)), limit, limit * 0.25, 1.0]
    for value in np.array(largest, np.float32):
        exponent = bench.choose_scale_exponent(np.array([0.0, -value, value / 3], np.float32), dtype)
        assert float(value) * 2.0**exponent <= limit < float(value) * 2.0 ** (exponent + 1)
    assert bench.choose_scale_exponent(np.zeros(3, np.float32), dtype) == 0
    assert bench.choose_scale_exponent(np.zeros(0, np.float32), dtype) == 0
    assert bench.choose_scale_exponent(np.array([1e-44], np.float32), dtype) == bench.SCALE_EXPONENT_MAX


def test_scales_stay_as_they_were_at_the_anchor() -> None:
    view = next(view for view in bench.VIEWS if view.dtype == "F8_E4M3")
    masters = {"a": np.array([0.5, -0.25], np.float32), "b": np.array([448.0], np.float32)}
    recorder = bench.ViewRecorder(view, {"a": (2,), "b": (1, 1)}, masters)
    recorder.hold(masters)
    # 0.5 has the scale 2^9, at most 448 / 0.5: 0.5 is 256, and 1 would be 512.
    assert recorder.table.view(recorder.cast(masters), 0).tolist() == [0x78, 0x80 | 0x70]
    masters["a"][:] = [1.0, -0.25]
    figures = recorder.measure(masters)
    assert figures.changed_count == 1
    assert recorder.table.view(recorder.cast(masters), 0).tolist() == [0x7E, 0x80 | 0x70]
    assert recorder.measure(masters).changed_count == 0


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    directory = tmp_path_factory.mktemp("views")
    document, figures = directory / "benchmarks.md", directory / "figures.json"
    document.write_text(DOCUMENT)
    sizes = ["--model", "tiny", "--steps", "4", "--burn-in", "2"]
    files = ["--json", str(figures), "--write", str(document), "--summary", str(directory / "summary.json")]
    assert bench.main([*sizes, *files]) == 0
    (row,) = json.loads((directory / "summary.json").read_text())
    assert row["measured"].startswith("a patch of the BF16 view: ")
    assert row["ratio"].count("FP") == len(bench.VIEWS) - 1
    return json.loads(figures.read_text()), document.read_text()


def test_finer_views_change_more_often(report: tuple[dict[str, Any], str]) -> None:
    figures, _ = report
    rows = {row["view"]: row for row in figures["views"]}
    shares = [rows[name]["changed_ratio"] for name in ("FP8 e5m2", "FP8 e4m3", "BF16", "FP16", "FP32 master")]
    assert shares[0] > 0
    assert shares == sorted(shares)
    assert shares[-1] > 0.9
    assert [len(patches) for patches in figures["recording"]["patches"].values()] == [2] * len(bench.VIEWS)


def test_every_view_is_smaller_as_a_patch_than_whole(report: tuple[dict[str, Any], str]) -> None:
    figures, _ = report
    for row in figures["views"]:
        codecs = row["codecs"]
        assert codecs["auto"] == codecs["tight"]
        assert codecs["tight"]["bytes"] <= codecs["plain"]["bytes"] < row["dense_bytes"]
        for codec in codecs.values():
            assert codec["ratio"] == pytest.approx(row["dense_bytes"] / codec["bytes"])
        if row["view"] != "FP32 master":
            assert 0 < row["bound_bits_per_change"] < codecs["tight"]["bits_per_change"]


def test_the_table_is_written_between_its_marks(report: tuple[dict[str, Any], str]) -> None:
    _, document = report
    assert document.startswith(f"before\n{bench.BEGIN}\nMeasured ")
    assert document.endswith(f"|\n{bench.END}\nafter\n")
    table = [line for line in document.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(bench.VIEWS) * len(bench.CODECS)
    assert len({line.count("|") for line in table}) == 1


def test_a_burn_in_without_a_step_after_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--model", "tiny", "--steps", "4", "--burn-in", "4"])
    assert "--burn-in" in capsys.readouterr().err
