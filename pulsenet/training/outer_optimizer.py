"""Wraps a torch optimizer so that trainers train together: two lines in any loop.

::

    sync = OuterOptimizer(model, optimizer, exchange=exchange)
    for batch in data:
        loss(model, batch).backward()
        optimizer.step()
        sync.step()              # every H-th call exchanges a contribution and does the outer step
        optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from pulsenet.errors import ConfigError, LocalProtocolError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.outer.checks import Expected, FaultCode, compute_norm, find_fault
from pulsenet.outer.contribution import Contribution
from pulsenet.outer.floats import FP32s
from pulsenet.outer.self_test import SELF_TEST_DIGEST, run_self_test
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenet.training.exchange import Exchange, FinalRound, Outcome, RoundResult, StateAnchor
from pulsenet.training.gradients import STATE_ROOT, share_gradients
from pulsenet.training.inner import InnerOptimizer, Schedule, check_no_pending, unwrap_optimizer
from pulsenet.training.masters import adopt_masters
from pulsenet.training.outer_state import OuterState, Placement
from pulsenet.training.outer_torch import run_device_self_test
from pulsenet.training.ranks import RankNews, is_distributed, is_first_rank, share_news
from pulsenet.training.state_dict import Counters, pack_state, unpack_state

WARMUP_STEPS_DEFAULT: Final = 8
"""Inner steps of warm-up after a reset: Adam's second moments need some to be worth dividing by."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one exchange did to this trainer."""

    round_index: int
    """The round this trainer is in now."""
    outcome: Outcome
    reason: str
    """Stable code, unless counted."""
    contributor_count: int
    """Contributions in the newest round stepped; 0 if none was."""
    sent_count: int
    """Entries of the own contribution."""
    element_count: int
    contribution_norm: float
    residual_norm: float
    """After the round."""
    resynced: bool
    """Too many rounds were missed, or the state differed: the residual was given up."""

    @property
    def density(self) -> float:
        """Sent entries over all entries."""
        return self.sent_count / self.element_count if self.element_count else 0.0


