"""The follower's machine, driven event by event from a scripted publisher."""

from __future__ import annotations

import pytest

from pulsenet.chain.records import Have, Kind
from pulsenet.chain.retention import RetentionLimits
from pulsenet.chain.signing import encode_signed, record_digest, seal
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import (
    ApplyHop,
    Count,
    DropPreparation,
    Effect,
    HandToEngine,
    Log,
    PrepareHop,
    Release,
    Report,
    SaveState,
    SendRequest,
    SetTimer,
    StoreChunk,
    StoreChunkList,
    StoreRecord,
)
from pulsenet.node.events import (
    BlobDamaged,
    ChunkStored,
    EngineApplied,
    EngineFailed,
    Event,
    ForkProofSeen,
    HaveSeen,
    HeadSeen,
    HopApplied,
    HopFailed,
    PeerConnected,
    PeerLost,
    ReplyReceived,
    RequestDone,
    RoomTaken,
    StoreFailed,
    TimerFired,
)
from pulsenet.node.inferencer import TRANSITIONS, Inferencer, Phase, Step
from pulsenet.node.published import HEAD_KEY
from pulsenet.node.respond import respond
from pulsenet.node.sources import SOURCES_MAX
from pulsenet.testing.fakes import Chance, FakeStore, make_key, make_sign, only
from pulsenet.testing.script import NOW_MS, ScriptedPublisher, make_data, root_of
from pulsenet.wire.messages import GetChunks, GetHead, GetRecords


class Bench:
    """One follower, its disk, and a publisher that answers at once; hops and swaps are answered by the test."""

    def __init__(self, publisher: ScriptedPublisher, **settings: object) -> None:
        self.publisher = publisher
        self.store = FakeStore()
        self.now = 0.0
        self.log: list[Effect] = []
        self.report: dict[str, object] = {}
        self.held_back: list[Event] | None = None
        """What tells of stored chunks is kept here while it is a list."""
        self.node = Inferencer(
            publisher.make_trust(),
            make_key("follower"),
            Chance(1),
            self.store,
            **settings,  # type: ignore[arg-type]
        )
        self.tell(TimerFired())

    def tell(self, *events: Event) -> list[Effect]:
        """Deliver events and everything that follows from them; return all effects in order."""
        seen: list[Effect] = []
        queue = list(events)
        while queue:
            effects = self.node.handle(queue.pop(0), self.now, NOW_MS + round(self.now * 1000))
            seen += effects
            for effect in effects:
                queue += self.carry_out(effect)
        self.log += seen
        return seen

    def carry_out(self, effect: Effect) -> list[Event]:
        match effect:
            case StoreChunk(digest, data):
                self.store.chunks[digest] = data
                if self.held_back is not None:
                    self.held_back.append(ChunkStored(digest))
                    return []
                return [ChunkStored(digest)]
            case Report(fields):
                self.report.update(fields)
            case SendRequest(request_id, peer_id, message):
                replies: list[Event] = [
                    ReplyReceived(request_id, peer_id, reply) for reply in respond(message, self.publisher.store)
                ]
                return [*replies, RequestDone(request_id, peer_id)] if isinstance(message, GetChunks) else replies
            case _:
                self.store.keep((effect,))
        return []

    def connect(self) -> list[Effect]:
        return self.tell(PeerConnected(self.publisher.peer_id, (), outbound=True))

    def offer(self, digests: list[Digest], at_ms: int = 0) -> list[Effect]:
        """Show the follower a head over these manifests."""
        return self.tell(HeadSeen(self.sign_head(digests, at_ms), self.publisher.peer_id))

    def sign_head(self, digests: list[Digest], at_ms: int = 0) -> bytes:
        """Sign a head over these manifests; whoever asks the publisher is answered with it."""
        head = self.publisher.head(digests, at_ms=NOW_MS + at_ms)
        self.publisher.store.state[HEAD_KEY] = head
        return head

    def pass_time(self, seconds: float) -> list[Effect]:
        end = self.now + seconds
        seen: list[Effect] = []
        while self.now < end:
            timer = next((e.at for e in reversed(self.log) if isinstance(e, SetTimer)), end)
            self.now = min(max(timer, self.now + 0.01), end)
            seen += self.tell(TimerFired())
        return seen

    def let_go(self, count: int | None = None) -> list[Effect]:
        """Tell of so many of the chunks held back, of all and those to come if ``count`` is ``None``."""
        assert self.held_back is not None
        events, rest = (self.held_back, None) if count is None else (self.held_back[:count], self.held_back[count:])
        self.held_back = rest
        return self.tell(*events)

    def apply_all(self, effects: list[Effect]) -> list[Effect]:
        """Answer every hop with success until no more is ordered; return the effects after the last hop."""
        while hops := only(effects, ApplyHop):
            (hop,) = hops
            effects = self.tell(HopApplied(hop.manifest.version, hop.manifest.root))
        return effects


