"""The publisher's pen: signs what it publishes, and epochs where its key alone is enough."""

from __future__ import annotations

from pulsenet import limits
from pulsenet.chain.records import EpochRecord, Head, SignedRecord
from pulsenet.chain.rules import Signable
from pulsenet.chain.signing import Sign, seal
from pulsenet.chain.trust import Trust
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.node.issuing import choose_issue_ms
from pulsenet.node.published import TERM_NONE, PublishedState


class Scribe:
    """Makes signed records for one publisher.

    Args:
        trust: The run's rules.
        peer_id: The publisher's key.
        sign: Signs with that key.
    """

    def __init__(self, trust: Trust, peer_id: PeerId, sign: Sign) -> None:
        self._trust = trust
        self._peer_id = peer_id
        self._sign = sign
        self._issued_at_ms = 0

    def seal(self, record: Signable) -> SignedRecord:
        """Sign a record with the publisher's key."""
        return seal(record, self._sign, self._peer_id)

    @property
    def run_id(self) -> RunId:
        """The run of everything that is signed."""
        return self._trust.run_id

    @property
    def revision(self) -> int:
        """The descriptor revision under which everything is signed; the caller may publish, so there is one."""
        assert self._trust.descriptor is not None
        return self._trust.descriptor.revision

    def issue_head(self, state: PublishedState, now_ms: int, *, term: int = TERM_NONE) -> SignedRecord:
        """Sign a head for ``state`` in a term.

        Its time of issue rises also where the clock was set back, and above that of an earlier coordinator whose clock
        ran ahead, or this head of the same version would be no news.
        """
        newest = self._trust.head
        newest_ms = 0 if newest is None else newest.issued_at_ms
        self._issued_at_ms = choose_issue_ms(now_ms, self._issued_at_ms, newest_ms)
        head = Head(
            run_id=self.run_id,
            revision=self.revision,
            term=term,
            version=state.version,
            root=state.root,
            manifest_digest=state.manifest_digest,
            catalogue_digest=state.catalogue_digests[-1],
            epoch_digest=state.epoch_digest,
            issued_at_ms=self._issued_at_ms,
            valid_until_ms=self._issued_at_ms + round(limits.HEAD_VALIDITY_SECONDS * 1000),
        )
        return self.seal(head)

    @property
    def may_open_epochs(self) -> bool:
        """Whether the publisher's key is more than half of all authorities: the only one."""
        descriptor = self._trust.descriptor
        return descriptor is not None and descriptor.authorities == (self._peer_id,)

    def open_epoch(
        self, *, epoch: int, first_number: int, kept_version: Version | None, kept_root: Digest | None, reason: str
    ) -> SignedRecord:
        """Sign the record that opens ``epoch``."""
        assert self.may_open_epochs
        record = EpochRecord(
            run_id=self.run_id,
            revision=self.revision,
            epoch=epoch,
            kept_version=kept_version,
            kept_root=kept_root,
            first_number=first_number,
            reason=reason,
        )
        return self.seal(record)
