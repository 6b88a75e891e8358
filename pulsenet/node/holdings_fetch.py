"""Asking other readers which chunks of a blob they hold, at a bounded rate (SPEC section 5, Holdings)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Count, Effect, SendRequest, StrikePeer
from pulsenet.node.events import Event, ReplyReceived
from pulsenet.node.picker import Picker, check_reply
from pulsenet.node.requests import OpenRequest, OpenRequests
from pulsenet.node.sources import Sources
from pulsenet.wire.messages import GetHoldings, Refusal

ASK_SECONDS_MIN = 0.5
ASK_SECONDS_MAX = 5.0
"""One peer is asked about one blob again after this: sooner while its answers change, later while they do not."""

ENTRIES_PER_SECOND = 8_192
"""A longer list is asked about less often: an answer costs its sender a look at every chunk."""

BLOBS_MAX = 4
PEERS_MAX = 24
"""Blobs asked about at a time, and peers asked about each."""

TIMEOUT_SECONDS = limits.REQUEST_OPEN_SECONDS_MAX


@dataclass(slots=True)
class _Question:
    """One peer and one blob."""

    wait_seconds: float = ASK_SECONDS_MIN
    ask_at: float = 0.0
    request_id: int | None = None
    is_answered: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """A peer answered that it knows nothing of a blob."""

    peer_id: PeerId
    blob_id: Digest


class HoldingsFetcher:
    """Pure machine; what it learns goes into the pickers.

    Args:
        sources: Providers, shared with the other fetchers of the owner.
        take_request_id: Returns an id the owner never used before.
    """

    def __init__(self, sources: Sources, take_request_id: Callable[[], int]) -> None:
        self._sources = sources
        self._take_request_id = take_request_id
        self._pickers: dict[Digest, Picker] = {}
        self._questions: dict[tuple[PeerId, Digest], _Question] = {}
        self._requests: OpenRequests[Digest] = OpenRequests()
        """Requests under way, and the blob that each asks about."""

    def set_blobs(self, pickers: Mapping[Digest, Picker]) -> None:
        """Replace the blobs that are asked about, most urgent first."""
        self._pickers = dict(list(pickers.items())[:BLOBS_MAX])
        self._questions = {key: question for key, question in self._questions.items() if key[1] in self._pickers}

    def is_answered(self, peer_id: PeerId, blob_id: Digest) -> bool:
        """Say whether the peer told anything about the blob, be it that it does not know it."""
        question = self._questions.get((peer_id, blob_id))
        return question is not None and question.is_answered

    def handle(self, event: Event, now: float) -> tuple[list[Effect], Missing | None]:
        """Take in an event about one of our questions; anything else is ignored."""
        request = self._requests.end(event)
        if request is None:
            return [], None
        self._free(request)
        if isinstance(event, ReplyReceived):
            return self._take_reply(request, event.reply, now)
        self._fail(request, now)
        return [], None

    def lose_peer(self, peer_id: PeerId) -> None:
        """Forget a peer that is gone."""
        self._requests.end_of(peer_id)
        self._questions = {key: question for key, question in self._questions.items() if key[0] != peer_id}
        for picker in self._pickers.values():
            picker.forget(peer_id)

    def pump(self, targets: Callable[[Digest], Iterable[PeerId]], now: float) -> list[Effect]:
        """Ask whoever is due; ``targets`` names the peers to ask about a blob, most promising first."""
        for request in self._requests.end_overdue(now):
            self._free(request)
            self._fail(request, now)
        effects: list[Effect] = []
        for blob_id in self._pickers:
            for peer_id in list(targets(blob_id))[:PEERS_MAX]:
                question = self._questions.setdefault((peer_id, blob_id), _Question())
                if question.request_id is None and question.ask_at <= now:
                    effects.append(self._ask(peer_id, blob_id, question, now))
        return effects

    def next_wake(self, targets: Callable[[Digest], Iterable[PeerId]], now: float) -> float | None:
        """Return the earliest later time at which somebody is due."""
        times = [self._requests.next_wake(now)]
        for blob_id in self._pickers:
            for peer_id in list(targets(blob_id))[:PEERS_MAX]:
                question = self._questions.get((peer_id, blob_id))
                if question is not None and question.request_id is None:
                    times.append(question.ask_at)
        return min((at for at in times if at is not None and at > now), default=None)

    def _ask(self, peer_id: PeerId, blob_id: Digest, question: _Question, now: float) -> Effect:
        request = SendRequest(self._take_request_id(), peer_id, GetHoldings(blob_id), TIMEOUT_SECONDS)
        question.request_id = request.request_id
        return self._requests.add(request, blob_id, now)

    def _take_reply(
        self, request: OpenRequest[Digest], reply: object, now: float
    ) -> tuple[list[Effect], Missing | None]:
        peer_id, blob_id = request.peer_id, request.about
        question, picker = self._questions.get((peer_id, blob_id)), self._pickers.get(blob_id)
        source = self._sources.get(peer_id)
        if question is None or picker is None or source is None:
            return [], None
        if isinstance(reply, Refusal):
            question.is_answered = True
            self._put_off(question, blob_id, now, is_news=False)
            if reply.code == "not-found":
                picker.forget(peer_id)
                return [], Missing(peer_id, blob_id)
            # An older node: it is asked for chunks as if it might hold them, and never about them again.
            source.tells_holdings = source.tells_holdings and reply.code != "unexpected"
            return [], None
        try:
            is_news = picker.note(peer_id, check_reply(reply, blob_id))
        except RemoteProtocolError as error:
            self._sources.note_failure(peer_id, now)
            self._put_off(question, blob_id, now, is_news=False)
            return [StrikePeer(peer_id, error.code), Count("rejected", error.code)], None
        self._put_off(question, blob_id, now, is_news=is_news or not question.is_answered)
        question.is_answered = True
        return [], None

    def _fail(self, request: OpenRequest[Digest], now: float) -> None:
        self._sources.note_failure(request.peer_id, now)
        question = self._questions.get((request.peer_id, request.about))
        if question is not None:
            self._put_off(question, request.about, now, is_news=False)

    def _put_off(self, question: _Question, blob_id: Digest, now: float, *, is_news: bool) -> None:
        question.wait_seconds = ASK_SECONDS_MIN if is_news else min(question.wait_seconds * 1.5, ASK_SECONDS_MAX)
        picker = self._pickers.get(blob_id)
        entries = 0 if picker is None else picker.entry_count
        question.ask_at = now + self._sources.jitter(question.wait_seconds + entries / ENTRIES_PER_SECOND)

    def _free(self, request: OpenRequest[Digest]) -> None:
        """Nobody is asked any more what a request that is over asked."""
        question = self._questions.get((request.peer_id, request.about))
        if question is not None and question.request_id == request.request_id:
            question.request_id = None
