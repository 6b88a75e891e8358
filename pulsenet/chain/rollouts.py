"""Rollout batches between their signed form and numpy arrays (SPEC section 4.7)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from pulsenet import limits
from pulsenet.chain import rules
from pulsenet.chain.records import RolloutBatch
from pulsenet.codec.compress import make_decompressor, open_frame
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import PeerId, RunId, Version

ZSTD_LEVEL: Final = 1
"""Levels 3 and 9 cost up to seven times the time and save nothing on byte planes (measured)."""

LOGPROB_MAX: Final = 1e-3
"""A log-probability is at most 0; engines that sum in BF16 end slightly above."""

LOGPROB_DTYPES: Final[dict[int, np.dtype[Any]]] = {16: np.dtype(np.float16), 32: np.dtype(np.float32)}
TOKEN_MAX: Final = 2**31 - 1

Reals = npt.NDArray[np.float32]
Logprobs = npt.NDArray[np.float32] | npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class RolloutArrays:
    """Samples of one batch. Ragged arrays are flat, all samples one after another, with one length a sample."""

    versions: npt.NDArray[np.uint64]
    """[4, samples]: epoch and number of the weights of a sample's oldest token, then of its newest."""
    prompt_lengths: npt.NDArray[np.uint32]
    """[samples]"""
    completion_lengths: npt.NDArray[np.uint32]
    """[samples]"""
    prompt_tokens: npt.NDArray[np.int32]
    """[sum of prompt_lengths], each 0 or above"""
    completion_tokens: npt.NDArray[np.int32]
    """[sum of completion_lengths], each 0 or above"""
    logprobs: Logprobs
    """[sum of completion_lengths], FP32 or FP16, natural logarithm; no NaN, never above 0 by more than rounding"""
    rewards: Reals
    """[samples], finite"""
    reward_parts: Reals
    """[parts, samples], finite: what the rewards are made of, by the batch's ``part_names``"""

    @property
    def sample_count(self) -> int:
        """Samples in the batch."""
        return len(self.prompt_lengths)

    @property
    def versions_first(self) -> list[Version]:
        """Weights that each sample's oldest token came from."""
        return _to_versions(self.versions[:2])

    @property
    def versions_last(self) -> list[Version]:
        """Weights that each sample's newest token came from."""
        return _to_versions(self.versions[2:])

    def prompts(self) -> Iterator[npt.NDArray[np.int32]]:
        """Yield each sample's prompt tokens."""
        return _split(self.prompt_tokens, self.prompt_lengths)

    def completions(self) -> Iterator[npt.NDArray[np.int32]]:
        """Yield each sample's completion tokens."""
        return _split(self.completion_tokens, self.completion_lengths)

    def completion_logprobs(self) -> Iterator[Logprobs]:
        """Yield the log-probabilities of each sample's completion tokens."""
        return _split(self.logprobs, self.completion_lengths)

    def select(self, keep: npt.NDArray[np.bool_]) -> RolloutArrays:
        """Return the samples whose place in ``keep`` is true, in their order."""
        in_prompts = np.repeat(keep, self.prompt_lengths)
        in_completions = np.repeat(keep, self.completion_lengths)
        return RolloutArrays(
            versions=self.versions[:, keep],
            prompt_lengths=self.prompt_lengths[keep],
            completion_lengths=self.completion_lengths[keep],
            prompt_tokens=self.prompt_tokens[in_prompts],
            completion_tokens=self.completion_tokens[in_completions],
            logprobs=self.logprobs[in_completions],
            rewards=self.rewards[keep],
            reward_parts=self.reward_parts[:, keep],
        )


