"""A node is broken in the ways operators break them, and ``pulsenet doctor`` finds it and repairs what is safe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swarm import Node, Swarm, run_command
from synthetic import MEGABYTE, SyntheticModel, connect

pytestmark = pytest.mark.e2e

GONE = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWELH8s3aTF93abUfQZ7LbLzCayr9Qjv9A5P5AugqPN2cn"


def ask(node: Node, home: Path, *options: str) -> tuple[int, dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return the doctor's exit code, its findings by check, and what it repaired."""
    done = run_command("doctor", "--data-dir", str(node.data_dir), *options, "--json", home=home)
    assert "Traceback" not in done.stderr
    said = json.loads(done.stdout)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in said["findings"]:
        found.setdefault(finding["check"], []).append(finding)
        assert finding["grade"] == "ok" or finding["next_step"], finding
    return done.returncode, found, said["repaired"]


def grade(found: dict[str, list[dict[str, Any]]], check: str) -> set[str]:
    return {str(finding["grade"]) for finding in found[check]}


def test_what_is_broken_is_named_and_what_is_safe_is_repaired(swarm: Swarm) -> None:
    home, model = swarm.home(), SyntheticModel(8 * MEGABYTE)
    trainer = swarm.add("trainer", "trainer").start().wait_ready()
    inferencer = swarm.add("inferencer", "inferencer").start().wait_ready()
    with connect(trainer.data_dir) as client:
        model.publish_step(client)
        inferencer.wait_applied(1)
        # While it runs: nothing is wrong, and it is read without being disturbed.
        _, found, _ = ask(inferencer, home, "--read-all")
        assert grade(found, "stores") == grade(found, "leftovers") == grade(found, "keys") == {"ok"}
        assert "read and whole" in found["stores"][0]["text"]
        assert any("peer" in finding["text"] for finding in found["node"])
        inferencer.kill()
        _break(inferencer)
        code, found, _ = ask(inferencer, home, "--bootstrap", GONE)
        assert code == 1
        assert grade(found, "keys") == {"fail"}
        assert grade(found, "stores") == grade(found, "leftovers") == {"warn"}
        assert "refuse" in found["bootstraps"][0]["text"]
        code, found, repaired = ask(inferencer, home, "--repair")
        assert {one["check"] for one in repaired if one["done"]} == {"keys", "stores", "leftovers"}
        assert grade(found, "keys") == grade(found, "leftovers") == {"ok"}
        assert "are missing" in found["stores"][0]["text"]
        # What was damaged comes back from the trainer, and the node goes on.
        inferencer.start().wait_ready()
        model.publish_step(client)
        inferencer.wait_applied(2)
        assert inferencer.read_root(2) == model.root


def _break(node: Node) -> None:
    """As a careless copy, a bad disk and a power cut would."""
    (node.data_dir / "identity.key").chmod(0o644)
    chunk = max(
        (path for path in (node.data_dir / "chunks").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    chunk.write_bytes(b"rot")


def test_a_node_that_was_never_there_is_no_failure_of_its_own(swarm: Swarm) -> None:
    node = swarm.add("nobody", "seed")
    _, found, _ = ask(node, swarm.home())
    assert grade(found, "keys") == grade(found, "stores") == grade(found, "leftovers") == {"ok"}
    assert "none is running" in found["node"][0]["text"]
