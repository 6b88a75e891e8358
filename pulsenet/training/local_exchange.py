"""Rounds between trainers in one process: for tests, simulations of a run, and baselines on one machine.

::

    swarm = LocalExchange(OuterSettings(inner_steps=8), member_count=4)
    # in one thread a trainer:
    sync = OuterOptimizer(model, optimizer, exchange=swarm.member(0))

It decides as the machines of a node do what becomes of a member's work and when a member takes a state anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

from pulsenet.errors import LocalProtocolError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.outer.checks import Expected, FaultCode, compute_norm, compute_scales, find_fault
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.reduce import Counted, combine
from pulsenet.outer.residual import SCALE_ONE
from pulsenet.outer.settings import OuterSettings
from pulsenet.outer.state_anchor import Beside
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.exchange import FinalRound, Move, Outcome, Restoration, RoundResult, StateView
from pulsenet.training.local_run import LocalRun

ROUND_SECONDS_MAX: Final = 600.0
"""How long a trainer waits for the others before it gives up."""


class ReducedRound:
    """The aggregate of stored contributions, combined when it is read."""

    def __init__(
        self, contributions: dict[bytes, tuple[Contribution, float]], table: ParameterTable, settings: OuterSettings
    ) -> None:
        self._contributions = contributions
        self._table = table
        self._settings = settings

    @property
    def contributor_count(self) -> int:
        """Contributions combined."""
        return len(self._contributions)

    def entries(self, tensor_index: int) -> Entries:
        """Combine one tensor."""
        element_count = self._table.tensors[tensor_index].element_count
        counted = {
            key: Counted(contribution.entries[tensor_index], SCALE_ONE.dtype.type(scale))
            for key, (contribution, scale) in self._contributions.items()
        }
        return combine(counted, self._settings, tensor_index=tensor_index, element_count=element_count)


@dataclass(slots=True)
class ClosedRound:
    """One receipt: who was counted with which scale, and who was refused why."""

    base_state_root: Digest
    counted: dict[bytes, tuple[Contribution, float]]
    rejected: dict[bytes, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class HeldState:
    """A state anchor in memory."""

    round_index: int
    state_root: Digest
    held: tuple[tuple[FP32s, Beside], ...]
    """Theta and momentum of each tensor, or under ``ddp`` the inner optimizer's state."""

    def tensors(self) -> Iterator[tuple[int, FP32s, Beside]]:
        """Yield position, theta and momentum."""
        for index, (theta, momentum) in enumerate(self.held):
            yield index, theta, momentum