def pack_rollouts(
    arrays: RolloutArrays,
    *,
    run_id: RunId,
    sequence: int,
    part_names: Sequence[str] = (),
    trainer: PeerId | None = None,
    task_ids: Sequence[bytes] = (),
    metadata: str = "{}",
) -> RolloutBatch:
    """Return the batch to sign.

    Raises:
        LocalProtocolError: Shapes, bounds or values that every trainer would refuse.
    """
    body = encode_body(arrays)
    batch = RolloutBatch(
        run_id=run_id,
        sequence=sequence,
        version_first=min(arrays.versions_first),
        version_last=max(arrays.versions_last),
        sample_count=arrays.sample_count,
        part_names=tuple(part_names),
        logprob_bits=8 * arrays.logprobs.dtype.itemsize,
        trainer=trainer,
        task_ids=tuple(task_ids),
        body=body,
        metadata=metadata,
    )
    try:
        rules.check_record(batch)
        unpack_rollouts(batch)
    except RemoteProtocolError as error:
        raise LocalProtocolError(str(error)) from error
    return batch


def encode_body(arrays: RolloutArrays) -> bytes:
    """Return the arrays as one zstandard frame of byte planes.

    Raises:
        LocalProtocolError: No sample, an array of another shape or dtype than is due, or more bytes than allowed.
    """
    logprob_dtype = LOGPROB_DTYPES.get(8 * arrays.logprobs.dtype.itemsize, LOGPROB_DTYPES[32])
    count = arrays.sample_count
    pieces = [
        _to_planes("versions", arrays.versions, np.dtype(np.uint64), (4, count)),
        _to_planes("prompt_lengths", arrays.prompt_lengths, np.dtype(np.uint32), (count,)),
        _to_planes("completion_lengths", arrays.completion_lengths, np.dtype(np.uint32), (count,)),
        _to_planes("prompt_tokens", arrays.prompt_tokens, np.dtype(np.int32), (arrays.prompt_tokens.size,)),
        _to_planes("completion_tokens", arrays.completion_tokens, np.dtype(np.int32), (arrays.completion_tokens.size,)),
        _to_planes("logprobs", arrays.logprobs, logprob_dtype, (arrays.completion_tokens.size,)),
        _to_planes("rewards", arrays.rewards, np.dtype(np.float32), (count,)),
        _to_planes("reward_parts", arrays.reward_parts, np.dtype(np.float32), (len(arrays.reward_parts), count)),
    ]
    raw = b"".join(pieces)
    if not count or len(raw) > limits.ROLLOUT_BODY_SIZE_BYTES_MAX:
        allowed = f"1 sample and {limits.ROLLOUT_BODY_SIZE_BYTES_MAX} bytes"
        raise LocalProtocolError(f"a batch of {count} samples and {len(raw)} bytes, at least and at most {allowed}")
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False).compress(raw)


def unpack_rollouts(batch: RolloutBatch) -> RolloutArrays:
    """Return the batch's arrays, once every shape and value holds, and its metadata can be read.

    Raises:
        RemoteProtocolError: ``rollouts-shape``, ``rollouts-value`` or ``rollouts-metadata``.
    """
    read_metadata(batch)
    size_max = limits.ROLLOUT_BODY_SIZE_BYTES_MAX
    raw = open_frame(batch.body, make_decompressor(), size_min=1, size_max=size_max, code="rollouts-shape")
    reader = _BodyReader(raw)
    count = batch.sample_count
    versions = reader.read(np.uint64, 4 * count).reshape(4, count)
    prompt_lengths = reader.read(np.uint32, count)
    completion_lengths = reader.read(np.uint32, count)
    prompt_tokens = reader.read(np.int32, int(prompt_lengths.sum(dtype=np.uint64)))
    completion_tokens = reader.read(np.int32, int(completion_lengths.sum(dtype=np.uint64)))
    logprobs = reader.read(LOGPROB_DTYPES[batch.logprob_bits].type, len(completion_tokens))
    rewards = reader.read(np.float32, count)
    parts = reader.read(np.float32, len(batch.part_names) * count).reshape(len(batch.part_names), count)
    reader.finish()
    arrays = RolloutArrays(
        versions=versions,
        prompt_lengths=prompt_lengths,
        completion_lengths=completion_lengths,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        logprobs=logprobs,
        rewards=rewards,
        reward_parts=parts,
    )
    _check_values(arrays)
    _check_versions(arrays, batch)
    return arrays


