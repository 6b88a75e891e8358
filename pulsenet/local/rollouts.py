"""Rollouts as the loops see them, to and from the arrays that travel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.chain import rollouts
from pulsenet.chain.records import RolloutBatch
from pulsenet.chain.rollouts import LOGPROB_DTYPES, RolloutArrays
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local.protocol import SubmitRollouts
from pulsenet.local.tasks import Task

METADATA_SIZE_BYTES_MAX = 65_536

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
Reals = Sequence[float] | npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and one completion with what the sampler knew about it. Lists and numpy arrays do alike.

    It travels as ``RolloutArrays`` (SPEC 4.7), which refuse what is out of range when the batch is made.
    """

    prompt_tokens: Tokens
    """Token ids from 0 to 2^31 - 1, flat."""
    completion_tokens: Tokens
    """The same, without the prompt."""
    logprobs: Reals
    """One per completion token, in nats, at most 0.001, under the weights that sampled it; FP32 or FP16 on the way."""
    reward: float
    """FP32, finite."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of; the same names in every sample of a batch."""
    version_first: Version | None = None
    """Weights the oldest token came from; ``None``: the batch's."""
    version_last: Version | None = None
    """Weights the newest token came from; ``None``: the batch's."""


@dataclass(frozen=True)
class ReceivedRollouts:
    """A batch whose signer and shape the daemon checked."""

    peer_id: PeerId
    sequence: int
    """With ``peer_id``, the batch's name: no two batches of a run have the same."""
    version_first: Version
    version_last: Version
    arrays: RolloutArrays
    """All samples as flat arrays, without a Python object per token."""
    part_names: tuple[str, ...]
    """Names of the rows of ``arrays.reward_parts``."""
    metadata: Mapping[str, Any]
    """Whatever the sender wrote: judge it before use."""
    task_ids: tuple[bytes, ...] = ()
    """Tasks of this trainer that the batch answers, by the ids ``send_tasks`` returned."""
    stale_count: int = 0
    """Samples of the batch that were too old for the node's ``--max-staleness``, and are left out."""

    def select(self, keep: npt.NDArray[np.bool_]) -> ReceivedRollouts:
        """Return the batch with the samples whose place in ``keep`` is true."""
        return replace(self, arrays=self.arrays.select(keep))

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """The samples one by one, with lists; convenient, and slower than :attr:`arrays`."""
        arrays = self.arrays
        parts = [dict(zip(self.part_names, row, strict=True)) for row in arrays.reward_parts.T.tolist()]
        columns = zip(
            arrays.prompts(),
            arrays.completions(),
            arrays.completion_logprobs(),
            arrays.rewards.tolist(),
            parts,
            arrays.versions_first,
            arrays.versions_last,
            strict=True,
        )
        return tuple(
            Sample(prompt.tolist(), completion.tolist(), logprobs.tolist(), reward, named, first, last)
            for prompt, completion, logprobs, reward, named, first, last in columns
        )


def pack_rollouts(
    version_first: Version,
    version_last: Version,
    samples: Iterable[Sample] | RolloutArrays,
    metadata: Mapping[str, Any] | None = None,
    *,
    part_names: Sequence[str] = (),
    logprob_bits: Literal[16, 32] = 32,
    tasks: Sequence[Task] = (),
) -> SubmitRollouts:
    """Return samples as they are handed to the daemon, compressed.

    Args:
        version_first: Weights of the oldest token of samples that do not say so themselves.
        version_last: Weights of the newest.
        samples: Samples, or arrays that hold versions and everything else already.
        metadata: JSON object for the training loop, 64 KiB at most.
        part_names: Names of the rows of ``reward_parts`` of arrays; samples name theirs.
        logprob_bits: 16 rounds to FP16: half the bytes of logprobs, a relative error of 2^-11.
        tasks: What the batch answers, all of one trainer.

    Raises:
        LocalProtocolError: No sample, too many, or something every trainer would refuse; the message says what.
    """
    if isinstance(samples, RolloutArrays):
        arrays, names = samples, tuple(part_names)
    else:
        listed = list(samples)
        names = tuple(sorted(listed[0].reward_parts)) if listed else ()
        arrays = _join_samples(listed, names, version_first, version_last, logprob_bits)
    text = _encode_metadata(metadata)
    batch = rollouts.pack_rollouts(
        arrays,
        run_id=RunId(bytes(32)),
        sequence=0,
        part_names=names,
        trainer=_find_trainer(tasks),
        task_ids=[task.task_id for task in tasks],
        metadata=text,
    )  # run and number are the daemon's to say
    fields = {name: getattr(batch, name) for name in SubmitRollouts.__dataclass_fields__}
    return SubmitRollouts(**fields)


