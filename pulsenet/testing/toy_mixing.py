"""A training process that mixes a few numbers, and the shell's arithmetic beside it: all that a mixing machine orders.

Vectors are FP64 (or FP32 where a case is about rounding), so that what an exchange loses or doubles cannot hide.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from pulsenet.chain.records import SliceName
from pulsenet.errors import StorageError
from pulsenet.ids import PeerId, compute_digest
from pulsenet.node.mixing.effects import CheckMean, CombineParts, Debt, JobPlan, MixReady, OpenRound, StartMixing
from pulsenet.node.mixing.events import (
    CombineFailed,
    DebtName,
    MeanChecked,
    MixingAttached,
    MixingEvent,
    PartsCombined,
    PartSlice,
    PartStored,
    ProbeMade,
    ResultWanted,
    RoundWanted,
    StateStored,
)
from pulsenet.outer.floats import fp32_to_bits
from pulsenet.outer.mixing.disagreement import choose_bins, encode_probe, fill_bins
from pulsenet.outer.mixing.probe import name_bins
from pulsenet.outer.mixing.settings import Job
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.testing.fakes import Chance, FakeStore
from pulsenet.testing.toy_training import write_blob

SIZE = 8
"""Elements of the toy model."""

TOY_TABLE = make_table([TensorSpec("embed", "F32", (2,)), *(TensorSpec(f"h.{n}.w", "F32", (2,)) for n in range(3))])
"""What the toy model's elements are called; its jobs are of all of them, whatever the subset."""

TOY_BATCH = compute_digest(b"two tokens")
"""The probe of all toys: two tokens of four words each, whose logits are the elements."""

NORM_MAX = 1e18

MAGIC = b"MIX"

HEADER_SIZE_BYTES = 4 + 9
"""Magic, element size, round and job: as real ones, blobs of two rounds are never the same blob."""

Values = npt.NDArray[Any]


def cut(vector: Values, slice_count: int) -> list[Values]:
    """Return the slices of a vector, in order."""
    return list(np.array_split(vector, slice_count))


def encode_values(values: Values, round_index: int, job: int) -> bytes:
    """Return the blob of some values."""
    return MAGIC + struct.pack("<BQB", values.dtype.itemsize, round_index, job) + values.tobytes()


def decode_values(data: bytes) -> Values:
    """Return the values of a blob.

    Raises:
        ValueError: it holds something else.
    """
    if data[:3] != MAGIC or len(data) < HEADER_SIZE_BYTES or data[3] not in (4, 8):
        raise ValueError("no vector")
    return np.frombuffer(data[HEADER_SIZE_BYTES:], np.float32 if data[3] == 4 else np.float64).copy()


def read_values(store: FakeStore, name: SliceName | PartSlice) -> Values:
    """Return the values of a blob in the store.

    Raises:
        ValueError: it holds something else.
        StorageError: it is not there.
    """
    if not store.holds_blob(name.blob_id):
        raise StorageError("a blob that was named is gone", "damaged")
    return decode_values(b"".join(store.read_blob(name.blob_id)))


def write_values(store: FakeStore, values: Values, round_index: int, job: int) -> PartSlice:
    """Store some values and return what names them."""
    blob_id, size_bytes = write_blob(store, encode_values(values, round_index, job))
    norm = float(np.sqrt(np.sum(np.square(values.astype(np.float64)))))
    # What no honest node sends still gets a name.
    return PartSlice(blob_id, size_bytes, values.size, fp32_to_bits(norm) if np.isfinite(norm) else 0)


def find_fault(store: FakeStore, part: PartSlice) -> str:
    """Return why a blob may not be mixed, or nothing."""
    try:
        values = read_values(store, part)
    except ValueError:
        return "decode"
    if values.size != part.element_count:
        return "shape"
    if not np.isfinite(values).all():
        return "finite"
    return "norm" if float(np.linalg.norm(values)) > NORM_MAX else ""


def combine(store: FakeStore, order: CombineParts) -> PartsCombined | CombineFailed:
    """Check the parts and store their mean."""
    bad = tuple((part.peer_id, fault) for part in order.parts if (fault := find_fault(store, part.part)))
    if bad:
        return CombineFailed(order.number, bad[0][1], bad)
    parts = [read_values(store, part.part) for part in order.parts]
    total = np.zeros_like(parts[0])
    for values in parts:
        total = total + values
    mean = write_values(store, np.divide(total, np.full_like(total, len(parts))), order.round_index, order.job)
    return PartsCombined(order.number, mean.blob_id, mean.encoded_size_bytes, mean.norm_bits)


