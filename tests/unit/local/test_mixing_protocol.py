"""Messages of mixing between a training process and its daemon."""

from __future__ import annotations

import re

import pytest

from pulsenet import limits
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest
from pulsenet.local import mixing_protocol as local
from pulsenet.local import protocol
from pulsenet.local.framing import FrameReader, encode_frame
from pulsenet.local.mixing_protocol import MIXING_MESSAGE_TYPES, MixingMessage

ROOT = Digest(b"r" * 32)
BLOB = local.MixBlob(Digest(b"b" * 32), 77)
PART = local.PartBlob(BLOB.blob_id, 77, 9, 0x3F800000)
DEBT = local.DebtName(3, 1)
PLAN = local.JobPlan(2, (local.DebtBlobs(DEBT, BLOB, BLOB, (1, 4)),))

EXAMPLES: list[MixingMessage] = [
    local.OpenMixing(b"table", ROOT),
    local.MixingOpened(),
    local.Locate(None, 100),
    local.Locate(3, 100),
    local.RefuseState("mixing-header", 100),
    local.Begin(7, (), False),
    local.Begin(7, (BLOB, BLOB), True),
    local.WantRound(7, 100),
    local.RoundOpened(7, True, 4, (0, 2), PLAN, local.JobPlan(0, ()), True, False, True),
    local.StorePart(7, 2, (PART, PART), (DEBT,), ROOT),
    local.StorePart(7, 1, (PART,), (), None),
    local.FailPart(7, 2, "finite"),
    local.AwaitMix(7, 1, 100),
    local.MixDone(7, 1, (local.MixSlice(BLOB, 4), local.MixSlice(None, 1)), "late"),
    local.StoreIterate(7, PART),
    local.TellRound(7, 4, 0, "", "lost", 1, 2, 3, 4, None, None, None, None, None),
    local.TellRound(7, 4, 0, "", "lost", 1, 2, 3, 4, 5, 6, 7, 8, False),
    local.StoreProbe(7, ROOT, ROOT, b"answer", b"four"),
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
    assert {type(message) for message in EXAMPLES} == set(MIXING_MESSAGE_TYPES)
    numbers = [number for number, cls in protocol.MESSAGE_TYPES.items() if cls in MIXING_MESSAGE_TYPES]
    assert numbers == list(range(70, 70 + len(MIXING_MESSAGE_TYPES)))


def test_messages_read_back() -> None:
    assert read(b"".join(encode_frame(message) for message in EXAMPLES)) == EXAMPLES


def test_every_message_is_in_the_table_of_the_documentation() -> None:
    named = set(re.findall(r":class:`(\w+)`", local.__doc__ or ""))
    assert {cls.__name__ for cls in MIXING_MESSAGE_TYPES} <= named


@pytest.mark.parametrize(
    "message",
    [
        local.FailPart(0, 1, "x" * 65),
        local.Begin(0, (BLOB,) * (limits.ROSTER_MEMBERS_MAX + 1), True),
        local.RoundOpened(0, True, 1, tuple(range(limits.TENSORS_MAX + 1)), PLAN, PLAN, False, False, False),
        local.OpenMixing(bytes(limits.TABLE_SIZE_BYTES_MAX + 1), ROOT),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_beyond_its_bounds_is_our_own_fault(message: MixingMessage) -> None:
    with pytest.raises(LocalProtocolError):
        encode_frame(message)
