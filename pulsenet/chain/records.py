"""What the run signs: descriptors, epochs, manifests, catalogues, heads, haves, rollouts, rounds (SPEC section 4).

Every record travels as a :class:`SignedRecord`: the payload's bytes as its signer made them and one
signature per signer. A record's digest is the BLAKE3 of the payload, so it does not depend on who signed.
Signatures cover ``b"pulsenet-v1\\0" + type + b"\\0" + payload``; the payload repeats the run id, so a
record of one run or one type never passes for another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from pulsenet import limits
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.wire.messages import Address, TaskId
from pulsenet.wire.schema import LATER, CountMax, SizeExact, SizeMax

Keys = Annotated[tuple[PeerId, ...], CountMax(limits.KEYS_PER_ROLE_MAX)]
Signature = Annotated[bytes, SizeExact(64)]
Name = Annotated[str, SizeMax(128)]
RewardName = Annotated[str, SizeMax(64)]

ALGORITHM_NONE = "none"
"""The outer algorithm of a run without rounds: one publisher trains alone."""


class ShareKind(StrEnum):
    """What a share says."""

    PART = "part"
    """One member's values of one slice."""
    HINT = "hint"
    """What the higher key of a pair will show as its part, so that the other may fetch it already; it promises
    nothing."""
    MEAN = "mean"
    """What the slice's owner made of the members' parts."""
    TAKEN = "taken"
    """The lower key of a pair took the mean, so that the other may."""


class Kind(StrEnum):
    """What a manifest describes."""

    PATCH = "patch"
    SKIP = "skip"
    ANCHOR = "anchor"


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A payload exactly as signed, and who signed it (ascending by key, no key twice)."""

    type: Annotated[str, SizeMax(16)]
    payload: Annotated[bytes, SizeMax(limits.ROLLOUT_BATCH_SIZE_BYTES_MAX)]
    signers: Annotated[tuple[PeerId, ...], CountMax(limits.SIGNATURES_MAX)]
    signatures: Annotated[tuple[Signature, ...], CountMax(limits.SIGNATURES_MAX)]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a run is and whom it trusts. Revision 0 is the genesis; its digest is the run id.

    Signed by ``owner_threshold`` owner keys: of itself for the genesis, of revision n for revision n+1.
    """

    TYPE: ClassVar[str] = "descriptor"

    name: Name
    nonce: Annotated[bytes, SizeExact(16)]
    """Chosen at random, so that two runs with equal settings differ."""
    revision: int
    previous: Digest | None
    """Digest of the revision before; ``None`` for the genesis only."""
    owners: Keys
    owner_threshold: int
    authorities: Annotated[tuple[PeerId, ...], CountMax(limits.AUTHORITIES_MAX)]
    trainers: Keys
    inferencers: Keys
    """Keys whose rollouts count."""
    open_trainers_max: int
    """Unlisted trainers admitted per round; 0 closes the run to them."""
    open_inferencers_max: int
    """Unlisted inferencer keys whose rollouts count at one time; 0 closes the run to them."""
    private: bool
    """Directory keys are hashed with the token's secret and strangers are refused at the stream."""
    table_digest: Digest | None
    base_root: Digest | None
    base_blob_id: Digest | None
    """Parameter table and base model; all ``None`` until fixed by the first anchor."""
    algorithm: Name
    """Outer algorithm: ``none`` (one publisher), ``pulseloco``, ``diloco``, ``ddp`` or ``gossip``."""
    constants: Annotated[tuple[tuple[Name, int], ...], CountMax(64)]
    """Outer constants, ascending by name: integers as they are, reals as their FP32 bits."""
    publish_interval_min_ms: int
    anchor_interval: int
    """Versions between anchors."""
    wire_version_min: int
    wire_version_max: int


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """Starts an epoch: cuts the history after ``kept_version``.

    Signed by the owners or by more than half of the authorities.
    """

    TYPE: ClassVar[str] = "epoch"

    run_id: RunId
    revision: int
    epoch: int
    kept_version: Version | None
    """Last version that still counts; ``None`` when the run starts."""
    kept_root: Digest | None
    first_number: int
    """Above every number seen in earlier epochs."""
    reason: Name


