"""Wraps a torch optimizer so that trainers train together: two lines in any loop.

::

    sync = OuterOptimizer(model, optimizer, exchange=exchange)
    for batch in data:
        loss(model, batch).backward()
        optimizer.step()
        sync.step()              # every H-th call exchanges a contribution and does the outer step
        optimizer.zero_grad()

Under ``ddp`` ``optimizer.step()`` only takes the gradients; ``sync.step()`` exchanges them and steps by their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from pulsenet.errors import ConfigError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.outer.checks import compute_norm, find_fault
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenet.training.exchange import Exchange, FinalRound, Move, Outcome, RoundResult
from pulsenet.training.gradients import GradientStepper, take_gradients
from pulsenet.training.inner import InnerOptimizer, Schedule, check_no_closure, check_no_pending, take_optimizer
from pulsenet.training.masters import adopt_masters
from pulsenet.training.outer_state import OuterState, Placement
from pulsenet.training.outer_torch import run_self_tests
from pulsenet.training.ranks import RankNews, is_distributed, is_first_rank, share_news, share_object
from pulsenet.training.round_report import RoundReport as RoundReport
from pulsenet.training.state_dict import Counters, pack_state, unpack_state
from pulsenet.training.stepper import Stepper

WARMUP_STEPS_DEFAULT: Final = 8
"""Inner steps of warm-up after a reset: Adam's second moments need some to be worth dividing by."""


