"""What is known about versions, and how it is shown with and without a terminal."""

import dataclasses
import io

from rich.console import Console

from pulsenetd.demo.progress import VLLM_STAGES, Progress, Screen, VersionRow, name_columns
from pulsenetd.demo.reports import Applied, Published

FIRST = Published(
    epoch=0,
    number=1,
    is_first=True,
    raw_size_bytes=2_000_000,
    encoded_size_bytes=2_000_000,
    changed_count=1_000_000,
    element_count=1_000_000,
    reward=0.0,
    logprob_gap=0.0,
    staleness_max=0,
    wait_seconds=0.0,
    step_seconds=0.0,
    publish_seconds=0.5,
    offered_at=10.0,
)
SECOND = dataclasses.replace(
    FIRST, number=2, is_first=False, encoded_size_bytes=10_000, changed_count=6_000, reward=0.25, offered_at=20.0
)


def applied(number: int, moment: float) -> Applied:
    return Applied(0, number, 0.1, moment)


def test_lag_runs_from_the_call_of_publish_to_the_last_engine() -> None:
    row = VersionRow(SECOND)
    assert row.lag_seconds is None
    row.applied = {"a": applied(2, 21.0), "b": applied(2, 23.5)}
    assert row.lag_seconds == 3.5


def test_stages_show_where_they_took_longest() -> None:
    row = VersionRow(SECOND, {"a": applied(2, 21.0)}, {"a": {"fetch": 0.5}, "b": {"fetch": 0.75, "decode": 0.25}})
    assert row.slowest("fetch") == 0.75
    assert row.slowest("decode") == 0.25
    assert row.slowest("verify") is None
    assert row.slowest("apply") == 0.1


def test_a_row_reads_as_numbers_with_units() -> None:
    row = VersionRow(SECOND, {"a": applied(2, 21.0)}, {"a": {"fetch": 0.5, "decode": 0.25, "verify": 0.125}})
    assert row.cells() == (*("0.2", "0.60%", "10.0 kB", "200x", "0.50", "0.25", "0.12", "0.10", "1.00", "0.250"),)
    assert VersionRow(FIRST).cells()[:4] == ("0.1", "all", "2.0 MB", "1x")


def test_with_vllm_the_table_shows_what_runs_beside_serving_and_what_holds_requests_up() -> None:
    row = VersionRow(SECOND, {"a": applied(2, 21.0)}, {"a": {"fetch": 0.5, "stage": 0.04, "pause": 0.02}})
    assert name_columns(VLLM_STAGES)[4:] == ("fetch", "decode", "verify", "stage", "pause", "lag", "reward")
    assert row.cells(VLLM_STAGES)[4:] == ("0.50", "-", "-", "0.04", "0.02", "1.00", "0.250")


def test_a_version_is_complete_once_every_inferencer_reached_or_passed_it() -> None:
    progress = Progress(("a", "b"))
    progress.add_published(FIRST)
    assert not progress.is_complete(1)
    progress.add_applied("a", applied(1, 11.0), {})
    assert not progress.is_complete(1)
    progress.add_published(SECOND)
    progress.add_applied("b", applied(2, 21.0), {})
    assert progress.is_complete(1)
    assert not progress.is_complete(2)


def test_an_inferencer_may_be_faster_than_the_trainers_own_report() -> None:
    progress = Progress(("a",))
    progress.add_applied("a", applied(2, 21.0), {"fetch": 0.5})
    assert not progress.is_complete(2)
    progress.add_published(SECOND)
    assert progress.is_complete(2)
    assert progress.rows[2].slowest("fetch") == 0.5


def test_without_a_terminal_each_version_is_one_line_printed_once() -> None:
    output = io.StringIO()
    progress = Progress(("a",))
    with Screen(Console(file=output, width=60), "title", progress) as screen:
        progress.add_published(FIRST)
        progress.phase = "training"
        screen.update()
        assert "2.0 MB" not in output.getvalue()
        progress.add_applied("a", applied(1, 11.0), {})
        screen.update()
        screen.update()
        progress.add_published(SECOND)
    lines = output.getvalue().splitlines()
    assert lines[0] == "title"
    assert [line.split()[0] for line in lines if "0 s]" not in line][2:] == ["version", "0.1", "0.2"]
    assert sum("training" in line for line in lines) == 1


def test_on_a_terminal_a_table_is_drawn() -> None:
    output = io.StringIO()
    progress = Progress(("a",))
    console = Console(file=output, force_terminal=True, width=120)
    with Screen(console, "title", progress):
        progress.add_published(SECOND)
        progress.phase = "training"
    assert "200x" in output.getvalue()
    assert "training" in output.getvalue()
