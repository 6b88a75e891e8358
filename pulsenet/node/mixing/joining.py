"""How a trainer without a state begins: it asks members for one, and takes the newest that is offered whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pulsenet.chain.records import Share, ShareKind
from pulsenet.chain.rosters import Rosters
from pulsenet.chain.rules import STATE_JOB, compute_encoded_size_bytes_max
from pulsenet.chain.signing import decode_signed
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Count, Effect, StrikePeer
from pulsenet.node.events import Event, ReplyReceived
from pulsenet.node.mixing.blobs import Blobs
from pulsenet.node.mixing.contact import RosterContact
from pulsenet.node.mixing.effects import StartMixing
from pulsenet.node.mixing.work import Wants, name_of
from pulsenet.node.requests import OpenRequests
from pulsenet.outer.mixing.pairing import find_owner
from pulsenet.outer.mixing.settings import Job
from pulsenet.wire.messages import GetShares, SharesReply
from pulsenet.wire.schema import decode_value

ASK_SECONDS: Final = 3.0
"""How often a member is asked again that offered nothing."""

ALONE_SECONDS: Final = 10.0
"""Whoever hears for so long of nobody who is in a round begins by itself."""

ADOPT_SECONDS_MAX: Final = 900.0
"""While others are in rounds, how long a state is waited for: some make one only when their next round opens."""

FETCH_SECONDS_MAX: Final = 120.0
"""A state that is not whole after so long is looked for elsewhere."""


@dataclass(slots=True)
class _Offer:
    """A state that one member offers."""

    source: PeerId
    round_index: int
    shares: dict[int, Share]
    slice_count: int
    is_consensus: bool
    began_at: float | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.shares) == self.slice_count

    @property
    def key(self) -> tuple[Digest, ...]:
        return tuple(self.shares[place].blob_id for place in sorted(self.shares))


class Joining:
    """The time between a training process that holds nothing and its first round.

    Args:
        trust: The run's rules.
        rosters: By which offers are judged.
        courier: Whom messages can be sent to.
        contact: Asked for rosters that are not known yet.
        blobs: What is fetched.
        peer_id: This node's key.
        element_count: Elements of all masters: an offer of more is refused.
        now: When it began.
    """

    def __init__(
        self,
        trust: Trust,
        rosters: Rosters,
        courier: Courier,
        contact: RosterContact,
        blobs: Blobs,
        peer_id: PeerId,
        element_count: int,
        now: float,
    ) -> None:
        self._trust = trust
        self._rosters = rosters
        self._courier = courier
        self._contact = contact
        self._blobs = blobs
        self._peer_id = peer_id
        self._element_count = element_count
        self._began_at = now
        self._ask_at: dict[PeerId, float] = {}
        self._requests: OpenRequests[None] = OpenRequests()
        self._rounds: dict[PeerId, int | None] = {}
        self._offers: dict[PeerId, _Offer] = {}
        self._bad: set[tuple[Digest, ...]] = set()
        self._chosen: _Offer | None = None
        self.started: StartMixing | None = None
        """What was ordered, once it was."""

    # What happens

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an answer to one of our questions; anything else is ignored."""
        request = self._requests.end(event)
        if request is None:
            return []
        peer_id = request.peer_id
        self._ask_at[peer_id] = now + ASK_SECONDS
        if not isinstance(event, ReplyReceived) or not isinstance(event.reply, SharesReply):
            return []
        try:
            self._take_reply(peer_id, event.reply, now)
        except (RemoteProtocolError, TrustError) as error:
            counted: list[Effect] = [Count("rejected", error.code)]
            return [*counted, StrikePeer(peer_id, error.code)] if isinstance(error, RemoteProtocolError) else counted
        return []

    def refuse(self) -> None:
        """What was begun with could not be read: look for another state."""
        if self._chosen is not None:
            self._bad.add(self._chosen.key)
            self._offers.pop(self._chosen.source, None)
        self._chosen, self.started = None, None

    def _take_reply(self, peer_id: PeerId, reply: SharesReply, now: float) -> None:
        self._rounds[peer_id] = reply.round_index
        offer = self._offers.get(peer_id)
        for record in reply.shares:
            signed = decode_signed(record)
            peek = decode_value(Share, signed.payload)
            known = self._rosters.get(peek.roster)
            if known is None:
                self._contact.ask_soon(now, peer_id)
                return
            share = self._trust.accept_share(signed, known.roster, known.digest)
            is_mean = share.kind is ShareKind.MEAN and share.job == int(Job.MIX1)
            is_own = share.kind is ShareKind.PART and share.slice_count == 1 and share.peer_id == peer_id
            is_own &= share.job in (STATE_JOB, int(Job.MIX1))
            if not (is_own or (is_mean and find_owner(share.slice_index, known.members) == share.peer_id)):
                raise TrustError("unexpected", f"slice {share.slice_index} of something that is no state")
            if offer is None or offer.round_index != share.round_index or offer.is_consensus != is_mean:
                offer = _Offer(peer_id, share.round_index, {}, share.slice_count, is_mean)
            offer.shares[share.slice_index] = share
        if offer is not None and self._is_allowed(offer):
            self._offers[peer_id] = offer
            if not offer.is_complete:
                self._ask_at[peer_id] = now

    def _is_allowed(self, offer: _Offer) -> bool:
        # Momentum may travel with it, so twice the elements.
        size_bytes = sum(share.encoded_size_bytes for share in offer.shares.values())
        return size_bytes <= offer.slice_count * compute_encoded_size_bytes_max(8 * self._element_count)

    # What follows

    def update(self, now: float, own_round: int) -> list[Effect]:
        """Ask whoever can be asked, and begin once that can be.

        Args:
            now: Monotonic time.
            own_round: The round to begin with if nobody is further.
        """
        assert self.started is None
        effects: list[Effect] = []
        if self._chosen is None:
            effects += self._ask(now)
            self._chosen = self._choose(now)
        chosen = self._chosen
        if chosen is not None:
            assert chosen.began_at is not None
            if all(self._blobs.is_whole(share.blob_id) for share in chosen.shares.values()):
                parts = tuple(name_of(chosen.shares[place]) for place in sorted(chosen.shares))
                begin = max(own_round, chosen.round_index + 1, self._find_front())
                self.started = StartMixing(begin, parts, chosen.is_consensus)
                return [*effects, self.started]
            has_bad = any(self._blobs.refusal_of(share.blob_id) for share in chosen.shares.values())
            is_slow = now >= chosen.began_at + FETCH_SECONDS_MAX
            if is_slow:
                # The others' offers are as old, and what they are of may be released there: they are asked anew.
                self._offers.clear()
            if has_bad or is_slow:
                self.refuse()
            return effects
        newest = max((told for told in self._rounds.values() if told is not None), default=0)
        # Who was in a round before knows that there may be others who still hold its state, and are not connected yet.
        is_soon = own_round == 0 and self._everybody_answered()
        is_first = newest == 0 and (is_soon or now >= self._began_at + ALONE_SECONDS)
        if is_first or now >= self._began_at + ADOPT_SECONDS_MAX:
            self.started = StartMixing(max(own_round, self._find_front()))
            effects.append(self.started)
        return effects

    def _find_front(self) -> int:
        """Return the newest round that a member told of, of those that a roster covers.

        No round is opened twice: one that lied about a later one would keep this node out of all before it.
        """
        end_round = self._rosters.end_round
        return max((told for told in self._rounds.values() if told is not None and told < end_round), default=0)

    def wants(self) -> Wants:
        """Return the blobs of the state that was chosen."""
        chosen = self._chosen
        if chosen is None or self.started is not None:
            return {}
        return {share.blob_id: (name_of(share), chosen.source) for share in chosen.shares.values()}

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which :meth:`update` may find something to do."""
        if self.started is not None:
            return None
        times = [self._began_at + ALONE_SECONDS, self._began_at + ADOPT_SECONDS_MAX, now + ASK_SECONDS]
        times += [at for peer_id, at in self._ask_at.items() if peer_id in self._courier.connected]
        return min(at for at in times if at > now)

    def _ask(self, now: float) -> list[Effect]:
        self._requests.end_overdue(now)
        asked = {request.peer_id for request in self._requests}
        effects: list[Effect] = []
        for peer_id in sorted(self._courier.connected & self._trainers()):
            if peer_id in asked or now < self._ask_at.get(peer_id, 0.0):
                continue
            offer = self._offers.get(peer_id)
            start = len(offer.shares) if offer is not None and not offer.is_complete else 0
            question = GetShares(None, STATE_JOB, start)
            effects.append(self._requests.add(self._courier.send(peer_id, question), None, now))
        return effects

    def _choose(self, now: float) -> _Offer | None:
        good = [offer for offer in self._offers.values() if offer.is_complete and offer.key not in self._bad]
        if not good:
            return None
        best = max(good, key=lambda offer: (offer.round_index, offer.is_consensus, offer.source))
        if not self._everybody_answered() and now < self._began_at + ASK_SECONDS:
            return None
        best.began_at = now
        return best

    def _everybody_answered(self) -> bool:
        reachable = self._courier.connected & self._trainers()
        others = self._trainers() - {self._peer_id}
        # Before anybody can be reached, nobody's silence says anything, unless there is nobody else.
        return reachable <= set(self._rounds) and (bool(reachable) or not others)

    def _trainers(self) -> set[PeerId]:
        descriptor = self._trust.descriptor
        listed = set() if descriptor is None else set(descriptor.trainers)
        newest = self._rosters.newest
        return (listed | set(newest.members if newest is not None else ())) - {self._peer_id}
