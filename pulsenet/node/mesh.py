"""The mesh: who this node talks to, what those peers hold, and how a new head spreads.

A head is verified before it is forwarded and goes to each neighbour once; a neighbour that sent it does not
get it back. Have records travel between neighbours and through the directory. Connections are kept up
by dialling bootstraps and remembered peers, more slowly once there are enough, but never not at all: a
partition that healed would otherwise stay split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pulsenet import limits
from pulsenet.chain.records import Have
from pulsenet.chain.signing import Sign, decode_signed, encode_signed, seal
from pulsenet.chain.trust import FUTURE_MS_MAX, Trust
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import PeerId
from pulsenet.node.address_book import AddressBook
from pulsenet.node.blame import blame
from pulsenet.node.courier import Courier
from pulsenet.node.doubles import Doubles
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
from pulsenet.node.events import (
    Event,
    ForkProofSeen,
    HaveSeen,
    HeadSeen,
    PeerConnected,
    PeerLost,
    ReplyReceived,
    RequestFailed,
)
from pulsenet.node.gossip import Gossip
from pulsenet.node.issuing import choose_issue_ms
from pulsenet.node.machine import Draw
from pulsenet.node.neighbours import Link, choose_neighbours
from pulsenet.node.requests import OpenRequests
from pulsenet.node.timer import Timer
from pulsenet.wire.messages import (
    ExchangeHave,
    GetHead,
    HaveReply,
    HeadReply,
    Message,
    PeerAddress,
    PushForkProof,
    PushHead,
    PushReply,
    Refusal,
)

BOOK_KEY = "peers"
"""Name of the remembered peers among the node's durable values."""

HAVE_SECONDS = 30.0
"""How often the own have record is signed and told again; a record lives four times as long."""

HAVE_CHANGE_SECONDS = 2.0
"""Least time between two have records, however fast versions come."""

HAVES_MAX = 1_024
"""Peers whose have records are remembered; the one heard longest ago is forgotten beyond."""

REBALANCE_SECONDS = 60.0
"""How often neighbours are chosen anew, and a further peer is dialled although there are enough."""

OUTBOUND_MIN = 2
"""Connections this node chose itself: inbound ones alone could all be one stranger's."""

UNCHOSEN_SECONDS = 60.0
"""A node to which nobody pushed a head for so long is no node's neighbour: heads are signed again every 40 s."""

ASK_HEAD_SECONDS = 4.0
"""How often such a node asks one of its own neighbours for the head: a small answer, and the directory is slower."""

LINKS_MAX = 256
"""Connected peers the mesh looks after; further ones are served and nothing more."""

DIALS_MAX = 4
"""Dials under way at once."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this node can serve: the numbers of a have record."""

    epoch: int = 0
    version_first: int = 0
    version_last: int = 0
    anchors: tuple[int, ...] = ()
    """Ascending; the newest are told if there are too many."""


@dataclass(frozen=True, slots=True)
class _Told:
    """A have record of another node, and when it came."""

    have: Have
    heard_at: float


