"""A training process of a few numbers: it does what the effects say, with a disk that survives it.

The maths is the smallest that has everything a round needs: a residual, a gate, a mean, momentum. Steps are
multiples of 1/1024, so that sums are exact and a lost or doubled contribution cannot hide in rounding.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pulsenet.chain.records import Contribution, SliceName
from pulsenet.codec.sections import find_slice_sections
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.node.effects import CheckContribution, Fate, StepState, SumSlices
from pulsenet.node.events import (
    ContributionChecked,
    ContributionStored,
    RestoreFailed,
    SlicesSummed,
    StateRestored,
    StateStepped,
    SumFailed,
    TrainingAttached,
)
from pulsenet.outer.floats import fp32_from_bits, fp32_to_bits
from pulsenet.testing.fakes import Chance, FakeStore
from pulsenet.wire.chunks import ChunkCutter, ChunkList
from pulsenet.wire.sections import find_slice_chunks

SIZE = 6
"""Elements of the toy model; each is a section of its own."""

SALT_SIZE_BYTES = 3

HEADER_SIZE_BYTES = 4
"""First chunk of a contribution, and of a slice."""

CHUNK_SIZE_BYTES = 16

CUTS = np.float32(128)
"""A flush sends multiples of 1/128, rounded toward zero."""

Vector = npt.NDArray[np.float32]
Exact = npt.NDArray[np.float64]


@dataclass(slots=True)
class OuterState:
    """A whole outer state, and this trainer's residual beside it."""

    round_index: int
    theta: Vector
    momentum: Vector
    residual: Vector

    def copy(self) -> OuterState:
        """Return an independent copy."""
        return OuterState(self.round_index, self.theta.copy(), self.momentum.copy(), self.residual.copy())

    @property
    def root(self) -> Digest:
        """Return the digest of what all trainers share."""
        return compute_digest(struct.pack("<Q", self.round_index) + self.theta.tobytes() + self.momentum.tobytes())


@dataclass(frozen=True, slots=True)
class StoredWork:
    """What a stored contribution leaves on disk."""

    corrected: Vector
    """Residual and pseudo-gradient together, before the gate."""
    sent: npt.NDArray[np.bool_]
    values: Vector
    """What was sent; in a flush, cut."""
    announced: ContributionStored


@dataclass(slots=True)
class TrainingDisk:
    """What survives the training process."""

    state: OuterState | None
    stored: dict[int, StoredWork] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    """Rounds whose stored contribution was dropped with the residual."""
    flush_interval: int = 0
    """Of the run: in so many rounds every element passes the gate once, cut; 0 for never."""


def start_state() -> OuterState:
    """Return the state that every run begins with."""
    zero = np.zeros(SIZE, np.float32)
    return OuterState(0, np.arange(SIZE, dtype=np.float32), zero, zero.copy())


def write_blob(store: FakeStore, data: bytes) -> tuple[Digest, int]:
    """Store a blob in small chunks; return its id and size."""
    cutter = ChunkCutter(CHUNK_SIZE_BYTES)
    return _store_blob(store, cutter, [*cutter.feed(data), *cutter.finish()])


def write_pieces(store: FakeStore | None, pieces: list[bytes]) -> tuple[Digest, int]:
    """Store a blob with one chunk for each piece, or only name it."""
    cutter = ChunkCutter()
    chunks = [chunk for piece in pieces for chunk in (*cutter.feed(piece), *cutter.boundary())]
    return _store_blob(store, cutter, [*chunks, *cutter.finish()])


def _store_blob(store: FakeStore | None, cutter: ChunkCutter, chunks: list[tuple[Digest, bytes]]) -> tuple[Digest, int]:
    chunk_list = cutter.chunk_list
    if store is not None:
        store.chunks |= {digest: bytes(chunk) for digest, chunk in chunks}
        store.lists[chunk_list.blob_id] = chunk_list.encode()
    return chunk_list.blob_id, chunk_list.size_bytes


