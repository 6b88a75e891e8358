"""What a publisher waits for in each phase."""

from __future__ import annotations

import pytest

from pulsenet.node.events import AnchorStored, Committed, EncodeFailed, ExtraFailed, PatchEncoded, SkipEncoded
from pulsenet.node.trainer_phase import ANSWERS, Phase


@pytest.mark.parametrize(
    ("phase", "success"),
    [
        (Phase.ENCODING, PatchEncoded),
        (Phase.SKIPPING, SkipEncoded),
        (Phase.ANCHORING, AnchorStored),
        (Phase.COMMITTING, Committed),
    ],
)
def test_work_in_hand_ends_in_one_way_or_fails(phase: Phase, success: type) -> None:
    failures = [answer for answer in ANSWERS[phase] if answer is not success]
    assert success in ANSWERS[phase]
    assert failures
    assert {EncodeFailed, ExtraFailed} & set(failures)


def test_without_work_in_hand_nothing_is_waited_for() -> None:
    assert set(Phase) - set(ANSWERS) == {Phase.LEARNING, Phase.IDLE}
