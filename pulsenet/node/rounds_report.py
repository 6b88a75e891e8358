"""How far a trainer's rounds are, for status and metrics."""

from __future__ import annotations

from pulsenet.chain.ledger import Ledger
from pulsenet.node.effects import Report
from pulsenet.node.fetch import FetchProgress
from pulsenet.node.rounds_contact import Contact
from pulsenet.node.rounds_phase import Phase


def make_report(
    ledger: Ledger,
    *,
    phase: Phase,
    round_index: int,
    has_anchor: bool,
    contact: Contact,
    progress: FetchProgress,
    now: float,
) -> Report:
    """Return the report; who waits says why, and a joiner for how long it was told to."""
    is_joining = phase is Phase.JOINING
    final = ledger.final(round_index - 1)
    # No receipt leads to the state that is held: those are still to be heard of, or it is a state of another run.
    reason = "ahead" if round_index > ledger.next_round_index else progress.reason
    if phase is Phase.PENDING and not reason and contact.is_silent(now):
        reason = "no-coordinator"
    if is_joining and not has_anchor:
        reason = contact.refusal or "no-state-anchor"
    return Report(
        (
            ("rounds_phase", phase.value),
            ("rounds_reason", reason),
            ("rounds_wait_seconds", contact.wait_seconds if is_joining else 0.0),
            ("rounds_wanted_size_bytes", progress.wanted_size_bytes),
            ("rounds_held_size_bytes", progress.held_size_bytes),
            ("round_index", round_index),
            ("rounds_behind", max(0, ledger.next_round_index - round_index)),
            ("round_contributors", 0 if final is None else len(final.receipt.members)),
        )
    )
