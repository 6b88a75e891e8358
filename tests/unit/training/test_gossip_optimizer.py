"""Rounds of gossip in one process: what a loop sees, what a round computes, checkpoints and joiners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from small_trainers import run_at_once

from pulsenet.errors import ConfigError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Entries
from pulsenet.outer.mixing.mean import mean_entries, spread
from pulsenet.outer.mixing.settings import Job, MixingSettings, MixingVariant
from pulsenet.outer.mixing.step import compute_gradient, step_mixed_twin
from pulsenet.training.gossip_optimizer import GossipOptimizer
from pulsenet.training.local_mixer import Fault, LocalMixer, LocalMixing
from pulsenet.training.mixer import Mixed, Mixer, MixingReport, RoundPlan

INNER_STEPS = 3


def make_settings(variant: MixingVariant = MixingVariant.GLOBAL_M1_LOCAL_M2, **fields: Any) -> MixingSettings:
    return MixingSettings(variant=variant, inner_steps=INNER_STEPS, **fields)


class Trainer:
    """A model, its optimizer and its rounds; data come from (seed, inner step)."""

    def __init__(self, mixer: Mixer, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        torch.manual_seed(4)
        layers = [torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5)]
        self.mixer, self.seed = mixer, seed
        self.model = torch.nn.Sequential(*layers).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.sync = GossipOptimizer(self.model, self.optimizer, mixer=mixer, warmup_steps=0, **options)
        self.steps_done = 0
        self.reports: list[MixingReport] = []

    def train_step(self) -> MixingReport | None:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.steps_done)
        batch = torch.randn(8, 12, generator=generator).to(next(self.model.parameters()).dtype)
        torch.nn.functional.mse_loss(self.model(batch).float(), batch[:, :5].float().sin()).backward()
        self.optimizer.step()
        self.steps_done += 1
        report = self.sync.step()
        if report is not None:
            self.reports.append(report)
        self.optimizer.zero_grad()
        return report

    def run(self, rounds: int) -> None:
        end = len(self.reports) + rounds
        while len(self.reports) < end:
            self.train_step()

    def z(self) -> list[bytes]:
        return [values.numpy().tobytes() for values in self.sync.state.z]

    def checkpoint(self) -> dict[str, Any]:
        def copy(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.detach().clone()
            return {key: copy(one) for key, one in value.items()} if isinstance(value, dict) else value

        parts = (self.model, self.optimizer, self.sync)
        return {"steps_done": self.steps_done, "parts": [copy(part.state_dict()) for part in parts]}

    def restore(self, saved: dict[str, Any]) -> None:
        for part, held in zip((self.model, self.optimizer, self.sync), saved["parts"], strict=True):
            part.load_state_dict(held)
        self.steps_done = saved["steps_done"]


def run_together(trainers: Sequence[Trainer], rounds: int | Callable[[Trainer], None]) -> None:
    """Let every trainer run in a thread of its own; the first error is raised here."""

    def work(trainer: Trainer) -> None:
        try:
            if callable(rounds):
                rounds(trainer)
            else:
                trainer.run(rounds)
        except BaseException:
            trainer.mixer.close()
            raise

    run_at_once([partial(work, trainer) for trainer in trainers], 100)


def make_swarm(settings: MixingSettings, count: int, **options: Any) -> tuple[LocalMixing, list[Trainer]]:
    mixing = LocalMixing(settings, count, **options)
    return mixing, [Trainer(mixing.member(index), seed=index) for index in range(count)]


class SlowMixer(LocalMixer):
    """A lone member's mixer that writes down what it is asked, and when the vectors were read."""

    def __init__(self, settings: MixingSettings) -> None:
        super().__init__(LocalMixing(settings, 1), 0)
        self.asked: list[str] = []
        self.handed: dict[Job, Sequence[Iterable[Entries]]] = {}
        self.answers: dict[Job, Mixed] = {}

    def begin_round(self, round_index: int, iterate: Any = tuple) -> RoundPlan:
        self.asked.append(f"round {round_index}")
        return super().begin_round(round_index)

    def start(self, job: Job, sections: Sequence[Iterable[Entries]], *, mixed_root: Digest | None = None) -> None:
        self.asked.append(f"start {job.name}")
        self.handed[job] = sections

    def result(self, job: Job) -> Mixed:
        self.asked.append(f"result {job.name}")
        return self.answers.get(job, Mixed(None))

    def abandon(self) -> None:
        self.asked.append("abandon")


