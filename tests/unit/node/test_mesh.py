"""The mesh spreads heads to everybody, tells what is held, and comes back after an outage."""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.chain.records import Have
from pulsenet.chain.signing import decode_signed, encode_signed, open_record
from pulsenet.errors import StorageError
from pulsenet.ids import Version
from pulsenet.node.effects import (
    AnnounceHave,
    Count,
    DialPeer,
    Effect,
    Log,
    Report,
    SaveState,
    SendRequest,
    ShowToMachines,
    StrikePeer,
)
from pulsenet.node.effects import SetTimer as Timer
from pulsenet.node.events import (
    Event,
    ForkProofSeen,
    HaveSeen,
    HeadSeen,
    PeerConnected,
    PeerLost,
    ReplyReceived,
    RequestFailed,
    TimerFired,
)
from pulsenet.node.mesh import (
    ASK_HEAD_SECONDS,
    BOOK_KEY,
    DIALS_MAX,
    HAVE_CHANGE_SECONDS,
    HAVES_MAX,
    LINKS_MAX,
    Holdings,
    Mesh,
)
from pulsenet.wire.messages import (
    ExchangeHave,
    GetHead,
    HaveReply,
    HeadReply,
    PeerAddress,
    PushForkProof,
    PushHead,
    PushReply,
    Refusal,
)

NOW = 1_000.0
HERE = ("/ip4/10.0.0.1/tcp/1",)


class Node:
    """One mesh with its clock, and what it ordered."""

    def __init__(self, run: Any, key: Any, *, role: str = "inferencer", seed: int = 1, **arguments: Any) -> None:
        self.run = run
        self.key = key
        self.trust = run.trust()
        self.mesh = Mesh(
            self.trust, key.peer_id, key.sign, random.Random(seed).randrange, role=role, addresses=HERE, **arguments
        )
        self.now = NOW
        self.timer = 0.0

    @property
    def now_ms(self) -> int:
        return int(self.run.start_ms + round((self.now - NOW) * 1000))

    def send(self, event: Event) -> list[Effect]:
        return self._note(self.mesh.handle(event, self.now, self.now_ms))

    def update(self, **changes: Any) -> list[Effect]:
        return self._note(self.mesh.update(self.now, self.now_ms, **changes))

    def wait(self, seconds: float) -> list[Effect]:
        until = self.now + seconds
        effects: list[Effect] = []
        while self.timer <= until:
            self.now = self.timer
            effects += self.send(TimerFired())
        self.now = until
        return effects

    def connect(self, key: Any, *, outbound: bool = False) -> list[Effect]:
        return self.send(PeerConnected(key.peer_id, HERE, outbound))

    def _note(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Timer):
                assert effect.at >= self.now
                self.timer = effect.at
        return effects


def requests(effects: list[Effect], kind: type[Any]) -> list[SendRequest]:
    return [effect for effect in effects if isinstance(effect, SendRequest) and isinstance(effect.message, kind)]


