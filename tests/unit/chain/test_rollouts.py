"""Rollout batches between bytes and arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.chain.records import RolloutBatch
from pulsenet.chain.rollouts import RolloutArrays, pack_rollouts, unpack_rollouts
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import RunId, Version


def make_arrays(**changes: Any) -> RolloutArrays:
    fields: dict[str, Any] = {
        "prompt_lengths": np.array([2, 0, 1], np.uint32),
        "completion_lengths": np.array([1, 3, 0], np.uint32),
        "prompt_tokens": np.array([10, 11, 12], np.int32),
        "completion_tokens": np.array([20, 21, 22, 23], np.int32),
        "logprobs": np.array([-0.5, -1.0, -np.inf, 0.0], np.float32),
        "rewards": np.array([1.0, 0.0, -2.5], np.float32),
    }
    return RolloutArrays(**{**fields, **changes})


def pack(arrays: RolloutArrays) -> RolloutBatch:
    return pack_rollouts(
        arrays,
        run_id=RunId(bytes(32)),
        batch_id=bytes(16),
        version_first=Version(0, 6),
        version_last=Version(0, 7),
        metadata='{"task": "add"}',
    )


def test_arrays_come_back_bit_for_bit() -> None:
    arrays = make_arrays()
    back = unpack_rollouts(pack(arrays))
    for name in RolloutArrays.__slots__:
        assert getattr(back, name).tobytes() == getattr(arrays, name).tobytes()
        assert getattr(back, name).dtype == getattr(arrays, name).dtype
        assert not getattr(back, name).flags.writeable


def test_samples_are_cut_from_the_flat_arrays() -> None:
    arrays = unpack_rollouts(pack(make_arrays()))
    assert arrays.sample_count == 3
    assert [arrays.prompt(index).tolist() for index in range(3)] == [[10, 11], [], [12]]
    assert [arrays.completion(index).tolist() for index in range(3)] == [[20], [21, 22, 23], []]
    assert arrays.completion_logprobs(1).tolist() == [-1.0, -np.inf, 0.0]


def test_first_and_last_version_are_both_carried() -> None:
    batch = pack(make_arrays())
    assert (batch.version_first, batch.version_last) == (Version(0, 6), Version(0, 7))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_lengths": b""},
        {"prompt_lengths": b"\x03\x00\x00"},
        {"prompt_lengths": np.array([2, 0, 2], "<u4").tobytes()},
        {"prompt_lengths": np.array([2**32 - 1, 4, 0], "<u4").tobytes()},
        {"completion_lengths": np.array([1, 3], "<u4").tobytes()},
        {"completion_lengths": np.array([1, 3, 2**32 - 1], "<u4").tobytes()},
        {"completion_tokens": bytes(12)},
        {"prompt_tokens": bytes(16)},
        {"logprobs": bytes(12)},
        {"rewards": bytes(16)},
        {"prompt_lengths": bytes(4 * (limits.ROLLOUT_SAMPLES_MAX + 1))},
    ],
)
def test_lengths_that_do_not_add_up_are_refused(changes: dict[str, bytes]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_rollouts(replace(pack(make_arrays()), **changes))
    assert caught.value.code == "rollouts-shape"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens": np.array([10, -1, 12], "<i4").tobytes()},
        {"completion_tokens": np.array([20, 21, 22, -23], "<i4").tobytes()},
        {"rewards": np.array([1, np.nan, 0], "<f4").tobytes()},
        {"rewards": np.array([1, np.inf, 0], "<f4").tobytes()},
        {"logprobs": np.array([-1, np.nan, -1, -1], "<f4").tobytes()},
        {"logprobs": np.array([-1, 0.5, -1, -1], "<f4").tobytes()},
    ],
)
def test_values_no_engine_produces_are_refused(changes: dict[str, bytes]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_rollouts(replace(pack(make_arrays()), **changes))
    assert caught.value.code == "rollouts-value"


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": np.zeros(2, np.float32)},
        {"rewards": np.zeros((3, 1), np.float32)},
        {"rewards": np.zeros(3, np.float64)},
        {"prompt_tokens": np.zeros(3, np.uint32)},
    ],
)
def test_we_never_pack_what_a_trainer_would_refuse(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        pack(make_arrays(**changes))
