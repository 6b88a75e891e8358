"""Rounds as a training loop sees them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import ConfigError, LocalProtocolError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.outer.checks import FaultCode
from pulsenet.outer.contribution import Contribution
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenet.training.exchange import FinalRound, Outcome, RoundResult
from pulsenet.training.local_exchange import LocalExchange, LocalMember
from pulsenet.training.outer_optimizer import OuterOptimizer

Lone = Callable[..., Any]
Swarm = Callable[..., Any]

FLUSHES = {"flush_interval": 2, "flush_mantissa_bits": 1}


def test_nothing_happens_before_the_last_inner_step(lone: Lone) -> None:
    trainer = lone()
    for _ in range(2):
        trainer.train_step()
    assert (trainer.sync.round_index, trainer.sync.inner_step, trainer.reports) == (0, 2, [])
    trainer.train_step()
    assert (trainer.sync.round_index, trainer.sync.inner_step) == (1, 0)
    report = trainer.reports[0]
    assert report.outcome is Outcome.COUNTED
    assert 0 < report.density < 1
    assert report.residual_norm > 0
    assert report.contributor_count == 1


def test_local_masters_restart_from_theta(lone: Lone) -> None:
    trainer = lone()
    trainer.run_rounds(2)
    for theta, parameter in zip(
        trainer.sync.state.theta, (p for _, p in sorted(trainer.model.named_parameters())), strict=True
    ):
        assert torch.equal(theta.view(parameter.shape), parameter)


@pytest.mark.parametrize(("where", "flushes"), [(0, {}), (1, {}), (2, {}), (0, FLUSHES), (1, FLUSHES)])
def test_a_killed_run_goes_on_bit_by_bit(lone: Lone, where: int, flushes: dict[str, int]) -> None:
    """A-LOC-3: checkpoint in round 10, at its start or within it; killed, restored, run to 30."""
    settings = OuterSettings(inner_steps=3, **flushes)
    uninterrupted = lone(settings)
    uninterrupted.run_rounds(10)
    for _ in range(where):
        uninterrupted.train_step()
    saved = uninterrupted.checkpoint()
    uninterrupted.run_rounds(20)
    restored = lone(settings)
    # The in-process exchange knows no earlier rounds of another process; the lone run's receipts are its own.
    restored.exchange._swarm.rounds = list(uninterrupted.exchange._swarm.rounds[:10])
    restored.restore(saved)
    assert restored.sync.catch_up() == 0
    restored.run_rounds(20)
    assert restored.sync.round_index == 30
    assert restored.bits() == uninterrupted.bits()
    assert restored.sync.counters == uninterrupted.sync.counters


def test_a_run_killed_while_its_contribution_waits_counts_it_once(lone: Lone) -> None:
    uninterrupted = lone()
    uninterrupted.run_rounds(2)
    uninterrupted.train_step()
    uninterrupted.train_step()
    waiting = lone()
    waiting.exchange._swarm.rounds = list(uninterrupted.exchange._swarm.rounds)
    waiting.restore(uninterrupted.checkpoint())

    class Killed(Exception):
        pass

    def die(contribution: Contribution) -> RoundResult:
        LocalMember.submit(waiting.exchange, contribution)
        raise Killed

    waiting.exchange.submit = die
    with pytest.raises(Killed):
        waiting.train_step()
    saved = waiting.checkpoint()
    assert saved["sync"]["pending"] is not None
    restored = lone()
    restored.exchange._swarm.rounds = waiting.exchange._swarm.rounds
    restored.restore(saved)
    assert restored.sync.catch_up() == 0
    restored.reports.append(restored.sync.step())
    uninterrupted.train_step()
    assert restored.reports[-1].outcome is Outcome.COUNTED
    assert restored.bits() == uninterrupted.bits()
    assert len(restored.exchange._swarm.rounds) == 3


def test_an_inner_step_while_a_contribution_waits_is_refused(lone: Lone) -> None:
    trainer = lone()
    answers = iter([UnavailableError("coordinator away")])
    submit = trainer.exchange.submit

    def once_away(contribution: Contribution) -> RoundResult:
        answer = next(answers, None)
        if answer is not None:
            raise answer
        return submit(contribution)

    trainer.exchange.submit = once_away
    with pytest.raises(UnavailableError):
        trainer.run_rounds(1)
    with pytest.raises(LocalProtocolError, match="waits for its round's receipt"):
        trainer.optimizer.step()
    report = trainer.sync.step()
    assert report is not None
    assert report.outcome is Outcome.COUNTED
    trainer.run_rounds(1)


def test_trainers_with_other_data_agree_on_every_bit(make_swarm: Swarm) -> None:
    swarm = make_swarm(3)
    for _ in range(3):
        swarm.run_rounds(1)
        assert len(swarm.thetas()) == 1
        assert len({trainer.sync.state_root for trainer in swarm.trainers.values()}) == 1
    residuals = {trainer.sync.state.residual[0].numpy().tobytes() for trainer in swarm.trainers.values()}
    assert len(residuals) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": Algorithm.PULSELOCO},
        {"algorithm": Algorithm.DILOCO},
        FLUSHES,
        {"flush_interval": 3},
    ],
)
def test_nothing_is_lost_whoever_is_late(make_swarm: Swarm, settings: dict[str, Any]) -> None:
    """A-LOC-2 for whole trainers: counted + residual is the sum of the steps of all, in FP64."""
    swarm = make_swarm(
        3,
        settings={**settings, "missed_rounds_max": 9},
        learning_rate=3e-6,
        is_late=lambda member, index: index % 3 == member,
    )
    steps: dict[int, Any] = dict.fromkeys(swarm.trainers, 0.0)
    for index, trainer in swarm.trainers.items():
        begin = trainer.sync.begin_round

        def watched(index: int = index, trainer: Any = trainer, begin: Any = begin) -> Any:
            state = trainer.sync.state
            local = [p.detach().reshape(-1).double() for _, p in sorted(trainer.model.named_parameters())]
            steps[index] += torch.cat([t.double() - p for t, p in zip(state.theta, local, strict=True)])
            return begin()

        trainer.sync.begin_round = watched
    swarm.run_rounds(7)
    for index, trainer in swarm.trainers.items():
        counted = [np.zeros(spec.element_count) for spec in trainer.sync.state.table.tensors]
        for final in swarm.exchange.final_rounds(index, 0):
            for entries in final.own.entries if final.own is not None else ():
                counted[entries.tensor_index][slice(None) if entries.indices is None else entries.indices] += (
                    entries.values.astype(np.float64)
                )
        held = np.concatenate([residual.numpy().astype(np.float64) for residual in trainer.sync.state.residual])
        assert np.abs(np.concatenate(counted) + held - steps[index].numpy()).max() <= 1e-10
        assert trainer.sync.counters.missed >= 2
        assert trainer.sync.counters.missed + trainer.sync.counters.counted == 7


def test_every_tensor_passes_whole_in_its_turn_and_the_rest_of_its_values_stays(make_swarm: Swarm) -> None:
    swarm = make_swarm(2, settings=FLUSHES, learning_rate=3e-6)
    for round_index in range(4):
        swarm.run_rounds(1)
        (final,) = swarm.exchange.final_rounds(0, round_index)
        assert final.own is not None
        state = swarm.trainers[0].sync.state
        for entries, residual in zip(final.own.entries, state.residual, strict=True):
            # All tensors are smaller than a block.
            is_turn = entries.tensor_index % 2 == round_index % 2
            assert (len(entries) == residual.numel()) == is_turn
            if is_turn:
                assert (entries.values.view(np.uint32) % (1 << 22) == 0).all()
                held = np.abs(residual.numpy())
                assert (held <= np.abs(entries.values)).all()
                assert held.any()
    assert len(swarm.thetas()) == 1


def test_a_trainer_that_dies_before_it_sent_is_not_counted(make_swarm: Swarm) -> None:
    """A-LOC-4: four trainers, one dies; the divisor is three, the survivors are equal."""
    swarm = make_swarm(4)
    swarm.run_rounds(1)
    swarm.trainers[2].train_step()
    swarm.exchange.leave(2)
    swarm.run_rounds(1, members=[0, 1, 3])
    dead = swarm.trainers.pop(2)
    assert len(swarm.thetas()) == 1
    assert {trainer.reports[-1].contributor_count for trainer in swarm.trainers.values()} == {3}
    assert dead.sync.round_index == 1


def test_a_trainer_that_dies_after_it_sent_is_counted_everywhere(make_swarm: Swarm) -> None:
    """A-LOC-4, the other half: the receipt lists it, so everyone counts it, itself when it returns, and only once."""
    swarm = make_swarm(3)
    swarm.run_rounds(1)
    dying = swarm.trainers[2]
    submit = dying.exchange.submit

    def die(contribution: Contribution) -> RoundResult:
        submit(contribution)
        raise UnavailableError("killed")

    dying.exchange.submit = die
    with pytest.raises(UnavailableError):
        swarm.run_rounds(1)
    swarm.exchange.leave(2)
    swarm.run_rounds(1, members=[0, 1])
    dying.exchange.submit = submit
    swarm.exchange.join(2)
    report = dying.sync.step()
    assert report.outcome is Outcome.COUNTED
    assert dying.sync.round_index == 3
    assert len(swarm.thetas()) == 1
    swarm.run_rounds(1)
    assert len(swarm.thetas()) == 1


def test_nan_and_infinity_are_rejected_and_poison_nothing(make_swarm: Swarm) -> None:
    """A-LOC-6: both say why and are left out; they keep their old residual and follow the others."""
    swarm = make_swarm(3)
    swarm.run_rounds(1)
    residuals = {}
    for index, value in ((1, float("nan")), (2, float("inf"))):
        trainer = swarm.trainers[index]
        trainer.train_step()
        residuals[index] = [residual.clone() for residual in trainer.sync.state.residual]
        with torch.no_grad():
            next(trainer.model.parameters())[0, 0] = value
    swarm.run_rounds(1)
    for index, held in residuals.items():
        trainer = swarm.trainers[index]
        assert trainer.reports[-1].outcome is Outcome.REJECTED
        assert trainer.reports[-1].reason == FaultCode.FINITE
        assert trainer.reports[-1].contributor_count == 1
        assert all(torch.equal(a, b) for a, b in zip(held, trainer.sync.state.residual, strict=True))
        assert trainer.sync.counters.rejected == 1
        assert trainer.sync.counters.wasted_inner_steps == 3
    assert len(swarm.thetas()) == 1
    swarm.run_rounds(1)
    assert len(swarm.thetas()) == 1
    for trainer in swarm.trainers.values():
        assert trainer.reports[-1].outcome is Outcome.COUNTED
        assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_what_another_peer_sends_unchecked_is_rejected_as_well(make_swarm: Swarm) -> None:
    """A-LOC-6 on the receiving side."""
    swarm = make_swarm(2)
    bad = swarm.trainers[1]
    submit = bad.exchange.submit

    def poison(contribution: Contribution) -> RoundResult:
        contribution.entries[0].values[0] = np.float32(np.nan)
        return submit(contribution)

    bad.exchange.submit = poison
    swarm.run_rounds(1)
    assert bad.reports[-1].outcome is Outcome.REJECTED
    assert swarm.exchange.rounds[0].rejected == {b"\x01": FaultCode.FINITE}
    assert len(swarm.thetas()) == 1


def test_a_contribution_far_above_the_median_is_clipped_and_keeps_the_rest(make_swarm: Swarm) -> None:
    swarm = make_swarm(3, settings={"clip_norm_ratio": 1.5})
    with torch.no_grad():
        # The outlier's steps are a hundred times as long.
        swarm.trainers[2].optimizer.param_groups[0]["lr"] *= 100
    swarm.run_rounds(1)
    (own,) = swarm.exchange.final_rounds(2, 0)
    assert 0.0 < own.own_scale < 0.2
    assert swarm.exchange.final_rounds(0, 0)[0].own_scale == 1.0
    assert own.own is not None
    entries = own.own.entries[0]
    held = swarm.trainers[2].sync.state.residual[0].numpy()[entries.indices]
    assert np.abs(held / entries.values).min() > 0.5
    assert len(swarm.thetas()) == 1


def test_a_trainer_restored_from_round_10_joins_round_13_and_counts_nothing_twice(make_swarm: Swarm) -> None:
    swarm = make_swarm(3)
    swarm.run_rounds(10)
    back = swarm.trainers[2]
    back.train_step()
    saved = back.checkpoint()
    swarm.run_rounds(3)
    sent = swarm.exchange.final_rounds(2, 10)
    back.restore(saved)
    before = [residual.clone() for residual in back.sync.state.residual]
    assert back.sync.catch_up() == 3
    assert back.sync.round_index == 13
    assert len(swarm.thetas()) == 1
    assert back.sync.counters.wasted_inner_steps == 1
    for index, residual in enumerate(back.sync.state.residual):
        cleared = before[index].clone()
        for final in sent:
            assert final.own is not None
            cleared[torch.from_numpy(final.own.entries[index].indices.astype(np.int64))] = 0.0
        assert torch.equal(cleared, residual)
    swarm.run_rounds(2)
    assert len(swarm.thetas()) == 1


def test_two_missed_rounds_give_the_residual_up_and_reset_the_inner_optimizer(make_swarm: Swarm) -> None:
    swarm = make_swarm(2, is_late=lambda member, index: member == 1 and index < 2)
    swarm.run_rounds(1)
    late = swarm.trainers[1]
    assert late.reports[-1].outcome is Outcome.MISSED
    assert not late.reports[-1].resynced
    assert late.sync.state.residual_norm() > 0
    assert late.optimizer.state
    swarm.run_rounds(1)
    assert late.reports[-1].resynced
    assert late.sync.state.residual_norm() == 0
    assert not late.optimizer.state
    assert late.sync.counters.resyncs == 1
    swarm.run_rounds(1)
    assert late.reports[-1].outcome is Outcome.COUNTED
    assert len(swarm.thetas()) == 1


def test_a_diverged_trainer_is_told_so_and_takes_the_state_anchor(make_swarm: Swarm) -> None:
    swarm = make_swarm(3, settings={"state_anchor_interval": 2})
    swarm.run_rounds(3)
    diverged = swarm.trainers[1]
    diverged.sync.state.theta[0][0] += 1.0
    diverged.sync._stepper.refresh_root()
    swarm.run_rounds(1)
    assert diverged.reports[-1].outcome is Outcome.REJECTED
    assert diverged.reports[-1].reason == FaultCode.BASE
    assert diverged.reports[-1].resynced
    assert diverged.sync.round_index == 4
    assert len(swarm.thetas()) == 1
    swarm.run_rounds(2)
    assert diverged.reports[-1].outcome is Outcome.COUNTED


@pytest.mark.parametrize("kept_rounds", ["all", "none"])
@pytest.mark.parametrize("starts_from", ["base model", "something else"])
def test_a_joiner_takes_the_state_and_warms_up(make_swarm: Swarm, kept_rounds: str, starts_from: str) -> None:
    swarm = make_swarm(3, settings={"state_anchor_interval": 2})
    joiner = swarm.trainers[2]
    swarm.exchange.leave(2)
    swarm.run_rounds(5, members=[0, 1])
    swarm.exchange.join(2)
    if starts_from == "something else":
        joiner.sync.state.theta[0][0] += 1.0
        joiner.sync._stepper.refresh_root()
    if kept_rounds == "none":
        swarm.exchange.forget_rounds(4)
    assert joiner.sync.catch_up() == 5
    assert len(swarm.thetas()) == 1
    assert joiner.sync._inner.warmup_left == 8
    swarm.run_rounds(1)
    assert len(swarm.thetas()) == 1
    assert joiner.reports[-1].outcome is Outcome.COUNTED


def test_while_no_round_is_open_inner_steps_go_on(lone: Lone) -> None:
    trainer = lone()
    submit = trainer.exchange.submit
    answers = iter([RoundResult(Outcome.DEFERRED, reason="no-coordinator")])
    trainer.exchange.submit = lambda contribution: next(answers, None) or submit(contribution)
    for _ in range(3):
        trainer.train_step()
    assert trainer.reports[-1].outcome is Outcome.DEFERRED
    assert trainer.sync.inner_step == 3
    trainer.train_step()
    assert trainer.reports[-1].outcome is Outcome.COUNTED
    assert trainer.sync.round_index == 1
    assert trainer.exchange._swarm.rounds[0].counted[b"\x00"][0].inner_step_count == 4


def test_a_receipt_that_lists_nobody_only_counts_the_round(lone: Lone) -> None:
    trainer = lone()
    trainer.run_rounds(1)
    before = [theta.clone() for theta in trainer.sync.state.theta]
    root = trainer.sync.state_root
    empty = RoundResult(Outcome.MISSED, (FinalRound(1, root, None),), "late")
    trainer.exchange.submit = lambda contribution: empty
    trainer.run_rounds(1)
    assert trainer.sync.round_index == 2
    assert trainer.reports[-1].contributor_count == 0
    assert trainer.sync.state_root != root
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.sync.state.theta, strict=True))


def test_the_copies_may_lie_in_files_and_give_the_same_bits(lone: Lone, tmp_path: Path) -> None:
    plain = lone()
    placed = lone(
        options={"theta": "host", "residual": tmp_path / "residual.bin", "momentum": tmp_path / "momentum.bin"}
    )
    plain.run_rounds(4)
    placed.run_rounds(4)
    assert placed.bits() == plain.bits()
    on_disk = np.fromfile(tmp_path / "residual.bin", np.float32, count=5)
    assert np.array_equal(on_disk, placed.sync.state.residual[0].numpy()[:5])


def test_a_bf16_model_trains_through_fp32_masters(lone: Lone) -> None:
    trainer = lone(dtype=torch.bfloat16, learning_rate=1e-4)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.run_rounds(3)
    assert all(parameter.dtype == torch.bfloat16 for parameter in trainer.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    for theta, (_, parameter) in zip(trainer.sync.state.theta, sorted(trainer.model.named_parameters()), strict=True):
        assert torch.equal(theta.view(parameter.shape).to(torch.bfloat16), parameter)
    assert 0 < trainer.reports[-1].density < 0.9


def test_a_bf16_run_resumes_bit_by_bit(lone: Lone) -> None:
    """A-LOC-3 with masters that no checkpoint of the model holds."""
    uninterrupted = lone(dtype=torch.bfloat16)
    uninterrupted.run_rounds(2)
    uninterrupted.train_step()
    saved = uninterrupted.checkpoint()
    uninterrupted.run_rounds(2)
    restored = lone(dtype=torch.bfloat16)
    restored.exchange._swarm.rounds = list(uninterrupted.exchange._swarm.rounds[:2])
    restored.restore(saved)
    restored.run_rounds(2)
    assert restored.bits() == uninterrupted.bits()


def test_training_nothing_sends_nothing_whatever_the_dtype(lone: Lone) -> None:
    """Without masters the rounding offset of BF16 weights alone would pass the gate."""
    for dtype in (torch.float32, torch.bfloat16):
        trainer = lone(dtype=dtype, learning_rate=0.0)
        trainer.run_rounds(1)
        assert trainer.reports[-1].sent_count == 0


def test_diloco_sends_everything_and_holds_nothing_back(lone: Lone) -> None:
    trainer = lone(OuterSettings(algorithm=Algorithm.DILOCO, inner_steps=3))
    trainer.run_rounds(2)
    assert trainer.reports[-1].density == 1.0
    assert trainer.reports[-1].residual_norm == 0.0


def test_the_schedule_follows_the_round_and_leaves_the_users_rate_alone(lone: Lone) -> None:
    seen: list[float] = []

    class Watching(torch.optim.SGD):
        def _init_group(self, group: Any, *args: Any) -> bool:
            seen.append(group["lr"])
            return super()._init_group(group, *args)

    model = torch.nn.Linear(2, 2)
    optimizer = Watching(model.parameters(), lr=1.0)
    exchange = LocalExchange(OuterSettings(inner_steps=2), 1).member(0)
    sync = OuterOptimizer(model, optimizer, exchange=exchange, schedule=lambda index: 0.5**index)
    for _ in range(6):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        sync.step()
        optimizer.zero_grad()
    assert seen == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_checkpoint_amid_a_warm_up_goes_on_with_a_shorter_one(lone: Lone) -> None:
    """No rate is negative, as one from before this one's first step would be."""
    trainer = lone()
    trainer.sync._inner.reset()
    other = lone(options={"warmup_steps": 2})
    other.restore(trainer.checkpoint())
    factors = []
    for _ in range(4):
        factors.append(other.sync._inner.compute_factor())
        other.train_step()
    assert factors == [1 / 3, 2 / 3, 1.0, 1.0]


