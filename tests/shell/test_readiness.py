"""A node is ready when it is of use, and the operator may say that a stale one is not."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenetd.config import Config
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.metrics import Metrics
from pulsenetd.readiness import check_readiness

FINE = {"fork": False, "publisher_seen": True, "applied_version": 3, "engine_ready": True}


def unready(role: str, fields: dict[str, Any], **options: Any) -> list[str]:
    ledger = Ledger(Metrics(), lambda: 0.0)
    ledger.note(**{**FINE, **fields})
    checks = check_readiness(Config(role=role, **options), ledger, p2pd_answers=True)
    return [text for text, holds in checks.items() if not holds]


@pytest.mark.parametrize("role", ["trainer", "inferencer", "seed"])
def test_a_node_that_is_well_is_ready(role: str) -> None:
    assert unready(role, {}) == []
    assert unready(role, {"fork": True}) == ["no fork"]


def test_a_node_that_has_no_version_is_not_ready_unless_it_makes_them() -> None:
    assert unready("inferencer", {"applied_version": None}) == ["a version was verified and applied"]
    assert unready("trainer", {"applied_version": None}) == []


def test_a_stale_node_is_ready_unless_the_operator_says_otherwise() -> None:
    """A-AUTH-5: optional not-ready."""
    assert unready("inferencer", {"publisher_seen": False}) == []
    assert unready("inferencer", {"publisher_seen": False}, ready_while_stale=False) == ["the newest head is valid"]
    assert unready("inferencer", {}, ready_while_stale=False) == []


def test_an_engine_that_does_not_answer_is_not_ready() -> None:
    named = ["the engine answers and holds a version"]
    assert unready("inferencer", {"engine_ready": False}, engine="vllm", engine_url="http://127.0.0.1:1") == named