def test_mix1_is_started_before_the_inner_steps_and_asked_for_after_them() -> None:
    """A-GOS-2: no inner step waits for Mix1, and nothing of z is read before its mixer likes to."""
    trainer = Trainer(mixer := SlowMixer(make_settings()))
    trainer.train_step()
    assert mixer.asked == ["round 0", "start MIX1"], "it begins with the first step"
    trainer.run(1)
    assert mixer.asked[2:] == ["result MIX1", "start MIX2", "result MIX2", "round 1", "start MIX1"]
    asked = len(mixer.asked)
    z = trainer.z()
    trainer.train_step()
    trainer.train_step()
    assert len(mixer.asked) == asked, "inner steps ask nothing"
    handed = [entries.values.tobytes() for entries in mixer.handed[Job.MIX1][0]]
    assert handed == z, "z stands still meanwhile, though the weights move"


def test_a_round_computes_what_the_numpy_twin_does() -> None:
    trainer = Trainer(mixer := SlowMixer(make_settings(mixes_momentum=True)))
    for step in range(2 * INNER_STEPS):
        if step == 2 * INNER_STEPS - 1:
            break
        trainer.train_step()
    draw = np.random.default_rng(5)
    shapes = [values.numel() for values in trainer.sync.state.z]
    x, delta, momentum = ([draw.normal(size=n).astype(np.float32) for n in shapes] for _ in range(3))
    mixer.answers = {Job.MIX1: Mixed((tuple(x),), 4), Job.MIX2: Mixed((tuple(delta), tuple(momentum)), 2)}
    expected = [
        step_mixed_twin(one, v.copy(), d, learning_rate=np.float32(0.7), momentum_factor=np.float32(0.9))
        for one, d, v in zip(x, delta, momentum, strict=True)
    ]
    before = trainer.z()
    report = trainer.train_step()
    assert report is not None
    assert trainer.z() == [values.tobytes() for values in expected]
    assert (report.mix1_count, report.mix2_count) == (4, 2)
    old = np.concatenate([np.frombuffer(values, np.float32) for values in before])
    assert report.distance == pytest.approx(float(np.linalg.norm(old - np.concatenate(x))), rel=1e-5)


@pytest.mark.parametrize("variant", list(MixingVariant))
def test_alone_it_is_a_local_outer_step(variant: MixingVariant) -> None:
    """Nothing arrives: own values are used, and z moves as Nesterov's momentum says."""
    trainer = Trainer(SlowMixer(make_settings(variant)))
    z = [values.numpy().copy() for values in trainer.sync.state.z]
    for _ in range(INNER_STEPS - 1):
        trainer.train_step()
    last: list[np.ndarray[Any, Any]] = []
    trainer.optimizer.register_step_post_hook(
        lambda *_: last.__setitem__(slice(None), [p.detach().numpy().reshape(-1).copy() for p in trainer_masters()])
    )

    def trainer_masters() -> list[torch.Tensor]:
        named = dict(trainer.model.named_parameters())
        return [named[spec.name] for spec in trainer.sync.state.table.tensors]

    report = trainer.train_step()
    assert report is not None
    for index, start in enumerate(z):
        velocity = np.zeros_like(start)
        expected = step_mixed_twin(
            start,
            velocity,
            compute_gradient(start, last[index]),
            learning_rate=np.float32(0.7),
            momentum_factor=np.float32(0.9),
        )
        assert trainer.z()[index] == expected.tobytes()
    assert report.mix1_count == (variant is not MixingVariant.DILOCO)
    assert report.mix2_count == (variant is not MixingVariant.GLOBAL_M1)
    assert trainer.sync.counters.mixed_jobs == 0
    assert trainer.sync.round_index == 1


def test_four_trainers_of_the_global_mean_agree_on_x() -> None:
    mixing, trainers = make_swarm(make_settings(MixingVariant.DILOCO), 4)
    run_together(trainers, 3)
    assert len({tuple(trainer.z()) for trainer in trainers}) == 1
    assert [report.mix2_count for report in mixing.reports[0]] == [4, 4, 4]


