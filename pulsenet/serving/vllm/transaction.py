"""The order of steps that brings all ranks of an engine to a version, or leaves all where they were. No I/O.

::

    transaction = Transaction(plan)
    while (step := transaction.step) not in ENDS:
        transaction.handle(execute(step))

It stops twice: at ``STAGED``, from where :meth:`Transaction.go_on` starts the commit or :meth:`Transaction.give_up`
the way back, and at an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pulsenet.ids import Version
from pulsenet.serving.vllm.exchange import Answer, Order, Outcome, State


class Step(StrEnum):
    """What the node does next; the ends at the bottom need nothing."""

    OPEN = "open"
    STAGE = "stage"
    STAGED = "staged"
    UNSTAGE = "unstage"
    CLOSE_UNCHANGED = "close_unchanged"
    PAUSE = "pause"
    COMMIT = "commit"
    CLOSE = "close"
    """End vLLM's update with the new version; the ranks let go of what they overwrote."""
    LABEL = "label"
    RESUME = "resume"
    ROLL_BACK = "roll_back"
    CLOSE_ROLLED_BACK = "close_rolled_back"
    RESUME_ROLLED_BACK = "resume_rolled_back"

    DONE = "done"
    REFUSED = "refused"
    """Every rank holds what it held before."""
    LOST = "lost"
    """The ranks may hold different weights. The engine stays paused until a full update, or is gone."""


class Verdict(StrEnum):
    """What the answers to a step come to."""

    GOOD = "good"
    BAD = "bad"
    RESTARTED = "restarted"
    """A rank is not the process it was: nothing that was known of it holds."""


ENDS: Final = frozenset({Step.DONE, Step.REFUSED, Step.LOST})
STOPS: Final = ENDS | {Step.STAGED}

TRANSITIONS: Final[dict[tuple[Step, Verdict], Step]] = {
    (Step.OPEN, Verdict.GOOD): Step.STAGE,
    (Step.OPEN, Verdict.BAD): Step.REFUSED,
    (Step.STAGE, Verdict.GOOD): Step.STAGED,
    (Step.STAGE, Verdict.BAD): Step.UNSTAGE,
    (Step.UNSTAGE, Verdict.GOOD): Step.CLOSE_UNCHANGED,
    (Step.UNSTAGE, Verdict.BAD): Step.CLOSE_UNCHANGED,
    (Step.CLOSE_UNCHANGED, Verdict.GOOD): Step.REFUSED,
    (Step.CLOSE_UNCHANGED, Verdict.BAD): Step.REFUSED,
    (Step.PAUSE, Verdict.GOOD): Step.COMMIT,
    # It may have arrived all the same, so the way back resumes.
    (Step.PAUSE, Verdict.BAD): Step.ROLL_BACK,
    (Step.COMMIT, Verdict.GOOD): Step.CLOSE,
    (Step.COMMIT, Verdict.BAD): Step.ROLL_BACK,
    (Step.CLOSE, Verdict.GOOD): Step.RESUME,
    # Some ranks may have let go already; the roll-back finds out.
    (Step.CLOSE, Verdict.BAD): Step.ROLL_BACK,
    (Step.LABEL, Verdict.GOOD): Step.RESUME,
    (Step.LABEL, Verdict.BAD): Step.LOST,
    (Step.RESUME, Verdict.GOOD): Step.DONE,
    (Step.RESUME, Verdict.BAD): Step.LOST,
    (Step.ROLL_BACK, Verdict.GOOD): Step.CLOSE_ROLLED_BACK,
    (Step.ROLL_BACK, Verdict.BAD): Step.LOST,
    (Step.CLOSE_ROLLED_BACK, Verdict.GOOD): Step.RESUME_ROLLED_BACK,
    (Step.CLOSE_ROLLED_BACK, Verdict.BAD): Step.RESUME_ROLLED_BACK,
    (Step.RESUME_ROLLED_BACK, Verdict.GOOD): Step.REFUSED,
    (Step.RESUME_ROLLED_BACK, Verdict.BAD): Step.LOST,
}
"""Whatever is not here cannot happen; RESTARTED leads to LOST from everywhere."""

ORDERS: Final[dict[Step, Order]] = {
    Step.STAGE: Order.STAGE,
    Step.UNSTAGE: Order.ROLLBACK,
    Step.COMMIT: Order.COMMIT,
    Step.CLOSE: Order.FINISH,
    Step.ROLL_BACK: Order.ROLLBACK,
}
"""Steps that every rank answers; the others are between the node and vLLM."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a transaction is to bring about."""

    transaction: str
    """Drawn anew for each, so that no old answer is taken for a new one."""
    version: Version
    held: Version | None
    """What every rank held before; ``None`` if nobody knows."""
    boots: tuple[str, ...]
    """By rank: the processes that were attached."""
    is_full: bool
    is_paused: bool = False
    """An earlier update left the engine paused: it goes on with this one, whatever that changes."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a step went."""

    is_answered: bool
    """vLLM said that it was done."""
    reason: str = ""
    """If not, why not."""
    answers: tuple[Answer | None, ...] = ()
    """By rank, for a step in ``ORDERS``; ``None`` where a rank did not answer in time."""


