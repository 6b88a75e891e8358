"""Messages in length-prefixed frames."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest

from pulsenet import limits
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.wire.framing import FrameDecoder, check_frame_size, decode_message, encode_message
from pulsenet.wire.messages import Ack, ChunkReply, GetChunks, GetHead, HeadReply, Message, RecordsReply

DIGEST = Digest(b"d" * 32)
MESSAGES: list[Message] = [GetHead(), HeadReply(None), GetChunks((DIGEST,)), ChunkReply(DIGEST, b"data"), Ack()]
STREAM = b"".join(map(encode_message, MESSAGES))


def code_of(data: bytes) -> str:
    decoder = FrameDecoder()
    with pytest.raises(RemoteProtocolError) as caught:
        decoder.feed(data)
    with pytest.raises(LocalProtocolError):
        decoder.feed(b"")
    return caught.value.code


def test_a_frame_is_its_length_its_number_and_its_message() -> None:
    frame = encode_message(ChunkReply(DIGEST, b"data"))
    body = msgpack.packb({"data": b"data", "digest": DIGEST})
    assert frame == (len(body) + 1).to_bytes(4, "little") + b"\x0b" + body
    assert decode_message(memoryview(frame)[4:]) == ChunkReply(DIGEST, b"data")


@pytest.mark.parametrize("step", [1, 2, 3, 7, len(STREAM)])
def test_frames_arrive_however_they_are_split(step: int) -> None:
    decoder = FrameDecoder()
    messages: list[Message] = []
    for start in range(0, len(STREAM), step):
        messages += decoder.feed(STREAM[start : start + step])
    decoder.eof()
    assert messages == MESSAGES


def test_a_full_chunk_fits_a_frame_and_more_does_not() -> None:
    full = ChunkReply(DIGEST, bytes(limits.CHUNK_SIZE_BYTES_MAX))
    assert FrameDecoder().feed(encode_message(full)) == [full]
    records = (bytes(limits.RECORD_SIZE_BYTES_MAX),) * 5
    with pytest.raises(LocalProtocolError, match="does not fit"):
        encode_message(RecordsReply(records))
    assert len(encode_message(RecordsReply(records[:4]))) <= 4 + limits.FRAME_SIZE_BYTES_MAX


@pytest.mark.parametrize("size_bytes", [0, limits.FRAME_SIZE_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_that_lies_is_refused_before_the_body_comes(size_bytes: int) -> None:
    """A-CHK-7."""
    tracemalloc.start()
    assert code_of(size_bytes.to_bytes(4, "little")) == "framing"
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    with pytest.raises(RemoteProtocolError, match="framing"):
        check_frame_size(size_bytes)


def test_a_length_too_small_or_too_large_breaks_the_message() -> None:
    """A-CHK-7."""
    frame = bytearray(encode_message(ChunkReply(DIGEST, b"data")))
    frame[0] -= 1
    assert code_of(bytes(frame)) == "decode"
    frame[0] += 2
    assert code_of(bytes(frame) + b"\x00") == "decode"


def test_a_stream_cut_inside_a_frame_is_noticed() -> None:
    """A-CHK-7."""
    for end in range(1, 7):
        decoder = FrameDecoder()
        decoder.feed(encode_message(HeadReply(None))[:end])
        with pytest.raises(RemoteProtocolError, match="framing"):
            decoder.eof()


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "framing"),
        (b"\x00\x80", "message-unknown"),
        (b"\xff\x80", "message-unknown"),
        (b"\x02", "decode"),
        (b"\x02\x80\x00", "decode"),
        (b"\x02\x90", "schema"),
        (b"\x03\x80", "schema"),
    ],
)
def test_a_broken_message_names_what_is_broken(payload: bytes, code: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_message(payload)
    assert caught.value.code == code
    if payload:
        assert code_of(len(payload).to_bytes(4, "little") + payload) == code


def test_the_buffer_never_holds_more_than_a_frame() -> None:
    """A-CHK-7: memory stays flat, and what is held is told."""
    decoder = FrameDecoder()
    for _ in range(3):
        assert decoder.feed(STREAM * 50) == MESSAGES * 50
        assert decoder.buffered_size_bytes == 0
    decoder.feed(STREAM[:-1])
    assert decoder.buffered_size_bytes == len(encode_message(MESSAGES[-1])) - 1