def v(number: int, epoch: int = 0) -> Version:
    return Version(epoch, number)


def hops(bench: Bench) -> list[int]:
    return [effect.manifest.version.number for effect in only(bench.log, ApplyHop)]


def caught_up(last: int = 12) -> tuple[Bench, list[Digest]]:
    """Return a follower at ``last`` whose engine is there too."""
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, last)
    bench = Bench(publisher)
    bench.connect()
    effects = bench.apply_all(bench.offer(digests))
    assert only(effects, HandToEngine) == [HandToEngine(v(last))]
    bench.tell(EngineApplied(v(last)))
    assert bench.node.phase is Phase.CURRENT
    return bench, digests


def test_a_joiner_applies_hop_by_hop_and_swaps_the_engine_once() -> None:
    """A-CHAIN-1."""
    publisher = ScriptedPublisher()
    digests = publisher.chain(40, 50)[:1] + publisher.chain(50, 57)
    bench = Bench(publisher)
    assert bench.node.phase is Phase.WAITING
    bench.connect()
    effects = bench.offer(digests)
    assert [hop.manifest.version for hop in only(effects, ApplyHop)] == [v(50)]
    assert bench.node.phase is Phase.APPLYING
    assert bench.node.mirror_version is None
    effects = bench.apply_all(effects)
    assert hops(bench) == list(range(50, 58))
    assert only(bench.log, HandToEngine) == [HandToEngine(v(57))]
    assert bench.node.applied_version is None
    assert bench.report["applied_version"] is None
    bench.tell(EngineApplied(v(57)))
    assert bench.node.applied_version == v(57)
    assert (bench.report["applied_version"], bench.report["version_lag"]) == (57, 0)
    assert not bench.store.holds_blob(publisher.manifests[digests[0]].blob_id)


def test_the_head_is_pulled_from_a_peer_that_connects() -> None:
    publisher = ScriptedPublisher()
    bench = Bench(publisher)
    bench.sign_head(publisher.chain(1, 1))
    effects = bench.connect()
    assert GetHead() in [request.message for request in only(effects, SendRequest)]
    assert only(effects, ApplyHop)


def test_records_are_stored_before_a_hop_is_ordered() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(1, 1)
    bench = Bench(publisher)
    bench.connect()
    bench.offer(digests)
    assert digests[0] in bench.store.records
    assert bench.store.holds_blob(publisher.manifests[digests[0]].blob_id)


def test_state_the_disk_refused_is_counted_and_stored_again() -> None:
    """A-DSK-1: what is believed in memory must not stay away from the disk until the next news."""
    bench, _ = caught_up(12)
    saved = [effect.key for effect in only(bench.log, SaveState)]
    effects = bench.tell(StoreFailed(None, "enospc"))
    assert Count("rejected", "enospc") in effects
    assert only(effects, SaveState) == []
    assert len(only(effects, Log)) == 1
    effects = bench.pass_time(6.0)
    assert {effect.key for effect in only(effects, SaveState)} == set(saved)
    assert only(effects, StoreRecord)
    assert only(bench.pass_time(6.0), SaveState) == []


def test_a_newer_head_during_a_hop_is_looked_at_after_it() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 12)
    bench = Bench(publisher)
    bench.connect()
    first = bench.offer(digests[:2])
    assert only(bench.offer(digests, at_ms=1), ApplyHop) == []
    assert bench.node.phase is Phase.APPLYING
    effects = bench.apply_all(first)
    # The goal of this catch-up was v11: the engine is not kept waiting for versions that came since.
    assert only(bench.log, HandToEngine) == [HandToEngine(v(11))]
    assert effects
    bench.tell(EngineApplied(v(11)))
    assert only(bench.log, HandToEngine) == [HandToEngine(v(11)), HandToEngine(v(12))]
    assert hops(bench) == [10, 11, 12]


