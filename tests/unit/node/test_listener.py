"""An authority hears what the others announce, and has it on disk before it acts on it."""

from __future__ import annotations

from pulsenet.chain.records import Kind
from pulsenet.chain.signing import decode_signed
from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId, Version
from pulsenet.node.effects import Count, Effect, SendRequest, SetTimer
from pulsenet.node.events import (
    Event,
    ForkProofSeen,
    HeadSeen,
    PeerConnected,
    PeerLost,
    ReplyReceived,
    StoreFailed,
    TimerFired,
)
from pulsenet.node.listener import Listener
from pulsenet.node.news import HEAD_KEY, TRUST_KEY
from pulsenet.node.respond import respond
from pulsenet.node.sources import SOURCES_MAX
from pulsenet.testing.fakes import FakeStore, make_key, only
from pulsenet.testing.script import NOW_MS, ScriptedPublisher, root_of
from pulsenet.wire.messages import GetEpochs, GetHead, GetRecords

PEER = make_key("peer")
OWN = make_key("own")


class Desk:
    """A listener whose one peer answers from the scripted publisher's store."""

    def __init__(self, publisher: ScriptedPublisher, index: FakeStore | None = None) -> None:
        self.publisher = publisher
        self.trust = publisher.make_trust()
        self.store = index or FakeStore()
        self.listener = Listener(self.trust, OWN, lambda count: 0, self.store)
        self.now = 0.0
        self.requests: list[SendRequest] = []
        self.log: list[Effect] = []
        self.answers = True

    def send(self, event: Event) -> list[Effect]:
        effects = self.listener.handle(event, self.now, NOW_MS + round(self.now * 1000))
        self.log += effects
        self.store.keep(effects)
        self.requests += only(effects, SendRequest)
        while self.answers and self.requests:
            request = self.requests.pop(0)
            for reply in respond(request.message, self.publisher.store):
                self.send(ReplyReceived(request.request_id, request.peer_id, reply))
        return effects

    def asked(self) -> list[object]:
        return [request.message for request in only(self.log, SendRequest)]


def test_a_head_leads_to_its_catalogue_and_both_are_kept() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    desk.send(PeerConnected(PEER, (), outbound=True))
    head = publisher.head(publisher.chain(1, 4))
    desk.send(HeadSeen(head, PEER))
    assert desk.trust.catalogue_is_current
    assert desk.trust.root_of(Version(0, 3)) == root_of(Version(0, 3)), "every version of the catalogue is known"
    assert desk.store.state[HEAD_KEY] == head
    again = Trust.restore(desk.store.state[TRUST_KEY], publisher.run_id, desk.trust._verify)
    assert again.head == desk.trust.head
    assert not any(isinstance(need, GetRecords) and len(need.digests) > 1 for need in desk.asked()), "no manifests"


def test_a_peer_is_asked_for_its_head_as_soon_as_it_is_there() -> None:
    desk = Desk(ScriptedPublisher())
    desk.send(PeerConnected(OWN, (), outbound=True))
    assert desk.asked() == []
    desk.send(PeerConnected(PEER, (), outbound=True))
    assert desk.asked() == [GetHead()]


def test_an_epoch_another_authority_opened_is_fetched() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    desk.send(PeerConnected(PEER, (), outbound=True))
    desk.send(HeadSeen(publisher.head(publisher.chain(1, 3)), PEER))
    publisher.open_epoch(1, Version(0, 3), 4)
    anchor = publisher.add(Kind.ANCHOR, None, Version(1, 4), b"anchor")
    desk.send(HeadSeen(publisher.head([anchor]), PEER))
    assert GetEpochs(1) in desk.asked()
    assert desk.trust.epoch == 1
    assert desk.trust.head is not None
    assert desk.trust.head.version == Version(1, 4)


def test_the_own_catalogue_is_read_from_the_own_store() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher, index=publisher.store)
    desk.trust.accept_head(decode_signed(publisher.head(publisher.chain(1, 2))), NOW_MS)
    desk.send(TimerFired())
    assert desk.trust.catalogue_is_current
    assert desk.asked() == []


def test_a_fork_is_kept_and_told_once() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    first = publisher.head(publisher.chain(1, 2))
    other = publisher.add(Kind.ANCHOR, None, Version(0, 2), b"x", root=root_of(Version(0, 9)))
    desk.send(ForkProofSeen(first, publisher.head([other]), PEER))
    assert desk.trust.fork is not None
    assert Count("rejected", "fork") in desk.log
    assert TRUST_KEY in desk.store.state


def test_what_the_disk_refused_is_stored_again() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    desk.answers = False
    head = publisher.head(publisher.chain(1, 2))
    desk.send(HeadSeen(head, None))
    desk.store.state.clear()
    effects = desk.send(StoreFailed(None, "enospc"))
    assert Count("rejected", "enospc") in effects
    (timer,) = [effect for effect in effects if isinstance(effect, SetTimer)]
    desk.now = timer.at
    desk.send(TimerFired())
    assert desk.store.state[HEAD_KEY] == head


def test_a_lost_peer_is_asked_nothing_more() -> None:
    publisher = ScriptedPublisher()
    desk = Desk(publisher)
    desk.answers = False
    desk.send(PeerConnected(PEER, (), outbound=True))
    desk.send(PeerLost(PEER, "closed"))
    desk.requests.clear()
    desk.send(HeadSeen(publisher.head(publisher.chain(1, 2)), PEER))
    assert desk.requests == [], "nobody is there to be asked for the catalogue"


def test_the_listener_asks_nothing_of_a_peer_beyond_the_room_for_sources() -> None:
    desk = Desk(ScriptedPublisher())
    desk.answers = False
    for number in range(SOURCES_MAX):
        desk.listener.sources.connect(PeerId(number.to_bytes(32, "big")))
    desk.send(PeerConnected(PEER, (), outbound=False))
    assert PEER not in {request.peer_id for request in desk.requests}
