"""``pulsenet join`` and ``pulsenet demo`` hand over to what runs for long, with what was asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pulsenetd import cli, keeper, process
from pulsenetd.config import Config
from pulsenetd.demo import orchestrator


def test_a_node_is_run_with_the_resolved_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    def run_node(config: Config) -> int:
        seen.append(config)
        return 143

    monkeypatch.setattr(process, "run_node", run_node)
    monkeypatch.setenv("PULSENET_METRICS_PORT", "9100")
    assert cli.main(["join", "--role", "seed", "--allow-uid", "1000", "--allow-uid", "1001"]) == 143
    (config,) = seen
    assert (config.role, config.metrics_port, config.allow_uid) == ("seed", 9100, ("1000", "1001"))


def test_what_follows_two_dashes_is_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(process, "run_node", lambda config: seen.append(config) or 0)
    words = ["join", "--role", "inferencer", "--engine", "vllm"]
    assert cli.main([*words, "--serve", "--", "--model", "/base", "--port", "8000"]) == 0
    assert cli.main([*words, "--engine-url", "http://127.0.0.1:8000"]) == 0
    assert [config.serve for config in seen] == [("--model", "/base", "--port", "8000"), ()]
    assert seen[1].engine_url == "http://127.0.0.1:8000"
    assert cli.main(["join", "stray"]) == 2
    assert len(seen) == 2


def test_a_supervised_node_is_started_anew_with_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Sequence[str]] = []

    def keep(arguments: Sequence[str]) -> int:
        kept.append(arguments)
        return 5

    monkeypatch.setattr(keeper, "keep", keep)
    monkeypatch.setattr(sys, "argv", ["pulsenet", "join", "--role", "seed", "--supervise"])
    assert cli.main() == 5
    assert kept == [["join", "--role", "seed", "--supervise"]]


def test_the_demo_gets_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def run_demo(**options: Any) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(orchestrator, "run_demo", run_demo)
    assert cli.main(["demo", "--model", "tiny", "--versions", "3", "--workdir", str(tmp_path), "--json"]) == 0
    expected = {"model": "tiny", "versions": 3, "inferencers": 2, "workdir": tmp_path, "json_output": True}
    assert seen == [{**expected, "vllm_python": None}]