@pytest.mark.parametrize("algorithm", [Algorithm.PULSELOCO, Algorithm.DDP])
def test_an_optimizer_that_is_wrapped_again_is_the_new_ones_alone(lone: Lone, algorithm: Algorithm) -> None:
    """As where a cell of a notebook is run again: rates are scaled once, gradients taken once, no step is refused."""
    trainer = lone(OuterSettings(algorithm=algorithm, inner_steps=1))

    def fail(contribution: Contribution) -> RoundResult:
        raise UnavailableError("the daemon is away")

    trainer.exchange.submit = fail
    with pytest.raises(UnavailableError):
        trainer.train_step()
    del trainer.exchange.submit
    trainer.sync = OuterOptimizer(
        trainer.model, trainer.optimizer, exchange=trainer.exchange, schedule=lambda round_index: 0.5
    )
    seen = []
    trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    trainer.optimizer.zero_grad()
    for _ in range(3):
        trainer.train_step()
    assert trainer.sync.round_index == 3
    assert set(seen) == {trainer.learning_rate / 2}
    assert trainer.optimizer.param_groups[0]["lr"] == trainer.learning_rate


def test_masters_of_an_earlier_wrapper_are_given_back(lone: Lone) -> None:
    trainer = lone(dtype=torch.bfloat16)
    trainer.sync = OuterOptimizer(trainer.model, trainer.optimizer, exchange=trainer.exchange)
    trainer.run_rounds(1)
    assert trainer.reports[-1].outcome is Outcome.COUNTED
    trainer.model(torch.ones(1, 12, dtype=torch.bfloat16)).sum().backward()
    trainer.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    with pytest.raises(ConfigError, match="has stepped them already"):
        OuterOptimizer(trainer.model, trainer.optimizer, exchange=trainer.exchange)


def test_publishing_can_follow_every_round(lone: Lone) -> None:
    published: list[int] = []
    trainer = lone(options={"on_round": lambda report: published.append(report.round_index)})
    trainer.run_rounds(3)
    assert published == [1, 2, 3]


def test_other_masters_and_unsound_arithmetic_are_refused(lone: Lone) -> None:
    trainer = lone()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="other masters"):
        OuterOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=trainer.exchange)
    with pytest.raises(ConfigError, match="arithmetic would diverge"):
        trainer.exchange.open(trainer.sync.state.table, Digest(bytes(32)), trainer.sync._stepper)


def test_an_exchange_is_needed(lone: Lone) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="needs an exchange"):
        OuterOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=None)
