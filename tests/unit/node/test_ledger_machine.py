"""What every machine on the ledger does: hear who can be reached, judge, and store again what the disk refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.errors import TrustError
from pulsenet.node.effects import Count, Effect, SaveState, SendRequest, SetTimer, StoreRecord, StrikePeer
from pulsenet.node.events import (
    ContributionSeen,
    Event,
    PeerConnected,
    PeerLost,
    ReceiptSeen,
    StoreFailed,
    TermSeen,
    TimerFired,
)
from pulsenet.node.ledger_machine import STORE_RETRY_SECONDS, LedgerMachine
from pulsenet.wire.messages import GetHead


class Caller(LedgerMachine):
    """Takes terms and contributions, calls whoever can be reached each time, and wants to be woken at 30 s."""

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case TermSeen(votes, _):
                self._ledger.accept_mandate(votes)
            case ContributionSeen(_, _):
                raise TrustError("untrusted", "of nobody's")
            case ReceiptSeen():
                self._ledger.accept_mandate(event.votes)
                raise TrustError("mismatch", "after something was learnt")
        return []

    def _go_on(self, now: float) -> list[Effect]:
        return self._courier.send_to_connected(GetHead())

    def _wakes(self, now: float) -> list[float | None]:
        return [None, now, 30.0]


def make(run: Any) -> Caller:
    trust = run.trust()
    return Caller(run.seat(run.third, trust, Ledger(trust)))


def saved(effects: list[Effect]) -> list[str]:
    return [effect.key for effect in effects if isinstance(effect, SaveState)]


def test_it_knows_who_can_be_reached_and_is_woken_when_it_wants(make_run: Callable[..., Any]) -> None:
    run = make_run()
    machine, peer_id = make(run), run.second.peer_id
    called, timer = machine.handle(PeerConnected(peer_id, (), outbound=True), 0.0, 0)
    assert isinstance(called, SendRequest)
    assert called.peer_id == peer_id
    assert timer == SetTimer(30.0)
    assert machine.handle(PeerLost(peer_id, "closed"), 1.0, 0) == []
    assert machine.handle(TimerFired(), 30.0, 0) == []


def test_what_breaks_the_specification_is_struck_and_what_is_refused_is_counted(make_run: Callable[..., Any]) -> None:
    run = make_run()
    machine, peer_id = make(run), run.second.peer_id
    effects = machine.handle(TermSeen((b"rubbish",), peer_id), 30.0, 0)
    assert effects == [Count("rejected", "schema"), StrikePeer(peer_id, "schema")]
    assert machine.handle(ContributionSeen(b"", peer_id), 30.0, 0) == [Count("rejected", "untrusted")]


def test_what_was_learnt_is_saved_even_before_a_refusal(make_run: Callable[..., Any]) -> None:
    run = make_run()
    machine = make(run)
    assert saved(machine.handle(TermSeen((run.vote(run.publisher),), None), 0.0, 0)) == [LEDGER_KEY]
    assert saved(machine.handle(TimerFired(), 1.0, 0)) == []
    machine = make(run)
    effects = machine.handle(ReceiptSeen(b"", (run.vote(run.publisher),), run.second.peer_id), 0.0, 0)
    assert Count("rejected", "mismatch") in effects
    assert saved(effects) == [LEDGER_KEY]


def test_after_a_full_disk_everything_is_stored_again_before_anything_is_said(make_run: Callable[..., Any]) -> None:
    machine = make(make_run())
    assert machine.handle(StoreFailed(None, "enospc"), 0.0, 0) == [
        Count("rejected", "enospc"),
        SetTimer(STORE_RETRY_SECONDS),
    ]
    effects = machine.handle(TimerFired(), STORE_RETRY_SECONDS, 0)
    assert saved(effects) == [LEDGER_KEY]
    assert not [effect for effect in effects if isinstance(effect, StoreRecord)]
    assert saved(machine.handle(TimerFired(), STORE_RETRY_SECONDS, 0)) == []


def test_a_chunk_that_was_not_stored_is_its_fetchers(make_run: Callable[..., Any]) -> None:
    run = make_run()
    assert make(run).handle(StoreFailed(run.run_id, "enospc"), 0.0, 0) == [SetTimer(30.0)]