def test_versions_applied_while_the_engine_is_busy_are_one_swap_more() -> None:
    bench, digests = caught_up(12)
    for number in (13, 14, 15):
        digests.append(bench.publisher.add(Kind.PATCH, v(number - 1), v(number), make_data(str(number), 50)))
        bench.apply_all(bench.offer(list(digests), at_ms=number))
    assert only(bench.log, HandToEngine) == [HandToEngine(v(12)), HandToEngine(v(13))]
    assert bench.node.applied_version == v(12)
    bench.tell(EngineApplied(v(13)))
    assert only(bench.log, HandToEngine)[-1] == HandToEngine(v(15))


def test_a_failing_engine_is_handed_the_version_again() -> None:
    """A-APP-3."""
    bench, digests = caught_up(12)
    digests.append(bench.publisher.add(Kind.PATCH, v(12), v(13), b"x"))
    bench.apply_all(bench.offer(digests, at_ms=1))
    effects = bench.tell(EngineFailed(v(12), "checksum"))
    assert Count("rejected", "engine") in effects
    assert bench.report["applied_version"] == 12
    assert HandToEngine(v(13)) in bench.pass_time(5.0)


@pytest.mark.parametrize("reason", ["base_mismatch", "root_mismatch"])
def test_a_failed_hop_is_answered_from_an_anchor_and_never_reported(reason: str) -> None:
    """A-CHAIN-5."""
    bench, digests = caught_up(12)
    digests.append(bench.publisher.add(Kind.PATCH, v(12), v(13), b"x"))
    bench.offer(digests, at_ms=1)
    effects = bench.tell(HopFailed(v(13), reason, v(12)))
    assert Count("rejected", reason) in effects
    assert only(effects, Log)
    assert bench.report["mirror_version"] == 12
    effects = bench.pass_time(1.0)
    assert [hop.manifest.kind for hop in only(effects, ApplyHop)] == [Kind.ANCHOR]
    bench.apply_all(effects)
    assert hops(bench)[-4:] == [10, 11, 12, 13]
    assert only(bench.log, HandToEngine)[-1] == HandToEngine(v(13))


def test_a_hop_with_another_root_than_signed_does_not_count() -> None:
    bench, digests = caught_up(12)
    digests.append(bench.publisher.add(Kind.PATCH, v(12), v(13), b"x"))
    bench.offer(digests, at_ms=1)
    effects = bench.tell(HopApplied(v(13), Digest(b"?" * 32)))
    assert Count("rejected", "root_mismatch") in effects
    assert bench.node.mirror_version is None
    assert bench.node.applied_version == v(12)


def test_a_hop_that_keeps_failing_is_retried_a_bounded_number_of_times() -> None:
    bench, digests = caught_up(12)
    digests.append(bench.publisher.add(Kind.PATCH, v(12), v(13), b"x"))
    effects = bench.offer(digests, at_ms=1)
    for _ in range(100):
        ordered = only(effects, ApplyHop)
        effects = bench.tell(HopFailed(v(13), "decode", v(12))) if ordered else bench.pass_time(1.0)
    assert hops(bench)[3:] == [13, 13, 13]
    assert bench.node.phase is Phase.STALLED
    assert bench.report["reason"] == "base_mismatch"
    assert bench.node.applied_version == v(12)


def test_a_full_disk_is_waited_out_without_doubting_the_mirror() -> None:
    bench, digests = caught_up(12)
    digests.append(bench.publisher.add(Kind.PATCH, v(12), v(13), b"x"))
    bench.offer(digests, at_ms=1)
    bench.tell(HopFailed(v(13), "enospc", v(12)))
    effects = bench.pass_time(1.0)
    assert [hop.manifest.version for hop in only(effects, ApplyHop)] == [v(13)]


