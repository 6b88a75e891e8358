"""What the machines that act on the ledger have in common: trainers, authorities and onlookers of a run with rounds.

Nothing may be said that is not stored: after the disk refused something, whatever comes next begins with storing all
of it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final

from pulsenet.chain.ledger import LEDGER_KEY
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.node.blame import Refused, blame
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Count, Effect, SaveState, StoreRecord
from pulsenet.node.events import Event, PeerConnected, PeerLost, StoreFailed
from pulsenet.node.machine import Seat
from pulsenet.node.rounds_news import store_learnt
from pulsenet.node.timer import Timer

STORE_RETRY_SECONDS: Final = 5.0
"""Wait after the disk refused, before everything is stored again."""


class LedgerMachine(ABC):
    """A machine that hears what others say of the rounds, keeps it in the ledger, and acts on it.

    Args:
        seat: The node's; machines of one node share its rules and its ledger.
    """

    def __init__(self, seat: Seat) -> None:
        self._trust = seat.trust
        self._ledger = seat.ledger
        self._peer_id = seat.peer_id
        self._sign = seat.sign
        self._courier = Courier()
        self._timer = Timer()
        self._is_unsaved = False

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        self._timer.note(now)
        effects = self._fetch(event, now)
        if isinstance(event, StoreFailed) and event.digest is None:
            self._is_unsaved = True
            return [*effects, Count("rejected", event.reason), *self._timer.wake_by(now + STORE_RETRY_SECONDS)]
        if isinstance(event, PeerConnected):
            self._courier.connected.add(event.peer_id)
        elif isinstance(event, PeerLost):
            self._courier.connected.discard(event.peer_id)
        try:
            effects += self._take(event, now)
        except (RemoteProtocolError, TrustError) as error:
            effects += [*store_learnt(self._ledger), *self._note_refusal(event, error)]
        effects += self._go_on(now)
        if self._is_unsaved:
            self._is_unsaved = False
            effects += [StoreRecord(signed) for signed in self._ledger.records()]
            effects += [*self._store_again(), SaveState(LEDGER_KEY, self._ledger.save())]
        if self._ledger.is_changed:
            effects.append(SaveState(LEDGER_KEY, self._ledger.save()))
        return [*effects, *self._report(now), *self._timer.wake_next(self._wakes(now), now)]

    def _fetch(self, event: Event, now: float) -> list[Effect]:
        """Show an event to whatever fetches for this machine, before the machine takes it in."""
        return []

    @abstractmethod
    def _take(self, event: Event, now: float) -> list[Effect]:
        """Take in one event.

        Raises:
            RemoteProtocolError: it holds what no honest peer sends.
            TrustError: it holds what is refused.
        """

    def _note_refusal(self, event: Event, error: Refused) -> list[Effect]:
        """Return what becomes of a refused event, and of whoever sent it."""
        return blame(error, getattr(event, "source", None) or getattr(event, "peer_id", None))

    @abstractmethod
    def _go_on(self, now: float) -> list[Effect]:
        """Return what follows from where things stand now."""

    def _store_again(self) -> list[Effect]:
        """Return what a refusal of the disk may have held back, beside the ledger and its records."""
        return []

    def _report(self, now: float) -> list[Effect]:
        """Return the report, if it is news."""
        return []

    @abstractmethod
    def _wakes(self, now: float) -> Iterable[float | None]:
        """Return times at which something may be due; those that are over do not count."""
