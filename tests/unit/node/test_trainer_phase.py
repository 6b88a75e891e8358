"""The table of the publisher's phases says what it should."""

from __future__ import annotations

from pulsenet.node.events import Committed, PatchEncoded, SnapshotOffered
from pulsenet.node.trainer_phase import TRANSITIONS, Phase


def test_every_phase_with_work_in_hand_has_a_way_to_succeed_and_one_to_fail() -> None:
    for phase in (Phase.ENCODING, Phase.SKIPPING, Phase.ANCHORING, Phase.COMMITTING):
        targets = [target for (source, _), target in TRANSITIONS.items() if source is phase]
        assert Phase.IDLE in targets
        assert len(targets) >= 2


def test_nothing_is_committed_that_was_not_made_first() -> None:
    sources = {source for (source, _), target in TRANSITIONS.items() if target is Phase.COMMITTING}
    assert sources == {Phase.ENCODING, Phase.SKIPPING, Phase.ANCHORING}
    assert TRANSITIONS[Phase.COMMITTING, Committed] is Phase.IDLE


def test_an_answer_to_work_given_up_is_refused_and_news_is_no_answer() -> None:
    assert (Phase.IDLE, PatchEncoded) not in TRANSITIONS
    assert (Phase.LEARNING, Committed) not in TRANSITIONS
    assert all(event is not SnapshotOffered for _, event in TRANSITIONS)
