"""Frames between the daemon and local processes."""

from __future__ import annotations

import os
import struct
from typing import get_args

import pytest

from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.local import protocol
from pulsenet.local.framing import FRAME_SIZE_BYTES_MAX, Frame, FrameReader, encode_frame
from pulsenet.local.mixing_protocol import MIXING_MESSAGE_TYPES
from pulsenet.local.protocol import LocalMessage
from pulsenet.local.rounds_protocol import ROUNDS_MESSAGE_TYPES

ONE, TWO = Version(0, 1), Version(3, 2)

EXAMPLES: list[LocalMessage] = [
    protocol.Attach(1, "test"),
    protocol.Attached(1, "trainer"),
    protocol.OfferSnapshot(7, b"table", False, True),
    protocol.PartWanted(3),
    protocol.PublishDone(protocol.PublishStatus.COMMITTED, ONE, 10, 2, 1, 5, ""),
    protocol.RequestUpdate(None, None, 100),
    protocol.RequestUpdate(TWO, Digest(bytes(32)), 100),
    protocol.UpdateReply(4, protocol.UpdateKind.RECORDS, ONE, TWO, Digest(bytes(32)), b"table", 9),
    protocol.NoUpdate(),
    protocol.ConfirmUpdate(4, False, None, "decode"),
    protocol.Confirmed(True, ""),
    protocol.SubmitRollouts(ONE, TWO, 4, ("right",), 32, None, (), b"1", "{}"),
    protocol.RolloutsTaken(False, "busy", 1_000),
    protocol.TakeRollouts(8, 0),
    protocol.RolloutsReply((protocol.SignedBatch(PeerId(bytes(32)), 7, 3, b"batch"),)),
    protocol.TellChecks(PeerId(bytes(32)), 3, 1),
    protocol.ChecksNoted(),
    protocol.SendTasks(("{}",), 1_000),
    protocol.TasksQueued((bytes(16),), "", 0),
    protocol.TakeTasks(4, 1_000),
    protocol.TasksGiven((protocol.GivenTask(PeerId(bytes(32)), bytes(16), "{}", 1_000),)),
    protocol.GetStatus(),
    protocol.StatusReply('{"a": 1}'),
    protocol.LocalRefusal("version", "why"),
    protocol.SnapshotPart(5),
    protocol.OfferSnapshot(7, b"table", False, True, protocol.Origin(bytes(16), 3)),
    protocol.PartWanted(3, 2),
    protocol.ChangedPart(5, 64),
]


def read(data: bytes, cut: int = 1 << 20) -> list[LocalMessage]:
    reader = FrameReader()
    messages = []
    while data:
        size_bytes = min(cut, reader.wanted_size_bytes)
        frame = reader.feed(data[:size_bytes], [])
        data = data[size_bytes:]
        if frame is not None:
            messages.append(frame.message)
    assert reader.is_between_frames
    return messages


def test_every_message_type_has_a_number_of_its_own() -> None:
    types = get_args(LocalMessage)
    assert set(protocol.MESSAGE_TYPES.values()) == set(types)
    assert len(protocol.MESSAGE_TYPES) == len(types)


def test_every_message_type_has_an_example() -> None:
    # Those of rounds and of mixing have theirs in files of their own.
    named = set(protocol.MESSAGE_TYPES.values()) - {*ROUNDS_MESSAGE_TYPES, *MIXING_MESSAGE_TYPES}
    assert {type(message) for message in EXAMPLES} == named


@pytest.mark.parametrize("cut", [1, 5, 1 << 20])
def test_frames_read_back_whatever_the_cut(cut: int) -> None:
    data = b"".join(encode_frame(message) for message in EXAMPLES)
    assert read(data, cut) == EXAMPLES


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (struct.pack("<IBB", FRAME_SIZE_BYTES_MAX + 1, 1, 0), "framing"),
        (struct.pack("<IBB", 1, 1, 2), "framing"),
        (struct.pack("<IBB", 1, 1, 1) + b"\x80", "framing"),
        (struct.pack("<IBB", 1, 99, 0) + b"\x80", "message-unknown"),
        (struct.pack("<IBB", 1, 1, 0) + b"\xc1", "decode"),
        (struct.pack("<IBB", 1, 1, 0) + b"\x80", "schema"),
    ],
)
def test_each_fault_has_its_code_before_memory_is_spent(data: bytes, code: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        read(data)
    assert caught.value.code == code


def pipe_end() -> int:
    first, second = os.pipe()
    os.close(second)
    return first


def is_closed(descriptor: int) -> bool:
    return not os.path.exists(f"/proc/self/fd/{descriptor}")


def test_a_descriptor_belongs_to_its_frame() -> None:
    reader = FrameReader()
    descriptor = pipe_end()
    data = encode_frame(EXAMPLES[2], descriptor_count=1)
    assert reader.feed(data[:6], [descriptor]) is None
    frame = reader.feed(data[6:], [])
    assert frame is not None
    assert frame.take_descriptor() == descriptor
    frame.close()
    assert not is_closed(descriptor)
    with pytest.raises(RemoteProtocolError, match="handoff-descriptor"):
        frame.take_descriptor()
    os.close(descriptor)


def test_descriptors_nobody_takes_are_closed() -> None:
    first, second, third = pipe_end(), pipe_end(), pipe_end()
    frame = Frame(EXAMPLES[0], first)
    frame.close()
    frame.close()
    assert is_closed(first)
    reader = FrameReader()
    with pytest.raises(RemoteProtocolError, match="framing"):
        reader.feed(encode_frame(EXAMPLES[0]), [second])
    assert is_closed(second)
    reader = FrameReader()
    reader.feed(b"\0", [third])
    reader.close()
    assert is_closed(third)
    fourth, fifth = pipe_end(), pipe_end()
    with pytest.raises(RemoteProtocolError, match="more than one"):
        FrameReader().feed(b"\0", [fourth, fifth])
    assert is_closed(fourth)
    assert is_closed(fifth)


def test_a_message_beyond_its_bounds_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError):
        encode_frame(protocol.Attach(1, "x" * 65))
    batch = protocol.SignedBatch(PeerId(bytes(32)), 1, 0, bytes(1 << 20))
    with pytest.raises(LocalProtocolError, match="RolloutsReply"):
        encode_frame(protocol.RolloutsReply((batch,) * 18))
