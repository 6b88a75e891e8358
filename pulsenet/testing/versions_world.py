"""Trainers that publish what their rounds make, and inferencers that follow, in one process on virtual time.

To what :class:`RoundsWorld` checks this adds: one version has one root, whoever published it in whichever term, and
that root is what the outer state of its round gives; only the coordinator announces; followers see no fork and step
back to nothing.
"""

from __future__ import annotations

from pulsenet.chain.records import Head, SignedRecord
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import DialPeer
from pulsenet.node.events import HaveSeen, HeadSeen, PeerLost
from pulsenet.testing.checkers import ALL_CHECKERS, SimulationError
from pulsenet.testing.fakes import FakeDirectory, FakeStore, make_key
from pulsenet.testing.hands import Hands, Work
from pulsenet.testing.network import CALM, Faults
from pulsenet.testing.rounds_node import RoundsNode
from pulsenet.testing.rounds_world import ANSWER_SECONDS_MAX, RoundsWorld
from pulsenet.testing.versions_node import VersionsNode, cast_weights
from pulsenet.testing.weights import compute_root_of
from pulsenet.testing.world import PULL_SECONDS, WORK_SECONDS_MAX
from pulsenet.wire.schema import decode_value

HAND_OVER_SECONDS_MAX = 0.5
"""Longest time from an outer step to the end of the copy out of the training process."""


