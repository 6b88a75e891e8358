"""Rollout batches between their signed flat form and numpy arrays (SPEC section 4.8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.chain.records import RolloutBatch
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import RunId, Version

LENGTH_DTYPE: Final = np.dtype("<u4")
TOKEN_DTYPE: Final = np.dtype("<i4")
REAL_DTYPE: Final = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class RolloutArrays:
    """Samples of one batch. Ragged arrays are flat, all samples one after another, with one length a sample."""

    prompt_lengths: npt.NDArray[np.uint32]
    """[samples]"""
    completion_lengths: npt.NDArray[np.uint32]
    """[samples]"""
    prompt_tokens: npt.NDArray[np.int32]
    """[sum of prompt_lengths], each 0 or above"""
    completion_tokens: npt.NDArray[np.int32]
    """[sum of completion_lengths], each 0 or above"""
    logprobs: npt.NDArray[np.float32]
    """[sum of completion_lengths], natural logarithm; no NaN, never above 0 by more than rounding"""
    rewards: npt.NDArray[np.float32]
    """[samples], finite"""

    @property
    def sample_count(self) -> int:
        """Samples in the batch."""
        return len(self.prompt_lengths)

    def prompt(self, index: int) -> npt.NDArray[np.int32]:
        """Return the prompt tokens of one sample."""
        return self.prompt_tokens[_span(self.prompt_lengths, index)]

    def completion(self, index: int) -> npt.NDArray[np.int32]:
        """Return the completion tokens of one sample."""
        return self.completion_tokens[_span(self.completion_lengths, index)]

    def completion_logprobs(self, index: int) -> npt.NDArray[np.float32]:
        """Return the log-probabilities of one sample's completion tokens."""
        return self.logprobs[_span(self.completion_lengths, index)]


LOGPROB_MAX: Final = 1e-3
"""A log-probability is at most 0; engines that sum in BF16 end slightly above."""


def pack_rollouts(
    arrays: RolloutArrays,
    *,
    run_id: RunId,
    batch_id: bytes,
    version_first: Version,
    version_last: Version,
    metadata: str = "{}",
) -> RolloutBatch:
    """Return the batch to sign.

    Raises:
        LocalProtocolError: shapes, bounds or values that every trainer would refuse.
    """
    batch = RolloutBatch(
        run_id=run_id,
        batch_id=batch_id,
        version_first=version_first,
        version_last=version_last,
        prompt_lengths=_to_bytes(arrays.prompt_lengths, LENGTH_DTYPE),
        completion_lengths=_to_bytes(arrays.completion_lengths, LENGTH_DTYPE),
        prompt_tokens=_to_bytes(arrays.prompt_tokens, TOKEN_DTYPE),
        completion_tokens=_to_bytes(arrays.completion_tokens, TOKEN_DTYPE),
        logprobs=_to_bytes(arrays.logprobs, REAL_DTYPE),
        rewards=_to_bytes(arrays.rewards, REAL_DTYPE),
        metadata=metadata,
    )
    try:
        unpack_rollouts(batch)
    except RemoteProtocolError as error:
        raise LocalProtocolError(str(error)) from error
    return batch


def unpack_rollouts(batch: RolloutBatch) -> RolloutArrays:
    """Return the batch's arrays as read-only views of its bytes, once every shape and value holds.

    Raises:
        RemoteProtocolError: ``rollouts-shape`` or ``rollouts-value``.
    """
    prompt_lengths = _from_bytes("prompt_lengths", batch.prompt_lengths, LENGTH_DTYPE)
    completion_lengths = _from_bytes("completion_lengths", batch.completion_lengths, LENGTH_DTYPE)
    prompt_tokens = _from_bytes("prompt_tokens", batch.prompt_tokens, TOKEN_DTYPE)
    completion_tokens = _from_bytes("completion_tokens", batch.completion_tokens, TOKEN_DTYPE)
    logprobs = _from_bytes("logprobs", batch.logprobs, REAL_DTYPE)
    rewards = _from_bytes("rewards", batch.rewards, REAL_DTYPE)
    count = len(prompt_lengths)
    if not 1 <= count <= limits.ROLLOUT_SAMPLES_MAX:
        raise RemoteProtocolError("rollouts-shape", f"{count} samples, 1..{limits.ROLLOUT_SAMPLES_MAX} allowed")
    _check_count("completion_lengths", len(completion_lengths), count)
    _check_count("rewards", len(rewards), count)
    _check_count("prompt_tokens", len(prompt_tokens), int(prompt_lengths.sum(dtype=np.uint64)))
    _check_count("completion_tokens", len(completion_tokens), int(completion_lengths.sum(dtype=np.uint64)))
    _check_count("logprobs", len(logprobs), len(completion_tokens))
    if (prompt_tokens < 0).any() or (completion_tokens < 0).any():
        raise RemoteProtocolError("rollouts-value", "a token is negative")
    if not np.isfinite(rewards).all():
        raise RemoteProtocolError("rollouts-value", "a reward is not finite")
    if not (logprobs <= LOGPROB_MAX).all():  # NaN compares false, so it is refused too
        raise RemoteProtocolError("rollouts-value", "a log-probability is NaN or above 0")
    return RolloutArrays(
        prompt_lengths=prompt_lengths,
        completion_lengths=completion_lengths,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        logprobs=logprobs,
        rewards=rewards,
    )


def _span(lengths: npt.NDArray[np.uint32], index: int) -> slice:
    start = int(lengths[:index].sum(dtype=np.uint64))
    return slice(start, start + int(lengths[index]))


def _to_bytes(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    if array.ndim != 1 or array.dtype.kind != dtype.kind or array.dtype.itemsize != dtype.itemsize:
        raise LocalProtocolError(f"array of {array.dtype} and {array.ndim} dimensions where flat {dtype} is due")
    return array.astype(dtype, copy=False).tobytes()


def _from_bytes(name: str, data: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise RemoteProtocolError("rollouts-shape", f"{name}: {len(data)} bytes are no whole items")
    # Little-endian on the wire; on a little-endian machine the dtype is the native one.
    return np.frombuffer(data, dtype=dtype).astype(dtype.newbyteorder("="), copy=False)


def _check_count(name: str, count: int, expected: int) -> None:
    if count != expected:
        raise RemoteProtocolError("rollouts-shape", f"{name}: {count} items where {expected} are due")
