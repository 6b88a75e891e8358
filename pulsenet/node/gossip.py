"""How news spreads over the mesh: heads and fork proofs, verified first, once to each neighbour.

What is forwarded is always what :class:`Trust` believes now. So it does not matter which machine of this
node accepted a head first, and of several heads that came in a burst only the newest travels on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from pulsenet.chain.evidence import ForkProof
from pulsenet.chain.records import SignedRecord
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, compute_digest
from pulsenet.node.blame import OVERTAKEN_CODES, UNRIPE_CODES, blame
from pulsenet.node.effects import Count, Effect
from pulsenet.node.neighbours import Link
from pulsenet.wire.messages import PushForkProof, PushHead

UNRIPE_MAX = 4
UNRIPE_RETRIES_MAX = 20
UNRIPE_RETRY_SECONDS = 1.0
"""Heads and proofs waiting for an epoch record or a descriptor, and how long they wait."""

VERDICTS_MAX = 256
"""Pushed records whose verdict is remembered; a second copy costs no signature check."""


@dataclass(frozen=True, slots=True)
class Push:
    """Something for one neighbour."""

    digest: Digest
    message: PushHead | PushForkProof


@dataclass(slots=True)
class _Unripe:
    judge: Callable[[int], object]
    """Judges it again at a Unix time in milliseconds; raises what it is refused for."""
    retry_at: float
    retry_count: int = 0


class Gossip:
    """The part of the mesh that judges and spreads news; it holds no peers of its own."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._verdicts: OrderedDict[Digest, str] = OrderedDict()
        self._unripe: OrderedDict[Digest, _Unripe] = OrderedDict()
        self._push_head: tuple[SignedRecord, Push] | None = None
        self._push_proof: tuple[SignedRecord, Push] | None = None

    def verdict(self, record: bytes) -> str:
        """Return what became of a record: empty if taken, a code if refused, ``rate`` if never looked at."""
        return self._verdicts.get(compute_digest(record), "rate")

    def take_head(self, record: bytes, link: Link | None, now: float, now_ms: int) -> list[Effect]:
        """Judge an encoded head that arrived from the peer behind ``link``, or from the directory."""
        if link is not None and not link.incoming.take(now):
            return [Count("rejected", "rate")]
        key = compute_digest(record)
        if self._verdicts.get(key) == "":
            if link is not None:
                link.note_known(record_digest(decode_signed(record)))
            return []
        try:
            signed = decode_signed(record)
            self._trust.accept_head(signed, now_ms)
        except (RemoteProtocolError, TrustError) as error:
            self._remember(key, error.code)
            if error.code in UNRIPE_CODES:
                # Not refused yet: what it builds on may be on its way.
                return self._wait(key, partial(self._trust.accept_head, signed), now)
            return blame(error, None if link is None else link.peer_id)
        self._remember(key, "")
        if link is not None:
            link.note_known(record_digest(signed))
        return []

    def take_fork_proof(self, first: bytes, second: bytes, link: Link | None, now: float) -> list[Effect]:
        """Judge two encoded records said to contradict each other."""
        if link is not None and not link.incoming.take(now):
            return [Count("rejected", "rate")]
        key = compute_digest(first + second)
        try:
            proof = self._judge_proof(first, second)
        except (RemoteProtocolError, TrustError) as error:
            self._remember(key, error.code)
            if error.code in UNRIPE_CODES:
                # Nobody shows it a second time.
                return self._wait(key, partial(self._judge_proof, first, second), now)
            return blame(error, None if link is None else link.peer_id)
        self._remember(key, "")
        if link is not None:
            link.note_known(_proof_digest(proof.first, proof.second))
        return []

    def _judge_proof(self, first: bytes, second: bytes, now_ms: int = 0) -> ForkProof:
        """Return the proof if it holds; no proof is ever over."""
        return self._trust.accept_fork_proof(decode_signed(first), decode_signed(second))

    def proof_verdict(self, first: bytes, second: bytes) -> str:
        """Return what became of a fork proof; see :meth:`verdict`."""
        return self._verdicts.get(compute_digest(first + second), "rate")

    def retry(self, now: float, now_ms: int) -> list[Effect]:
        """Judge again what waited for an epoch record or a descriptor, where it is time."""
        effects: list[Effect] = []
        for key, unripe in list(self._unripe.items()):
            if now < unripe.retry_at:
                continue
            unripe.retry_at = now + UNRIPE_RETRY_SECONDS
            unripe.retry_count += 1
            try:
                unripe.judge(now_ms)
                self._remember(key, "")
            except (RemoteProtocolError, TrustError) as error:
                if error.code in UNRIPE_CODES and unripe.retry_count < UNRIPE_RETRIES_MAX:
                    continue
                self._remember(key, error.code)
                if error.code not in OVERTAKEN_CODES:
                    effects.append(Count("rejected", error.code))
            del self._unripe[key]
        return effects

    def due_for(self, link: Link, now: float, now_ms: int) -> list[Push]:
        """Return what to push to a neighbour now; the caller sends it and tells the link."""
        due = []
        for push in self._news(now_ms):
            wants_at = link.wants_at(push.digest, now)
            if wants_at is not None and wants_at <= now and link.outgoing.take(now):
                due.append(push)
        return due

    def next_times(self, links: Iterable[Link], now: float, now_ms: int) -> list[float]:
        """Return the times at which something becomes due."""
        times = [unripe.retry_at for unripe in self._unripe.values()]
        news = self._news(now_ms)
        for link in links:
            wants = (link.wants_at(push.digest, now) for push in news)
            times += [wants_at for wants_at in wants if wants_at is not None]
        return times

    def _news(self, now_ms: int) -> list[Push]:
        """Return what every neighbour should have: the newest head, or the proof if there is a fork."""
        news = []
        head = self._trust.head_record
        # An expired head would only be refused.
        if head is not None and self._trust.fork is None and not self._trust.stale(now_ms):
            if self._push_head is None or self._push_head[0] is not head:
                self._push_head = (head, Push(record_digest(head), PushHead(encode_signed(head))))
            news.append(self._push_head[1])
        fork = self._trust.fork
        if fork is not None:
            if self._push_proof is None or self._push_proof[0] is not fork.first:
                message = PushForkProof(encode_signed(fork.first), encode_signed(fork.second))
                self._push_proof = (fork.first, Push(_proof_digest(fork.first, fork.second), message))
            news.append(self._push_proof[1])
        return news

    def _remember(self, key: Digest, code: str) -> None:
        self._verdicts[key] = code
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > VERDICTS_MAX:
            self._verdicts.popitem(last=False)

    def _wait(self, key: Digest, judge: Callable[[int], object], now: float) -> list[Effect]:
        if key not in self._unripe:
            self._unripe[key] = _Unripe(judge, now + UNRIPE_RETRY_SECONDS)
        if len(self._unripe) <= UNRIPE_MAX:
            return []
        self._unripe.popitem(last=False)
        return [Count("rejected", "queue")]


def _proof_digest(first: SignedRecord, second: SignedRecord) -> Digest:
    return compute_digest(b"".join(sorted((record_digest(first), record_digest(second)))))
