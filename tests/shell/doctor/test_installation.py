"""What the doctor says about packages, p2pd and keys."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from pulsenet.chain.records import JoinToken
from pulsenet.ids import RunId
from pulsenetd import runs
from pulsenetd.doctor.findings import Grade, Subject
from pulsenetd.doctor.installation import look_at_keys, look_at_p2pd, look_at_packages
from pulsenetd.identity import load_or_create


def test_versions_are_named_and_what_is_missing_too() -> None:
    (finding,) = look_at_packages(Subject(Path("/nowhere")))
    assert finding.grade is Grade.OK
    assert "hivemind 1.1." in finding.text

    def lacking(name: str) -> str:
        if name == "hivemind":
            raise importlib.metadata.PackageNotFoundError
        return "1"

    (finding,) = look_at_packages(Subject(Path("/nowhere")), lacking)
    assert (finding.grade, finding.text) == (Grade.FAIL, "missing: hivemind")
    (finding,) = look_at_packages(Subject(Path("/nowhere")), lambda _: "9.0")
    assert finding.grade is Grade.WARN


def test_a_p2pd_that_cannot_run_is_named_with_what_to_do(tmp_path: Path) -> None:
    """A-PROC-6."""
    assert look_at_p2pd(Subject(tmp_path))[0].grade is Grade.OK
    (finding,) = look_at_p2pd(Subject(tmp_path, p2pd=str(tmp_path / "p2pd")))
    assert finding.grade is Grade.FAIL
    assert str(tmp_path / "p2pd") in finding.text
    assert "reinstall hivemind" in finding.next_step


def test_keys_and_tokens_that_others_can_read_are_named_one_by_one(tmp_path: Path) -> None:
    assert look_at_keys(Subject(tmp_path))[0].text == "none on this machine yet"
    node = tmp_path / "run" / "trainer"
    node.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    files = [node / "identity.key", tmp_path / "run" / "run.json", elsewhere / "identity.key"]
    for path in files:
        load_or_create(path) if path.suffix == ".key" else write_run(path)
    subject = Subject(tmp_path, nodes=(elsewhere,))
    assert look_at_keys(subject)[0].text == "3 files, for their owner only"
    files[0].chmod(0o644)
    files[2].chmod(0o640)
    findings = look_at_keys(subject)
    assert {finding.next_step for finding in findings} == {f"chmod 600 {files[0]}", f"chmod 600 {files[2]}"}
    assert {finding.grade for finding in findings} == {Grade.FAIL}
    for finding in findings:
        assert finding.repair is not None
        finding.repair()
    assert look_at_keys(subject)[0].text == "3 files, for their owner only"


def test_a_directory_that_others_may_write_is_closed(tmp_path: Path) -> None:
    node = tmp_path / "run" / "trainer"
    load_or_create_in(node)
    node.chmod(0o777)
    (finding,) = look_at_keys(Subject(tmp_path, nodes=(node,)))
    assert (finding.grade, finding.next_step) == (Grade.FAIL, f"chmod 700 {node}")
    assert finding.repair is not None
    finding.repair()
    assert node.stat().st_mode & 0o777 == 0o700


def test_a_damaged_key_is_named_and_left_to_the_operator(tmp_path: Path) -> None:
    node = tmp_path / "run" / "trainer"
    load_or_create_in(node).write_bytes(b"no key")
    (finding,) = look_at_keys(Subject(tmp_path, nodes=(node,)))
    assert "is damaged" in finding.text
    assert finding.repair is None


def load_or_create_in(node: Path) -> Path:
    node.mkdir(parents=True)
    return load_or_create(node / "identity.key").path


def write_run(path: Path) -> None:
    runs.write_run_file(path, runs.RunFile("run", JoinToken(RunId(bytes(32)), 0, (), b"", None), ()))


def test_what_is_damaged_of_a_run_is_named_with_what_to_do(tmp_path: Path) -> None:
    """Whichever run it is: no node of it starts, and other commands pass over what is no run file."""
    write_run(tmp_path / "whole" / "run.json")
    write_run(tmp_path / "mine" / "run.json")
    (tmp_path / "mine" / "run.json").write_text("{")
    record = tmp_path / "theirs" / "descriptors" / "000000.record"
    record.parent.mkdir(parents=True)
    record.write_bytes(b"no record")
    for place in ("whole", "mine", "theirs"):
        (tmp_path / place).chmod(0o700)
    file, descriptor = look_at_keys(Subject(tmp_path))
    assert (file.grade, descriptor.grade) == (Grade.FAIL, Grade.FAIL)
    assert str(tmp_path / "mine" / "run.json") in file.text
    assert file.next_step == "delete it, then join with --token again"
    assert str(record) in descriptor.text
    assert descriptor.next_step == "delete it and join again"
