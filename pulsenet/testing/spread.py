"""How a version spreads from one publisher to many readers over home lines: time until all have it, and who paid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pulsenet.ids import PeerId
from pulsenet.testing.checkers import BuffersStayWithinLimits, Checker, Swarm, VersionsOnlyRise
from pulsenet.testing.fakes import FakeStore
from pulsenet.testing.links import MEGABIT, Link, draw_home_link
from pulsenet.testing.node import SimNode
from pulsenet.testing.paper import PaperHands, PaperSizes
from pulsenet.testing.world import World

PUBLISHER_LINK = Link(up_rate=1_000 * MEGABIT, down_rate=1_000 * MEGABIT, delay_seconds=0.010)
"""A rented machine."""

FORMING_SECONDS = 90.0
"""How long the swarm stands before the version comes, so that everybody has neighbours."""

CHECKERS = (VersionsOnlyRise, BuffersStayWithinLimits)


class Shortfalls(Checker):
    """Remembers who told its operator that readers upload too little."""

    def __init__(self) -> None:
        self.told: set[PeerId] = set()

    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        """Read what the node reported last."""
        if node.reports.get("fetch_shortfall"):
            self.told.add(node.peer_id)


class PaperWorld(World):
    """A swarm whose weights exist on paper only.

    Args:
        seed: As in :class:`World`.
        sizes: How large blobs are.
        scale: Bytes on the wire that one byte of a chunk stands for.
    """

    def __init__(self, seed: int, sizes: PaperSizes, *, scale: float = 1.0) -> None:
        self.shortfalls = Shortfalls()
        super().__init__(seed, anchor_interval=1_000, checkers=(*CHECKERS, lambda: self.shortfalls), scale=scale)
        self.sizes = sizes

    def make_hands(self, store: FakeStore) -> PaperHands:
        """Return new hands for a life of a node."""
        return PaperHands(store, self.sizes, note_version=self.note_version)


@dataclass(frozen=True, slots=True)
class Spread:
    """What it took to bring one version to every reader."""

    reader_count: int
    payload_size_bytes: float
    half_seconds: float
    """Until half of the readers had it."""
    all_seconds: float
    bound_seconds: float
    """No scheme is faster over these lines: see :func:`compute_bound_seconds`."""
    publisher_payloads: float
    """Content of chunks the publisher sent, in units of the payload; 1 is the least."""
    received_payloads: float
    """Content of chunks all readers received for one reader, in units of the payload: above 1 is waste."""
    event_count: int
    told_count: int = 0
    """Readers whose status named a shortfall on the way; the reduced model has no status."""


def compute_bound_seconds(payload_size_bytes: float, publisher: Link, readers: list[Link]) -> float:
    """Return the least time in which everybody can have a payload.

    It leaves the publisher once, enters the slowest reader, and all uplinks together carry one copy a reader
    (the bound of Kumar and Ross for peer-to-peer distribution of a fluid).
    """
    ups = publisher.up_rate + sum(link.up_rate for link in readers)
    return payload_size_bytes * max(
        1 / publisher.up_rate, max(1 / link.down_rate for link in readers), len(readers) / ups
    )


def measure_spread(
    seed: int,
    reader_count: int,
    *,
    payload_size_bytes: int = 100_000_000,
    chunk_size_bytes: int = PaperSizes().chunk,
    scale: float = 1.0,
    publisher: Link = PUBLISHER_LINK,
    draw_link: Callable[[Callable[[int], int]], Link] = draw_home_link,
    limit_seconds: float = 7_200.0,
) -> Spread:
    """Form a swarm, publish one patch, and watch it until every reader has applied it.

    Args:
        seed: Decides lines and everything else that chance decides.
        reader_count: Inferencers.
        payload_size_bytes: Size of the patch; on the wire ``scale`` times that.
        chunk_size_bytes: Size of its chunks, also to be multiplied.
        scale: See :class:`pulsenet.testing.links.Links`: fewer and larger chunks make large swarms affordable.
        publisher: The publisher's line.
        draw_link: Draws the line of a reader.
        limit_seconds: Virtual time after which the run has failed.

    Raises:
        SimulationError: not everybody has it by then, or a rule was broken.
    """
    world = PaperWorld(seed, PaperSizes(patch=payload_size_bytes, chunk=chunk_size_bytes), scale=scale)
    trainer = world.add_node("trainer", "trainer", link=publisher)
    lines = [draw_link(world.chance.fork()) for _ in range(reader_count)]
    readers = [world.add_node(f"reader {index}", "inferencer", link=line) for index, line in enumerate(lines)]
    world.publish_and_wait()
    world.run_until(world.is_settled, limit_seconds)
    world.run_for(FORMING_SECONDS)
    sent_before = world.links.meter_of(trainer.peer_id).sent_content_size_bytes
    received_before = sum(world.links.meter_of(node.peer_id).received_content_size_bytes for node in readers)
    world.shortfalls.told.clear()
    events_before = world.event_count
    world.publish_and_wait()
    began = world.clock.now
    world.run_until(lambda: world.behind_count <= reader_count // 2, limit_seconds)
    half_seconds = world.clock.now - began
    world.run_until(world.is_settled, limit_seconds)
    sent = world.links.meter_of(trainer.peer_id).sent_content_size_bytes - sent_before
    received = sum(world.links.meter_of(node.peer_id).received_content_size_bytes for node in readers) - received_before
    return Spread(
        reader_count=reader_count,
        payload_size_bytes=payload_size_bytes * scale,
        half_seconds=half_seconds,
        all_seconds=world.clock.now - began,
        bound_seconds=compute_bound_seconds(payload_size_bytes * scale, publisher, lines),
        publisher_payloads=sent / payload_size_bytes,
        received_payloads=received / payload_size_bytes / reader_count,
        told_count=len(world.shortfalls.told),
        event_count=world.event_count - events_before,
    )
