"""What this node's trainer contributed, and what receipts make of it (SPEC section 6.9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from pulsenet.chain.records import Contribution, Receipt
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Fate, SaveState
from pulsenet.node.events import ContributionStored
from pulsenet.wire.schema import CountMax, decode_value, encode_value

OWN_KEY: Final = "rounds/own"
"""Name of the own work among the node's durable state."""

OWN_MAX: Final = 1_024
"""Own contributions remembered."""


@dataclass(frozen=True, slots=True)
class _Sent:
    round_index: int
    contribution_digest: Digest


@dataclass(frozen=True, slots=True)
class _Missed:
    """How many rounds in a row were missed before ``round_index``."""

    round_index: int
    count: int


@dataclass(frozen=True, slots=True)
class _State:
    sent: Annotated[tuple[_Sent, ...], CountMax(OWN_MAX)]
    missed: Annotated[tuple[_Missed, ...], CountMax(OWN_MAX)]


class OwnWork:
    """The own contributions by round: one a round, and what came of them.

    Args:
        peer_id: This node's key.
        missed_rounds_max: Missed rounds in a row after which the residual is dropped.
        saved: What was last saved under ``OWN_KEY``.

    Raises:
        StorageError: it is damaged.
    """

    def __init__(self, peer_id: PeerId, missed_rounds_max: int, saved: bytes | None = None) -> None:
        self._peer_id = peer_id
        self._missed_rounds_max = missed_rounds_max
        self._sent: dict[int, Digest] = {}
        self._missed: dict[int, int] = {}
        if saved is None:
            return
        try:
            state = decode_value(_State, saved)
        except RemoteProtocolError as error:
            raise StorageError(f"the own contributions are damaged: {error}", reason="damaged") from error
        self._sent = {sent.round_index: sent.contribution_digest for sent in state.sent}
        self._missed = {missed.round_index: missed.count for missed in state.missed}

    def sent_to(self, round_index: int) -> Digest | None:
        """Return the own contribution to a round."""
        return self._sent.get(round_index)

    def note_sent(self, round_index: int, contribution_digest: Digest) -> None:
        """Remember the one contribution of a round, before it is sent."""
        assert round_index not in self._sent
        self._sent[round_index] = contribution_digest

    def judge(self, receipt: Receipt) -> Fate:
        """Say what a final receipt makes of the own work of its round; asking again gives the same answer."""
        if any(member.peer_id == self._peer_id for member in receipt.members):
            return Fate.COUNTED
        if any(rejection.peer_id == self._peer_id for rejection in receipt.rejected):
            return Fate.REJECTED
        missed = self._missed.get(receipt.round_index, 0) + 1
        return Fate.DROPPED if missed >= self._missed_rounds_max else Fate.MISSED

    def note_settled(self, round_index: int, fate: Fate) -> None:
        """The outer step of ``round_index`` is done with this fate."""
        missed = self._missed.get(round_index, 0) + 1 if fate is Fate.MISSED else 0
        # Rejected content is a fault of its own, and no missed round.
        self._missed[round_index + 1] = missed

    def forget_before(self, round_index: int) -> None:
        """Drop what lies before a round nobody goes back to."""
        self._sent = {index: digest for index, digest in self._sent.items() if index >= round_index}
        self._missed = {index: count for index, count in self._missed.items() if index >= round_index}

    def save(self) -> SaveState:
        """Return the order to store it."""
        state = _State(
            sent=tuple(_Sent(index, digest) for index, digest in sorted(self._sent.items()))[-OWN_MAX:],
            missed=tuple(_Missed(index, count) for index, count in sorted(self._missed.items()))[-OWN_MAX:],
        )
        return SaveState(OWN_KEY, encode_value(state))


def make_contribution(trust: Trust, peer_id: PeerId, stored: ContributionStored) -> Contribution:
    """Return the record of what the training process stored."""
    assert trust.descriptor is not None
    return Contribution(
        run_id=trust.run_id,
        revision=trust.descriptor.revision,
        peer_id=peer_id,
        round_index=stored.round_index,
        base_state_root=stored.base_state_root,
        blob_id=stored.blob_id,
        encoded_size_bytes=stored.encoded_size_bytes,
        entry_count=stored.entry_count,
        element_count=stored.element_count,
        norm_bits=stored.norm_bits,
        codec_id=stored.codec_id,
    )