def test_chunks_that_rotted_on_the_disk_are_fetched_again_before_the_next_try() -> None:
    """A-DSK-2: damage shows when a blob is read, and by then the machine calls it whole."""
    bench, digests = caught_up(12)
    digests.append(bench.publisher.add(Kind.PATCH, v(12), v(13), b"x" * 50))
    effects = bench.offer(digests, at_ms=1)
    assert only(effects, ApplyHop)
    blob_id = bench.publisher.manifests[digests[-1]].blob_id
    for digest in bench.store.digests_of(bench.store.lists[blob_id]):
        del bench.store.chunks[digest]
    effects = bench.tell(HopFailed(v(13), "damaged", v(12)))
    effects += bench.pass_time(2.0)
    assert only(effects, StoreChunk)
    assert bench.store.holds_blob(blob_id)
    bench.apply_all(effects)
    assert bench.node.mirror_version == v(13)


def test_answers_about_other_hops_are_ignored() -> None:
    bench, digests = caught_up(12)
    digests.append(bench.publisher.add(Kind.PATCH, v(12), v(13), b"x"))
    bench.offer(digests, at_ms=1)
    bench.tell(HopApplied(v(99), Digest(b"?" * 32)), HopFailed(v(98), "decode", None))
    assert bench.node.phase is Phase.APPLYING
    assert bench.node.mirror_version == v(12)


def test_without_a_way_the_machine_stalls_says_why_and_goes_on_at_the_next_anchor() -> None:
    """A-CHAIN-2, A-CHAIN-3."""
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 14)
    bench = Bench(publisher, held=(v(3), root_of(v(3))))
    bench.connect()
    bench.offer(digests[1:])
    assert bench.node.phase is Phase.STALLED
    assert bench.report["reason"] == "base_mismatch"
    assert hops(bench) == []
    digests.append(publisher.add(Kind.ANCHOR, None, v(15), make_data("anchor 15", 300)))
    bench.apply_all(bench.offer(digests[1:], at_ms=1))
    assert hops(bench) == [15]
    assert bench.node.mirror_version == v(15)


def preparations(effects: list[Effect]) -> list[int | None]:
    """Versions prepared, in order; ``None`` for one that was dropped."""
    return [
        effect.manifest.version.number if isinstance(effect, PrepareHop) else None
        for effect in effects
        if isinstance(effect, (PrepareHop, DropPreparation))
    ]


def test_a_patch_is_prepared_while_it_arrives_and_applied_once_it_is_whole() -> None:
    bench, digests = caught_up(12)
    assert preparations(bench.log) == []
    bench.held_back = []
    digests.append(bench.publisher.add(Kind.PATCH, v(12), v(13), make_data("13", 300)))
    effects = bench.offer(digests, at_ms=1)
    assert preparations(effects) == [13]
    stored = next(index for index, effect in enumerate(effects) if isinstance(effect, StoreChunkList))
    assert stored < next(index for index, effect in enumerate(effects) if isinstance(effect, PrepareHop))
    assert len(bench.held_back) == 2
    effects = bench.let_go(1)
    assert preparations(effects) == []
    assert only(effects, ApplyHop) == []
    effects = bench.let_go()
    assert preparations(effects) == []
    assert [hop.manifest.version for hop in only(effects, ApplyHop)] == [v(13)]
    effects = bench.apply_all(effects)
    assert preparations(effects) == []


def test_anchors_and_hops_whose_base_is_still_to_come_are_not_prepared() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 12)
    bench = Bench(publisher)
    bench.held_back = []
    bench.connect()
    assert preparations(bench.offer(digests)) == []
    anchor = publisher.manifests[digests[0]].blob_id
    anchor_chunks = set(bench.publisher.store.digests_of(publisher.store.lists[anchor]))
    arrived = [event for event in bench.held_back if isinstance(event, ChunkStored) and event.digest in anchor_chunks]
    effects = bench.tell(*arrived)
    assert [hop.manifest.version for hop in only(effects, ApplyHop)] == [v(10)]
    assert preparations(effects) == []
    effects = bench.tell(HopApplied(v(10), root_of(v(10))))
    assert preparations(effects) == [11]
    effects = bench.apply_all(bench.let_go())
    assert hops(bench) == [10, 11, 12]
    # The last was whole when its turn came.
    assert preparations(bench.log) == [11]


