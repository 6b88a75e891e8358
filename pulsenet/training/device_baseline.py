"""What the training process last handed over, kept on the device of its weights, so that only changes leave it.

The copy moves at every hand-over, whatever becomes of it. Beside it stands, hand-over by hand-over, which elements
moved. The daemon names the hand-over ``k`` of this process that it holds: what moved in the hand-overs after ``k`` is
every element that can differ from its version. Listing those with their present bits is right whether the daemon
still holds ``k`` when it encodes them, or one that was on its way and came after. So a hand-over that was replaced,
failed or was cut off half way costs nothing, and its outcome need not be known. Whatever else the daemon holds (another
process's version, or one rebuilt after a restart) has no number here: it asks for whole tensors. Those are compared
all the same, so that the next hand-over can be of changes again.

Memory on the device: one copy in the published dtypes; the positions that moved since ``k``, 32 bits each and at most
three quarters of the copy; and, while a block is compared, a few times the block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from pulsenet.codec.changes import Bits, Indices
from pulsenet.codec.compare import find_changes
from pulsenet.local.changed_parts import LISTED_RATIO_MAX, ChangedPartWriter, compute_listed_max
from pulsenet.local.parts import SealedPart, cut_parts
from pulsenet.local.protocol import SENDER_SIZE_BYTES, Origin
from pulsenet.local.shared_memory import Bytes, write_parts
from pulsenet.local.torch_dtypes import BITS_DTYPES
from pulsenet.tensors.params import TensorSpec
from pulsenet.training.snapshot import Snapshot, as_host_bytes

BLOCK_ELEMENTS_HOST: Final = 1 << 20
"""Elements compared at once on a CPU: they stay in its cache from the cast to the comparison."""

BLOCK_ELEMENTS_DEVICE: Final = 1 << 22
"""Elements compared at once on an accelerator: cast and comparison take some 20 bytes for each."""

OnTensor = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Moved:
    """Elements of one block that a hand-over moved."""

    number: int
    positions: torch.Tensor | None
    """Ascending, counted from the block's start, int32; ``None`` if they were too many to keep: all may have moved."""

    @property
    def kept_count(self) -> int:
        return 0 if self.positions is None else self.positions.numel()


@dataclass(slots=True)
class _Block:
    """What is known of one block of a tensor."""

    start: int
    """Its first element."""
    bits: torch.Tensor
    """As last handed over; a view of the tensor's memory."""
    is_filled: bool = False
    moved: list[_Moved] = field(default_factory=list)

    def move(self, bits: torch.Tensor, number: int) -> None:
        """Take over what hand-over ``number`` hands over."""
        if not self.is_filled:
            self.bits.copy_(bits)
            self.is_filled = True
            return
        positions = find_moved(self.bits, bits)
        if positions.numel() == 0:
            return
        # Noted first, then moved: if this breaks off in between, too much is listed and never too little.
        kept_max = self._count_kept_max()
        is_kept = positions.numel() <= kept_max
        self.moved.append(_Moved(number, positions if is_kept else None))
        if sum(moved.kept_count for moved in self.moved) > kept_max:
            self.moved = [_Moved(number, None)]
        if is_kept:
            self.bits.index_copy_(0, positions.long(), bits.index_select(0, positions))
        else:
            self.bits.copy_(bits)

    def forget_until(self, number: int) -> None:
        """Drop what hand-overs up to this one moved."""
        self.moved = [moved for moved in self.moved if moved.number > number]

    def list_moved(self) -> torch.Tensor:
        """Return the positions of all that moved, ascending, counted from the block's start."""
        listed = [moved.positions for moved in self.moved]
        known = [positions for positions in listed if positions is not None]
        if len(known) < len(listed):
            return torch.arange(self.bits.numel(), dtype=torch.int32, device=self.bits.device)
        if not known:
            return torch.empty(0, dtype=torch.int32, device=self.bits.device)
        return known[0] if len(known) == 1 else torch.unique(torch.cat(known))

    def _count_kept_max(self) -> int:
        """Return how many positions are kept: with more, most tensors would be handed over whole."""
        entry_size_bytes = torch.int32.itemsize + self.bits.element_size()
        return int(self.bits.numel() * self.bits.element_size() * LISTED_RATIO_MAX) // entry_size_bytes


