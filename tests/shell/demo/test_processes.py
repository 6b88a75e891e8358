"""Child processes: reports and logs are told apart, deaths are noticed, and nobody is left behind."""

import os
import sys
import time
from pathlib import Path

import pytest

from pulsenetd.demo.processes import Children, DemoError, read_tail, run_together
from pulsenetd.demo.reports import Loaded

LEAVES_A_GRANDCHILD = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
sys.exit(0)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_for_text(path: Path, seconds: float = 20.0) -> str:
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
    raise AssertionError(f"{path} stays empty")


def is_alive(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return status != "Z"


def test_reports_are_told_from_other_lines(tmp_path: Path) -> None:
    code = "import sys; print('{\"report\": \"loaded\", \"seconds\": 2}'); print('hello'); print('oh', file=sys.stderr)"
    with Children(tmp_path) as children:
        child = children.start("one", python(code), os.environ, may_exit=True)
        assert children.reports.get(timeout=20) == ("one", Loaded(2))
        assert child.process.wait(20) == 0
    # the log tells the whole story, reports included
    assert {"hello", "oh"} < set(child.log.read_text().split())
    assert children.reports.empty()


def test_no_line_of_a_log_is_torn(tmp_path: Path) -> None:
    """Both streams end in one file, and the images of some machines have Python write each part of a line by itself."""
    code = "import sys\nfor _ in range(2000): print('to be or'); print('not to be', file=sys.stderr)"
    with Children(tmp_path) as children:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        child = children.start("one", python(code), environment, may_exit=True)
        assert child.process.wait(60) == 0
    lines = child.log.read_text().splitlines()
    assert (lines.count("to be or"), lines.count("not to be"), len(lines)) == (2000, 2000, 4000)


def test_an_expected_exit_is_no_failure(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("one", python(""), os.environ, may_exit=True)
        child.process.wait(20)
        children.check()
        children.check()


@pytest.mark.parametrize(("code", "may_exit"), [("raise SystemExit(7)", True), ("", False)])
def test_an_unexpected_exit_names_process_code_and_log(code: str, may_exit: bool, tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("one", python(code), os.environ, may_exit=may_exit)
        returned = child.process.wait(20)
        with pytest.raises(DemoError, match=f"one ended with exit code {returned}") as caught:
            children.check()
    assert caught.value.log == tmp_path / "one.log"


def test_stopping_takes_grandchildren_along(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("one", python(LEAVES_A_GRANDCHILD), os.environ, may_exit=True)
        grandchild = int(wait_for_text(child.log))
        child.process.wait(20)
        assert is_alive(grandchild)
    give_up_at = time.monotonic() + 10
    while is_alive(grandchild) and time.monotonic() < give_up_at:
        os.sched_yield()
    assert not is_alive(grandchild)


def test_short_commands_return_what_they_printed() -> None:
    assert run_together([python("print(1)"), python("print(2)")], os.environ) == ["1\n", "2\n"]


def test_a_failed_short_command_is_quoted() -> None:
    with pytest.raises(DemoError, match="exit code 3: no luck"):
        run_together([python("import sys; print('no luck', file=sys.stderr); sys.exit(3)")], os.environ)


def test_the_end_of_a_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {index}\n" for index in range(50)))
    assert read_tail(log)[-1] == "line 49"
    assert len(read_tail(log)) == 15
    assert "cannot be read" in read_tail(tmp_path / "absent")[0]


def test_a_process_that_is_killed_on_purpose_is_no_failure(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("one", python("import time; time.sleep(60)"), os.environ)
        other = children.start("two", python("import time; time.sleep(60)"), os.environ)
        children.kill("one")
        assert child.process.returncode == -9
        assert other.process.poll() is None
        children.check()
        again = children.start("one", python("import time; time.sleep(60)"), os.environ)
        children.kill("one")
        assert again.process.returncode == -9
