"""What must hold after every event, whatever the network does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pulsenet.errors import PulsenetError
from pulsenet.ids import Digest, PeerId, Version, compute_digest
from pulsenet.node.fetch import CHUNKS_IN_FLIGHT_MAX
from pulsenet.testing.disk import FailingStore
from pulsenet.testing.weights import compute_root_of
from pulsenet.wire.messages import ChunkReply, Message

if TYPE_CHECKING:
    from pulsenet.testing.node import SimNode


class SimulationError(PulsenetError):
    """A rule was broken; the message names the seed that shows it."""

    def __init__(self, seed: int, text: str) -> None:
        super().__init__(f"{text} (simulation seed {seed})")
        self.seed = seed


class StuckError(SimulationError):
    """What had to happen did not, within its time."""


class Swarm(Protocol):
    """What a checker may look at."""

    seed: int
    versions: dict[Version, Digest]

    @property
    def nodes(self) -> Mapping[PeerId, Any]: ...


class Checker:
    """Looks at what an event may have changed, and remembers what it saw."""

    def check(self, swarm: Swarm) -> None:
        """Look at every node.

        Raises:
            SimulationError: a rule is broken.
        """
        for node in swarm.nodes.values():
            self.check_node(swarm, node)

    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        """Look at a node that an event has touched; raises as :meth:`check`."""

    def check_replies(self, swarm: Swarm, node: SimNode, replies: Sequence[Message]) -> None:
        """Look at what a node answers, before the network gets at it; raises as :meth:`check`."""


class VersionsOnlyRise(Checker):
    """The version an engine serves never falls while its process lives, nor does a seed's newest."""

    def __init__(self) -> None:
        self._newest: dict[tuple[PeerId, int], Version] = {}

    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        """Compare with the newest seen in this life of the node."""
        version = None if node.versions.follower is None else node.versions.follower.applied_version
        if version is None:
            return
        key = (node.peer_id, node.life)
        if version < self._newest.get(key, version):
            raise SimulationError(swarm.seed, f"{node.name} went from {self._newest[key]} back to {version}")
        self._newest[key] = version


class EqualVersionEqualRoot(Checker):
    """Whoever says it holds a version holds the publisher's bits of it; hashed anew whenever it changes."""

    def __init__(self) -> None:
        self._mirrors: dict[PeerId, tuple[int, Version]] = {}
        self._engines: dict[PeerId, tuple[int, Version]] = {}

    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        """Hash the mirror, and compare what the engine serves with what is said of it."""
        if node.versions.follower is None or node.versions.role != "inferencer":
            return
        mirror, engine = node.versions.hands.mirror, node.versions.hands.engine
        said = node.versions.follower.mirror_version
        # While a hop is on its way back to the machine, the mirror is ahead of what is said of it.
        if said is not None and said == mirror.version and self._mirrors.get(node.peer_id) != (node.life, said):
            assert mirror.region is not None
            self._mirrors[node.peer_id] = (node.life, said)
            _require_root(swarm, node.name, said, compute_root_of(mirror.region))
        said = node.versions.follower.applied_version
        if said is not None and self._engines.get(node.peer_id) != (node.life, said):
            self._engines[node.peer_id] = (node.life, said)
            if engine.version != said:
                raise SimulationError(swarm.seed, f"{node.name} says {said}, its engine holds {engine.version}")
            _require_root(swarm, node.name, said, engine.root)


class NothingUnverifiedIsStored(Checker):
    """Every chunk that is stored is what its digest says; each is looked at once, when it comes."""

    def __init__(self) -> None:
        self._checked: set[tuple[PeerId, Digest]] = set()

    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        """Hash the chunks that came last."""
        damaged = node.store.suspects if isinstance(node.store, FailingStore) else ()
        for digest, data in reversed(node.store.chunks.items()):
            if (node.peer_id, digest) in self._checked:
                return
            if digest in damaged:
                continue  # the disk's doing: it may be held, and must not be served
            self._checked.add((node.peer_id, digest))
            if compute_digest(data) != digest:
                raise SimulationError(swarm.seed, f"{node.name} stored bytes that are not chunk {digest.hex()}")


class NothingUnverifiedIsServed(Checker):
    """Every chunk that a node sends is what its digest says, whatever its disk did to it meanwhile."""

    def check_replies(self, swarm: Swarm, node: SimNode, replies: Sequence[Message]) -> None:
        """Hash the chunks among the replies."""
        if not node.is_honest:
            return
        for reply in replies:
            if isinstance(reply, ChunkReply) and reply.data is not None and compute_digest(reply.data) != reply.digest:
                raise SimulationError(swarm.seed, f"{node.name} serves bytes that are not chunk {reply.digest.hex()}")


class BuffersStayWithinLimits(Checker):
    """No follower has more in flight than its buffers allow."""

    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        """Count the chunks in flight."""
        if node.versions.follower is not None and node.versions.follower.chunks_in_flight > CHUNKS_IN_FLIGHT_MAX:
            raise SimulationError(
                swarm.seed, f"{node.name} has {node.versions.follower.chunks_in_flight} chunks in flight"
            )


def _require_root(swarm: Swarm, name: str, version: Version, root: Digest | None) -> None:
    if swarm.versions.get(version) != root:
        raise SimulationError(swarm.seed, f"{name} holds other bits for {version} than were published")


ALL_CHECKERS: tuple[Callable[[], Checker], ...] = (
    VersionsOnlyRise,
    EqualVersionEqualRoot,
    NothingUnverifiedIsStored,
    NothingUnverifiedIsServed,
    BuffersStayWithinLimits,
)
