"""Rounds between trainers in one process: for tests, simulations of a run, and baselines on one machine.

::

    swarm = LocalExchange(OuterSettings(inner_steps=8), member_count=4)
    # in one thread a trainer:
    sync = OuterOptimizer(model, optimizer, exchange=swarm.member(0))
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pulsenet.errors import ConfigError, LocalProtocolError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.outer.checks import Expected, compute_norm, compute_scales, find_fault
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.reduce import Counted, reduce_mean, reduce_median, reduce_trimmed
from pulsenet.outer.residual import SCALE_ONE
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.outer.settings import Combination, OuterSettings
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.exchange import FinalRound, Outcome, RoundResult, StateAnchor

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
        if self._settings.combination is Combination.MEAN:
            return reduce_mean(counted, tensor_index=tensor_index, element_count=element_count)
        if self._settings.combination is Combination.MEDIAN:
            return reduce_median(counted, tensor_index=tensor_index, element_count=element_count)
        # With few contributions as many are trimmed as leave one.
        trim_count = min(self._settings.trim_count, (len(counted) - 1) // 2)
        return reduce_trimmed(counted, tensor_index=tensor_index, element_count=element_count, trim_count=trim_count)


@dataclass(slots=True)
class ClosedRound:
    """One receipt: who was counted with which scale, and who was refused why."""

    base_state_root: Digest
    counted: dict[bytes, tuple[Contribution, float]]
    rejected: dict[bytes, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _HeldState:
    round_index: int
    state_root: Digest
    tensors: tuple[tuple[FP32s, FP32s], ...]

    def read(self, tensor_index: int) -> tuple[FP32s, FP32s]:
        return self.tensors[tensor_index]


class LocalExchange:
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
        self.settings = settings
        self.rounds: list[ClosedRound] = []
        """Receipts so far, by round index."""
        self._is_late = is_late
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._live = set(range(member_count))
        self._arrived: dict[int, Contribution | str] = {}
        """Contribution of the open round by member, or the reason why there is none."""
        self._attempt = 0
        """Rises with every closing, also when nobody could be counted."""
        self._refused: dict[int, tuple[int, str]] = {}
        """Attempt and reason of each member's newest rejection."""
        self._table: ParameterTable | None = None
        self._anchor: _HeldState | None = None

    def member(self, index: int) -> LocalMember:
        """Return one trainer's end."""
        return LocalMember(self, index)

    def leave(self, index: int) -> None:
        """Take a member out: nobody waits for it any more, and what it submitted to the open round still counts."""
        with self._changed:
            self._live.discard(index)
            self._close_if_complete()

    def join(self, index: int) -> None:
        """Put a member in, new or back; the open round waits for it."""
        with self._changed:
            self._live.add(index)

    def take_table(self, table: ParameterTable, self_test: Digest) -> None:
        """Accept a member's masters and self-test."""
        if self_test != SELF_TEST_DIGEST:
            raise ConfigError(f"the self-test gave {self_test.hex()}: this trainer's arithmetic would diverge")
        with self._changed:
            if self._table is None:
                self._table = table
            elif table.digest != self._table.digest:
                raise ConfigError("the run has other masters: names, shapes and frozen parameters must agree")

    def take(self, member: int, round_index: int, given: Contribution | str) -> RoundResult:
        """Take a member's contribution, or its reason to have none, and wait for the round to close."""
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
            found.append(FinalRound(index, closed.base_state_root, aggregate, own, scale))
        return tuple(found)

    def hold_state(self, anchor: StateAnchor) -> None:
        """Keep a state anchor if it is newer than the one held.

        Raises:
            LocalProtocolError: two members offer different states of one round.
        """
        assert self._table is not None
        with self._changed:
            held = self._anchor
            if held is not None and held.round_index == anchor.round_index and held.state_root != anchor.state_root:
                raise LocalProtocolError(f"trainers hold different states after round {anchor.round_index}")
            if held is None or held.round_index < anchor.round_index:
                pairs = (anchor.read(index) for index in range(len(self._table.tensors)))
                copied = tuple((theta.copy(), momentum.copy()) for theta, momentum in pairs)
                self._anchor = _HeldState(anchor.round_index, anchor.state_root, copied)

    @property
    def anchor(self) -> StateAnchor | None:
        """The newest state anchor."""
        return self._anchor

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
    ) -> RoundResult:
        rounds = self.final_rounds(member, round_index)
        refused_attempt, reason = self._refused.get(member, (-1, ""))
        if isinstance(given, str):
            return RoundResult(Outcome.REJECTED, rounds, given)
        if attempt is not None and refused_attempt == attempt:
            return RoundResult(Outcome.REJECTED, rounds, reason)
        if not rounds:
            return RoundResult(Outcome.DEFERRED, reason="nobody-counted")
        own = rounds[0].own
        if own is None or not own.same_as(given):
            return RoundResult(Outcome.MISSED, rounds, "late")
        return RoundResult(Outcome.COUNTED, rounds)


class LocalMember:
    """One trainer's end of a :class:`LocalExchange`."""

    def __init__(self, swarm: LocalExchange, index: int) -> None:
        self._swarm = swarm
        self._index = index

    @property
    def settings(self) -> OuterSettings:
        """See :class:`~pulsenet.training.exchange.Exchange`, as below."""
        return self._swarm.settings

    def open(self, table: ParameterTable, self_test: Digest) -> None:
        """Take part with these masters."""
        self._swarm.take_table(table, self_test)

    def submit(self, contribution: Contribution) -> RoundResult:
        """Submit and wait for the others."""
        return self._swarm.take(self._index, contribution.round_index, contribution)

    def abstain(self, round_index: int, reason: str) -> RoundResult:
        """Wait for the others without a contribution."""
        return self._swarm.take(self._index, round_index, reason)

    def catch_up(self, round_index: int) -> tuple[FinalRound, ...]:
        """Return closed rounds."""
        return self._swarm.final_rounds(self._index, round_index)

    def fetch_state(self) -> StateAnchor | None:
        """Return the newest state anchor."""
        return self._swarm.anchor

    def offer_state(self, anchor: StateAnchor) -> None:
        """Hand in a state anchor."""
        self._swarm.hold_state(anchor)
