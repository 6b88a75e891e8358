"""``pulsenet scrub``: for nodes that are stopped; what it deletes is named, and the exit code tells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pulsenet.ids import compute_digest
from pulsenet.wire.chunks import ChunkList
from pulsenetd import cli
from pulsenetd.storage.store import Store

DATA = b"weights"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stopped seed of the run ``mine`` with one blob."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    directory = tmp_path / "pulsenet" / "mine" / "seed"
    store = Store.open(directory)
    chunk_list = ChunkList(((len(DATA), compute_digest(DATA)),))
    store.put_chunk_list(chunk_list.blob_id, chunk_list.encode())
    store.put_chunks({compute_digest(DATA): DATA})
    store.close()
    return directory


def damage(node: Path) -> None:
    name = compute_digest(DATA).hex()
    (node / "chunks" / name[:2] / name).write_bytes(b"Weights")


def test_a_whole_store_is_said_to_be_whole(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scrub"]) == 0  # of whatever run
    assert "1 chunk (7 bytes), 0 records read; 0 chunks and 0 records were damaged" in capsys.readouterr().out


def test_damage_is_told_with_what_to_do(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(node)
    assert cli.main(["scrub", "--data-dir", str(node)]) == 6
    out = capsys.readouterr().out
    assert "1 chunk and 0 records were damaged and are deleted" in out
    assert "lacks 1 chunk (7 bytes)" in out
    assert "start the node: it fetches again" in out
    assert cli.main(["scrub", "--data-dir", str(node), "--json"]) == 6
    found = json.loads(capsys.readouterr().out)
    assert (found["whole"], found["nodes"][str(node)]["damaged_count"]) == (False, 0)
    assert found["nodes"][str(node)]["lacks"][0]["size_bytes"] == 7


def test_a_running_node_is_left_alone(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(node)
    assert cli.main(["scrub", "--run", "mine"]) == 0
    assert "left out, it is running" in capsys.readouterr().out
    assert cli.main(["scrub", "--run", "mine", "--json"]) == 0
    assert "in use" in json.loads(capsys.readouterr().out)["nodes"][str(node)]["skipped"]
    assert cli.main(["scrub", "--data-dir", str(node)]) == 4
    store.close()


def test_where_nothing_is_kept_there_is_nothing_to_read(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scrub", "--run", "other"]) == 78
    assert cli.main(["scrub", "--data-dir", str(node.parent)]) == 78
    shutil.rmtree(node)
    assert cli.main(["scrub"]) == 78
    assert capsys.readouterr().err.count("keeps anything") == 3


def look(node: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str, str]:
    cli.main(["doctor", "--data-dir", str(node), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [finding for finding in findings if finding["check"] == "stores"]
    return found["grade"], found["text"], found["next_step"]


def test_the_doctor_sees_short_and_missing_chunks_and_names_the_scrub(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert look(node, capsys)[0] == "ok"
    name = compute_digest(DATA).hex()
    (node / "chunks" / name[:2] / name).write_bytes(b"W")
    grade, text, step = look(node, capsys)
    assert (grade, "1 of 1 chunks are damaged" in text) == ("warn", True)
    assert step == f"run 'pulsenet scrub --data-dir {node}'"


def test_the_doctor_sees_a_damaged_database_and_says_how_to_go_on(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = node / "store.sqlite"
    database.write_bytes(b"rubbish!" * 1024)
    grade, text, step = look(node, capsys)
    assert (grade, "cannot be read" in text) == ("fail", True)
    assert f"mv {database} {database}.damaged" in step
    for path in node.glob("store.sqlite*"):
        path.rename(path.with_name(path.name + ".damaged"))
    Store.open(node).close()


def test_a_store_that_cannot_be_read_keeps_no_other_from_being_read(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = node.parent / "broken"  # comes first
    Store.open(broken).close()
    (broken / "store.sqlite").write_bytes(b"rubbish!" * 1024)
    assert cli.main(["scrub"]) == 6
    out, err = capsys.readouterr()
    assert f"{node}: 1 chunk" in out
    assert str(broken / "store.sqlite") in err
    assert cli.main(["scrub", "--json"]) == 6
    found = json.loads(capsys.readouterr().out)
    assert found["whole"] is False
    assert str(broken / "store.sqlite") in found["nodes"][str(broken)]["failed"]
    assert found["nodes"][str(node)]["chunk_count"] == 1
    assert cli.main(["scrub", "--data-dir", str(broken)]) == 6
    assert str(broken / "store.sqlite") in capsys.readouterr().err