@dataclass(frozen=True, slots=True)
class Manifest:
    """Immutable description of one way to reach one version. Signed by an authority."""

    TYPE: ClassVar[str] = "manifest"

    run_id: RunId
    revision: int
    term: int
    kind: Kind
    base_version: Version | None
    """``None`` for an anchor only."""
    version: Version
    base_root: Digest | None
    root: Digest
    table_digest: Digest
    blob_id: Digest
    raw_size_bytes: int
    """Bytes of the whole version, dense."""
    encoded_size_bytes: int
    """Bytes of the blob: the sum of its chunk sizes."""
    changed_count: int
    """Changed elements (an anchor: all of them)."""
    element_count: int
    codec_id: int
    trainer_step: int
    previous: Digest | None
    """Digest of the manifest published before this one in the epoch."""
    consensus: bool = field(default=True, metadata=LATER)
    """``False`` for a version of a run that mixes which is one trainer's own, and no mean that all members hold."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One retained manifest, as the planner sees it."""

    kind: Kind
    base_version: Version | None
    version: Version
    root: Digest
    manifest_digest: Digest
    encoded_size_bytes: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything the publisher retains, ascending by (version, kind). Signed by an authority."""

    TYPE: ClassVar[str] = "catalogue"

    run_id: RunId
    epoch: int
    entries: Annotated[tuple[CatalogueEntry, ...], CountMax(limits.CATALOGUE_ENTRIES_MAX)]


@dataclass(frozen=True, slots=True)
class Head:
    """The newest version; signed anew every ``HEAD_RESIGN_SECONDS`` by an authority."""

    TYPE: ClassVar[str] = "head"

    run_id: RunId
    revision: int
    term: int
    version: Version
    root: Digest
    manifest_digest: Digest
    catalogue_digest: Digest
    epoch_digest: Digest | None
    """Digest of the epoch record in force; ``None`` in epoch 0."""
    issued_at_ms: int
    valid_until_ms: int
    """Unix time in milliseconds."""


@dataclass(frozen=True, slots=True)
class Have:
    """What one node holds and where it can be dialled. Signed by the node itself."""

    TYPE: ClassVar[str] = "have"

    run_id: RunId
    role: Annotated[str, SizeMax(16)]
    epoch: int
    version_first: int
    version_last: int
    """Patches held, both ends included; ``version_last`` is 0 while nothing is held."""
    anchors: Annotated[tuple[int, ...], CountMax(limits.ANCHORS_LISTED_MAX)]
    addresses: Annotated[tuple[Address, ...], CountMax(limits.ADDRESSES_MAX)]
    issued_at_ms: int


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Samples one inferencer generated. Signed by the inferencer; its arrays are read by ``chain/rollouts.py``."""

    TYPE: ClassVar[str] = "rollouts"

    run_id: RunId
    sequence: int
    """Rises from batch to batch of one key: a trainer takes each number of a key once."""
    version_first: Version
    version_last: Version
    """Weights the oldest and the newest token of the batch came from."""
    sample_count: int
    part_names: Annotated[tuple[RewardName, ...], CountMax(limits.REWARD_PARTS_MAX)]
    """What the rewards are made of, none twice; the names of the rows of ``reward_parts``."""
    logprob_bits: int
    """16 or 32."""
    trainer: PeerId | None
    """Whose tasks it answers; ``None`` if it answers none."""
    task_ids: Annotated[tuple[TaskId, ...], CountMax(limits.TASKS_PER_BATCH_MAX)]
    """Tasks of that trainer that this batch answers, none twice."""
    body: Annotated[bytes, SizeMax(limits.ROLLOUT_BATCH_SIZE_BYTES_MAX)]
    """The arrays, as one zstandard frame of byte planes."""
    metadata: Annotated[str, SizeMax(65_536)]
    """JSON object, for the training loop; never interpreted by pulsenet."""


@dataclass(frozen=True, slots=True)
class ReceiptName:
    """Which receipt somebody stored last."""

    round_index: int
    term: int
    outcome: Digest
    """What it says, whoever proposed it: see ``chain/outcome.py``."""
    digest: Digest


@dataclass(frozen=True, slots=True)
class Vote:
    """One authority's vote for a coordinator; a candidate's vote for itself asks for the others'."""

    TYPE: ClassVar[str] = "vote"

    run_id: RunId
    revision: int
    term: int
    candidate: PeerId
    newest: ReceiptName | None
    """The newest receipt the voter stored when it voted."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One trainer's gated pseudo-gradient of one round. Signed by the trainer, which signs one per round."""

    TYPE: ClassVar[str] = "contribution"

    run_id: RunId
    revision: int
    peer_id: PeerId
    """The trainer, so that equal content of two trainers is two contributions, and nobody signs another's."""
    round_index: int
    """The round it is for: 0 leads from the starting state to state 1."""
    base_state_root: Digest
    """State the inner steps started from."""
    blob_id: Digest
    encoded_size_bytes: int
    entry_count: int
    element_count: int
    """Elements of all master weights; the blob holds ``entry_count`` of them."""
    norm_bits: int
    """Euclidean norm of the entries as FP32 bits."""
    codec_id: int


@dataclass(frozen=True, slots=True)
class Member:
    """A contribution that a round counts."""

    peer_id: PeerId
    contribution_digest: Digest
    scale_bits: int
    """What its entries are multiplied by, above 0 and at most 1, as FP32 bits."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A contribution whose content a round refuses."""

    peer_id: PeerId
    contribution_digest: Digest
    reason: Name
    """Stable code: ``base``, ``shape``, ``finite``, ``norm``, ``decode``."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one round counts. Signed by its coordinator; final with more than half of the authorities' signatures."""

    TYPE: ClassVar[str] = "receipt"

    run_id: RunId
    revision: int
    term: int
    coordinator: PeerId
    round_index: int
    base_state_root: Digest
    previous: Digest | None
    """Outcome of the receipt of the round before; ``None`` for round 0 only."""
    members: Annotated[tuple[Member, ...], CountMax(limits.ROUND_MEMBERS_MAX)]
    """Ascending by key. With none the state stays as it is, and only the round index rises."""
    rejected: Annotated[tuple[Rejection, ...], CountMax(limits.ROUND_MEMBERS_MAX)]
    """Ascending by key; nobody is in both lists."""


