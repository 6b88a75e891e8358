"""The convergence benchmark runs; what it promises is checked nightly."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bench_outer as bench
import numpy as np
import outer_plot as plot
import outer_report as report
import outer_swarm as swarm
import outer_tasks as tasks
import pytest
import torch

SMALL = [
    *("--trainers", "2", "--inner-steps", "2", "--rounds", "4", "--seeds", "2", "--batch-size", "2"),
    *("--evaluate-interval", "1", "--pretrain-steps", "2", "--held-out-count", "8", "--processes", "1"),
]
BESIDE = ["--beside", "ddp", "delayed", "unflushed", "--delay-rounds", "2", "--flush-interval", "3"]
DOCUMENT = f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter\n"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    folder = tmp_path_factory.mktemp("outer")
    figures, document, picture = folder / "figures.json", folder / "outer.md", folder / "outer.svg"
    document.write_text(DOCUMENT)
    files = ["--json", str(figures), "--write", str(document), "--plot", str(picture)]
    files += ["--summary", str(folder / "summary.json")]
    # No run of four rounds lowers the loss by 5 %.
    assert bench.main([*SMALL, *files, *BESIDE]) == 1
    (row,) = json.loads((folder / "summary.json").read_text())
    assert row["measured"].startswith("PULSELoCo, 4 rounds of 2 trainers: payload ")
    assert row["ratio"].endswith(" % of DiLoCo's")
    return json.loads(figures.read_text()), document.read_text(), picture.read_text()


def test_a_short_run_reports_every_figure(written: tuple[dict[str, Any], str, str]) -> None:
    figures, document, _ = written
    summary = figures["summary"]
    assert set(figures["runs"]) == {"pulseloco", "diloco", "ddp", "delayed", "unflushed"}
    assert summary["rounds"] == [0, 1, 2, 3, 4]
    assert [row["rounds"] for row in summary["quarters"]] == [1, 2, 3, 4]
    assert len(summary["density_by_round"]) == 4
    assert 0 < summary["density_by_round"][0] < 0.5
    assert summary["payload_ratio"] > 1
    assert 3 < summary["bits_per_entry"] < 20
    assert not all(figures["holds"].values())
    assert document.startswith(f"before\n{bench.BEGIN}\nTask dialects, ")
    assert document.endswith(f"|\n{bench.END}\nafter\n")
    assert f"{summary['losses']['diloco'][-1]:.5f}" in document


def test_seeds_are_paired(written: tuple[dict[str, Any], str, str]) -> None:
    runs = written[0]["runs"]
    for name in ("diloco", "ddp", "delayed", "unflushed"):
        for one, other in zip(runs["pulseloco"], runs[name], strict=True):
            assert one["seed"] == other["seed"]
            assert one["losses"][0] == other["losses"][0]
            assert one["losses"][-1] != other["losses"][-1]
    assert runs["diloco"][0]["losses"][0] != runs["diloco"][1]["losses"][0]


def test_a_delayed_run_moves_when_its_first_aggregate_is_due(written: tuple[dict[str, Any], str, str]) -> None:
    losses = written[0]["runs"]["delayed"][0]["losses"]
    assert losses[0] == losses[1] == losses[2] != losses[3]
    # Its first aggregate is DiLoCo's first: trainers that start alike and see the same batches send the same.
    assert losses[3] == written[0]["runs"]["diloco"][0]["losses"][1]


def test_flushes_send_more_and_hold_less_and_the_gates_share_is_told_apart(
    written: tuple[dict[str, Any], str, str],
) -> None:
    flushed, plain = (written[0]["runs"][name][0] for name in ("pulseloco", "unflushed"))
    assert plain["gated_densities"] == pytest.approx(plain["densities"], rel=0.2)
    for whole, gated in zip(flushed["densities"], flushed["gated_densities"], strict=True):
        assert whole > 0.2 > gated > 0
    assert flushed["residual_norms"][-1] < 0.5 * plain["residual_norms"][-1]
    # Each block had its turn in three rounds of four.
    assert [row["never_sent"] for row in flushed["sizes"]] == [0.0] * len(flushed["sizes"])
    ratios = written[0]["summary"]["payload_ratios"]
    assert 1 < ratios["pulseloco"] < ratios["unflushed"]
    assert "each block flushed once in 3 rounds with 1 mantissa bits" in written[1]


def test_what_is_kept_is_not_run_again_and_another_plan_is_refused(tmp_path: Path) -> None:
    options = [*SMALL, "--seeds", "1", "--keep", str(tmp_path)]
    first = bench.run_all(bench.parse_arguments(options))
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(kept) == {"pulseloco-0.json", "diloco-0.json", "start-0.pickle"}
    again = bench.run_all(bench.parse_arguments(options))
    assert {name: repr(runs) for name, runs in again.items()} == {name: repr(runs) for name, runs in first.items()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    with pytest.raises(ValueError, match="another plan"):
        bench.run_all(bench.parse_arguments([*options, "--flush-interval", "2"]))


def test_sent_entries_are_counted_by_the_size_of_their_weight(written: tuple[dict[str, Any], str, str]) -> None:
    rows = written[0]["runs"]["unflushed"][0]["sizes"]
    assert {row["low"] for row in rows} <= set(swarm.SIZE_EDGES)
    assert len(rows) > 3
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    # A BF16 step grows with the weight, so that small weights pass the gate more often.
    assert rows[0]["density"] > 4 * rows[2]["density"] > 0
    assert rows[0]["never_sent"] < rows[2]["never_sent"]
    mean = sum(row["share"] * row["density"] for row in rows)
    assert mean == pytest.approx(np.mean(written[0]["runs"]["unflushed"][0]["densities"]), rel=0.1)
    assert written[0]["summary"]["sizes"][0]["low"] == 0.0


def test_applied_residuals_change_the_loss_a_little(written: tuple[dict[str, Any], str, str]) -> None:
    for run in written[0]["runs"]["pulseloco"]:
        assert run["loss_applied"] != run["losses"][-1]
        assert run["loss_applied"] == pytest.approx(run["losses"][-1], rel=1e-2)


def test_bytes_received_follow_from_the_payload(written: tuple[dict[str, Any], str, str]) -> None:
    summary = written[0]["summary"]
    dense = 4 * summary["element_count"]
    assert [row["trainers"] for row in summary["received"]] == [2, 4, 8, 16]
    for row in summary["received"]:
        count = row["trainers"]
        assert row["diloco"] == pytest.approx(2 * (count - 1) / count * dense)
        assert row["ddp"] == pytest.approx(2 * row["diloco"])
        assert row["pulseloco"] == pytest.approx((count - 1) * dense / summary["payload_ratio"])
        assert row["against_ddp"] == pytest.approx(2 * row["against_diloco"])


def test_the_picture_is_svg_with_a_line_an_algorithm(written: tuple[dict[str, Any], str, str]) -> None:
    root = ElementTree.fromstring(written[2])  # noqa: S314 - our own picture
    assert root.tag.endswith("svg")
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    # Five losses; zero and the difference; three counts of bytes.
    assert len(lines) == 5 + 2 + 3
    assert "nan" not in written[2]


def test_one_seed_has_a_picture_without_intervals() -> None:
    row = {"trainers": 2, "pulseloco": 1e4, "diloco": 3e5, "ddp": 2e6}
    summary = {
        "rounds": [0, 1],
        "losses": {"pulseloco": [2.0, 1.5], "diloco": [2.0, 1.4]},
        "losses_half_width": {"pulseloco": [math.inf, math.inf], "diloco": [math.inf, math.inf]},
        "differences": [[0.0, math.inf], [0.1, math.inf]],
        "received": [row, {**row, "trainers": 4}],
    }
    picture = plot.draw_plot(summary)
    assert ElementTree.fromstring(picture) is not None  # noqa: S314 - our own picture
    assert "inf" not in picture
    assert "nan" not in picture


def test_processes_change_no_figure(written: tuple[dict[str, Any], str, str]) -> None:
    options = bench.parse_arguments([*SMALL, "--flush-interval", "3", "--processes", "2"])
    again = bench.run_all(options)
    for name in ("pulseloco", "diloco"):
        assert [run.losses for run in again[name]] == [run["losses"] for run in written[0]["runs"][name]]


def test_the_interval_is_students() -> None:
    mean, half_width = report.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half_width == pytest.approx(4.303 / 3**0.5)
    assert report.interval([5.0]) == (5.0, float("inf"))


def _figures(algorithm: str, losses: list[float]) -> Any:
    rounds = list(range(0, 10 * len(losses), 10))
    return swarm.RunFigures(algorithm, 0, 1000, rounds, losses)


def test_rounds_behind_are_read_off_dilocos_curve() -> None:
    diloco = [_figures("diloco", [4.0, 3.0, 2.0, 1.0])]
    assert report.count_rounds_behind([_figures("pulseloco", [4.0, 3.5, 2.4, 1.0])], diloco, 2) == pytest.approx(4.0)
    assert report.count_rounds_behind([_figures("pulseloco", [4.0, 3.5, 2.4, 1.0])], diloco, 3) == 0.0
    # A loss that DiLoCo never had counts as its last round.
    assert report.count_rounds_behind([_figures("pulseloco", [4.0, 0.5, 2.4, 1.0])], diloco, 1) == -20.0


GOOD = {
    "fall_ratio": 0.06,
    "tail_ratio": 0.001,
    "density_from_round_3": [0.011, 0.059],
    "difference_ratio": [0.001, 0.0012],
    "payload_ratio": 18.0,
}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("fall_ratio", 0.04),
        ("tail_ratio", 0.004),
        ("tail_ratio", -0.004),
        ("density_from_round_3", [0.009, 0.05]),
        ("density_from_round_3", [0.02, 0.061]),
        ("density_from_round_3", []),
        ("difference_ratio", [0.001, 0.0009]),
        ("difference_ratio", [0.001, 0.0051]),
        ("payload_ratio", 16.9),
    ],
)
def test_every_promise_can_fail(name: str, bad: Any) -> None:
    assert all(report.verdicts(GOOD).values())
    assert list(report.verdicts({**GOOD, name: bad}).values()).count(False) == 1


def test_an_interval_beyond_one_percent_of_the_loss_fails_though_it_is_narrow() -> None:
    held = report.verdicts({**GOOD, "difference_ratio": [-0.0097, 0.0004]})
    assert [promise for promise, holds in held.items() if not holds] == [
        report.INCLUDES_ZERO,
        "all of the interval within 1 % of the loss",
    ]


def test_words_follow_the_dialects_odds_and_their_floor_is_its_entropy() -> None:
    next_word = np.array([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.25, 0.75]])
    dialect = tasks.Dialect(["a", "b", "c", "d"], next_word)
    words = dialect.draw_words(random.Random(1), 4000)
    after_first_class = [after for before, after in itertools.pairwise(words) if before % 2 == 0]
    assert set(after_first_class) == {0, 1}
    assert np.mean(after_first_class) == pytest.approx(0.5, abs=0.1)
    # Every second character is a space, which is certain; the others have the entropy of their word.
    rows = [dialect.draw_words(random.Random(seed), 100) for seed in range(40)]
    shares = np.linalg.matrix_power(next_word.reshape(2, 2, 2).sum(axis=1), 99)[0]
    entropy = -sum(
        share * odds * math.log(odds) for share, row in zip(shares, next_word, strict=True) for odds in row if odds
    )
    assert dialect.measure_floor(rows, 100) == pytest.approx(entropy / 2, rel=0.05)


def test_dialect_b_has_the_rewarded_words_of_a_more_often() -> None:
    task = tasks.DialectTask(learning_rate=1e-6, held_out_count=16)
    assert task.before.next_word.shape == (12, 240)
    np.testing.assert_allclose(task.after.next_word.sum(axis=1), 1.0)
    tilt = np.log(task.after.next_word / task.before.next_word)
    # One reward a word: rows differ by a constant.
    np.testing.assert_allclose(np.diff(tilt - tilt[:, :1], axis=0), 0.0, atol=1e-9)
    assert 0.5 < task.floor < 1.2
    rows = [task.after.draw_words(random.Random(seed), task.width) for seed in range(64)]
    assert task.before.measure_floor(rows, task.width) > 1.05 * task.after.measure_floor(rows, task.width)


def test_batches_are_functions_of_their_seed() -> None:
    task = tasks.DialectTask(learning_rate=1e-6)
    ids, labels = task.draw(5, 3)
    assert ids.shape == (3, task.width)
    assert torch.equal(ids, labels)
    assert torch.equal(ids, task.draw(5, 3)[0])
    assert not torch.equal(ids, task.draw(6, 3)[0])


@pytest.mark.parametrize("start", ["annealed", "steep"])
def test_the_earlier_task_runs_too(start: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main([*SMALL, "--task", "sums", "--start", start, "--seeds", "1"])
    assert f"Task sums, micro, {start}, " in capsys.readouterr().out


def test_wrong_options_are_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unmarked = tmp_path / "other.md"
    unmarked.write_text("no marks")
    for wrong in (["--seeds", "0"], ["--seeds", "99"], ["--write", str(unmarked)]):
        with pytest.raises(SystemExit):
            bench.main(wrong)
        assert wrong[0] in capsys.readouterr().err


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The figures of the default run; it needs half an hour of processor time."""
    figures = tmp_path_factory.mktemp("convergence") / "figures.json"
    bench.main(["--json", str(figures)])
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


@pytest.mark.nightly
@pytest.mark.timeout(14_400)
def test_pulseloco_trains_like_diloco_within_one_percent_of_the_loss(reported: dict[str, Any]) -> None:
    holds = reported["holds"]
    assert [promise for promise in holds if not holds[promise] and promise != report.INCLUDES_ZERO] == []


@pytest.mark.nightly
@pytest.mark.timeout(14_400)
def test_pulseloco_stays_a_few_rounds_behind_diloco(reported: dict[str, Any]) -> None:
    """A delay that does not grow: so training ends in the same place."""
    summary = reported["summary"]
    assert all(row["rounds_behind"] < 5 for row in summary["quarters"])
    assert abs(summary["difference_ratio"][0]) + summary["difference_ratio"][1] < 2e-4


@pytest.mark.nightly
@pytest.mark.timeout(14_400)
@pytest.mark.xfail(
    raises=AssertionError,
    strict=False,
    reason="a delay of two rounds shows wherever the loss falls faster than the pairs scatter: docs/outer.md",
)
def test_the_interval_includes_0(reported: dict[str, Any]) -> None:
    assert reported["holds"][report.INCLUDES_ZERO]
