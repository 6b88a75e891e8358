"""The convergence benchmark runs; what it promises is checked nightly."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load_bench() -> ModuleType:
    path = Path(__file__).with_name("bench_outer.py")
    spec = importlib.util.spec_from_file_location("bench_outer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = _load_bench()


def test_a_short_run_reports_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "PRETRAIN_STEPS", 2)
    monkeypatch.setattr(bench, "BATCH_SIZE", 2)
    monkeypatch.setattr(bench, "EVAL_SIZE", 8)
    file = tmp_path / "figures.json"
    sizes = ["--model", "micro", "--trainers", "2", "--inner-steps", "2", "--rounds", "3", "--seeds", "2"]
    bench.main([*sizes, "--json", str(file), "--write", str(tmp_path / "table.md")])
    report = json.loads(file.read_text())
    summary = report["summary"]
    assert set(report["runs"]) == {"pulseloco", "diloco", "ddp"}
    assert len(summary["density_by_round"]) == 3
    assert 0 < summary["density_by_round"][0] < 0.5
    assert summary["payload_ratio"] > 1
    assert 12 < summary["bits_per_entry"] < 40
    assert summary["received_bytes_a_round"]["ddp"] == 2 * summary["received_bytes_a_round"]["diloco"]
    assert set(report["holds"]) == set(bench.verdicts(summary))
    assert (tmp_path / "table.md").read_text() in capsys.readouterr().out


def test_the_interval_is_students() -> None:
    mean, half_width = bench.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half_width == pytest.approx(4.303 / 3**0.5)
    assert bench.interval([5.0]) == (5.0, float("inf"))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_what_is_promised_of_pulseloco_holds() -> None:
    """Needs about half an hour on two cores."""
    assert bench.main([]) == 0