@dataclass(frozen=True, slots=True)
class SliceName:
    """The blob of one slice of an aggregate; whoever sums it makes the same blob."""

    blob_id: Digest
    encoded_size_bytes: int


@dataclass(frozen=True, slots=True)
class Aggregate:
    """What a round's contributions add up to, by slice. Signed by an authority that summed all of it."""

    TYPE: ClassVar[str] = "aggregate"

    run_id: RunId
    revision: int
    round_index: int
    outcome: Digest
    """Of the final receipt of the round."""
    slices: Annotated[tuple[SliceName, ...], CountMax(limits.ROUND_MEMBERS_MAX)]
    """As many as the receipt has members; the member at the same place sums and serves it."""


@dataclass(frozen=True, slots=True)
class StateAnchor:
    """A whole outer state: master weights, momentum, round index. Signed by an authority that holds it."""

    TYPE: ClassVar[str] = "stateanchor"

    run_id: RunId
    revision: int
    round_index: int
    """Rounds that led to it, which is also the round that is due on top of it."""
    state_root: Digest
    outcome: Digest | None
    """Outcome of the receipt of the round before; ``None`` for the starting state only."""
    blob_id: Digest
    encoded_size_bytes: int


@dataclass(frozen=True, slots=True)
class Roster:
    """Who mixes in the next rounds, and on what. Signed by the coordinator of its term."""

    TYPE: ClassVar[str] = "roster"

    run_id: RunId
    revision: int
    term: int
    number: int
    """Rises with each roster of one term; of two rosters of a round the later term's, then the higher number counts."""
    first_round: int
    round_count: int
    """Rounds it is valid for, ``first_round`` the first of them."""
    members: Keys
    """Ascending. In this order they own the slices of every global mean, each as many."""
    subset: Annotated[tuple[int, ...], CountMax(limits.TENSORS_MAX)]
    """Tensors of Mix2 where the variant mixes a subset, ascending; empty for all."""
    probe_round: int | None = field(default=None, metadata=LATER)
    """Round of the newest probe that was answered; ``None`` before any was."""
    distance_bits: int | None = field(default=None, metadata=LATER)
    """Jensen-Shannon distance between trainers in that probe, as FP32 bits."""

    @property
    def end_round(self) -> int:
        """The first round it is not valid for any more."""
        return self.first_round + self.round_count


@dataclass(frozen=True, slots=True)
class Share:
    """What one member gives the others in one job of one round. Signed by that member."""

    TYPE: ClassVar[str] = "share"

    run_id: RunId
    revision: int
    peer_id: PeerId
    """Who signed it."""
    roster: Digest
    """Roster the round is mixed by."""
    round_index: int
    job: int
    """1 or 2 as in SPEC section 6.15; 0 for a state that joiners may begin from."""
    kind: ShareKind
    slice_index: int
    slice_count: int
    contributors: Annotated[bytes, SizeMax(limits.ROSTER_MEMBERS_MAX // 8)]
    """Of a mean, one bit for each member of the roster whose part is in it, in order, from the highest bit of the
    first byte; spare bits are 0. Empty otherwise."""
    blob_id: Digest
    encoded_size_bytes: int
    element_count: int
    """Elements of the slice, dense."""
    norm_bits: int
    """Euclidean norm of the values as FP32 bits."""
    mixed_root: Digest | None
    """Root of the last common mean the signer holds; of a mean, what its parts are relative to."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What one member predicts for the tokens of the probe, after the inner steps of a round. Signed by that member."""

    TYPE: ClassVar[str] = "probe"

    run_id: RunId
    revision: int
    peer_id: PeerId
    """Who signed it."""
    roster: Digest
    """Roster the round is mixed by."""
    round_index: int
    batch: Digest
    """Of the batch that was answered: every trainer is given the same one."""
    bins: Digest
    """Of the tokens that have bins of their own; only answers of the same bins are compared."""
    answer: Annotated[bytes, SizeMax(limits.PROBE_ANSWER_SIZE_BYTES_MAX)]
    """Probabilities of the bins (spec-outer, "Probe")."""
    scores: Annotated[bytes, SizeMax(4 * limits.PROBE_SCORES_MAX)]
    """Mean squared difference of the two parts of this member's Mix2 as little-endian FP32, one for each tensor of the
    roster's subset, in order; empty where nothing was mixed."""


@dataclass(frozen=True, slots=True)
class JoinToken:
    """What a newcomer needs to find a run; printed as text by ``pulsenet run create``."""

    run_id: RunId
    revision_min: int
    bootstraps: Annotated[tuple[Address, ...], CountMax(limits.ADDRESSES_MAX)]
    """Multiaddresses with ``/p2p/<peer>`` at the end."""
    secret: Annotated[bytes, SizeMax(32)]
    """Hashed into the directory keys of a private run; empty otherwise."""
    expires_at_ms: int | None
