"""Rollouts as the loops see them, to and from the flat arrays that travel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.chain.records import RolloutBatch
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import PeerId, Version
from pulsenet.local.protocol import SubmitRollouts


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and one completion with what the sampler knew about it."""

    prompt_tokens: Sequence[int]
    completion_tokens: Sequence[int]
    logprobs: Sequence[float]
    """One per completion token, under the weights that sampled it."""
    reward: float


@dataclass(frozen=True, slots=True)
class ReceivedRollouts:
    """A batch whose signer and shape the daemon checked."""

    peer_id: PeerId
    version_first: Version
    version_last: Version
    samples: tuple[Sample, ...]
    metadata: Mapping[str, Any]
    """Whatever the sender wrote: judge it before use."""


def pack_rollouts(
    version_first: Version, version_last: Version, samples: Iterable[Sample], metadata: Mapping[str, Any] | None = None
) -> SubmitRollouts:
    """Return samples as they are handed to the daemon.

    Raises:
        LocalProtocolError: No sample, too many, or not one logprob per completion token.
    """
    listed = list(samples)
    if not 1 <= len(listed) <= limits.ROLLOUT_SAMPLES_MAX:
        raise LocalProtocolError(f"a batch of {len(listed)} samples, 1 to {limits.ROLLOUT_SAMPLES_MAX} allowed")
    for position, sample in enumerate(listed):
        if len(sample.logprobs) != len(sample.completion_tokens):
            raise LocalProtocolError(
                f"sample {position} has {len(sample.logprobs)} logprobs for {len(sample.completion_tokens)} tokens"
            )
    return SubmitRollouts(
        version_first=version_first,
        version_last=version_last,
        prompt_lengths=np.array([len(sample.prompt_tokens) for sample in listed], "<u4").tobytes(),
        completion_lengths=np.array([len(sample.completion_tokens) for sample in listed], "<u4").tobytes(),
        prompt_tokens=_join([sample.prompt_tokens for sample in listed], "<i4"),
        completion_tokens=_join([sample.completion_tokens for sample in listed], "<i4"),
        logprobs=_join([sample.logprobs for sample in listed], "<f4"),
        rewards=np.array([sample.reward for sample in listed], "<f4").tobytes(),
        metadata=json.dumps(dict(metadata or {}), sort_keys=True),
    )


def unpack_rollouts(peer_id: PeerId, batch: RolloutBatch) -> ReceivedRollouts:
    """Return a batch as samples.

    Raises:
        RemoteProtocolError: Lengths and arrays do not fit (``rollouts-shape``), or the metadata is no JSON
            object (``rollouts-metadata``).
    """
    prompt_lengths = _read(batch.prompt_lengths, "<u4")
    completion_lengths = _read(batch.completion_lengths, "<u4")
    rewards = _read(batch.rewards, "<f4")
    count = len(prompt_lengths)
    if not 1 <= count <= limits.ROLLOUT_SAMPLES_MAX or not count == len(completion_lengths) == len(rewards):
        raise RemoteProtocolError("rollouts-shape", f"{count}, {len(completion_lengths)}, {len(rewards)} samples")
    prompts = _split(_read(batch.prompt_tokens, "<i4"), prompt_lengths)
    completions = _split(_read(batch.completion_tokens, "<i4"), completion_lengths)
    logprobs = _split(_read(batch.logprobs, "<f4"), completion_lengths)
    samples = tuple(
        Sample(prompt.tolist(), completion.tolist(), logprob.tolist(), float(reward))
        for prompt, completion, logprob, reward in zip(prompts, completions, logprobs, rewards, strict=True)
    )
    return ReceivedRollouts(peer_id, batch.version_first, batch.version_last, samples, _read_metadata(batch.metadata))


def _join(rows: Sequence[Sequence[float]], dtype: str) -> bytes:
    return b"".join(np.asarray(row, dtype).tobytes() for row in rows)


def _read(data: bytes, dtype: str) -> npt.NDArray[Any]:
    if len(data) % 4:
        raise RemoteProtocolError("rollouts-shape", f"{len(data)} bytes of 4-byte items")
    return np.frombuffer(data, dtype)


def _split(flat: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    ends = np.cumsum(lengths, dtype=np.uint64)
    if int(ends[-1]) != flat.size:
        raise RemoteProtocolError("rollouts-shape", f"{flat.size} items, lengths sum to {int(ends[-1])}")
    return np.split(flat, ends[:-1].astype(np.int64))


def _read_metadata(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError("rollouts-metadata", "not JSON") from error
    if not isinstance(value, dict):
        raise RemoteProtocolError("rollouts-metadata", f"a JSON {type(value).__name__}, not an object")
    return value
