"""Answers of many inferencers find the places of the prompts that were asked for, and nothing else does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from pulsenet.chain.records import RolloutBatch
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local.rollouts import ReceivedRollouts, Sample, pack_rollouts, unpack_rollouts
from pulsenet.local.tasks import Task
from pulsenet.training.trl_assembly import Prompt, RolloutAssembly, to_columns

ONE, TWO = (1, 2), (3,)
TRAINER = PeerId(bytes(32))


def make_sample(prompt: Prompt, *completion: int, number: int = 5, logprob: float = -0.5) -> Sample:
    return Sample(prompt, completion, [logprob] * len(completion), 1.0, {}, Version(0, number), Version(0, 9))


def receive(samples: Sequence[Sample], *task_ids: bytes, number_min: int = 0) -> ReceivedRollouts:
    """A batch as the node hands it over, stale samples left out by its own rule."""
    tasks = [Task(TRAINER, task_id, {}, 1.0) for task_id in task_ids]
    packed = pack_rollouts(Version(0, 5), Version(0, 9), samples, tasks=tasks)
    fields = {name: getattr(packed, name) for name in packed.__slots__}
    return unpack_rollouts(TRAINER, RolloutBatch(run_id=RunId(bytes(32)), sequence=1, **fields), number_min)


def name(task: str) -> bytes:
    return task.encode().ljust(16)


def make_assembly(*prompts: Prompt, staleness_max: int | None = None) -> RolloutAssembly:
    """An assembly whose prompts were asked for, each as the task of its own name: ``b"(1, 2)"``, ``b"(3,)"``."""
    assembly = RolloutAssembly(
        prompts, completion_tokens_max=3, vocabulary_size=10, number_newest=7, staleness_max=staleness_max
    )
    assembly.note_tasks([name(str(prompt)) for prompt in assembly.missing], assembly.missing)
    return assembly


def test_samples_stand_where_their_prompts_do_whatever_came_first() -> None:
    assembly = make_assembly(ONE, TWO, ONE, TWO)
    assert assembly.missing == {ONE: 2, TWO: 2}
    assert assembly.add(receive([make_sample(TWO, 7), make_sample(TWO, 8)], name("(3,)"))) == {}
    assert assembly.add(receive([make_sample(ONE, 5), make_sample(ONE, 6)], name("(1, 2)"))) == {}
    assert assembly.missing_count == 0
    assert [(sample.prompt_tokens, sample.completion_tokens) for sample in assembly.samples] == [
        ([1, 2], [5]),
        ([3], [7]),
        ([1, 2], [6]),
        ([3], [8]),
    ]
    assert not assembly.dropped.total()


def test_a_batch_may_answer_several_tasks() -> None:
    assembly = make_assembly(ONE, TWO)
    assembly.add(receive([make_sample(TWO, 7), make_sample(ONE, 5)], name("(1, 2)"), name("(3,)")))
    assert [sample.completion_tokens for sample in assembly.samples] == [[5], [7]]


def test_what_nobody_asked_for_in_this_call_is_not_used() -> None:
    assembly = make_assembly(ONE)
    assert assembly.add(receive([make_sample(ONE, 5)])) == {}
    assert assembly.add(receive([make_sample(ONE, 5)], name("of last call"))) == {}
    assert (assembly.missing_count, assembly.dropped) == (1, {"late": 2})


def test_a_task_counts_once() -> None:
    """Its lease ended, and a second inferencer answered it too."""
    assembly = make_assembly(ONE, ONE)
    assembly.note_tasks([name("again")], [ONE])
    assembly.add(receive([make_sample(ONE, 5)], name("(1, 2)")))
    assembly.add(receive([make_sample(ONE, 6)], name("(1, 2)")))
    assert (assembly.missing_count, assembly.dropped["late"]) == (1, 1)


@pytest.mark.parametrize(
    ("sample", "drop"),
    [
        (make_sample(ONE, 5, number=4), "stale"),
        (make_sample(TWO, 5), "other_prompt"),
        (make_sample(ONE), "damaged"),
        (make_sample(ONE, 5, 5, 5, 5), "damaged"),
        (make_sample(ONE, 10), "damaged"),
        (make_sample(ONE, 5, logprob=-math.inf), "damaged"),
    ],
)
def test_what_cannot_be_used_is_counted_and_asked_for_again(sample: Sample, drop: str) -> None:
    assembly = make_assembly(ONE, TWO, ONE, staleness_max=2)
    assert assembly.add(receive([sample, make_sample(ONE, 6)], name("(1, 2)"))) == {ONE: 1}
    assert (assembly.missing, assembly.dropped.total(), assembly.dropped[drop]) == ({ONE: 1, TWO: 1}, 1, 1)  # type: ignore[index]


def test_samples_at_the_bound_are_used() -> None:
    assembly = make_assembly(ONE, staleness_max=2)
    assembly.add(receive([make_sample(ONE, 9, 9, 9, number=5)], name("(1, 2)")))
    assert assembly.missing_count == 0


def test_without_a_bound_any_version_is_used() -> None:
    assembly = make_assembly(ONE)
    assembly.add(receive([make_sample(ONE, 9, number=0)], name("(1, 2)")))
    assert assembly.missing_count == 0


def test_samples_that_the_node_left_out_are_asked_for_again() -> None:
    assembly = make_assembly(ONE, ONE)
    samples = [make_sample(ONE, 5, number=4), make_sample(ONE, 6)]
    assert assembly.add(receive(samples, name("(1, 2)"), number_min=5)) == {ONE: 1}
    assert assembly.dropped == {"stale": 1}


def test_more_samples_than_wanted_are_counted() -> None:
    assembly = make_assembly(ONE)
    assembly.add(receive([make_sample(ONE, 5), make_sample(ONE, 6)], name("(1, 2)")))
    assert [sample.completion_tokens for sample in assembly.samples] == [[5]]
    assert assembly.dropped == {"surplus": 1}


def test_a_prompt_is_not_asked_for_again_while_another_task_for_it_is_out() -> None:
    assembly = make_assembly(ONE, ONE)
    assembly.note_tasks([name("again")], [ONE])
    assert assembly.add(receive([make_sample(ONE, 5)], name("(1, 2)"))) == {}
    assert assembly.add(receive([make_sample(ONE, 10)], name("again"))) == {ONE: 1}


def test_columns_hold_what_trl_and_its_reward_functions_take() -> None:
    assembly = make_assembly(TWO, ONE)
    assembly.add(receive([make_sample(ONE, 5, 6, number=4, logprob=-0.25)], name("(1, 2)")))
    assembly.add(receive([make_sample(TWO, 7, number=8)], name("(3,)")))
    assert to_columns(assembly.samples, 7) == {
        "prompt_ids": [[3], [1, 2]],
        "completion_ids": [[7], [5, 6]],
        "logprobs": [[-0.5], [-0.25, -0.25]],
        "rollout_reward": [1.0, 1.0],
        "rollout_staleness": [0, 3],
    }