class Mesh:
    """The machine of one node's neighbourhood.

    Args:
        trust: The run's rules; shared with the node's other machines.
        peer_id: This node's key; it signs have records.
        sign: Signs with that key.
        draw: Chance: neighbours, dials and jitter.
        role: ``trainer``, ``inferencer`` or ``seed``, as told in have records.
        addresses: Where this node can be dialled; empty if nowhere.
        bootstraps: Peers to start from.
        saved: What ``SaveState`` last stored under ``BOOK_KEY``, or ``None``.

    Raises:
        StorageError: ``saved`` is damaged.
    """

    def __init__(
        self,
        trust: Trust,
        peer_id: PeerId,
        sign: Sign,
        draw: Draw,
        *,
        role: str,
        addresses: tuple[str, ...] = (),
        bootstraps: Iterable[PeerAddress] = (),
        saved: bytes | None = None,
    ) -> None:
        self._trust = trust
        self._peer_id = peer_id
        self._sign = sign
        self._draw = draw
        self._role = role
        self._addresses = addresses[: limits.ADDRESSES_MAX]
        self._holdings = Holdings()
        self._book = AddressBook(peer_id, bootstraps, saved, draw)
        self._saved_book = saved
        self._gossip = Gossip(trust)
        self._links: dict[PeerId, Link] = {}
        self._neighbours: tuple[PeerId, ...] = ()
        self._haves: dict[PeerId, _Told] = {}
        self._doubles = Doubles(peer_id)
        self._own_have: bytes | None = None
        self._issued_at_ms = 0
        self._have_at = float("-inf")
        self._have_told_at = float("-inf")
        self._rebalance_at = float("-inf")
        self._pushed_at = float("-inf")
        self._ask_head_at = float("-inf")
        self._asked_head = b""
        """The answer to a question: to hear it shows nothing about who pushes."""
        self._courier = Courier()
        self._requests: OpenRequests[bool] = OpenRequests()
        """Requests under way, and of each whether it asks a neighbour for the head."""
        self._timer = Timer()

    # What the node's other parts ask

    @property
    def neighbours(self) -> tuple[PeerId, ...]:
        """The peers news is exchanged with, ascending."""
        return self._neighbours

    @property
    def connected(self) -> tuple[PeerId, ...]:
        """Every peer a stream can be opened to, ascending."""
        return tuple(sorted(self._links))

    @property
    def own_have(self) -> bytes | None:
        """This node's own encoded have record, for ``StoreView.have``."""
        return self._own_have

    def neighbour_addresses(self) -> tuple[PeerAddress, ...]:
        """Neighbours a newcomer may dial, for ``StoreView.neighbours``."""
        known = ((peer_id, self._book.addresses_of(peer_id)) for peer_id in self._neighbours)
        return tuple(PeerAddress(peer_id, addresses) for peer_id, addresses in known if addresses)

    def have_of(self, peer_id: PeerId) -> Have | None:
        """Return the newest verified have record of a peer, while it is fresh."""
        told = self._haves.get(peer_id)
        return None if told is None else told.have

    def push_verdict(self, push: PushHead | PushForkProof) -> str:
        """Return what became of a pushed item, for ``StoreView.push_verdict``: empty if taken, or a code."""
        if isinstance(push, PushHead):
            return self._gossip.verdict(push.head)
        return self._gossip.proof_verdict(push.first, push.second)

    def update(
        self,
        now: float,
        now_ms: int,
        *,
        holdings: Holdings | None = None,
        addresses: tuple[str, ...] | None = None,
    ) -> list[Effect]:
        """Take in that this node holds something else, or is reached elsewhere; it is told soon."""
        holdings = self._holdings if holdings is None else holdings
        addresses = self._addresses if addresses is None else addresses[: limits.ADDRESSES_MAX]
        if (holdings, addresses) != (self._holdings, self._addresses):
            self._holdings, self._addresses = holdings, addresses
            self._have_at = min(self._have_at, self._have_told_at + HAVE_CHANGE_SECONDS)
        return self._go_on(now, now_ms)

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        self._timer.note(now)
        return self._take(event, now, now_ms) + self._go_on(now, now_ms)

    # News

    def _take(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        match event:
            case PeerConnected():
                return self._take_connection(event, now)
            case PeerLost(peer_id):
                self._links.pop(peer_id, None)
                self._book.fail(peer_id, now)
                self._choose_neighbours()
                return [self._report()]
            case HeadSeen(record, source):
                if source is not None and record != self._asked_head:
                    self._pushed_at = now
                return self._gossip.take_head(record, self._link_of(source), now, now_ms)
            case ForkProofSeen(first, second, source):
                return self._gossip.take_fork_proof(first, second, self._link_of(source), now)
            case HaveSeen(record, source):
                return self._take_have(record, source, now, now_ms)
            case ReplyReceived() | RequestFailed():
                return self._take_reply(event, now, now_ms)
            case _:
                return []

    def _take_connection(self, event: PeerConnected, now: float) -> list[Effect]:
        if event.peer_id == self._peer_id:
            return []
        self._book.confirm(event.peer_id, event.addresses, is_sought=event.outbound)
        link = self._links.get(event.peer_id)
        if link is not None:
            link.outbound = link.outbound or event.outbound
            return []
        if len(self._links) >= LINKS_MAX:
            inbound = [peer_id for peer_id, link in self._links.items() if not link.outbound]
            if not event.outbound or not inbound:
                return []
            # Strangers who dial this node must not keep out whom it dials itself.
            del self._links[inbound[-1]]
        self._links[event.peer_id] = Link(event.peer_id, event.outbound)
        self._choose_neighbours()
        effects: list[Effect] = [self._report()]
        # Everybody is asked once, neighbour or not: the answer brings what it holds and how near it is.
        if self._own_have is not None:
            effects.append(self._send(event.peer_id, ExchangeHave(self._own_have), now))
        return effects

    def _take_have(self, record: bytes, source: PeerId | None, now: float, now_ms: int) -> list[Effect]:
        link = self._link_of(source)
        if link is not None and not link.incoming.take(now):
            return [Count("rejected", "rate")]
        try:
            signed = decode_signed(record)
            have = self._trust.accept_have(signed, now_ms)
        except (RemoteProtocolError, TrustError) as error:
            return blame(error, source)
        peer_id = signed.signers[0]
        known = self._haves.get(peer_id)
        # One that was taken by a clock that ran ahead must not stand in the way of those that it is right for.
        if known is not None and have.issued_at_ms <= known.have.issued_at_ms <= now_ms + FUTURE_MS_MAX:
            return []
        double = self._doubles.look(peer_id, have, now)
        effects: list[Effect] = [] if double is None else [Log("warning", double)]
        if peer_id == self._peer_id:
            return effects
        self._haves.pop(peer_id, None)
        self._haves[peer_id] = _Told(have, now)
        if len(self._haves) > HAVES_MAX:
            del self._haves[next(iter(self._haves))]
        self._book.learn(peer_id, have.addresses)
        return effects

    def _take_reply(self, event: ReplyReceived | RequestFailed, now: float, now_ms: int) -> list[Effect]:
        asked = self._requests.end(event)
        link = self._links.get(event.peer_id)
        if asked is None or asked.peer_id != event.peer_id:
            return []
        if isinstance(event, RequestFailed):
            if link is not None:
                link.fail_push(event.request_id, now, self._draw)
            return []
        reply = event.reply
        if isinstance(reply, HaveReply):
            if link is not None:
                link.rtt_seconds = now - asked.sent_at
            for peer in reply.neighbours:
                self._book.learn(peer.peer_id, peer.addresses)
            return [] if reply.have is None else self._take_have(reply.have, event.peer_id, now, now_ms)
        if isinstance(reply, HeadReply) and asked.about:
            return self._take_asked_head(reply.head, event.peer_id)
        if isinstance(reply, PushReply | Refusal):
            if link is not None:
                link.end_push(event.request_id)
            return []
        return [StrikePeer(event.peer_id, "unexpected"), Count("rejected", "unexpected")]

    def _take_asked_head(self, head: bytes | None, source: PeerId) -> list[Effect]:
        if head is None or not self._gossip.verdict(head):
            return []
        self._asked_head = head
        return [ShowToMachines(HeadSeen(head, source))]

    # Work

    def _go_on(self, now: float, now_ms: int) -> list[Effect]:
        effects = self._gossip.retry(now, now_ms)
        self._forget_old(now)
        if now >= self._have_at:
            effects += self._tell_have(now, now_ms)
        if now >= self._rebalance_at:
            self._rebalance_at = now + REBALANCE_SECONDS
            self._choose_neighbours(anew=True)
            effects += self._dial(now, one_more=True)
            effects += self._save_book()
        effects += self._dial(now, one_more=False)
        for peer_id in self._neighbours:
            link = self._links[peer_id]
            for push in self._gossip.due_for(link, now, now_ms):
                request = self._send(peer_id, push.message, now)
                link.start_push(request.request_id, push.digest)
                effects.append(request)
        effects += self._ask_head(now)
        return effects + self._set_timer(now, now_ms)

    def _ask_head(self, now: float) -> list[Effect]:
        """Ask a neighbour for the head, where nobody seems to push any."""
        asks_at = self._asks_head_at()
        if asks_at is None or now < asks_at:
            return []
        self._ask_head_at = now + ASK_HEAD_SECONDS * (0.5 + self._draw(1_000) / 1_000)
        asked = self._neighbours[self._draw(len(self._neighbours))]
        return [self._send(asked, GetHead(), now, asks_head=True)]

    def _asks_head_at(self) -> float | None:
        newest = self._trust.head_record
        if not self._neighbours or (newest is not None and self._peer_id in newest.signers):
            return None  # who publishes hears of no head before it is signed
        return max(self._ask_head_at, self._pushed_at + UNCHOSEN_SECONDS)

    def _tell_have(self, now: float, now_ms: int) -> list[Effect]:
        before_ms, self._issued_at_ms = self._issued_at_ms, choose_issue_ms(now_ms, self._issued_at_ms)
        self._doubles.note_own(self._issued_at_ms)
        holdings = self._holdings
        record = seal(
            Have(
                run_id=self._trust.run_id,
                role=self._role,
                epoch=holdings.epoch,
                version_first=holdings.version_first,
                version_last=holdings.version_last,
                anchors=holdings.anchors[-limits.ANCHORS_LISTED_MAX :],
                addresses=self._addresses,
                issued_at_ms=self._issued_at_ms,
            ),
            self._sign,
            self._peer_id,
        )
        first = self._own_have is None
        self._own_have = encode_signed(record)
        self._have_told_at = now
        self._have_at = now + HAVE_SECONDS
        # Peers that connected before there was anything to tell are asked now.
        told = sorted(self._links) if first else self._neighbours
        message = ExchangeHave(self._own_have)
        said = [_say_clock_fell(before_ms - now_ms)] if before_ms > self._issued_at_ms else []
        return [*said, AnnounceHave(record), *(self._send(peer_id, message, now) for peer_id in told)]

    def _dial(self, now: float, *, one_more: bool) -> list[Effect]:
        """Dial while there are too few connections; ``one_more`` dials once even if there are enough."""
        self._book.expire_dials(now)
        effects: list[Effect] = []
        while self._book.dialling_count < DIALS_MAX and (one_more or self._needs_peers()):
            peer_id = self._book.choose(self._links, now)
            if peer_id is None:
                break
            effects.append(DialPeer(peer_id, self._book.start_dial(peer_id, now)))
            one_more = False
        return effects

    def _needs_peers(self) -> bool:
        outbound = sum(link.outbound for link in self._links.values())
        return len(self._links) < limits.NEIGHBOURS_MIN or outbound < OUTBOUND_MIN

    def _choose_neighbours(self, *, anew: bool = False) -> None:
        current = () if anew else self._neighbours
        self._neighbours = choose_neighbours(self._links, current, OUTBOUND_MIN, self._draw)

    def _forget_old(self, now: float) -> None:
        limit = now - limits.RECORD_VALIDITY_SECONDS
        for peer_id in [peer_id for peer_id, told in self._haves.items() if told.heard_at < limit]:
            del self._haves[peer_id]
        # The shell answers every request; should it fail to, a push must not stay under way for ever.
        for request in self._requests.end_overdue(now):
            if request.peer_id in self._links:
                self._links[request.peer_id].fail_push(request.request_id, now, self._draw)

    def _save_book(self) -> list[Effect]:
        encoded = self._book.encode()
        if encoded == self._saved_book:
            return []
        self._saved_book = encoded
        return [SaveState(BOOK_KEY, encoded)]

    def _send(self, peer_id: PeerId, message: Message, now: float, *, asks_head: bool = False) -> SendRequest:
        return self._requests.add(self._courier.send(peer_id, message), asks_head, now)

    def _link_of(self, source: PeerId | None) -> Link | None:
        return None if source is None else self._links.get(source)

    def _report(self) -> Report:
        return Report(
            (
                ("peers_connected", len(self._links)),
                ("peers_neighbour", len(self._neighbours)),
                ("peers_outbound", sum(link.outbound for link in self._links.values())),
                ("peers_known", len(self._book)),
            )
        )

    def _set_timer(self, now: float, now_ms: int) -> list[Effect]:
        times = [self._have_at, self._rebalance_at]
        times += self._gossip.next_times((self._links[peer_id] for peer_id in self._neighbours), now, now_ms)
        asks_head_at = self._asks_head_at()
        times += [] if asks_head_at is None else [asks_head_at]
        if self._needs_peers() and self._book.dialling_count < DIALS_MAX:
            dial_at = self._book.next_dial_at(self._links)
            times += [] if dial_at is None else [dial_at]
        return self._timer.wake_at(max(min(times), now))


def _say_clock_fell(ahead_ms: int) -> Log:
    ahead = f"this node's clock was {ahead_ms / 1000:.0f} s ahead or more and was set back"
    text = "what it signed meanwhile was refused by others and is signed anew; let a time service set it: run "
    return Log("warning", f"{ahead}: {text}'timedatectl set-ntp true'")
