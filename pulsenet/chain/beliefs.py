"""What one node believes about a run: the state behind :class:`Trust`, small enough to save after each change.

No clock, no disk, no cryptography. What may change it is in ``chain/trust.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Final, Self, TypeVar

from pulsenet.chain.descriptors import DescriptorChain
from pulsenet.chain.evidence import (
    EVIDENCE_VERSIONS_MAX,
    Claimant,
    Evidence,
    ForkProof,
    claimant_type,
    find_contradiction,
)
from pulsenet.chain.floor import is_owners_word, may_open_epoch, outlives
from pulsenet.chain.records import (
    Catalogue,
    CatalogueEntry,
    Descriptor,
    EpochRecord,
    Head,
    SignedRecord,
)
from pulsenet.chain.signing import Verify, decode_signed, encode_signed, open_record, record_digest
from pulsenet.errors import IntegrityError, RemoteProtocolError, StorageError
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.wire.messages import Record
from pulsenet.wire.schema import CountMax, decode_value, encode_value

EPOCH_RECORDS_MAX: Final = 64
"""Epoch records remembered, the newest; they say which versions were cut."""

STATE_FORMAT: Final = 1

C = TypeVar("C", bound=Claimant)


@dataclass(frozen=True, slots=True)
class _State:
    """What ``save`` writes."""

    format: int
    run_id: RunId
    revision_min: int
    descriptor: Record | None
    epochs: Annotated[tuple[Record, ...], CountMax(EPOCH_RECORDS_MAX)]
    head: Record | None
    catalogue: Record | None
    evidence: Annotated[tuple[Record, ...], CountMax(EVIDENCE_VERSIONS_MAX)]
    fork: Annotated[tuple[Record, ...], CountMax(2)]
    table_digest: Digest | None
    number_max: int


class Beliefs:
    """The newest accepted record of each kind, and the questions that follow from them.

    Args:
        run_id: Digest of the genesis descriptor.
        verify: Checks an Ed25519 signature.
        revision_min: From the join token: nothing is believed before this revision is reached.
        version_min: The operator's lower bound for a node that lost its state (A-AUTH-7).
    """

    def __init__(
        self, run_id: RunId, verify: Verify, revision_min: int = 0, version_min: Version | None = None
    ) -> None:
        self.run_id = run_id
        self._verify = verify
        self._version_min = version_min
        self._descriptors = DescriptorChain(run_id, verify, revision_min)
        self._epochs: tuple[tuple[EpochRecord, SignedRecord], ...] = ()
        self._head: tuple[Head, SignedRecord] | None = None
        self._catalogue: tuple[Catalogue, SignedRecord] | None = None
        self._entries: dict[Digest, CatalogueEntry] = {}
        self._evidence = Evidence(0)
        self._fork: ForkProof | None = None
        self._table_digest: Digest | None = None
        self._number_max = 0

    # What is believed now.

    @property
    def descriptor(self) -> Descriptor | None:
        """The newest descriptor; ``None`` before the genesis came."""
        return self._descriptors.newest

    @property
    def descriptor_record(self) -> SignedRecord | None:
        """The newest descriptor as signed."""
        return self._descriptors.record

    @property
    def next_revision(self) -> int:
        """The ``revision_min`` to send in ``GetDescriptors``."""
        return self._descriptors.next_revision

    @property
    def epoch(self) -> int:
        """The epoch in force: 0, or that of the newest epoch record."""
        return self._epochs[-1][0].epoch if self._epochs else 0

    @property
    def epoch_record(self) -> EpochRecord | None:
        """The record of the epoch in force; ``None`` in epoch 0."""
        return self._epochs[-1][0] if self._epochs else None

    @property
    def epoch_digest(self) -> Digest | None:
        """What a head of this epoch must name."""
        return record_digest(self._epochs[-1][1]) if self._epochs else None

    @property
    def epoch_records(self) -> tuple[SignedRecord, ...]:
        """The epoch records remembered, ascending."""
        return tuple(signed for _, signed in self._epochs)

    @property
    def epoch_is_endorsed(self) -> bool:
        """Whether a newcomer would accept the epoch's record; false after its signers were revoked.

        Its publisher then signs it anew (the digest stays) or opens the next epoch.
        """
        descriptor = self._descriptors.newest
        if descriptor is None or not self._epochs:
            return descriptor is not None
        signers = set(self._epochs[-1][1].signers)
        return may_open_epoch(descriptor, signers) and signers <= {*descriptor.owners, *descriptor.authorities}

    @property
    def head(self) -> Head | None:
        """The newest head ever accepted: the floor below which nothing is believed."""
        return None if self._head is None else self._head[0]

    @property
    def head_record(self) -> SignedRecord | None:
        """The newest head as signed."""
        return None if self._head is None else self._head[1]

    @property
    def head_in_force(self) -> Head | None:
        """The newest head, if it is of the epoch in force and its signer is still an authority."""
        if self._head is None or not self.may_publish(self._head[1].signers[0]):
            return None
        return self._head[0] if self._head[0].version.epoch == self.epoch else None

    @property
    def catalogue(self) -> Catalogue | None:
        """The newest catalogue accepted in this epoch; it may lag behind the head."""
        return None if self._catalogue is None else self._catalogue[0]

    @property
    def catalogue_record(self) -> SignedRecord | None:
        """The newest catalogue as signed."""
        return None if self._catalogue is None else self._catalogue[1]

    @property
    def catalogue_is_current(self) -> bool:
        """Whether the catalogue held is the one the newest head names."""
        if self._catalogue is None:
            return False
        assert self._head is not None
        return record_digest(self._catalogue[1]) == self._head[0].catalogue_digest

    @property
    def fork(self) -> ForkProof | None:
        """Proof that the epoch in force is forked; a higher epoch clears it."""
        return self._fork

    def root_of(self, version: Version) -> Digest | None:
        """Return the root that an accepted record gave to a version of the epoch in force, if it is remembered."""
        return self._evidence.root_of(version)

    @property
    def number_max(self) -> int:
        """The greatest version number seen; a new epoch starts above it."""
        return self._number_max

    def stale(self, now_ms: int) -> bool:
        """Whether nothing in force says what the newest version is (A-AUTH-5)."""
        head = self.head_in_force
        return head is None or now_ms >= head.valid_until_ms

    def is_kept(self, version: Version) -> bool:
        """Whether no epoch record cut this version out of the history."""
        if version.epoch > self.epoch:
            return False
        later = [record for record, _ in self._epochs if record.epoch > version.epoch]
        return all(record.kept_version is not None and version <= record.kept_version for record in later)

    def binds(self, head: Head, signer: PeerId) -> bool:
        """Whether a head that was once accepted still says how far the run has come.

        Not one of a revoked key, once the owners said since where to go on.
        """
        descriptor = self._descriptors.newest
        if descriptor is None or not self._epochs:
            return True
        order, signed = self._epochs[-1]
        return not is_owners_word(descriptor, signed.signers) or outlives(descriptor, order, head.revision, (signer,))

    def may_publish(self, peer_id: PeerId) -> bool:
        """Whether the key may sign heads, catalogues and manifests."""
        return self.descriptor is not None and peer_id in self.descriptor.authorities

    def is_member(self, peer_id: PeerId) -> bool:
        """Whether the descriptor lists the key in any role; a private run serves nobody else."""
        descriptor = self.descriptor
        return descriptor is not None and any(
            peer_id in keys
            for keys in (descriptor.owners, descriptor.authorities, descriptor.trainers, descriptor.inferencers)
        )

    def admits(self, peer_id: PeerId) -> bool:
        """Whether the run deals with this key at all: public, open to strangers under a cap, or the key is listed."""
        descriptor = self.descriptor
        if descriptor is None or not descriptor.private:
            return True
        is_open = descriptor.open_inferencers_max > 0 or descriptor.open_trainers_max > 0
        return is_open or self.is_member(peer_id)

    def counts_rollouts(self, peer_id: PeerId, admitted: Collection[PeerId] = ()) -> bool:
        """Whether rollouts of this key count.

        Args:
            admitted: Unlisted keys the caller lets in at present; ``open_inferencers_max`` bounds them.
        """
        if self.descriptor is None:
            return False
        if peer_id in self.descriptor.inferencers or peer_id in admitted:
            return True
        return len(admitted) < self.descriptor.open_inferencers_max

    # What outlives a restart.

    def save(self) -> bytes:
        """Return everything to keep on disk; written before any effect of the change it holds."""
        state = _State(
            format=STATE_FORMAT,
            run_id=self.run_id,
            revision_min=self._descriptors.revision_min,
            descriptor=_encode_optional(self.descriptor_record),
            epochs=tuple(encode_signed(signed) for signed in self.epoch_records),
            head=_encode_optional(self.head_record),
            catalogue=_encode_optional(self.catalogue_record),
            evidence=tuple(encode_signed(signed) for signed in self._evidence.records()),
            fork=() if self._fork is None else (encode_signed(self._fork.first), encode_signed(self._fork.second)),
            table_digest=self._table_digest,
            number_max=self._number_max,
        )
        return encode_value(state)

    @classmethod
    def restore(
        cls, data: bytes, run_id: RunId, verify: Verify, revision_min: int = 0, version_min: Version | None = None
    ) -> Self:
        """Return the beliefs that ``save`` wrote; every signature is checked again.

        Raises:
            StorageError: the state is damaged or of another run. It counts as lost: start from the token,
                ask several sources, and say so (A-AUTH-7).
        """
        try:
            state = decode_value(_State, data)
            if state.format != STATE_FORMAT or state.run_id != run_id:
                raise StorageError(f"trust state of format {state.format} and run {state.run_id.hex()}")
            beliefs = cls(run_id, verify, max(revision_min, state.revision_min), version_min)
            beliefs._load(state)
        except (RemoteProtocolError, IntegrityError) as error:
            raise StorageError(f"the trust state is damaged: {error}") from error
        return beliefs

    def _load(self, state: _State) -> None:
        if state.descriptor is not None:
            self._descriptors.restore(decode_signed(state.descriptor))
        self._epochs = tuple(self._reopen(EpochRecord, data) for data in state.epochs)
        self._head = None if state.head is None else self._reopen(Head, state.head)
        self._set_catalogue(None if state.catalogue is None else self._reopen(Catalogue, state.catalogue))
        self._evidence = Evidence(self.epoch)
        for data in state.evidence:
            self._evidence.remember(*self._reopen_claimant(data))
        if state.fork:
            opened = [self._reopen_claimant(data) for data in state.fork]
            (first, signed_first), (second, signed_second) = opened[0], opened[-1]  # one alone contradicts nothing
            version = find_contradiction(first, second)
            if version is None:
                raise StorageError("the stored proof of a fork proves nothing")
            self._fork = ForkProof(version, signed_first, signed_second)
        self._table_digest = state.table_digest
        self._number_max = state.number_max

    def _reopen(self, cls: type[C], data: bytes) -> tuple[C, SignedRecord]:
        """Open a record that was accepted before; whether its key may still sign is not asked again."""
        signed = decode_signed(data)
        return open_record(cls, signed, self._verify, run_id=self.run_id), signed

    def _reopen_claimant(self, data: bytes) -> tuple[Claimant, SignedRecord]:
        return self._reopen(claimant_type(decode_signed(data)), data)

    def _set_catalogue(self, catalogue: tuple[Catalogue, SignedRecord] | None) -> None:
        self._catalogue = catalogue
        entries = () if catalogue is None else catalogue[0].entries
        self._entries = {entry.manifest_digest: entry for entry in entries}


def _encode_optional(signed: SignedRecord | None) -> bytes | None:
    return None if signed is None else encode_signed(signed)
