"""What a training loop sees while its exchange goes away, comes back, and names moves of its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import ConfigError, LocalProtocolError, UnavailableError
from pulsenet.outer.contribution import Contribution
from pulsenet.training.exchange import FinalRound, Move, Outcome, Restoration, RoundResult
from pulsenet.training.local_exchange import HeldState, LocalMember

Lone = Callable[..., Any]
Swarm = Callable[..., Any]


def hold(trainer: Any) -> HeldState:
    """Copy a trainer's state."""
    state = trainer.sync.state
    pairs = zip(state.theta, state.momentum, strict=True)
    held = tuple((theta.numpy().copy(), momentum.numpy().copy()) for theta, momentum in pairs)
    return HeldState(trainer.sync.round_index, trainer.sync.state_root, held)


def broken(moves: Iterator[Move], after: int) -> Iterator[Move]:
    """Go away after so many moves."""
    for _ in range(after):
        yield next(moves)
    raise UnavailableError("the daemon went away")


def test_the_first_step_takes_a_joiner_to_the_run(make_swarm: Swarm) -> None:
    swarm = make_swarm(3)
    swarm.exchange.leave(2)
    swarm.run_rounds(2, members=[0, 1])
    swarm.exchange.join(2)
    joiner = swarm.trainers[2]
    joiner.train_step()
    assert (joiner.sync.round_index, joiner.sync.inner_step, joiner.reports) == (2, 0, [])
    assert joiner.sync.counters.wasted_inner_steps == joiner.sync.counters.inner_steps == 1
    assert len(swarm.thetas()) == 1
    assert joiner.sync._inner.warmup_left == 8
    swarm.run_rounds(1)
    assert joiner.reports[-1].outcome is Outcome.COUNTED


def test_a_loop_that_never_asks_catches_up_after_a_restore(make_swarm: Swarm) -> None:
    swarm = make_swarm(2)
    swarm.run_rounds(1)
    saved = swarm.trainers[1].checkpoint()
    swarm.run_rounds(2)
    swarm.trainers[1].restore(saved)
    swarm.trainers[1].train_step()
    assert swarm.trainers[1].sync.round_index == 3
    assert len(swarm.thetas()) == 1


def test_a_deferred_round_may_ask_for_many_more_inner_steps(lone: Lone) -> None:
    trainer = lone()
    submit = trainer.exchange.submit
    answers = iter([RoundResult(Outcome.DEFERRED, reason="silent", inner_steps=3)])
    trainer.exchange.submit = lambda contribution: next(answers, None) or submit(contribution)
    for _ in range(5):
        trainer.train_step()
    assert [report.outcome for report in trainer.reports] == [Outcome.DEFERRED]
    saved = trainer.checkpoint()
    trainer.train_step()
    assert trainer.reports[-1].outcome is Outcome.COUNTED
    assert trainer.exchange._swarm.rounds[0].counted[b"\x00"][0].inner_step_count == 6
    assert saved["sync"]["numbers"]["extra_inner_steps"] == 3
    trainer.run_rounds(1)
    assert trainer.reports[-1].outcome is Outcome.COUNTED
    assert trainer.exchange._swarm.rounds[1].counted[b"\x00"][0].inner_step_count == 3


def test_an_exchange_that_goes_away_between_moves_leaves_a_whole_state(make_swarm: Swarm) -> None:
    swarm = make_swarm(2)
    swarm.exchange.leave(1)
    swarm.run_rounds(3, members=[0])
    swarm.exchange.join(1)
    away = swarm.trainers[1]
    away.sync._has_caught_up = True
    submit = away.exchange.submit

    def cut(contribution: Contribution) -> Any:
        result = submit(contribution)
        return replace(result, rounds=broken(iter(result.rounds), after=2))

    away.exchange.submit = cut
    for _ in range(3):
        away.train_step()
    assert away.reports[-1].outcome is Outcome.MISSED
    assert (away.sync.round_index, away.sync.inner_step) == (2, 0)
    assert away.sync.state_root == away.sync.state.compute_root(2)
    away.exchange.submit = submit
    away.train_step()
    assert away.sync.round_index == 3
    assert len(swarm.thetas()) == 1


def test_catching_up_says_so_when_it_was_cut_short(make_swarm: Swarm) -> None:
    swarm = make_swarm(2)
    swarm.exchange.leave(1)
    swarm.run_rounds(3, members=[0])
    away = swarm.trainers[1]
    away.exchange.catch_up = lambda: broken(LocalMember.catch_up(away.exchange), after=1)
    with pytest.raises(UnavailableError, match="went away"):
        away.sync.catch_up()
    assert away.sync.round_index == 1
    with pytest.raises(UnavailableError, match="went away"):
        away.train_step()
    assert (away.sync.round_index, away.sync.counters.inner_steps) == (2, 0)
    del away.exchange.catch_up
    assert away.sync.catch_up() == 1
    assert len(swarm.thetas()) == 1


