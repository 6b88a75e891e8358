"""Wraps a torch optimizer so that trainers mix without a barrier (Factored Gossip DiLoCo): two lines in any loop.

::

    mixer = pulsenet.join_mixing()
    sync = GossipOptimizer(model, optimizer, mixer=mixer)
    for batch in data:
        loss(model, batch).backward()
        optimizer.step()
        sync.step()              # every H-th call mixes with others and does the outer step
        optimizer.zero_grad()

A round of one trainer: Mix1 of z begins and goes on beside the inner steps, which start from the unmixed z. Then
Mix2 of the pseudo-gradients is waited for, and the outer step is taken from what Mix1 gave. What does not come in
time is left out, and training goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pulsenet.errors import ConfigError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.mixing.settings import ALGORITHM, Job, MixingKind, MixingSettings, Vector
from pulsenet.training.gossip_gate import GossipGate
from pulsenet.training.gossip_state import GossipState, MixingCounters, pack_mixing, unpack_mixing
from pulsenet.training.inner import InnerOptimizer, Schedule, take_optimizer
from pulsenet.training.masters import adopt_masters
from pulsenet.training.mixer import NOTHING_MIXED, Mixed, Mixer, MixingReport, RoundPlan
from pulsenet.training.mixing_measures import RoundMeasures
from pulsenet.training.mixing_work import compute_mixed_root
from pulsenet.training.outer_optimizer import WARMUP_STEPS_DEFAULT
from pulsenet.training.outer_state import Placement
from pulsenet.training.outer_torch import run_self_tests, to_tensor
from pulsenet.training.probe import Probe, ProbeDesk
from pulsenet.training.ranks import RankNews, is_distributed, is_first_rank, share_news, share_object


class GossipOptimizer:
    """Runs Factored Gossip DiLoCo around an inner optimizer.

    proto/spec-outer.md, section 11, has the arithmetic. z and momentum are FP32 in the model's own shapes. Under
    ``torch.distributed`` every rank makes one and calls it alike; rank 0 mixes and broadcasts.

    Args:
        model: Plain or wrapped by ``torch.compile`` or DistributedDataParallel.
        optimizer: Steps the model's parameters; its state is kept across rounds and reset where z is given up.
        mixer: Way to the other trainers; ``None`` on ranks other than 0.
        z: Where the outer iterate lies: ``"device"``, ``"host"`` or a file to map.
        momentum: The same for the outer momentum.
        schedule: Factor on the inner learning rate by round index.
        warmup_steps: Inner steps from a reset to the full learning rate.
        probe: What is answered once in ``probe_interval`` rounds, so that a run knows how far apart predictions are and
            widens its subset by that. It costs two passes over its batch. Without it only weights are compared.
        on_round: Called after each round on rank 0.
        clock: Monotonic seconds, for the measured utilisation.

    Raises:
        ConfigError: The model or optimizer cannot take part; the message says what to do.
        UnavailableError: The mixer reaches nobody that knows the run.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mixer: Mixer | None,
        z: Placement = "device",
        momentum: Placement = "device",
        schedule: Schedule | None = None,
        warmup_steps: int = WARMUP_STEPS_DEFAULT,
        probe: Probe | None = None,
        on_round: Callable[[MixingReport], None] = lambda report: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mixer is not None and not hasattr(mixer, "begin_round"):
            raise ConfigError("GossipOptimizer needs a mixer, such as join_mixing() returns: an exchange is for rounds")
        self._model = model
        inner = take_optimizer(optimizer)
        self._masters = adopt_masters(model, inner)
        self._inner = InnerOptimizer(inner, schedule=schedule, warmup_steps=warmup_steps)
        self._mixer = mixer
        self._probe = None if probe is None else ProbeDesk(probe, model)
        self._on_round = on_round
        self._clock = clock
        self._counters = MixingCounters()
        self._round_index = self._inner_step = 0
        self._plan: RoundPlan | None = None
        """Of the round that is open; ``None`` before the first, and after a checkpoint was loaded."""
        self._is_new = True
        """Whether the state held is that of the beginning."""
        self._has_adopted = False
        """Since the last round ended."""
        self._mixed_root: Digest | None = None
        """Of the newest common mean of z that this trainer holds."""
        self._left_at: float | None = None
        """When the last call of :meth:`step` ended."""
        self._round_seconds = [0.0, 0.0]
        """In inner steps, and blocked, since the round began."""
        self._settings = MixingSettings()
        self._state: GossipState | None = None
        self._gate: GossipGate | None = None
        """In a gated run, on rank 0."""
        if is_first_rank():
            self._open(z, momentum)
        elif mixer is not None:
            raise ConfigError("only rank 0 mixes: pass mixer=None on the other ranks")
        self._share_settings()

    @property
    def settings(self) -> MixingSettings:
        """The run's variant and constants."""
        return self._settings

    @property
    def round_index(self) -> int:
        """The round this trainer is in."""
        return self._round_index

    @property
    def inner_step(self) -> int:
        """Inner steps since the round began."""
        return self._inner_step

    @property
    def counters(self) -> MixingCounters:
        """What happened since the run began, checkpoints included."""
        return self._counters

    @property
    def state(self) -> GossipState:
        """z and the outer momentum, on rank 0."""
        assert self._state is not None, "only rank 0 holds an outer state"
        return self._state

    def step(self) -> MixingReport | None:
        """Say that an inner step is done; every H-th time mix and do the outer step.

        The first call also asks where the run is: a joiner takes its state over, and its first inner step is lost.

        Returns:
            What the round did, on rank 0; ``None`` within a round and on other ranks.

        Raises:
            ConfigError: The parameters are not those of the beginning any more.
        """
        now = self._clock()
        if self._left_at is not None:
            self._round_seconds[0] += now - self._left_at
        self._counters.inner_steps += 1
        report = None
        if self._plan is None and self._begin():
            self._counters.wasted_inner_steps += 1
        else:
            self._inner_step += 1
            if self._inner_step >= self._settings.inner_steps:
                self._masters.check_model(self._model)
                report = self._finish(now)
        left_at = self._clock()
        if report is None:
            self._round_seconds[1] += left_at - now
        self._left_at = left_at
        if report is not None:
            self._on_round(report)
        return report

    def catch_up(self) -> int:
        """Go where the run is; inner steps taken meanwhile are wasted if somebody else's z is taken over.

        Call it after :meth:`load_state_dict`, or on a joiner; the first :meth:`step` does otherwise.

        Returns:
            Rounds that were passed over.
        """
        before = self._round_index
        if self._plan is None:
            self._counters.wasted_inner_steps += self._inner_step if self._begin() else 0
        # One that trained alone, and is ahead of all others, goes back instead.
        return max(self._round_index - before, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rounds need to go on, beside the model's and the optimizer's own state. Tensors are shared.

        A Mix1 under way is not in it: the round's is begun again. On ranks other than 0 only the position is kept.
        """
        numbers = {
            "round_index": self._round_index,
            "inner_step": self._inner_step,
            "warmup_left": self._inner.warmup_left,
        }
        packed = pack_mixing(self._masters.table, self._state, self._masters.separate, numbers, self._counters)
        if self._gate is not None:
            packed["gate"] = self._gate.pack()
            packed["mixed_root"] = "" if self._mixed_root is None else self._mixed_root.hex()
        return packed

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; load the model and the optimizer first.

        Raises:
            ConfigError: the state is of other masters, or of another algorithm.
        """
        table, masters = self._masters.table, self._masters.separate
        numbers, self._counters = unpack_mixing(saved, table, self._state, masters)
        self._round_index, self._inner_step = numbers["round_index"], numbers["inner_step"]
        if self._gate is not None:
            self._gate.unpack(saved.get("gate", {}))
            root = saved.get("mixed_root", "")
            self._mixed_root = Digest(bytes.fromhex(root)) if root else None
        self._inner.round_index = self._round_index
        self._inner.take_warmup(numbers["warmup_left"])
        if self._plan is not None and self._mixer is not None:
            self._mixer.abandon()
        self._plan, self._is_new, self._left_at = None, False, None
        self._round_seconds = [0.0, 0.0]
        self._masters.write_parameters()

    def _open(self, z: Placement, momentum: Placement) -> None:
        if self._mixer is None:
            raise ConfigError("GossipOptimizer needs a mixer on rank 0: pulsenet.join_mixing() makes one")
        self._settings = self._mixer.settings
        self._state = GossipState(self._masters.table, self._masters.tensors, z=z, momentum=momentum)
        if self._settings.mixing_gate:
            self._gate = GossipGate(self._masters.table)
        self._mixer.open(self._masters.table, run_self_tests(self._masters.tensors))

    def _share_settings(self) -> None:
        """Let every rank know how many inner steps a round has."""
        if is_distributed():
            self._settings = MixingSettings.from_constants(ALGORITHM, share_object(self._settings.to_constants()))

    # A round

    def _begin(self) -> bool:
        """Open the round that the run is in; tell whether z was given up for somebody else's."""
        if not is_first_rank():
            return self._follow(share_news(None, self._masters.tensors))
        has_adopted, failed = False, True
        try:
            has_adopted = self._locate()
            self._open_round()
            failed = False
        finally:
            self._tell_ranks(failed=failed, restarted=has_adopted, reset=has_adopted)
        return has_adopted

    def _locate(self) -> bool:
        assert self._mixer is not None
        start = self._mixer.locate(None if self._is_new else self._round_index)
        self._round_index = max(self._round_index, start.round_index)
        self._is_new = False
        if start.adoption is None:
            return False
        self.state.adopt(start.adoption.values)
        if self._gate is not None:
            self._gate.forget_sent()
        self._inner_step = 0
        self._inner.reset()
        self._restart()
        self._counters.adoptions += 1
        self._has_adopted = True
        return True

    def _open_round(self) -> None:
        assert self._mixer is not None
        plan = self._mixer.begin_round(self._round_index, self._iterate)
        self._round_index = self._inner.round_index = plan.round_index
        if self._settings.vectors(Job.MIX1):
            iterate = self._iterate()
            if self._gate is not None and self._settings.variant.mix1 is MixingKind.GLOBAL:
                is_relative = self._settings.gates(Vector.ITERATE, self._round_index)
                iterate = self._gate.send_iterate(iterate, round_index=self._round_index, is_relative=is_relative)
            self._start(Job.MIX1, {Vector.ITERATE: iterate}, self._all)
        self._plan = plan

    def _iterate(self) -> Iterable[Entries]:
        return self.state.entries(self.state.z, self._all)

    def _finish(self, now: float) -> MixingReport | None:
        """End the round and begin the next, on every rank."""
        if not is_first_rank():
            self._follow(share_news(None, self._masters.tensors))
            return None
        failed, resets_before = True, self._inner.reset_count
        try:
            report = self._mix_and_step()
            self._round_index, self._inner_step = self._round_index + 1, 0
            self._restart()
            self._open_round()
            failed = False
        finally:
            self._tell_ranks(failed=failed, restarted=True, reset=self._inner.reset_count > resets_before)
        inner_seconds, blocked_seconds = self._round_seconds[0], self._round_seconds[1] + self._clock() - now
        self._round_seconds = [0.0, 0.0]
        self._counters.rounds += 1
        self._counters.inner_seconds += inner_seconds
        self._counters.blocked_seconds += blocked_seconds
        report = replace(
            report,
            next_round_index=self._round_index,
            inner_seconds=inner_seconds,
            blocked_seconds=blocked_seconds,
            utilization_total=self._counters.utilization,
        )
        assert self._mixer is not None
        self._mixer.tell(report)
        return report

    def _mix_and_step(self) -> MixingReport:
        """Wait for both jobs, do the outer step and publish; times and the next round are not known yet."""
        plan = self._plan
        assert plan is not None
        subset = self._all if plan.subset is None else plan.subset
        is_probed = self._probe is not None and plan.is_probed
        if self._probe is not None and is_probed:
            self._probe.look()
        if not self.state.is_fit(self._masters.tensors, self._settings.norm_max):
            self._counters.wasted_inner_steps += self._inner_step
            self._inner.reset()
            self._restart()
        # Computed while Mix1 may still be under way, and needed even where Mix2 brings nothing.
        deltas = [self._delta(index) for index in subset] if self._settings.vectors(Job.MIX2) else []
        mix1 = self._take_mix1(self._result(Job.MIX1))
        if mix1.is_common and mix1.sections is not None:
            self._mixed_root = compute_mixed_root(self._masters.table, plan.round_index, mix1.sections[0])
        if deltas:
            self._start(Job.MIX2, {Vector.GRADIENT: deltas}, subset)
        mix2 = self._result(Job.MIX2) if deltas else NOTHING_MIXED
        own = {} if self._gate is None else {one.tensor_index: self._gate.spread(one) for one in deltas}
        given = {**self._values(Job.MIX1, mix1, self._all), **self._values(Job.MIX2, mix2, subset)}
        measures = RoundMeasures(self._settings.variant, self._masters.table, subset)
        for index, local in enumerate(self._masters.tensors):
            squares = self.state.step(
                index,
                local,
                x=given.get((Vector.ITERATE, index)),
                delta=given.get((Vector.GRADIENT, index), own.get(index)),
                momentum=given.get((Vector.MOMENTUM, index)),
                learning_rate=self._settings.learning_rate,
                momentum_factor=self._settings.momentum_factor,
                sent=own.get(index),
            )
            measures.add(index, squares)
        if is_probed:
            self._answer_probe(plan.round_index, mix1, mix2, measures)
        is_consensus = self._publish(mix1, mix2)
        has_adopted, self._has_adopted = self._has_adopted, False
        for job, mixed in ((Job.MIX1, mix1), (Job.MIX2, mix2)):
            self._counters.mixed_jobs += bool(self._settings.vectors(job)) and mixed.is_mixed
            self._counters.alone_jobs += bool(self._settings.vectors(job)) and not mixed.is_mixed
        return MixingReport(
            round_index=plan.round_index,
            next_round_index=plan.round_index,
            is_listed=plan.is_listed,
            mix1_count=mix1.contributor_count if self._settings.vectors(Job.MIX1) else 0,
            mix2_count=mix2.contributor_count if self._settings.vectors(Job.MIX2) else 0,
            mix1_reason=mix1.reason,
            mix2_reason=mix2.reason,
            delta_norm=math.sqrt(measures.delta_square),
            distance=math.sqrt(measures.distance_square) if mix1.is_mixed else None,
            inner_seconds=0.0,
            blocked_seconds=0.0,
            adopted=has_adopted,
            start_square=measures.start_square(mix1),
            end_square=measures.end_square(mix1, mix2),
            noise_square=measures.noise_square(mix2),
            is_consensus=is_consensus,
        )

    def _delta(self, index: int) -> Entries:
        """Return what of one tensor's pseudo-gradient goes into Mix2."""
        local = self._masters.tensors[index]
        if self._gate is None:
            return Entries(index, None, self.state.compute_delta(index, local))
        z, flat = self.state.z[index].cpu().numpy(), local.detach().reshape(-1).cpu().numpy()
        return self._gate.send_gradient(index, z, flat)

    def _take_mix1(self, mix1: Mixed) -> Mixed:
        """Return what Mix1 gave with x in it, where only what moved travelled."""
        if self._gate is None or self._settings.variant.mix1 is not MixingKind.GLOBAL:
            return mix1
        mean = None if mix1.sections is None else mix1.sections[0]
        x = self._gate.take_iterate(mean, is_common=mix1.is_common)
        if x is None:
            return replace(mix1, sections=None, is_common=False)
        others = () if mix1.sections is None else mix1.sections[1:]
        own_momentum = tuple(
            tuple(one.values for one in self.state.entries(self.state.momentum, self._all))
            for _ in self._settings.vectors(Job.MIX1)[1 + len(others) :]
        )
        return replace(mix1, sections=(tuple(x), *others, *own_momentum))

    def _start(self, job: Job, vectors: Mapping[Vector, Iterable[Entries]], tensor_indices: Sequence[int]) -> None:
        assert self._mixer is not None
        momentum = self.state.entries(self.state.momentum, tensor_indices)
        sections = [
            momentum if vector is Vector.MOMENTUM else vectors[vector] for vector in self._settings.vectors(job)
        ]
        self._mixer.start(job, sections, mixed_root=self._mixed_root)

    def _result(self, job: Job) -> Mixed:
        assert self._mixer is not None
        return self._mixer.result(job) if self._settings.vectors(job) else NOTHING_MIXED

    def _values(self, job: Job, mixed: Mixed, tensor_indices: Sequence[int]) -> dict[tuple[Vector, int], FP32s]:
        """Return what a job gave, by vector and tensor."""
        if mixed.sections is None:
            return {}
        return {
            (vector, index): values
            for vector, section in zip(self._settings.vectors(job), mixed.sections, strict=True)
            for index, values in zip(tensor_indices, section, strict=True)
        }

    def _answer_probe(self, round_index: int, mix1: Mixed, mix2: Mixed, measures: RoundMeasures) -> None:
        """Answer in bins of what this trainer has in common with others: x, or the z that a global Mix2 led to."""
        assert self._mixer is not None
        assert self._probe is not None
        if not (mix2 if self._settings.variant.mix1 is MixingKind.NONE else mix1).is_mixed:
            return
        self._write(mix1)
        answer = self._probe.answer(round_index)
        if answer is not None:
            self._mixer.tell_probe(round_index, answer, measures.scores(mix2))

    def _publish(self, mix1: Mixed, mix2: Mixed) -> bool | None:
        """Publish what all members hold, as far as it came: x, or the z that a whole global Mix2 led to.

        Returns:
            Whether all members hold it; ``None`` if nothing was to be published.
        """
        assert self._mixer is not None
        if not self._mixer.publishes:
            return None
        variant = self._settings.variant
        is_consensus = variant.has_consensus and not (mix2 if variant.mix1 is MixingKind.NONE else mix1).reason
        self._write(mix1 if variant.mix1 is MixingKind.GLOBAL else NOTHING_MIXED)
        self._mixer.publish(self._model, self._round_index + 1, is_consensus=is_consensus)
        return is_consensus

    def _write(self, mix1: Mixed) -> None:
        """Put x into the model, or the new z where Mix1 gave none."""
        if mix1.sections is None:
            self._restart()
            return
        with torch.no_grad():
            for local, values in zip(self._masters.tensors, mix1.sections[0], strict=True):
                local.copy_(to_tensor(values, torch.device("cpu")).view(local.shape))
        self._masters.write_parameters()

    def _restart(self) -> None:
        """Start a round: masters from z."""
        for index, local in enumerate(self._masters.tensors):
            self.state.restart(index, local)
        self._masters.write_parameters()

    def _tell_ranks(self, *, failed: bool, restarted: bool, reset: bool) -> None:
        news = RankNews(
            failed=failed,
            restarted=restarted,
            reset=reset,
            round_index=self._round_index,
            inner_step=self._inner_step,
        )
        share_news(news, self._masters.tensors)

    def _follow(self, news: RankNews) -> bool:
        """Do on another rank what rank 0 did; tell whether its masters were overwritten.

        Raises:
            UnavailableError: it could not finish.
        """
        self._round_index = self._inner.round_index = news.round_index
        self._inner_step = news.inner_step
        if news.reset:
            self._inner.reset()
        if news.restarted:
            self._masters.write_parameters()
        news.check_finished()
        self._plan = RoundPlan(news.round_index)
        return news.restarted

    @property
    def _all(self) -> range:
        return range(len(self._masters.tensors))
