"""The baseline ``ddp`` in one process: gradients are taken, averaged, and stepped by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import ConfigError, LocalProtocolError, UnavailableError
from pulsenet.outer.contribution import Contribution
from pulsenet.outer.inner_state import decode_slots
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenet.training.exchange import Outcome, Restoration, RoundResult
from pulsenet.training.gradients import read_slots, take_gradients, write_slots
from pulsenet.training.local_exchange import HeldState, LocalExchange
from pulsenet.training.masters import adopt_masters
from pulsenet.training.outer_optimizer import OuterOptimizer

Lone = Callable[..., Any]
MakeSwarm = Callable[..., Any]

DDP = OuterSettings(algorithm=Algorithm.DDP, inner_steps=3)
SWARM = {"settings": {"algorithm": Algorithm.DDP}}


def weights(trainer: Any) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in trainer.model.parameters())


def moments(trainer: Any) -> dict[str, list[torch.Tensor]]:
    states = [state for _, state in sorted(trainer.optimizer.state_dict()["state"].items())]
    return {name: [state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq")}


def make_sync(optimizer_type: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any, OuterOptimizer]:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = optimizer_type(model.parameters(), lr=0.1, **options)
    return model, optimizer, OuterOptimizer(model, optimizer, exchange=LocalExchange(DDP, 1).member(0))


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(1, 3)).square().sum().backward()


def test_everyone_steps_by_the_mean_gradient_as_one_process_on_all_batches_would(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(3, **SWARM)
    swarm.run_rounds(6)
    assert len({weights(trainer) for trainer in swarm.trainers.values()}) == 1
    assert len({trainer.sync.state_root for trainer in swarm.trainers.values()}) == 1
    assert len(swarm.exchange.rounds) == 6
    alone = make_swarm(1, settings={"algorithm": Algorithm.DDP}).trainers[0]
    optimizer = torch.optim.AdamW(alone.model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(6):
        batches = [
            torch.randn(8, 12, generator=torch.Generator().manual_seed((index + 1) * 100_003 + step))
            for index in range(3)
        ]
        batch = torch.cat(batches)
        torch.nn.functional.mse_loss(alone.model(batch), batch[:, :5].sin()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(alone.model.parameters(), swarm.trainers[0].model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_lone_trainer_steps_as_without_pulsenet(lone: Lone) -> None:
    plain = lone(DDP)
    trainer = lone(DDP)
    trainer.run_rounds(4)
    optimizer = torch.optim.AdamW(plain.model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(4):
        batch = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        torch.nn.functional.mse_loss(plain.model(batch), batch[:, :5].sin()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weights(trainer) == weights(plain)


def test_every_inner_step_is_a_round_with_a_report(lone: Lone) -> None:
    trainer = lone(DDP)
    trainer.run_rounds(4)
    assert [report.round_index for report in trainer.reports] == [1, 2, 3, 4]
    assert {report.outcome for report in trainer.reports} == {Outcome.COUNTED}
    assert {(report.density, report.residual_norm) for report in trainer.reports} == {(1.0, 0.0)}
    assert (trainer.sync.counters.counted, trainer.sync.counters.inner_steps) == (4, 4)


def test_a_joiner_replays_what_it_missed_from_the_start(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(3, **SWARM)
    swarm.exchange.leave(2)
    swarm.run_rounds(4, [0, 1])
    swarm.exchange.join(2)
    swarm.run(lambda trainer: trainer.train_step(), [2])
    joiner = swarm.trainers[2]
    assert (joiner.sync.round_index, joiner.sync.counters.wasted_inner_steps) == (4, 1)
    swarm.run_rounds(3)
    assert len({trainer.sync.state_root for trainer in swarm.trainers.values()}) == 1
    assert len({weights(trainer) for trainer in swarm.trainers.values()}) == 1
    assert joiner.reports[-1].contributor_count == 3


def test_a_joiner_takes_weights_and_the_inner_optimizers_state_from_a_state_anchor(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(3, settings={"algorithm": Algorithm.DDP, "state_anchor_interval": 2})
    swarm.exchange.leave(2)
    swarm.run_rounds(5, [0, 1])
    swarm.exchange.forget_rounds(4)
    swarm.exchange.join(2)
    swarm.run(lambda trainer: trainer.sync.catch_up(), [2])
    joiner, other = swarm.trainers[2], swarm.trainers[0]
    assert joiner.sync.round_index == 5
    assert joiner.sync.state_root == other.sync.state_root
    for name, found in moments(joiner).items():
        assert all(torch.equal(a, b) for a, b in zip(found, moments(other)[name], strict=True)), name
    swarm.run_rounds(2)
    assert len({weights(trainer) for trainer in swarm.trainers.values()}) == 1


def test_a_gradient_is_given_up_with_the_state_it_was_made_from(make_swarm: MakeSwarm) -> None:
    """The exchange goes away in the middle of a state anchor, which the first ``sync.step()`` of a joiner takes."""

    class Broken:
        def __init__(self, anchor: HeldState) -> None:
            self.round_index, self.state_root, self._anchor = anchor.round_index, anchor.state_root, anchor

        def tensors(self) -> Iterator[Any]:
            yield next(iter(self._anchor.tensors()))
            raise UnavailableError("away")

    swarm = make_swarm(3, settings={"algorithm": Algorithm.DDP, "state_anchor_interval": 2})
    swarm.exchange.leave(2)
    swarm.run_rounds(5, [0, 1])
    swarm.exchange.forget_rounds(4)
    swarm.exchange.join(2)
    joiner = swarm.trainers[2]
    catch_up = joiner.exchange.catch_up

    def break_off() -> Iterator[Restoration]:
        joiner.exchange.catch_up = catch_up
        move = next(iter(catch_up()))
        assert isinstance(move, Restoration)
        yield Restoration(Broken(move.anchor))

    joiner.exchange.catch_up = break_off
    with pytest.raises(UnavailableError, match="away"):
        joiner.train_step()
    joiner.sync.step()
    assert joiner.sync.state_root == swarm.trainers[0].sync.state_root
    joiner.optimizer.zero_grad()
    swarm.run_rounds(2)
    assert len({weights(trainer) for trainer in swarm.trainers.values()}) == 1
    assert joiner.reports[-1].outcome is Outcome.COUNTED


def test_who_misses_a_round_takes_the_others_mean_and_loses_its_own_gradient(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(3, is_late=lambda member, round_index: (member, round_index) in ((2, 1), (2, 2)), **SWARM)
    swarm.run_rounds(5)
    late = swarm.trainers[2]
    outcomes = [report.outcome for report in late.reports]
    assert outcomes == [Outcome.COUNTED, Outcome.MISSED, Outcome.DROPPED, Outcome.COUNTED, Outcome.COUNTED]
    assert late.sync.counters.wasted_inner_steps == 2
    assert not any(report.resynced for report in late.reports), "it holds the run's state all the time"
    assert len({weights(trainer) for trainer in swarm.trainers.values()}) == 1


def test_a_gradient_that_is_not_finite_is_given_up_and_nothing_moves(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(2, **SWARM)
    swarm.run_rounds(1)
    sick = swarm.trainers[1]

    def train(trainer: Any) -> None:
        if trainer is sick:
            trainer.model[0].weight.register_hook(lambda gradient: gradient * float("nan"))
        trainer.train_step()

    swarm.run(train)
    assert (sick.reports[-1].outcome, sick.reports[-1].reason) == (Outcome.REJECTED, "finite")
    assert sick.sync.round_index == 2, "it goes on with what the others found"
    assert len({weights(trainer) for trainer in swarm.trainers.values()}) == 1


def test_a_killed_run_goes_on_bit_by_bit(lone: Lone) -> None:
    uninterrupted = lone(DDP)
    uninterrupted.run_rounds(4)
    saved = uninterrupted.checkpoint()
    uninterrupted.run_rounds(3)
    restored = lone(DDP)
    restored.exchange._swarm.rounds = list(uninterrupted.exchange._swarm.rounds[:4])
    restored.restore(saved)
    assert restored.sync.catch_up() == 0
    restored.run_rounds(3)
    assert weights(restored) == weights(uninterrupted)
    assert restored.sync.state_root == uninterrupted.sync.state_root


def test_bf16_parameters_are_stepped_through_their_masters(lone: Lone) -> None:
    trainer = lone(DDP, dtype=torch.bfloat16)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.run_rounds(3)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    for master, (_, parameter) in zip(
        trainer.sync._masters.tensors, sorted(trainer.model.named_parameters()), strict=True
    ):
        assert torch.equal(master.to(torch.bfloat16), parameter)


def test_an_exchange_that_is_away_loses_nothing_and_is_tried_again(lone: Lone) -> None:
    trainer, plain = lone(DDP), lone(DDP)
    plain.run_rounds(3)
    submit, answers = trainer.exchange.submit, iter([UnavailableError("away"), UnavailableError("away")])

    def once_away(contribution: Contribution) -> RoundResult:
        for answer in answers:
            raise answer
        return submit(contribution)

    trainer.run_rounds(1)
    trainer.exchange.submit = once_away
    with pytest.raises(UnavailableError):
        trainer.train_step()
    with pytest.raises(LocalProtocolError, match=r"sync.step\(\) again before optimizer.step\(\)"):
        trainer.optimizer.step()
    assert trainer.sync.state_dict()["pending"] is not None
    with pytest.raises(UnavailableError):
        trainer.sync.step()
    assert trainer.sync.step().outcome is Outcome.COUNTED
    trainer.optimizer.zero_grad()
    trainer.run_rounds(1)
    assert weights(trainer) == weights(plain)


def test_a_second_optimizer_step_before_the_exchange_is_refused() -> None:
    model, optimizer, sync = make_sync()
    backward(model)
    optimizer.step()
    with pytest.raises(LocalProtocolError, match=r"sync.step\(\)"):
        optimizer.step()
    sync.step()
    assert sync.round_index == 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_inner_step_without_gradients_exchanges_nothing() -> None:
    """A loss scaler that found an overflow never calls ``optimizer.step()``."""
    model, optimizer, sync = make_sync()
    optimizer.step()
    assert sync.step() is None
    assert sync.step() is None
    backward(model)
    optimizer.step()
    assert sync.step() is not None


def test_no_round_can_be_closed_so_the_gradient_is_given_up(lone: Lone) -> None:
    trainer = lone(DDP)
    submit = trainer.exchange.submit
    trainer.exchange.submit = lambda contribution: RoundResult(Outcome.DEFERRED, reason="enospc", inner_steps=3)
    trainer.train_step()
    assert trainer.reports[-1].outcome is Outcome.DEFERRED
    assert (trainer.sync.counters.deferred, trainer.sync.counters.wasted_inner_steps) == (1, 1)
    trainer.exchange.submit = submit
    trainer.run_rounds(1)
    assert trainer.reports[-1].outcome is Outcome.COUNTED


def test_versions_and_the_schedule_count_as_many_inner_steps_as_a_round_has() -> None:
    seen: list[float] = []
    published: list[int] = []

    class Watching(torch.optim.SGD):
        def _init_group(self, group: Any, *args: Any) -> bool:
            if group["params"][0].grad is not None:
                seen.append(group["lr"])
            return super()._init_group(group, *args)

    model = torch.nn.Linear(3, 2)
    optimizer = Watching(model.parameters(), lr=1.0)
    exchange = LocalExchange(DDP, 1).member(0)
    exchange.publish = lambda model, round_index: published.append(round_index)  # type: ignore[method-assign]
    sync = OuterOptimizer(model, optimizer, exchange=exchange, schedule=lambda index: 0.5**index)
    for _ in range(7):
        backward(model)
        optimizer.step()
        sync.step()
    assert seen == [1.0] * 3 + [0.5] * 3 + [0.25]
    assert published == [3, 6]


def test_a_closure_and_scaled_gradients_are_refused() -> None:
    model, optimizer, _ = make_sync()
    backward(model)
    with pytest.raises(LocalProtocolError, match="closure"):
        optimizer.step(lambda: 0.0)
    optimizer.grad_scale = torch.ones(())
    with pytest.raises(LocalProtocolError, match="unscale_"):
        optimizer.step()


def test_a_frozen_parameter_is_not_moved_by_weight_decay() -> None:
    torch.manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(3, 2).to(dtype)
        model.bias.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        sync = OuterOptimizer(model, optimizer, exchange=LocalExchange(DDP, 1).member(0))
        before = [parameter.detach().clone() for parameter in (model.bias, model.weight)]
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        optimizer.step()
        sync.step()
        assert torch.equal(model.bias, before[0])
        assert not torch.equal(model.weight, before[1])


@pytest.mark.parametrize(
    "optimizer_type",
    [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor],
)
def test_the_state_of_torchs_optimizers_goes_through_an_anchor(optimizer_type: Any) -> None:
    model, optimizer, sync = make_sync(optimizer_type)
    for _ in range(3):
        backward(model)
        optimizer.step()
        sync.step()
    held = tuple((sync._stepper.theta(i).copy(), sync._stepper.momentum(i).copy()) for i in range(2))
    anchor = HeldState(3, sync.state_root, held)
    other, other_optimizer, joiner = make_sync(optimizer_type)
    with torch.no_grad():
        other.weight.add_(1.0)
    joiner._stepper.restore(Restoration(anchor))
    joiner._stepper.restart()
    assert joiner.state_root == sync.state_root
    joiner._has_caught_up = True
    joiner._exchange._swarm.rounds = list(sync._exchange._swarm.rounds)  # type: ignore[union-attr]
    for one, stepped, rounds in ((model, optimizer, sync), (other, other_optimizer, joiner)):
        backward(one)
        stepped.step()
        rounds.step()
    assert joiner.state_root == sync.state_root
    assert torch.equal(model.weight, other.weight)


def test_an_optimizer_whose_state_cannot_be_handed_over_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for value in (3, torch.ones(2, dtype=torch.bfloat16), torch.ones(3)):
        optimizer.state[parameter] = {"odd": value}
        with pytest.raises(ConfigError, match="'odd' of SGD"):
            read_slots(optimizer, parameter)


def test_single_numbers_lie_where_the_optimizer_reads_them() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    optimizer.step()
    slots = read_slots(optimizer, parameter)
    write_slots(optimizer, parameter, [])
    assert parameter not in optimizer.state
    write_slots(optimizer, parameter, slots)
    state = optimizer.state[parameter]
    assert (state["step"].shape, state["exp_avg"].shape) == ((), (2,))
    optimizer.step()
    assert state["step"].item() == 2.0


def test_absent_and_sparse_gradients_are_sent_dense() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = adopt_masters(model, optimizer)
    assert take_gradients(masters, optimizer) is None
    model[0](torch.tensor([1])).sum().backward()
    entries = take_gradients(masters, optimizer)
    assert entries is not None
    sent = {spec.name: one.values for spec, one in zip(masters.table.tensors, entries, strict=True)}
    assert sent["0.weight"].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert not sent["1.weight"].any()
    assert all(master.grad is None for master in masters.tensors)


def test_a_state_of_other_masters_is_never_taken() -> None:
    _, _, sync = make_sync()
    anchor = HeldState(1, sync.state_root, ((np.zeros(1, np.float32), sync._stepper.momentum(0)),))
    with pytest.raises(LocalProtocolError, match="elements"):
        sync._stepper.restore(Restoration(anchor))
    assert decode_slots(sync._stepper.momentum(0).view(np.uint8), 2) == ()
    with pytest.raises(LocalProtocolError):
        _ = sync.state
