"""A member's part in probes: it signs what its training process predicts and pushes that to the coordinator."""

from __future__ import annotations

from typing import Final

from pulsenet.chain.records import Probe
from pulsenet.chain.rosters import Rosters
from pulsenet.chain.signing import encode_signed, seal
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Count, Effect, ShowToMachines
from pulsenet.node.events import Event, ReplyReceived
from pulsenet.node.machine import Seat
from pulsenet.node.mixing.events import ProbeMade, ProbeSeen
from pulsenet.node.requests import OpenRequests
from pulsenet.outer.mixing.pairing import choose_probers
from pulsenet.outer.mixing.settings import MixingSettings
from pulsenet.wire.messages import PushProbe, PushReply

RESEND_SECONDS: Final = 5.0
ROUNDS_PUSHED: Final = 2
"""An answer is given up so many rounds after its own."""

NOT_YET: Final = ("roster", "early", "revision-unknown")
"""Codes of a coordinator that may judge otherwise later."""


class Prober:
    """The newest answer of this node, until it was judged.

    Args:
        seat: The node's.
        rosters: By which rounds are mixed.
        settings: Of the run.
        courier: Whom messages can be sent to.
    """

    def __init__(self, seat: Seat, rosters: Rosters, settings: MixingSettings, courier: Courier) -> None:
        self._trust, self._ledger, self._rosters, self._settings = seat.trust, seat.ledger, rosters, settings
        self._peer_id = seat.peer_id
        self._sign = seat.sign
        self._courier = courier
        self._record: bytes | None = None
        self._round_index = -1
        self._send_at = 0.0
        self._requests: OpenRequests[None] = OpenRequests()

    def is_asked(self, round_index: int) -> bool:
        """Say whether this node answers the probe of a round."""
        known, interval = self._rosters.find(round_index), self._settings.probe_interval
        if known is None or not interval or round_index % interval or len(known.members) < 2:
            return False
        return self._peer_id in choose_probers(known.digest, round_index, known.members)

    def take(self, event: ProbeMade, now: float) -> list[Effect]:
        """Sign an answer; a second one of a round is ignored, since the first may have been shown."""
        known = self._rosters.find(event.round_index)
        if known is None or event.round_index <= self._round_index or not self.is_asked(event.round_index):
            return []
        assert self._trust.descriptor is not None
        probe = Probe(
            run_id=self._trust.run_id,
            revision=self._trust.descriptor.revision,
            peer_id=self._peer_id,
            roster=known.digest,
            round_index=event.round_index,
            batch=event.batch,
            bins=event.bins,
            answer=event.answer,
            scores=event.scores if len(event.scores) == 4 * len(known.roster.subset) else b"",
        )
        self._record = encode_signed(seal(probe, self._sign, self._peer_id))
        self._round_index, self._send_at, self._requests = event.round_index, now, OpenRequests()
        return [Count("probes", "answered")]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event about our push; anything else is ignored."""
        if self._requests.end(event) is None:
            return []
        self._send_at = now + RESEND_SECONDS
        if isinstance(event, ReplyReceived) and isinstance(event.reply, PushReply):
            if event.reply.reason not in NOT_YET:
                self._record = None
            if event.reply.reason not in ("", *NOT_YET):
                return [Count("probes", "refused")]
        return []

    def pump(self, open_round: int | None, now: float) -> list[Effect]:
        """Return the push that is due.

        Args:
            open_round: The round this node is in.
            now: Monotonic time.
        """
        mandate = self._ledger.mandate
        if self._record is None or mandate is None:
            return []
        if open_round is not None and open_round > self._round_index + ROUNDS_PUSHED:
            self._record = None
            return []
        if mandate.coordinator == self._peer_id:
            record, self._record = self._record, None
            return [ShowToMachines(ProbeSeen(record, self._peer_id))]
        self._requests.end_overdue(now)
        if self._requests or now < self._send_at or mandate.coordinator not in self._courier.connected:
            return []
        return [self._requests.add(self._courier.send(mandate.coordinator, PushProbe(self._record)), None, now)]

    def next_wake(self, now: float) -> float | None:
        """Return when the next push is due."""
        return self._send_at if self._record is not None and self._send_at > now else None