@dataclass(slots=True)
class Fault:
    """Why a transaction did not end as planned: a stable code, and cause and next step for people."""

    code: str
    reason: str


@dataclass(slots=True)
class Transaction:
    """Where one update stands."""

    plan: Plan
    step: Step = Step.OPEN
    fault: Fault | None = None
    """The first thing that went wrong."""
    changed_count: int = 0
    """Positions that the staged update writes, over all ranks."""
    trail: list[Step] = field(default_factory=list)
    """Steps taken so far."""

    def handle(self, report: Report) -> None:
        """Take the report of ``step`` and move on."""
        assert self.step not in STOPS
        verdict, fault = judge(self.step, self.plan, report)
        self.fault = self.fault or fault
        if verdict is Verdict.RESTARTED:
            self._move(Step.LOST)
            return
        if self.step is Step.STAGE and verdict is Verdict.GOOD:
            self.changed_count = sum(answer.changed_count for answer in report.answers if answer is not None)
        following = TRANSITIONS[self.step, verdict]
        if self.step is Step.ROLL_BACK:
            following = self._after_roll_back(report.answers, following)
        elif following is Step.RESUME and not self.needs_pause:
            following = Step.DONE
        elif following is Step.RESUME_ROLLED_BACK and not self.needs_pause:
            following = Step.REFUSED
        self._move(following)

    def go_on(self) -> None:
        """Start the commit of what is staged."""
        assert self.step is Step.STAGED
        self._move(Step.PAUSE if self.needs_pause else Step.COMMIT)

    def give_up(self) -> None:
        """Start the way back from what is staged."""
        assert self.step is Step.STAGED
        self._move(Step.UNSTAGE)

    @property
    def needs_pause(self) -> bool:
        """Whether any weight changes, or the engine is to go on again: no other version is worth a pause."""
        return self.changed_count > 0 or self.plan.is_paused

    def _after_roll_back(self, answers: Sequence[Answer | None], following: Step) -> Step:
        """Say what a roll-back left behind: the base, the new version if all had let go already, or neither."""
        held = {None if answer is None else answer.held for answer in answers}
        is_whole = all(answer is not None and answer.state in (State.READY, State.STAGED) for answer in answers)
        if following is Step.LOST or not is_whole or len(held) != 1:
            return Step.LOST
        (only,) = held
        if only == str(self.plan.version):
            return Step.LABEL
        return following if only == (None if self.plan.held is None else str(self.plan.held)) else Step.LOST

    def _move(self, step: Step) -> None:
        self.trail.append(self.step)
        self.step = step


def judge(step: Step, plan: Plan, report: Report) -> tuple[Verdict, Fault | None]:
    """Return what a report comes to, and what was wrong with it."""
    order = ORDERS.get(step)
    if order is not None:
        for rank, answer in enumerate(report.answers):
            if answer is not None and answer.boot != plan.boots[rank]:
                return Verdict.RESTARTED, Fault("restarted", f"rank {rank} of the engine was started again")
    if not report.is_answered:
        return Verdict.BAD, Fault("engine", report.reason)
    if order is None:
        return Verdict.GOOD, None
    for rank, answer in enumerate(report.answers):
        fault = find_fault(rank, answer, order, plan.transaction)
        if fault is None and order is Order.FINISH and answer is not None and answer.held != str(plan.version):
            fault = Fault("engine", f"rank {rank} says it holds {answer.held}, not {plan.version}")
        if fault is not None:
            return Verdict.BAD, fault
    return Verdict.GOOD, None


def find_fault(rank: int, answer: Answer | None, order: Order, transaction: str) -> Fault | None:
    """Return why a rank's answer is not that it did what this order of this transaction asked."""
    is_answer = answer is not None and answer.transaction == transaction
    if answer is None or not is_answer or (answer.order is not order and answer.order is not Order.WATCHDOG):
        return Fault("silent", f"rank {rank} of the engine did not answer '{order}'; see the engine's log")
    if answer.outcome is not Outcome.DONE:
        return Fault(answer.code or "engine", f"rank {rank}: {answer.reason}")
    if answer.order is not order:
        return Fault("overtaken", f"rank {rank} undid the update by itself before '{order}': the node was too slow")
    return None
