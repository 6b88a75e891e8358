"""The rules by which a node may change its mind about a run (SPEC section 6).

In the manner of TUF: every record passes the same gate and the newest version only moves forward. A refusal
raises and changes nothing, with one exception: the discovery of a fork is itself the change.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeVar

from pulsenet.chain import rules
from pulsenet.chain.ballot import is_majority
from pulsenet.chain.beliefs import EPOCH_RECORDS_MAX, Beliefs
from pulsenet.chain.evidence import Claimant, Evidence, ForkProof, claimant_type, find_contradiction
from pulsenet.chain.floor import EPOCH_OF_AUTHORITIES_MAX, find_binding, is_owners_word, may_open_epoch
from pulsenet.chain.records import (
    Aggregate,
    Catalogue,
    CatalogueEntry,
    Contribution,
    Descriptor,
    EpochRecord,
    Have,
    Head,
    Manifest,
    Probe,
    Receipt,
    RolloutBatch,
    Roster,
    Share,
    SignedRecord,
    StateAnchor,
    Vote,
)
from pulsenet.chain.signing import open_record, record_digest
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, PeerId, Version, short
from pulsenet.outer.mixing.pairing import count_slices

R = TypeVar("R", Vote, Receipt, StateAnchor, Aggregate)

BASE_VERSION: Final = Version(0, 0)
"""The base model that the descriptor names; published versions start at number 1."""

FUTURE_MS_MAX: Final = rules.HEAD_VALIDITY_MS_MAX
"""A record issued later than this from now comes from a clock that runs ahead."""


class Trust(Beliefs):
    """The gate every record passes. It adds to what it inherits only the ways to change it."""

    def accept_descriptor(self, signed: SignedRecord) -> Descriptor:
        """Take the next descriptor revision and return the newest.

        A head or catalogue whose signer it revokes is no longer in force, but stays the floor.

        Raises:
            TrustError: see :meth:`DescriptorChain.accept`.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        descriptor = self._descriptors.accept(signed)
        if self._catalogue is not None and not (self.head_in_force and self.may_publish(self._catalogue[1].signers[0])):
            self._set_catalogue(None)
        return descriptor

    def accept_epoch(self, signed: SignedRecord) -> EpochRecord:
        """Open the epoch the record starts and return the epoch record in force.

        Until a head of the epoch was accepted, another valid record of the same epoch replaces it: a publisher
        may have died between the two. After that it proves a fork.

        Raises:
            TrustError: ``untrusted`` unless owners or most authorities signed, or for an epoch beyond what authorities
                may open, ``rollback`` for an older epoch or one whose numbers do not rise, ``revision-unknown``,
                ``fork``, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        record = self._open_epoch(signed)
        is_news = record_digest(signed) != self.epoch_digest
        if record.epoch < self.epoch:
            raise TrustError("rollback", f"epoch {record.epoch} offered, {self.epoch} is in force")
        binding = (self._head, self._epochs)
        if record.epoch > self.epoch and is_owners_word(self._descriptors.require(), signed.signers):
            binding = find_binding(self._descriptors.require(), record, *binding)
        head = None if binding[0] is None else binding[0][0]
        if head is not None and head.version.epoch == record.epoch:
            if is_news:
                proof = ForkProof(Version(record.epoch, record.first_number), self._epochs[-1][1], signed)
                self._fork = self._fork or proof
                raise TrustError("fork", f"two records open epoch {record.epoch}")
        elif head is not None and record.first_number <= head.version.number:
            detail = f"epoch {record.epoch} starts at {record.first_number}, {head.version} is known"
            raise TrustError("rollback", detail)
        if is_news:
            self._fork = None
            self._table_digest = None
            self._set_catalogue(None)
            self._evidence = Evidence(record.epoch)
        if binding != (self._head, self._epochs):
            self._head, self._epochs = binding
            self._number_max = 0
        earlier = tuple(item for item in self._epochs if item[0].epoch < record.epoch)
        self._epochs = (*earlier, (record, signed))[-EPOCH_RECORDS_MAX:]
        self._number_max = max(self._number_max, record.first_number - 1)
        return record

    def accept_last_head(self, signed: SignedRecord, now_ms: int) -> Head:
        """Take a head whose validity may be over as the last that is known, and return the newest one.

        For a node that hears of no valid head: what it believes afterwards is stale, and says so. Nobody's word is
        taken for more than at :meth:`accept_head`: who may sign, forks and versions that fall are judged alike.

        Raises:
            TrustError: a code of :meth:`accept_head`; ``expired`` while a head in force is still valid.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        return self._take_head(signed, now_ms, may_be_over=self.stale(now_ms))

    def accept_head(self, signed: SignedRecord, now_ms: int) -> Head:
        """Take a head and return the newest one, which is the old one when this is no news.

        A head of the newest version issued later takes its place, so that validity goes on. The newest one is shown by
        many, and to several machines of a node: to hear of it again costs no signature check.

        Raises:
            TrustError: ``untrusted``, ``rollback`` for an older version, ``expired``, ``future``, ``fork``,
                ``epoch`` when the epoch record it names must be accepted first, ``revision-unknown`` when
                descriptors must, ``term`` for a deposed coordinator, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        return self._take_head(signed, now_ms, may_be_over=False)

    def _take_head(self, signed: SignedRecord, now_ms: int, *, may_be_over: bool) -> Head:
        descriptor = self._descriptors.require()
        known = self.head_in_force
        if known is not None and signed == self.head_record and self._fork is None:
            self._check_not_older(known.version)
            return known
        head = open_record(Head, signed, self._verify, run_id=self.run_id, signers=descriptor.authorities)
        self._check_revision(head.revision)
        self._check_epoch(head.version, head.epoch_digest)
        self._refuse_fork(head, signed)
        self._check_not_older(head.version)
        newest = self.head_in_force
        if newest is not None:
            is_no_later = head.version == newest.version and head.issued_at_ms <= newest.issued_at_ms
            # One that was taken by a clock that ran ahead is refused by all others, and must not stand in the way.
            if is_no_later and newest.issued_at_ms <= now_ms + FUTURE_MS_MAX:
                return newest
            self._check_term(head, newest, signed.signers[0])
        if now_ms >= head.valid_until_ms and not may_be_over:
            raise TrustError("expired", f"head {head.version} was valid until {head.valid_until_ms}, it is {now_ms}")
        if head.issued_at_ms > now_ms + FUTURE_MS_MAX:
            raise TrustError("future", f"head {head.version} was issued at {head.issued_at_ms}, it is {now_ms}")
        self._head = (head, signed)
        self._remember(head, signed)
        return head

    def accept_catalogue(self, signed: SignedRecord) -> Catalogue:
        """Take the catalogue the newest head names.

        Raises:
            TrustError: ``mismatch`` when it is not the head's or contradicts it, ``untrusted``, ``fork``, or a
                code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        descriptor = self._descriptors.require()
        head = self.head_in_force
        digest = record_digest(signed)
        if head is None or digest != head.catalogue_digest:
            raise TrustError("mismatch", f"catalogue {short(digest)} is not the one the newest head names")
        catalogue = open_record(Catalogue, signed, self._verify, run_id=self.run_id, signers=descriptor.authorities)
        self._refuse_fork(catalogue, signed)
        self._check_catalogue(catalogue, head)
        self._set_catalogue((catalogue, signed))
        self._remember(catalogue, signed)
        return catalogue

    def accept_manifest(self, signed: SignedRecord) -> Manifest:
        """Take a manifest: of an authority, or of a former one if the head or catalogue in force names it.

        Raises:
            TrustError: ``untrusted``, ``mismatch`` when it contradicts the record that names it or the epoch's
                record, ``table`` when the parameter table changes inside an epoch, ``rollback`` for a version
                that was cut, ``epoch``, ``revision-unknown``, ``fork``, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        descriptor = self._descriptors.require()
        digest = record_digest(signed)
        head = self.head_in_force
        if head is not None and head.manifest_digest != digest:
            head = None
        signers = None if head is not None or digest in self._entries else descriptor.authorities
        manifest = open_record(Manifest, signed, self._verify, run_id=self.run_id, signers=signers)
        self._check_revision(manifest.revision)
        if manifest.version.epoch > self.epoch:
            raise TrustError("epoch", f"version {manifest.version}, but epoch {self.epoch} is in force")
        if not self.is_kept(manifest.version):
            raise TrustError("rollback", f"version {manifest.version} was cut from the history")
        self._refuse_fork(manifest, signed)
        if head is not None and (manifest.version, manifest.root) != (head.version, head.root):
            raise TrustError("mismatch", f"the head names {head.version}, its manifest {manifest.version}")
        entry = self._entries.get(digest)
        if entry is not None and entry != entry_of(manifest, digest):
            raise TrustError("mismatch", f"the catalogue says otherwise about manifest {short(digest)}")
        if manifest.version.epoch == self.epoch:
            self._check_in_epoch(manifest, descriptor)
            self._table_digest = manifest.table_digest
        if signed.signers[0] in descriptor.authorities:
            self._remember(manifest, signed)
        return manifest

    def accept_have(self, signed: SignedRecord, now_ms: int | None = None) -> Have:
        """Open a peer's have record; its signer, ``signed.signers[0]``, is the peer it speaks for.

        Args:
            now_ms: When given, a record issued more than 300 s from now is refused.

        Raises:
            TrustError: ``expired``, ``future``, ``untrusted`` for a stranger in a closed private run, or a code of
                ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        have = open_record(Have, signed, self._verify, run_id=self.run_id)
        if not self.admits(signed.signers[0]):
            raise TrustError("untrusted", f"{short(signed.signers[0])} is no member of this private run")
        if now_ms is not None and have.issued_at_ms + rules.HEAD_VALIDITY_MS_MAX <= now_ms:
            raise TrustError("expired", f"have was issued at {have.issued_at_ms}, it is {now_ms}")
        if now_ms is not None and have.issued_at_ms > now_ms + FUTURE_MS_MAX:
            raise TrustError("future", f"have was issued at {have.issued_at_ms}, it is {now_ms}")
        return have

    def accept_rollouts(self, signed: SignedRecord, admitted: Collection[PeerId] = ()) -> RolloutBatch:
        """Open a rollout batch of a key whose rollouts count; its arrays are checked by ``chain/rollouts.py``.

        Raises:
            TrustError: ``untrusted``, ``epoch`` for weights of a later epoch, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        if not self.counts_rollouts(signed.signers[0], admitted):
            raise TrustError("untrusted", f"rollouts of {short(signed.signers[0])} do not count")
        batch = open_record(RolloutBatch, signed, self._verify, run_id=self.run_id)
        if batch.version_last.epoch > self.epoch:
            raise TrustError("epoch", f"rollouts of version {batch.version_last}, epoch {self.epoch} is in force")
        return batch

    def accept_vote(self, signed: SignedRecord) -> Vote:
        """Open an authority's vote for an authority; who votes is ``signed.signers[0]``.

        Raises:
            TrustError: ``untrusted``, ``revision-unknown``, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        vote = self._open_of_authority(Vote, signed)
        if not self.may_publish(vote.candidate):
            raise TrustError("untrusted", f"a vote for {short(vote.candidate)}, which is no authority")
        return vote

    def accept_contribution(self, signed: SignedRecord, admitted: Collection[PeerId] = ()) -> Contribution:
        """Open a contribution of a key that counts; what its blob holds is for others to check.

        Args:
            admitted: Unlisted keys that contributed to this round already; ``open_trainers_max`` bounds them.

        Raises:
            TrustError: ``untrusted``, ``revision-unknown``, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        descriptor = self._descriptors.require()
        signer = signed.signers[0]
        is_listed = signer in descriptor.trainers or signer in admitted
        if not is_listed and len(admitted) >= descriptor.open_trainers_max:
            raise TrustError("untrusted", f"contributions of {short(signer)} do not count")
        contribution = open_record(Contribution, signed, self._verify, run_id=self.run_id)
        self._check_revision(contribution.revision)
        if contribution.peer_id != signer:
            raise TrustError("untrusted", f"a contribution of {short(contribution.peer_id)} signed by {short(signer)}")
        return contribution

    def accept_receipt(self, signed: SignedRecord) -> Receipt:
        """Open a receipt its coordinator signed; whether it is final is asked of :meth:`is_final`.

        Raises:
            TrustError: ``untrusted``, ``revision-unknown``, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        receipt = self._open_of_authority(Receipt, signed)
        if receipt.coordinator not in signed.signers:
            raise TrustError("untrusted", f"a receipt without the signature of {short(receipt.coordinator)}")
        return receipt

    def accept_state_anchor(self, signed: SignedRecord) -> StateAnchor:
        """Open an authority's statement of a whole outer state.

        Raises:
            TrustError: ``untrusted``, ``revision-unknown``, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        return self._open_of_authority(StateAnchor, signed)

    def accept_aggregate(self, signed: SignedRecord) -> Aggregate:
        """Open an authority's statement of what a round adds up to; errors as of :meth:`accept_state_anchor`."""
        return self._open_of_authority(Aggregate, signed)

    def accept_roster(self, signed: SignedRecord, *, term: int, coordinator: PeerId) -> Roster:
        """Open a roster of the term that is proved, which only its coordinator signs.

        Args:
            term: The newest term that votes prove.
            coordinator: Whose it is.

        Raises:
            TrustError: ``untrusted`` for another signer, or members that the descriptor does not let in; ``term`` for
                another term; ``revision-unknown``, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        descriptor = self._descriptors.require()
        signers = {coordinator} & set(descriptor.authorities)
        roster = open_record(Roster, signed, self._verify, run_id=self.run_id, signers=signers)
        self._check_revision(roster.revision)
        if roster.term != term:
            raise TrustError("term", f"a roster of term {roster.term}, {term} is proved")
        unlisted = len(set(roster.members) - set(descriptor.trainers))
        if unlisted > descriptor.open_trainers_max:
            raise TrustError("untrusted", f"a roster of {unlisted} unlisted trainers")
        return roster

    def accept_share(self, signed: SignedRecord, roster: Roster, roster_digest: Digest) -> Share:
        """Open a member's share of a round of this roster; what its blob holds is for others to check.

        Raises:
            TrustError: ``untrusted`` for a signer that the roster does not name or the descriptor no longer lets in,
                ``mismatch`` for what does not fit the roster, ``revision-unknown``, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        share = open_record(Share, signed, self._verify, run_id=self.run_id, signers=roster.members)
        self._check_member(share, signed.signers[0], roster, roster_digest)
        if share.slice_count not in (1, count_slices(len(roster.members))):
            raise TrustError("mismatch", f"a share in {share.slice_count} slices that does not fit its roster")
        if share.contributors:
            count, spare = len(roster.members), -len(roster.members) % 8
            bits = int.from_bytes(share.contributors, "big")
            if len(share.contributors) != -(-count // 8) or not bits or bits & ((1 << spare) - 1):
                raise TrustError("mismatch", f"contributors that are not among {count} members")
        return share

    def accept_probe(self, signed: SignedRecord, roster: Roster, roster_digest: Digest) -> Probe:
        """Open a member's answer to the probe of a round of this roster; raises as :meth:`accept_share`."""
        probe = open_record(Probe, signed, self._verify, run_id=self.run_id, signers=roster.members)
        self._check_member(probe, signed.signers[0], roster, roster_digest)
        if roster.subset and len(probe.scores) not in (0, 4 * len(roster.subset)):
            raise TrustError("mismatch", f"{len(probe.scores) // 4} scores of {len(roster.subset)} tensors")
        return probe

    def _check_member(self, record: Share | Probe, signer: PeerId, roster: Roster, roster_digest: Digest) -> None:
        descriptor = self._descriptors.require()
        self._check_revision(record.revision)
        if record.peer_id != signer:
            raise TrustError("untrusted", f"what {short(record.peer_id)} says is signed by {short(signer)}")
        if signer not in descriptor.trainers and not descriptor.open_trainers_max:
            raise TrustError("untrusted", f"{short(signer)} trains no more")
        if record.roster != roster_digest or not roster.first_round <= record.round_index < roster.end_round:
            raise TrustError("mismatch", f"round {record.round_index} does not fit the roster that is named")

    def is_final(self, signed: SignedRecord) -> bool:
        """Say whether more than half of the authorities signed an accepted receipt."""
        authorities = self._descriptors.require().authorities
        return is_majority(sum(signer in authorities for signer in signed.signers), len(authorities))

    def accept_fork_proof(self, first: SignedRecord, second: SignedRecord) -> ForkProof:
        """Check that two records contradict each other about this epoch, and believe it.

        Raises:
            TrustError: ``mismatch`` when they do not, ``rollback`` for an epoch that is over, ``epoch`` for one
                not known yet, ``untrusted``, or a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        version = find_contradiction(self._open_claimant(first), self._open_claimant(second))
        if version is None:
            raise TrustError("mismatch", "the two records do not contradict each other")
        if version.epoch != self.epoch:
            code = "rollback" if version.epoch < self.epoch else "epoch"
            raise TrustError(code, f"a fork at {version}, but epoch {self.epoch} is in force")
        self._fork = self._fork or ForkProof(version, first, second)
        return self._fork

    # The rules, one by one.

    def _open_of_authority(self, cls: type[R], signed: SignedRecord) -> R:
        authorities = self._descriptors.require().authorities
        record = open_record(cls, signed, self._verify, run_id=self.run_id, signers=authorities)
        self._check_revision(record.revision)
        return record

    def _open_epoch(self, signed: SignedRecord) -> EpochRecord:
        descriptor = self._descriptors.require()
        allowed = {*descriptor.owners, *descriptor.authorities}
        record = open_record(EpochRecord, signed, self._verify, run_id=self.run_id, signers=allowed)
        self._check_revision(record.revision)
        if not may_open_epoch(descriptor, signed.signers):
            raise TrustError("untrusted", f"{len(signed.signers)} signatures do not open epoch {record.epoch}")
        if record.epoch > EPOCH_OF_AUTHORITIES_MAX and not is_owners_word(descriptor, signed.signers):
            raise TrustError("untrusted", f"epoch {record.epoch} is for the owners to open")
        return record

    def _open_claimant(self, signed: SignedRecord) -> Claimant:
        cls = claimant_type(signed)
        if cls is EpochRecord:
            return self._open_epoch(signed)
        authorities = self._descriptors.require().authorities
        return open_record(cls, signed, self._verify, run_id=self.run_id, signers=authorities)

    def _check_revision(self, revision: int) -> None:
        known = self._descriptors.require().revision
        if revision > known:
            raise TrustError("revision-unknown", f"revision {revision} is named, {known} is known")

    def _check_epoch(self, version: Version, epoch_digest: Digest | None) -> None:
        if version.epoch < self.epoch:
            raise TrustError("rollback", f"version {version} offered, epoch {self.epoch} is in force")
        if version.epoch > self.epoch or epoch_digest != self.epoch_digest:
            raise TrustError("epoch", f"the record of epoch {version.epoch} that this head names is not known")
        if self.epoch_record is not None and version.number < self.epoch_record.first_number:
            raise TrustError("epoch", f"{version} lies before the epoch's first, {self.epoch_record.first_number}")

    def _check_not_older(self, version: Version) -> None:
        floor = self._version_min
        if self._head is not None and (floor is None or floor < self._head[0].version):
            floor = self._head[0].version
        if floor is not None and version < floor:
            raise TrustError("rollback", f"version {version} offered, {floor} is known")

    def _check_term(self, head: Head, newest: Head, signer: PeerId) -> None:
        assert self._head is not None
        if head.term < newest.term:
            raise TrustError("term", f"term {head.term} is over, {newest.term} is known")
        if head.term == newest.term and signer != self._head[1].signers[0]:
            raise TrustError("term", f"term {head.term} belongs to {short(self._head[1].signers[0])}")

    def _check_catalogue(self, catalogue: Catalogue, head: Head) -> None:
        if catalogue.epoch != head.version.epoch:
            raise TrustError("mismatch", f"catalogue of epoch {catalogue.epoch}, head {head.version}")
        for entry in catalogue.entries:
            if entry.version > head.version or not self.is_kept(entry.version):
                raise TrustError("mismatch", f"the catalogue lists {entry.version} under head {head.version}")
        named = [entry for entry in catalogue.entries if entry.manifest_digest == head.manifest_digest]
        if [(entry.version, entry.root) for entry in named] != [(head.version, head.root)]:
            raise TrustError("mismatch", f"the catalogue does not list the head's manifest of {head.version}")

    def _check_in_epoch(self, manifest: Manifest, descriptor: Descriptor) -> None:
        """Check a manifest of the epoch in force against the epoch's start and its parameter table."""
        table_digest = self._table_digest
        if table_digest is None and self.epoch == 0:
            table_digest = descriptor.table_digest
        if table_digest is not None and manifest.table_digest != table_digest:
            raise TrustError("table", f"table {short(manifest.table_digest)}, not {short(table_digest)}")
        base = manifest.base_version
        record = self.epoch_record
        if record is None:
            if base == BASE_VERSION and manifest.base_root != descriptor.base_root:
                raise TrustError("mismatch", f"{manifest.version} is not on the run's base model")
            return
        if manifest.version.number < record.first_number:
            raise TrustError("epoch", f"{manifest.version} lies before the epoch's first, {record.first_number}")
        if base is not None and base.epoch == record.epoch and base.number < record.first_number:
            raise TrustError("epoch", f"base {base} lies before the epoch's first, {record.first_number}")
        if base is not None and base.epoch < record.epoch:
            start = (base, manifest.base_root, manifest.version.number)
            if start != (record.kept_version, record.kept_root, record.first_number):
                raise TrustError("mismatch", f"{manifest.version} on {base} is not how epoch {record.epoch} starts")

    def _refuse_fork(self, record: Claimant, signed: SignedRecord) -> None:
        if self._fork is None:
            self._fork = self._evidence.find_fork(record, signed)
        if self._fork is not None:
            raise TrustError("fork", f"epoch {self.epoch} is forked at {self._fork.version}")

    def _remember(self, record: Head | Manifest | Catalogue, signed: SignedRecord) -> None:
        self._evidence.remember(record, signed)
        if not isinstance(record, Catalogue):
            self._number_max = max(self._number_max, record.version.number)


def entry_of(manifest: Manifest, manifest_digest: Digest) -> CatalogueEntry:
    """Return how a catalogue lists this manifest."""
    return CatalogueEntry(
        kind=manifest.kind,
        base_version=manifest.base_version,
        version=manifest.version,
        root=manifest.root,
        manifest_digest=manifest_digest,
        encoded_size_bytes=manifest.encoded_size_bytes,
    )
