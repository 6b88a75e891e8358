"""Readers come first, the publisher last, and help of the publisher is counted."""

from __future__ import annotations

import itertools
import random

from pulsenet import limits
from pulsenet.chain.records import Have, Kind, Manifest
from pulsenet.ids import Digest, PeerId, RunId, Version, compute_digest
from pulsenet.node.effects import SendRequest
from pulsenet.node.events import ReplyReceived
from pulsenet.node.holdings import pack_flags
from pulsenet.node.list_fetch import BlobWant, SliceChoice
from pulsenet.node.picker import SETTLE_SECONDS
from pulsenet.node.relief import CALL_BACK_SECONDS, RELIEF_SECONDS, RELIEF_TOLD_SECONDS, STILL_SECONDS
from pulsenet.node.sharing import IN_FLIGHT_MIN, Sharing
from pulsenet.node.sources import Sources
from pulsenet.node.transfers import Transfer, Transfers
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.messages import HoldingsReply, Refusal

RUN_ID = RunId(b"r" * 32)
PUBLISHER, OWN, *PEERS = (PeerId(compute_digest(bytes([number]))) for number in range(9))
DIGESTS = [compute_digest(f"chunk {number}".encode()) for number in range(40)]
LIST = ChunkList(tuple((1000, digest) for digest in DIGESTS))
BLOB = LIST.blob_id
MANIFEST = Manifest(
    run_id=RUN_ID,
    revision=0,
    term=0,
    kind=Kind.PATCH,
    base_version=Version(0, 6),
    version=Version(0, 7),
    base_root=BLOB,
    root=BLOB,
    table_digest=BLOB,
    blob_id=BLOB,
    raw_size_bytes=1 << 30,
    encoded_size_bytes=LIST.size_bytes,
    changed_count=0,
    element_count=1 << 29,
    codec_id=1,
    trainer_step=0,
    previous=None,
)


class Bench:
    def __init__(self, *peer_ids: PeerId, want: BlobWant | None = None) -> None:
        draw = random.Random(1).randrange
        self.sources = Sources(draw)
        for peer_id in (PUBLISHER, *peer_ids):
            self.sources.connect(peer_id)
        self.transfers = Transfers(self.sources)
        self.ids = itertools.count()
        self.sharing = Sharing(self.sources, self.transfers, lambda: next(self.ids), OWN)
        self.sharing.open(want or BlobWant(MANIFEST, PUBLISHER), LIST, DIGESTS, DIGESTS)
        self.questions: dict[PeerId, SendRequest] = {}

    def ask_around(self, now: float) -> None:
        for effect in self.sharing.ask_around(now):
            assert isinstance(effect, SendRequest)
            self.questions[effect.peer_id] = effect

    def tell(self, peer_id: PeerId, held: range | tuple[int, ...], now: float, given: tuple[int, ...] = ()) -> None:
        flags = [pack_flags(place in told for place in range(40)) for told in (held, given)]
        self.answer(peer_id, HoldingsReply(BLOB, *flags), now)

    def answer(self, peer_id: PeerId, reply: HoldingsReply | Refusal, now: float) -> None:
        question = self.questions.pop(peer_id)
        self.sharing.handle(ReplyReceived(question.request_id, peer_id, reply), now)

    def choose(self, now: float, room: int = 64) -> tuple[PeerId, set[int]] | None:
        """Choose and start a request."""
        choice = self.sharing.choose(BLOB, room, now)
        if choice is None:
            return None
        source, digests = choice
        transfer = Transfer(source.peer_id, BLOB, frozenset(digests), set(digests), now, now, now + 100.0)
        self.transfers.start(next(self.ids), transfer)
        return source.peer_id, {DIGESTS.index(digest) for digest in digests}

    def choose_all(self, now: float) -> list[tuple[PeerId, set[int]]]:
        return list(iter(lambda: self.choose(now), None))

    def finish(self, peer_id: PeerId, now: float) -> None:
        """Let everything that was asked of a peer come."""
        for request_id in self.transfers.of_peer(peer_id):
            transfer = self.transfers[request_id]
            for digest in tuple(transfer.awaited):
                self.transfers.stop_awaiting(transfer, digest)
                transfer.good_count += 1
                self.sources.note_chunk(peer_id, now)
                self.sharing.note_chunk(transfer, 1000, now)
            self.transfers.end(request_id)


def test_alone_with_the_publisher_a_reader_asks_at_once_and_in_order() -> None:
    bench = Bench()
    bench.ask_around(0.0)
    assert bench.questions == {}
    assert bench.choose(0.0) == (PUBLISHER, {0, 1, 2, 3})


