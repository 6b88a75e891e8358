"""The one table of docs/benchmarks.md: rows of what ran are new, all others stay."""

from __future__ import annotations

import re
from pathlib import Path

import bench_averager
import bench_codec
import bench_lossy
import bench_vllm
import pytest
import run_all
from reporting import Figure, measure_load, replace_block

DOCUMENT = run_all.ROOT / run_all.DOCUMENT
QUICK = [one.name for one in run_all.BENCHMARKS if one.quick is not None]
OLD = "| rounds | sent | half | `bench_received` (2 min) | 2020-01-01, elsewhere |"
LOSSY = "| goodput under loss | a patch | 0.9 | `bench_lossy` (root) | 2020-01-01, elsewhere |"


def make_document(folder: Path) -> Path:
    document = folder / "benchmarks.md"
    document.write_text(f"before\n\n{run_all.BEGIN}\n{run_all.HEAD}\n{OLD}\n{LOSSY}\n{run_all.END}\n\nafter\n")
    return document


@pytest.mark.e2e
def test_what_ran_is_new_and_all_else_stays(tmp_path: Path) -> None:
    document = make_document(tmp_path)
    assert run_all.main(["--quick", "--only", "bench_received", "bench_lossy", "--write", str(document)]) == 0
    text, rows = document.read_text(), run_all.read_rows(document)
    assert text.startswith(f"before\n\n{run_all.BEGIN}\n{run_all.HEAD}\n")
    assert text.endswith(f"{run_all.END}\n\nafter\n")
    assert rows["bench_lossy"] == [LOSSY]
    (row,) = rows["bench_received"]
    assert re.match(r"\| rounds \| PULSELoCo, 8 trainers, 4% sent, .*times below a ring all-reduce.* \|$", row)
    assert "2020" not in row
    # Nobody measured these yet.
    assert f"| memory | | | {run_all.BENCHMARKS[-1].by} | not yet |" in text


@pytest.mark.parametrize(
    ("code", "problem"), [("raise SystemExit(3)", "ended with status 3"), ("", "measured nothing")]
)
def test_a_benchmark_that_fails_keeps_its_rows_and_is_named(
    code: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench_received.py").write_text(code)
    monkeypatch.setattr(run_all, "FOLDER", tmp_path)
    document = make_document(tmp_path)
    assert run_all.main(["--quick", "--only", "bench_received", "--write", str(document)]) == 1
    assert run_all.read_rows(document)["bench_received"] == [OLD]
    assert f"bench_received {problem}" in capsys.readouterr().err


def test_a_benchmark_that_cannot_run_here_keeps_its_rows_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_all, "VLLM_PYTHON", tmp_path / "python")
    document = make_document(tmp_path)
    before = document.read_text()
    assert run_all.main(["--only", "bench_vllm", "--write", str(document)]) == 0
    assert document.read_text() == before
    assert "bench_vllm keeps its rows: there is no" in capsys.readouterr().err


def test_the_load_is_what_cores_do_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = tmp_path / "stat"
    counters.write_text("cpu  1000 0 0 5000 0 0 0 0 700 0\ncpu0 1 2 3\n")

    def pass_time(_seconds: float) -> None:
        # 600 ticks of all cores: a quarter of them at work, or held back by a host; waiting for a disk is no work.
        counters.write_text("cpu  1100 20 10 5400 50 5 5 10 9000 0\n")

    monkeypatch.setattr("reporting.time.sleep", pass_time)
    monkeypatch.setattr("reporting.os.cpu_count", lambda: 8)
    assert measure_load(counters=counters) == pytest.approx(8 * 150 / 600)
    assert measure_load(counters=tmp_path / "none") >= 0.0


def test_the_document_has_rows_of_every_benchmark_in_its_form() -> None:
    rows = run_all.read_rows(DOCUMENT)
    assert list(rows) == [one.name for one in run_all.BENCHMARKS]
    for one in run_all.BENCHMARKS:
        assert all(row.startswith(f"| {one.part} | ") and f"| {one.by} |" in row for row in rows[one.name]), one.name


def test_the_readme_quotes_the_table() -> None:
    block = (run_all.ROOT / "README.md").read_text().partition(run_all.BEGIN)[2].partition(run_all.END)[0]
    assert block.strip() == run_all.quote(run_all.read_rows(DOCUMENT))
    assert block.count("\n| ") == 2 + len(run_all.QUOTED)


def test_every_benchmark_is_run() -> None:
    scripts = {path.stem for path in Path(__file__).parent.glob("bench_*.py")}
    assert scripts == {one.name for one in run_all.BENCHMARKS}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", QUICK)
def test_every_benchmark_gives_rows_with_small_settings(name: str, tmp_path: Path) -> None:
    if name == "bench_codec" and not (bench_codec.TRACE / "trace.json").is_file():
        pytest.skip("the recorded run is not here")
    document = make_document(tmp_path)
    assert run_all.main(["--quick", "--only", name, "--write", str(document)]) in (0, 1)
    assert run_all.read_rows(document)[name]


def test_rows_of_what_needs_a_lab_or_an_engine_say_what_was_measured() -> None:
    links = [bench_lossy.Condition("bbr", rate, 0.05, 100) for rate in (5.0, 20.0)]
    lossy = [bench_lossy.Row(link, 10.0, 5.0, 1.0, False, 0.0) for link in links]
    assert list(bench_lossy.choose_figures(lossy, 20)) == [
        Figure(
            "a patch of 20 MB, bbr, 5 to 20 Mb/s with 5 % lost and 100 ms: 5.0 Mb/s",
            "0.50 of plain TCP, median 0.50 of 2",
        )
    ]
    ends = [{"digests": ["a", "b"], "outcome": "mixed", "counted": 2}] * 2
    both = [
        bench_averager.make_row(system, 2, is_killed=False, seconds=seconds, received=[1, 1], ends=ends)
        for system, seconds in (("hivemind", 2.0), ("pulsenet", 3.0))
    ]
    (mean,) = bench_averager.choose_figures(both)
    assert mean.ratio == "1.50 of the time of hivemind's averager, which left 2 equal"
    ways = [bench_vllm.Way("pulsenet: stage", 0.1, 0.01, True), bench_vllm.Way("vLLM: reload", 0.0, 0.2, True)]
    assert bench_vllm.choose_figure("1 M", ways) == Figure(
        "1 M: the engine paused 10 ms", "20.0 times that by vLLM: reload"
    )


def test_rows_of_the_codec_are_beside_public_layouts() -> None:
    sizes = {"tight": 10, "published": 29, "index_value_zstd": 54, "xor_zstd": 30}
    codecs = [{"name": name, "bytes": size, "bits_per_change": 7.4, "ratio": 334.0} for name, size in sizes.items()]
    figures = list(bench_codec.choose_figures({"trace": {view: {"codecs": codecs} for view in ("off", "grid")}}))
    assert len(figures) == 2
    assert figures[0].ratio.startswith("2.9 times below gaps and values, 5.4 below 32-bit indices")


def test_a_document_without_marks_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "plain.md"
    document.write_text("no marks")
    with pytest.raises(ValueError, match="not enough values"):
        replace_block(document, "<!-- a -->", "<!-- b -->", "text")
    assert document.read_text() == "no marks"
