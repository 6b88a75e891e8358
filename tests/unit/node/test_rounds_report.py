"""What a trainer reports of its rounds."""

from __future__ import annotations

from typing import Any

from pulsenet.chain.ledger import Ledger
from pulsenet.node.courier import Courier
from pulsenet.node.fetch import FetchProgress
from pulsenet.node.rounds_contact import Contact
from pulsenet.node.rounds_phase import Phase
from pulsenet.node.rounds_report import make_report


def report(
    run: Any, phase: Phase, *, has_anchor: bool, refusal: str = "", reason: str = "", round_index: int = 0
) -> dict[str, Any]:
    trust = run.trust()
    ledger = Ledger(trust)
    contact = Contact(run.seat(run.second, trust, ledger), Courier())
    contact.refusal, contact.wait_seconds = refusal, 60.0 if refusal else 0.0
    progress = FetchProgress(10, 5, 1, 1, reason)
    made = make_report(
        ledger,
        phase=phase,
        round_index=round_index,
        has_anchor=has_anchor,
        contact=contact,
        progress=progress,
        now=0.0,
    )
    return dict(made.fields)


def test_a_joiner_says_why_it_waits_and_how_long_it_was_told_to(run: Any) -> None:
    """A-CHK-6."""
    fields = report(run, Phase.JOINING, has_anchor=False, refusal="busy")
    assert (fields["rounds_reason"], fields["rounds_wait_seconds"]) == ("busy", 60.0)
    assert report(run, Phase.JOINING, has_anchor=False)["rounds_reason"] == "no-state-anchor"


def test_who_fetches_says_what_holds_it_up(run: Any) -> None:
    fields = report(run, Phase.GATHERING, has_anchor=True, reason="no-source")
    assert fields["rounds_reason"] == "no-source"
    assert (fields["rounds_wanted_size_bytes"], fields["rounds_held_size_bytes"]) == (10, 5)
    assert fields["round_contributors"] == 0


def test_a_state_that_no_receipt_leads_to_is_said(run: Any) -> None:
    fields = report(run, Phase.PENDING, has_anchor=False, round_index=3)
    assert (fields["rounds_reason"], fields["rounds_behind"]) == ("ahead", 0)


def test_who_waits_for_a_receipt_says_that_nobody_closes_rounds(run: Any) -> None:
    assert report(run, Phase.PENDING, has_anchor=True)["rounds_reason"] == "no-coordinator"
    assert report(run, Phase.TRAINING, has_anchor=True)["rounds_reason"] == ""