class DeviceBaseline:
    """The copy of one model's weights, and what moved in it.

    Args:
        snapshot: A snapshot of the model; the copy lies where its tensors do. None of them may be sharded.

    Raises:
        torch.OutOfMemoryError: A device has no room for the copy.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._sender = os.urandom(SENDER_SIZE_BYTES)
        self._key = _describe(snapshot)
        self._memory = [
            torch.empty(spec.element_count, dtype=BITS_DTYPES[spec.element_size_bytes], device=source.device)
            for spec, source in zip(snapshot.table.tensors, snapshot.sources, strict=True)
        ]
        self._blocks: list[list[_Block]] = [[] for _ in self._memory]
        self._number = 0
        self._missing: set[int] = set()
        """Tensors that the hand-over in work has yet to take over."""
        self._number_min: int | None = None
        """The first hand-over that got to its end, from which on changes can be told; ``None``: none did."""
        self.is_listed = False
        """Whether the last hand-over was of changes."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the copy, on all devices together."""
        return sum(memory.numel() * memory.element_size() for memory in self._memory)

    @property
    def positions_size_bytes(self) -> int:
        """Bytes of the positions kept, on all devices together."""
        kept = [moved.kept_count for blocks in self._blocks for block in blocks for moved in block.moved]
        return sum(kept) * torch.int32.itemsize

    def fits(self, snapshot: Snapshot) -> bool:
        """Say whether a snapshot is of the same tensors in the same places."""
        return self._key == _describe(snapshot)

    def begin(self) -> Origin:
        """Number the hand-over about to be tried."""
        self._number += 1
        self.is_listed = False
        return Origin(self._sender, self._number)

    def make_parts(
        self, snapshot: Snapshot, base_number: int | None, on_tensor: OnTensor | None = None
    ) -> Generator[SealedPart]:
        """Return the parts of the hand-over that :meth:`begin` numbered, made one at a time.

        Args:
            snapshot: What is handed over.
            base_number: The hand-over that the daemon holds; ``None`` for whole parts.
            on_tensor: Told the position of each tensor once it is through.

        Raises:
            StorageError: While iterating: no shared memory.
            torch.OutOfMemoryError: While iterating: a device has no room to compare.
        """
        self._missing = {index for index, memory in enumerate(self._memory) if memory.numel()}
        self._note_end()
        if base_number is not None:
            self._forget_until(base_number)
        self.is_listed = base_number is not None and self._number_min is not None and base_number >= self._number_min
        return (self._make_changed if self.is_listed else self._make_whole)(snapshot, on_tensor)

    def _make_whole(self, snapshot: Snapshot, on_tensor: OnTensor | None) -> Generator[SealedPart]:
        blocks = (
            (tensor_index, block.start * block.bits.element_size(), as_host_bytes(block.bits))
            for tensor_index in range(len(self._memory))
            for block in self._move(snapshot, tensor_index)
        )
        return write_parts(snapshot.table, blocks, on_tensor)

    def _make_changed(self, snapshot: Snapshot, on_tensor: OnTensor | None) -> Generator[SealedPart]:
        for layout in cut_parts(snapshot.table):
            with closing(ChangedPartWriter(layout)) as writer:
                for tensor_index in layout.tensor_indices:
                    blocks = list(self._move(snapshot, tensor_index))
                    listed = _list_moved(snapshot.table.tensors[tensor_index], blocks)
                    if listed is None:
                        writer.write_whole(tensor_index, (as_host_bytes(block.bits) for block in blocks))
                    else:
                        writer.write_listed(tensor_index, *listed)
                    if on_tensor is not None:
                        on_tensor(tensor_index)
                descriptor, size_bytes = writer.seal()
            with closing(SealedPart(layout, descriptor, size_bytes)) as part:
                yield part

    def _move(self, snapshot: Snapshot, tensor_index: int) -> Iterator[_Block]:
        """Take a tensor over and yield its blocks, each once it has its new bits."""
        memory, known = self._memory[tensor_index], self._blocks[tensor_index]
        elements_max = BLOCK_ELEMENTS_HOST if memory.device.type == "cpu" else BLOCK_ELEMENTS_DEVICE
        start = 0
        for position, bits in enumerate(snapshot.bits_blocks(tensor_index, elements_max)):
            if position == len(known):
                known.append(_Block(start, memory[start : start + bits.numel()]))
            block = known[position]
            assert block.start == start
            block.move(bits, self._number)
            start += bits.numel()
            if start == memory.numel():
                self._missing.discard(tensor_index)
                self._note_end()
            yield block

    def _note_end(self) -> None:
        """Note, before the last part leaves, that the hand-over holds every tensor: it may be committed from then."""
        if not self._missing and self._number_min is None:
            self._number_min = self._number

    def _forget_until(self, number: int) -> None:
        for blocks in self._blocks:
            for block in blocks:
                block.forget_until(number)


def find_moved(held: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return where two flat blocks of integers differ: int32, ascending, on their device."""
    if held.device.type == "cpu":
        # The compiled loop compares some ten times faster than torch does here.
        found: Indices = find_changes(_as_numpy(held), _as_numpy(bits))
        return torch.from_numpy(found.view(np.int32))
    return find_moved_on_device(held, bits)


def find_moved_on_device(held: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Do what :func:`find_moved` does by operations that every device has."""
    return torch.nonzero(held != bits).view(-1).to(torch.int32)


def _list_moved(spec: TensorSpec, blocks: Iterable[_Block]) -> tuple[Indices, Bits] | None:
    """Return positions in a tensor and bits of all that moved; ``None`` if the whole tensor is shorter."""
    count, count_max = 0, compute_listed_max(spec)
    indices, bits = [np.zeros(0, spec.index_dtype)], [np.zeros(0, spec.bits_dtype)]
    for block in blocks:
        positions = block.list_moved()
        count += positions.numel()
        if count > count_max:
            return None
        if positions.numel():
            local = positions.cpu().numpy().astype(spec.index_dtype)
            indices.append(local + spec.index_dtype.type(block.start))
            moved: Bytes = block.bits.index_select(0, positions).cpu().numpy()
            bits.append(moved.view(spec.bits_dtype))
    return np.concatenate(indices), np.concatenate(bits)


def _as_numpy(bits: torch.Tensor) -> Bits:
    return bits.numpy().view(f"u{bits.element_size()}")


def _describe(snapshot: Snapshot) -> tuple[object, ...]:
    """Return what must stay the same for blocks to start where they did."""
    places = tuple((source.device, source.dtype, source.stride()) for source in snapshot.sources)
    return (snapshot.table.tensors, places)
