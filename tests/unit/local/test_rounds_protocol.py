"""Messages of the rounds between a training process and its daemon."""

from __future__ import annotations

import re

import pytest

from pulsenet import limits
from pulsenet.chain.records import Descriptor
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest, PeerId
from pulsenet.local import protocol, rounds_protocol
from pulsenet.local.framing import FrameReader, encode_frame
from pulsenet.local.rounds_protocol import ROUNDS_MESSAGE_TYPES, RoundsMessage
from pulsenet.node.effects import Fate

ROOT, BLOB, KEY = Digest(b"r" * 32), Digest(b"b" * 32), PeerId(b"k" * 32)

MEMBER = rounds_protocol.CountedMember(KEY, 0x3F800000, BLOB, 77)

EXAMPLES: list[RoundsMessage] = [
    rounds_protocol.GetRoundSettings(),
    rounds_protocol.RoundSettingsReply("pulseloco", (("inner_steps", 8), ("momentum_factor", 0x3F666666)), KEY),
    rounds_protocol.OpenRounds(b"table", ROOT),
    rounds_protocol.RoundsOpened(),
    rounds_protocol.HoldState(3, ROOT),
    rounds_protocol.HoldState(None, None),
    rounds_protocol.PutBlobPart(1 << 20, True),
    rounds_protocol.BlobTaken(None, 1 << 20),
    rounds_protocol.BlobTaken(BLOB, 1 << 40),
    rounds_protocol.BlobRefused("enospc"),
    rounds_protocol.OfferContribution(3, ROOT, BLOB, 77, 5, 100, 0x3F800000, 1),
    rounds_protocol.AbstainRound(3, "finite"),
    rounds_protocol.AwaitOrder(2_000),
    rounds_protocol.NoOrder(),
    rounds_protocol.Waiting(),
    rounds_protocol.CheckOrder(Digest(b"c" * 32), KEY, 3, ROOT, BLOB, 77, 5, 100, 0x3F800000, 1),
    rounds_protocol.Checked(Digest(b"c" * 32), ""),
    rounds_protocol.StepOrder(3, ROOT, Fate.COUNTED, "", (MEMBER,)),
    rounds_protocol.StepOrder(3, ROOT, Fate.REJECTED, "norm", ()),
    rounds_protocol.StepOrder(3, ROOT, Fate.MISSED, "", (MEMBER,), (rounds_protocol.SliceBlob(0, BLOB, 9),)),
    rounds_protocol.SumOrder(
        3,
        ROOT,
        (MEMBER,),
        (rounds_protocol.WantedSlice(0, True, (rounds_protocol.ByteRange(84, 9),)),),
    ),
    rounds_protocol.Summed(3, (rounds_protocol.SliceBlob(0, BLOB, 9),)),
    rounds_protocol.SumRefused(3, "decode"),
    rounds_protocol.Stepped(4, ROOT),
    rounds_protocol.StepFailed(3, "blob-unknown"),
    rounds_protocol.RestoreOrder(20, ROOT, BLOB, 77, True),
    rounds_protocol.Restored(20, ROOT),
    rounds_protocol.RestoreRefused("root_mismatch"),
    rounds_protocol.AnchorOrder(20),
    rounds_protocol.AnchorStored(20, ROOT, BLOB, 77),
    rounds_protocol.AnchorRefused(20, "round"),
    rounds_protocol.GoOn(4),
    rounds_protocol.FetchBlobPart(BLOB, 0, 1 << 20),
    rounds_protocol.BlobPart(77, True),
    rounds_protocol.NoBlobPart("blob-unknown"),
    rounds_protocol.TellResidual(0x3F800000),
]


def read(data: bytes) -> list[object]:
    reader = FrameReader()
    messages: list[object] = []
    while data:
        size_bytes = reader.wanted_size_bytes
        frame = reader.feed(data[:size_bytes], [])
        data = data[size_bytes:]
        if frame is not None:
            messages.append(frame.message)
    return messages


def test_every_message_has_an_example_and_a_number_of_its_own() -> None:
    assert {type(message) for message in EXAMPLES} == set(ROUNDS_MESSAGE_TYPES)
    assert len(set(ROUNDS_MESSAGE_TYPES)) == len(ROUNDS_MESSAGE_TYPES)
    numbers = [number for number, cls in protocol.MESSAGE_TYPES.items() if cls in ROUNDS_MESSAGE_TYPES]
    assert numbers == list(range(20, 20 + len(ROUNDS_MESSAGE_TYPES)))


def test_messages_read_back() -> None:
    assert read(b"".join(encode_frame(message) for message in EXAMPLES)) == EXAMPLES


def test_every_message_is_in_the_table_of_the_documentation() -> None:
    text = rounds_protocol.__doc__ or ""
    named = set(re.findall(r":class:`(\w+)`", text))
    assert {cls.__name__ for cls in ROUNDS_MESSAGE_TYPES} <= named


def test_the_largest_step_order_fits_a_frame() -> None:
    members = (MEMBER,) * limits.ROUND_MEMBERS_MAX
    slices = (rounds_protocol.SliceBlob(1 << 40, BLOB, 1 << 40),) * limits.ROUND_MEMBERS_MAX
    order = rounds_protocol.StepOrder(1 << 40, ROOT, Fate.DROPPED, "x" * 64, members, slices)
    assert read(encode_frame(order)) == [order]
    with pytest.raises(LocalProtocolError):
        encode_frame(rounds_protocol.StepOrder(0, ROOT, Fate.COUNTED, "", (*members, MEMBER)))


@pytest.mark.parametrize(
    "message",
    [
        rounds_protocol.BlobRefused("x" * 65),
        rounds_protocol.PutBlobPart(-1, True),
        rounds_protocol.RoundSettingsReply("diloco", (("a", 1),) * 65, KEY),
        rounds_protocol.OpenRounds(bytes(limits.TABLE_SIZE_BYTES_MAX + 1), ROOT),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_beyond_its_bounds_is_our_own_fault(message: RoundsMessage) -> None:
    with pytest.raises(LocalProtocolError):
        encode_frame(message)


def test_a_reply_holds_whatever_a_descriptor_names() -> None:
    bound = Descriptor.__annotations__["constants"]
    assert f"CountMax({rounds_protocol.ROUND_CONSTANTS_MAX})" in bound