def check_mean(store: FakeStore, order: CheckMean) -> MeanChecked:
    """Look into a mean."""
    return MeanChecked(order.number, find_fault(store, order.mean))


class Doing(StrEnum):
    """What the training process does or waits for."""

    STARTING = "starting"
    OPENING = "opening"
    INNER = "inner"
    MIX1 = "mix1"
    MIX2 = "mix2"


@dataclass(slots=True)
class MixingDisk:
    """What survives the training process: z after its last whole round."""

    z: Values | None
    round_index: int = 0
    """The round that is due on top of it."""


@dataclass(slots=True)
class ToyMixing:
    """One life of a training process.

    Args:
        disk: Its checkpoint.
        store: The node's store, in which the shell puts what is handed over.
        chance: The steps it takes.
        step: Largest pseudo-gradient; 0 mixes alone.
        learning_rate: Of the outer step.
    """

    disk: MixingDisk
    store: FakeStore
    chance: Chance
    start: Values
    """z of a run that just begins."""
    step: float = 0.0
    learning_rate: float = 0.5
    doing: Doing = Doing.STARTING
    plan: OpenRound | None = None
    x: Values | None = None
    gradient: Values | None = None
    probed: Values = field(default_factory=lambda: np.zeros(SIZE))
    """Weights after the inner steps."""
    is_away: bool = False
    """Whether the node was lost since it last opened a round for this process."""
    handed: dict[Job, Values] = field(default_factory=dict)
    """Vectors of the open round, debts included."""
    settled: list[tuple[DebtName, Values]] = field(default_factory=list)
    """Debts that were added to vectors, in all rounds."""
    is_mute: bool = False
    """Whether it has no probe, whoever asks."""
    adopted_count: int = 0
    round_count: int = 0
    """Rounds it went through."""

    def attach(self) -> list[MixingEvent]:
        """Return what the machine is told when it, or this process, begins to live; amid a round nothing."""
        match self.doing:
            case Doing.STARTING:
                return [MixingAttached(None if self.disk.z is None else self.disk.round_index, SIZE)]
            case Doing.OPENING:
                return self._want_round()
            case _:
                return []

    def lose_node(self) -> list[MixingEvent]:
        """The node is gone: end what it is waited for with the own values, as ``DaemonMixer`` does."""
        self.is_away = True
        match self.doing:
            case Doing.MIX1:
                return self._end_mix1()
            case Doing.MIX2:
                return self._step()
            case _:
                return []

    def begin(self, order: StartMixing) -> list[MixingEvent]:
        """Take over a state, or go on with the own one, and want a round."""
        if self.doing is not Doing.STARTING:
            return []
        self.is_away = False
        if order.parts:
            z = np.concatenate([read_values(self.store, name) for name in order.parts])
            self.disk.z, self.disk.round_index = z, order.round_index
            self.adopted_count += 1
        elif self.disk.z is None:
            self.disk.z = self.start.copy()
        self.disk.round_index = max(self.disk.round_index, order.round_index)
        return self._want_round()

    def _want_round(self) -> list[MixingEvent]:
        self.doing, self.plan, self.handed = Doing.OPENING, None, {}
        wanted = RoundWanted(self.disk.round_index)
        # Its next life knows nothing of this process.
        return [MixingAttached(self.disk.round_index, SIZE), wanted] if self.is_away else [wanted]

    def open_alone(self) -> OpenRound:
        """Begin a round without the node, which did not come back, and return its plan."""
        plan = OpenRound(self.disk.round_index, False, 1, (), JobPlan(Job.MIX1, 0), JobPlan(Job.MIX2, 0))
        self.open(plan, offers_state=False)
        self.is_away = True
        return plan

    def open(self, plan: OpenRound, *, offers_state: bool) -> list[MixingEvent]:
        """Begin a round; inner steps run from now on."""
        if self.doing is not Doing.OPENING:
            return []
        self.doing, self.plan, self.is_away = Doing.INNER, plan, False
        assert self.disk.z is not None
        self.x = self.disk.z.copy()
        events: list[MixingEvent] = []
        if offers_state:
            events.append(StateStored(plan.round_index, write_values(self.store, self.x, plan.round_index, 0)))
        return [*events, *self._hand_over(plan.mix1, self.x)]

    def _hand_over(self, plan: JobPlan, vector: Values) -> list[MixingEvent]:
        if not plan.is_mixed:
            return []
        assert self.plan is not None
        for debt in plan.debts:
            if self.has_added(debt.name):
                continue
            amount = self.read_debt(debt)
            vector = vector + amount
            self.settled.append((debt.name, amount))
        self.handed[plan.job] = vector
        place = (self.plan.round_index, int(plan.job))
        slices = tuple(write_values(self.store, values, *place) for values in cut(vector, plan.slice_count))
        names = tuple(debt.name for debt in plan.debts)
        return [PartStored(self.plan.round_index, plan.job, slices, names)]

    def has_added(self, name: DebtName) -> bool:
        """Say whether this process added a debt to a vector before."""
        return any(known == name for known, _ in self.settled)

    def read_debt(self, debt: Debt) -> Values:
        """Return what a debt adds."""
        difference: Values = read_values(self.store, debt.mean) - read_values(self.store, debt.own)
        return difference

    def end_inner_steps(self) -> list[MixingEvent]:
        """The inner steps are done: wait for Mix1, if there is any."""
        assert self.doing is Doing.INNER
        assert self.plan is not None
        assert self.x is not None
        steps = [self.step * (self.chance(2049) - 1024) / 1024 for _ in range(self.x.size)]
        self.gradient = np.array(steps, self.x.dtype)
        self.probed = self.x - self.gradient
        self.doing = Doing.MIX1
        if self.is_away or not self.plan.mix1.is_mixed:
            return self._end_mix1()
        return [ResultWanted(self.plan.round_index, Job.MIX1)]

    def take(self, ready: MixReady) -> list[MixingEvent]:
        """Take in the result of a job."""
        if self.plan is None or ready.round_index != self.plan.round_index:
            return []
        if ready.job is Job.MIX1 and self.doing is Doing.MIX1:
            self._apply(ready)
            return self._end_mix1()
        if ready.job is Job.MIX2 and self.doing is Doing.MIX2:
            self._apply(ready)
            return self._step()
        return []

    def _apply(self, ready: MixReady) -> None:
        """Write the means that came over the values that were handed over."""
        own = self.handed.get(ready.job)
        if own is None or not ready.slices:
            return
        pieces = cut(own, len(ready.slices))
        for place, piece in enumerate(ready.slices):
            if piece.mean is not None:
                pieces[place] = read_values(self.store, piece.mean)
        self.handed[ready.job] = np.concatenate(pieces)

    def _end_mix1(self) -> list[MixingEvent]:
        assert self.plan is not None
        assert self.gradient is not None
        self.x = self.handed.get(Job.MIX1, self.x)
        self.doing = Doing.MIX2
        if self.is_away or not self.plan.mix2.is_mixed:
            return self._step()
        return [*self._hand_over(self.plan.mix2, self.gradient), ResultWanted(self.plan.round_index, Job.MIX2)]

    def _step(self) -> list[MixingEvent]:
        assert self.plan is not None
        assert self.x is not None
        self.gradient = self.handed.get(Job.MIX2, self.gradient)
        assert self.gradient is not None
        is_asked = self.plan.is_probed and not self.is_mute and not self.is_away
        probed = [self._answer_probe(self.plan)] if is_asked else []
        self.disk.z = self.x - self.x.dtype.type(self.learning_rate) * self.gradient
        self.disk.round_index = self.plan.round_index + 1
        self.round_count += 1
        return [*probed, *self._want_round()]

    def _answer_probe(self, plan: OpenRound) -> MixingEvent:
        """Return what the weights after the inner steps predict, in bins of what the mean does."""
        assert self.x is not None
        bins = choose_bins(predict(self.x), 2)
        answer = encode_probe(fill_bins(predict(self.probed), bins), round_index=plan.round_index)
        seen = np.abs(self.probed[: len(plan.subset)]).astype("<f4").tobytes()
        return ProbeMade(plan.round_index, TOY_BATCH, name_bins(bins), answer, seen)


def predict(values: Values) -> Values:
    """Return what the toy model predicts for each token of the probe, (2, 4)."""
    logits = values.astype(np.float64).reshape(2, -1)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: Values = weights / weights.sum(axis=1, keepdims=True)
    return probabilities


def make_start(key: PeerId, spread: float, dtype: npt.DTypeLike = np.float64) -> Values:
    """Return the z that a trainer of this key begins with: common to all without spread."""
    common = np.arange(1, SIZE + 1, dtype=np.float64)
    own = np.array([key[place] / 255 - 0.5 for place in range(SIZE)])
    return (common + spread * own).astype(dtype)
