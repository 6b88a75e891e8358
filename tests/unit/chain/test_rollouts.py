"""Rollout batches between bytes and arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard

from pulsenet import limits
from pulsenet.chain.records import RolloutBatch
from pulsenet.chain.rollouts import RolloutArrays, pack_rollouts, read_metadata, unpack_rollouts
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import RunId, Version


def make_arrays(**changes: Any) -> RolloutArrays:
    fields: dict[str, Any] = {
        "versions": np.array([[0, 0, 1], [6, 7, 8], [0, 1, 1], [6, 9, 8]], np.uint64),
        "prompt_lengths": np.array([2, 0, 1], np.uint32),
        "completion_lengths": np.array([1, 3, 0], np.uint32),
        "prompt_tokens": np.array([10, 11, 12], np.int32),
        "completion_tokens": np.array([20, 21, 22, 2**31 - 1], np.int32),
        "logprobs": np.array([-0.5, -1.0, -np.inf, 0.0], np.float32),
        "rewards": np.array([1.0, 0.0, -2.5], np.float32),
        "reward_parts": np.array([[1, 0, -2], [0, 0, -0.5]], np.float32),
    }
    return RolloutArrays(**{**fields, **changes})


def pack(arrays: RolloutArrays) -> RolloutBatch:
    return pack_rollouts(
        arrays, run_id=RunId(bytes(32)), sequence=5, part_names=("right", "short"), metadata='{"task": "add"}'
    )


def compress(raw: bytes, **settings: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **settings).compress(raw)


def raw_body(**changes: Any) -> bytes:
    return zstandard.ZstdDecompressor().decompress(pack(make_arrays(**changes)).body)


@pytest.mark.parametrize("logprob_dtype", [np.float32, np.float16])
def test_arrays_come_back_bit_for_bit(logprob_dtype: type[Any]) -> None:
    arrays = make_arrays()
    arrays = replace(arrays, logprobs=arrays.logprobs.astype(logprob_dtype))
    back = unpack_rollouts(pack(arrays))
    for name in RolloutArrays.__slots__:
        assert getattr(back, name).tobytes() == getattr(arrays, name).tobytes()
        assert getattr(back, name).dtype == getattr(arrays, name).dtype
        assert not getattr(back, name).flags.writeable


def test_samples_are_cut_from_the_flat_arrays() -> None:
    arrays = unpack_rollouts(pack(make_arrays()))
    assert arrays.sample_count == 3
    assert [prompt.tolist() for prompt in arrays.prompts()] == [[10, 11], [], [12]]
    assert [completion.tolist() for completion in arrays.completions()] == [[20], [21, 22, 2**31 - 1], []]
    assert [logprobs.tolist() for logprobs in arrays.completion_logprobs()][1] == [-1.0, -np.inf, 0.0]


def test_each_sample_has_its_versions_and_the_batch_their_range() -> None:
    batch = pack(make_arrays())
    assert (batch.version_first, batch.version_last) == (Version(0, 6), Version(1, 9))
    arrays = unpack_rollouts(batch)
    assert arrays.versions_first == [Version(0, 6), Version(0, 7), Version(1, 8)]
    assert arrays.versions_last == [Version(0, 6), Version(1, 9), Version(1, 8)]


def test_some_samples_are_selected_with_all_that_is_theirs() -> None:
    some = make_arrays().select(np.array([False, True, True]))
    assert [prompt.tolist() for prompt in some.prompts()] == [[], [12]]
    assert [completion.tolist() for completion in some.completions()] == [[21, 22, 2**31 - 1], []]
    assert some.logprobs.tolist() == [-1.0, -np.inf, 0.0]
    assert some.versions_last == [Version(1, 9), Version(1, 8)]
    assert (some.rewards.tolist(), some.reward_parts.tolist()) == ([0.0, -2.5], [[0.0, -2.0], [0.0, -0.5]])
    assert make_arrays().select(np.zeros(3, np.bool_)).sample_count == 0


def test_ids_and_logprobs_cost_less_than_their_raw_bytes() -> None:
    count = 20_000
    draw = np.random.default_rng(0)
    arrays = make_arrays(
        completion_lengths=np.array([count, 0, 0], np.uint32),
        completion_tokens=draw.integers(0, 50_000, count, np.int32),
        logprobs=-draw.exponential(1, count).astype(np.float32),
    )
    body_size_bytes = len(pack(arrays).body)
    assert body_size_bytes < 0.8 * 8 * count  # 4 + 4 bytes a token, and random ids have no other redundancy
    half = replace(arrays, logprobs=arrays.logprobs.astype(np.float16))
    assert len(pack(half).body) < body_size_bytes - 1.4 * count


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not zstandard",
        raw_body(),
        compress(raw_body())[:-1],
        compress(raw_body()) + b"\0",
        compress(raw_body()) * 2,
        compress(raw_body()[:-1]),
        compress(raw_body() + b"\0"),
        compress(b""),
        compress(raw_body(), write_content_size=False),
        compress(bytes(limits.ROLLOUT_BODY_SIZE_BYTES_MAX + 1)),
        compress(bytes(limits.ROLLOUT_BODY_SIZE_BYTES_MAX)),
        compress(raw_body().replace(b"\1\3\0", b"\1\3\xff", 1)),
    ],
)
def test_a_body_that_is_not_these_arrays_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_rollouts(replace(pack(make_arrays()), body=body))
    assert caught.value.code == "rollouts-shape"


def test_lengths_that_sum_beyond_any_memory_are_refused_before_it_is_asked_for() -> None:
    raw = bytearray(raw_body())
    lengths_at = 4 * 3 * 8
    raw[lengths_at : lengths_at + 12] = b"\xff" * 12
    with pytest.raises(RemoteProtocolError, match="rollouts-shape"):
        unpack_rollouts(replace(pack(make_arrays()), body=compress(bytes(raw))))


def test_a_window_larger_than_allowed_is_refused() -> None:
    settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=24)
    # Streamed and without its size, so that the frame states a window at all.
    writer = zstandard.ZstdCompressor(compression_params=settings).compressobj(size=len(raw_body()))
    body = writer.compress(raw_body()) + writer.flush()
    parameters = zstandard.get_frame_parameters(body)
    if parameters.window_size <= 1 << 23:  # this release sizes the window by the content
        body = b"\x28\xb5\x2f\xfd\x80\x70" + len(raw_body()).to_bytes(4, "little") + b"\1\0\0"
    with pytest.raises(RemoteProtocolError, match=r"^rollouts-shape: .* window"):
        unpack_rollouts(replace(pack(make_arrays()), body=body))


def test_a_frame_that_gives_less_than_it_states_is_refused() -> None:
    body = b"\x28\xb5\x2f\xfd\x20\x08" + b"\x01\x00\x00"  # 8 bytes stated, then an empty last block
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_rollouts(replace(pack(make_arrays()), body=body))
    assert caught.value.code == "rollouts-shape"


@pytest.mark.parametrize(
    "changes", [{"sample_count": 2}, {"sample_count": 4}, {"part_names": ()}, {"logprob_bits": 16}]
)
def test_a_record_that_tells_of_other_arrays_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_rollouts(replace(pack(make_arrays()), **changes))
    assert caught.value.code == "rollouts-shape"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens": np.array([10, -1, 12], np.int32)},
        {"completion_tokens": np.array([20, 21, 22, -23], np.int32)},
        {"rewards": np.array([1, np.nan, 0], np.float32)},
        {"rewards": np.array([1, np.inf, 0], np.float32)},
        {"reward_parts": np.array([[0, 0, 0], [0, -np.inf, 0]], np.float32)},
        {"logprobs": np.array([-1, np.nan, -1, -1], np.float32)},
        {"logprobs": np.array([-1, 0.5, -1, -1], np.float32)},
        {"logprobs": np.array([-1, 0.002, -1, -1], np.float16)},
        {"versions": np.array([[0, 0, 0], [6, 7, 8], [0, 0, 0], [6, 6, 8]], np.uint64)},
    ],
)
def test_values_no_engine_produces_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match=r"^rollouts-value:"):
        pack(make_arrays(**changes))


@pytest.mark.parametrize("changes", [{"version_first": Version(0, 5)}, {"version_last": Version(1, 10)}])
def test_a_batch_cannot_claim_other_versions_than_its_samples(changes: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_rollouts(replace(pack(make_arrays()), **changes))
    assert caught.value.code == "rollouts-value"


@pytest.mark.parametrize("metadata", ["[", "[]", "7", "[" * 60_000, '{"a": NaN'])
def test_metadata_that_is_no_object_is_refused_with_the_batch(metadata: str) -> None:
    """It would else be found where it hurts: in the training loop, with other batches in hand."""
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_rollouts(replace(pack(make_arrays()), metadata=metadata))
    assert caught.value.code == "rollouts-metadata"


def test_a_version_beyond_the_wire_is_refused() -> None:
    raw = bytearray(raw_body())
    raw[4 * 3 * 8 - 1] = 0x80  # the top plane of the last number
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_rollouts(replace(pack(make_arrays()), body=compress(bytes(raw))))
    assert caught.value.code == "rollouts-value"


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": np.zeros(2, np.float32)},
        {"rewards": np.zeros((3, 1), np.float32)},
        {"rewards": np.zeros(3, np.float64)},
        {"prompt_tokens": np.zeros(3, np.uint32)},
        {"prompt_tokens": np.zeros(4, np.int32)},
        {"logprobs": np.zeros(4, np.float64)},
        {"logprobs": np.zeros(3, np.float32)},
        {"versions": np.zeros((3, 4), np.uint64)},
        {"reward_parts": np.zeros((1, 3), np.float32)},
        {"reward_parts": np.zeros((2, 4), np.float32)},
        {"prompt_tokens": np.zeros(1 << 20, np.int32), "prompt_lengths": np.array([1 << 20, 0, 0], np.uint32)},
    ],
)
def test_we_never_pack_what_a_trainer_would_refuse(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        pack(make_arrays(**changes))


def test_no_sample_is_no_batch() -> None:
    with pytest.raises(LocalProtocolError, match="0 samples"):
        pack(make_arrays().select(np.zeros(3, np.bool_)))


def test_metadata_comes_back_and_none_is_an_empty_object() -> None:
    batch = pack(make_arrays())
    assert read_metadata(batch) == {"task": "add"}
    assert read_metadata(replace(batch, metadata="")) == {}


def test_arrays_beyond_the_limit_are_refused_before_they_are_packed() -> None:
    arrays = make_arrays(prompt_tokens=np.zeros(1 << 20, np.int32), prompt_lengths=np.array([1 << 20, 0, 0], np.uint32))
    with pytest.raises(LocalProtocolError, match="at least and at most 1 sample and 4194304 bytes"):
        pack(arrays)


def test_a_body_may_fill_its_limit_and_a_window_too() -> None:
    def arrays(token_count: int) -> RolloutArrays:
        one = make_arrays().select(np.array([False, False, True]))
        return replace(
            one,
            prompt_tokens=np.zeros(token_count, np.int32),
            prompt_lengths=np.array([token_count], np.uint32),
        )

    small = len(zstandard.ZstdDecompressor().decompress(pack(arrays(0)).body))
    full = (limits.ROLLOUT_BODY_SIZE_BYTES_MAX - small) // 4
    assert unpack_rollouts(pack(arrays(full))).prompt_lengths.tolist() == [full]
    with pytest.raises(LocalProtocolError, match="at most"):
        pack(arrays(full + 1))
    raw = raw_body()
    header = b"\x28\xb5\x2f\xfd\x80\x68" + len(raw).to_bytes(4, "little")
    body = header + (len(raw) << 3 | 1).to_bytes(3, "little") + raw
    assert zstandard.get_frame_parameters(body).window_size == 1 << 23
    assert unpack_rollouts(replace(pack(make_arrays()), body=body)).sample_count == 3


def test_the_highest_version_there_is_comes_back() -> None:
    top = np.array([[2**63 - 1] * 3] * 4, np.uint64)
    assert unpack_rollouts(pack(make_arrays(versions=top))).versions_last == [Version(2**63 - 1, 2**63 - 1)] * 3


def test_a_version_that_no_record_can_name_is_not_packed() -> None:
    beyond = np.array([[0] * 3, [2**63] * 3, [0] * 3, [2**63] * 3], np.uint64)
    with pytest.raises(LocalProtocolError, match=r"^rollouts-value: a version above"):
        pack(make_arrays(versions=beyond))


def test_a_batch_that_breaks_its_rules_is_not_packed() -> None:
    with pytest.raises(LocalProtocolError, match="named twice"):
        pack_rollouts(make_arrays(), run_id=RunId(bytes(32)), sequence=5, part_names=("right", "right"))


def test_a_body_is_bounded_by_what_its_header_says() -> None:
    bomb = compress(bytes(limits.ROLLOUT_BODY_SIZE_BYTES_MAX + 1))
    with pytest.raises(RemoteProtocolError, match=r"^rollouts-shape: a frame of 4194305 bytes"):
        unpack_rollouts(replace(pack(make_arrays()), body=bomb))
    with_dictionary = b"\x28\xb5\x2f\xfd\x21\x07\x08" + b"\x01\x00\x00"
    with pytest.raises(RemoteProtocolError, match=r"^rollouts-shape: dictionary 7"):
        unpack_rollouts(replace(pack(make_arrays()), body=with_dictionary))


def test_a_logprob_may_be_as_far_above_zero_as_rounding_takes_it() -> None:
    logprobs = np.array([1e-3, 0.0, -1.0, -1.0], np.float32)
    assert unpack_rollouts(pack(make_arrays(logprobs=logprobs))).logprobs[0] == np.float32(1e-3)
