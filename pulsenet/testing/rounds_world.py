"""Trainers and authorities in one process, on virtual time: the same seed gives the same rounds, to the last event.

The machines are the real ones; network, disks and training are fakes that fail by draw. After every event the
checkers look at everything: one outcome a round, one vote a term, one state a round, nothing counted twice or lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from pulsenet.chain.records import Receipt, SignedRecord, Vote
from pulsenet.chain.signing import decode_signed
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import RunInnerSteps, SendRequest
from pulsenet.node.events import (
    PeerConnected,
    PeerLost,
    ReplyReceived,
    RequestDone,
    RequestFailed,
)
from pulsenet.testing.fakes import make_genesis, make_key
from pulsenet.testing.network import CALM, Faults
from pulsenet.testing.outline import outline
from pulsenet.testing.rounds_checkers import RoundsChecker
from pulsenet.testing.rounds_node import RoundsNode, TrainingOrder
from pulsenet.testing.simulation import Simulation
from pulsenet.testing.toy_training import Exact
from pulsenet.wire.messages import ChunkReply, GetChunks, PushVote
from pulsenet.wire.schema import decode_value

INNER_SECONDS_MAX = 2.0
"""Longest time of the inner steps of one round."""

ORDER_SECONDS_MAX = 0.2
"""Longest time of anything else the training process does."""

ANSWER_SECONDS_MAX = 0.05
"""Longest time until the machine hears of it."""


class RoundsWorld(Simulation[RoundsNode]):
    """The trainers of one seed.

    Args:
        seed: As for :class:`Simulation`.
        authority_count: Authorities; all but ``voter_count`` of them train.
        trainer_count: Trainers that are no authorities.
        voter_count: Authorities that only vote.
        joiner_count: Trainers, listed like the others, that begin without a state and are started by hand.
        faults: Likewise.
        constants: Changes to the round constants.
    """

    node_class: type[RoundsNode] = RoundsNode

    def __init__(
        self,
        seed: int,
        *,
        authority_count: int = 3,
        trainer_count: int = 1,
        voter_count: int = 0,
        joiner_count: int = 0,
        faults: Faults = CALM,
        constants: dict[str, int] | None = None,
    ) -> None:
        super().__init__(seed, faults)
        # Rank follows the keys, so that names tell who stands first.
        keys = sorted(make_key(f"authority {index}") for index in range(authority_count))
        trainers = keys[: authority_count - voter_count]
        others = [make_key(f"trainer {index}") for index in range(trainer_count)]
        joiners = [make_key(f"joiner {index}") for index in range(joiner_count)]
        self.genesis = self._make_genesis(keys, [*trainers, *others, *joiners], constants or {})
        self._connections: set[frozenset[PeerId]] = set()
        self._checker = RoundsChecker(seed)
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

    def node(self, name: str) -> RoundsNode:
        """Return a node by its name."""
        return next(node for node in self.nodes.values() if node.name == name)

    def start(self, node: RoundsNode) -> None:
        """Start a node, for the first time or after a crash; it connects to everybody who is there."""
        node.start()
        for other in self.nodes.values():
            if other is not node and other.is_up and not self.network.is_cut(node.peer_id, other.peer_id):
                self._connect(node, other)

    def crash(self, node: RoundsNode) -> None:
        """Kill a node; its peers notice."""
        node.crash()
        for pair in sorted((pair for pair in self._connections if node.peer_id in pair), key=sorted):
            self._disconnect(pair)

    def part(self, first: RoundsNode, second: RoundsNode) -> None:
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

    @property
    def round_index(self) -> int:
        """The most rounds that any node knows as final."""
        return max((node.ledger.next_round_index for node in self.nodes.values() if node.is_up), default=0)

    @property
    def receipts(self) -> dict[int, Receipt]:
        """The final receipt of each round, as far as any live node keeps it."""
        return dict(self._checker.receipts)

    def content(self, contribution_digest: Digest) -> Exact:
        """Return what a contribution holds, as the checkers know it."""
        return self._checker.content(contribution_digest)

    def is_settled(self) -> bool:
        """Say whether all live trainers hold one state, the newest."""
        trainers = [node for node in self.nodes.values() if node.is_up and node.rounds is not None and node.is_training]
        rounds = {(n.rounds.round_index, n.rounds.state_root) for n in trainers if n.rounds is not None}
        return len(rounds) == 1 and next(iter(rounds))[0] == self.round_index

    def run_rounds(self, count: int, limit_seconds: float) -> None:
        """Run until ``count`` more rounds are final."""
        goal = self.round_index + count
        self.run_until(lambda: self.round_index >= goal, limit_seconds)

    def describe(self) -> str:
        """Return one line on where every node stands."""
        parts = []
        for node in self.nodes.values():
            where = "down"
            if node.is_up:
                where = f"knows {node.ledger.next_round_index}"
                if node.rounds is not None:
                    where += f", {node.rounds.phase} {node.rounds.round_index}"
                if node.coordinator is not None and node.coordinator.is_leading(self.now):
                    where += ", leads"
            parts.append(f"{node.name} {where}")
        return "; ".join(parts)

    def _check(self) -> None:
        self._checker.check(self.nodes)

    # What nodes ask of the world

    def train(self, node: RoundsNode, machine: str, order: TrainingOrder) -> None:
        """Let the node's training process do something that takes time, after what it is at."""
        longest = INNER_SECONDS_MAX if isinstance(order, RunInnerSteps) else ORDER_SECONDS_MAX
        if not isinstance(order, RunInnerSteps):
            # Whatever else is ordered ends running inner steps.
            node.training_free_at = min(node.training_free_at, self.now + ORDER_SECONDS_MAX)
        at = max(self.now, node.training_free_at) + self.chance.between(0.0, longest)
        node.training_free_at = at
        training = node.training

        def act() -> None:
            if node.is_training and node.training is training:
                # What is done is on disk; that it is done, a crash may keep from the machine.
                answer = node.do(order)
                self.schedule(node, machine, answer, self.chance.between(0.0, ANSWER_SECONDS_MAX))

        self.later_on(node, at - self.now, act)

    def send(self, node: RoundsNode, machine: str, request: SendRequest) -> None:
        """Carry a request to its receiver and the replies back."""
        if isinstance(request.message, PushVote):
            self._note_vote(request.message)
        failure = self.network.find_failure(node.peer_id, request.peer_id)
        if failure:
            delay_seconds = request.timeout_seconds if failure == "timeout" else self.network.latency_seconds()
            failed = RequestFailed(request.request_id, request.peer_id, failure)
            self.schedule(node, machine, failed, delay_seconds)
            return
        for _ in range(2 if self.network.duplicates() else 1):
            self.clock.after(self.network.latency_seconds(), lambda: self._arrive(node, machine, request))

    # Inside

    def _add(self, name: str, key: PeerId, **kind: bool) -> None:
        self.nodes[key] = self.node_class(name, key, self, self.chance.fork(), **kind)

    def _note_vote(self, push: PushVote) -> None:
        signed = decode_signed(push.vote)
        self._checker.note_vote(signed.signers[0], decode_value(Vote, signed.payload))

    def _arrive(self, node: RoundsNode, machine: str, request: SendRequest) -> None:
        receiver = self.nodes[request.peer_id]
        if not receiver.is_up:
            failed = RequestFailed(request.request_id, request.peer_id, "closed")
            self.schedule(node, machine, failed, self.network.latency_seconds())
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

    def _connect(self, node: RoundsNode, other: RoundsNode, delay_seconds: float = 0.0) -> None:
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

    def _make_genesis(
        self, authorities: Sequence[PeerId], trainers: Sequence[PeerId], changes: dict[str, int]
    ) -> SignedRecord:
        constants = {"contribution_wait_seconds": 5, "inner_steps": 2, "state_anchor_interval": 4, **changes}
        # Whole contributions, unless a scenario is about slices.
        constants.setdefault("all_gather_ratio_min", 0)
        signed = tuple(sorted(constants.items()))
        return make_genesis(authorities, trainers, algorithm="pulseloco", constants=signed)