def test_a_reader_that_sees_others_asks_what_they_hold_before_it_asks_the_publisher() -> None:
    bench = Bench(*PEERS[:2])
    bench.ask_around(0.0)
    assert set(bench.questions) == {PUBLISHER, *PEERS[:2]}
    assert bench.choose(0.0) is None
    bench.tell(PUBLISHER, range(40), 0.1)
    bench.tell(PEERS[0], (5,), 0.1)
    assert bench.choose(0.1) == (PEERS[0], {5})
    assert bench.choose(0.1) is None
    assert bench.choose(SETTLE_SECONDS - 0.01) is None
    choice = bench.choose(SETTLE_SECONDS)
    assert choice is not None
    assert choice[0] == PUBLISHER


def test_others_that_do_not_read_the_blob_keep_nobody_from_the_publisher() -> None:
    bench = Bench(PEERS[0])
    bench.ask_around(0.0)
    bench.tell(PUBLISHER, range(40), 0.1, given=tuple(range(40)))
    bench.answer(PEERS[0], Refusal("not-found", "", 0), 0.1)
    assert bench.choose(0.1) == (PUBLISHER, {0, 1, 2, 3})


def test_the_publisher_is_asked_for_nothing_that_another_reader_holds() -> None:
    """A-PEER-2: readers fetch from each other."""
    bench = Bench(*PEERS[:3])
    bench.ask_around(0.0)
    bench.tell(PUBLISHER, range(40), 0.1)
    for number, peer_id in enumerate(PEERS[:3]):
        bench.tell(peer_id, range(10 * number, 10 * number + 10), 0.1)
    choices = bench.choose_all(4.9)
    asked_of_publisher = set().union(*(chunks for peer_id, chunks in choices if peer_id == PUBLISHER))
    assert asked_of_publisher <= set(range(30, 40))
    assert {peer_id for peer_id, _ in choices} <= {PUBLISHER, *PEERS[:3]}


def test_a_reader_that_holds_all_is_asked_instead_of_the_publisher() -> None:
    bench = Bench(*PEERS[:2])
    bench.sources.note_have(PEERS[0], Have(RUN_ID, "seed", 0, 1, 7, (), (), 1))
    bench.ask_around(0.0)
    assert PEERS[0] not in bench.questions, "its have record says it"
    bench.tell(PUBLISHER, range(40), 0.1)
    bench.tell(PEERS[1], range(40), 0.1)
    choices = bench.choose_all(0.1)
    assert {peer_id for peer_id, _ in choices} == set(PEERS[:2])


def test_a_reader_that_told_of_nothing_and_holds_all_since_is_asked() -> None:
    """Its have record came between two answers, and whoever holds all is asked about chunks no more."""
    bench = Bench(PEERS[0])
    bench.ask_around(0.0)
    bench.tell(PUBLISHER, range(40), 0.1, given=tuple(range(40)))
    bench.tell(PEERS[0], (), 0.1)
    bench.sources.note_have(PEERS[0], Have(RUN_ID, "inferencer", 0, 1, 7, (), (), 1))
    assert not bench.sharing.lack_everywhere(BLOB, DIGESTS)
    bench.sources.disconnect(PUBLISHER)
    assert not bench.sharing.lack_everywhere(BLOB, DIGESTS)
    choice = bench.choose(0.2)
    assert choice is not None
    assert choice[0] == PEERS[0]


def test_a_busy_reader_is_no_reason_to_wait() -> None:
    bench = Bench(PEERS[0])
    bench.ask_around(0.0)
    bench.tell(PUBLISHER, range(40), 0.1)
    bench.tell(PEERS[0], range(40), 0.1)
    bench.sources.note_busy(PEERS[0], 0.1, wait_seconds=30.0)
    choice = bench.choose(0.1)
    assert choice is not None
    assert choice[0] == PUBLISHER


def test_no_more_is_asked_for_than_comes_in_a_few_seconds() -> None:
    bench = Bench(*PEERS)
    bench.ask_around(0.0)
    bench.tell(PUBLISHER, range(40), 0.1)
    for peer_id in PEERS:
        bench.tell(peer_id, range(40), 0.1)
    bench.choose_all(0.1)
    assert bench.transfers.chunk_count == IN_FLIGHT_MIN


def test_older_nodes_are_asked_for_chunks_without_being_asked_about_them() -> None:
    bench = Bench(PEERS[0])
    bench.ask_around(0.0)
    bench.answer(PEERS[0], Refusal("unexpected", "", 0), 0.1)
    bench.tell(PUBLISHER, range(40), 0.1)
    choices = [bench.choose(0.1) for _ in range(2)]
    assert {choice[0] for choice in choices if choice is not None} == {PUBLISHER, PEERS[0]}
    bench.ask_around(60.0)
    assert PEERS[0] not in bench.questions


