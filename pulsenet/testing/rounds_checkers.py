"""What must hold after every event of the rounds, whatever the network does and whoever dies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Contribution, Receipt, Vote
from pulsenet.chain.rules import FP32_ONE_BITS
from pulsenet.chain.signing import decode_signed
from pulsenet.ids import Digest, PeerId
from pulsenet.outer.floats import fp32_from_bits
from pulsenet.testing.checkers import SimulationError
from pulsenet.testing.toy_training import Exact, decode_entries
from pulsenet.wire.schema import decode_value

if TYPE_CHECKING:
    from pulsenet.testing.rounds_node import RoundsNode

TOLERANCE = 1e-10

CLIPPED_TOLERANCE = 1e-6
"""What scaling leaves in the residual is rounded to FP32, once a round; a step is a thousand times as large."""


class RoundsChecker:
    """Looks at every node after one event.

    It keeps its own books from what nodes stored: votes by key and term, outcomes and state roots by round, and
    the content of every contribution. What the machines say of themselves is not asked.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tolerance = TOLERANCE
        self._seen: dict[PeerId, tuple[int, int]] = {}
        self._votes: dict[tuple[PeerId, int], PeerId] = {}
        self._outcomes: dict[int, Digest] = {}
        self._computed: dict[bytes, Digest] = {}
        self._roots: dict[int, Digest] = {}
        self._contents: dict[Digest, Exact] = {}
        self._counted: dict[PeerId, dict[int, Exact]] = {}
        """What is counted of each node, by round."""
        self._accounts: dict[PeerId, tuple[object, ...]] = {}
        """Of what each account was made when it was right."""
        self.receipts: dict[int, Receipt] = {}
        """The final receipt of each round."""

    def check(self, nodes: Mapping[PeerId, RoundsNode]) -> None:
        """Raise :class:`SimulationError` if a rule is broken."""
        for node in nodes.values():
            self._read_records(node)
        for node in nodes.values():
            if node.is_up:
                self._read_finals(node, nodes)
            if node.is_damaged:
                state = node.training.state
                is_there = state is not None and state.round_index == len(self._outcomes)
                node.is_damaged = not is_there or self._roots.get(len(self._outcomes)) != node.training.state_root
                continue
            self._check_state(node)
            if node.keeps_books:
                self._check_account(node)

    def content(self, contribution_digest: Digest) -> Exact:
        """Return what a contribution holds."""
        return self._contents[contribution_digest]

    def note_vote(self, voter: PeerId, vote: Vote) -> None:
        """A key was heard voting."""
        if self._votes.setdefault((voter, vote.term), vote.candidate) != vote.candidate:
            raise SimulationError(self._seed, f"a key voted twice in term {vote.term}")

    def _read_records(self, node: RoundsNode) -> None:
        if self._seen.get(node.peer_id) == (len(node.store.records), len(node.store.lists)):
            return
        self._seen[node.peer_id] = (len(node.store.records), len(node.store.lists))
        for digest, data in node.store.records.items():
            signed = decode_signed(data)
            if signed.type != Contribution.TYPE or digest in self._contents:
                continue
            contribution = decode_value(Contribution, signed.payload)
            if node.store.holds_blob(contribution.blob_id):
                blob = b"".join(node.store.read_blob(contribution.blob_id))
                self._contents[digest] = decode_entries(blob).astype(np.float64)

    def _read_finals(self, node: RoundsNode, nodes: Mapping[PeerId, RoundsNode]) -> None:
        round_index = node.ledger.next_round_index - 1
        while round_index >= 0:
            final = node.ledger.final(round_index)
            if final is None:
                return
            outcome = self._computed.get(final.signed.payload)
            if outcome is None:
                outcome = self._computed[final.signed.payload] = outcome_of(final.receipt)
            known = self._outcomes.get(round_index)
            if known is not None:
                if known != outcome:
                    raise SimulationError(self._seed, f"two final receipts of round {round_index}")
                return
            self._outcomes[round_index] = outcome
            self.receipts[round_index] = final.receipt
            self._note_root(round_index, final.receipt.base_state_root, "a receipt")
            for member in final.receipt.members:
                if member.contribution_digest not in self._contents:
                    raise SimulationError(self._seed, f"nobody holds what round {round_index} counts")
                content = self._contents[member.contribution_digest]
                scaled = np.float64(fp32_from_bits(member.scale_bits)) * content
                self._counted.setdefault(member.peer_id, {})[round_index] = scaled
                if member.scale_bits != FP32_ONE_BITS:
                    self._tolerance = CLIPPED_TOLERANCE
            round_index -= 1

    def _check_state(self, node: RoundsNode) -> None:
        state = node.training.state if node.is_training else node.disk.state
        if state is not None and node.is_training:
            self._note_root(state.round_index, state.root, node.name)

    def _note_root(self, round_index: int, root: Digest, who: str) -> None:
        if self._roots.setdefault(round_index, root) != root:
            raise SimulationError(self._seed, f"{who} has another state of round {round_index} than others")

    def _check_account(self, node: RoundsNode) -> None:
        """Counted, held, dropped by rule and lost with a process are all that inner steps made."""
        made, gone, held = node.account()
        state = node.training.state if node.is_training else node.disk.state
        reached = 0 if state is None else state.round_index
        rounds = {index: content for index, content in self._counted.get(node.peer_id, {}).items() if index < reached}
        # Dropped as a whole before its receipt was known: what was counted of it is not gone.
        given_up = rounds.keys() & node.disk.given_up
        account = (made.tobytes(), gone.tobytes(), held.tobytes(), len(rounds), len(given_up))
        if self._accounts.get(node.peer_id) == account:
            return
        self._accounts[node.peer_id] = account
        counted: Exact = np.sum(list(rounds.values()), axis=0, initial=0.0)
        gone = gone - np.sum([rounds[index] for index in given_up], axis=0, initial=0.0)
        if np.abs(made - gone - held - counted).max() > self._tolerance:
            raise SimulationError(self._seed, f"{node.name} made {made}, counted {counted}, held {held}, gone {gone}")
