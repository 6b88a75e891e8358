"""What the doctor says about the machine: cause, figure, next step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pulsenetd.doctor import machine
from pulsenetd.doctor.findings import Grade, Subject

GIB = 1 << 30


def make_subject(tmp_path: Path, **files: str) -> Subject:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Subject(home=tmp_path / "home", proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")


def test_the_congestion_control_is_named_with_the_order_that_changes_it(tmp_path: Path) -> None:
    subject = make_subject(tmp_path, proc__sys__net__ipv4__tcp_congestion_control="bbr\n")
    assert machine.look_at_congestion_control(subject)[0].grade is Grade.OK
    subject = make_subject(
        tmp_path,
        proc__sys__net__ipv4__tcp_congestion_control="cubic\n",
        proc__sys__net__ipv4__tcp_available_congestion_control="reno cubic bbr\n",
    )
    (finding,) = machine.look_at_congestion_control(subject)
    assert finding.grade is Grade.WARN
    assert finding.text.startswith("cubic;")
    assert finding.next_step == "as root: sysctl -w net.ipv4.tcp_congestion_control=bbr"
    subject = make_subject(tmp_path, proc__sys__net__ipv4__tcp_available_congestion_control="reno cubic\n")
    assert "modprobe tcp_bbr" in machine.look_at_congestion_control(subject)[0].next_step


def test_a_kernel_that_tells_nothing_is_a_warning(tmp_path: Path) -> None:
    subject = make_subject(tmp_path)
    assert machine.look_at_congestion_control(subject)[0].grade is Grade.WARN
    assert machine.look_at_memory(subject)[0].grade is Grade.WARN


@pytest.mark.parametrize(
    ("available", "limit", "used", "cached", "grade", "words"),
    [
        (16 * GIB, "max", "1", 0, Grade.OK, "16.0 GiB free"),
        (3 * GIB, "max", "1", 0, Grade.WARN, "3.0 GiB free"),
        (16 * GIB, str(2 * GIB), str(GIB + GIB // 2), 0, Grade.FAIL, "0.5 GiB left within this container's limit"),
        (16 * GIB, str(9 * GIB), str(9 * GIB), 8 * GIB, Grade.OK, "8.0 GiB left within this container's limit"),
    ],
)
def test_memory_is_what_machine_and_container_leave(
    tmp_path: Path, available: int, limit: str, used: str, cached: int, grade: Grade, words: str
) -> None:
    subject = make_subject(
        tmp_path,
        proc__meminfo=f"MemTotal: 1 kB\nMemAvailable: {available >> 10} kB\n",
        **{"cgroup__memory.max": limit, "cgroup__memory.current": used},
        **{"cgroup__memory.stat": f"inactive_file {cached}"},
    )
    (finding,) = machine.look_at_memory(subject)
    assert (finding.grade, finding.text) == (grade, words)


def test_disk_is_looked_at_where_runs_will_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_subject(tmp_path)
    for free, grade in ((20 * GIB, Grade.OK), (5 * GIB, Grade.WARN), (GIB // 2, Grade.FAIL)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free}))
        (finding,) = machine.look_at_disk(subject)
        assert finding.grade is grade
        assert str(tmp_path) in finding.text
    monkeypatch.setattr("os.access", lambda *_: False)
    assert machine.look_at_disk(subject)[0].grade is Grade.FAIL


def test_a_file_where_runs_will_live_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    (finding,) = machine.look_at_disk(dataclasses.replace(make_subject(tmp_path), home=tmp_path / "data" / "pulsenet"))
    assert (finding.grade, finding.text) == (Grade.FAIL, f"{tmp_path / 'data'} is no directory")


@pytest.mark.parametrize(("answer", "grade"), [(True, Grade.OK), (False, Grade.WARN), (None, Grade.WARN)])
def test_the_clocks_keeper_is_named(tmp_path: Path, answer: bool | None, grade: Grade) -> None:
    assert machine.look_at_clock(make_subject(tmp_path), lambda: answer)[0].grade is grade


def test_the_kernel_can_be_asked_about_its_clock() -> None:
    assert machine.is_clock_synchronised() in (True, False, None)


@pytest.mark.parametrize(("soft", "grade"), [(1_024, Grade.WARN), (4_096, Grade.OK), (-1, Grade.OK)])
def test_the_number_of_open_files_is_compared(tmp_path: Path, soft: int, grade: Grade) -> None:
    assert machine.look_at_files(make_subject(tmp_path), lambda _: (soft, soft))[0].grade is grade