def encode_entries(sent: npt.NDArray[np.bool_], values: Vector, salt: bytes, first: int = 0) -> list[bytes]:
    """Return the toy form of some elements, one piece each: its entry, or that there is none.

    Args:
        sent: Which have an entry.
        values: Of all of them.
        salt: ``SALT_SIZE_BYTES`` bytes that make pieces of different blobs different, as real ones are.
        first: Place of the first of them in the model.
    """
    assert len(salt) == SALT_SIZE_BYTES
    return [
        bytes([is_sent, first + place]) + salt + (value.tobytes() if is_sent else b"")
        for place, (is_sent, value) in enumerate(zip(sent.tolist(), values.astype("<f4"), strict=True))
    ]


def decode_entries(data: bytes) -> Vector:
    """Return a whole contribution as a dense vector."""
    found = decode_elements(data[HEADER_SIZE_BYTES:])
    assert len(found) == SIZE
    return np.array([0.0 if value is None else value for value in found], np.float32)


def decode_elements(data: bytes) -> list[np.float32 | None]:
    """Return some elements of a contribution or a slice, ``None`` where there is no entry."""
    found: list[np.float32 | None] = []
    place = 0
    while place < len(data):
        is_sent, place = data[place], place + 2 + SALT_SIZE_BYTES
        found.append(np.frombuffer(data, "<f4", 1, place)[0] if is_sent else None)
        place += 4 if is_sent else 0
    return found