def test_the_publisher_helps_a_reader_that_stands_still_and_that_is_told() -> None:
    bench = Bench(PEERS[0])
    bench.ask_around(0.0)
    bench.tell(PUBLISHER, range(40), 0.1)
    bench.tell(PEERS[0], range(40), 0.1)
    while (choice := bench.choose(0.1)) is not None:
        assert choice[0] == PEERS[0]
    for transfer in bench.transfers:
        transfer.is_stalled = True
    before = RELIEF_SECONDS - 0.1
    assert bench.choose(before) is None
    now = RELIEF_SECONDS + STILL_SECONDS
    bench.sharing.ask_around(now)
    assert bench.sharing.shortfall == ""
    choice = bench.choose(now)
    assert choice is not None
    assert (choice[0], len(choice[1])) == (PUBLISHER, 1)
    assert bench.sharing.shortfall == "thin-upload"
    assert bench.choose(now) is None, "one chunk at a time"
    bench.sharing.ask_around(now + RELIEF_TOLD_SECONDS)
    assert bench.sharing.shortfall == ""


def test_in_the_first_second_readers_that_know_many_others_ask_the_publisher_for_one_chunk() -> None:
    """What it gave to others it tells only after they have asked."""
    bench = Bench(*PEERS[:4])
    bench.ask_around(0.0)
    for peer_id in PEERS[:4]:
        bench.tell(peer_id, (), 0.1)
    bench.tell(PUBLISHER, range(40), 0.1)
    asked = [len(chunks) for peer_id, chunks in bench.choose_all(0.1) if peer_id == PUBLISHER]
    assert asked == [1]
    bench.finish(PUBLISHER, 0.3)
    assert bench.choose_all(0.3) == []
    bench.ask_around(0.7)
    bench.tell(PUBLISHER, range(40), 0.7, given=(0, 1))
    choice = bench.choose(0.7)
    assert choice is not None
    assert choice[0] == PUBLISHER
    assert len(choice[1]) == 3
    assert not choice[1] & {0, 1}


def test_what_the_publisher_gives_to_each_of_a_few_readers_at_once_is_asked_of_it() -> None:
    """Waiting for one another would take longer, whatever it gave and whoever comes before."""
    for reader_count, pace, is_quick in ((1, 40.0, True), (3, 120.0, True), (3, 119.0, False), (4, 1000.0, False)):
        bench = Bench(*PEERS[:reader_count])
        publisher = bench.sources.get(PUBLISHER)
        assert publisher is not None
        publisher.peak.note(pace, 0.1)
        bench.ask_around(0.0)
        for peer_id in PEERS[:reader_count]:
            bench.tell(peer_id, (), 0.1)
        bench.tell(PUBLISHER, range(40), 0.1, given=tuple(range(40)))
        choice = bench.choose(0.1)
        assert (choice is not None) is is_quick
        assert choice is None or choice[0] == PUBLISHER


def make_thin(bench: Bench) -> float:
    """Let the publisher be quick, and a reader that owes all else bring nothing; return when help begins."""
    bench.ask_around(0.0)
    bench.tell(PUBLISHER, range(40), 0.1)
    bench.tell(PEERS[0], range(40), 0.1)
    for peer_id in tuple(bench.questions):
        bench.tell(peer_id, (), 0.1)
    assert {peer_id for peer_id, _ in bench.choose_all(0.1)} == {PEERS[0]}
    choice = bench.choose(60.0)
    assert choice is not None
    assert (choice[0], len(choice[1])) == (PUBLISHER, 1), "its pace is unknown so far"
    now = 60.1
    bench.finish(PUBLISHER, now)
    return now


def test_where_the_uplinks_of_readers_are_thin_the_publisher_brings_what_it_can() -> None:
    bench = Bench(PEERS[0])
    now = make_thin(bench)
    owed = {DIGESTS.index(digest) for transfer in bench.transfers for digest in transfer.awaited}
    assert owed
    asked = bench.choose_all(now)
    assert {peer_id for peer_id, _ in asked} == {PUBLISHER}, "a reader whose pace is unknown is asked for nothing more"
    assert sum(len(chunks) for _, chunks in asked) > 1
    assert bench.sharing.shortfall == "thin-upload"
    while asked:
        now += 0.1
        bench.finish(PUBLISHER, now)
        asked = bench.choose_all(now)
    assert bench.sharing.publisher_size_bytes == 1000 * (40 - len(owed))
    late = bench.sharing.find_late(now)
    assert [bench.transfers[request_id].peer_id for request_id in late] == [PEERS[0]] * len(late)
    for request_id in late:
        bench.sharing.put_back(bench.transfers.end(request_id)[1][0], [BLOB])
    choice = bench.choose(now)
    assert choice is not None
    assert choice[0] == PUBLISHER
    assert choice[1] <= owed


