"""The order of steps: every answer of every rank leads to the new version, back to the old one, or to a known loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsenet.ids import Version
from pulsenet.serving.vllm.exchange import Answer, Order, Outcome, State
from pulsenet.serving.vllm.transaction import (
    ENDS,
    ORDERS,
    STOPS,
    TRANSITIONS,
    Plan,
    Report,
    Step,
    Transaction,
    Verdict,
    find_fault,
    judge,
)

PLAN = Plan("t", Version(0, 2), Version(0, 1), ("a", "b"), is_full=False)


def answer(
    rank: int,
    order: Order,
    *,
    outcome: Outcome = Outcome.DONE,
    state: State = State.READY,
    held: str | None = "0.1",
    boot: str | None = None,
    transaction: str = "t",
    changed_count: int = 5,
) -> Answer:
    return Answer(
        rank,
        2,
        PLAN.boots[rank] if boot is None else boot,
        transaction,
        order,
        outcome,
        state,
        True,
        held,
        code="" if outcome is Outcome.DONE else "engine",
        reason="" if outcome is Outcome.DONE else "boom",
        changed_count=changed_count,
    )


def good(step: Step, *, changed_count: int = 5) -> Report:
    """Return what two healthy ranks report."""
    order = ORDERS.get(step)
    if order is None:
        return Report(True)
    held = "0.2" if step is Step.CLOSE else "0.1"
    return Report(True, "", tuple(answer(rank, order, held=held, changed_count=changed_count) for rank in (0, 1)))


def bad(step: Step) -> Report:
    """Return the report of a step in which rank 1 failed, or that vLLM did not do."""
    order = ORDERS.get(step)
    if order is None:
        return Report(False, "no answer")
    return Report(True, "", (answer(0, order), answer(1, order, outcome=Outcome.FAILED, state=State.COMMITTED)))


def run(transaction: Transaction, report: Callable[[Step], Report]) -> Transaction:
    while transaction.step not in ENDS:
        if transaction.step is Step.STAGED:
            transaction.go_on()
        else:
            transaction.handle(report(transaction.step))
    return transaction


def test_a_version_is_staged_while_serving_and_committed_in_a_pause() -> None:
    transaction = run(Transaction(PLAN), good)
    assert transaction.step is Step.DONE
    assert transaction.fault is None
    assert transaction.changed_count == 10
    assert transaction.trail == [
        Step.OPEN,
        Step.STAGE,
        Step.STAGED,
        Step.PAUSE,
        Step.COMMIT,
        Step.CLOSE,
        Step.RESUME,
    ]


def test_a_version_without_visible_change_needs_no_pause() -> None:
    """A-ENC-6."""
    transaction = run(Transaction(PLAN), lambda step: good(step, changed_count=0))
    assert transaction.step is Step.DONE
    assert Step.PAUSE not in transaction.trail
    assert Step.RESUME not in transaction.trail


@pytest.mark.parametrize(
    ("failing", "end", "trail"),
    [
        (Step.OPEN, Step.REFUSED, []),
        (Step.STAGE, Step.REFUSED, [Step.UNSTAGE, Step.CLOSE_UNCHANGED]),
        (Step.PAUSE, Step.REFUSED, [Step.ROLL_BACK, Step.CLOSE_ROLLED_BACK, Step.RESUME_ROLLED_BACK]),
        (Step.COMMIT, Step.REFUSED, [Step.ROLL_BACK, Step.CLOSE_ROLLED_BACK, Step.RESUME_ROLLED_BACK]),
        (Step.CLOSE, Step.REFUSED, [Step.ROLL_BACK, Step.CLOSE_ROLLED_BACK, Step.RESUME_ROLLED_BACK]),
        (Step.RESUME, Step.LOST, []),
    ],
)
def test_whatever_fails_all_ranks_go_back_and_the_engine_goes_on(failing: Step, end: Step, trail: list[Step]) -> None:
    """A-APP-1, A-APP-3: one rank fails at stage, at commit, at the end."""
    transaction = run(Transaction(PLAN), lambda step: bad(step) if step is failing else good(step))
    assert transaction.step is end
    assert transaction.fault is not None
    assert transaction.fault.reason in ("no answer", "rank 1: boom", "rank 0 says it holds 0.1, not 0.2")
    assert transaction.trail[transaction.trail.index(failing) + 1 :] == trail


def test_an_empty_version_that_fails_needs_no_resume() -> None:
    transaction = run(Transaction(PLAN), lambda step: bad(step) if step is Step.COMMIT else good(step, changed_count=0))
    assert transaction.step is Step.REFUSED
    assert Step.RESUME_ROLLED_BACK not in transaction.trail


def test_a_roll_back_that_fails_leaves_the_engine_paused() -> None:
    transaction = run(
        Transaction(PLAN), lambda step: bad(step) if step in (Step.COMMIT, Step.ROLL_BACK) else good(step)
    )
    assert transaction.step is Step.LOST
    assert transaction.trail[-1] is Step.ROLL_BACK


def test_ranks_that_all_let_go_already_are_the_new_version() -> None:
    """The answer to the closing request was lost, not the request."""

    def report(step: Step) -> Report:
        if step is Step.CLOSE:
            return Report(False, "timed out")
        if step is Step.ROLL_BACK:
            return Report(True, "", tuple(answer(rank, Order.ROLLBACK, held="0.2") for rank in (0, 1)))
        return good(step)

    transaction = run(Transaction(PLAN), report)
    assert transaction.step is Step.DONE
    assert transaction.trail[-3:] == [Step.ROLL_BACK, Step.LABEL, Step.RESUME]


@pytest.mark.parametrize(
    ("first", "second"),
    [(("0.1", State.READY), ("0.2", State.READY)), (("0.1", State.READY), (None, State.UNKNOWN))],
)
def test_ranks_of_two_versions_serve_nobody(first: tuple[str, State], second: tuple[str | None, State]) -> None:
    """A-APP-1."""

    def report(step: Step) -> Report:
        if step is Step.CLOSE:
            return Report(False, "timed out")
        if step is Step.ROLL_BACK:
            pairs = enumerate((first, second))
            return Report(
                True,
                "",
                tuple(answer(rank, Order.ROLLBACK, held=held, state=state) for rank, (held, state) in pairs),
            )
        return good(step)

    assert run(Transaction(PLAN), report).step is Step.LOST


def test_a_full_update_over_unknown_weights_goes_back_only_before_it_wrote() -> None:
    plan = Plan("t", Version(0, 2), None, ("a", "b"), is_full=True)

    def report(step: Step) -> Report:
        if step is Step.PAUSE:
            return Report(False, "no answer")
        if step is Step.ROLL_BACK:
            return Report(True, "", tuple(answer(rank, Order.ROLLBACK, held=None) for rank in (0, 1)))
        return good(step)

    assert run(Transaction(plan), report).step is Step.REFUSED


@pytest.mark.parametrize("step", list(ORDERS))
def test_an_engine_that_was_started_again_is_lost_wherever_it_is_seen(step: Step) -> None:
    def report(now: Step) -> Report:
        if now in (Step.UNSTAGE, Step.ROLL_BACK) and step is now:
            return Report(True, "", (answer(0, ORDERS[now], boot="other"), answer(1, ORDERS[now])))
        if now is step:
            return Report(True, "", (answer(0, ORDERS[now]), answer(1, ORDERS[now], boot="other")))
        if (step is Step.UNSTAGE and now is Step.STAGE) or (step is Step.ROLL_BACK and now is Step.COMMIT):
            return bad(now)
        return good(now)

    transaction = run(Transaction(PLAN), report)
    assert transaction.step is Step.LOST
    assert transaction.trail[-1] is step


def test_what_is_staged_can_be_given_up() -> None:
    transaction = Transaction(PLAN)
    while transaction.step not in STOPS:
        transaction.handle(good(transaction.step))
    transaction.give_up()
    assert run(transaction, good).step is Step.REFUSED
    assert transaction.trail[-2:] == [Step.UNSTAGE, Step.CLOSE_UNCHANGED]


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (None, "silent"),
        (answer(0, Order.COMMIT, transaction="older"), "silent"),
        (answer(0, Order.COMMIT, outcome=Outcome.FAILED), "engine"),
        (answer(0, Order.STAGE), "silent"),
        (answer(0, Order.WATCHDOG), "overtaken"),
        (answer(0, Order.WATCHDOG, outcome=Outcome.FAILED), "engine"),
        (answer(0, Order.COMMIT), None),
    ],
)
def test_a_missing_old_or_foreign_answer_is_no_success(found: Answer | None, code: str | None) -> None:
    """The status file is missing; replay; the watchdog was faster."""
    fault = find_fault(0, found, Order.COMMIT, "t")
    assert (None if fault is None else fault.code) == code


def test_the_end_of_an_update_names_its_version() -> None:
    report = Report(True, "", (answer(0, Order.FINISH, held="0.2"), answer(1, Order.FINISH, held="0.1")))
    verdict, fault = judge(Step.CLOSE, PLAN, report)
    assert verdict is Verdict.BAD
    assert fault is not None
    assert fault.reason == "rank 1 says it holds 0.1, not 0.2"


def test_every_step_has_a_way_on_whatever_is_answered() -> None:
    for step, verdict in itertools.product(set(Step) - STOPS, (Verdict.GOOD, Verdict.BAD)):
        assert (step, verdict) in TRANSITIONS
    assert {step for step, _ in TRANSITIONS} == set(Step) - STOPS


@given(data=st.data())
def test_any_answers_end_and_a_known_end_means_equal_ranks(data: st.DataObject) -> None:
    """G2: DONE and REFUSED are reached only where all ranks say the same version, by any path."""
    believed: list[tuple[str | None, ...]] = [("0.1", "0.1")]

    def report(step: Step) -> Report:
        order = ORDERS.get(step)
        is_answered = data.draw(st.booleans())
        if order is None:
            return Report(is_answered, "no")
        answers = []
        for rank in (0, 1):
            if data.draw(st.integers(0, 3)) == 0:
                answers.append(None)
                continue
            answers.append(
                answer(
                    rank,
                    data.draw(st.sampled_from([order, Order.WATCHDOG])),
                    outcome=data.draw(st.sampled_from(Outcome)),
                    state=data.draw(st.sampled_from([State.READY, State.STAGED, State.COMMITTED, State.UNKNOWN])),
                    held=data.draw(st.sampled_from(["0.1", "0.2", None])),
                )
            )
        believed.append(tuple(None if found is None else found.held for found in answers))
        return Report(is_answered, "no", tuple(answers))

    transaction = run(Transaction(PLAN), report)
    if transaction.step is Step.DONE:
        assert believed[-1] == ("0.2", "0.2")
    if transaction.step is Step.REFUSED and Step.COMMIT in transaction.trail:
        assert believed[-1] == ("0.1", "0.1")
    assert (transaction.fault is None) == (transaction.step is Step.DONE) or Step.LABEL in transaction.trail
