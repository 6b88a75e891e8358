"""Rounds between machines: a training process meets the others through the daemon beside it.

::

    exchange = pulsenet.join_rounds()
    sync = OuterOptimizer(model, optimizer, exchange=exchange)

The machines in the daemon decide what becomes of the work and which moves the state makes; here their orders
(:mod:`pulsenet.local.rounds_protocol`) are carried out. The process speaks to the daemon inside the calls of its loop
only, so an order waits for the next of them. A daemon that was restarted is told the state anew, and nothing is lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pulsenet.errors import ConfigError, RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.local import rounds_protocol as local
from pulsenet.local.client import Client
from pulsenet.local.directories import RUN_NAME_DEFAULT
from pulsenet.local.rounds_client import RoundsConnection
from pulsenet.outer.contribution import Contribution
from pulsenet.outer.floats import fp32_to_bits
from pulsenet.outer.mixing.settings import ALGORITHM as GOSSIP
from pulsenet.outer.settings import OuterSettings
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.daemon_link import (
    CONNECT_SECONDS_MAX,
    RECONNECT_PAUSE_SECONDS,
    DaemonEnd,
    reach_daemon,
)
from pulsenet.training.exchange import FinalRound, Move, Outcome, RoundResult, StateView
from pulsenet.training.publisher import Publisher
from pulsenet.training.round_work import RoundWork
from pulsenet.training.snapshot import ComputeDtype

ROUND_SECONDS_MAX: Final = 600.0
"""How long a trainer waits without any order before it raises: a round lasts as long as its slowest inner steps."""

RECONNECT_SECONDS_MAX: Final = 60.0
"""A daemon that is restarted reads its store and is back by then."""

ORDER_WAIT_SECONDS: Final = 20.0
"""Asked for at once: a process that is interrupted meanwhile leaves no long wait behind."""

LINGER_SECONDS: Final = 3.0
"""A trainer that just started waits so long for news of rounds that are over, before it takes the first one as open."""


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """A move that the daemon ordered and that can be made."""

    move: Move
    reason: str


class _Patience:
    """How long a wait may still last."""

    def __init__(self, order_seconds: float, reconnect_seconds: float) -> None:
        self._order_seconds = order_seconds
        self._reconnect_seconds = reconnect_seconds
        self._give_up_at = time.monotonic() + order_seconds
        self._heard_at = time.monotonic()
        self._failure = ""

    def note_order(self, failure: str) -> None:
        """An order was carried out, so the run is alive; one that failed is ordered again, and is no sign of that."""
        self._failure = failure
        if not failure:
            self._give_up_at = time.monotonic() + self._order_seconds

    def note_answer(self) -> None:
        """The daemon is there; raise if the run has been silent for too long."""
        self._heard_at = time.monotonic()
        if self._heard_at >= self._give_up_at:
            silent = f"no order came in {self._order_seconds:.0f} s: the round has no final receipt, or no state came"
            raise _RunSilentError(self._failure or silent + "; 'pulsenet status' says what the daemon waits for")

    def note_away(self, error: UnavailableError) -> None:
        """The daemon is away; raise if it has been for too long."""
        if time.monotonic() >= self._heard_at + self._reconnect_seconds:
            raise error
        time.sleep(min(RECONNECT_PAUSE_SECONDS, self._reconnect_seconds))

    @property
    def wait_seconds(self) -> float:
        """How long to ask for an order."""
        return max(0.0, min(ORDER_WAIT_SECONDS, self._give_up_at - time.monotonic()))


class _RunSilentError(UnavailableError):
    """The daemon is there, but nothing comes from the run."""


class DaemonExchange(DaemonEnd[RoundsConnection]):
    """An :class:`pulsenet.training.Exchange` over a trainer daemon. Make one with :func:`join_rounds`.

    Args:
        client: Reaches the daemon; owned by this object.
        publisher: Hands each round's weights over; only authorities commit them. ``None`` never publishes.
        spool_directory: Where the encoded contributions of a round lie while it is stepped; ``None`` for the
            system's place for temporary files.
        order_seconds: How long to wait without any order.
        reconnect_seconds: How long to wait for a daemon that is away.
        linger_seconds: How long :meth:`catch_up` waits for news once the daemon would let inner steps begin.

    Raises:
        ConfigError: The daemon, the run or its algorithm has no rounds for this process; the message says what to do.
        UnavailableError: The daemon does not answer.
    """

    def __init__(
        self,
        client: Client,
        *,
        publisher: Publisher | None = None,
        spool_directory: Path | None = None,
        order_seconds: float = ROUND_SECONDS_MAX,
        reconnect_seconds: float = RECONNECT_SECONDS_MAX,
        linger_seconds: float = LINGER_SECONDS,
    ) -> None:
        super().__init__(
            client,
            publisher,
            RoundsConnection,
            connect_seconds=min(CONNECT_SECONDS_MAX, reconnect_seconds),
            name="pulsenet-rounds",
        )
        self._spool_directory = spool_directory
        self._order_seconds = order_seconds
        self._reconnect_seconds = reconnect_seconds
        self._linger_seconds = linger_seconds
        self._masters: tuple[ParameterTable, Digest] | None = None
        self._state: StateView | None = None
        self._work: RoundWork | None = None
        self._is_open = False
        """Whether the rounds are open on the connection."""
        self._told: local.HoldState | None = None
        """What the daemon knows of the state on this connection."""
        self._offered: Contribution | local.AbstainRound | None = None
        """What was offered on this connection, if it is not settled."""
        self._may_go_on = False
        """Whether the daemon said of the state held that its inner steps may go on, and nothing since."""
        self._refusal = ""
        """Why the daemon did not take the newest contribution."""
        self._payload_size_bytes = 0
        """Of the newest contribution as it travels."""
        self._is_moving = False
        """Whether a move was given out and not reported."""
        with self._closed_on_failure():
            reply = self._ask_settings()
            self._peer_id = reply.peer_id
            if reply.algorithm == GOSSIP:
                raise ConfigError("this run mixes instead of closing rounds: use GossipOptimizer(mixer=join_mixing())")
            self._settings = OuterSettings.from_constants(reply.algorithm, reply.constants)

    @property
    def settings(self) -> OuterSettings:
        """See :class:`pulsenet.training.Exchange`, as below."""
        return self._settings

    def open(self, table: ParameterTable, self_test: Digest, state: StateView) -> None:
        """Take part with these masters."""
        self._masters, self._state = (table, self_test), state
        self._work = RoundWork(
            table,
            self._settings,
            state,
            self._peer_id,
            spool_directory=self._spool_directory,
            run_blocks=self._threads.map,
        )
        patience = _Patience(self._order_seconds, self._reconnect_seconds)
        while True:
            try:
                # What state it holds is told when it is first asked for: a checkpoint may be loaded before.
                self._open_rounds(table, self_test)
                return
            except UnavailableError as error:
                self._drop()
                patience.note_away(error)

    def submit(self, contribution: Contribution) -> RoundResult:
        """Store and send a contribution, and wait for its round's final receipt."""
        found = self._await(contribution)
        if found is None:
            reason, self._refusal = self._refusal or "silent", ""
            return RoundResult(Outcome.DEFERRED, reason=reason, inner_steps=self._settings.inner_steps)
        outcome, reason = Outcome.DROPPED, found.reason
        if isinstance(found.move, FinalRound):
            outcome = found.move.outcome
            reason = "" if outcome is Outcome.COUNTED else found.reason or "late"
        return RoundResult(outcome, self._moves(found), reason, payload_size_bytes=self._payload_size_bytes)

    def abstain(self, round_index: int, reason: str) -> RoundResult:
        """Take part without a contribution; the round's inner steps are run again, unless it is over."""
        found = self._await(local.AbstainRound(round_index, local.as_code(reason)))
        if found is None:
            return RoundResult(Outcome.REJECTED, reason=reason)
        return RoundResult(Outcome.REJECTED, self._moves(found), reason)

    def catch_up(self) -> Iterator[Move]:
        """Yield the moves to the newest state of the run."""
        found = self._await(None, linger_seconds=self._linger_seconds)
        if found is not None:
            yield from self._moves(found)

    def note_residual(self, norm: float) -> None:
        """Tell the daemon, which shows it in its status and metrics."""
        if self._connection is None:
            return
        try:
            self._connection.tell(local.TellResidual(fp32_to_bits(norm)))
        except (UnavailableError, RemoteProtocolError):
            self._drop()

    # Orders

    def _await(
        self, work: Contribution | local.AbstainRound | None, *, linger_seconds: float = 0.0
    ) -> _Prepared | None:
        """Carry out orders until one is a move; ``None`` if inner steps go on.

        Args:
            work: What this trainer has for its round; offered once a connection.
            linger_seconds: How long to listen on after inner steps may go on.
        """
        patience = _Patience(self._order_seconds, self._reconnect_seconds)
        go_on_until: float | None = None
        while True:
            try:
                connection = self._ready()
                if work is not None and self._offered is not work:
                    self._offer(connection, work)
                if self._may_go_on and go_on_until is None:
                    go_on_until = time.monotonic() + linger_seconds
                seconds = patience.wait_seconds if go_on_until is None else max(0.0, go_on_until - time.monotonic())
                order = connection.await_order(seconds)
                if isinstance(order, local.GoOn):
                    self._offered, self._may_go_on = None, True
                    if linger_seconds <= 0.0:
                        return None
                elif order is not None:
                    prepared = self._carry_out(connection, order)
                    if isinstance(prepared, _Prepared):
                        return prepared
                    patience.note_order(prepared)
                elif go_on_until is not None:
                    return None
                patience.note_answer()
            except _RunSilentError:
                raise
            except UnavailableError as error:
                self._drop()
                go_on_until = None
                patience.note_away(error)
            except BaseException:
                # Also when the user interrupts: an order that was given out and is not answered is given again only
                # to a process that begins anew.
                self._drop()
                raise

    def _offer(self, connection: RoundsConnection, work: Contribution | local.AbstainRound) -> None:
        assert self._work is not None
        self._refusal = ""
        if isinstance(work, local.AbstainRound):
            connection.tell(work)
        else:
            try:
                offer = self._work.put_contribution(connection, work)
                self._payload_size_bytes = offer.encoded_size_bytes
                connection.tell(offer)
            except StorageError as error:
                self._refusal = error.reason
                connection.tell(local.AbstainRound(work.round_index, local.as_code(error.reason)))
        self._offered, self._may_go_on = work, False

    def _carry_out(self, connection: RoundsConnection, order: local.Order) -> _Prepared | str:
        """Answer an order, or return the move that it asks for, or why that cannot be made."""
        assert self._work is not None
        assert self._state is not None
        if isinstance(order, local.CheckOrder):
            connection.tell(self._work.check(connection, order))
        elif isinstance(order, local.AnchorOrder):
            connection.tell(self._work.put_anchor(connection, order))
        elif isinstance(order, local.SumOrder):
            connection.tell(self._work.sum_slices(connection, order))
        elif isinstance(order, local.StepOrder):
            root = self._state.state_root
            if order.round_index + 1 == self._state.round_index and root is not None:
                # Done before; it is only said again.
                connection.tell(local.Stepped(self._state.round_index, root))
                return ""
            move, reason = self._work.prepare_step(connection, order)
            if isinstance(move, FinalRound):
                return _Prepared(move, reason)
            connection.tell(move)
            return f"round {order.round_index} is not stepped: {reason or move.reason}"
        elif isinstance(order, local.RestoreOrder):
            restoration = self._work.prepare_restore(connection, order)
            if not isinstance(restoration, local.RestoreRefused):
                return _Prepared(restoration, "outdated")
            connection.tell(restoration)
            return f"the state anchor of round {order.round_index} is not restored: {restoration.reason}"
        return ""

    def _moves(self, prepared: _Prepared) -> Iterator[Move]:
        """Yield a move and those after it, and report each when the next is asked for."""
        found: _Prepared | None = prepared
        while found is not None:
            self._is_moving = True
            yield found.move
            self._is_moving = False
            self._report(found.move)
            found = self._await(None)

    def _report(self, move: Move) -> None:
        assert self._work is not None
        assert self._state is not None
        self._work.forget_step()
        self._offered, self._may_go_on = None, False
        round_index, root = self._state.round_index, self._state.state_root
        assert root is not None
        if self._connection is None:
            return
        kind = local.Stepped if isinstance(move, FinalRound) else local.Restored
        try:
            self._connection.tell(kind(round_index, root))
            self._told = local.HoldState(round_index, root)
        except UnavailableError:
            # Whoever answers next is told the state itself.
            self._drop()

    # The connection

    def _ready(self) -> RoundsConnection:
        """Return a connection whose daemon knows this trainer and its state."""
        assert self._masters is not None
        assert self._state is not None
        if self._is_moving:
            # The move broke off: the order is as good as never given.
            self._is_moving = False
            self._drop()
        connection = self._connection
        if connection is None or not self._is_open:
            connection = self._open_rounds(*self._masters)
        root = self._state.state_root
        held = local.HoldState(None, None) if root is None else local.HoldState(self._state.round_index, root)
        if held != self._told:
            connection.tell(held)
            self._told, self._offered, self._may_go_on = held, None, False
        return connection

    def _open_rounds(self, table: ParameterTable, self_test: Digest) -> RoundsConnection:
        """Open the rounds on a connection, a new one if need be."""
        connection = self._take_part(
            self._settings, OuterSettings.from_constants, lambda line: line.open(table, self_test)
        )
        self._is_open = True
        return connection

    def _drop(self) -> None:
        """Close the connection: for the daemon this process is gone, until it says what it holds."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._told = self._offered = None
        self._is_open = self._may_go_on = False
        if self._work is not None:
            self._work.forget_step()


def join_rounds(
    run: str = RUN_NAME_DEFAULT,
    data_dir: Path | str | None = None,
    *,
    publish: bool = True,
    compute_dtype: ComputeDtype | None = "bf16",
    keep: tuple[str, ...] = (),
    spool_directory: Path | None = None,
    order_seconds: float = ROUND_SECONDS_MAX,
    reconnect_seconds: float = RECONNECT_SECONDS_MAX,
) -> DaemonExchange | None:
    """Take part in the rounds of a run through the trainer daemon on this machine (``pulsenet join --role trainer``).

    Args:
        run: Name of the run; the daemon's data directory is found by it.
        data_dir: The daemon's ``--data-dir``, if it was given one.
        publish: Whether each round's weights become the run's next version, where this node is an authority: one that
            does not coordinate the run keeps the version ready.
        compute_dtype: As in :func:`pulsenet.attach_publisher`, for those versions.
        keep: As there.
        spool_directory: Where the encoded contributions of a round lie while it is stepped.
        order_seconds: How long to wait without any order before ``UnavailableError``.
        reconnect_seconds: How long to wait for a daemon that is away.

    Returns:
        What ``OuterOptimizer`` takes as its exchange: ``None`` on ranks other than 0 of ``torch.distributed``.

    Raises:
        ConfigError: No daemon is there, or its run has no rounds for this process; the message says what to do.
        UnavailableError: A daemon should be there, but does not answer.
    """
    reached = reach_daemon(run, data_dir, publish=publish, compute_dtype=compute_dtype, keep=keep)
    if reached is None:
        return None
    client, publisher = reached
    return DaemonExchange(
        client,
        publisher=publisher,
        spool_directory=spool_directory,
        order_seconds=order_seconds,
        reconnect_seconds=reconnect_seconds,
    )