def test_a_hop_that_is_no_longer_on_the_route_is_not_prepared_further() -> None:
    bench, digests = caught_up(12)
    bench.held_back = []
    digests.append(bench.publisher.add(Kind.PATCH, v(12), v(13), make_data("13", 700)))
    assert preparations(bench.offer(list(digests), at_ms=1)) == [13]
    # A skip patch from the version held is cheaper than what is left.
    digests.append(bench.publisher.add(Kind.PATCH, v(13), v(14), make_data("14", 700)))
    digests.insert(-1, bench.publisher.add(Kind.SKIP, v(12), v(14), make_data("12-14", 200)))
    effects = bench.offer(digests, at_ms=2)
    # Its manifest is still to come when the route changes.
    assert preparations(effects) == [None, 14]
    assert only(effects, PrepareHop)[0].manifest.kind is Kind.SKIP
    bench.apply_all(bench.let_go())
    assert hops(bench)[-1] == 14


def test_a_fork_ends_the_preparation() -> None:
    bench, digests = caught_up(12)
    bench.held_back = []
    patch = bench.publisher.add(Kind.PATCH, v(12), v(13), make_data("13", 300))
    assert preparations(bench.offer([*digests, patch], at_ms=1)) == [13]
    other = bench.publisher.add(Kind.PATCH, v(12), v(13), b"x", root=Digest(b"?" * 32))
    records = [bench.publisher.store.records[digest] for digest in (patch, other)]
    effects = bench.tell(ForkProofSeen(records[0], records[1], make_key("witness")))
    assert bench.node.phase is Phase.FORKED
    assert preparations(effects) == [None]
    assert preparations(bench.let_go()) == []


def test_after_a_failed_hop_nothing_counts_as_prepared() -> None:
    bench, digests = caught_up(12)
    bench.held_back = []
    digests.append(bench.publisher.add(Kind.PATCH, v(12), v(13), make_data("13", 300)))
    bench.offer(list(digests), at_ms=1)
    bench.let_go()
    bench.tell(HopFailed(v(13), "enospc", v(12)))
    effects = bench.pass_time(1.0)
    assert preparations(effects) == []
    bench.apply_all(effects)
    bench.held_back = []
    digests.append(bench.publisher.add(Kind.PATCH, v(13), v(14), make_data("14", 300)))
    assert preparations(bench.offer(digests, at_ms=2)) == [14]


def test_a_seed_prepares_nothing() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 12)
    bench = Bench(publisher, role="seed")
    bench.held_back = []
    bench.connect()
    bench.offer(digests)
    bench.let_go()
    assert preparations(bench.log) == []


def test_a_cheaper_way_to_the_same_version_is_no_new_swap() -> None:
    bench, digests = caught_up(12)
    digests.insert(0, bench.publisher.add(Kind.ANCHOR, None, v(12), make_data("anchor 12", 300)))
    bench.offer(digests, at_ms=1)
    assert bench.node.phase is Phase.CURRENT
    assert hops(bench) == [10, 11, 12]
    assert len(only(bench.log, HandToEngine)) == 1


def test_a_restarted_node_with_a_whole_store_fetches_nothing() -> None:
    bench, digests = caught_up(12)
    manifests = {digest: bench.publisher.manifests[digest] for digest in digests}
    again = Bench(bench.publisher, held=(v(12), root_of(v(12))), stored=manifests)
    again.store.records.update(bench.store.records)
    again.connect()
    again.offer(digests, at_ms=1)
    assert again.node.phase is Phase.CURRENT
    assert not [request for request in only(again.log, SendRequest) if isinstance(request.message, GetChunks)]
    assert HandToEngine(v(12)) in again.log
    assert again.node.holdings.anchors == (10,)
    assert (again.node.holdings.version_first, again.node.holdings.version_last) == (11, 12)


def test_a_fork_stops_everything_and_a_higher_epoch_heals_it() -> None:
    """A-AUTH-3, A-CHAIN-4."""
    bench, digests = caught_up(12)
    publisher = bench.publisher
    false = publisher.add(Kind.PATCH, v(11), v(12), b"other", root=Digest(b"o" * 32))
    records = publisher.store.records
    bench.tell(ForkProofSeen(records[digests[-1]], records[false], publisher.peer_id))
    assert bench.node.phase is Phase.FORKED
    assert bench.report["fork"] is True
    digests.append(publisher.add(Kind.PATCH, v(12), v(13), b"x"))
    assert only(bench.offer(digests, at_ms=1), ApplyHop) == []
    assert bench.node.applied_version == v(12)
    publisher.open_epoch(1, v(12), 14)
    healed = publisher.add(Kind.ANCHOR, None, v(14, epoch=1), make_data("anchor 14", 300))
    bench.apply_all(bench.offer([healed], at_ms=2))
    assert bench.node.mirror_version == v(14, epoch=1)
    assert bench.report["fork"] is False


