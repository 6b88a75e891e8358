"""What a publisher says of what is committed, and when it says it again: heads, and nothing that is not on its disk."""

from __future__ import annotations

from pulsenet import limits
from pulsenet.chain.records import SignedRecord
from pulsenet.chain.signing import decode_signed
from pulsenet.chain.trust import Trust
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import AnnounceHead, Count, Effect, Log
from pulsenet.node.machine import Draw
from pulsenet.node.published import PublishedState
from pulsenet.node.scribe import Scribe
from pulsenet.node.succession import Succession
from pulsenet.node.turns import Turns

RESIGN_JITTER_MS = 4_000
"""A head is signed again up to this much early, so that nodes started together do not stay in step."""

TURN_SECONDS = limits.VOTE_RENEW_SECONDS
"""How often a publisher of a run with rounds looks whether its turn has come; votes come and go at this pace."""


class Speaker:
    """Signs and announces heads for one publisher.

    Args:
        trust: The run's rules; what they refuse from anybody else is not announced here.
        peer_id: The publisher's key.
        scribe: Signs with it.
        succession: What is known of other publishers.
        turns: In a run with rounds, whose turn it is.
        draw: Chance, for jitter.
    """

    def __init__(
        self, trust: Trust, peer_id: PeerId, scribe: Scribe, succession: Succession, turns: Turns | None, draw: Draw
    ) -> None:
        self._trust = trust
        self._peer_id = peer_id
        self._scribe = scribe
        self._succession = succession
        self._turns = turns
        self._draw = draw
        self._resign_at: float | None = None
        self._turn_at: float | None = None
        self._said: tuple[int, Version, Digest] | None = None
        """Term, version and catalogue of the newest head signed in a run with rounds."""

    @property
    def is_speaking(self) -> bool:
        """Whether this node announces at present, as far as it tried."""
        return self._turns is None or self._said is not None

    @property
    def next_wake(self) -> float | None:
        """When :meth:`go_on` has something to do."""
        return min((at for at in (self._resign_at, self._turn_at) if at is not None), default=None)

    def go_on(self, state: PublishedState | None, now: float, now_ms: int, *, is_committing: bool) -> list[Effect]:
        """Say what is due: the committed version again with a new time, or in this node's turn whatever is new."""
        if self._turns is not None:
            return self._take_turn(self._turns, state, now, now_ms)
        if self._resign_at is None or now < self._resign_at or is_committing:
            return []
        return self.resign(state, now, now_ms)

    def resign(self, state: PublishedState | None, now: float, now_ms: int) -> list[Effect]:
        """Say again, with a new time, that the committed version is the newest."""
        self._resign_at = None
        if state is None or not self._trust.may_publish(self._peer_id) or self._succession.rival is not None:
            return []
        if self._succession.find_epoch_reason(state, state.table_digest):
            # What is committed is not the newest of the run; saying so would only be refused.
            return []
        return self.announce(self._scribe.issue_head(state, now_ms), state, now, now_ms)

    def announce(self, head: SignedRecord, state: PublishedState, now: float, now_ms: int) -> list[Effect]:
        """Announce a head of the committed state, unless our own rules would refuse it from anybody else."""
        try:
            if self._trust.epoch < state.version.epoch and state.epoch_record is not None:
                self._trust.accept_epoch(decode_signed(state.epoch_record))
            self._trust.accept_head(head, now_ms)
        except TrustError as error:
            return self._take_refusal(state, error)
        self._resign_at = now + limits.HEAD_RESIGN_SECONDS - self._draw(RESIGN_JITTER_MS + 1) / 1000
        return [AnnounceHead(head)]

    def _take_refusal(self, state: PublishedState, error: TrustError) -> list[Effect]:
        text = f"version {state.version} is not announced ({error})"
        if self._turns is None:
            self._succession.require_epoch("restart")
            return [Log("error", f"{text}: the next publish opens a new epoch")]
        if error.code != "term":
            # What is committed lies beside the history: the next round's weights join it anew.
            self._turns.starts_over = True
        return [Count("rejected", error.code), Log("warning", f"{text}: the next round's version will be")]

    def _take_turn(self, turns: Turns, state: PublishedState | None, now: float, now_ms: int) -> list[Effect]:
        """Announce what is committed, while this node leads and knows of nothing newer."""
        if self._turn_at is None or now >= self._turn_at:
            self._turn_at = now + TURN_SECONDS
        newest = self._trust.head
        is_behind = newest is not None and state is not None and newest.version > state.version
        is_able = not is_behind and self._trust.may_publish(self._peer_id) and turns.is_leading(now)
        if state is None or not is_able or self._succession.find_epoch_reason(state, state.table_digest):
            self._said, self._resign_at = None, None
            return []
        said = (turns.term, state.version, state.catalogue_digests[-1])
        if said == self._said and (self._resign_at is None or now < self._resign_at):
            return []
        self._said, self._resign_at = said, None
        return self.announce(self._scribe.issue_head(state, now_ms, term=turns.term), state, now, now_ms)
