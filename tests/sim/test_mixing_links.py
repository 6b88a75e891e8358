"""What a pair's exchange takes of a link: both parts travel at once, on virtual time."""

from __future__ import annotations

import pytest

from pulsenet.ids import PeerId
from pulsenet.node.events import Event, ReplyReceived, RequestDone
from pulsenet.outer.mixing.settings import Job, MixingSettings, MixingVariant
from pulsenet.testing.mixing_world import MixingWorld
from pulsenet.testing.network import Faults
from pulsenet.testing.rounds_node import RoundsNode
from pulsenet.testing.toy_mixing import HEADER_SIZE_BYTES, SIZE
from pulsenet.wire.messages import ChunkReply

TRANSFER_SECONDS = 6.0
"""What a part takes of its sender's uplink and of its receiver's downlink."""

PART_SIZE_BYTES = HEADER_SIZE_BYTES + 8 * SIZE

INNER_SECONDS = 30.0
"""Long enough for Mix1 to be over before Mix2 begins."""

SLACK_SECONDS = 1.5
"""What messages, combining and hand-overs take beside transfers, on a network of 5 to 50 ms."""


class LinkWorld(MixingWorld):
    """Members at lines that take a chunk's size of time each way; one chunk after another, either way at once."""

    def __init__(self, seed: int, settings: MixingSettings, *, faults: Faults, trainer_count: int) -> None:
        self._up_free_at: dict[PeerId, float] = {}
        self._down_free_at: dict[PeerId, float] = {}
        self._done_at: dict[int, float] = {}
        self.transfers: list[tuple[float, PeerId, PeerId]] = []
        """When which sender began to send a chunk to which receiver."""
        super().__init__(
            seed,
            settings,
            faults=faults,
            step=0.5,
            inner_seconds=(INNER_SECONDS, INNER_SECONDS),
            authority_count=1,
            trainer_count=trainer_count,
        )

    def schedule(self, node: RoundsNode, machine: str, event: Event, delay_seconds: float = 0.0) -> None:
        """Deliver an event; a chunk arrives when both lines had time for it."""
        match event:
            case ReplyReceived(request_id, sender, ChunkReply(_, data)) if data is not None:
                free_at = (self._up_free_at.get(sender, 0.0), self._down_free_at.get(node.peer_id, 0.0))
                begins_at = max(self.now, *free_at)
                ends_at = begins_at + TRANSFER_SECONDS * len(data) / PART_SIZE_BYTES
                self._up_free_at[sender] = self._down_free_at[node.peer_id] = ends_at
                self.transfers.append((begins_at, sender, node.peer_id))
                delay_seconds += ends_at - self.now
                self._done_at[request_id] = self.now + delay_seconds
            case RequestDone(request_id):
                delay_seconds = max(delay_seconds, self._done_at.pop(request_id, 0.0) - self.now)
        super().schedule(node, machine, event, delay_seconds)


@pytest.mark.parametrize("trainer_count", [1, 3])
def test_the_exchange_of_a_pair_takes_about_one_transfer(trainer_count: int) -> None:
    """Over lines that carry as much either way; one part after the other would take two transfers."""
    settings = MixingSettings(variant=MixingVariant.LOCAL_M1_M2)
    world = LinkWorld(21, settings, faults=Faults(), trainer_count=trainer_count)
    world.run_rounds(4, 4 * 2 * (INNER_SECONDS + 2 * TRANSFER_SECONDS))
    waits = [(ready, seconds) for _, ready, seconds in world.waits if ready.job is Job.MIX2]
    assert len(waits) >= 4 * (trainer_count + 1)
    assert all(not ready.is_alone for ready, _ in waits)
    seconds = [seconds for _, seconds in waits]
    # A chunk that both have is not sent.
    assert min(seconds) >= TRANSFER_SECONDS / 2
    assert max(seconds) <= TRANSFER_SECONDS + SLACK_SECONDS
    # Each transfer has its opposite, which begins while it is under way.
    for begins_at, sender, receiver in world.transfers:
        opposite = [at for at, other, there in world.transfers if (other, there) == (receiver, sender)]
        assert any(abs(at - begins_at) < SLACK_SECONDS for at in opposite)
