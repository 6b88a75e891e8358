"""Messages of the rounds: how a training process takes part in them through the daemon beside it.

They travel as those of :mod:`pulsenet.local.protocol`. A training process keeps one connection for them. Its closing
means that the process is gone with everything that it did not store. The daemon never speaks first: what it wants done
waits as an *order* until the process asks for it.

===========================  ===================================================================================
training process             daemon
===========================  ===================================================================================
:class:`GetRoundSettings`    :class:`RoundSettingsReply`; refused with ``no-rounds`` if the descriptor names no
                             algorithm, ``not-trainer`` on a node that does not train. Needs no open rounds
:class:`OpenRounds`          :class:`RoundsOpened`; refused with ``table``, ``self-test``, ``not-listed`` if the run
                             counts nothing of this node's key, or ``busy`` while another connection has the rounds open
:class:`HoldState`           :class:`Waiting`. First after opening, and again whenever the process replaced its outer
                             state by itself, as after loading a checkpoint: every order given before is void
:class:`PutBlobPart`         :class:`BlobTaken`, :class:`BlobRefused` if the disk does not take it: what came of the
+ memory                     blob is dropped, and the next part begins another. Chunks are stored as they come, and
                             are durable when the last part is answered
:class:`OfferContribution`   :class:`Waiting`. Answers the daemon's wish for inner steps of the round, and stores
                             their outcome. Moot, and answered all the same, if this node has sent a contribution to
                             that round before, or the round is final, or not due
:class:`AbstainRound`        :class:`Waiting`. The same without a contribution
:class:`AwaitOrder`          the oldest order, or :class:`NoOrder` when the time is up: :class:`CheckOrder`,
                             :class:`SumOrder`, :class:`StepOrder`, :class:`RestoreOrder`, :class:`AnchorOrder`,
                             :class:`GoOn`
:class:`Checked`             :class:`Waiting`. Answers a :class:`CheckOrder`
:class:`Stepped`             :class:`Waiting`. Answers a :class:`StepOrder`
:class:`StepFailed`          :class:`Waiting`. The same, and nothing moved: the daemon orders it again later
:class:`Summed`              :class:`Waiting`. Answers a :class:`SumOrder`; blobs to be stored were put before
:class:`SumRefused`          :class:`Waiting`. The same, and nothing was summed
:class:`Restored`            :class:`Waiting`. Answers a :class:`RestoreOrder`
:class:`RestoreRefused`      :class:`Waiting`. The same; the state is what it was
:class:`AnchorStored`        :class:`Waiting`. Answers an :class:`AnchorOrder`; its blob was put before
:class:`AnchorRefused`       :class:`Waiting`. The same, without a blob
:class:`FetchBlobPart`       :class:`BlobPart` + memory, or :class:`NoBlobPart`
:class:`TellResidual`        :class:`Waiting`. For status and metrics only
===========================  ===================================================================================

An order is given out once and answered before the next is asked for; :class:`GoOn` needs no answer, the round's
contribution is one. Orders that later ones make void are dropped, not given out: a check of a round that the process
has stepped, a second :class:`GoOn`. So each order is about the state that the process holds.

Anything else, such as a memory of the wrong size, an order answered that was not given, or a blob that was not put, is
refused with a :class:`pulsenet.local.protocol.LocalRefusal`, and the connection closes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, get_args

from pulsenet import limits
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Fate
from pulsenet.wire.schema import CountMax, SizeMax, cut_text

PART_SIZE_BYTES_MAX: Final = 64 << 20
"""Of a blob, in one memory: both sides hold a few of them at most, whatever the size of the model."""

ROUND_CONSTANTS_MAX: Final = 64
"""As many as a descriptor may name."""

Table = Annotated[bytes, SizeMax(limits.TABLE_SIZE_BYTES_MAX)]
"""An encoded ``ParameterTable``."""

CODE_SIZE_BYTES_MAX: Final = 64
Code = Annotated[str, SizeMax(CODE_SIZE_BYTES_MAX)]
Name = Annotated[str, SizeMax(128)]


def as_code(reason: str) -> str:
    """Return as much of a reason as a ``Code`` holds."""
    return cut_text(reason, CODE_SIZE_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class GetRoundSettings:
    """Ask how the run's trainers share what they learn."""


