"""Lines with bandwidth: bytes take their time, receivers take turns, and a full downlink holds nobody else up."""

from __future__ import annotations

import pytest

from pulsenet.ids import Digest, PeerId
from pulsenet.testing.clock import VirtualClock
from pulsenet.testing.fakes import Chance
from pulsenet.testing.links import MEGABIT, MESSAGE_OVERHEAD_BYTES, Link, Links, draw_home_link
from pulsenet.wire.messages import ChunkListReply, ChunkReply, HeadReply, Message, RecordsReply

A, B, C = PeerId(b"a" * 32), PeerId(b"b" * 32), PeerId(b"c" * 32)
SIZE_BYTES = 1_000_000
CHUNK = ChunkReply(Digest(b"d" * 32), bytes(SIZE_BYTES - MESSAGE_OVERHEAD_BYTES))


class Lines:
    """Links, and when what was sent over them arrived."""

    def __init__(self, **rates: tuple[float, float]) -> None:
        self.clock = VirtualClock()
        self.links = Links(self.clock)
        self.peers = {"a": A, "b": B, "c": C}
        self.arrivals: list[tuple[str, str, float]] = []
        for name, (up, down) in rates.items():
            self.links.connect(self.peers[name], Link(up_rate=up * MEGABIT, down_rate=down * MEGABIT))

    def send(self, sender: str, receiver: str, message: Message = CHUNK, **options: float) -> None:
        def note() -> None:
            self.arrivals.append((sender, receiver, self.clock.now))

        self.links.send(self.peers[sender], self.peers[receiver], message, note, **options)  # type: ignore[arg-type]

    def run(self) -> list[tuple[str, str, float]]:
        while self.clock.step(1e9):
            pass
        return self.arrivals


def test_a_chunk_takes_the_time_of_the_slower_line() -> None:
    lines = Lines(a=(8, 8), b=(8, 80))
    lines.send("a", "b")
    assert lines.run() == [("a", "b", pytest.approx(1.0))]
    lines = Lines(a=(80, 8), b=(8, 8))
    lines.send("a", "b")
    assert lines.run() == [("a", "b", pytest.approx(1.0))]


def test_an_uplink_is_shared_and_receivers_take_turns() -> None:
    lines = Lines(a=(8, 8), b=(8, 800), c=(8, 800))
    for receiver in "bbbbcc":
        lines.send("a", receiver)
    assert [receiver for _, receiver, _ in lines.run()] == ["b", "b", "c", "b", "c", "b"]
    assert [round(at) for _, _, at in lines.arrivals] == [1, 2, 3, 4, 5, 6]


def test_a_downlink_is_shared_by_its_senders() -> None:
    lines = Lines(a=(800, 8), b=(800, 8), c=(8, 8))
    for sender in ("a", "b"):
        lines.send(sender, "c")
        lines.send(sender, "c")
    assert [round(at) for _, _, at in lines.run()] == [1, 2, 3, 4]


def test_a_slow_receiver_holds_up_nobody_else() -> None:
    lines = Lines(a=(80, 80), b=(8, 8), c=(8, 80))
    for _ in range(3):
        lines.send("a", "b")
    for _ in range(9):
        lines.send("a", "c")
    arrivals = lines.run()
    assert max(at for _, receiver, at in arrivals if receiver == "c") == pytest.approx(1.0, abs=0.15)
    assert [round(at) for _, receiver, at in arrivals if receiver == "b"] == [1, 2, 3]


def test_a_slow_sender_leaves_the_rest_of_a_downlink_to_others() -> None:
    lines = Lines(a=(8, 8), b=(80, 8), c=(8, 80))
    lines.send("a", "c")
    for _ in range(8):
        lines.send("b", "c")
    arrivals = lines.run()
    assert max(at for sender, _, at in arrivals if sender == "b") < 1.1
    assert [at for sender, _, at in arrivals if sender == "a"] == [pytest.approx(1.0, abs=0.1)]


def test_the_way_takes_time_too_and_small_messages_wait_for_nobody() -> None:
    lines = Lines(a=(8, 8), b=(8, 80))
    lines.links.connect(C, Link(delay_seconds=0.25))
    lines.send("a", "b")
    lines.send("a", "c", HeadReply(None), delay_seconds=0.05)
    assert lines.run() == [("a", "c", pytest.approx(0.3)), ("a", "b", pytest.approx(1.0))]


def test_bytes_are_counted_where_they_are_sent_and_where_they_arrive() -> None:
    lines = Lines(a=(8, 8), b=(8, 80))
    lines.send("a", "b")
    lines.send("a", "b", HeadReply(None))
    lines.run()
    sent, received = lines.links.meter_of(A), lines.links.meter_of(B)
    assert sent.sent_size_bytes == received.received_size_bytes == SIZE_BYTES + MESSAGE_OVERHEAD_BYTES
    assert sent.sent_content_size_bytes == received.received_content_size_bytes == SIZE_BYTES - MESSAGE_OVERHEAD_BYTES
    assert lines.links.meter_of(C).sent_size_bytes == 0


def test_lists_and_records_take_bandwidth_as_well() -> None:
    lines = Lines(a=(8, 8), b=(8, 80))
    data = bytes(SIZE_BYTES - MESSAGE_OVERHEAD_BYTES)
    lines.send("a", "b", ChunkListReply(Digest(b"d" * 32), len(data), data))
    lines.send("a", "b", RecordsReply((data,)))
    assert [round(at) for _, _, at in lines.run()] == [1, 2]


def test_what_nobody_waits_for_is_not_sent() -> None:
    lines = Lines(a=(8, 8), b=(8, 80))
    lines.send("a", "b")
    lines.links.send(A, B, CHUNK, lambda: None, is_wanted=lambda: False)
    lines.send("a", "b")
    assert [round(at) for _, _, at in lines.run()] == [1, 2]


def test_what_waits_for_a_dead_node_is_not_sent() -> None:
    lines = Lines(a=(8, 8), b=(8, 80), c=(8, 80))
    for receiver in "bbc":
        lines.send("a", receiver)
    lines.links.drop(B)
    assert [(receiver, round(at)) for _, receiver, at in lines.run()] == [("b", 1), ("c", 2)]
    lines.send("a", "c")
    lines.send("a", "c")
    lines.links.drop(A)
    assert len(lines.run()) == 3


def test_a_scale_makes_chunks_heavier_and_nothing_else() -> None:
    clock = VirtualClock()
    links = Links(clock, scale=1000.0)
    links.connect(A, Link(up_rate=8 * MEGABIT))
    arrivals: list[float] = []
    links.send(A, B, ChunkReply(Digest(b"d" * 32), bytes(1000)), lambda: arrivals.append(clock.now))
    links.send(A, B, HeadReply(None), lambda: arrivals.append(clock.now))
    while clock.step(10.0):
        pass
    assert arrivals == [0.0, pytest.approx(1.0, abs=0.001)]


def test_home_lines_are_within_their_limits_and_some_cannot_be_dialled() -> None:
    chance = Chance(1)
    drawn = [draw_home_link(chance, nat_per_mille=300) for _ in range(1000)]
    assert all(20 <= link.down_rate / MEGABIT <= 1000 for link in drawn)
    assert all(5 <= link.up_rate / MEGABIT <= 100 for link in drawn)
    assert all(link.up_rate <= link.down_rate * 5 for link in drawn)
    assert 200 < sum(not link.is_dialable for link in drawn) < 400