def of(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


@pytest.fixture
def node(run: Any) -> Node:
    node = Node(run, run.stranger)
    node.send(TimerFired())
    return node


# Heads that nobody pushes


def test_a_node_that_nobody_pushes_to_asks_its_neighbours_for_the_head(run: Any, node: Node) -> None:
    node.connect(run.publisher)
    node.connect(run.second)
    asked = requests(node.wait(60.0), GetHead)
    assert {request.peer_id for request in asked} == {run.publisher.peer_id, run.second.peer_id}
    assert 60.0 / (1.5 * ASK_HEAD_SECONDS) <= len(asked) <= 60.0 / (0.5 * ASK_HEAD_SECONDS) + 1
    record = run.head(Version(0, 1))
    effects = node.send(ReplyReceived(asked[-1].request_id, asked[-1].peer_id, HeadReply(record)))
    assert of(effects, ShowToMachines) == [ShowToMachines(HeadSeen(record, asked[-1].peer_id))]
    node.send(HeadSeen(record, asked[-1].peer_id))
    again = requests(node.wait(2 * ASK_HEAD_SECONDS), GetHead)
    assert again, "an answer is no push"
    known = node.send(ReplyReceived(again[0].request_id, again[0].peer_id, HeadReply(record)))
    assert of(known, ShowToMachines) == []
    assert of(node.send(ReplyReceived(again[-1].request_id, again[-1].peer_id, HeadReply(None))), StrikePeer) == []


def test_a_node_that_is_pushed_to_asks_nobody(run: Any, node: Node) -> None:
    node.connect(run.second)
    for number in range(1, 5):
        node.send(HeadSeen(run.head(Version(0, number), issued_at_ms=node.now_ms), run.second.peer_id))
        assert requests(node.wait(40.0), GetHead) == []
    assert requests(node.wait(40.0), GetHead) != []


def test_who_publishes_asks_nobody_for_the_head(run: Any) -> None:
    node = Node(run, run.publisher, role="trainer")
    node.send(HeadSeen(run.head(Version(0, 1)), None))
    node.connect(run.second)
    assert requests(node.wait(100.0), GetHead) == []


# Have records


def test_what_is_held_is_told_at_the_start_and_at_least_every_40_seconds(run: Any) -> None:
    node = Node(run, run.stranger)
    assert len(of(node.send(TimerFired()), AnnounceHave)) == 1
    times = []
    for _ in range(400):
        if of(node.wait(1.0), AnnounceHave):
            times.append(node.now)
    assert len(times) >= 10
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 40.0


def test_a_change_is_told_soon_and_a_fast_series_is_told_as_one(node: Node) -> None:
    node.connect(node.run.second)
    effects: list[Effect] = []
    for number in range(1, 11):
        effects += node.update(holdings=Holdings(0, 1, number, (1,)))
        effects += node.wait(0.1)
    effects += node.wait(HAVE_CHANGE_SECONDS)
    announced = of(effects, AnnounceHave)
    assert 1 <= len(announced) <= 2
    have = open_record(Have, announced[-1].record, node.run.verify, run_id=node.run.run_id)
    assert (have.version_first, have.version_last, have.anchors) == (1, 10, (1,))
    assert (have.role, have.addresses) == ("inferencer", HERE)
    assert node.mesh.own_have == encode_signed(announced[-1].record)
    assert requests(effects, ExchangeHave)[-1].message == ExchangeHave(node.mesh.own_have)


def test_an_update_without_a_change_is_no_news(node: Node) -> None:
    node.wait(5.0)
    assert of(node.update(holdings=Holdings(), addresses=HERE), AnnounceHave) == []
    assert of(node.update(addresses=("/ip4/10.9.9.9/tcp/9",)), AnnounceHave) != []


def test_too_many_anchors_and_addresses_are_cut_to_what_a_record_may_hold(node: Node) -> None:
    node.wait(5.0)
    addresses = tuple(f"/ip4/10.0.0.{index}/tcp/1" for index in range(40))
    effects = node.update(holdings=Holdings(0, 1, 99, tuple(range(1, 60))), addresses=addresses)
    (announced,) = of(effects, AnnounceHave)
    have = open_record(Have, announced.record, node.run.verify, run_id=node.run.run_id)
    assert have.anchors == tuple(range(60 - limits.ANCHORS_LISTED_MAX, 60))
    assert have.addresses == addresses[: limits.ADDRESSES_MAX]


def test_a_clock_that_was_a_day_ahead_and_is_right_again_is_said_once_and_records_count_at_once(node: Node) -> None:
    day_ms = 24 * 3_600_000
    node.run.start_ms += day_ms
    node.wait(5.0)
    assert of(node.update(addresses=("/ip4/10.9.9.9/tcp/1",)), AnnounceHave)
    node.run.start_ms -= day_ms
    effects = node.wait(60.0)
    announced = of(effects, AnnounceHave)[0]
    have = open_record(Have, announced.record, node.run.verify, run_id=node.run.run_id)
    assert node.now_ms - 60_000 <= have.issued_at_ms <= node.now_ms
    (said,) = of(effects, Log)
    assert said.text.startswith("this node's clock was 86370 s ahead or more and was set back")
    assert "timedatectl set-ntp true" in said.text
    assert of(node.wait(60.0), Log) == []


def test_what_another_told_by_a_clock_that_both_had_wrong_does_not_outlast_that_clock(node: Node) -> None:
    day_ms, other = 24 * 3_600_000, node.run.second
    node.connect(other)

    def hear(last: int, *, before_ms: int = 0) -> int:
        record = node.run.have(other, version_last=last, issued_at_ms=node.now_ms - before_ms)
        node.send(HaveSeen(record, other.peer_id))
        have = node.mesh.have_of(other.peer_id)
        assert have is not None
        return have.version_last

    node.run.start_ms += day_ms
    assert hear(5) == 5
    node.run.start_ms -= day_ms
    assert hear(6) == 6
    assert hear(4, before_ms=1) == 6


def test_a_new_peer_is_asked_what_it_holds_and_its_answer_is_believed(node: Node) -> None:
    (request,) = requests(node.connect(node.run.second), ExchangeHave)
    record = node.run.have(node.run.second, version_last=9)
    node.now += 0.25
    node.send(ReplyReceived(request.request_id, node.run.second.peer_id, HaveReply(record, ())))
    have = node.mesh.have_of(node.run.second.peer_id)
    assert have is not None
    assert have.version_last == 9


def test_peers_that_connect_before_the_start_are_asked_at_the_start(run: Any) -> None:
    node = Node(run, run.stranger)
    assert len(requests(node.connect(run.second), ExchangeHave)) == 1


def test_a_have_record_is_believed_while_it_is_fresh_and_only_the_newest(node: Node) -> None:
    key = node.run.second
    node.send(HaveSeen(node.run.have(key, version_last=9, issued_at_ms=node.now_ms), None))
    node.send(HaveSeen(node.run.have(key, version_last=8, issued_at_ms=node.now_ms - 1), None))
    have = node.mesh.have_of(key.peer_id)
    assert have is not None
    assert have.version_last == 9
    node.wait(limits.RECORD_VALIDITY_SECONDS + 31.0)
    assert node.mesh.have_of(key.peer_id) is None


@pytest.mark.parametrize(
    ("case", "code", "is_struck"), [("junk", "schema", True), ("forged", "signature", True), ("old", "expired", False)]
)
def test_a_bad_have_record_changes_nothing(node: Node, case: str, code: str, is_struck: bool) -> None:
    key = node.run.second
    node.connect(key)
    good = node.run.have(key)
    record = {
        "junk": b"\x00",
        "forged": good.replace(b"inferencer", b"informer!!"),
        "old": node.run.have(key, issued_at_ms=node.now_ms - 400_000),
    }[case]
    effects = node.send(HaveSeen(record, key.peer_id))
    assert of(effects, Count) == [Count("rejected", code)]
    assert of(effects, StrikePeer) == ([StrikePeer(key.peer_id, code)] if is_struck else [])
    assert node.mesh.have_of(key.peer_id) is None


def test_the_own_have_record_coming_back_is_ignored(node: Node) -> None:
    assert node.mesh.own_have is not None
    node.send(HaveSeen(node.mesh.own_have, None))
    assert node.mesh.have_of(node.key.peer_id) is None


def test_have_records_are_bounded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsenet.node.mesh.HAVES_MAX", 3)
    assert HAVES_MAX == 1_024
    node = Node(run, run.stranger)
    keys = [run.key(seed) for seed in range(100, 104)]
    for key in keys:
        node.send(HaveSeen(run.have(key), None))
    assert [node.mesh.have_of(key.peer_id) is None for key in keys] == [True, False, False, False]


def test_a_peer_that_floods_is_not_listened_to(node: Node) -> None:
    node.connect(node.run.second)
    record = node.run.have(node.run.second)
    effects: list[Effect] = []
    for _ in range(100):
        effects += node.send(HaveSeen(record, node.run.second.peer_id))
    assert Count("rejected", "rate") in effects


# Heads


def test_a_new_head_goes_to_every_neighbour_but_its_sender_and_once(node: Node) -> None:
    run = node.run
    for key in (run.publisher, run.second, run.third):
        node.connect(key)
    record = run.head(Version(0, 1))
    pushed = requests(node.send(HeadSeen(record, run.publisher.peer_id)), PushHead)
    assert {push.peer_id for push in pushed} == {run.second.peer_id, run.third.peer_id}
    assert all(push.message == PushHead(record) for push in pushed)
    assert node.mesh.push_verdict(PushHead(record)) == ""
    for push in pushed:
        node.send(ReplyReceived(push.request_id, push.peer_id, PushReply(True, "")))
    assert requests(node.send(HeadSeen(record, run.second.peer_id)) + node.wait(20.0), PushHead) == []


def test_a_push_that_failed_is_repeated(node: Node) -> None:
    node.connect(node.run.second)
    (push,) = requests(node.send(HeadSeen(node.run.head(Version(0, 1)), None)), PushHead)
    assert requests(node.send(RequestFailed(push.request_id, push.peer_id, "timeout")), PushHead) == []
    assert len(requests(node.wait(1.0), PushHead)) == 1


def test_a_push_that_is_never_answered_is_repeated(node: Node) -> None:
    node.connect(node.run.second)
    node.send(HeadSeen(node.run.head(Version(0, 1)), None))
    assert requests(node.wait(15.0), PushHead) == []
    assert len(requests(node.wait(50.0), PushHead)) >= 1


def test_a_refused_push_is_not_repeated(node: Node) -> None:
    node.connect(node.run.second)
    (push,) = requests(node.send(HeadSeen(node.run.head(Version(0, 1)), None)), PushHead)
    node.send(ReplyReceived(push.request_id, push.peer_id, Refusal("busy", "", 0)))
    assert requests(node.wait(60.0), PushHead) == []


def test_a_newcomer_gets_the_newest_head_at_once(node: Node) -> None:
    node.send(HeadSeen(node.run.head(Version(0, 3)), None))
    (push,) = requests(node.connect(node.run.second), PushHead)
    assert push.message == PushHead(node.run.head(Version(0, 3)))


def test_pushes_to_one_peer_are_capped_and_the_newest_head_arrives(node: Node) -> None:
    node.connect(node.run.second)
    effects: list[Effect] = []
    for number in range(1, 51):
        effects += node.send(HeadSeen(node.run.head(Version(0, number)), None))
    assert len(requests(effects, PushHead)) < 10
    (last,) = requests(node.wait(1.0), PushHead)
    assert last.message == PushHead(node.run.head(Version(0, 50)))


def test_a_fork_proof_is_passed_on(node: Node) -> None:
    run = node.run
    node.connect(run.second)
    node.connect(run.third)
    first, second = (run.head(Version(0, 7), root=run.digest(root)) for root in ("a", "b"))
    (push,) = requests(node.send(ForkProofSeen(first, second, run.second.peer_id)), PushForkProof)
    assert push.peer_id == run.third.peer_id
    assert node.mesh.push_verdict(PushForkProof(first, second)) == ""


def test_an_answer_that_fits_no_question_is_a_strike(node: Node) -> None:
    (request,) = requests(node.connect(node.run.second), ExchangeHave)
    other = node.run.third.peer_id
    assert of(node.send(ReplyReceived(request.request_id, other, HeadReply(None))), StrikePeer) == []
    (request,) = requests(node.connect(node.run.third), ExchangeHave)
    effects = node.send(ReplyReceived(request.request_id, other, HeadReply(None)))
    assert StrikePeer(other, "unexpected") in effects
    assert of(node.send(ReplyReceived(request.request_id, other, HeadReply(None))), StrikePeer) == []


# Connections


def test_bootstraps_are_dialled_at_once_and_again_with_back_off(run: Any) -> None:
    bootstrap = PeerAddress(run.second.peer_id, HERE)
    node = Node(run, run.stranger, bootstraps=[bootstrap])
    dials = [node.now for _ in of(node.send(TimerFired()), DialPeer)]
    assert dials == [NOW]
    for _ in range(12):
        node.send(PeerLost(run.second.peer_id, "refused"))
        while not of(node.wait(0.05), DialPeer):
            pass
        dials.append(node.now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(dials)]
    assert gaps[0] < 1.0
    assert max(gaps) <= limits.RETRY_SECONDS_MAX + 0.1


def test_after_an_outage_peers_are_dialled_within_a_minute(run: Any) -> None:
    """A-NET-5: all traffic was gone for ten minutes."""
    keys = [run.key(seed) for seed in range(60, 68)]
    node = Node(run, run.stranger, bootstraps=[PeerAddress(keys[0].peer_id, HERE)])
    for key in keys:
        node.connect(key, outbound=True)
    for key in keys:
        node.send(PeerLost(key.peer_id, "timeout"))
    for _ in range(600):
        for dial in of(node.wait(1.0), DialPeer):
            node.send(PeerLost(dial.peer_id, "timeout"))
    dialled = {dial.peer_id for dial in of(node.wait(60.0), DialPeer)}
    assert len(dialled) >= DIALS_MAX
    assert node.mesh.connected == ()


def test_few_dials_are_under_way_at_once(run: Any) -> None:
    bootstraps = [PeerAddress(run.key(seed).peer_id, HERE) for seed in range(60, 80)]
    node = Node(run, run.stranger, bootstraps=bootstraps)
    assert len(of(node.send(TimerFired()), DialPeer)) == DIALS_MAX
    assert of(node.wait(5.0), DialPeer) == []


def test_with_enough_peers_one_more_is_dialled_now_and_then(run: Any) -> None:
    """Two halves of a swarm that was cut find each other again (DHT-4)."""
    node = Node(run, run.stranger)
    for seed in range(60, 60 + limits.NEIGHBOURS_MIN):
        node.connect(run.key(seed), outbound=True)
    far = run.key(99)
    node.send(HaveSeen(run.have(far, addresses=HERE, issued_at_ms=node.now_ms), None))
    dials = of(node.wait(300.0), DialPeer)
    assert dials[0] == DialPeer(far.peer_id, HERE)
    assert len(dials) <= 10


def test_inbound_peers_alone_are_not_enough(run: Any) -> None:
    node = Node(run, run.stranger)
    for seed in range(60, 70):
        node.connect(run.key(seed), outbound=False)
    node.send(PeerLost(run.key(60).peer_id, "closed"))
    assert of(node.wait(2.0), DialPeer) == [DialPeer(run.key(60).peer_id, HERE)]


def test_neighbours_of_neighbours_are_dialled(node: Node) -> None:
    (request,) = requests(node.connect(node.run.second), ExchangeHave)
    reply = HaveReply(None, (PeerAddress(node.run.third.peer_id, HERE), PeerAddress(node.key.peer_id, HERE)))
    effects = node.send(ReplyReceived(request.request_id, node.run.second.peer_id, reply))
    assert of(effects, DialPeer) == [DialPeer(node.run.third.peer_id, HERE)]


def test_peers_are_remembered_over_a_restart(run: Any) -> None:
    node = Node(run, run.stranger)
    saved = of(node.connect(run.second, outbound=True) + node.wait(70.0), SaveState)
    assert [effect.key for effect in saved] == [BOOK_KEY]
    again = Node(run, run.stranger, saved=saved[0].value)
    assert of(again.send(TimerFired()), DialPeer) == [DialPeer(run.second.peer_id, HERE)]
    with pytest.raises(StorageError):
        Node(run, run.stranger, saved=b"\xff")


def test_connections_are_counted_and_neighbours_can_be_named_to_others(node: Node) -> None:
    effects = node.connect(node.run.second, outbound=True)
    fields = dict(of(effects, Report)[-1].fields)
    assert fields == {"peers_connected": 1, "peers_neighbour": 1, "peers_outbound": 1, "peers_known": 1}
    assert node.mesh.neighbours == node.mesh.connected == (node.run.second.peer_id,)
    assert node.mesh.neighbour_addresses() == (PeerAddress(node.run.second.peer_id, HERE),)
    assert of(node.connect(node.run.second), Report) == []
    assert of(node.connect(node.key), Report) == []
    effects = node.send(PeerLost(node.run.second.peer_id, "closed"))
    assert dict(of(effects, Report)[-1].fields)["peers_connected"] == 0


def test_connections_looked_after_are_bounded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsenet.node.mesh.LINKS_MAX", 2)
    assert LINKS_MAX == 256
    node = Node(run, run.stranger)
    for seed in range(60, 64):
        node.connect(run.key(seed))
    assert len(node.mesh.connected) == 2


def test_strangers_who_fill_the_table_keep_out_nobody_this_node_dials(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsenet.node.mesh.LINKS_MAX", 2)
    node = Node(run, run.stranger)
    strangers, dialled = [run.key(seed) for seed in range(60, 63)], [run.key(seed) for seed in range(70, 73)]
    for stranger in strangers:
        node.connect(stranger, outbound=False)
    for key in dialled:
        node.connect(key, outbound=True)
    assert set(node.mesh.connected) == {key.peer_id for key in dialled[:2]}
    assert set(node.mesh.neighbours) == set(node.mesh.connected)


def test_other_events_are_none_of_its_business(node: Node) -> None:
    assert node.send(RequestFailed(77, node.run.second.peer_id, "timeout")) == []


# A swarm


class Swarm:
    """Meshes on one clock and a network with a fixed delay; every push is counted."""

    def __init__(self, run: Any, count: int) -> None:
        self.run = run
        self.nodes = {}
        for index in range(count):
            key = run.key(10 + index)
            first = [PeerAddress(run.key(10).peer_id, HERE)] if index else []
            self.nodes[key.peer_id] = Node(run, key, seed=index, bootstraps=first)
        self.queue: list[tuple[float, int, Any, Event]] = []
        self.order = itertools.count()
        self.pushes: dict[tuple[Any, Any], list[bytes]] = {}
        self.now = NOW
        for peer_id in self.nodes:
            self.post(0.0, peer_id, TimerFired())

    def post(self, delay: float, peer_id: Any, event: Event) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.order), peer_id, event))

    def run_for(self, seconds: float) -> None:
        until = self.now + seconds
        while self.queue and self.queue[0][0] <= until:
            self.now, _, peer_id, event = heapq.heappop(self.queue)
            node = self.nodes[peer_id]
            if isinstance(event, TimerFired) and self.now < node.timer:
                continue
            node.now = self.now
            for effect in node.send(event):
                self.execute(peer_id, effect)
        self.now = until

    def execute(self, peer_id: Any, effect: Effect) -> None:
        match effect:
            case Timer(at):
                self.post(at - self.now, peer_id, TimerFired())
            case DialPeer(other, _):
                self.post(0.02, peer_id, PeerConnected(other, HERE, True))
                self.post(0.02, other, PeerConnected(peer_id, HERE, False))
            case SendRequest(request_id, other, ExchangeHave(have), _):
                self.post(0.02, other, HaveSeen(have, peer_id))
                mesh = self.nodes[other].mesh
                reply = HaveReply(mesh.own_have, mesh.neighbour_addresses())
                self.post(0.04, peer_id, ReplyReceived(request_id, other, reply))
            case SendRequest(request_id, other, PushHead(head), _):
                self.pushes.setdefault((peer_id, other), []).append(head)
                self.post(0.02, other, HeadSeen(head, peer_id))
                self.post(0.04, peer_id, ReplyReceived(request_id, other, PushReply(True, "")))


