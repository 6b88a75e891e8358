"""What must hold after every event, whatever the network does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from pulsenet.errors import PulsenetError
from pulsenet.ids import Digest, PeerId, Version, compute_digest
from pulsenet.node.fetch import CHUNKS_IN_FLIGHT_MAX
from pulsenet.testing.weights import compute_root_of

if TYPE_CHECKING:
    from pulsenet.testing.node import SimNode


class SimulationError(PulsenetError):
    """A rule was broken; the message names the seed that shows it."""

    def __init__(self, seed: int, text: str) -> None:
        super().__init__(f"{text} (simulation seed {seed})")
        self.seed = seed


class Swarm(Protocol):
    """What a checker may look at."""

    seed: int
    nodes: dict[PeerId, SimNode]
    versions: dict[Version, Digest]


class Checker(Protocol):
    """Looks at the whole swarm after one event."""

    def check(self, swarm: Swarm) -> None:
        """Raise :class:`SimulationError` if a rule is broken."""
        ...


class VersionsOnlyRise:
    """The version an engine serves never falls while its process lives, nor does a seed's newest."""

    def __init__(self) -> None:
        self._newest: dict[tuple[PeerId, int], Version] = {}

    def check(self, swarm: Swarm) -> None:
        for peer_id, node in swarm.nodes.items():
            version = None if node.follower is None else node.follower.applied_version
            if version is None:
                continue
            key = (peer_id, node.life)
            if version < self._newest.get(key, version):
                raise SimulationError(swarm.seed, f"{node.name} went from {self._newest[key]} back to {version}")
            self._newest[key] = version


class EqualVersionEqualRoot:
    """Whoever says it holds a version holds the publisher's bits of it; hashed anew whenever it changes."""

    def __init__(self) -> None:
        self._mirrors: dict[PeerId, tuple[int, Version]] = {}
        self._engines: dict[PeerId, tuple[int, Version]] = {}

    def check(self, swarm: Swarm) -> None:
        for peer_id, node in swarm.nodes.items():
            if node.follower is None or node.role != "inferencer":
                continue
            mirror, engine = node.hands.mirror, node.hands.engine
            said = node.follower.mirror_version
            # While a hop is on its way back to the machine, the mirror is ahead of what is said of it.
            if said is not None and said == mirror.version and self._mirrors.get(peer_id) != (node.life, said):
                assert mirror.region is not None
                self._mirrors[peer_id] = (node.life, said)
                _require_root(swarm, node.name, said, compute_root_of(mirror.region))
            said = node.follower.applied_version
            if said is not None and self._engines.get(peer_id) != (node.life, said):
                self._engines[peer_id] = (node.life, said)
                if engine.version != said:
                    raise SimulationError(swarm.seed, f"{node.name} says {said}, its engine holds {engine.version}")
                _require_root(swarm, node.name, said, engine.root)


class NothingUnverifiedIsStored:
    """Every chunk that can be served is what its digest says; each is looked at once."""

    def __init__(self) -> None:
        self._counts: dict[PeerId, int] = {}
        self._checked: set[tuple[PeerId, Digest]] = set()

    def check(self, swarm: Swarm) -> None:
        for peer_id, node in swarm.nodes.items():
            chunks: Mapping[Digest, bytes] = node.store.chunks
            if self._counts.get(peer_id) == len(chunks):
                continue
            self._counts[peer_id] = len(chunks)
            for digest, data in chunks.items():
                if (peer_id, digest) in self._checked:
                    continue
                self._checked.add((peer_id, digest))
                if compute_digest(data) != digest:
                    raise SimulationError(swarm.seed, f"{node.name} stored bytes that are not chunk {digest.hex()}")


class BuffersStayWithinLimits:
    """No follower has more in flight than its buffers allow."""

    def check(self, swarm: Swarm) -> None:
        for node in swarm.nodes.values():
            if node.follower is not None and node.follower.chunks_in_flight > CHUNKS_IN_FLIGHT_MAX:
                raise SimulationError(swarm.seed, f"{node.name} has {node.follower.chunks_in_flight} chunks in flight")


def _require_root(swarm: Swarm, name: str, version: Version, root: Digest | None) -> None:
    if swarm.versions.get(version) != root:
        raise SimulationError(swarm.seed, f"{name} holds other bits for {version} than were published")


ALL_CHECKERS: tuple[Callable[[], Checker], ...] = (
    VersionsOnlyRise,
    EqualVersionEqualRoot,
    NothingUnverifiedIsStored,
    BuffersStayWithinLimits,
)
