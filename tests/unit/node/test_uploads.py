"""Slots are few, shared fairly, and given to what somebody waits for; nobody starves."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from pulsenet.ids import PeerId
from pulsenet.node.uploads import (
    ANCHOR_TURNS,
    LEASE_SECONDS,
    MEASURE_SECONDS,
    READERS_MAX,
    SLOTS_MIN,
    SLOTS_START,
    WAIT_SECONDS_MAX,
    WAITING_MAX,
    WAITING_PER_PEER_MAX,
    Uploads,
)

MIB = 1 << 20
PEERS = [PeerId(number.to_bytes(32, "big")) for number in range(READERS_MAX + 10)]


class Server:
    """A link of a given pace on which every slot moves alike, and readers that ask again at once."""

    def __init__(self, *, cap: int = 0, slots_max: int = 28) -> None:
        self.uploads = Uploads(slots_max, cap)
        self.tickets = itertools.count()
        self.owner: dict[int, tuple[PeerId, str]] = {}
        self.serving: list[int] = []
        self.sent: Counter[tuple[PeerId, str]] = Counter()
        self.now = 0.0

    def ask(self, peer_id: PeerId, kind: str = "patch") -> bool:
        ticket = next(self.tickets)
        self.owner[ticket] = (peer_id, kind)
        return self.uploads.ask(ticket, peer_id, kind)

    def advance(self) -> list[int]:
        granted = self.uploads.advance(self.now)
        self.serving += granted
        return granted

    def serve(self, seconds: float, chunks_per_second: float, *, again: bool = True) -> None:
        """Send one chunk after another, round robin, each its own transfer."""
        end = self.now + seconds
        while self.now < end:
            self.advance()
            self.now += 1.0 / chunks_per_second
            if not self.serving:
                continue
            ticket = self.serving.pop(0)
            self.sent[self.owner[ticket]] += 1
            self.uploads.note_sent(ticket, MIB, self.now)
            self.uploads.end(ticket, self.now)
            if again:
                self.ask(*self.owner[ticket])


def test_readers_get_equal_shares_however_many_requests_each_has() -> None:
    server = Server()
    for _ in range(WAITING_PER_PEER_MAX):
        server.ask(PEERS[0])
    for peer_id in PEERS[1:10]:
        server.ask(peer_id)
    server.serve(100.0, 10.0)
    counts = [server.sent[peer_id, "patch"] for peer_id in PEERS[:10]]
    assert min(counts) >= 0.9 * max(counts)


def test_200_joiners_at_once_are_served_alike() -> None:
    """A-PEER-2: the slowest gets at least half of what the median gets."""
    server = Server(cap=50_000_000 // 8)
    for peer_id in PEERS[:200]:
        assert server.ask(peer_id)
    server.serve(600.0, 50_000_000 / 8 / MIB)
    counts = sorted(server.sent[peer_id, "patch"] for peer_id in PEERS[:200])
    assert counts[0] >= 0.5 * counts[100]


def test_who_was_away_has_no_arrears_to_collect() -> None:
    server = Server(slots_max=4)
    for peer_id in PEERS[:4]:
        server.ask(peer_id)
    server.serve(50.0, 10.0)
    before = server.sent.copy()
    for _ in range(WAITING_PER_PEER_MAX):
        server.ask(PEERS[9])
    server.serve(20.0, 10.0)
    gained = {peer_id: server.sent[peer_id, "patch"] - before[peer_id, "patch"] for peer_id in [*PEERS[:4], PEERS[9]]}
    assert gained[PEERS[9]] <= 1.3 * min(gained.values())


def test_patches_go_before_anchors_and_anchors_get_on_all_the_same() -> None:
    server = Server(slots_max=1)
    for peer_id in PEERS[:4]:
        server.ask(peer_id, "patch")
        server.ask(peer_id, "anchor")
    server.serve(400.0, 10.0)
    sent = Counter(dict.fromkeys(("patch", "anchor"), 0))
    for (_, kind), count in server.sent.items():
        sent[kind] += count
    assert sent["anchor"] == pytest.approx(sum(sent.values()) / ANCHOR_TURNS, rel=0.02)


def test_anchors_use_every_slot_that_no_patch_wants() -> None:
    server = Server(slots_max=2)
    server.ask(PEERS[0], "anchor")
    server.ask(PEERS[1], "state")
    assert len(server.advance()) == 2


def test_a_slow_link_has_few_slots_and_a_fast_one_many() -> None:
    slow, fast = Server(), Server()
    for server, pace in ((slow, 0.25), (fast, 200.0)):
        assert server.uploads.slots(0.0) == SLOTS_START
        for peer_id in PEERS[:40]:
            server.ask(peer_id)
        server.serve(60.0, pace)
    assert slow.uploads.slots(slow.now) == SLOTS_MIN
    assert fast.uploads.slots(fast.now) == 28
    assert fast.uploads.serving_count <= 28


@pytest.mark.parametrize("cap", [0, MIB])
def test_slow_readers_that_hold_every_slot_keep_no_other_reader_out(cap: int) -> None:
    """A-PEER-2: their pace looks like that of a thin link, which has few slots."""
    server = Server(cap=cap)
    for _ in range(WAITING_PER_PEER_MAX):
        for peer_id in PEERS[:2]:
            server.ask(peer_id)
    slow = server.advance()
    assert len(slow) == SLOTS_START
    for ticket in slow:
        server.now += 10.0
        server.uploads.note_sent(ticket, MIB, server.now)
    assert server.uploads.slots(server.now) <= SLOTS_START
    fast = server.ask(PEERS[2])
    assert fast
    assert [server.owner[ticket][0] for ticket in server.advance()] == [PEERS[2]]
    assert server.ask(PEERS[2])
    assert not server.advance(), "one each"
    for peer_id in PEERS[3:20]:
        server.ask(peer_id)
    assert len(server.advance()) == SLOTS_START - 3, "not everybody on a link that may be thin"


@pytest.mark.parametrize(("size_bytes", "slots"), [(MIB, 3), (256 << 10, 14), (64 << 10, 28), (1, 28)])
def test_short_chunks_leave_by_more_slots(size_bytes: int, slots: int) -> None:
    """Members that mix ask for short chunks: few slots would keep some of them waiting until they are sent away."""
    uploads = Uploads(28, 465_000)
    for ticket in range(60):
        uploads.ask(ticket, PEERS[0], "patch")
        uploads.advance(float(ticket))
        uploads.note_sent(ticket, size_bytes, float(ticket))
        uploads.end(ticket, float(ticket))
    assert uploads.slots(60.0) == slots


def test_a_cap_bounds_the_slots_at_once() -> None:
    assert Uploads(28, 64 << 10).slots(0.0) == 1
    assert Uploads(28, MIB).slots(0.0) == 8
    assert Uploads(28, 100 * MIB).slots(MEASURE_SECONDS) == 28


def test_a_link_that_was_idle_starts_anew() -> None:
    server = Server()
    server.ask(PEERS[0])
    server.serve(30.0, 0.25, again=False)
    assert server.uploads.serving_count == 0
    assert server.uploads.slots(server.now) == SLOTS_START


def test_the_queue_is_bounded_for_each_and_for_all() -> None:
    server = Server()
    assert [server.ask(PEERS[0]) for _ in range(WAITING_PER_PEER_MAX + 1)] == [True] * WAITING_PER_PEER_MAX + [False]
    for peer_id in PEERS[1:WAITING_MAX]:
        server.ask(peer_id)
    assert server.uploads.waiting_count == WAITING_MAX
    assert not server.ask(PEERS[WAITING_MAX + 1])


def test_who_leaves_the_queue_is_not_served() -> None:
    server = Server()
    server.ask(PEERS[0])
    server.ask(PEERS[1])
    server.uploads.leave(0)
    assert server.advance() == [1]


class SlowHolders:
    """Keys that take a chunk in about 50 s each, four a request, and ask again at once; and a reader that takes four a
    second, and comes when they have every slot.
    """

    def __init__(self, slow_count: int) -> None:
        self.uploads = Uploads(28)
        self.tickets = itertools.count()
        self.sent: Counter[PeerId] = Counter()
        self.slow = PEERS[:slow_count]
        self.reader = PEERS[slow_count]
        self.asks = [(float(number), peer_id) for number, peer_id in enumerate([*self.slow, self.reader])]
        self.waiting: dict[int, tuple[float, PeerId]] = {}
        self.moving: dict[int, tuple[float, PeerId, int]] = {}

    def chunk_seconds(self, peer_id: PeerId) -> float:
        return 0.25 if peer_id == self.reader else 45.0 + peer_id[-1]

    def run(self, seconds: float) -> None:
        for step in range(int(seconds * 4)):
            now = step / 4
            for at, peer_id in [ask for ask in self.asks if ask[0] <= now]:
                self.asks.remove((at, peer_id))
                ticket = next(self.tickets)
                assert self.uploads.ask(ticket, peer_id, "patch")
                self.waiting[ticket] = (now, peer_id)
            for ticket, (since, peer_id) in list(self.waiting.items()):
                if now >= since + WAIT_SECONDS_MAX:
                    self.uploads.leave(ticket)
                    del self.waiting[ticket]
                    self.asks.append((now + 2.0, peer_id))
            for ticket in self.uploads.advance(now):
                _, peer_id = self.waiting.pop(ticket)
                self.moving[ticket] = (now + self.chunk_seconds(peer_id), peer_id, 4)
            self._move(now)

    def _move(self, now: float) -> None:
        for ticket, (due_at, peer_id, left) in list(self.moving.items()):
            if now < due_at:
                continue
            self.uploads.note_sent(ticket, MIB, now)
            self.sent[peer_id] += 1
            if left == 1 or self.uploads.must_yield(ticket, now):
                self.uploads.end(ticket, now)
                del self.moving[ticket]
                self.asks.append((now, peer_id))
            else:
                self.moving[ticket] = (now + self.chunk_seconds(peer_id), peer_id, left - 1)


@pytest.mark.parametrize(("slow_count", "chunks_min"), [(8, 1_500), (16, 1_000), (24, 20)])
def test_keys_that_take_little_cannot_keep_every_slot_from_one_that_takes_much(
    slow_count: int, chunks_min: int
) -> None:
    """A-PEER-2: in ten minutes; by bytes alone sixteen of them would leave it eight chunks, and 24 four."""
    holders = SlowHolders(slow_count)
    holders.run(600.0)
    assert holders.sent[holders.reader] >= chunks_min
    assert min(holders.sent[peer_id] for peer_id in holders.slow) >= 1, "they are served, too"


def test_a_slot_is_kept_while_nobody_without_one_waits() -> None:
    uploads = Uploads(28)
    for ticket in range(SLOTS_START):
        uploads.ask(ticket, PEERS[ticket], "patch")
    assert len(uploads.advance(0.0)) == SLOTS_START
    assert not uploads.must_yield(0, 1_000.0)
    uploads.ask(100, PEERS[1], "patch")
    assert not uploads.must_yield(0, 1_000.0), "it has one already"
    uploads.ask(101, PEERS[50], "patch")
    assert not uploads.must_yield(0, LEASE_SECONDS - 0.1)
    assert uploads.must_yield(0, LEASE_SECONDS)


def test_the_memory_of_shares_is_bounded() -> None:
    server = Server()
    for peer_id in PEERS:
        server.ask(peer_id)
        server.serve(0.1, 10.0, again=False)
    assert len(server.uploads._served_until) <= READERS_MAX
