"""What the demonstration's processes tell the command that started them: JSON lines on standard output."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final, TextIO


@dataclass(frozen=True, slots=True)
class Loaded:
    """The process has its model and waits for its node."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Published:
    """The trainer's node has committed a version."""

    epoch: int
    number: int
    is_first: bool
    """The weights training starts from, published whole."""
    raw_size_bytes: int
    encoded_size_bytes: int
    changed_count: int
    element_count: int
    reward: float
    """Mean reward of the samples the version was trained on; 0 for the first."""
    logprob_gap: float
    staleness_max: int
    """Versions between the oldest sample's weights and the trainer's."""
    wait_seconds: float
    """Spent waiting for rollouts."""
    step_seconds: float
    publish_seconds: float
    """From the call of ``publish`` to the commit."""
    offered_at: float
    """Monotonic time of that call; one clock serves all processes of a machine."""


@dataclass(frozen=True, slots=True)
class Applied:
    """An inferencer's engine serves a version."""

    epoch: int
    number: int
    apply_seconds: float
    applied_at: float
    """Monotonic time."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """An inferencer has handed a batch of rollouts to its node."""

    number: int
    sample_count: int
    reward: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The process has written its weights and is about to leave."""

    epoch: int
    number: int
    root: str
    """Root under which the version was published, as the node said, hexadecimal; empty where it is not told."""


@dataclass(frozen=True, slots=True)
class EngineFound:
    """An engine in other processes answers."""

    name: str
    """Such as ``vLLM 0.32.0``."""


@dataclass(frozen=True, slots=True)
class Compared:
    """All weights in the memory of an engine in other processes were compared with the trainer's file."""

    is_identical: bool
    difference: str
    """Which tensors differ, for a person; empty when none does."""


@dataclass(frozen=True, slots=True)
class RoundDone:
    """A trainer has done one exchange with the others."""

    round_index: int
    """The round it took part in."""
    next_round_index: int
    """The round it is in now: more than one further if it caught up."""
    outcome: str
    contributor_count: int
    sent_count: int
    element_count: int
    payload_size_bytes: int
    """Of its contribution, as it travels."""
    residual_norm: float
    loss: float
    """Mean over the inner steps of the round, nats a token."""
    state_root: str
    """Of the state it holds now, hexadecimal."""
    seconds: float
    """Inner steps and exchange."""


@dataclass(frozen=True, slots=True)
class RoundMixed:
    """A trainer that mixes has ended a round."""

    round_index: int
    next_round_index: int
    """The round it is in now: more than one further if it was behind."""
    mix1_count: int
    """Trainers in the mean of the outer iterates; 0 where the variant has no Mix1."""
    mix2_count: int
    reasons: str
    """Why somebody's values are missing; empty if none are."""
    distance: float | None
    """From its own outer iterate to that mean."""
    utilization: float
    """Time in inner steps over wall time, of this round."""
    loss: float
    """Mean over the inner steps of the round, nats a token."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """A trainer that was killed is back with its checkpoint and has caught up."""

    checkpoint_round_index: int
    round_index: int
    """The round it is in after catching up."""


Report = Loaded | Published | Applied | Sampled | Finished | EngineFound | Compared | RoundDone | RoundMixed | Resumed

_TYPES: Final[dict[str, type[Report]]] = {
    "loaded": Loaded,
    "published": Published,
    "applied": Applied,
    "sampled": Sampled,
    "finished": Finished,
    "engine": EngineFound,
    "compared": Compared,
    "round": RoundDone,
    "mixed": RoundMixed,
    "resumed": Resumed,
}
_NAMES: Final = {report_type: name for name, report_type in _TYPES.items()}


def write_report(stream: TextIO, report: Report) -> None:
    """Write one line and flush it."""
    stream.write(json.dumps({"report": _NAMES[type(report)], **dataclasses.asdict(report)}) + "\n")
    stream.flush()


def read_report(line: str) -> Report | None:
    """Return the report of one line; ``None`` for anything else a library may have printed."""
    try:
        table: dict[str, Any] = json.loads(line)
        return _TYPES[table.pop("report")](**table)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