def test_a_fork_found_during_a_hop_hands_nothing_to_the_engine() -> None:
    bench, digests = caught_up(12)
    publisher = bench.publisher
    digests.append(publisher.add(Kind.PATCH, v(12), v(13), b"x"))
    bench.offer(digests, at_ms=1)
    false = publisher.add(Kind.PATCH, v(12), v(13), b"other", root=Digest(b"o" * 32))
    records = publisher.store.records
    bench.tell(ForkProofSeen(records[digests[-1]], records[false], publisher.peer_id))
    effects = bench.tell(HopApplied(v(13), root_of(v(13))))
    assert only(effects, HandToEngine) == []
    assert bench.node.phase is Phase.FORKED


def test_a_head_whose_signer_was_revoked_is_no_longer_followed() -> None:
    """A-AUTH-5: and nothing says any more what is newest."""
    bench, _ = caught_up(12)
    assert bench.report["stale"] is False
    bench.publisher.revise((make_key("successor"),))
    bench.offer(bench.publisher.chain(10, 13), at_ms=1)
    assert bench.node.phase is Phase.WAITING
    assert bench.node.mirror_version == v(12)
    # Told at once, not when the revoked key's last head would have run out.
    assert bench.report["stale"] is True
    assert bench.report["version_lag"] is None


def test_a_blob_whose_list_is_wrong_for_good_is_planned_around() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 11)
    manifest = publisher.manifests[digests[1]]
    lying = publisher.add(Kind.PATCH, v(10), v(11), b"")
    fields = {name: getattr(manifest, name) for name in manifest.__slots__}
    false = type(manifest)(**(fields | {"encoded_size_bytes": manifest.encoded_size_bytes + 1}))
    digest = record_digest(publisher.sign(false))
    publisher.manifests[digest] = false
    assert lying != digest
    bench = Bench(publisher)
    bench.connect()
    effects = bench.apply_all(bench.offer([digests[0], digest]))
    assert effects
    assert bench.node.phase is Phase.STALLED
    assert Count("rejected", "chunk-list") in bench.log


def test_peers_come_and_go() -> None:
    publisher = ScriptedPublisher()
    bench = Bench(publisher)
    bench.tell(PeerConnected(make_key("follower"), (), outbound=True))
    assert bench.report["fetch_sources"] == 0
    bench.connect()
    bench.now = 2.0
    bench.tell(TimerFired())
    assert bench.report["fetch_sources"] == 1
    bench.tell(PeerLost(publisher.peer_id, "closed"))
    bench.now = 4.0
    bench.tell(TimerFired())
    assert bench.report["fetch_sources"] == 0


def make_have(publisher: ScriptedPublisher, peer_id: PeerId, last: int) -> Have:
    return Have(publisher.run_id, "seed", 0, 1, last, (), (), NOW_MS)


def test_have_records_are_taken_as_the_mesh_judged_them() -> None:
    publisher = ScriptedPublisher()
    asked: list[PeerId] = []
    unreached, other = make_key("unreached"), make_key("other")

    def have_of(peer_id: PeerId) -> Have | None:
        asked.append(peer_id)
        return {publisher.peer_id: make_have(publisher, peer_id, 5), unreached: make_have(publisher, peer_id, 7)}.get(
            peer_id
        )

    bench = Bench(publisher, have_of=have_of)
    bench.connect()
    told, refused = (
        encode_signed(seal(make_have(publisher, key, 7), make_sign(key), key)) for key in (unreached, other)
    )
    bench.tell(PeerConnected(other, (), outbound=False), HaveSeen(told, None), HaveSeen(refused, other))
    bench.tell(HaveSeen(b"junk", other))
    haves = {source.peer_id: source.have for source in bench.node._sources}
    assert publisher.peer_id in asked
    assert haves[publisher.peer_id] == make_have(publisher, publisher.peer_id, 5)
    assert haves[other] is None, "the mesh refused what it told"
    assert bench.node._sources.unreached_count == 1


