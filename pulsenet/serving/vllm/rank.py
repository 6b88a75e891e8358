"""One rank's weights: staged, committed, rolled back and read back, in place. Plain torch, no vLLM.

Nothing here is called from two threads at once; :mod:`pulsenet.serving.vllm.worker` sees to that.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from pulsenet.codec.changes import Changes, decode_changes
from pulsenet.errors import (
    IntegrityError,
    LocalProtocolError,
    PatchMismatchError,
    RemoteProtocolError,
    StorageError,
    StructureError,
)
from pulsenet.ids import Version, compute_digest
from pulsenet.serving.engine import check_records, describe_names
from pulsenet.serving.vllm.attest import Checkpoint, RegionTensors, Tensors, attest, find_differing, overwrite
from pulsenet.serving.vllm.exchange import State, UpdateInfo, parse_version
from pulsenet.serving.vllm.map import EngineMap, LoadWeights, Memory, trace_map
from pulsenet.tensors.params import ParameterTable

SAMPLE_COUNT_MAX: Final = 1 << 10
"""Positions of one memory that are read back after a commit, spread evenly. Few, because the engine stands still."""


@dataclass(slots=True, eq=False)
class Writes:
    """What an update writes into one memory, on the memory's device."""

    memory: Memory
    positions: torch.Tensor
    new_bits: torch.Tensor
    old_bits: torch.Tensor
    """What the update expects there; after :meth:`RankWeights.commit` what was there."""


@dataclass(slots=True, eq=False)
class StagedUpdate:
    """An update that was checked and can be written without another look at it."""

    version: Version
    base_version: Version | None
    root: str
    writes: list[Writes] = field(default_factory=list)
    full: RegionTensors | None = None
    """The whole version, if the update is a full one and the weights are not that version already."""
    full_count: int = 0
    """Elements of this rank that a full update writes."""
    samples: list[Sample] = field(default_factory=list)
    """What is read back after the commit, chosen while the engine serves."""

    @property
    def changed_count(self) -> int:
        """Positions written."""
        return sum(int(writes.positions.numel()) for writes in self.writes) + self.full_count