def test_a_restoration_that_breaks_off_is_finished_by_calling_step_again(lone: Lone) -> None:
    trainer, other = lone(), lone(seed=5)
    other.run_rounds(4)
    anchor = hold(other)

    class Dying:
        round_index, state_root = anchor.round_index, anchor.state_root

        def tensors(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
            yield next(anchor.tensors())
            raise UnavailableError("the daemon went away")

    trainer.run_rounds(1)
    for _ in range(2):
        trainer.train_step()
    trainer.exchange.submit = lambda contribution: RoundResult(
        Outcome.DROPPED, iter([Restoration(Dying())]), "outdated"
    )
    with pytest.raises(UnavailableError, match="went away"):
        trainer.train_step()
    with pytest.raises(UnavailableError, match=r"call sync\.step"):
        trainer.sync.state_dict()
    with pytest.raises(LocalProtocolError, match="waits for its round's receipt"):
        trainer.optimizer.step()
    trainer.exchange.catch_up = lambda: iter([Restoration(anchor)])
    report = trainer.sync.step()
    assert (report.outcome, report.reason, report.resynced) == (Outcome.DROPPED, "interrupted", True)
    assert (trainer.sync.round_index, trainer.sync.inner_step) == (4, 0)
    assert trainer.sync.state_root == anchor.state_root
    assert trainer.sync.state.residual_norm() == 0.0
    assert not trainer.optimizer.state
    for theta, (_, parameter) in zip(trainer.sync.state.theta, sorted(trainer.model.named_parameters()), strict=True):
        assert torch.equal(theta.view(parameter.shape), parameter)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("another process takes part")])
@pytest.mark.parametrize("is_restored", [False, True])
def test_what_breaks_off_after_a_move_never_counts_inner_steps_twice(
    lone: Lone, error: BaseException, is_restored: bool
) -> None:
    """As where a user stops a notebook's cell while the next round is awaited, and goes on."""
    trainer, undisturbed = lone(), lone()
    undisturbed.run_rounds(3)
    trainer.run_rounds(1)

    def interrupted(moves: Iterator[Move]) -> Iterator[Move]:
        yield from moves
        raise error

    submit = trainer.exchange.submit

    def submit_and_break_off(contribution: Contribution) -> RoundResult:
        result = submit(contribution)
        return replace(result, rounds=interrupted(iter(result.rounds)))

    trainer.exchange.submit = submit_and_break_off
    with pytest.raises(type(error)):
        trainer.run_rounds(1)
    trainer.exchange.submit = submit
    with pytest.raises(LocalProtocolError, match=r"call sync\.step"):
        trainer.optimizer.step()
    if is_restored:
        trainer.restore(trainer.checkpoint())
        assert trainer.sync.catch_up() == 0
    else:
        assert trainer.sync.step().reason == "interrupted"
    assert (trainer.sync.round_index, trainer.sync.inner_step) == (2, 0)
    trainer.optimizer.zero_grad()
    trainer.run_rounds(1)
    assert trainer.bits() == undisturbed.bits()
    assert trainer.sync.counters.wasted_inner_steps == 0


def test_unfit_content_is_never_folded_even_if_its_round_is_final_without_it(lone: Lone) -> None:
    trainer = lone()
    trainer.run_rounds(1)
    kept = [residual.clone() for residual in trainer.sync.state.residual]
    root = trainer.sync.state_root
    trainer.exchange.abstain = lambda index, reason: RoundResult(Outcome.MISSED, iter([FinalRound(1, root, None)]))
    for _ in range(2):
        trainer.train_step()
    with torch.no_grad():
        next(trainer.model.parameters())[0, 0] = float("nan")
    trainer.train_step()
    assert (trainer.reports[-1].outcome, trainer.reports[-1].reason) == (Outcome.REJECTED, "finite")
    assert trainer.sync.round_index == 2
    assert all(torch.equal(a, b) for a, b in zip(kept, trainer.sync.state.residual, strict=True))
    assert trainer.sync.counters.wasted_inner_steps == 3


def test_a_version_is_handed_over_when_the_round_moved(lone: Lone) -> None:
    published: list[tuple[Any, int]] = []
    reported: list[int] = []
    trainer = lone(options={"on_round": lambda report: reported.append(len(published))})
    trainer.exchange.publish = lambda model, round_index: published.append((model, round_index))
    trainer.run_rounds(1)
    submit = trainer.exchange.submit
    trainer.exchange.submit = lambda contribution: RoundResult(Outcome.DEFERRED)
    for _ in range(3):
        trainer.train_step()
    trainer.exchange.submit = submit
    trainer.run_rounds(1)
    assert published == [(trainer.model, 1), (trainer.model, 2)]
    assert reported == [1, 1, 2]