def test_a_reader_that_never_gets_to_the_newest_version_lets_go_of_old_ones_all_the_same() -> None:
    """On a thin link there is always a newer one: what was applied filled the disk."""
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 11)
    bench = Bench(publisher, retention_limits=RetentionLimits(size_bytes_max=450))
    bench.connect()
    effects = bench.offer(list(digests))
    for number in range(12, 20):
        digests.append(publisher.add(Kind.PATCH, v(number - 1), v(number), make_data(str(number), 100)))
        bench.offer(list(digests), at_ms=number)
        (hop,) = only(effects, ApplyHop)
        effects = bench.tell(HopApplied(hop.manifest.version, hop.manifest.root))
        assert bench.node.phase is Phase.APPLYING
    assert bench.node.mirror_version == v(17)
    # The hops still to be made are here too.
    assert {m.version.number for m in bench.store.manifests().values()} == {14, 15, 16, 17, 18, 19}


def test_what_was_fetched_in_part_for_a_way_not_taken_goes_once_the_other_way_was() -> None:
    bench, digests = caught_up(12)
    bench.held_back = []
    patch = bench.publisher.add(Kind.PATCH, v(12), v(13), make_data("13", 700))
    digests.append(patch)
    bench.offer(list(digests), at_ms=1)
    blob_id = bench.publisher.manifests[patch].blob_id
    digests.append(bench.publisher.add(Kind.PATCH, v(13), v(14), make_data("14", 700)))
    digests.insert(-1, bench.publisher.add(Kind.SKIP, v(12), v(14), make_data("12-14", 200)))
    bench.offer(digests, at_ms=2)
    assert blob_id in bench.store.lists
    assert patch in bench.store.records
    bench.apply_all(bench.let_go())
    assert bench.node.mirror_version == v(14)
    assert blob_id not in bench.store.lists
    assert patch not in bench.store.records


def test_a_seed_that_never_has_everything_lets_go_of_what_is_named_no_more() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 14)
    bench = Bench(publisher, role="seed")
    bench.connect()
    bench.offer(digests)
    bench.held_back = []
    digests = publisher.chain(15, 16)
    bench.offer(digests, at_ms=1)
    assert bench.node.phase is Phase.FETCHING
    assert min(m.version for m in bench.store.manifests().values()) == v(15)
    bench.offer(publisher.chain(17, 17), at_ms=2)
    assert bench.node.phase is Phase.FETCHING
    assert not any(publisher.manifests[digest].blob_id in bench.store.lists for digest in digests)


def test_a_seed_stores_everything_newest_first_and_applies_nothing() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 14)
    bench = Bench(publisher, role="seed")
    bench.connect()
    bench.offer(digests)
    assert bench.node.phase is Phase.CURRENT
    assert all(bench.store.holds_blob(publisher.manifests[digest].blob_id) for digest in digests)
    assert only(bench.log, ApplyHop) == []
    assert only(bench.log, HandToEngine) == []
    assert bench.report["applied_version"] == 14
    assert bench.node.holdings.anchors == (10,)
    first_list = only(bench.log, StoreChunkList)[0]
    assert first_list.blob_id == publisher.manifests[digests[-1]].blob_id


def test_a_seed_keeps_to_its_limit_and_drops_what_the_publisher_dropped() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 14)
    bench = Bench(publisher, role="seed", retention_limits=RetentionLimits(size_bytes_max=250))
    bench.connect()
    bench.offer(digests)
    assert {m.version.number for m in bench.store.manifests().values()} == {13, 14}
    digests.append(publisher.add(Kind.PATCH, v(14), v(15), make_data("15", 100)))
    bench.offer(digests, at_ms=1)
    assert {m.version.number for m in bench.store.manifests().values()} == {14, 15}
    assert only(bench.log, Release)


def test_a_seed_goes_on_without_what_is_refused() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(10, 12)
    other = publisher.add(Kind.PATCH, v(11), v(12), b"other")
    publisher.manifests[other] = publisher.manifests[digests[1]]
    bench = Bench(publisher, role="seed")
    bench.connect()
    bench.offer([digests[0], other, digests[2]])
    assert bench.node.phase is Phase.CURRENT
    assert len(bench.store.manifests()) == 2