def read_metadata(batch: RolloutBatch) -> dict[str, Any]:
    """Return what the sender wrote for the training loop; an empty text is an empty object.

    Raises:
        RemoteProtocolError: ``rollouts-metadata``: no JSON object.
    """
    try:
        value = json.loads(batch.metadata or "{}")
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError("rollouts-metadata", "the metadata is not JSON") from error
    if not isinstance(value, dict):
        raise RemoteProtocolError("rollouts-metadata", f"metadata: a JSON {type(value).__name__}, not an object")
    return value


def _check_values(arrays: RolloutArrays) -> None:
    if (arrays.prompt_tokens < 0).any() or (arrays.completion_tokens < 0).any():
        raise RemoteProtocolError("rollouts-value", f"a token is above {TOKEN_MAX}")
    if not (np.isfinite(arrays.rewards).all() and np.isfinite(arrays.reward_parts).all()):
        raise RemoteProtocolError("rollouts-value", "a reward is not finite")
    if not (arrays.logprobs <= LOGPROB_MAX).all():  # NaN compares false, so it is refused too
        raise RemoteProtocolError("rollouts-value", "a log-probability is NaN or above 0")


def _check_versions(arrays: RolloutArrays, batch: RolloutBatch) -> None:
    """SPEC 4.7: the record's versions are those of its samples, so that a batch is judged before it is unpacked."""
    if (arrays.versions > np.uint64(2**63 - 1)).any():
        raise RemoteProtocolError("rollouts-value", "a version above 2^63 - 1")
    firsts, lasts = arrays.versions_first, arrays.versions_last
    if any(first > last for first, last in zip(firsts, lasts, strict=True)):
        raise RemoteProtocolError("rollouts-value", "a sample whose first version is above its last")
    if (min(firsts), max(lasts)) != (batch.version_first, batch.version_last):
        named = f"{batch.version_first} to {batch.version_last}"
        raise RemoteProtocolError("rollouts-value", f"samples of {min(firsts)} to {max(lasts)}, the batch says {named}")


class _BodyReader:
    """Takes one array after another off the raw body."""

    def __init__(self, raw: bytes) -> None:
        self._raw = np.frombuffer(raw, np.uint8)
        self._offset = 0

    def read(self, dtype: Any, count: int) -> npt.NDArray[Any]:
        width = np.dtype(dtype).itemsize
        end = self._offset + width * count
        if end > self._raw.size:
            raise RemoteProtocolError("rollouts-shape", f"{self._raw.size} bytes where {end} or more are due")
        planes = self._raw[self._offset : end].reshape(width, count)
        self._offset = end
        # Planes ascend from the least significant byte: side by side they are little-endian items.
        items = np.ascontiguousarray(planes.T).reshape(-1).view(np.dtype(dtype).newbyteorder("<"))
        array: npt.NDArray[Any] = items.astype(dtype, copy=False)
        array.flags.writeable = False
        return array

    def finish(self) -> None:
        if self._offset != self._raw.size:
            raise RemoteProtocolError("rollouts-shape", f"{self._raw.size} bytes where {self._offset} are due")


def _to_planes(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    if array.dtype != dtype or array.shape != shape:
        raise LocalProtocolError(f"{name}: {array.dtype} of shape {array.shape} where {dtype} of {shape} is due")
    little = np.ascontiguousarray(array.astype(dtype.newbyteorder("<"), copy=False).reshape(-1))
    return little.view(np.uint8).reshape(-1, dtype.itemsize).T.tobytes()


def _to_versions(pairs: npt.NDArray[np.uint64]) -> list[Version]:
    epochs, numbers = pairs.tolist()
    return [Version(epoch, number) for epoch, number in zip(epochs, numbers, strict=True)]


def _split(flat: npt.NDArray[Any], lengths: npt.NDArray[np.uint32]) -> Iterator[npt.NDArray[Any]]:
    start = 0
    for length in lengths.tolist():
        yield flat[start : start + length]
        start += length