class OuterOptimizer:
    """Runs the outer algorithm of a run around an inner optimizer.

    PULSELoCo, DiLoCo or DDP, as the run's descriptor says; proto/spec-outer.md has the arithmetic. Masters, residual
    and momentum are FP32 in the model's own shapes: a BF16 model gets masters, and computes with their cast.
    Under ``torch.distributed`` every rank makes one and calls it alike; rank 0 exchanges and broadcasts.

    Args:
        model: Plain or wrapped by ``torch.compile`` or DistributedDataParallel.
        optimizer: Steps the model's parameters; its state is kept across rounds and reset on a resync.
        exchange: Way to the other trainers; ``None`` on ranks other than 0.
        theta: Where the masters at the round's start lie: ``"device"``, ``"host"`` or a file to map.
        residual: The same for what the gate held back.
        momentum: The same for the outer momentum.
        schedule: Factor on the inner learning rate by round index: all trainers and every joiner then agree on it.
        warmup_steps: Inner steps from a reset to the full learning rate.
        on_round: Called after each exchange on rank 0, when its version has been handed over for publishing.

    Raises:
        ConfigError: The model or optimizer cannot take part; the message says what to do.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        exchange: Exchange | None,
        theta: Placement = "device",
        residual: Placement = "device",
        momentum: Placement = "device",
        schedule: Schedule | None = None,
        warmup_steps: int = WARMUP_STEPS_DEFAULT,
        on_round: Callable[[RoundReport], None] = lambda report: None,
    ) -> None:
        self._pending: Contribution | None = None
        self._fault = ""
        """Why the newest own contribution was not fit to be sent."""
        self._gradients: tuple[Entries, ...] | None = None
        """Under ``ddp``: what the newest ``optimizer.step()`` would have stepped by."""
        self._model = model
        inner = take_optimizer(optimizer)
        self._masters = adopt_masters(model, inner, check_step=self._check_step)
        self._inner = InnerOptimizer(
            inner, schedule=schedule, warmup_steps=warmup_steps, before_step=self._take_gradients
        )
        self._exchange = exchange
        self._on_round = on_round
        self._counters = Counters()
        self._inner_step = 0
        self._extra_inner_steps = 0
        """Beyond those of a round, until the next try to contribute."""
        self._has_caught_up = False
        """Whether this trainer has asked, since it started or was restored, where the run is."""
        self._is_awaited = False
        """On other ranks: whether rank 0 has an exchange to finish."""
        self._settings = OuterSettings()
        self._stepper = Stepper(self._masters, self._settings, None)
        if is_first_rank():
            self._open(theta, residual, momentum)
        elif exchange is not None:
            raise ConfigError("only rank 0 exchanges: pass exchange=None on the other ranks")
        self._share_settings()

    @property
    def settings(self) -> OuterSettings:
        """The run's algorithm and constants."""
        return self._settings

    @property
    def round_index(self) -> int:
        """Rounds stepped so far."""
        return self._stepper.round_index

    @property
    def inner_step(self) -> int:
        """Inner steps since the round began."""
        return self._inner_step

    @property
    def state_root(self) -> Digest:
        """Root of theta, momentum and round index; equal on all trainers of a round.

        Raises:
            UnavailableError: The state is being restored: call :meth:`step` again.
        """
        root = self._stepper.state_root
        if root is None:
            raise UnavailableError("the outer state is not whole until it is restored: call sync.step() again")
        return root

    @property
    def counters(self) -> Counters:
        """What happened since the run began, checkpoints included."""
        return self._counters

    @property
    def state(self) -> OuterState:
        """The three FP32 copies.

        Raises:
            LocalProtocolError: this rank has none, or the algorithm is ``ddp``, whose state are the masters.
        """
        return self._stepper.state

    def step(self) -> RoundReport | None:
        """Say that an inner step is done; every H-th time exchange and step the masters of the whole run.

        The first call also asks where the run is: a joiner goes there, and its first inner step is lost.

        Returns:
            What the exchange did, on rank 0; ``None`` between exchanges and on other ranks.

        Raises:
            ConfigError: The parameters are not those of the beginning any more.
            UnavailableError: The round's receipt did not come in time, or the exchange is away. Nothing is lost: call
                again before the next ``optimizer.step()``.
        """
        if not self._is_unsettled:
            if self._is_ddp and self._gradients is None:
                # The inner step was skipped, as a loss scaler does: there is nothing to exchange.
                return None
            if not self._has_caught_up and self._catch_up():
                self._counters.inner_steps += 1
                self._counters.wasted_inner_steps += 1
                return None
            self._inner_step = 1 if self._is_ddp else self._inner_step + 1
            self._counters.inner_steps += 1
            if not self._is_ddp and self._inner_step < self._settings.inner_steps + self._extra_inner_steps:
                return None
        return self._synchronize()

    def begin_round(self) -> Contribution | None:
        """Form this round's contribution and hold it as pending; nothing else changes.

        Returns:
            ``None`` if its own content is not fit to be sent; then finish with a ``rejected`` result.
        """
        if self._pending is not None:
            return self._pending
        entries, self._gradients = self._gradients, None
        if entries is None:
            entries = tuple(self._stepper.gate(index, local) for index, local in enumerate(self._masters.tensors))
        contribution = Contribution(self.round_index, self.state_root, max(1, self._inner_step), entries)
        fault = find_fault(contribution, self._stepper.expected())
        if fault is not None:
            self._fault = fault.code
            return None
        self._pending = contribution
        return contribution

    def finish_round(self, result: RoundResult) -> RoundReport:
        """Make the moves that a round's outcome asks for, and restart the local masters.

        Raises:
            LocalProtocolError: moves that do not go on from here.
            UnavailableError: the exchange went away before a move was whole; call :meth:`step` again.
        """
        sent, resyncs_before, inner_steps = self._pending, self._counters.resyncs, self._inner_step
        if result.outcome is Outcome.DEFERRED:
            self._pending = None
            self._counters.deferred += 1
            self._extra_inner_steps = inner_steps + result.inner_steps - self._settings.inner_steps
            if self._is_ddp:
                self._counters.wasted_inner_steps += inner_steps
                self._restart()
            return self._report(result, sent, move_count=0, resynced=False)
        if result.outcome is Outcome.REJECTED:
            self._reset_inner()
        move_count, error = self._make_moves(result.rounds)
        # What was moved is whole, so training goes on from there; where the run is now is asked again at the next step.
        self._has_caught_up = error is None
        self._pending = None
        if result.outcome is Outcome.COUNTED:
            self._counters.counted += 1
        elif result.outcome is Outcome.REJECTED:
            self._counters.rejected += 1
        else:
            self._counters.missed += 1
        # Nothing keeps a gradient that was not counted.
        wasted = (Outcome.REJECTED, Outcome.DROPPED, *((Outcome.MISSED,) if self._is_ddp else ()))
        if result.outcome in wasted:
            self._counters.wasted_inner_steps += inner_steps
        self._restart()
        return self._report(result, sent, move_count=move_count, resynced=self._counters.resyncs > resyncs_before)

    def catch_up(self) -> int:
        """Make every move of the run since this trainer's state; inner steps taken meanwhile are wasted.

        Entries that this trainer sent in those rounds leave the residual: they are in theta now. Call it after
        :meth:`load_state_dict`, or on a joiner; the first :meth:`step` does otherwise.

        Returns:
            Rounds stepped.

        Raises:
            UnavailableError: The exchange is away. What was done stays done; call again.
        """
        before = self.round_index
        self._catch_up()
        return self.round_index - before

    def state_dict(self) -> dict[str, Any]:
        """Return everything the rounds need to go on bit by bit, beside the model's and the optimizer's own state.

        Tensors are shared, not copied. On ranks other than 0 only the position is kept.

        Raises:
            UnavailableError: The state is being restored: call :meth:`step` again, then save.
        """
        _ = self.state_root
        return pack_state(
            table=self._masters.table,
            state=self._stepper.held,
            masters=self._masters.separate,
            pending=self._pending,
            numbers={
                "round_index": self.round_index,
                "inner_step": self._inner_step,
                "extra_inner_steps": self._extra_inner_steps,
                "warmup_left": self._inner.warmup_left,
                "is_unsettled": int(self._is_unsettled),
            },
            counters=self._counters,
        )

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; load the model and the optimizer first.

        Raises:
            ConfigError: the state is of other masters.
        """
        numbers, pending, self._counters = unpack_state(
            saved,
            table=self._masters.table,
            state=self._stepper.held,
            masters=self._masters.separate,
        )
        self._stepper.round_index, self._inner_step = numbers["round_index"], numbers["inner_step"]
        self._extra_inner_steps = numbers["extra_inner_steps"]
        self._inner.take_warmup(numbers["warmup_left"])
        self._inner.round_index = self._period_of(self.round_index)
        is_unsettled = pending is not None or bool(numbers["is_unsettled"])
        # Whoever exchanges finishes what waits; the others follow, as they would have done.
        self._pending, self._is_awaited = (pending, False) if is_first_rank() else (None, is_unsettled)
        self._gradients, self._has_caught_up = None, False
        self._masters.write_parameters()
        if self._stepper.holds_state:
            self._stepper.refresh_root()
            self._stepper.is_ahead = is_unsettled and pending is None

    @property
    def _is_unsettled(self) -> bool:
        """Whether an exchange broke off: inner steps wait until it is finished."""
        return self._pending is not None or self._stepper.is_ahead or self._is_awaited

    @property
    def _is_ddp(self) -> bool:
        return self._settings.algorithm is Algorithm.DDP

    def _period_of(self, round_index: int) -> int:
        """Return what the schedule and publishing count: rounds, or as many inner steps of ``ddp`` as a round has."""
        return round_index // self._settings.inner_steps if self._is_ddp else round_index

    def _check_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._masters.is_stepping:
            check_no_pending(self._is_unsettled or self._gradients is not None)
            if self._is_ddp:
                check_no_closure(args, kwargs)

    def _take_gradients(self) -> None:
        if self._is_ddp and not self._masters.is_stepping:
            self._gradients = take_gradients(self._masters, self._inner.optimizer)

    def _reset_inner(self) -> None:
        """Let the inner optimizer begin anew, where its state is not part of what all trainers hold."""
        if not self._is_ddp:
            self._inner.reset()

    def _open(self, theta: Placement, residual: Placement, momentum: Placement) -> None:
        if self._exchange is None or not hasattr(self._exchange, "submit"):
            raise ConfigError("OuterOptimizer needs an exchange on rank 0; a mixer is for GossipOptimizer")
        self._settings = self._exchange.settings
        if self._is_ddp:
            self._stepper = GradientStepper(self._masters, self._settings, self._inner)
        else:
            copies = OuterState(
                self._masters.table, self._masters.tensors, theta=theta, residual=residual, momentum=momentum
            )
            self._stepper = Stepper(self._masters, self._settings, copies)
        self._exchange.open(self._masters.table, run_self_tests(self._masters.tensors), self._stepper)

    def _share_settings(self) -> None:
        """Let every rank know how many inner steps a round has."""
        if not is_distributed():
            return
        named = share_object((str(self._settings.algorithm), self._settings.to_constants()))
        self._settings = OuterSettings.from_constants(*named)
        if self._is_ddp:
            raise ConfigError("the algorithm ddp has one rank a trainer: run one process a trainer")

    def _synchronize(self) -> RoundReport | None:
        self._masters.check_model(self._model)
        if not is_first_rank():
            self._follow(share_news(None, self._masters.tensors))
            return None
        resets_before, index_before = self._inner.reset_count, self.round_index
        report = None
        try:
            report = self._exchange_contribution()
        finally:
            restarted = report is not None and report.outcome is not Outcome.DEFERRED
            self._tell_ranks(failed=report is None, restarted=restarted, resets_before=resets_before)
        if self._period_of(self.round_index) != self._period_of(index_before):
            assert self._exchange is not None
            self._exchange.note_residual(report.residual_norm)
            self._exchange.publish(self._model, self.round_index)
        self._on_round(report)
        return report

    def _exchange_contribution(self) -> RoundReport:
        assert self._exchange is not None
        if self._stepper.is_torn:
            # A move broke off: what follows begins with another state of the run.
            return self.finish_round(RoundResult(Outcome.DROPPED, self._exchange.catch_up(), "interrupted"))
        if self._stepper.is_ahead:
            # What follows a whole move broke off: the masters still hold work that the move settled.
            self._pending = None
            return self.finish_round(RoundResult(Outcome.MISSED, self._exchange.catch_up(), "interrupted"))
        contribution = self.begin_round()
        if contribution is None:
            result = self._exchange.abstain(self.round_index, self._fault)
            result = replace(result, outcome=Outcome.REJECTED, reason=self._fault)
        else:
            result = self._exchange.submit(contribution)
        return self.finish_round(result)

    def _tell_ranks(self, *, failed: bool, restarted: bool, resets_before: int) -> None:
        news = RankNews(
            failed=failed,
            restarted=restarted,
            reset=self._inner.reset_count > resets_before,
            round_index=self.round_index,
            inner_step=self._inner_step,
            extra_inner_steps=self._extra_inner_steps,
            has_caught_up=self._has_caught_up,
            is_unsettled=self._is_unsettled,
        )
        share_news(news, self._masters.tensors)

    def _follow(self, news: RankNews) -> None:
        """Do on another rank what rank 0 did.

        Raises:
            UnavailableError: it could not finish.
        """
        self._stepper.round_index, self._inner_step = news.round_index, news.inner_step
        self._inner.round_index, self._extra_inner_steps = news.round_index, news.extra_inner_steps
        self._has_caught_up, self._is_awaited = news.has_caught_up, news.is_unsettled
        if news.reset:
            self._inner.reset()
        if news.restarted:
            self._masters.write_parameters()
        news.check_finished()

    def _catch_up(self) -> bool:
        """Make the moves of :meth:`catch_up` on every rank; tell whether there were any."""
        if not is_first_rank():
            news = share_news(None, self._masters.tensors)
            self._follow(news)
            return news.restarted
        resets_before, has_moved, error = self._inner.reset_count, False, None
        failed = True
        try:
            has_moved, error = self._make_missed_moves()
            failed = error is not None
            self._has_caught_up = not failed
        finally:
            self._tell_ranks(failed=failed, restarted=has_moved, resets_before=resets_before)
        if error is not None:
            raise error
        return has_moved

    def _make_missed_moves(self) -> tuple[bool, UnavailableError | None]:
        assert self._exchange is not None
        if self._pending is not None:
            # It waits for its receipt: sync.step() submits it again, and makes these moves with it.
            return False, None
        inner_steps = self._inner_step
        is_settled = self._stepper.is_ahead and not self._stepper.is_torn
        move_count, error = self._make_moves(self._exchange.catch_up())
        if move_count and not is_settled:
            if self._counters.inner_steps == 0:
                # A joiner: the inner optimizer's state is fresh, and the masters are far from where it began.
                self._reset_inner()
            self._counters.wasted_inner_steps += inner_steps
        if move_count or is_settled:
            self._restart()
        return move_count > 0 or is_settled, error

    def _make_moves(self, moves: Iterable[Move]) -> tuple[int, UnavailableError | None]:
        """Make moves in order; return how many, and the error that kept the exchange from naming a further one.

        The masters hold work of the first one's round exactly if a contribution is pending.

        Raises:
            UnavailableError: before the first move, or inside one.
        """
        move_count, has_work = 0, self._pending is not None
        try:
            for move in moves:
                if isinstance(move, FinalRound):
                    self._stepper.step(move, has_work=has_work)
                    is_given_up = move.outcome is Outcome.DROPPED and not self._is_ddp
                else:
                    self._stepper.restore(move)
                    is_given_up = move.drops_residual
                    self._reset_inner()
                has_work, self._pending = False, None
                move_count += 1
                if is_given_up:
                    self._counters.resyncs += 1
                    self._reset_inner()
        except UnavailableError as error:
            if self._stepper.is_torn or move_count == 0:
                raise
            return move_count, error
        return move_count, None

    def _restart(self) -> None:
        """Start a round: local masters from theta, no inner steps and no gradient yet."""
        self._stepper.restart()
        self._gradients = None
        self._inner_step = self._extra_inner_steps = 0
        self._inner.round_index = self._period_of(self.round_index)

    def _report(
        self, result: RoundResult, sent: Contribution | None, *, move_count: int, resynced: bool
    ) -> RoundReport:
        return RoundReport(
            round_index=self.round_index,
            outcome=result.outcome,
            reason=result.reason,
            contributor_count=self._stepper.contributor_count if move_count else 0,
            sent_count=0 if sent is None else sent.sent_count,
            element_count=self._masters.table.element_count,
            payload_size_bytes=result.payload_size_bytes,
            contribution_norm=0.0 if sent is None else compute_norm(sent),
            residual_norm=self._stepper.residual_norm(),
            resynced=resynced,
        )
