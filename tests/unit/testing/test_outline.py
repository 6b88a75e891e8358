"""Equal events have equal lines, different ones different lines, and nobody prints megabytes."""

from __future__ import annotations

from pulsenet.ids import Digest, PeerId
from pulsenet.node.events import ReplyReceived
from pulsenet.testing.outline import outline
from pulsenet.wire.messages import ChunkReply

PEER = PeerId(b"p" * 32)


def event(data: bytes, request_id: int = 1) -> ReplyReceived:
    return ReplyReceived(request_id, PEER, ChunkReply(Digest(b"d" * 32), data))


def test_equal_events_have_equal_lines_and_others_do_not() -> None:
    assert outline(event(b"x")) == outline(event(b"x"))
    lines = {outline(event(data, number)) for data in (b"x", b"y", b"xx", bytes(100)) for number in (1, 2)}
    assert len(lines) == 8


def test_long_bytes_are_told_by_size_and_ends() -> None:
    line = outline(event(b"a" * 1_000_000 + b"b"))
    assert len(line) < 300
    assert "1000001" in line
    assert line != outline(event(b"a" * 1_000_000 + b"c"))


def test_values_inside_tuples_are_told() -> None:
    assert outline((1, None, "word", (b"\x01",))) == "(1,None,'word',(01))"
