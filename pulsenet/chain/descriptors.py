"""The chain of descriptor revisions, from the genesis to the newest (SPEC section 6.1)."""

from __future__ import annotations

from pulsenet.chain.records import Descriptor, SignedRecord
from pulsenet.chain.signing import Verify, open_record, record_digest
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, PeerId, RunId, short


class DescriptorChain:
    """Walks revisions one by one and keeps the newest.

    The run id is the digest of the genesis, so the first step needs no trust; each further one is signed by
    the owners of the one before and names its digest.
    """

    __slots__ = ("_record", "_revision_min", "_run_id", "_verify", "newest")

    def __init__(self, run_id: RunId, verify: Verify, revision_min: int) -> None:
        self._run_id = run_id
        self._verify = verify
        self._revision_min = revision_min
        self._record: SignedRecord | None = None
        self.newest: Descriptor | None = None
        """The newest accepted revision; ``None`` before the genesis."""

    @property
    def record(self) -> SignedRecord | None:
        """The newest revision as signed."""
        return self._record

    @property
    def digest(self) -> Digest | None:
        """Digest of the newest revision; the next one names it."""
        return None if self._record is None else record_digest(self._record)

    @property
    def revision_min(self) -> int:
        """Least revision the token, or an earlier state, vouches for."""
        return self._revision_min

    @property
    def next_revision(self) -> int:
        """What to ask for with ``GetDescriptors``."""
        return 0 if self.newest is None else self.newest.revision + 1

    def require(self) -> Descriptor:
        """Return the newest revision once it has reached the minimum.

        Raises:
            TrustError: ``revision-unknown``: walk the chain further first.
        """
        if self.newest is None or self.newest.revision < self._revision_min:
            have = "none" if self.newest is None else str(self.newest.revision)
            raise TrustError("revision-unknown", f"revision {self._revision_min} is due, {have} is known")
        return self.newest

    def accept(self, signed: SignedRecord) -> Descriptor:
        """Take the next revision, or the newest once more, and return the newest.

        Raises:
            TrustError: ``wrong-run`` for another genesis, ``revision-gap`` when revisions between are missing,
                ``rollback`` for an older or a second revision of one number, ``untrusted`` when others than
                the owners before signed it or too few did, ``mismatch`` when it does not name the one before,
                or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        newest = self.newest
        if newest is not None and record_digest(signed) == self.digest:
            return newest
        descriptor = open_record(Descriptor, signed, self._verify, run_id=self._run_id)
        if newest is not None and descriptor.revision <= newest.revision:
            raise TrustError("rollback", f"revision {descriptor.revision} offered, {newest.revision} is known")
        if descriptor.revision != self.next_revision:
            raise TrustError("revision-gap", f"revision {descriptor.revision} offered, {self.next_revision} is due")
        if newest is None:
            _check_owners(signed, descriptor.owners, descriptor.owner_threshold)
        else:
            _check_owners(signed, newest.owners, newest.owner_threshold)
            if descriptor.previous != self.digest or descriptor.nonce != newest.nonce:
                raise TrustError("mismatch", f"revision {descriptor.revision} does not follow the one known")
        self.newest = descriptor
        self._record = signed
        return descriptor

    def restore(self, signed: SignedRecord) -> None:
        """Put back a revision that was accepted before; the way to it is not walked again."""
        self.newest = open_record(Descriptor, signed, self._verify, run_id=self._run_id)
        self._record = signed


def _check_owners(signed: SignedRecord, owners: tuple[PeerId, ...], threshold: int) -> None:
    for signer in signed.signers:
        if signer not in owners:
            raise TrustError("untrusted", f"descriptor signed by {short(signer)}, which is no owner")
    if len(signed.signers) < threshold:
        raise TrustError("untrusted", f"{len(signed.signers)} owners signed, {threshold} are needed")
