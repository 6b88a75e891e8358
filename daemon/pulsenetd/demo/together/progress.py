"""What is known about each round while the demonstration runs, and the line that shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from pulsenetd.demo.reports import RoundDone, RoundMixed
from pulsenetd.demo.together.settings import INNER_STEPS
from pulsenetd.words import say_size

FP32_SIZE_BYTES: Final = 4
COLUMNS: Final = (
    "round",
    "trainers",
    "sent",
    "payload",
    "received",
    "DiLoCo",
    "DDP",
    "residual",
    "loss",
)
CAPTION: Final = (
    "payload: one contribution; received: bytes a trainer's node took in during the round, all traffic; "
    "DiLoCo, DDP: FP32 ring all-reduce of a round, and of each of its steps, computed"
)


MIXED_COLUMNS: Final = ("round", "trainers", "mix1", "mix2", "received", "DiLoCo", "used", "distance", "loss")
MIXED_CAPTION: Final = (
    "mix1, mix2: trainers in a mean, on average; received: as a trainer's node counts it, all traffic; DiLoCo: FP32 "
    "ring all-reduce, computed; used: time in inner steps over wall time; distance: from a trainer to the mean"
)


@dataclass(slots=True)
class MixedRow:
    """One round of trainers that mix, as they reported it."""

    round_index: int
    done: dict[str, RoundMixed] = field(default_factory=dict)
    """By trainer."""
    received_size_bytes: dict[str, int] = field(default_factory=dict)
    """By trainer, what its node received since the round before."""

    @property
    def received(self) -> float:
        """Bytes received by a trainer, mean."""
        return _mean(self.received_size_bytes.values())

    @property
    def mix1_count(self) -> float:
        """Trainers in a mean of Mix1, mean over the trainers."""
        return _mean(done.mix1_count for done in self.done.values())

    @property
    def mix2_count(self) -> float:
        """The same of Mix2."""
        return _mean(done.mix2_count for done in self.done.values())

    @property
    def utilization(self) -> float:
        """Mean over the trainers."""
        return _mean(done.utilization for done in self.done.values())

    @property
    def distance(self) -> float:
        """Mean over the trainers that had a mean to compare with."""
        return _mean(done.distance for done in self.done.values() if done.distance is not None)

    @property
    def loss(self) -> float:
        """Mean over the trainers, nats a token."""
        return _mean(done.loss for done in self.done.values())

    def cells(self, element_count: int) -> tuple[str, ...]:
        """Return the row as text, in the order of :data:`MIXED_COLUMNS`."""
        return (
            str(self.round_index),
            str(len(self.done)),
            f"{self.mix1_count:.2g}",
            f"{self.mix2_count:.2g}",
            say_size(self.received),
            say_size(ring_size_bytes(element_count, len(self.done))),
            f"{self.utilization:.0%}",
            f"{self.distance:.4f}",
            f"{self.loss:.4f}",
        )


@dataclass(slots=True)
class RoundRow:
    """One round, as its trainers reported it."""

    round_index: int
    done: dict[str, RoundDone] = field(default_factory=dict)
    """By trainer."""
    received_size_bytes: dict[str, int] = field(default_factory=dict)
    """By trainer, what its node received since the round before."""

    @property
    def contributors(self) -> tuple[str, ...]:
        """Trainers whose contribution was counted."""
        return tuple(sorted(name for name, done in self.done.items() if done.outcome == "counted"))

    @property
    def density(self) -> float:
        """Sent entries over all entries, mean over the contributors."""
        counted = [self.done[name] for name in self.contributors]
        return _mean(done.sent_count / max(1, done.element_count) for done in counted)

    @property
    def payload(self) -> float:
        """Bytes of a contribution, mean."""
        return _mean(self.done[name].payload_size_bytes for name in self.contributors)

    @property
    def received(self) -> float:
        """Bytes received by a trainer, mean."""
        return _mean(self.received_size_bytes.values())

    @property
    def residual_norm(self) -> float:
        """Mean over the trainers."""
        return _mean(done.residual_norm for done in self.done.values())

    @property
    def loss(self) -> float:
        """Mean over the trainers, nats a token."""
        return _mean(done.loss for done in self.done.values())

    def cells(self, element_count: int) -> tuple[str, ...]:
        """Return the row as text, in the order of :data:`COLUMNS`."""
        diloco = ring_size_bytes(element_count, len(self.contributors))
        return (
            str(self.round_index),
            str(len(self.contributors)),
            f"{self.density:.2%}",
            say_size(self.payload),
            say_size(self.received),
            say_size(diloco),
            say_size(INNER_STEPS * diloco),
            f"{self.residual_norm:.4f}",
            f"{self.loss:.4f}",
        )


def ring_size_bytes(element_count: int, member_count: int) -> int:
    """Return the bytes each member receives in an FP32 ring all-reduce."""
    if member_count < 1:
        return 0
    return 2 * (member_count - 1) * FP32_SIZE_BYTES * element_count // member_count


def format_line(cells: tuple[str, ...]) -> str:
    """Return a row as one line of a terminal of 80 columns."""
    return f"{cells[0]:<6}" + "".join(f"{cell:>9}" for cell in cells[1:])


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