@pytest.mark.parametrize(
    ("variant", "counts"),
    [
        (MixingVariant.GLOBAL_M1, (4, 0)),
        (MixingVariant.GLOBAL_M1_LOCAL_M2, (4, 2)),
        (MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET, (4, 2)),
        (MixingVariant.LOCAL_M1_M2, (2, 2)),
    ],
)
def test_every_variant_trains_and_mixes(variant: MixingVariant, counts: tuple[int, int]) -> None:
    subset = (0, 3) if variant.mixes_subset else None
    mixing, trainers = make_swarm(make_settings(variant), 4, subset=subset)
    run_together(trainers, 3)
    for index in range(4):
        assert [(one.mix1_count, one.mix2_count) for one in mixing.reports[index]] == [counts] * 3
    assert len({tuple(trainer.z()) for trainer in trainers}) > 1, "without a barrier they differ"
    spread = [np.ptp([np.frombuffer(t.z()[0], np.float32) for t in trainers], axis=0).max()]
    assert max(spread) < 0.1, "but not by much"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25])
@pytest.mark.parametrize("variant", list(MixingVariant))
def test_inner_steps_that_end_in_what_nobody_takes_are_given_up(variant: MixingVariant, value: float) -> None:
    """Nothing of it stays in z or the momentum, where it would be for ever, and nobody else sees it."""
    settings = make_settings(variant)
    _, (one, other) = make_swarm(settings, 2, subset=(0, 3) if variant.mixes_subset else None)
    run_together([one, other], 1)

    def diverge(trainer: Trainer) -> None:
        for _ in range(INNER_STEPS - 1):
            trainer.train_step()
        if trainer is one:
            with torch.no_grad():
                next(one.model.parameters())[0, 0] = value
        trainer.run(1)

    run_together([one, other], diverge)
    assert not one.optimizer.state
    assert other.optimizer.state
    assert (one.sync.counters.wasted_inner_steps, other.sync.counters.wasted_inner_steps) == (INNER_STEPS, 0)
    run_together([one, other], 2)
    for trainer in (one, other):
        held = (*trainer.sync.state.z, *trainer.sync.state.momentum, *trainer.model.parameters())
        assert all(bool(values.isfinite().all()) for values in held)
        assert max(float(values.detach().abs().max()) for values in held) < 10.0
        assert {report.mix2_count for report in trainer.reports[-3:]} == {2 if settings.vectors(Job.MIX2) else 0}


def test_the_odd_one_out_mixes_alone() -> None:
    mixing, trainers = make_swarm(make_settings(MixingVariant.LOCAL_M1_M2), 3)
    run_together(trainers, 2)
    for round_index in range(2):
        counts = sorted(mixing.reports[index][round_index].mix1_count for index in range(3))
        assert counts == [1, 2, 2]


def test_lost_exchanges_never_abort_a_round() -> None:
    def find_fault(round_index: int, job: Job, member: int) -> Fault:
        return Fault.LOST if (round_index + member) % 2 else Fault.NONE

    mixing, trainers = make_swarm(make_settings(), 4, find_fault=find_fault)
    run_together(trainers, 4)
    for index in range(4):
        assert len(mixing.reports[index]) == 4
        for report in mixing.reports[index]:
            is_lost = (report.round_index + index) % 2 == 1
            assert report.mix1_count == (1 if is_lost else 2)
            assert report.mix1_reason == "lost"