def test_a_head_reaches_a_whole_swarm_in_a_few_round_trips_and_no_pair_carries_it_twice(run: Any) -> None:
    swarm = Swarm(run, 20)
    swarm.run_for(65.0)
    for node in swarm.nodes.values():
        assert len(node.mesh.neighbours) >= limits.NEIGHBOURS_MIN
        assert len(node.mesh.neighbours) <= limits.NEIGHBOURS_MAX
    issued_at_ms = run.start_ms + 65_000
    record = run.head(Version(0, 1), issued_at_ms=issued_at_ms)
    swarm.post(0.0, next(iter(swarm.nodes)), HeadSeen(record, None))
    swarm.run_for(1.0)
    heads = [node.trust.head_record for node in swarm.nodes.values()]
    assert heads == [decode_signed(record)] * 20
    swarm.run_for(20.0)
    assert max(map(len, swarm.pushes.values())) == 1


def test_a_key_that_is_seen_at_two_addresses_in_turn_is_told_to_the_operator_by_everybody_else(node: Node) -> None:
    """A-AUTH-3: two machines with one key file, neither of which reaches the other."""
    told: list[str] = []
    for turn in range(8):
        node.wait(20.0)
        address = f"/ip4/10.0.0.{turn % 2 + 1}/tcp/9"
        have = node.run.have(node.run.second, addresses=(address,), issued_at_ms=node.now_ms)
        told += [effect.text for effect in of(node.send(HaveSeen(have, None)), Log) if effect.level == "warning"]
    (text,) = told
    assert "/ip4/10.0.0.1/tcp/9" in text
    assert "/ip4/10.0.0.2/tcp/9" in text


