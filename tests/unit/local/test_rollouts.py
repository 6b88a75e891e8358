"""Samples to flat arrays and back."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.chain.records import RolloutBatch
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local.rollouts import Sample, pack_rollouts, unpack_rollouts

PEER = PeerId(bytes(32))
SAMPLES = (
    Sample([1, 2, 3], [4, 5], [-0.5, -1.25], 1.0),
    Sample([], [6], [0.0], 0.0),
    Sample([7], [], [], -1.0),
)


def make_batch(**changes: Any) -> RolloutBatch:
    submitted = pack_rollouts(Version(0, 1), Version(0, 2), SAMPLES, {"task": "sum"})
    return replace(RolloutBatch(run_id=RunId(bytes(32)), batch_id=bytes(16), **asdict_shallow(submitted)), **changes)


def asdict_shallow(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in asdict(value)}


def test_samples_come_back_as_they_were() -> None:
    received = unpack_rollouts(PEER, make_batch())
    assert received.samples == SAMPLES
    assert received.metadata == {"task": "sum"}
    assert (received.version_first, received.version_last) == (Version(0, 1), Version(0, 2))
    assert received.peer_id == PEER


def test_no_metadata_is_an_empty_object() -> None:
    assert unpack_rollouts(PEER, make_batch(metadata="")).metadata == {}
    assert pack_rollouts(Version(0, 1), Version(0, 1), SAMPLES).metadata == "{}"


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "0 samples"),
        ([SAMPLES[2]] * (limits.ROLLOUT_SAMPLES_MAX + 1), "4097 samples"),
        ([SAMPLES[0], Sample([1], [2, 3], [0.0], 0.0)], "sample 1 has 1 logprobs for 2"),
    ],
)
def test_a_batch_that_is_none_is_our_own_fault(samples: list[Sample], message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        pack_rollouts(Version(0, 1), Version(0, 1), samples)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rewards": b"123"}, "rollouts-shape"),
        ({"rewards": bytes(8)}, "rollouts-shape"),
        ({"completion_lengths": bytes(8)}, "rollouts-shape"),
        ({"prompt_lengths": b"", "completion_lengths": b"", "rewards": b""}, "rollouts-shape"),
        ({"prompt_tokens": bytes(12)}, "rollouts-shape"),
        ({"logprobs": bytes(16)}, "rollouts-shape"),
        ({"prompt_lengths": np.array([2**32 - 1] * 3, "<u4").tobytes()}, "rollouts-shape"),
        ({"metadata": "["}, "rollouts-metadata"),
        ({"metadata": "[" * 60_000}, "rollouts-metadata"),
        ({"metadata": "[]"}, "rollouts-metadata"),
    ],
)
def test_a_batch_of_another_shape_has_its_code(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_rollouts(PEER, make_batch(**changes))
    assert caught.value.code == code
