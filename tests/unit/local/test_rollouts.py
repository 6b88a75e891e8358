"""Samples to flat arrays and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.chain.records import RolloutBatch
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local.protocol import SubmitRollouts
from pulsenet.local.rollouts import Sample, pack_rollouts, unpack_rollouts
from pulsenet.local.tasks import Task

PEER = PeerId(bytes(32))
FIRST, LAST = Version(0, 1), Version(0, 2)
SAMPLES = (
    Sample([1, 2, 3], [4, 5], [-0.5, -1.25], 1.0),
    Sample([], [6], [0.0], 0.0),
    Sample([7], [], [], -1.0),
)


def make_batch(submitted: SubmitRollouts | None = None, **changes: Any) -> RolloutBatch:
    submitted = submitted or pack_rollouts(FIRST, LAST, SAMPLES, {"task": "sum"})
    fields = {name: getattr(submitted, name) for name in SubmitRollouts.__dataclass_fields__}
    return replace(RolloutBatch(run_id=RunId(bytes(32)), sequence=9, **fields), **changes)


def stamped(sample: Sample, first: Version = FIRST, last: Version = LAST) -> Sample:
    return replace(sample, version_first=first, version_last=last)


def test_samples_come_back_as_they_were() -> None:
    received = unpack_rollouts(PEER, make_batch())
    assert received.samples == tuple(map(stamped, SAMPLES))
    assert received.metadata == {"task": "sum"}
    assert (received.version_first, received.version_last) == (FIRST, LAST)
    assert (received.peer_id, received.sequence) == (PEER, 9)


def test_a_sample_may_name_its_own_versions_and_reward_parts() -> None:
    samples = [
        Sample([1], [2], [-1.0], 1.5, {"short": 0.5, "right": 1.0}, version_last=Version(1, 5)),
        Sample([1], [3], [-1.0], 0.25, {"right": 0.0, "short": 0.25}, Version(0, 0), Version(0, 1)),
    ]
    received = unpack_rollouts(PEER, make_batch(pack_rollouts(FIRST, LAST, samples)))
    assert received.part_names == ("right", "short")
    assert (received.version_first, received.version_last) == (Version(0, 0), Version(1, 5))
    assert received.samples == (replace(samples[0], version_first=FIRST), samples[1])


def test_arrays_of_numpy_and_whole_batches_of_arrays_go_the_same_way() -> None:
    lists = make_batch(pack_rollouts(FIRST, LAST, SAMPLES))
    as_arrays = [
        Sample(np.array(s.prompt_tokens, np.int64), np.array(s.completion_tokens), np.array(s.logprobs), s.reward)
        for s in SAMPLES
    ]
    assert make_batch(pack_rollouts(FIRST, LAST, as_arrays)) == lists
    arrays = unpack_rollouts(PEER, lists).arrays
    assert make_batch(pack_rollouts(Version(9, 9), Version(9, 9), arrays)) == lists


def test_logprobs_may_be_rounded_to_half() -> None:
    received = unpack_rollouts(PEER, make_batch(pack_rollouts(FIRST, LAST, SAMPLES, logprob_bits=16)))
    assert received.arrays.logprobs.dtype == np.float16
    assert received.samples[0].logprobs == [-0.5, -1.25]


def test_a_batch_answers_tasks_of_one_trainer() -> None:
    tasks = [Task(PEER, bytes([number]) * 16, {}, 1.0) for number in range(2)]
    submitted = pack_rollouts(FIRST, LAST, SAMPLES, tasks=tasks)
    assert (submitted.trainer, submitted.task_ids) == (PEER, (bytes(16), b"\1" * 16))
    assert unpack_rollouts(PEER, make_batch(submitted)).task_ids == submitted.task_ids
    other = replace(tasks[1], trainer=PeerId(b"o" * 32))
    with pytest.raises(LocalProtocolError, match="2 trainers"):
        pack_rollouts(FIRST, LAST, SAMPLES, tasks=[tasks[0], other])
    with pytest.raises(LocalProtocolError, match="257 tasks"):
        pack_rollouts(FIRST, LAST, SAMPLES, tasks=[tasks[0]] * 257)


def test_no_metadata_is_an_empty_object() -> None:
    assert unpack_rollouts(PEER, make_batch(metadata="")).metadata == {}
    assert pack_rollouts(FIRST, FIRST, SAMPLES).metadata == "{}"


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "0 samples"),
        ([SAMPLES[2]] * (limits.ROLLOUT_SAMPLES_MAX + 1), "4097 samples"),
        ([SAMPLES[0], Sample([1], [2, 3], [0.0], 0.0)], "sample 1 has 1 logprobs for 2"),
        (
            [SAMPLES[0], replace(SAMPLES[0], reward_parts={"a": 1.0})],
            r"sample 1 has the reward parts \['a'\], sample 0",
        ),
        ([Sample([2**31], [2], [0.0], 0.0)], "no numbers of their kind"),
        ([Sample(["a"], [2], [0.0], 0.0)], "no numbers of their kind"),  # type: ignore[list-item]
        ([Sample(np.array([2**32 + 7]), [2], [0.0], 0.0)], "no numbers of their kind"),
        ([Sample([1], np.array([2.5]), [0.0], 0.0)], "no numbers of their kind"),  # type: ignore[arg-type]
        ([Sample([1], [2.5], [0.0], 0.0)], "no numbers of their kind"),  # type: ignore[list-item]
        ([Sample([-1], [2], [0.0], 0.0)], "rollouts-value"),
        ([Sample([1], [2], [0.0], float("nan"))], "rollouts-value"),
        ([Sample([1], [2], [0.0], 0.0, version_first=Version(0, 3))], "version_first above"),
    ],
)
def test_a_batch_that_is_none_is_our_own_fault(samples: list[Sample], message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        pack_rollouts(FIRST, FIRST, samples)


@pytest.mark.parametrize(("metadata", "message"), [({"a": b""}, "no JSON"), ({"a": "x" * 66_000}, "66009 bytes")])
def test_metadata_that_cannot_travel_is_our_own_fault(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        pack_rollouts(FIRST, FIRST, SAMPLES, metadata)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"body": b"123"}, "rollouts-shape"),
        ({"version_first": Version(0, 0)}, "rollouts-value"),
        ({"metadata": "["}, "rollouts-metadata"),
        ({"metadata": "[" * 60_000}, "rollouts-metadata"),
        ({"metadata": "[]"}, "rollouts-metadata"),
    ],
)
def test_a_batch_of_another_shape_has_its_code(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_rollouts(PEER, make_batch(**changes))
    assert caught.value.code == code