class OuterOptimizer:
    """Runs the outer algorithm of a run around an inner optimizer.

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
        on_round: Called after each exchange on rank 0, for example to publish.

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
        self._contributor_count = 0
        inner = unwrap_optimizer(optimizer)
        # Before the masters' own hook, so that a refused step has moved no gradient; DDP's exchange comes after it.
        inner.register_step_pre_hook(lambda *_: check_no_pending(self._pending is not None))
        self._masters = adopt_masters(model, inner)
        self._inner = InnerOptimizer(
            inner, schedule=schedule, warmup_steps=warmup_steps, before_step=self._exchange_gradients
        )
        self._exchange = exchange
        self._on_round = on_round
        self._counters = Counters()
        self._round_index = 0
        self._inner_step = 0
        self._missed_in_row = 0
        self._state: OuterState | None = None
        self._root = STATE_ROOT
        self._settings = OuterSettings()
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
        return self._round_index

    @property
    def inner_step(self) -> int:
        """Inner steps since the round began."""
        return self._inner_step

    @property
    def state_root(self) -> Digest:
        """Root of theta, momentum and round index; equal on all trainers of a round."""
        return self._root

    @property
    def counters(self) -> Counters:
        """What happened since the run began, checkpoints included."""
        return self._counters

    @property
    def state(self) -> OuterState:
        """The three FP32 copies.

        Raises:
            LocalProtocolError: this rank, or the algorithm ``ddp``, has none.
        """
        if self._state is None:
            raise LocalProtocolError("only rank 0 holds an outer state, and under the algorithm ddp nobody does")
        return self._state

    def step(self) -> RoundReport | None:
        """Say that an inner step is done; every H-th time exchange and step the masters of the whole run.

        Returns:
            What the exchange did, on rank 0; ``None`` between exchanges and on other ranks.

        Raises:
            UnavailableError: The round's receipt did not come in time. Nothing is lost: call again before the next
                ``optimizer.step()``.
        """
        if self._settings.algorithm is Algorithm.DDP:
            self._round_index += 1
            self._inner.round_index = self._round_index // self._settings.inner_steps
            return None
        if self._pending is None:
            self._inner_step += 1
            self._counters.inner_steps += 1
            if self._inner_step < self._settings.inner_steps:
                return None
        return self._synchronize()

    def begin_round(self) -> Contribution | None:
        """Form this round's contribution and hold it as pending; nothing else changes.

        Returns:
            ``None`` if its own content is not fit to be sent; then finish with a ``rejected`` result.
        """
        if self._pending is not None:
            return self._pending
        entries = tuple(
            self.state.gate(index, local, is_dense=self._settings.is_dense)
            for index, local in enumerate(self._masters.tensors)
        )
        contribution = Contribution(self._round_index, self._root, max(1, self._inner_step), entries)
        fault = find_fault(contribution, self._expected())
        if fault is not None:
            self._fault = fault.code
            return None
        self._pending = contribution
        return contribution

    def finish_round(self, result: RoundResult) -> RoundReport:
        """Do what a round's outcome asks of the residual, step the final rounds and restart the local masters.

        Raises:
            LocalProtocolError: rounds that do not go on from here.
            UnavailableError: a resync found nobody to fetch the state from; it is tried again after the next round.
        """
        sent, self._pending = self._pending, None
        if result.outcome is Outcome.DEFERRED:
            self._counters.deferred += 1
            return self._report(result, sent, resynced=False)
        if result.outcome is Outcome.COUNTED:
            assert sent is not None
            scale = result.rounds[0].own_scale
            for index, local in enumerate(self._masters.tensors):
                self.state.fold(index, local)
                self.state.clear_sent(sent.entries[index], scale=scale)
            self._missed_in_row = 0
            self._counters.counted += 1
        elif result.outcome is Outcome.MISSED:
            for index, local in enumerate(self._masters.tensors):
                self.state.fold(index, local)
            self._missed_in_row += max(1, len(result.rounds))
            self._counters.missed += 1
        else:
            self._counters.rejected += 1
            self._counters.wasted_inner_steps += self._inner_step
            self._inner.reset()
        resyncs_before = self._counters.resyncs
        if result.reason == FaultCode.BASE:
            self._resync(has_diverged=True)
        else:
            self._step_rounds(result.rounds, own_known=result.outcome is Outcome.COUNTED)
            if self._missed_in_row >= self._settings.missed_rounds_max:
                self._resync(has_diverged=False)
        self._restart()
        return self._report(result, sent, resynced=self._counters.resyncs > resyncs_before)

    def catch_up(self) -> int:
        """Step every round that became final while this trainer was away; inner steps taken meanwhile are wasted.

        Entries that this trainer sent in those rounds leave the residual: they are in theta now. Call it after
        :meth:`load_state_dict`, or on a joiner.

        Returns:
            Rounds stepped.
        """
        before, resets_before = self._round_index, self._inner.reset_count
        if self._settings.algorithm is Algorithm.DDP:
            return 0
        if is_first_rank():
            self._step_missed_rounds()
        if is_distributed():
            news = RankNews(
                failed=False,
                restarted=self._round_index != before,
                reset=self._inner.reset_count > resets_before,
                round_index=self._round_index,
                inner_step=self._inner_step,
            )
            self._follow(share_news(news if is_first_rank() else None, self._masters.tensors))
        return self._round_index - before

    def state_dict(self) -> dict[str, Any]:
        """Return everything the rounds need to go on bit by bit, beside the model's and the optimizer's own state.

        Tensors are shared, not copied. On ranks other than 0 only the position is kept.
        """
        return pack_state(
            table=self._masters.table,
            state=self._state,
            masters=self._masters.tensors if self._masters.are_separate else (),
            pending=self._pending,
            numbers={
                "round_index": self._round_index,
                "inner_step": self._inner_step,
                "missed_in_row": self._missed_in_row,
                "warmup_left": self._inner.warmup_left,
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
            state=self._state,
            masters=self._masters.tensors if self._masters.are_separate else (),
        )
        self._round_index, self._inner_step = numbers["round_index"], numbers["inner_step"]
        self._missed_in_row, self._inner.warmup_left = numbers["missed_in_row"], numbers["warmup_left"]
        self._inner.round_index = self._round_index
        self._pending = pending
        self._masters.write_parameters()
        if self._state is not None:
            self._root = self._state.compute_root(self._round_index)

    def _open(self, theta: Placement, residual: Placement, momentum: Placement) -> None:
        if self._exchange is None:
            raise ConfigError("OuterOptimizer needs an exchange on rank 0")
        self._settings = self._exchange.settings
        devices = {tensor.device for tensor in self._masters.tensors}
        digests = [run_self_test(), *(run_device_self_test(device) for device in devices)]
        wrong = [digest for digest in digests if digest != SELF_TEST_DIGEST]
        self._exchange.open(self._masters.table, wrong[0] if wrong else SELF_TEST_DIGEST)
        if self._settings.algorithm is not Algorithm.DDP:
            self._state = OuterState(
                self._masters.table, self._masters.tensors, theta=theta, residual=residual, momentum=momentum
            )
            self._root = self._state.compute_root(0)

    def _share_settings(self) -> None:
        """Let every rank know how many inner steps a round has."""
        if not is_distributed():
            return
        holder: list[Any] = [(str(self._settings.algorithm), self._settings.to_constants())]
        torch.distributed.broadcast_object_list(holder, src=0)
        self._settings = OuterSettings.from_constants(*holder[0])
        if self._settings.algorithm is Algorithm.DDP:
            raise ConfigError("the algorithm ddp has one rank a trainer: run one process a trainer")

    def _synchronize(self) -> RoundReport | None:
        if not is_first_rank():
            self._follow(share_news(None, self._masters.tensors))
            return None
        resets_before, index_before = self._inner.reset_count, self._round_index
        report = None
        try:
            report = self._exchange_contribution()
        finally:
            if is_distributed():
                news = RankNews(
                    failed=report is None,
                    restarted=report is not None and report.outcome is not Outcome.DEFERRED,
                    reset=self._inner.reset_count > resets_before,
                    round_index=self._round_index,
                    inner_step=self._inner_step,
                )
                share_news(news, self._masters.tensors)
        if self._round_index != index_before and self._round_index % self._settings.state_anchor_interval == 0:
            assert self._exchange is not None
            self._exchange.offer_state(_OfferedState(self._round_index, self._root, self.state))
        self._on_round(report)
        return report

    def _exchange_contribution(self) -> RoundReport:
        assert self._exchange is not None
        contribution = self.begin_round()
        if contribution is None:
            result = self._exchange.abstain(self._round_index, self._fault)
            result = replace(result, outcome=Outcome.REJECTED, reason=self._fault)
        else:
            result = self._exchange.submit(contribution)
        return self.finish_round(result)

    def _follow(self, news: RankNews) -> None:
        """Do on another rank what rank 0 did."""
        if is_first_rank():
            return
        self._round_index, self._inner_step = news.round_index, news.inner_step
        self._inner.round_index = news.round_index
        if news.reset:
            self._inner.reset()
        if news.restarted:
            self._masters.write_parameters()

    def _step_missed_rounds(self) -> None:
        assert self._exchange is not None
        before = self._round_index
        try:
            rounds = self._exchange.catch_up(self._round_index)
        except UnavailableError:
            # So far back nothing is kept: a state anchor is the way in.
            self._resync(has_diverged=False)
            rounds = ()
        # A contribution that waits for its receipt is settled by sync.step(), which submits it again.
        if rounds and self._pending is None:
            self._step_rounds(rounds, own_known=False)
        if self._round_index != before:
            if self._counters.inner_steps == 0:
                # A joiner: the inner optimizer's state is fresh, and the masters are far from where it began.
                self._inner.reset()
            self._counters.wasted_inner_steps += self._inner_step
            self._restart()

    def _step_rounds(self, rounds: tuple[FinalRound, ...], *, own_known: bool) -> None:
        """Step final rounds in order.

        Args:
            rounds: Ascending from the round this trainer is in.
            own_known: The residual has already been settled for the first of them.
        """
        for position, final in enumerate(rounds):
            if final.round_index != self._round_index:
                raise LocalProtocolError(f"round {final.round_index} follows {self._round_index}")
            if final.base_state_root != self._root:
                self._resync(has_diverged=True)
                return
            for index, local in enumerate(self._masters.tensors):
                if final.own is not None and not (own_known and position == 0):
                    self.state.clear_sent(final.own.entries[index], scale=final.own_scale)
                if final.aggregate is not None:
                    self.state.step(final.aggregate.entries(index), self._settings, local.device)
            self._round_index += 1
            self._contributor_count = 0 if final.aggregate is None else final.aggregate.contributor_count
            self._root = self.state.compute_root(self._round_index)

    def _resync(self, *, has_diverged: bool) -> None:
        """Give up the residual and the inner optimizer's state; take the run's outer state if the own one is wrong.

        Args:
            has_diverged: The own state is not the run's: go back to an anchor even if it is older. Without any anchor
                the next round says the same again.
        """
        assert self._exchange is not None
        self._counters.resyncs += 1
        self._missed_in_row = 0
        self.state.clear_residual()
        self._inner.reset()
        anchor = self._exchange.fetch_state()
        if anchor is not None and (has_diverged or anchor.round_index > self._round_index):
            self._adopt(anchor)

    def _adopt(self, anchor: StateAnchor) -> None:
        assert self._exchange is not None
        for index in range(len(self._masters.table.tensors)):
            self.state.write(index, *anchor.read(index))
        self._round_index = anchor.round_index
        self._root = self.state.compute_root(self._round_index)
        if self._root != anchor.state_root:
            raise UnavailableError(f"the state anchor of round {anchor.round_index} does not have its root")
        self._step_rounds(self._exchange.catch_up(self._round_index), own_known=False)

    def _restart(self) -> None:
        """Start a round: local masters from theta, no inner steps yet."""
        for index, local in enumerate(self._masters.tensors):
            self.state.restart(index, local)
        self._masters.write_parameters()
        self._inner_step = 0
        self._inner.round_index = self._round_index

    def _expected(self) -> Expected:
        return Expected(
            table=self._masters.table,
            round_index=self._round_index,
            state_root=self._root,
            is_dense=self._settings.is_dense,
            norm_max=self._settings.norm_max,
        )

    def _report(self, result: RoundResult, sent: Contribution | None, *, resynced: bool) -> RoundReport:
        return RoundReport(
            round_index=self._round_index,
            outcome=result.outcome,
            reason=result.reason,
            contributor_count=self._contributor_count if result.rounds else 0,
            sent_count=0 if sent is None else sent.sent_count,
            element_count=self._masters.table.element_count,
            contribution_norm=0.0 if sent is None else compute_norm(sent),
            residual_norm=self.state.residual_norm(),
            resynced=resynced,
        )

    def _exchange_gradients(self) -> None:
        if self._settings.algorithm is Algorithm.DDP:
            assert self._exchange is not None
            share_gradients(self._exchange, self._masters.tensors, step_index=self._round_index)


class _OfferedState:
    """A view of the own state for :meth:`Exchange.offer_state`."""

    def __init__(self, round_index: int, state_root: Digest, state: OuterState) -> None:
        self.round_index = round_index
        self.state_root = state_root
        self._state = state

    def read(self, tensor_index: int) -> tuple[FP32s, FP32s]:
        return self._state.read(tensor_index)