class LocalExchange(LocalRun):
    """All rounds of one process. A round closes when every live member has submitted, abstained or left.

    Args:
        settings: Algorithm and constants for all members.
        member_count: Members, all live at first; member *i* has the key ``bytes([i])``.
        is_late: Tells whether a member's contribution of a round comes too late, for tests: ``(member, round)``.
        timeout_seconds: How long one member waits for the others.
    """

    def __init__(
        self,
        settings: OuterSettings,
        member_count: int,
        *,
        is_late: Callable[[int, int], bool] = lambda member, round_index: False,
        timeout_seconds: float = ROUND_SECONDS_MAX,
    ) -> None:
        super().__init__(member_count)
        self.settings = settings
        self.rounds: list[ClosedRound] = []
        """Receipts so far, by round index."""
        self._is_late = is_late
        self._timeout_seconds = timeout_seconds
        self._arrived: dict[int, Contribution | str] = {}
        """Contribution of the open round by member, or the reason why there is none."""
        self._attempt = 0
        """Rises with every closing, also when nobody could be counted."""
        self._refused: dict[int, tuple[int, str]] = {}
        """Attempt and reason of each member's newest rejection."""
        self.anchor: HeldState | None = None
        """The newest state anchor."""
        self._kept_from = 0

    def member(self, index: int) -> LocalMember:
        """Return one trainer's end."""
        return LocalMember(self, index)

    def leave(self, index: int) -> None:
        """Take a member out: nobody waits for it any more, and what it submitted to the open round still counts."""
        with self._changed:
            self._live.discard(index)
            self._close_if_complete()

    def take(self, member: int, round_index: int, given: Contribution | str) -> tuple[Outcome, str]:
        """Take a member's contribution, or its reason to have none, and wait for the round to close.

        Raises:
            UnavailableError: The member has left the run.
            LocalProtocolError: The round is not open yet.
        """
        with self._changed:
            if member not in self._live:
                raise UnavailableError(f"member {member} has left the run")
            if round_index > len(self.rounds):
                raise LocalProtocolError(f"round {round_index} is not open yet: the open round is {len(self.rounds)}")
            if round_index < len(self.rounds):
                return self._result(member, round_index, given)
            attempt = self._attempt
            self._arrived[member] = given
            self._close_if_complete()
            if not self._changed.wait_for(lambda: self._attempt > attempt, self._timeout_seconds):
                self._arrived.pop(member, None)
                raise UnavailableError(f"round {round_index} did not close in {self._timeout_seconds} s")
            return self._result(member, round_index, given, attempt)

    def final_rounds(self, member: int, round_index: int) -> tuple[FinalRound, ...]:
        """Return the closed rounds from ``round_index`` on as one member sees them."""
        assert self._table is not None
        key = bytes([member])
        found = []
        for index in range(round_index, len(self.rounds)):
            closed = self.rounds[index]
            own, scale = closed.counted.get(key, (None, 1.0))
            aggregate = ReducedRound(closed.counted, self._table, self.settings)
            outcome = self._outcome(member, index)
            found.append(FinalRound(index, closed.base_state_root, aggregate, own, scale, outcome))
        return tuple(found)

    def moves(self, member: int, state: StateView) -> Iterator[Move]:
        """Yield what leads one member's state to the newest one.

        Raises:
            UnavailableError: nothing does yet.
        """
        if state.round_index >= len(self.rounds) and state.state_root is not None:
            return
        base = None if state.round_index < self._kept_from else self._base_of(state.round_index)
        if state.state_root is None or base != state.state_root:
            if self.anchor is None:
                raise UnavailableError("this member's state is not the run's, and there is no state anchor yet")
            yield Restoration(self.anchor)
        for final in self.final_rounds(member, state.round_index):
            yield final
            self.hold_state(state)

    def forget_rounds(self, before: int) -> None:
        """Keep no contributions of earlier rounds: whoever is behind has to take the state anchor."""
        self._kept_from = before

    def hold_state(self, state: StateView) -> None:
        """Keep a member's state as an anchor if one of its round is due.

        Raises:
            LocalProtocolError: two members hold different states of one round.
        """
        assert self._table is not None
        if state.round_index % self.settings.state_anchor_interval:
            return
        assert state.state_root is not None
        with self._changed:
            held = self.anchor
            if held is not None and held.round_index == state.round_index and held.state_root != state.state_root:
                raise LocalProtocolError(f"trainers hold different states after round {state.round_index}")
            if held is None or held.round_index < state.round_index:
                indices = range(len(self._table.tensors))
                copied = tuple((state.theta(index).copy(), state.momentum(index).copy()) for index in indices)
                self.anchor = HeldState(state.round_index, state.state_root, copied)

    def _base_of(self, round_index: int) -> Digest | None:
        return self.rounds[round_index].base_state_root if round_index < len(self.rounds) else None

    def _outcome(self, member: int, round_index: int) -> Outcome:
        """Return what a closed round makes of one member's work, after all rounds before."""
        key = bytes([member])
        missed, outcome = 0, Outcome.MISSED
        for closed in self.rounds[: round_index + 1]:
            if key in closed.counted:
                outcome = Outcome.COUNTED
            elif key in closed.rejected:
                outcome = Outcome.REJECTED
            else:
                outcome = Outcome.DROPPED if missed + 1 >= self.settings.missed_rounds_max else Outcome.MISSED
            missed = missed + 1 if outcome is Outcome.MISSED else 0
        return outcome

    def _close_if_complete(self) -> None:
        if not self._live or not self._live <= set(self._arrived):
            return
        assert self._table is not None
        round_index = len(self.rounds)
        fit: dict[int, Contribution] = {}
        base: Digest | None = None
        for member, given in sorted(self._arrived.items()):
            if isinstance(given, str):
                self._refused[member] = (self._attempt, given)
                continue
            # The first in key order that may be counted stands for the coordinator, whose state is the run's.
            expected = Expected(
                table=self._table,
                round_index=round_index,
                state_root=given.state_root if base is None else base,
                is_dense=self.settings.is_dense,
                norm_max=self.settings.norm_max,
            )
            fault = find_fault(given, expected)
            if fault is not None:
                self._refused[member] = (self._attempt, fault.code)
                continue
            base = given.state_root
            if not self._is_late(member, round_index):
                fit[member] = given
        if fit:
            assert base is not None
            scales = compute_scales(
                [compute_norm(contribution) for contribution in fit.values()],
                clip_norm_ratio=self.settings.clip_norm_ratio,
            )
            counted = {
                bytes([member]): (contribution, float(scale))
                for (member, contribution), scale in zip(fit.items(), scales, strict=True)
            }
            rejected = {
                bytes([m]): reason for m, (attempt, reason) in self._refused.items() if attempt == self._attempt
            }
            self.rounds.append(ClosedRound(base, counted, rejected))
        self._arrived.clear()
        self._attempt += 1
        self._changed.notify_all()

    def _result(
        self, member: int, round_index: int, given: Contribution | str, attempt: int | None = None
    ) -> tuple[Outcome, str]:
        refused_attempt, reason = self._refused.get(member, (-1, ""))
        if isinstance(given, str):
            return Outcome.REJECTED, given
        if attempt is not None and refused_attempt == attempt:
            return Outcome.REJECTED, reason
        if round_index >= len(self.rounds):
            return Outcome.DEFERRED, "nobody-counted"
        outcome = self._outcome(member, round_index)
        return outcome, "" if outcome is Outcome.COUNTED else "late"