class ToyTraining:
    """One life of a training process.

    Args:
        peer_id: Whose contributions are its own.
        disk: What earlier lives left.
        store: The node's store; blobs are read and written there.
        seed: What inner steps bring: the same in every life, so that a lone run repeats itself.
    """

    def __init__(self, peer_id: PeerId, disk: TrainingDisk, store: FakeStore, seed: int) -> None:
        self._peer_id = peer_id
        self.disk = disk
        self._store = store
        self._seed = seed
        self.poison = ""
        """What is wrong with the contributions it stores: ``finite``, ``norm`` or nothing."""
        self.state = None if disk.state is None else disk.state.copy()
        self.local: Exact = np.zeros(SIZE)
        """Inner steps of this round that are nowhere but in memory."""
        self.made: Exact = np.zeros(SIZE)
        """All inner steps of this life."""
        self.dropped: Exact = np.zeros(SIZE)
        """What this life dropped because it was told to."""
        self._steps_number: int | None = None

    @property
    def state_root(self) -> Digest | None:
        """Root of the state it holds."""
        return None if self.state is None else self.state.root

    def attach(self) -> TrainingAttached:
        """Say what is there."""
        self._steps_number = None
        if self.state is None:
            return TrainingAttached(None, None, None)
        work = self.disk.stored.get(self.state.round_index)
        if work is not None:
            # A contribution that was stored holds everything; the inner steps are not run again.
            self.local = (work.corrected - self.state.residual).astype(np.float64)
        announced = None if work is None else work.announced
        return TrainingAttached(self.state.round_index, self.state.root, announced)

    def run_inner_steps(self, inner_steps: int, number: int) -> None:
        """Move by multiples of 1/1024, once for each number."""
        if number == self._steps_number:
            return
        self._steps_number = number
        chance = self._draw("steps")
        steps = np.array([chance(17 * inner_steps) - 8 * inner_steps for _ in range(SIZE)]) / 1024
        self.local += steps
        self.made += steps

    def store_contribution(self) -> ContributionStored:
        """Gate, store, and say so; once stored, it is only said again."""
        state = self._require()
        if state.round_index in self.disk.stored:
            return self.disk.stored[state.round_index].announced
        corrected = state.residual + self.local.astype(np.float32)
        chance = self._draw("gate")
        sent = np.array([chance(3) > 0 for _ in range(SIZE)]) & (corrected != 0)
        values = corrected
        if self.disk.flush_interval:
            is_turn = np.arange(SIZE) % self.disk.flush_interval == state.round_index % self.disk.flush_interval
            sent |= is_turn
            values = np.where(is_turn, np.trunc(corrected * CUTS) / CUTS, corrected).astype(np.float32)
        values = np.full_like(corrected, np.nan) if self.poison == "finite" else values
        salt = self._peer_id[:2] + bytes([state.round_index % 256])
        pieces = [b"c" + salt, *encode_entries(sent, values, salt)]
        norm = float(np.linalg.norm(np.nan_to_num(values)[sent].astype(np.float64)))
        blob_id, size_bytes = write_pieces(self._store, pieces)
        announced = ContributionStored(
            round_index=state.round_index,
            base_state_root=state.root,
            blob_id=blob_id,
            encoded_size_bytes=size_bytes,
            entry_count=int(sent.sum()),
            element_count=SIZE,
            norm_bits=fp32_to_bits(norm + (self.poison == "norm")),
            codec_id=1,
        )
        self.disk.stored[state.round_index] = StoredWork(corrected, sent, values, announced)
        return announced

    def check(self, order: CheckContribution) -> ContributionChecked:
        """Look into somebody's contribution."""
        values = decode_entries(self._read(order.contribution))
        reason = "" if np.isfinite(values).all() else "finite"
        norm = fp32_to_bits(float(np.linalg.norm(values.astype(np.float64))))
        if not reason and norm != order.contribution.norm_bits:
            reason = "norm"
        return ContributionChecked(order.contribution_digest, reason)

    def step(self, order: StepState) -> StateStepped:
        """Do the outer step and settle the residual, both or neither; once done, it is only said again."""
        state = self._require().copy()
        if order.round_index == state.round_index - 1:
            return StateStepped(state.round_index, state.root)
        assert order.round_index == state.round_index
        total = self._read_slices(order.slices) if order.slices else self._sum(order)
        if order.members:
            mean = np.divide(total, np.full_like(total, len(order.members)))
            state.momentum = np.float32(0.5) * state.momentum + mean
            state.theta = state.theta - np.float32(0.5) * state.momentum
        self._settle(state, order)
        state.round_index += 1
        self.local = np.zeros(SIZE)
        self.state = state
        self.disk.state = state.copy()
        self.disk.stored.pop(order.round_index, None)
        return StateStepped(state.round_index, state.root)

    def _sum(self, order: StepState) -> Vector:
        total = np.zeros(SIZE, np.float32)
        for member, contribution in order.members:
            scale = np.float32(fp32_from_bits(member.scale_bits))
            total = total + scale * decode_entries(self._read(contribution))
        return total

    def _read_slices(self, slices: tuple[SliceName, ...]) -> Vector:
        found: list[np.float32 | None] = []
        for place, name in enumerate(slices):
            data = b"".join(self._store.read_blob(name.blob_id))
            assert data[:HEADER_SIZE_BYTES] == self._slice_header(place, len(slices))
            found += decode_elements(data[HEADER_SIZE_BYTES:])
        return np.array([0.0 if value is None else value for value in found], np.float32)

    def sum_slices(self, order: SumSlices) -> SlicesSummed | SumFailed:
        """Sum some slices of the members' contributions, of which no more than these need to be here."""
        if self.state is None or self.state.round_index != order.round_index:
            return SumFailed(order.round_index, "round")
        names = []
        for place in order.slices:
            elements = find_slice_sections(SIZE, place, len(order.members))
            sums: list[np.float32 | None] = [None] * len(elements)
            for member, contribution in order.members:
                scale = np.float32(fp32_from_bits(member.scale_bits))
                part = decode_elements(self._read_part(contribution, place, len(order.members)))
                for index, value in enumerate(part):
                    if value is not None:
                        before = sums[index]
                        sums[index] = (np.float32(0) if before is None else before) + scale * value
            sent = np.array([value is not None for value in sums], np.bool_)
            values = np.array([0.0 if value is None else value for value in sums], np.float32)
            salt = b"s" + struct.pack("<H", order.round_index)
            pieces = [self._slice_header(place, len(order.members))]
            pieces += encode_entries(sent, values, salt, elements.start)
            blob_id, size_bytes = write_pieces(self._store if place in order.stored else None, pieces)
            names.append((place, SliceName(blob_id, size_bytes)))
        return SlicesSummed(order.round_index, tuple(names))

    def _slice_header(self, slice_index: int, slice_count: int) -> bytes:
        return struct.pack("<HBB", self._require().round_index, slice_index, slice_count)

    def _read_part(self, contribution: Contribution, slice_index: int, slice_count: int) -> bytes:
        chunk_list = ChunkList.decode(self._store.lists[contribution.blob_id])
        header, body = find_slice_chunks(chunk_list, slice_index, slice_count)
        assert b"".join(self._store.chunks[chunk_list.entries[place][1]] for place in header)[:1] == b"c"
        return b"".join(self._store.chunks[chunk_list.entries[place][1]] for place in body)

    def _settle(self, state: OuterState, order: StepState) -> None:
        work = self.disk.stored.get(order.round_index)
        corrected = state.residual + self.local.astype(np.float32) if work is None else work.corrected
        match order.fate:
            case Fate.COUNTED if work is None:
                # An earlier life sent it, from a disk that is gone: whatever it sent is counted and not ours to keep.
                sent = np.zeros(SIZE, np.bool_)
                for member, contribution in order.members:
                    if member.peer_id == self._peer_id:
                        sent = decode_entries(self._read(contribution)) != 0
                state.residual = np.where(sent, np.float32(0), corrected)
            case Fate.COUNTED:
                assert work is not None
                (member,) = [m for m, _ in order.members if m.peer_id == self._peer_id]
                scaled = np.float32(fp32_from_bits(member.scale_bits)) * work.values
                state.residual = np.where(work.sent, work.corrected - scaled, work.corrected)
            case Fate.MISSED:
                state.residual = corrected
            case Fate.REJECTED:
                self.dropped += (corrected - state.residual).astype(np.float64)
            case Fate.DROPPED:
                self.dropped += corrected.astype(np.float64)
                state.residual = np.zeros(SIZE, np.float32)

    def write_anchor(self) -> tuple[int, Digest, Digest, int]:
        """Store the outer state as a blob; return round, state root, blob id and size."""
        state = self._require()
        data = struct.pack("<Q", state.round_index) + state.theta.tobytes() + state.momentum.tobytes()
        return state.round_index, state.root, *write_blob(self._store, data)

    def restore(self, blob_id: Digest, *, drops_residual: bool) -> StateRestored | RestoreFailed:
        """Take over the outer state of an anchor."""
        data = b"".join(self._store.read_blob(blob_id))
        if len(data) != 8 + 8 * SIZE:
            return RestoreFailed("decode")
        theta = np.frombuffer(data, "<f4", SIZE, 8).copy()
        momentum = np.frombuffer(data, "<f4", SIZE, 8 + 4 * SIZE).copy()
        residual = np.zeros(SIZE, np.float32) if self.state is None else self.state.residual
        if drops_residual:
            held = residual + self.local.astype(np.float32)
            for round_index, work in self.disk.stored.items():
                # Whether what it sent was counted, only the receipt knows, and that may be gone.
                held = work.corrected
                self.disk.given_up.add(round_index)
            self.dropped += held.astype(np.float64)
            residual = np.zeros(SIZE, np.float32)
            self.disk.stored.clear()
            self.local = np.zeros(SIZE)
        (round_index,) = struct.unpack("<Q", data[:8])
        self.state = OuterState(round_index, theta, momentum, residual)
        self.disk.state = self.state.copy()
        return StateRestored(round_index, self.state.root)

    def flip_bit(self) -> None:
        """Damage a master weight in memory, as hardware does."""
        state = self._require()
        state.theta = state.theta.copy()
        state.theta.view(np.uint32)[0] ^= 1

    def _draw(self, purpose: str) -> Chance:
        name = f"{self._seed} {purpose} {self._require().round_index}"
        return Chance(int.from_bytes(compute_digest(name.encode())[:8], "little"))

    def _require(self) -> OuterState:
        assert self.state is not None
        return self.state

    def _read(self, contribution: Contribution) -> bytes:
        return b"".join(self._store.read_blob(contribution.blob_id))
