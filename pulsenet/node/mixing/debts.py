"""Finding out what became of exchanges whose last message was lost, and settling them."""

from __future__ import annotations

from typing import Final

from pulsenet.chain.records import Share, ShareKind
from pulsenet.chain.signing import decode_signed
from pulsenet.ids import PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Count, Effect
from pulsenet.node.events import Event, ReplyReceived
from pulsenet.node.mixing.effects import Debt
from pulsenet.node.mixing.events import DebtName
from pulsenet.node.mixing.journal import Exchange, Journal, Stand
from pulsenet.node.requests import OpenRequests
from pulsenet.outer.mixing.settings import Job
from pulsenet.wire.messages import GetShares, SharesReply
from pulsenet.wire.schema import decode_value

ASK_SECONDS: Final = 5.0
"""How often the other side is asked whether it took the mean, while it can be reached."""


class Debts:
    """The exchanges this node answered and did not take.

    Args:
        journal: Where they are kept.
        courier: Whom messages can be sent to.
    """

    def __init__(self, journal: Journal, courier: Courier) -> None:
        self._journal = journal
        self._courier = courier
        self._ask_at: dict[tuple[int, int], float] = {}
        self._requests: OpenRequests[Exchange] = OpenRequests()

    def owed(self, job: Job) -> tuple[Debt, ...]:
        """Return what the next vector of a job is to be given."""
        return tuple(each.debt for each in self._journal.exchanges(Stand.OWED) if each.job == int(job))

    def settle(self, names: tuple[DebtName, ...]) -> list[Effect]:
        """These debts were added to a vector."""
        effects: list[Effect] = []
        for name in names:
            exchange = self._journal.exchange(name.round_index, int(name.job))
            if exchange is not None and exchange.stand is Stand.OWED:
                self._journal.drop(name.round_index, int(name.job))
                effects.append(Count("debts", "settled"))
        return effects

    def take_taken(self, share: Share) -> list[Effect]:
        """The partner of an exchange that is over here says that it took the mean."""
        exchange = self._journal.exchange(share.round_index, share.job)
        if exchange is None or exchange.stand is not Stand.ANSWERED or exchange.partner != share.peer_id:
            return []
        self._journal.turn(exchange, Stand.OWED)
        return [Count("debts", "owed")]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an answer to one of our questions; anything else is ignored."""
        request = self._requests.end(event)
        if request is None:
            return []
        exchange = request.about
        self._ask_at[exchange.round_index, exchange.job] = now + ASK_SECONDS
        if not isinstance(event, ReplyReceived) or not isinstance(event.reply, SharesReply):
            return []
        if self._journal.exchange(exchange.round_index, exchange.job) != exchange:
            return []
        if self._is_taken(exchange, event.reply):
            self._journal.turn(exchange, Stand.OWED)
            return [Count("debts", "owed")]
        if event.reply.is_open:
            return []
        self._journal.drop(exchange.round_index, exchange.job)
        is_known = exchange.round_index >= event.reply.known_from
        return [Count("debts", "void" if is_known else "forgotten")]

    def _is_taken(self, exchange: Exchange, reply: SharesReply) -> bool:
        # Who answers is the partner itself, so its word on itself needs no signature to be believed.
        shares = [decode_value(Share, decode_signed(record).payload) for record in reply.shares]
        place = (exchange.round_index, exchange.job, exchange.partner)
        return any(
            share.kind is ShareKind.TAKEN and (share.round_index, share.job, share.peer_id) == place for share in shares
        )

    def ask(self, now: float, is_over: dict[Job, bool], open_round: int | None) -> list[Effect]:
        """Return the questions that are due.

        Args:
            now: Monotonic time.
            is_over: Of the jobs of the open round, which have their result. Those that are not there were an earlier
                life's, and are over.
            open_round: That round.
        """
        self._requests.end_overdue(now)
        asked = {(request.about.round_index, request.about.job) for request in self._requests}
        effects: list[Effect] = []
        doubtful = self._doubtful(is_over, open_round)
        for exchange in doubtful:
            key = (exchange.round_index, exchange.job)
            if key in asked or now < self._ask_at.get(key, 0.0) or exchange.partner not in self._courier.connected:
                continue
            question = GetShares(exchange.round_index, exchange.job, 0)
            effects.append(self._requests.add(self._courier.send(exchange.partner, question), exchange, now))
        keys = {(exchange.round_index, exchange.job) for exchange in doubtful}
        self._ask_at = {key: at for key, at in self._ask_at.items() if key in keys}
        return effects

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which a question may be due."""
        return min((at for at in self._ask_at.values() if at > now), default=None)

    def note_connected(self, peer_id: PeerId) -> None:
        """Somebody is there again: what is open with it is asked at once."""
        for exchange in self._journal.exchanges(Stand.ANSWERED):
            if exchange.partner == peer_id:
                self._ask_at.pop((exchange.round_index, exchange.job), None)

    def _doubtful(self, is_over: dict[Job, bool], open_round: int | None) -> list[Exchange]:
        return [
            exchange
            for exchange in self._journal.exchanges(Stand.ANSWERED)
            if exchange.round_index != open_round or is_over.get(Job(exchange.job), True)
        ]