class LocalMember:
    """One trainer's end of a :class:`LocalExchange`."""

    def __init__(self, swarm: LocalExchange, index: int) -> None:
        self._swarm = swarm
        self._index = index
        self._state: StateView | None = None

    @property
    def settings(self) -> OuterSettings:
        """See :class:`pulsenet.training.Exchange`, as below."""
        return self._swarm.settings

    def open(self, table: ParameterTable, self_test: Digest, state: StateView) -> None:
        """Take part with these masters."""
        self._swarm.take_table(table, self_test)
        self._state = state

    def submit(self, contribution: Contribution) -> RoundResult:
        """Submit and wait for the others."""
        return self._finish(*self._swarm.take(self._index, contribution.round_index, contribution))

    def abstain(self, round_index: int, reason: str) -> RoundResult:
        """Wait for the others without a contribution."""
        return self._finish(*self._swarm.take(self._index, round_index, reason))

    def catch_up(self) -> Iterator[Move]:
        """Return the moves that closed rounds make."""
        assert self._state is not None
        return self._swarm.moves(self._index, self._state)

    def note_residual(self, norm: float) -> None:
        """Do nothing: nobody watches rounds of one process."""

    def publish(self, model: torch.nn.Module, round_index: int) -> None:
        """Do nothing: rounds of one process have no versions."""

    def _finish(self, outcome: Outcome, reason: str) -> RoundResult:
        if outcome is Outcome.DEFERRED:
            return RoundResult(outcome, reason=reason)
        if reason == FaultCode.BASE and self._swarm.anchor is None:
            # Nothing to go back to: the next round says the same again.
            return RoundResult(outcome, reason=reason)
        return RoundResult(outcome, self.catch_up(), reason)
