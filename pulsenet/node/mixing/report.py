"""What mixing shows operators."""

from __future__ import annotations

from collections.abc import Mapping

from pulsenet.chain.rosters import KnownRoster, Rosters
from pulsenet.node.effects import Report
from pulsenet.node.mixing.inbox import Inbox
from pulsenet.node.mixing.journal import Journal, Stand
from pulsenet.node.mixing.work import Work
from pulsenet.outer.floats import fp32_from_bits
from pulsenet.outer.mixing.settings import Job


def make_report(
    phase: str,
    round_index: int | None,
    known: KnownRoster | None,
    journal: Journal,
    rosters: Rosters,
    works: Mapping[Job, Work],
    inbox: Inbox,
) -> Report:
    """Return where a trainer stands.

    Args:
        phase: ``idle``, ``joining``, ``waiting``, ``opening``, ``training`` or ``mixing``.
        round_index: The round it is in.
        known: By which roster, if by any.
        journal: What is owed.
        rosters: Who mixes.
        works: Jobs of the open round.
        inbox: What others told.
    """
    newest = rosters.newest
    heard = inbox.heard_max(rosters.end_round)
    probe_round, distance_bits = rosters.measured or (None, None)
    return Report(
        (
            ("mixing_phase", phase),
            ("mixing_round", 0 if round_index is None else round_index),
            ("mixing_rounds_behind", max(heard - (round_index or 0), 0)),
            ("mixing_members", 0 if known is None else len(known.members)),
            ("mixing_is_listed", known is not None),
            ("mixing_roster_term", 0 if newest is None else newest.roster.term),
            ("mixing_roster_end", 0 if newest is None else newest.roster.end_round),
            ("mixing_debts_doubtful", len(journal.exchanges(Stand.ANSWERED))),
            ("mixing_debts_owed", len(journal.exchanges(Stand.OWED))),
            ("mixing_other_roots", sum(work.count_other_roots() for work in works.values())),
            ("mixing_subset_tensors", 0 if known is None else len(known.roster.subset)),
            ("disagreement", None if distance_bits is None else float(fp32_from_bits(distance_bits))),
            ("disagreement_round", probe_round),
            ("mixing_mix1", _describe(works.get(Job.MIX1))),
            ("mixing_mix2", _describe(works.get(Job.MIX2))),
        )
    )


def _describe(work: Work | None) -> str:
    if work is None:
        return "none"
    if work.result is None:
        return "open"
    return work.result.reason or "mixed"
