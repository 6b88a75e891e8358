"""What every core machine offers its driver, and the rules between the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pulsenet import limits
from pulsenet.chain.ledger import Ledger
from pulsenet.chain.signing import Sign
from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId
from pulsenet.node.effects import Effect
from pulsenet.node.events import Event

Draw = Callable[[int], int]
"""``draw(n)`` returns an integer from 0 to n - 1: chance, injected so that a run can be replayed."""


def draw_backoff_seconds(draw: Draw, failure_count: int) -> float:
    """Return the wait after so many failures before: doubled each time, bounded, and jittered down by up to half."""
    delay = min(limits.RETRY_SECONDS_MAX, limits.RETRY_SECONDS_MIN * 2.0 ** min(failure_count, 10))
    return delay * (0.5 + draw(1_000) / 2_000)


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's place in a run with rounds: what its machines, and their parts, act on and sign with."""

    trust: Trust
    """The run's rules."""
    ledger: Ledger
    """Whose term it is, and the rounds."""
    peer_id: PeerId
    """The node's key."""
    sign: Sign
    """Signs with that key."""
    draw: Draw
    """Chance."""


class Machine(Protocol):
    """A sans-IO state machine.

    The driver starts a machine with one ``TimerFired``, calls it for one event at a time, and executes
    the effects of a call by ``EXECUTION_ORDER`` before it calls again for an event they caused. Each
    machine of a node has its own timer and its own request ids, so the driver keeps, per machine, the
    newest ``SetTimer`` and hands a reply only to the machine that asked. Events that name no request
    (``HeadSeen``, ``HaveSeen``, ``PeerConnected``, ``PeerLost``) go to every machine, in one order everywhere
    (:mod:`pulsenet.node.order`).
    """

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event.

        Args:
            event: What happened.
            now: Monotonic time in seconds; never falls.
            now_ms: Unix time in milliseconds, corrected by the node's clock offset.
        """
        ...
