"""Whose word counts for how far a run has come, and when the owners' takes its place (SPEC section 6.2).

What a key said stays the floor after the key was revoked, or a replay could take a run back. But a leaked key may have
said anything: a number or an epoch that nothing can follow. As in TUF, whoever may change the keys may also say where
to go on; as in TUF, nothing that is older than the change of keys can.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pulsenet.chain.records import Descriptor, EpochRecord, Head, SignedRecord
from pulsenet.ids import PeerId

EPOCH_OF_AUTHORITIES_MAX: Final = (1 << 32) - 1
"""Epochs beyond are for the owners alone: whatever a leaked key opens, they can open a higher one."""

KnownHead = tuple[Head, SignedRecord] | None
KnownEpochs = tuple[tuple[EpochRecord, SignedRecord], ...]


def is_owners_word(descriptor: Descriptor, signers: Collection[PeerId]) -> bool:
    """Whether these keys are enough owners."""
    return sum(1 for key in descriptor.owners if key in signers) >= descriptor.owner_threshold


def may_open_epoch(descriptor: Descriptor, signers: Collection[PeerId]) -> bool:
    """Whether these keys are enough owners, or more than half of the authorities."""
    authority_count = sum(1 for key in descriptor.authorities if key in signers)
    return is_owners_word(descriptor, signers) or 2 * authority_count > len(descriptor.authorities)


def outlives(descriptor: Descriptor, order: EpochRecord, revision: int, signers: Collection[PeerId]) -> bool:
    """Whether what these keys said binds a node that knows the owners' ``order``.

    Args:
        descriptor: The newest revision.
        order: An epoch record that the owners signed.
        revision: What the keys named as the newest they knew; a revoked key could not name the one that revoked it.
        signers: Who said it.
    """
    return revision >= order.revision or set(signers) <= {*descriptor.owners, *descriptor.authorities}


def find_binding(
    descriptor: Descriptor, order: EpochRecord, head: KnownHead, epochs: KnownEpochs
) -> tuple[KnownHead, KnownEpochs]:
    """Return the head and the epoch records that still bind a node that takes the owners' ``order``."""
    if head is not None and not outlives(descriptor, order, head[0].revision, head[1].signers):
        head = None
    return head, tuple(item for item in epochs if outlives(descriptor, order, item[0].revision, item[1].signers))
