"""What makes a node useful to those who wait for it: the lines of ``/readyz?verbose``."""

from __future__ import annotations

from pulsenetd.config import Config
from pulsenetd.handlers.reporting import Ledger


def check_readiness(config: Config, ledger: Ledger, *, p2pd_answers: bool) -> dict[str, bool]:
    """Return every check by what it says; all must hold.

    Args:
        config: The role decides what a node has to have; ``ready_while_stale`` is the operator's choice (A-AUTH-5).
        ledger: What the machines reported last.
        p2pd_answers: Whether the network is up.
    """
    fields = ledger.fields
    checks = {"p2pd answers": p2pd_answers, "no fork": not fields.get("fork", False)}
    if not config.ready_while_stale:
        checks["the newest head is valid"] = bool(fields.get("publisher_seen", False))
    if config.role != "trainer":
        checks["a version was verified and applied"] = fields.get("applied_version") is not None
        checks["the last update succeeded"] = not ledger.last_update_failed
    if config.role == "inferencer" and config.engine == "vllm":
        checks["the engine answers and holds a version"] = bool(fields.get("engine_ready"))
    return checks