@dataclass(frozen=True, slots=True)
class RoundSettingsReply:
    """What the run's descriptor says, for ``OuterSettings.from_constants``."""

    algorithm: Name
    constants: Annotated[tuple[tuple[Name, int], ...], CountMax(ROUND_CONSTANTS_MAX)]
    peer_id: PeerId
    """This node's key: the own contribution among those that a round counts."""


@dataclass(frozen=True, slots=True)
class OpenRounds:
    """Take part with these masters, and with arithmetic that gave this self-test digest."""

    table: Table
    self_test: Digest


@dataclass(frozen=True, slots=True)
class RoundsOpened:
    """This connection is the training process of the node."""


@dataclass(frozen=True, slots=True)
class HoldState:
    """Say what outer state the process holds; both ``None`` if none that it could step from."""

    round_index: int | None
    """Rounds that led to it."""
    state_root: Digest | None


@dataclass(frozen=True, slots=True)
class PutBlobPart:
    """The next bytes of a blob, in the sealed memfd that comes with this frame."""

    size_bytes: int
    """From 1 to ``PART_SIZE_BYTES_MAX``."""
    is_last: bool
    is_first: bool = True
    """Whether the blob begins with it. What came of one that never became whole is dropped then: whoever put it had no
    memory for the rest, or was interrupted."""


@dataclass(frozen=True, slots=True)
class BlobTaken:
    """The part is taken."""

    blob_id: Digest | None
    """Of the whole blob; ``None`` before its last part."""
    encoded_size_bytes: int
    """So far."""


@dataclass(frozen=True, slots=True)
class BlobRefused:
    """The disk did not take the part; ``reason`` is a stable code such as ``enospc``."""

    reason: Code


@dataclass(frozen=True, slots=True)
class OfferContribution:
    """What the inner steps of a round made, in a blob that was put on this connection. Fields as in its record."""

    round_index: int
    base_state_root: Digest
    blob_id: Digest
    encoded_size_bytes: int
    entry_count: int
    element_count: int
    norm_bits: int
    codec_id: int


@dataclass(frozen=True, slots=True)
class AbstainRound:
    """There is nothing to send for a round; ``reason`` is a stable code such as ``finite``."""

    round_index: int
    reason: Code


@dataclass(frozen=True, slots=True)
class AwaitOrder:
    """Ask for the oldest order, and wait so long for one."""

    timeout_ms: int


@dataclass(frozen=True, slots=True)
class NoOrder:
    """None came before the time was up."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Taken; ask for orders."""


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """Look into a contribution to the round that the process is in. Fields as in its record."""

    contribution_digest: Digest
    peer_id: PeerId
    round_index: int
    base_state_root: Digest
    blob_id: Digest
    encoded_size_bytes: int
    entry_count: int
    element_count: int
    norm_bits: int
    codec_id: int


@dataclass(frozen=True, slots=True)
class Checked:
    """Whether it may be counted: ``reason`` is empty or a code of SPEC section 6.9."""

    contribution_digest: Digest
    reason: Code


@dataclass(frozen=True, slots=True)
class CountedMember:
    """One contribution that a round counts."""

    peer_id: PeerId
    scale_bits: int
    """What its entries are multiplied by, as FP32 bits."""
    blob_id: Digest
    encoded_size_bytes: int


@dataclass(frozen=True, slots=True)
class SliceBlob:
    """The blob of one slice."""

    slice_index: int
    blob_id: Digest
    encoded_size_bytes: int


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A part of a blob."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WantedSlice:
    """A slice to be summed."""

    slice_index: int
    is_stored: bool
    """Whether its blob is put; else only its name is asked."""
    ranges: Annotated[tuple[ByteRange, ...], CountMax(limits.ROUND_MEMBERS_MAX)]
    """Where it lies in each member's blob, behind the header; none if all slices are wanted."""


@dataclass(frozen=True, slots=True)
class SumOrder:
    """Sum slices of a round, of which there are as many as members; nothing moves."""

    round_index: int
    base_state_root: Digest
    members: Annotated[tuple[CountedMember, ...], CountMax(limits.ROUND_MEMBERS_MAX)]
    """Ascending by key."""
    slices: Annotated[tuple[WantedSlice, ...], CountMax(limits.ROUND_MEMBERS_MAX)]
    """Ascending: some, or all."""


