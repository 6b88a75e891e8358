"""What a receipt says, whoever proposed it in whichever term (SPEC section 4.10).

A receipt that a later coordinator proposes again differs in its term, its coordinator and perhaps the revision. All
else is its outcome; rounds are chained by outcomes, so the two forms of one round's receipt lead to one next round.
"""

from __future__ import annotations

from dataclasses import replace

from pulsenet.chain.records import Receipt
from pulsenet.ids import PEER_ID_SIZE_BYTES, Digest, PeerId, compute_digest
from pulsenet.wire.schema import encode_value

NOBODY = PeerId(bytes(PEER_ID_SIZE_BYTES))


def outcome_of(receipt: Receipt) -> Digest:
    """Return the digest of the receipt without its term, coordinator and revision."""
    return compute_digest(encode_value(replace(receipt, term=0, coordinator=NOBODY, revision=0)))


def listed_by(receipt: Receipt) -> tuple[Digest, ...]:
    """Return the digests of the contributions a receipt counts, in its order."""
    return tuple(member.contribution_digest for member in receipt.members)
