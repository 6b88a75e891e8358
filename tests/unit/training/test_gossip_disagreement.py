"""What a round says of how far apart trainers are, beside what they really held; and that asking changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.ids import Digest
from pulsenet.outer.contribution import Entries
from pulsenet.outer.mixing.disagreement import mean_squared_distance
from pulsenet.outer.mixing.probe import Answer
from pulsenet.outer.mixing.settings import Job, MixingSettings, MixingVariant
from pulsenet.training.gossip_optimizer import GossipOptimizer
from pulsenet.training.local_mixer import Fault, LocalMixer, LocalMixing
from pulsenet.training.mixer import MixingReport
from pulsenet.training.probe import Probe

WORDS, COUNT, ROUNDS, INNER_STEPS = 12, 4, 3, 2
TOKENS = torch.arange(8)
SUBSET = (0, 2)
Vectors = list[list[np.ndarray[Any, Any]]]


class Recorder(LocalMixer):
    """Writes down what its trainer hands over."""

    def __init__(self, mixing: LocalMixing, index: int) -> None:
        super().__init__(mixing, index)
        self.handed: dict[tuple[int, Job], list[np.ndarray[Any, Any]]] = {}
        self.told: dict[int, tuple[Answer, bytes]] = {}

    def start(self, job: Job, sections: Sequence[Iterable[Entries]], *, mixed_root: Digest | None = None) -> None:
        held = [list(section) for section in sections]
        self.handed[self._round_index, job] = [entries.values.copy() for entries in held[0]]
        super().start(job, held, mixed_root=mixed_root)

    def tell_probe(self, round_index: int, answer: Answer, scores: bytes) -> None:
        self.told[round_index] = (answer, scores)
        super().tell_probe(round_index, answer, scores)


class Run:
    """Four trainers of a tiny language model, a thread each."""

    def __init__(
        self, variant: MixingVariant, *, probe: bool = True, interval: int = 1, rounds: int = ROUNDS, **options: Any
    ) -> None:
        settings = MixingSettings(variant=variant, inner_steps=INNER_STEPS, probe_interval=interval)
        self.mixing = LocalMixing(settings, COUNT, subset=SUBSET, **options)
        self.mixers = [Recorder(self.mixing, place) for place in range(COUNT)]
        self.states: dict[int, list[bytes]] = {}
        self.errors: list[BaseException] = []
        threads = [threading.Thread(target=self._train, args=(place, probe, rounds)) for place in range(COUNT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        if self.errors:
            raise self.errors[0]

    def _train(self, place: int, has_probe: bool, rounds: int) -> None:
        try:
            generator = torch.Generator().manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Embedding(WORDS, 6), torch.nn.Tanh(), torch.nn.Linear(6, WORDS))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            probe = Probe(TOKENS, lambda model, tokens: model(tokens), bin_token_count=5) if has_probe else None
            sync = GossipOptimizer(model, optimizer, mixer=self.mixers[place], warmup_steps=0, probe=probe)
            draw = torch.Generator().manual_seed(100 + place)
            while sync.round_index < rounds:
                tokens = torch.randint(0, WORDS, (16,), generator=draw)
                torch.nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
                optimizer.step()
                sync.step()
                optimizer.zero_grad()
            self.states[place] = [values.numpy().tobytes() for values in (*sync.state.z, *sync.state.momentum)]
        except BaseException as error:
            self.errors.append(error)
            self.mixers[place].close()

    def reports(self, round_index: int) -> list[MixingReport]:
        return [self.mixing.reports[place][round_index] for place in range(COUNT)]

    def handed(self, round_index: int, job: Job, tensors: Sequence[int] | None = None) -> Vectors:
        held = [mixer.handed[round_index, job] for mixer in self.mixers]
        return held if tensors is None else [[one[index] for index in tensors] for one in held]


def told(values: Iterable[float | None]) -> float:
    found = [value for value in values if value is not None]
    assert len(found) == COUNT
    return float(np.mean(found))


@pytest.mark.parametrize("variant", [MixingVariant.GLOBAL_M1, MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET])
def test_a_global_mean_tells_all_together_how_far_apart_they_began(variant: MixingVariant) -> None:
    run = Run(variant)
    for round_index in range(ROUNDS):
        true = mean_squared_distance(run.handed(round_index, Job.MIX1))
        assert told(report.start_square for report in run.reports(round_index)) == pytest.approx(true, rel=1e-4)
    assert mean_squared_distance(run.handed(2, Job.MIX1)) > 0.0


def test_a_global_mix2_tells_what_the_inner_steps_did() -> None:
    run = Run(MixingVariant.DILOCO)
    for round_index in range(ROUNDS):
        true = mean_squared_distance(run.handed(round_index, Job.MIX2))
        reports = run.reports(round_index)
        assert told(report.noise_square for report in reports) == pytest.approx(true, rel=1e-4)
        assert all(report.end_square == report.noise_square for report in reports), "all began from one z"
        assert all(report.start_square is None for report in reports), "nothing told, nothing said"


def test_a_pair_knows_exactly_how_far_apart_it_is() -> None:
    run = Run(MixingVariant.LOCAL_M1_M2)
    z, deltas, reports = run.handed(2, Job.MIX1), run.handed(2, Job.MIX2), run.reports(2)
    for place, report in enumerate(reports):
        started = [mean_squared_distance([z[place], z[other]]) for other in range(COUNT) if other != place]
        did = [mean_squared_distance([deltas[place], deltas[other]]) for other in range(COUNT) if other != place]
        assert any(report.start_square == pytest.approx(square, rel=1e-4) for square in started)
        assert any(report.noise_square == pytest.approx(square, rel=1e-4) for square in did)
        assert report.start_square is not None
        assert report.noise_square is not None
        assert report.end_square == pytest.approx(report.start_square + report.noise_square)


def test_of_a_subset_its_own_tensors_are_compared_and_each_has_a_score() -> None:
    run = Run(MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET)
    deltas, reports = run.handed(1, Job.MIX2), run.reports(1)
    z = mean_squared_distance(run.handed(1, Job.MIX1, SUBSET))
    assert told(report.end_square for report in reports) == pytest.approx(
        told(report.noise_square for report in reports) + z, rel=1e-4
    )
    for place, mixer in enumerate(run.mixers):
        scores = np.frombuffer(mixer.told[1][1], "<f4")
        pairs = [
            [
                float(np.mean(np.square(a.astype(np.float64) - b)))
                for a, b in zip(deltas[place], deltas[other], strict=True)
            ]
            for other in range(COUNT)
            if other != place
        ]
        assert any(np.allclose(scores, pair, rtol=1e-3) for pair in pairs)
    assert all(mixer.told[1][1] == b"" for mixer in Run(MixingVariant.GLOBAL_M1, rounds=2).mixers), (
        "no subset, no scores"
    )


@pytest.mark.parametrize(
    ("variant", "pair_count"),
    [
        (MixingVariant.DILOCO, 6),
        (MixingVariant.GLOBAL_M1, 6),
        (MixingVariant.GLOBAL_M1_LOCAL_M2, 6),
        (MixingVariant.LOCAL_M1_M2, 2),
    ],
)
def test_answers_are_compared_among_those_who_hold_one_mean(variant: MixingVariant, pair_count: int) -> None:
    run = Run(variant, interval=2)
    assert sorted(run.mixing.answers) == [0, 2], "the rounds that the run's interval names"
    for round_index in (0, 2):
        found = run.mixing.compare(round_index)
        assert found.pair_count == (pair_count if round_index else 6), "in round 0 all have one z"
        assert found.distance is not None
        assert 0.0 < found.distance < 1.0


@pytest.mark.parametrize("variant", list(MixingVariant))
def test_a_probe_changes_no_bit_of_training(variant: MixingVariant) -> None:
    assert Run(variant).states == Run(variant, probe=False).states


def test_where_a_mean_is_not_whole_nothing_is_claimed() -> None:
    run = Run(
        MixingVariant.GLOBAL_M1_LOCAL_M2,
        find_fault=lambda round_index, job, member: Fault.LOST if member == 0 else Fault.NONE,
    )
    cut_off, other = run.reports(1)[0], run.reports(1)[1]
    assert (cut_off.start_square, cut_off.end_square, cut_off.noise_square) == (None, None, None)
    assert other.start_square is None, "somebody's part is missing in its mean"
    assert 0 not in run.mixing.answers[1], "alone there is nobody to have bins with"
    assert run.mixing.compare(1).pair_count == 3