@dataclass(frozen=True, slots=True)
class Summed:
    """The blobs of all slices of an order."""

    round_index: int
    slices: Annotated[tuple[SliceBlob, ...], CountMax(limits.ROUND_MEMBERS_MAX)]


@dataclass(frozen=True, slots=True)
class SumRefused:
    """The slices were not summed; ``reason`` is a stable code."""

    round_index: int
    reason: Code


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Do the outer step of a final receipt and settle the residual, both or neither."""

    round_index: int
    base_state_root: Digest
    fate: Fate
    """What becomes of the own work of this round, whether the process still holds it or not."""
    reason: Code
    """Why it is not counted, if the receipt says so; else empty."""
    members: Annotated[tuple[CountedMember, ...], CountMax(limits.ROUND_MEMBERS_MAX)]
    """Ascending by key. With none the state stays, and only the round index rises."""
    slices: Annotated[tuple[SliceBlob, ...], CountMax(limits.ROUND_MEMBERS_MAX)] = ()
    """If any, all slices of the aggregate, ascending: they are read, and of the members' blobs only the own one."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The outer step that led to this state is done."""

    round_index: int
    """Rounds stepped: one more than the order's."""
    state_root: Digest


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The step of ``round_index`` was not done; ``reason`` is a stable code."""

    round_index: int
    reason: Code


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """Replace the outer state by a state anchor, and hash it before anything is replaced."""

    round_index: int
    state_root: Digest
    blob_id: Digest
    encoded_size_bytes: int
    drops_residual: bool
    """Whether the residual is of a state that was wrong, or not known; else it stays."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The process holds the state of the anchor."""

    round_index: int
    state_root: Digest


@dataclass(frozen=True, slots=True)
class RestoreRefused:
    """The anchor is not what it should be; ``reason`` is a stable code."""

    reason: Code


@dataclass(frozen=True, slots=True)
class AnchorOrder:
    """Put the outer state of this round as a blob."""

    round_index: int


@dataclass(frozen=True, slots=True)
class AnchorStored:
    """The outer state of this round is the blob that was put last."""

    round_index: int
    state_root: Digest
    blob_id: Digest
    encoded_size_bytes: int


@dataclass(frozen=True, slots=True)
class AnchorRefused:
    """There is no blob of that state; ``reason`` is a stable code."""

    round_index: int
    reason: Code


@dataclass(frozen=True, slots=True)
class GoOn:
    """Run the round's inner steps, or as many again if a contribution to it was offered already."""

    round_index: int


@dataclass(frozen=True, slots=True)
class FetchBlobPart:
    """Ask for bytes of a blob that an order names."""

    blob_id: Digest
    offset_bytes: int
    size_bytes_max: int
    """From 1 to ``PART_SIZE_BYTES_MAX``."""


@dataclass(frozen=True, slots=True)
class BlobPart:
    """The bytes asked for, in the sealed memfd that comes with this frame: at least one."""

    size_bytes: int
    is_last: bool
    """Whether the blob ends here."""


@dataclass(frozen=True, slots=True)
class NoBlobPart:
    """The blob is not here, ends before the offset, or cannot be read; ``reason`` is a stable code."""

    reason: Code


@dataclass(frozen=True, slots=True)
class TellResidual:
    """What the gate holds back after the newest round, for whoever watches the node."""

    norm_bits: int
    """Euclidean norm as FP32 bits."""


RoundsMessage = (
    GetRoundSettings
    | RoundSettingsReply
    | OpenRounds
    | RoundsOpened
    | HoldState
    | PutBlobPart
    | BlobTaken
    | BlobRefused
    | OfferContribution
    | AbstainRound
    | AwaitOrder
    | NoOrder
    | Waiting
    | CheckOrder
    | Checked
    | StepOrder
    | Stepped
    | StepFailed
    | RestoreOrder
    | Restored
    | RestoreRefused
    | AnchorOrder
    | AnchorStored
    | AnchorRefused
    | GoOn
    | FetchBlobPart
    | BlobPart
    | NoBlobPart
    | TellResidual
    | SumOrder
    | Summed
    | SumRefused
)

Order = CheckOrder | SumOrder | StepOrder | RestoreOrder | AnchorOrder | GoOn
"""What a daemon may want done."""

ROUNDS_MESSAGE_TYPES: Final[tuple[type[RoundsMessage], ...]] = get_args(RoundsMessage)
"""In the order of their numbers."""
