"""The documents that say "type this" are typed: a live swarm, an empty home, every line in its order."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from walk_through import Reader, open_home, read_steps, remove_home, why_not_run

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WALKED = ("start", "owning", "training", "serving", "recovering")

pytestmark = pytest.mark.e2e


@pytest.fixture
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    home = open_home()
    reader = Reader(home)
    try:
        yield reader
    finally:
        reader.close()
        request.node.add_report_section(
            "call", "terminals", "\n".join(f"{name}\n{text}" for name, text in reader.describe())
        )
        remove_home(home)


def open_somebodys_run(reader: Reader) -> None:
    """Make the run that a document's reader joins; its seed prints a token with an address."""
    reader.type("pulsenet keygen ~/trainer/identity.key")
    reader.type("pulsenet run create myrun --authority 12D3KooW... --open-inferencers 8")
    reader.type("pulsenet join --role seed --run myrun --data-dir ~/seed --listen /ip4/0.0.0.0/tcp/0")
    assert "/tcp/" in reader.type("pulsenet run show myrun")


def test_start_in_five_minutes(reader: Reader) -> None:
    reader.follow(DOCS / "start.md")
    assert [line.split()[0] for line in reader.printed["python train.py"].splitlines()] == [
        str(n) for n in range(1, 11)
    ]
    status = json.loads(reader.printed["pulsenet status --json"])
    assert sorted(node["role"] for node in status["nodes"]) == ["inferencer", "inferencer", "trainer"]
    assert all(node["applied_version"] == 10 for node in status["nodes"] if node["role"] == "inferencer")
    verify = "pulsenet verify ~/.local/share/pulsenet/local/inferencer/weights/current"
    roots = {facts["root"] for node in status["nodes"] for facts in node["versions"] if facts["version"] == 10}
    assert roots == {reader.printed[verify].strip()}
    assert (
        "pulsenet_version_lag 0.0"
        in reader.printed["curl -s http://127.0.0.1:9471/metrics | grep pulsenet_version_lag"]
    )


def test_owning_a_run(reader: Reader) -> None:
    reader.follow(DOCS / "owning.md")
    shown = reader.type("pulsenet run show myrun --json")
    assert json.loads(shown)["revision"] == 2
    status = json.loads(reader.type("pulsenet status --json"))
    assert {node["role"] for node in status["nodes"]} >= {"seed", "inferencer"}
    assert all(node["peers"] >= 1 for node in status["nodes"])


def test_joining_as_a_trainer(reader: Reader) -> None:
    open_somebodys_run(reader)
    reader.follow(DOCS / "training.md")
    assert "COMMITTED" in reader.printed["python loop.py"]


def test_joining_as_an_inferencer(reader: Reader) -> None:
    open_somebodys_run(reader)
    reader.follow(DOCS / "serving.md")
    assert "inferencer" in reader.printed["pulsenet status"]


def test_recovering(reader: Reader) -> None:
    """With something to recover: a node that was killed, with a damaged chunk and keys open to others."""
    reader.type("pulsenet join --role trainer")
    reader.type("pulsenet join --role inferencer")
    (reader.directory / "train.py").write_text(
        next(step.content for step in read_steps(DOCS / "start.md") if step.file == "train.py")
    )
    reader.type("python train.py")
    node = reader.home / ".local" / "share" / "pulsenet" / "local" / "inferencer"
    os.kill(int((node / "lock").read_text()), signal.SIGKILL)
    (node / "identity.key").chmod(0o644)
    max((path for path in (node / "chunks").glob("*/*")), key=lambda path: path.stat().st_size).write_bytes(b"rot")
    reader.token = json.loads(reader.type("pulsenet run show local --json"))["token"]
    reader.follow(DOCS / "recovering.md")
    assert f"chmod 600 {node / 'identity.key'}" in reader.printed["pulsenet doctor"]
    assert "chunks are damaged" in reader.printed["pulsenet doctor --read-all"]
    assert "1 damaged chunk" in reader.printed["pulsenet doctor --read-all --repair"]
    assert "fail  keys" not in reader.printed["pulsenet doctor --repair"]
    assert "no node runs" not in reader.type("pulsenet join --role inferencer")


@pytest.mark.parametrize("name", WALKED)
def test_most_lines_of_a_walk_through_are_run(name: str) -> None:
    lines = [step.line for step in read_steps(DOCS / f"{name}.md") if step.line]
    run = [line for line in lines if not why_not_run(line)]
    assert len(run) >= max(3, len(lines) // 2), lines