def test_a_reader_that_brings_a_chunk_before_the_publisher_would_have_brought_all_is_asked_too() -> None:
    bench = Bench(*PEERS[:2])
    now = make_thin(bench)
    bench.ask_around(now)
    bench.tell(PEERS[1], range(40), now)
    source = bench.sources.get(PEERS[1])
    assert source is not None
    source.window.chunks_per_second = 1.0
    assert {peer_id for peer_id, _ in bench.choose_all(now)} == {PUBLISHER, PEERS[1]}


def test_where_readers_bring_enough_nothing_is_called_back_and_the_publisher_is_spared() -> None:
    bench = Bench(*PEERS[:4])
    bench.ask_around(0.0)
    for peer_id in (PUBLISHER, *PEERS[:4]):
        bench.tell(peer_id, range(40), 0.1)
    publisher = bench.sources.get(PUBLISHER)
    assert publisher is not None
    publisher.peak.note(10.0, 0.1)
    for step in range(4):
        assert PUBLISHER not in {peer_id for peer_id, _ in bench.choose_all(4.0 + step)}
        for peer_id in PEERS[:4]:
            bench.finish(peer_id, 4.9 + step)
    assert bench.sharing.reader_size_bytes == 37_000
    assert PUBLISHER not in {peer_id for peer_id, _ in bench.choose_all(8.0)}
    assert bench.sharing.find_late(8.0 + CALL_BACK_SECONDS) == []


def test_a_reader_that_reaches_no_other_says_so() -> None:
    """Behind a NAT, say: others told of themselves in the directory, and no connection leads to them."""
    bench = Bench()
    bench.ask_around(0.0)
    bench.choose_all(0.0)
    bench.ask_around(RELIEF_SECONDS)
    assert bench.sharing.shortfall == "", "nobody else reads"
    bench.sources.note_have(PEERS[0], Have(RUN_ID, "inferencer", 0, 1, 6, (), (), 1))
    bench.ask_around(RELIEF_SECONDS - 0.1)
    assert bench.sharing.shortfall == ""
    bench.ask_around(RELIEF_SECONDS)
    assert bench.sharing.shortfall == "no-readers"
    bench.sources.connect(PEERS[1])
    assert bench.sharing.shortfall == "", "this one can be reached"


def test_parts_of_a_blob_are_not_shared() -> None:
    want = BlobWant(MANIFEST, PUBLISHER, SliceChoice(frozenset([0]), 2))
    bench = Bench(PEERS[0], want=want)
    bench.ask_around(0.0)
    assert bench.questions == {}
    assert bench.choose(0.0) is not None
    exclusive = Bench(PEERS[0], want=BlobWant(MANIFEST, PUBLISHER, None, is_exclusive=True))
    exclusive.ask_around(0.0)
    assert exclusive.questions == {}
    assert {peer_id for peer_id, _ in exclusive.choose_all(0.0)} == {PUBLISHER}


def test_what_all_together_lack_is_known_once_all_have_told() -> None:
    bench = Bench(*PEERS[:2])
    bench.sources.disconnect(PUBLISHER)
    bench.ask_around(0.0)
    bench.tell(PEERS[0], range(30), 0.1)
    assert not bench.sharing.lack_everywhere(BLOB, DIGESTS)
    bench.tell(PEERS[1], range(20, 39), 0.1)
    assert bench.sharing.lack_everywhere(BLOB, DIGESTS)
    assert not bench.sharing.lack_everywhere(BLOB, DIGESTS[:39])
    bench.sharing.note_miss(BLOB, PEERS[0])
    assert not bench.sharing.lack_everywhere(BLOB, DIGESTS)
    bench.sources.note_miss(PEERS[0], BLOB, 0.2, claimed=False)
    bench.sources.note_miss(PEERS[1], BLOB, 0.2, claimed=False)
    assert bench.sharing.lack_everywhere(BLOB, DIGESTS[:1])
    bench.sharing.note_miss(Digest(bytes(32)), PEERS[0])


def test_a_lost_peer_and_a_blob_no_longer_wanted_are_forgotten() -> None:
    bench = Bench(PEERS[0])
    bench.ask_around(0.0)
    bench.tell(PEERS[0], range(40), 0.1)
    bench.sharing.lose_peer(PEERS[0])
    assert bench.choose(0.1) is None
    bench.sharing.keep(())
    assert not bench.sharing.has_open(BLOB)
    assert bench.sharing.ask_around(0.2) == []


def test_the_window_of_a_request_is_bounded_by_the_source() -> None:
    bench = Bench()
    bench.ask_around(0.0)
    sizes = [len(chunks) for _, chunks in bench.choose_all(0.0)]
    assert max(sizes) <= limits.CHUNKS_PER_REQUEST_MAX