def unpack_rollouts(peer_id: PeerId, batch: RolloutBatch, number_min: int = 0) -> ReceivedRollouts:
    """Return a batch as arrays.

    Args:
        peer_id: Who signed it.
        batch: As it travelled.
        number_min: Samples that began with weights of a lower version number are left out.

    Raises:
        RemoteProtocolError: Arrays do not fit (``rollouts-shape``, ``rollouts-value``), or the metadata is no JSON
            object (``rollouts-metadata``).
    """
    arrays = rollouts.unpack_rollouts(batch)
    fresh = arrays.versions[1] >= np.uint64(number_min)
    stale_count = int(arrays.sample_count - fresh.sum())
    return ReceivedRollouts(
        peer_id=peer_id,
        sequence=batch.sequence,
        version_first=batch.version_first,
        version_last=batch.version_last,
        arrays=arrays.select(fresh) if stale_count else arrays,
        part_names=batch.part_names,
        metadata=rollouts.read_metadata(batch),
        task_ids=batch.task_ids,
        stale_count=stale_count,
    )


def _join_samples(
    listed: list[Sample], names: tuple[str, ...], version_first: Version, version_last: Version, logprob_bits: int
) -> RolloutArrays:
    if not 1 <= len(listed) <= limits.ROLLOUT_SAMPLES_MAX:
        raise LocalProtocolError(f"a batch of {len(listed)} samples, 1 to {limits.ROLLOUT_SAMPLES_MAX} allowed")
    for position, sample in enumerate(listed):
        if len(sample.logprobs) != len(sample.completion_tokens):
            raise LocalProtocolError(
                f"sample {position} has {len(sample.logprobs)} logprobs for {len(sample.completion_tokens)} tokens"
            )
        if tuple(sorted(sample.reward_parts)) != names:
            raise LocalProtocolError(
                f"sample {position} has the reward parts {sorted(sample.reward_parts)}, sample 0 {list(names)}"
            )
    firsts = [version_first if sample.version_first is None else sample.version_first for sample in listed]
    lasts = [version_last if sample.version_last is None else sample.version_last for sample in listed]
    try:
        return RolloutArrays(
            versions=np.array(
                [
                    (first.epoch, first.number, last.epoch, last.number)
                    for first, last in zip(firsts, lasts, strict=True)
                ],
                np.uint64,
            ).T.copy(),
            prompt_lengths=np.array([len(sample.prompt_tokens) for sample in listed], np.uint32),
            completion_lengths=np.array([len(sample.completion_tokens) for sample in listed], np.uint32),
            prompt_tokens=_join_tokens([sample.prompt_tokens for sample in listed]),
            completion_tokens=_join_tokens([sample.completion_tokens for sample in listed]),
            logprobs=np.concatenate(
                [np.asarray(sample.logprobs, LOGPROB_DTYPES[logprob_bits]).reshape(-1) for sample in listed]
            ),
            rewards=np.array([sample.reward for sample in listed], np.float32),
            reward_parts=np.array(
                [[sample.reward_parts[name] for sample in listed] for name in names], np.float32
            ).reshape(len(names), len(listed)),
        )
    except (OverflowError, ValueError, TypeError, KeyError) as error:
        raise LocalProtocolError(f"samples that are no numbers of their kind: {error}") from error


def _join_tokens(rows: Sequence[Tokens]) -> npt.NDArray[np.int32]:
    found = np.concatenate([np.asarray(row).reshape(-1) for row in rows])
    tokens = found.astype(np.int32)  # wraps what is too large, and cuts fractions off
    if not np.array_equal(tokens, found):
        raise ValueError("a token is no whole number of 32 bits")
    return tokens


def _find_trainer(tasks: Sequence[Task]) -> PeerId | None:
    trainers = {task.trainer for task in tasks}
    if len(trainers) > 1:
        raise LocalProtocolError(f"a batch that answers tasks of {len(trainers)} trainers: make one for each")
    if len(tasks) > limits.TASKS_PER_BATCH_MAX:
        raise LocalProtocolError(f"a batch that answers {len(tasks)} tasks, {limits.TASKS_PER_BATCH_MAX} allowed")
    return next(iter(trainers), None)


def _encode_metadata(metadata: Mapping[str, Any] | None) -> str:
    try:
        text = json.dumps(dict(metadata or {}), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"metadata that is no JSON: {error}") from error
    if len(text.encode()) > METADATA_SIZE_BYTES_MAX:
        raise LocalProtocolError(f"metadata of {len(text.encode())} bytes, {METADATA_SIZE_BYTES_MAX} allowed")
    return text
