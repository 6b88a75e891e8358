"""What worlds of runs with rounds, or with mixing, share: who is there, who is connected, how requests travel."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any, Generic, TypeVar

from pulsenet.ids import PeerId
from pulsenet.node.effects import SendRequest
from pulsenet.node.events import PeerConnected, PeerLost, ReplyReceived, RequestDone, RequestFailed
from pulsenet.testing.fakes import make_genesis, make_key
from pulsenet.testing.ledger_node import LedgerNode
from pulsenet.testing.network import Faults
from pulsenet.testing.outline import outline
from pulsenet.testing.simulation import Simulation
from pulsenet.wire.messages import ChunkReply, GetChunks

Seated = TypeVar("Seated", bound=LedgerNode)


class LedgerWorld(Simulation[Seated], Generic[Seated]):
    """The trainers and authorities of one seed.

    Args:
        seed: As for :class:`Simulation`.
        faults: Likewise.
        algorithm: Of the run.
        constants: Of its rounds.
        authority_count: Authorities; all but ``voter_count`` of them train.
        trainer_count: Trainers that are no authorities.
        voter_count: Authorities that only vote.
        joiner_count: Trainers, listed like the others, that begin without a state and are started by hand.
        failures_per_mille: How often two nodes cannot reach each other for a whole round.
    """

    node_class: type[Any]

    def __init__(
        self,
        seed: int,
        faults: Faults,
        *,
        algorithm: str,
        constants: tuple[tuple[str, int], ...],
        authority_count: int = 3,
        trainer_count: int = 1,
        voter_count: int = 0,
        joiner_count: int = 0,
        failures_per_mille: int = 0,
    ) -> None:
        super().__init__(seed, faults)
        self._failures_per_mille = failures_per_mille
        self._failing: dict[frozenset[PeerId], int] = {}
        """Pairs between which nothing gets through in a round."""
        self._drawn_round = -1
        # Rank follows the keys, so that names tell who stands first.
        keys = sorted(make_key(f"authority {index}") for index in range(authority_count))
        trainers = keys[: authority_count - voter_count]
        others = [make_key(f"trainer {index}") for index in range(trainer_count)]
        joiners = [make_key(f"joiner {index}") for index in range(joiner_count)]
        self.genesis = make_genesis(keys, [*trainers, *others, *joiners], algorithm=algorithm, constants=constants)
        self._connections: set[frozenset[PeerId]] = set()
        for index, key in enumerate(keys):
            self._add(f"authority {index}", key, is_authority=True, is_trainer=key in trainers)
        for index, key in enumerate(others):
            self._add(f"trainer {index}", key, is_authority=False, is_trainer=True)
        for index, key in enumerate(joiners):
            self._add(f"joiner {index}", key, is_authority=False, is_trainer=True, holds_start=False)
        for node in self.nodes.values():
            if not node.name.startswith("joiner"):
                self.start(node)

    # Scenario

    def node(self, name: str) -> Seated:
        """Return a node by its name."""
        return next(node for node in self.nodes.values() if node.name == name)

    def start(self, node: Seated) -> None:
        """Start a node, for the first time or after a crash; it connects to everybody who is there."""
        node.start()
        for other in self.nodes.values():
            if other is not node and other.is_up and not self.network.is_cut(node.peer_id, other.peer_id):
                self._connect(node, other)

    def crash(self, node: Seated) -> None:
        """Kill a node; its peers notice."""
        node.crash()
        for pair in sorted((pair for pair in self._connections if node.peer_id in pair), key=sorted):
            self._disconnect(pair)

    def part(self, first: Seated, second: Seated) -> None:
        """Let nothing through between two nodes; they notice after a while."""
        self.network.partitions.add((first.peer_id, second.peer_id))
        pair = frozenset((first.peer_id, second.peer_id))

        def notice() -> None:
            if self.network.is_cut(first.peer_id, second.peer_id):
                self._disconnect(pair)

        self.clock.after(self.chance.between(0.0, 5.0), notice)

    def heal(self) -> None:
        """End all faults of the network, and connect everybody who is up, anew: who lied is asked again."""
        self.network.heal()
        for node in self.nodes.values():
            node.is_full = False
        for pair in sorted(self._connections, key=sorted):
            self._disconnect(pair)
        up = [node for node in self.nodes.values() if node.is_up]
        for index, node in enumerate(up):
            for other in up[index + 1 :]:
                self._connect(node, other, delay_seconds=1.0)

    # What nodes ask of the world

    def send(self, node: Seated, machine: str, request: SendRequest) -> None:
        """Carry a request to its receiver and the replies back."""
        failure = self.network.find_failure(node.peer_id, request.peer_id)
        if failure:
            self.fail(node, machine, request, failure)
            return
        for _ in range(2 if self.network.duplicates() else 1):
            self.clock.after(self.network.latency_seconds(), lambda: self._arrive(node, machine, request))

    def fail(self, node: Seated, machine: str, request: SendRequest, reason: str) -> None:
        """Let a request come to nothing."""
        seconds = request.timeout_seconds if reason == "timeout" else self.network.latency_seconds()
        self.schedule(node, machine, RequestFailed(request.request_id, request.peer_id, reason), seconds)

    def is_failing(self, node: Seated, peer_id: PeerId, round_index: int | None) -> bool:
        """Say whether a pair of nodes cannot reach each other in a round."""
        pair = frozenset((node.peer_id, peer_id))
        return round_index is not None and self._failing.get(pair) == round_index

    def draw_failing(self, round_index: int, keys: Iterable[PeerId]) -> None:
        """Draw once for each round which pairs cannot reach each other in it."""
        if round_index <= self._drawn_round or not self._failures_per_mille:
            return
        self._drawn_round = round_index
        for pair in combinations(sorted(keys), 2):
            if self.chance.happens(self._failures_per_mille):
                self._failing[frozenset(pair)] = round_index

    # Inside

    def _add(self, name: str, key: PeerId, **kind: bool) -> None:
        self.nodes[key] = self.node_class(name, key, self, self.chance.fork(), **kind)

    def _arrive(self, node: Seated, machine: str, request: SendRequest) -> None:
        receiver = self.nodes[request.peer_id]
        if not receiver.is_up:
            self.fail(node, machine, request, "closed")
            return
        self._trace.update(f"{self.now:.6f} {receiver.name} asked {outline(request.message)}\n".encode())
        last_seconds = 0.0
        for reply in receiver.answer(request.message, node.peer_id):
            received = self.network.corrupt(receiver.peer_id, reply)
            if isinstance(received, ChunkReply):
                node.received_size_bytes += len(received.data or b"")
            delay_seconds = self.network.latency_seconds()
            last_seconds = max(last_seconds, delay_seconds)
            self.schedule(node, machine, ReplyReceived(request.request_id, receiver.peer_id, received), delay_seconds)
        if isinstance(request.message, GetChunks):
            self.schedule(node, machine, RequestDone(request.request_id, receiver.peer_id), last_seconds)

    def _connect(self, node: Seated, other: Seated, delay_seconds: float = 0.0) -> None:
        self._connections.add(frozenset((node.peer_id, other.peer_id)))
        for here, there in ((node, other), (other, node)):
            event = PeerConnected(there.peer_id, (), outbound=here is node)
            self.notify(here, event, delay_seconds)

    def _disconnect(self, pair: frozenset[PeerId]) -> None:
        if pair not in self._connections:
            return
        self._connections.discard(pair)
        first, second = sorted(pair)
        for here, there in ((first, second), (second, first)):
            self.notify(self.nodes[here], PeerLost(there, "closed"))
