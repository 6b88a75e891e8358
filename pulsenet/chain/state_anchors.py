"""Which state anchors count, and which of those are kept (SPEC section 6.11).

One authority signs an anchor, and a key that leaked could name any round and any state. So receipts have to prove it;
where they prove none, as at a newcomer, the word of a key that is an authority has to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final

from pulsenet.chain.records import SignedRecord, StateAnchor
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, PeerId

ANCHORS_KEPT: Final = 2

Kept = tuple[StateAnchor, SignedRecord]


class Proof(IntEnum):
    """What proves a state anchor."""

    NONE = 0
    """Nothing but its signature."""
    BEFORE = 1
    """The receipt of the round that led to it: the state itself is its signer's word."""
    AFTER = 2
    """The receipt of the round that leads on from it, whoever signed the anchor."""


class StateAnchors:
    """The newest state anchors.

    Args:
        find_outcome: Returns the outcome of the final receipt of a round, if known.
        find_base: Returns the root of the state that the final receipt of a round leads on from, likewise.
        may_sign: Says whether a key is an authority now.
    """

    def __init__(
        self,
        find_outcome: Callable[[int], Digest | None],
        find_base: Callable[[int], Digest | None],
        may_sign: Callable[[PeerId], bool],
    ) -> None:
        self._find_outcome = find_outcome
        self._find_base = find_base
        self._may_sign = may_sign
        self._kept: tuple[Kept, ...] = ()
        self._replaced: list[Kept] = []

    def __iter__(self) -> Iterator[Kept]:
        """Yield what is kept, whether or not it counts now, ascending by round."""
        return iter(self._kept)

    def list_counted(self) -> tuple[Kept, ...]:
        """Return those that count now, ascending by round."""
        return self._count()[0]

    def replaces_round(self, round_index: int) -> bool:
        """Say whether what led on from this round was replaced by an anchor long ago."""
        counted, are_proved = self._count()
        return are_proved and round_index < counted[0][0].round_index

    def restore(self, anchor: StateAnchor, signed: SignedRecord) -> None:
        """Keep one that an earlier life kept; they come ascending by round."""
        self._kept += ((anchor, signed),)

    def add(self, anchor: StateAnchor, signed: SignedRecord) -> bool:
        """Keep one that an authority signed, and say whether it is news.

        Raises:
            TrustError: ``mismatch`` when it contradicts a final receipt or another anchor that counts.
        """
        proof = self._judge(anchor, signed)
        counted, are_proved = self._count()
        if proof is None:
            raise TrustError("mismatch", f"state {anchor.round_index} is another by the receipts around it")
        for known, _ in counted:
            if known.round_index == anchor.round_index:
                if known.state_root != anchor.state_root:
                    raise TrustError("mismatch", f"two state anchors of round {anchor.round_index} differ")
                return False
        is_proved = proof is not Proof.NONE
        if are_proved and not is_proved:
            return False  # whoever offers it offers it again, once receipts lead there
        is_older = len(counted) == ANCHORS_KEPT and anchor.round_index < counted[0][0].round_index
        if is_older and are_proved == is_proved:
            return False
        before = self._kept
        self._kept = tuple(sorted([*before, (anchor, signed)], key=lambda item: item[0].round_index))
        self._kept = self.list_counted()
        self._replaced += [item for item in before if item not in self._kept]
        return True

    def take_replaced(self) -> list[Kept]:
        """Return what gave way to others since the last call."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def _count(self) -> tuple[tuple[Kept, ...], bool]:
        """Return those that count now, and whether receipts prove them: either of all or of none."""
        judged = [(self._judge(*item), item) for item in self._kept]
        proved = tuple(item for proof, item in judged if proof in (Proof.BEFORE, Proof.AFTER))
        alone = tuple(item for proof, item in judged if proof is Proof.NONE)
        return (proved or alone)[-ANCHORS_KEPT:], bool(proved)

    def _judge(self, anchor: StateAnchor, signed: SignedRecord) -> Proof | None:
        """Return what proves an anchor; ``None`` if it does not count."""
        outcome, base = self._find_outcome(anchor.round_index - 1), self._find_base(anchor.round_index)
        if base not in (None, anchor.state_root) or outcome not in (None, anchor.outcome):
            return None
        if base is not None:
            return Proof.AFTER
        if not self._may_sign(signed.signers[0]):
            return None
        return Proof.NONE if outcome is None else Proof.BEFORE