def test_a_mean_that_only_one_side_applied_is_made_up_for() -> None:
    """Half-delivered in round 0: what both hold in sum is what it would have been, once round 1 has mixed."""

    def find_fault(round_index: int, job: Job, member: int) -> Fault:
        return Fault.UNCONFIRMED if (round_index, job, member) == (0, Job.MIX1, 1) else Fault.NONE

    settings = make_settings(MixingVariant.LOCAL_M1_M2, learning_rate=0.0)
    mixing = LocalMixing(settings, 2, find_fault=find_fault)
    trainers = [Trainer(mixing.member(index), seed=index) for index in range(2)]
    for index, trainer in enumerate(trainers):
        for values in trainer.sync.state.z:
            values.add_(0.5 * index)
    mean = [np.mean([t.sync.state.z[i].numpy() for t in trainers], axis=0) for i in range(4)]
    run_together(trainers, 1)
    assert mixing.reports[1][0].mix1_reason == "unconfirmed"
    assert trainers[0].z() != trainers[1].z()
    run_together(trainers, 1)
    for index, expected in enumerate(mean):
        for trainer in trainers:
            np.testing.assert_allclose(trainer.sync.state.z[index].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_joiner_takes_the_mean_over_and_its_first_step_is_lost() -> None:
    settings = make_settings(MixingVariant.GLOBAL_M1)
    mixing, trainers = make_swarm(settings, 2)
    run_together(trainers, 3)
    mixing.join(2)
    late = Trainer(mixing.member(2), seed=2)
    for values in late.sync.state.z:
        values.fill_(9.0)
    assert late.train_step() is None
    assert late.sync.round_index == 3
    assert late.sync.inner_step == 0
    assert late.sync.counters.wasted_inner_steps == 1
    assert float(late.sync.state.z[0].abs().max()) < 5.0
    weights = [p.detach().numpy().tobytes() for p in late.model.parameters()]
    assert weights[0] in late.z(), "inner steps begin at what was taken over"
    run_together([*trainers, late], 2)
    assert mixing.reports[2][0].adopted
    assert not mixing.reports[2][1].adopted
    assert mixing.reports[2][-1].mix1_count == 3


def test_a_straggler_goes_on_in_the_newest_round_with_its_own_z() -> None:
    mixing = LocalMixing(make_settings(), 1)
    trainer = Trainer(mixing.member(0))
    trainer.run(1)
    mixing.begin_round(6)
    z = trainer.z()
    trainer.run(1)
    assert trainer.reports[-1].round_index == 1, "the round under way is finished first"
    assert trainer.sync.round_index == 6
    assert trainer.z() != z
    assert trainer.sync.counters.adoptions == 0


def test_a_checkpoint_amid_a_round_goes_on_bit_by_bit() -> None:
    one = Trainer(LocalMixing(make_settings(), 1).member(0), dtype=torch.bfloat16)
    one.run(1)
    one.train_step()
    saved = one.checkpoint()
    other = Trainer(LocalMixing(make_settings(), 1).member(0), dtype=torch.bfloat16)
    other.restore(saved)
    assert other.sync.catch_up() == 0
    for trainer in (one, other):
        trainer.run(2)
    assert one.z() == other.z()
    assert [t.detach().float().numpy().tobytes() for t in one.model.parameters()] == [
        t.detach().float().numpy().tobytes() for t in other.model.parameters()
    ]
    assert other.sync.counters.rounds == one.sync.counters.rounds == 3


def test_loading_a_checkpoint_gives_up_what_is_under_way() -> None:
    trainer = Trainer(mixer := SlowMixer(make_settings()))
    saved = trainer.checkpoint()
    trainer.train_step()
    trainer.restore(saved)
    assert mixer.asked[-1] == "abandon"
    trainer.train_step()
    assert mixer.asked[-2:] == ["round 0", "start MIX1"]


def test_a_warm_up_of_a_checkpoint_is_no_longer_than_this_one() -> None:
    trainer = Trainer(SlowMixer(make_settings()))
    saved = trainer.checkpoint()
    saved["parts"][2]["numbers"]["warmup_left"] = 5
    trainer.restore(saved)
    assert trainer.sync._inner.compute_factor() == 1.0


def test_utilisation_is_measured_by_the_clock() -> None:
    """Ten seconds a step, a second in Mix1's result and two to begin a round."""
    now = [0.0]

    class Clocked(SlowMixer):
        def result(self, job: Job) -> Mixed:
            now[0] += 1.0
            return super().result(job)

        def begin_round(self, round_index: int, iterate: Any = tuple) -> RoundPlan:
            now[0] += 2.0
            return super().begin_round(round_index)

    trainer = Trainer(Clocked(make_settings(MixingVariant.GLOBAL_M1)), clock=lambda: now[0])
    for _ in range(2 * INNER_STEPS):
        now[0] += 10.0
        trainer.train_step()
    first, second = trainer.reports
    assert (first.inner_seconds, first.blocked_seconds) == (20.0, 5.0), "nobody knows when the first step began"
    assert (second.inner_seconds, second.blocked_seconds) == (30.0, 3.0)
    assert trainer.sync.counters.utilization == pytest.approx(50 / 58)


@pytest.mark.parametrize(
    ("variant", "is_consensus"),
    [(MixingVariant.GLOBAL_M1, True), (MixingVariant.LOCAL_M1_M2, False), (MixingVariant.DILOCO, True)],
)
def test_what_is_published_is_the_mean_where_there_is_one(variant: MixingVariant, is_consensus: bool) -> None:
    mixing = LocalMixing(make_settings(variant), 2)
    trainers = [Trainer(mixing.member(index), seed=index) for index in range(2)]
    before: dict[int, list[np.ndarray[Any, Any]]] = {}

    def work(trainer: Trainer) -> None:
        trainer.run(1)
        trainer.mixer.publishes = trainer.seed == 0  # type: ignore[attr-defined, misc]
        before[trainer.seed] = [values.numpy().copy() for values in trainer.sync.state.z]
        trainer.run(1)

    run_together(trainers, work)
    (version,) = trainers[0].mixer.versions  # type: ignore[attr-defined]
    assert trainers[1].mixer.versions == []  # type: ignore[attr-defined]
    number, was_consensus, weights = version
    assert (number, was_consensus) == (2, is_consensus)
    for index, spec in enumerate(trainers[0].sync.state.table.tensors):
        expected = trainers[0].sync.state.z[index].numpy()
        if variant is MixingVariant.GLOBAL_M1:
            parts = {bytes([seed]): Entries(index, None, before[seed][index]) for seed in (0, 1)}
            expected = mean_entries(parts, tensor_index=index, element_count=spec.element_count).values
        np.testing.assert_array_equal(weights[spec.name].numpy().reshape(-1), expected)
    params = dict(trainers[0].model.named_parameters())
    for index, spec in enumerate(trainers[0].sync.state.table.tensors):
        assert params[spec.name].detach().numpy().tobytes() == trainers[0].z()[index], "training goes on from z"


class GatedMixer(SlowMixer):
    """The same in a gated run, as the only member: every mean is what it sent."""

    @property
    def settings(self) -> MixingSettings:
        return make_settings(mixing_gate=True, roster_rounds=4)

    def result(self, job: Job) -> Mixed:
        super().result(job)
        sections = [list(section) for section in self.handed[job]]
        sizes = [spec.element_count for spec in mixing_table().tensors]
        found = tuple(tuple(spread(one, sizes[one.tensor_index]).copy() for one in section) for section in sections)
        return Mixed(found, 1, is_common=job is Job.MIX1)


def test_a_gated_run_sends_what_moved_and_goes_on_bit_by_bit_from_a_checkpoint() -> None:
    one = Trainer(mixer := GatedMixer(make_settings()))
    one.train_step()
    assert [entries.indices for entries in mixer.handed[Job.MIX1][0]] == [None] * 4, "the first round is whole"
    one.run(2)
    assert all(entries.indices is not None for entries in mixer.handed[Job.MIX1][0])
    assert all(entries.indices is not None for entries in mixer.handed[Job.MIX2][0])
    saved = one.checkpoint()
    other = Trainer(GatedMixer(make_settings()))
    other.restore(saved)
    other.sync.catch_up()
    for trainer in (one, other):
        trainer.run(1)
    assert one.sync.round_index == other.sync.round_index == 3
    assert saved["parts"][2]["mixed_root"] != ""
    assert one.z() == other.z()


def test_residuals_of_a_gated_run_hold_nothing_of_inner_steps_that_are_given_up() -> None:
    trainer = Trainer(GatedMixer(make_settings()))
    trainer.run(2)
    for _ in range(INNER_STEPS - 1):
        trainer.train_step()
    with torch.no_grad():
        next(trainer.model.parameters())[0, 0] = float("nan")
    trainer.run(3)
    gate = trainer.sync._gate
    assert gate is not None
    assert all(np.isfinite(held).all() for held in (*gate.iterate_residual, *gate.gradient_residual))
    assert all(bool(z.isfinite().all()) for z in trainer.sync.state.z)


def test_an_exchange_is_no_mixer() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="needs a mixer, such as join_mixing"):
        GossipOptimizer(model, optimizer, mixer=object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a mixer on rank 0"):
        GossipOptimizer(model, optimizer, mixer=None)


def test_other_masters_and_unsound_arithmetic_are_refused() -> None:
    mixing = LocalMixing(make_settings(), 2)
    Trainer(mixing.member(0))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="other masters"):
        GossipOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), mixer=mixing.member(1))
    with pytest.raises(ConfigError, match="self-test"):
        mixing.take_table(mixing_table(), Digest(bytes(32)))


def mixing_table() -> Any:
    return Trainer(LocalMixing(make_settings(), 1).member(0)).sync.state.table


def test_a_replaced_parameter_is_refused() -> None:
    trainer = Trainer(SlowMixer(make_settings()))
    trainer.train_step()
    trainer.train_step()
    trainer.model[0].weight = torch.nn.Parameter(torch.zeros(16, 12))
    with pytest.raises(ConfigError, match="replaced"):
        trainer.train_step()
