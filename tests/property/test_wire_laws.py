"""Laws of the wire: any bytes decode or are refused, and nothing depends on how bytes are split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet.chain import records
from pulsenet.chain.rollouts import unpack_rollouts
from pulsenet.chain.signing import decode_signed
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.wire import messages
from pulsenet.wire.canonical import CanonicalReader
from pulsenet.wire.chunks import ChunkCutter, ChunkList
from pulsenet.wire.framing import FrameDecoder, decode_message, encode_message
from pulsenet.wire.schema import decode_value, encode_value

EXAMPLES = settings(max_examples=60, deadline=None)

digests = st.binary(min_size=32, max_size=32).map(Digest)
small_bytes = st.binary(max_size=40)
numbers = st.integers(0, 2**63 - 1)
addresses = st.lists(st.text(max_size=20), max_size=3).map(tuple)
peer_addresses = st.builds(messages.PeerAddress, peer_id=digests.map(PeerId), addresses=addresses)
some_messages: st.SearchStrategy[messages.Message] = st.one_of(
    st.builds(messages.GetHead),
    st.builds(messages.HeadReply, st.none() | small_bytes),
    st.builds(messages.Hello, digests.map(RunId), numbers, numbers, st.text(max_size=4), st.text(max_size=9)),
    st.builds(messages.GetChunks, st.lists(digests, max_size=4).map(tuple)),
    st.builds(messages.ChunkReply, digests, st.none() | small_bytes),
    st.builds(messages.HaveReply, st.none() | small_bytes, st.lists(peer_addresses, max_size=3).map(tuple)),
    st.builds(messages.Refusal, st.text(max_size=9), st.text(max_size=30), numbers),
    st.builds(messages.PushReply, st.booleans(), st.text(max_size=9)),
)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=40) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


@EXAMPLES
@given(st.lists(some_messages, max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=10))
def test_any_split_of_the_stream_gives_the_same_messages(sent: list[messages.Message], steps: list[int]) -> None:
    stream = b"".join(map(encode_message, sent))
    decoder = FrameDecoder()
    received: list[messages.Message] = []
    position = 0
    while position < len(stream):
        step = steps[position % len(steps)]
        received += decoder.feed(stream[position : position + step])
        position += step
    decoder.eof()
    assert received == sent


def _decode_stream(data: bytes) -> None:
    decoder = FrameDecoder()
    decoder.feed(data)
    decoder.eof()


CODES = ("framing", "message-unknown", "decode", "schema", "chunk-list", "rollouts-shape", "rollouts-value")


def _read_body(data: bytes) -> None:
    batch = records.RolloutBatch(RunId(bytes(32)), 1, Version(0, 1), Version(0, 1), 1, (), 32, None, (), data, "{}")
    unpack_rollouts(batch)


DECODERS: dict[str, Callable[[bytes], object]] = {
    "frame": decode_message,
    "stream": _decode_stream,
    "signed": decode_signed,
    "chunk-list": ChunkList.decode,
    "rollouts": _read_body,
    "rollouts-raw": lambda data: _read_body(zstandard.compress(data)),
    **{
        cls.__name__: lambda data, cls=cls: decode_value(cls, data)
        for cls in (
            records.Descriptor,
            records.EpochRecord,
            records.Manifest,
            records.Catalogue,
            records.Head,
            records.Have,
            records.RolloutBatch,
        )
    },
}


@pytest.mark.parametrize("name", DECODERS)
@EXAMPLES
@given(data=st.data())
def test_any_bytes_decode_or_are_refused(name: str, data: Any) -> None:
    numbered = st.tuples(st.integers(0, 20), plain_values).map(lambda pair: bytes([pair[0]]) + msgpack.packb(pair[1]))
    anything = data.draw(st.one_of(st.binary(max_size=80), plain_values.map(msgpack.packb), numbered))
    try:
        DECODERS[name](anything)
    except RemoteProtocolError as error:
        assert error.code in CODES  # noqa: PT017


@EXAMPLES
@given(some_messages, st.data())
def test_a_flipped_bit_never_decodes_to_the_same_message(message: messages.Message, data: Any) -> None:
    payload = bytearray(encode_message(message)[4:])
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        # In the name of a field that older senders leave out, it makes a field that nobody knows.
        assert decode_message(payload) != message or _has_defaults(message)
    except RemoteProtocolError:
        return


def _has_defaults(message: messages.Message) -> bool:
    return any(getattr(message, field.name) == field.default for field in dataclasses.fields(message))


@EXAMPLES
@given(plain_values)
def test_the_reader_accepts_msgpack_exactly_when_keys_are_sorted(value: Any) -> None:
    reader = CanonicalReader(msgpack.packb(_sort_keys(value)))
    if _depth(value) > 8:
        with pytest.raises(RemoteProtocolError):
            reader.skip()
        return
    reader.skip()
    reader.finish()


def _sort_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sort_keys(value[key]) for key in sorted(value, key=str.encode)}
    if isinstance(value, list):
        return [_sort_keys(item) for item in value]
    return value


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


@EXAMPLES
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_an_encoding_is_the_only_one_of_its_value(epoch: int, number: int) -> None:
    head = records.EpochRecord(RunId(bytes(32)), 0, epoch, Version(epoch, number), Digest(bytes(32)), number, "reason")
    data = encode_value(head)
    assert decode_value(records.EpochRecord, data) == head
    assert encode_value(decode_value(records.EpochRecord, data)) == data


@EXAMPLES
@given(st.binary(max_size=200), st.lists(st.integers(1, 30), min_size=1))
def test_any_split_cuts_the_same_chunks(blob: bytes, steps: list[int]) -> None:
    cutter = ChunkCutter(16)
    chunks = []
    position = 0
    while position < len(blob):
        step = steps[position % len(steps)]
        chunks += cutter.feed(blob[position : position + step])
        position += step
    chunks += cutter.finish()
    whole = ChunkCutter(16)
    whole.feed(blob)
    whole.finish()
    assert cutter.chunk_list == whole.chunk_list
    assert b"".join(data for _, data in chunks) == blob