class VersionsWorld(RoundsWorld):
    """The swarm of one seed.

    Args:
        seed: Decides everything that chance decides.
        inferencer_count: Nodes that follow the versions.
        left_out_per_mille: How often a training process does not publish after a round.
        faults: How bad the network is.
        counts: As in :class:`RoundsWorld`.
    """

    node_class = VersionsNode

    def __init__(
        self,
        seed: int,
        *,
        inferencer_count: int = 1,
        left_out_per_mille: int = 0,
        faults: Faults = CALM,
        constants: dict[str, int] | None = None,
        **counts: int,
    ) -> None:
        self.directory = FakeDirectory()
        self.versions: dict[Version, Digest] = {}
        """Every version committed anywhere, with its root."""
        self.heads: list[tuple[PeerId, Head]] = []
        """Everything announced, in order."""
        self.left_out_per_mille = left_out_per_mille
        self.refusals: dict[str, int] = {}
        """How often a hand-over was refused before it began, by reason."""
        self._roots: dict[int, Digest] = {}
        self._damaged_roots: set[Digest] = set()
        self._versions_checkers = [make() for make in ALL_CHECKERS]
        super().__init__(seed, faults=faults, constants=constants, **counts)
        for index in range(inferencer_count):
            self.add_inferencer(f"inferencer {index}")

    # Scenario

    def add_inferencer(self, name: str) -> VersionsNode:
        """Add a node that follows, and start it."""
        self._add(name, make_key(name), is_authority=False, is_trainer=False)
        self.start(self.node(name))
        return self.followers[-1]

    @property
    def followers(self) -> list[VersionsNode]:
        """The inferencers."""
        return [node for node in self._versions_nodes if node.versions.role == "inferencer"]

    @property
    def publishers(self) -> list[VersionsNode]:
        """The authorities that train."""
        return [node for node in self._versions_nodes if node.is_authority and node.is_trainer]

    @property
    def leader(self) -> VersionsNode | None:
        """The authority that coordinates now, as far as it knows."""
        leading = [node for node in self.publishers if node.coordinator is not None]
        return next((n for n in leading if n.coordinator is not None and n.coordinator.is_leading(self.now)), None)

    @property
    def newest(self) -> Version | None:
        """The newest version announced."""
        return max((head.version for _, head in self.heads), default=None)

    def start(self, node: RoundsNode) -> None:
        """Start a node, for the first time or after a crash."""
        super().start(node)
        assert isinstance(node, VersionsNode)
        self.later_on(node, 0.1, lambda: self._pull(node))

    def is_followed(self) -> bool:
        """Say whether every live inferencer serves the newest announced version."""
        return all(
            node.versions.follower is not None and node.versions.follower.applied_version == self.newest
            for node in self.followers
            if node.is_up
        )

    def wait_for_round(self, round_index: int, limit_seconds: float) -> None:
        """Run until the version of a round, or a later one, was announced and every live inferencer has it."""
        number = round_index + 1

        def is_there() -> bool:
            return self.newest is not None and self.newest.number >= number and self.is_followed()

        self.run_until(is_there, limit_seconds)

    # What nodes ask of the world

    def make_hands(self, store: FakeStore) -> Hands:
        """Return new hands for a life of a node."""
        return Hands(store, engine_fails=self.network.engine_fails, note_version=self.note_version)

    def work(self, node: VersionsNode, machine: str, work: Work) -> None:
        """Let the node's hands do something that takes time; a crash may come before its machine hears of it."""
        hands = node.versions.hands

        def act() -> None:
            self.schedule(node, machine, hands.finish(work), self.chance.between(0.0, ANSWER_SECONDS_MAX))

        self.later_on(node, self.chance.between(0.0, WORK_SECONDS_MAX), act)

    def dial(self, node: VersionsNode, dial: DialPeer) -> None:
        """Try to connect two nodes."""
        other = self.nodes.get(dial.peer_id)
        if other is None or not other.is_up or self.network.is_cut(node.peer_id, dial.peer_id):
            self.notify(node, PeerLost(dial.peer_id, "refused"))
        else:
            self._connect(node, other)

    def hand_over(self, node: VersionsNode) -> None:
        """Let the training process publish the weights it holds, if it happens to."""
        training = node.training
        if training.state is None or self.chance.happens(self.left_out_per_mille):
            return
        round_index, region = training.state.round_index, cast_weights(training.state)
        if node.is_damaged:
            self._damaged_roots.add(compute_root_of(region))
        elif self._roots.setdefault(round_index, compute_root_of(region)) != compute_root_of(region):
            raise SimulationError(self.seed, f"round {round_index} gave two weights")

        def act() -> None:
            if node.is_training and node.training is training:
                reason = node.offer_snapshot(region, round_index)
                self.refusals[reason] = self.refusals.get(reason, 0) + bool(reason)

        self.later_on(node, self.chance.between(0.0, HAND_OVER_SECONDS_MAX), act)

    def note_version(self, version: Version, root: Digest) -> None:
        """A publisher committed a version, announced or not; damaged weights may be, as long as nobody hears of it."""
        expected = self._roots.get(version.number - 1)
        if root in self._damaged_roots and root != expected:
            return
        if self.versions.setdefault(version, root) != root:
            raise SimulationError(self.seed, f"{version} was committed with two roots")
        if version.epoch == 0 and expected != root:
            raise SimulationError(self.seed, f"{version} holds other weights than its round gave")

    def note_head(self, node: VersionsNode, record: SignedRecord) -> None:
        """A publisher announces."""
        head = decode_value(Head, record.payload)
        if node.coordinator is None or not node.coordinator.is_leading(self.now):
            raise SimulationError(self.seed, f"{node.name} announces {head.version} and does not lead")
        if any(known.term == head.term and key != node.peer_id for key, known in self.heads):
            raise SimulationError(self.seed, f"two nodes announce in term {head.term}")
        if self.versions.get(head.version) != head.root:
            raise SimulationError(self.seed, f"{head.version} is announced with a root it does not have")
        self.heads.append((node.peer_id, head))

    # Inside

    @property
    def _versions_nodes(self) -> list[VersionsNode]:
        return [node for node in self.nodes.values() if isinstance(node, VersionsNode)]

    def _check(self) -> None:
        super()._check()
        for node in self._versions_nodes:
            if node.is_up and node.trust.fork is not None:
                raise SimulationError(self.seed, f"{node.name} sees a fork at {node.trust.fork.version}")
        for checker in self._versions_checkers:
            checker.check(self)

    def _pull(self, node: VersionsNode) -> None:
        def is_near(peer_id: PeerId) -> bool:
            return not self.network.is_cut(node.peer_id, peer_id)

        for peer_id, record in tuple(self.directory.heads.items()):
            if is_near(peer_id):
                self.deliver_to_all(node, HeadSeen(record, None))
        for peer_id, record in tuple(self.directory.haves.items()):
            if is_near(peer_id) and peer_id != node.peer_id:
                self.deliver_to_all(node, HaveSeen(record, None))
        self.later_on(node, self.chance.between(0.8, 1.2) * PULL_SECONDS, lambda: self._pull(node))
