"""Reports survive the pipe; anything else on it is not taken for one."""

import io

import pytest

from pulsenetd.demo.reports import (
    Applied,
    Compared,
    EngineFound,
    Finished,
    Loaded,
    Published,
    Report,
    Resumed,
    RoundDone,
    Sampled,
    read_report,
    write_report,
)

PUBLISHED = Published(
    epoch=0,
    number=3,
    is_first=False,
    raw_size_bytes=1000,
    encoded_size_bytes=10,
    changed_count=5,
    element_count=500,
    reward=0.25,
    logprob_gap=0.01,
    staleness_max=1,
    wait_seconds=0.5,
    step_seconds=1.5,
    publish_seconds=0.2,
    offered_at=12.0,
)


@pytest.mark.parametrize(
    "report",
    [
        Loaded(1.5),
        PUBLISHED,
        Applied(0, 3, 0.1, 13.0),
        Sampled(3, 16, 0.5, 0.4),
        Finished(0, 3, "ab" * 32),
        EngineFound("vLLM 0.32.0"),
        Compared(False, "rank 0: other bits"),
        RoundDone(4, 5, "counted", 3, 10, 1000, 40, 0.5, 2.0, "ab" * 32, 1.5),
        Resumed(2, 5),
    ],
)
def test_a_report_survives_the_pipe(report: Report) -> None:
    stream = io.StringIO()
    write_report(stream, report)
    line = stream.getvalue()
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert read_report(line) == report


@pytest.mark.parametrize(
    "line", ["", "a warning", "[1]", "17", '{"report": "unknown"}', '{"report": "loaded"}', '{"seconds": 1}']
)
def test_other_lines_are_no_reports(line: str) -> None:
    assert read_report(line) is None
