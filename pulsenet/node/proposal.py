"""The receipt this coordinator proposed, and the countersignatures it gathers until it is final."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import SignedRecord
from pulsenet.chain.signing import encode_signed, keep_signatures, record_digest
from pulsenet.ids import PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Effect
from pulsenet.wire.messages import PushReceipt

RESEND_SECONDS: Final = 2.0
"""How often a proposal is shown again to authorities that have not countersigned."""


class Proposal:
    """One proposed receipt.

    Args:
        signed: As the coordinator signed it.
        now: When it was proposed.
    """

    def __init__(self, signed: SignedRecord, now: float) -> None:
        self.signed = signed
        """With every signature gathered so far."""
        self._shown_at = now

    @property
    def shown_again_at(self) -> float:
        """When it is shown to those who did not answer."""
        return self._shown_at + RESEND_SECONDS

    def is_copy(self, signed: SignedRecord) -> bool:
        """Say whether this is the same receipt, whoever signed it."""
        return record_digest(signed) == record_digest(self.signed)

    def merge(self, signed: SignedRecord) -> None:
        """Add the signatures of an accepted copy."""
        assert self.is_copy(signed)
        signatures = dict(zip(self.signed.signers, self.signed.signatures, strict=True))
        signatures.update(zip(signed.signers, signed.signatures, strict=True))
        ordered = sorted(signatures)
        self.signed = SignedRecord(
            signed.type, signed.payload, tuple(ordered), tuple(signatures[key] for key in ordered)
        )

    def keep_signatures(self, keys: Collection[PeerId]) -> None:
        """Drop the signatures of other keys: nobody takes a receipt with one of a key that was revoked."""
        self.signed = keep_signatures(self.signed, keys)

    def show(self, courier: Courier, ledger: Ledger, authorities: Collection[PeerId], now: float) -> list[Effect]:
        """Return the orders to show it to every authority that has not countersigned."""
        self._shown_at = now
        votes = () if ledger.mandate is None else ledger.mandate.votes
        waited_for = set(authorities) - set(self.signed.signers)
        return courier.send_to_connected(PushReceipt(encode_signed(self.signed), votes), waited_for)
