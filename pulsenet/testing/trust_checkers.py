"""What must hold while strangers attack: nobody believes, keeps or hides more than the run's keys said."""

from __future__ import annotations

from pulsenet.ids import Digest, PeerId, Version
from pulsenet.testing.checkers import ALL_CHECKERS, Checker, SimulationError, Swarm
from pulsenet.testing.node import SimNode
from pulsenet.testing.simulation import WALL_START_MS
from pulsenet.testing.world import World

RECORDS_MAX = 2_000
"""Records that a node may hold in a short run, whatever it is offered."""

REPORT_SECONDS = 60.0
"""How long after the end of a head's validity a node may still say that all is well."""


class OnlyWhatWasPublishedIsBelieved(Checker):
    """The newest head of every node names a version that the publisher committed, with its root."""

    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        """Look at the head."""
        head = node.trust.head
        if head is not None and swarm.versions.get(head.version) != head.root:
            raise SimulationError(swarm.seed, f"{node.name} believes in {head.version}, which nobody published")


class BeliefsOnlyMoveForward(Checker):
    """The newest head never falls, restarts included: what was believed is on the disk before it is acted on."""

    def __init__(self) -> None:
        self._newest: dict[PeerId, Version] = {}

    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        """Compare with the newest ever seen at this node."""
        head = node.trust.head
        newest = self._newest.get(node.peer_id)
        if newest is not None and (head is None or head.version < newest):
            raise SimulationError(swarm.seed, f"{node.name} was taken back from {newest}")
        if head is not None:
            self._newest[node.peer_id] = head.version


class StaleIsSaid(Checker):
    """A node whose newest head has outlived its validity says so, and does not claim to be up to date."""

    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        """Compare what is reported with the clock."""
        head = node.trust.head
        if (
            head is None
            or node.versions.follower is None
            or not isinstance(swarm, World)
            or "stale" not in node.reports
        ):
            return
        over_for_ms = WALL_START_MS + round(swarm.now * 1000) + node.skew_ms - head.valid_until_ms
        if over_for_ms > 1000 * REPORT_SECONDS and node.reports["stale"] is not True:
            raise SimulationError(swarm.seed, f"{node.name} is frozen for {over_for_ms / 1000:.0f} s and says nothing")


class NothingForeignIsStored(Checker):
    """No node keeps chunks that the publisher did not make, or more records than a run has."""

    def __init__(self) -> None:
        self._checked: set[tuple[PeerId, Digest]] = set()

    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        """Look at the chunks that came last."""
        assert isinstance(swarm, World)
        if len(node.store.records) > RECORDS_MAX:
            raise SimulationError(swarm.seed, f"{node.name} keeps {len(node.store.records)} records")
        if node.peer_id == swarm.trainer_key:
            return
        for digest in reversed(node.store.chunks):
            if (node.peer_id, digest) in self._checked:
                return
            self._checked.add((node.peer_id, digest))
            if swarm.kind_of((digest,)) == "other":
                raise SimulationError(swarm.seed, f"{node.name} keeps a chunk that nobody published")


TRUST_CHECKERS = (
    *ALL_CHECKERS,
    OnlyWhatWasPublishedIsBelieved,
    BeliefsOnlyMoveForward,
    StaleIsSaid,
    NothingForeignIsStored,
)