def test_only_followers_are_built() -> None:
    with pytest.raises(LocalProtocolError, match="trainer"):
        Bench(ScriptedPublisher(), role="trainer")


def test_every_phase_can_be_entered_and_left() -> None:
    assert {phase for phase, _ in TRANSITIONS} == set(Phase)
    assert set(TRANSITIONS.values()) == set(Phase)
    assert {step for _, step in TRANSITIONS} == set(Step)


def test_the_timer_is_set_only_when_it_changes_and_reports_keep_coming() -> None:
    bench, _ = caught_up(12)
    effects = bench.pass_time(10.0)
    assert 9 <= len(only(effects, Report)) <= 12
    times = [effect.at for effect in only(effects, SetTimer)]
    assert times == sorted(times)


def test_manifests_are_asked_for_in_one_request() -> None:
    publisher = ScriptedPublisher()
    bench = Bench(publisher)
    bench.connect()
    bench.offer(publisher.chain(10, 20))
    asked = [r.message for r in only(bench.log, SendRequest) if isinstance(r.message, GetRecords)]
    assert len(asked) == 2


def test_a_blob_nobody_has_is_planned_around_as_soon_as_there_is_another_way() -> None:
    """A-CHAIN-2: the chunks of v13 are nowhere; nothing is applied over the hole."""
    bench, digests = caught_up(12)
    publisher = bench.publisher
    lost = publisher.add(Kind.PATCH, v(12), v(13), make_data("lost", 100))
    digests += [lost, publisher.add(Kind.PATCH, v(13), v(14), make_data("14", 100))]
    for digest in list(publisher.store.digests_of(publisher.store.lists[publisher.manifests[lost].blob_id])):
        del publisher.store.chunks[digest]
    bench.offer(digests, at_ms=1)
    bench.pass_time(30.0)
    assert bench.node.phase is Phase.FETCHING
    assert bench.node.mirror_version == v(12)
    assert hops(bench) == [10, 11, 12]
    digests.append(publisher.add(Kind.ANCHOR, None, v(15), make_data("anchor 15", 3000)))
    digests.insert(-1, publisher.add(Kind.PATCH, v(14), v(15), b"x"))
    effects = bench.offer(digests, at_ms=40_000)
    assert [hop.manifest.kind for hop in only(effects, ApplyHop)] == [Kind.ANCHOR]
    bench.apply_all(effects)
    assert bench.node.mirror_version == v(15)


def test_a_head_that_came_with_the_node_is_news_of_nobody() -> None:
    publisher = ScriptedPublisher()
    bench = Bench(publisher)
    bench.connect()
    bench.tell(HeadSeen(bench.sign_head(publisher.chain(1, 2)), None))
    assert hops(bench) == [1]


def test_a_have_that_cannot_be_read_changes_nothing_here() -> None:
    bench = Bench(ScriptedPublisher())
    assert bench.tell(HaveSeen(b"rubbish", make_key("peer"))) == []


def test_a_publisher_that_this_node_dials_is_asked_whoever_came_here_before() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(1, 2)
    bench = Bench(publisher)
    for number in range(SOURCES_MAX):
        bench.node._sources.connect(PeerId(number.to_bytes(32, "big")))
    bench.connect()
    bench.offer(digests)
    assert publisher.peer_id in {effect.peer_id for effect in only(bench.log, SendRequest)}


def test_a_blob_that_is_damaged_is_fetched_again_and_room_that_is_taken_is_minded() -> None:
    publisher = ScriptedPublisher()
    digests = publisher.chain(1, 2)
    bench = Bench(publisher, retention_limits=RetentionLimits(size_bytes_max=1 << 20))
    bench.connect()
    bench.apply_all(bench.offer(digests))
    blob_id = publisher.manifests[digests[-1]].blob_id
    bench.store.release((blob_id,), ())
    effects = bench.tell(BlobDamaged(blob_id))
    assert any(isinstance(effect.message, GetChunks) for effect in only(effects, SendRequest))
    assert bench.node.holdings.version_last == 2
    (release,) = only(bench.tell(RoomTaken(1 << 40)), Release)
    assert blob_id in release.blob_ids
    assert bench.node.holdings.version_last == 0