def test_a_have_in_the_own_name_that_this_node_did_not_sign_is_told_to_the_operator(node: Node) -> None:
    """A-AUTH-3: the key file was copied, and the other node is up too."""
    assert node.mesh.own_have is not None
    assert of(node.send(HaveSeen(node.mesh.own_have, None)), Log) == []
    node.wait(1.0)
    other = node.run.have(node.key, addresses=("/ip4/10.0.0.9/tcp/9",), issued_at_ms=node.now_ms)
    (told,) = of(node.send(HaveSeen(other, None)), Log)
    assert told.level == "warning"
    assert "/ip4/10.0.0.9/tcp/9" in told.text
    assert of(node.send(HaveSeen(other, None)), Log) == []


def test_answers_of_a_peer_that_left_meanwhile_are_no_offence(run: Any, node: Node) -> None:
    sent = requests(node.connect(run.second), ExchangeHave)
    sent += requests(node.send(HeadSeen(run.head(Version(0, 1)), None)), PushHead)
    sent += requests(node.wait(2 * ASK_HEAD_SECONDS), GetHead)
    assert {type(request.message) for request in sent} == {ExchangeHave, PushHead, GetHead}
    node.send(PeerLost(run.second.peer_id, "closed"))
    for request in sent:
        reply = PushReply(True, "") if isinstance(request.message, PushHead) else HaveReply(None, ())
        event: Event = ReplyReceived(request.request_id, request.peer_id, reply)
        if isinstance(request.message, GetHead):
            event = RequestFailed(request.request_id, request.peer_id, "closed")
        assert of(node.send(event), StrikePeer) == []
