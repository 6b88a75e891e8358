"""A state anchor counts by what receipts prove of it, and by its signature alone only where they prove none."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.chain.records import SignedRecord
from pulsenet.chain.state_anchors import StateAnchors
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, PeerId, compute_digest

FAR = 1 << 62


def root(round_index: int) -> Digest:
    return compute_digest(b"state %d" % round_index)


def outcome(round_index: int) -> Digest:
    return compute_digest(b"outcome %d" % round_index)


class Scene:
    """Two authorities, and receipts that are known of some rounds."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.rounds: set[int] = set()
        """Rounds whose final receipt is known."""
        self.authorities: set[PeerId] = {run.publisher.peer_id, run.second.peer_id}
        self.anchors = StateAnchors(
            lambda index: outcome(index) if index in self.rounds else None,
            lambda index: root(index) if index in self.rounds else None,
            lambda peer_id: peer_id in self.authorities,
        )

    def add(self, round_index: int, key: Any = None, **changes: Any) -> bool:
        leading_here = outcome(round_index - 1) if round_index else None
        anchor = self.run.state_anchor(round_index, changes.pop("outcome", leading_here), **changes)
        signed: SignedRecord = self.run.sign(anchor, key or self.run.publisher)
        return self.anchors.add(anchor, signed)

    @property
    def counted(self) -> list[int]:
        return [anchor.round_index for anchor, _ in self.anchors.list_counted()]


@pytest.fixture
def scene(run: Any) -> Scene:
    return Scene(run)


def test_what_no_receipt_leads_to_counts_only_where_none_is_proved(scene: Scene) -> None:
    """With it one leaked key would end a run: no round is above it, and what lies before it is forgotten."""
    assert scene.add(FAR)
    assert scene.add(FAR + 1)
    assert scene.counted == [FAR, FAR + 1]
    assert not scene.anchors.replaces_round(3)
    scene.rounds |= {3, 4, 5}
    assert scene.add(4)
    assert scene.counted == [4]
    assert [anchor.round_index for anchor, _ in scene.anchors.take_replaced()] == [FAR, FAR + 1]
    assert scene.add(FAR) is False
    assert scene.add(6)
    assert scene.counted == [4, 6]
    assert scene.anchors.replaces_round(3)
    assert not scene.anchors.replaces_round(4)
    assert scene.add(3) is False, "older than the two that are kept"
    assert scene.anchors.take_replaced() == []


def test_the_two_newest_are_kept_whichever_comes_first(scene: Scene) -> None:
    assert not scene.anchors.replaces_round(0), "there is none"
    scene.rounds = set(range(9))
    for round_index, counted, replaced in ((6, [6], []), (2, [2, 6], []), (4, [4, 6], [2]), (8, [6, 8], [4])):
        assert scene.add(round_index)
        assert scene.counted == counted
        assert [anchor.round_index for anchor, _ in scene.anchors.take_replaced()] == replaced
        assert scene.anchors.replaces_round(counted[0] - 1)
        assert not scene.anchors.replaces_round(counted[0])
    assert scene.add(8) is False, "known"


def test_the_receipt_that_led_to_a_state_does_not_prove_it_of_a_revoked_key(scene: Scene) -> None:
    scene.rounds |= {0, 1, 2}
    forged = compute_digest(b"forged")
    assert scene.add(2, scene.run.second)
    assert scene.add(3, scene.run.second, state_root=forged)
    with pytest.raises(TrustError) as caught:
        scene.add(3)
    assert caught.value.code == "mismatch"
    assert scene.counted == [2, 3]
    scene.authorities.remove(scene.run.second.peer_id)
    assert scene.counted == [2], "round 2 leads on from it, whoever signed it"
    assert scene.add(3)
    assert [anchor.state_root for anchor, _ in scene.anchors.list_counted()] == [root(2), root(3)]
    assert [anchor.state_root for anchor, _ in scene.anchors.take_replaced()] == [forged]


def test_what_a_receipt_contradicts_does_not_count(scene: Scene) -> None:
    for changes in ({"state_root": root(9)}, {"outcome": outcome(9)}):
        scene.rounds = {1} if "outcome" in changes else {2}
        with pytest.raises(TrustError) as caught:
            scene.add(2, **changes)
        assert caught.value.code == "mismatch"
    scene.rounds = set()
    assert scene.add(2, state_root=root(9))
    scene.rounds = {2}
    assert scene.counted == []
    assert len(list(scene.anchors)) == 1
    assert scene.add(2)
    assert scene.counted == [2]


def test_what_was_kept_is_taken_up_again(scene: Scene) -> None:
    assert scene.add(4)
    again = Scene(scene.run)
    for anchor, signed in scene.anchors:
        again.anchors.restore(anchor, signed)
    assert again.counted == [4]
    assert list(again.anchors) == list(scene.anchors)