class RankWeights:
    """The weights of one rank of an engine, and what may be done to them.

    Args:
        model: The rank's model; its parameters keep their addresses whatever happens.
        load_weights: Its loader; ``None`` takes ``model.load_weights``.
    """

    def __init__(self, model: torch.nn.Module, load_weights: LoadWeights | None = None) -> None:
        self._model = model
        self._load_weights = load_weights
        self.state = State.NEW
        self.held: Version | None = None
        """Version of the weights; ``None`` if they are the checkpoint's, or unknown."""
        self.root: str | None = None
        self._map: EngineMap | None = None
        self._addresses: tuple[int, ...] = ()
        self._staged: StagedUpdate | None = None
        self._samples: list[Sample] = []
        """Of the last commit."""
        self._plain: frozenset[str] = frozenset()
        """Tensors that lie as published in an engine that is loaded instead of patched."""
        self.plain_count = 0
        """Their elements on this rank."""

    @property
    def changed_count(self) -> int:
        """Positions that the staged or committed update writes."""
        return 0 if self._staged is None else self._staged.changed_count

    @property
    def map(self) -> EngineMap:
        """Where each tensor lies.

        Raises:
            LocalProtocolError: Nothing was attached.
        """
        if self._map is None:
            raise LocalProtocolError("the engine is not attached")
        return self._map

    def draw(self, table: ParameterTable) -> EngineMap:
        """Draw the map; the loader runs in this thread, so the engine must not step meanwhile.

        Raises:
            StructureError: The model cannot be patched in place; the message says why.
        """
        return trace_map(self._model, table, self._load_weights)

    def attach(self, mapped: EngineMap, open_checkpoint: Callable[[ParameterTable], Checkpoint]) -> None:
        """Take a map into use once all that it reaches equals the checkpoint the engine was started from.

        Later, when the weights have moved on, only a map of the same tensors is taken: how they lie was compared then.
        Weights that lie in other memory by now are no version.

        Raises:
            StructureError: The bits differ: the engine holds another form of the weights. Or the tensors are not those
                that were compared.
        """
        if self._map is None:
            checkpoint = open_checkpoint(mapped.table)
            try:
                attest(mapped, checkpoint, "its checkpoint")
            except IntegrityError as error:
                raise StructureError(
                    f"{error}; it packs or computes them after loading, so patches cannot go in place"
                ) from error
            self.root = checkpoint.compute_root().hex()
        elif self._map.table != mapped.table:
            raise StructureError("the version has other tensors than before: start the engine again from its model")
        addresses = tuple(memory.address for memory in mapped.memories)
        has_moved = self._map is not None and set(addresses) != set(self._addresses)
        self._map, self._addresses = mapped, addresses
        self._drop()
        if self.state is State.NEW:
            self.state = State.READY
        elif has_moved and self.state is State.READY:
            self.doubt()  # what lies there now was never compared

    def survey(self, mapped: EngineMap, open_checkpoint: Callable[[ParameterTable], Checkpoint]) -> None:
        """Find what lies as published, of an engine that holds the checkpoint; it is not attached by that.

        Once in the worker's life: later, a load that went wrong would pass for weights that are packed.
        """
        if self.plain_count:
            return
        differing = set(find_differing(mapped, open_checkpoint(mapped.table)))
        names = {mapped.table.tensors[index].name for index, _, _ in mapped.walk()}
        self._plain = frozenset(names - differing)
        table = mapped.table
        self.plain_count = sum(
            window.element_count for index, _, window in mapped.walk() if table.tensors[index].name in self._plain
        )

    def look(self, mapped: EngineMap, tensors: Tensors) -> None:
        """Compare what was found to lie as published.

        Raises:
            IntegrityError: The bits differ; the message names the tensors.
        """
        differing = [name for name in find_differing(mapped, tensors) if name in self._plain]
        if differing:
            raise IntegrityError(f"the engine loaded other bits than the files hold: {describe_names(differing)}")

    def stage(self, order: UpdateInfo, path: Path) -> None:
        """Read and check an update, and hold it ready; nothing is written.

        Raises:
            PulsenetError: It does not fit; the message says how.
            LocalProtocolError: An update is committed and not finished.
        """
        if self.state is State.COMMITTED:
            raise LocalProtocolError("an update is committed and not finished: roll it back first")
        self._drop()
        self._check_addresses()
        version = parse_version(order.version)
        if version is None:
            raise StorageError(f"{order.version!r} is no version", "damaged")
        data = map_memory(path, order.size_bytes)
        if order.base_version:
            staged = self._stage_records(order, version, data)
        else:
            if order.size_bytes != self.map.table.layout_size_bytes:
                raise StorageError(f"{order.size_bytes} bytes for {self.map.table.layout_size_bytes}", "damaged")
            staged = StagedUpdate(version, None, order.root)
            region = RegionTensors(self.map.table, data)
            if self._holds(order.root, region, version):
                staged.samples = [Sample.of_all(memory) for memory in self.map.memories]
            else:
                staged.full = region
                staged.full_count = sum(window.element_count for _, _, window in self.map.walk())
        self._staged = staged
        if self.state is State.READY:
            self.state = State.STAGED

    def _holds(self, root: str, region: RegionTensors, version: Version) -> bool:
        """Say whether the weights are this version already; those of which nothing is known are compared."""
        if self.state is not State.UNKNOWN:
            return self.root == root
        try:
            attest(self.map, region, f"version {version}")
        except IntegrityError:
            return False
        return True

    def _stage_records(self, order: UpdateInfo, version: Version, data: npt.NDArray[np.uint8]) -> StagedUpdate:
        base_version = parse_version(order.base_version)
        if self.state is not State.READY or self.held is None or self.held != base_version:
            raise PatchMismatchError(
                f"records lead from {order.base_version} to {version}, but this rank holds "
                f"{self.held or 'an unknown version'}: ask for a full load"
            )
        if compute_digest(data.data).hex() != order.digest:
            raise IntegrityError(f"the records of {version} do not have their digest: hand them over again")
        view, table = data.data, self.map.table
        try:
            check_records(decode_changes(view, table), table)
        except PatchMismatchError as error:
            # Not the fault of what is held: these records fit no weights at all.
            raise RemoteProtocolError("changes-order", str(error)) from error
        staged = StagedUpdate(version, base_version, order.root, self._route(decode_changes(view, table)))
        for writes in staged.writes:
            found = writes.memory.bits.gather(0, writes.positions)
            if not torch.equal(found, writes.old_bits):
                wrong_count = int((found != writes.old_bits).sum())
                raise PatchMismatchError(
                    f"{wrong_count} of {found.numel()} positions of {writes.memory.name} do not hold the old bits: "
                    "ask for a full load"
                )
            staged.samples.append(Sample.take(writes.memory, writes.positions, writes.new_bits))
        return staged

    def _route(self, records: Iterator[Changes]) -> list[Writes]:
        """Find the position in this rank's memories of every changed element it holds."""
        pieces: list[list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]] = [
            [] for _ in self.map.memories
        ]
        for changes in records:
            for memory_index, window in self.map.windows[changes.tensor_index]:
                chosen, positions = window.route(changes.indices)
                if chosen.size:
                    pieces[memory_index].append(
                        (positions, changes.new_bits[chosen].view(np.uint8), changes.old_bits[chosen].view(np.uint8))
                    )
        routed = []
        for memory, found in zip(self.map.memories, pieces, strict=True):
            if found:
                positions, new_bits, old_bits = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
                device, dtype = memory.bits.device, memory.bits.dtype
                routed.append(
                    Writes(
                        memory,
                        torch.from_numpy(positions).to(device),
                        torch.from_numpy(new_bits).view(dtype).to(device),
                        torch.from_numpy(old_bits).view(dtype).to(device),
                    )
                )
        return routed

    def commit(self) -> None:
        """Write the staged update, keeping what it overwrites, and read it back.

        Raises:
            LocalProtocolError: Nothing is staged.
            IntegrityError: What was written is not what is read.
        """
        staged = self._staged
        if staged is None or self.state is State.COMMITTED:
            raise LocalProtocolError("nothing is staged")
        self._check_addresses()
        self.state = State.COMMITTED if staged.full is None else State.UNKNOWN
        if staged.full is not None:
            overwrite(self.map, staged.full)
            attest(self.map, staged.full, f"version {staged.version}")
            self._samples = [Sample.of_all(memory) for memory in self.map.memories]
            self.state = State.COMMITTED
            return
        for writes in staged.writes:
            writes.old_bits = writes.memory.bits.gather(0, writes.positions)
        for writes in staged.writes:
            writes.memory.bits.scatter_(0, writes.positions, writes.new_bits)
        if staged.samples:
            self._samples = staged.samples  # else nothing is written, and the ones before still hold
        for sample in self._samples:
            sample.check()

    def rollback(self) -> None:
        """Give up what is staged, and put back what a commit overwrote. A full update cannot be put back.

        Raises:
            IntegrityError: The old bits did not come back; the weights are unknown.
        """
        staged, was_committed = self._staged, self.state is State.COMMITTED
        if staged is not None and was_committed:
            self.state = State.UNKNOWN
            if staged.full is None:
                self._samples = []
                for writes in staged.writes:
                    writes.memory.bits.scatter_(0, writes.positions, writes.old_bits)
                for writes in staged.writes:
                    if not torch.equal(writes.memory.bits.gather(0, writes.positions), writes.old_bits):
                        raise IntegrityError(f"the old bits of {writes.memory.name} did not come back")
                self.state = State.READY
        self._drop()
        if self.state is State.UNKNOWN:
            self.held = self.root = None

    def finish(self) -> None:
        """Let go of what the commit overwrote: the weights are the new version.

        Raises:
            LocalProtocolError: Nothing is committed.
        """
        if self._staged is None or self.state is not State.COMMITTED:
            raise LocalProtocolError("nothing is committed")
        self.held, self.root = self._staged.version, self._staged.root
        self._staged, self.state = None, State.READY

    def read_back(self) -> None:
        """Compare an even sample of what was written last with what is there.

        Raises:
            IntegrityError: The bits differ; the weights are unknown now.
            LocalProtocolError: An update is committed and not finished.
        """
        if self.state is State.COMMITTED:
            raise LocalProtocolError("an update is committed and not finished")
        try:
            self._check_addresses()
            for sample in self._samples:
                sample.check()
        except IntegrityError:
            self._drop()
            self.state, self.held, self.root = State.UNKNOWN, None, None
            raise

    def doubt(self) -> None:
        """Believe nothing of the weights any more; nothing is written.

        Raises:
            LocalProtocolError: An update is committed and not finished.
        """
        if self.state is State.COMMITTED:
            raise LocalProtocolError("an update is committed and not finished")
        self._drop()
        self.state, self.held, self.root = State.UNKNOWN, None, None

    def compare(self, tensors: Tensors, what: str) -> None:
        """Compare everything this rank holds with ``tensors``, which are called ``what``; nothing changes.

        Raises:
            LocalProtocolError: An update is committed and not finished.
            IntegrityError: The bits differ; the message names the tensors.
        """
        if self.state is State.COMMITTED:
            raise LocalProtocolError("an update is committed and not finished")
        self._check_addresses()
        attest(self.map, tensors, what)

    def _check_addresses(self) -> None:
        """Refuse to work on memory that the model has left."""
        self.map  # noqa: B018  # raises if nothing was attached
        here = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*self._model.parameters(), *self._model.buffers())
            if tensor.numel()
        }
        if not set(self._addresses) <= here:
            raise IntegrityError("the engine moved its parameters since it was attached: attach it again")

    def _drop(self) -> None:
        """Forget what is staged, but never what undoes a commit."""
        if self.state is not State.COMMITTED:
            self._staged = None
        if self.state is State.STAGED:
            self.state = State.READY


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Positions of one memory, spread evenly over those that were written, and what was written there."""

    memory: Memory
    positions: torch.Tensor
    bits: torch.Tensor

    @classmethod
    def take(cls, memory: Memory, positions: torch.Tensor, bits: torch.Tensor) -> Sample:
        """Choose from everything that was written to a memory."""
        step = -(-positions.numel() // SAMPLE_COUNT_MAX)
        return cls(memory, positions[::step].clone(), bits[::step].clone())

    @classmethod
    def of_all(cls, memory: Memory) -> Sample:
        """Choose from the whole memory, as it is now."""
        step = -(-memory.bits.numel() // SAMPLE_COUNT_MAX)
        positions = torch.arange(0, memory.bits.numel(), step, device=memory.bits.device)
        return cls(memory, positions, memory.bits[::step].clone())

    def check(self) -> None:
        """Read them back.

        Raises:
            IntegrityError: Other bits are there.
        """
        found = self.memory.bits.gather(0, self.positions)
        if not torch.equal(found, self.bits):
            wrong_count = int((found != self.bits).sum())
            raise IntegrityError(
                f"{wrong_count} of {self.positions.numel()} positions of {self.memory.name} read back do not hold what "
                "was written"
            )


def map_memory(path: Path, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Map shared memory for reading, by its path in the private directory.

    Raises:
        StorageError: It cannot be opened (reason ``unreadable``) or has another size (``damaged``).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror}", "unreadable") from error
    try:
        found = os.fstat(descriptor).st_size
        if found < size_bytes:
            raise StorageError(f"{path} has {found} bytes, {size_bytes} were announced", "damaged")
        if not size_bytes:
            return np.zeros(0, dtype=np.uint8)
        # Private and writable, because torch takes no read-only memory; it is never written.
        mapping = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        return np.frombuffer(mapping, dtype=np.uint8)
    finally:
        os.close(descriptor)
