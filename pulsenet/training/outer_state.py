"""The three FP32 copies of a trainer: theta, residual and outer momentum, each where the user wants it.

Tensors are worked on block by block: on a CPU by the core's compiled loops, elsewhere by eager torch on the device of
the parameter, wherever the copies lie.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pulsenet.errors import ConfigError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Entries, find_run
from pulsenet.outer.floats import FP32s
from pulsenet.outer.flush import NO_FLUSH, TensorFlush
from pulsenet.outer.gate import correct_delta, gate_entries
from pulsenet.outer.optimizer import step_nesterov
from pulsenet.outer.residual import clear_sent
from pulsenet.outer.settings import OuterSettings
from pulsenet.outer.state import compute_state_root
from pulsenet.tensors.digest import hash_tensor
from pulsenet.tensors.params import ParameterTable
from pulsenet.training import outer_torch

Placement = Literal["device", "host"] | Path
"""Beside the parameters, in host memory, or in a file that is mapped and made anew."""


class OuterState:
    """Theta, residual and momentum of every master, flat, in table order.

    Args:
        table: FP32 masters.
        locals_: The masters that the inner optimizer steps; theta starts as a copy of them.
        theta: Where theta lies.
        residual: Where the residual lies.
        momentum: Where the outer momentum lies.

    Raises:
        ConfigError: A place that is none, or a file that cannot be made there.
    """

    def __init__(
        self,
        table: ParameterTable,
        locals_: Sequence[torch.Tensor],
        *,
        theta: Placement = "device",
        residual: Placement = "device",
        momentum: Placement = "device",
    ) -> None:
        self.table = table
        devices = [local.device for local in locals_]
        self.theta = allocate_copies("theta", table, devices, theta)
        self.residual = allocate_copies("residual", table, devices, residual)
        self.momentum = allocate_copies("momentum", table, devices, momentum)
        for mine, local in zip(self.theta, locals_, strict=True):
            mine.copy_(local.detach().reshape(-1))

    def gate(self, tensor_index: int, local: torch.Tensor, *, is_dense: bool, flush: TensorFlush = NO_FLUSH) -> Entries:
        """Return what one tensor sends. Nothing changes.

        Args:
            tensor_index: Of the tensor.
            local: Its master now.
            is_dense: All elements, as they are.
            flush: What passes the gate whole, where not all is sent.
        """
        theta, residual, flat = self.theta[tensor_index], self.residual[tensor_index], outer_torch.flatten(local)
        if _is_host(theta, residual, flat):
            arrays = _numpy(theta), _numpy(flat), _numpy(residual)
            if is_dense:
                return Entries(tensor_index, None, correct_delta(*arrays))
            return gate_entries(*arrays, tensor_index=tensor_index, flush=flush)
        positions, values = [], []
        for block, passes_whole in outer_torch.split_blocks(flat, flush):
            before, held = theta[block].to(flat.device), residual[block].to(flat.device)
            if is_dense:
                values.append(outer_torch.correct_delta(before, flat[block], held).cpu())
            else:
                whole = TensorFlush((slice(0, before.numel()),), flush.mantissa_bits) if passes_whole else NO_FLUSH
                found, sent = outer_torch.gate_entries(before, flat[block], held, flush=whole)
                positions.append((found + block.start).cpu())
                values.append(sent.cpu())
        joined = torch.cat(values) if values else torch.empty(0, dtype=torch.float32, device="cpu")
        places = torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64, device="cpu")
        return outer_torch.to_entries(tensor_index, None if is_dense else places, joined, flat.numel())

    def fold(self, tensor_index: int, local: torch.Tensor) -> None:
        """Make the residual the whole corrected pseudo-gradient."""
        theta, residual, flat = self.theta[tensor_index], self.residual[tensor_index], outer_torch.flatten(local)
        if _is_host(theta, residual, flat):
            correct_delta(_numpy(theta), _numpy(flat), _numpy(residual), out=_numpy(residual))
            return
        for block in outer_torch.blocks(flat):
            held = residual[block].to(flat.device)
            outer_torch.correct_delta(theta[block].to(flat.device), flat[block], held, out=held)
            residual[block].copy_(held)

    def clear_sent(self, sent: Entries, *, scale: float, keeps_rest: bool = False) -> None:
        """Take counted entries out of the residual; what clipping held of them stays.

        Args:
            sent: Own entries.
            scale: Given by the receipt.
            keeps_rest: The residual holds what the values were cut from; what was cut off stays too.
        """
        residual = self.residual[sent.tensor_index]
        if _is_host(residual):
            clear_sent(_numpy(residual), sent, scale=np.float32(scale), keeps_rest=keeps_rest)
            return
        positions, values = outer_torch.from_entries(sent, residual.device)
        outer_torch.clear_sent(residual, positions, values, scale=scale, keeps_rest=keeps_rest)

    def step(self, aggregate: Entries, settings: OuterSettings, device: torch.device) -> None:
        """Do the outer step of one tensor, on ``device``."""
        theta, momentum = self.theta[aggregate.tensor_index], self.momentum[aggregate.tensor_index]
        if _is_host(theta, momentum) and device.type == "cpu":
            gradient = aggregate.values
            if aggregate.indices is not None:
                gradient = np.zeros(theta.numel(), np.float32)
                gradient[aggregate.indices] = aggregate.values
            step_nesterov(
                _numpy(theta),
                _numpy(momentum),
                gradient,
                learning_rate=np.float32(settings.learning_rate),
                momentum_factor=np.float32(settings.momentum_factor),
            )
            return
        for block in outer_torch.blocks(theta):
            moved, velocity = theta[block].to(device), momentum[block].to(device)
            outer_torch.step_nesterov(
                moved,
                velocity,
                _dense_block(aggregate, block, device),
                learning_rate=settings.learning_rate,
                momentum_factor=settings.momentum_factor,
            )
            theta[block].copy_(moved)
            momentum[block].copy_(velocity)

    def restart(self, tensor_index: int, local: torch.Tensor) -> None:
        """Write theta into a local master."""
        with torch.no_grad():
            local.copy_(self.theta[tensor_index].view(local.shape))

    def read_theta(self, tensor_index: int) -> FP32s:
        """Return theta of one tensor in host memory; may share the state's."""
        return _numpy(self.theta[tensor_index].cpu())

    def read_momentum(self, tensor_index: int) -> FP32s:
        """Return the outer momentum of one tensor in host memory; may share the state's."""
        return _numpy(self.momentum[tensor_index].cpu())

    def write(self, tensor_index: int, theta: FP32s, momentum: FP32s) -> None:
        """Overwrite theta and momentum of one tensor.

        Raises:
            ConfigError: other sizes than the table's.
        """
        for mine, given in ((self.theta[tensor_index], theta), (self.momentum[tensor_index], momentum)):
            if given.size != mine.numel():
                raise ConfigError(f"{self.table.tensors[tensor_index].name}: a state of {given.size} elements")
            mine.copy_(outer_torch.to_tensor(given.reshape(-1), torch.device("cpu")))

    def clear_residual(self) -> None:
        """Give up everything held back."""
        for residual in self.residual:
            residual.zero_()

    def compute_root(self, round_index: int) -> Digest:
        """Return the state root after ``round_index`` rounds; reads all of theta and momentum."""
        hashes = []
        for tensor_index in range(len(self.table.tensors)):
            hashes.append((hash_tensor(self.read_theta(tensor_index)), hash_tensor(self.read_momentum(tensor_index))))
        return compute_state_root(self.table, round_index=round_index, hashes=hashes)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of the residual, for people to read."""
        total = 0.0
        for residual in self.residual:
            for block in outer_torch.blocks(residual):
                # Block by block: in FP64 at once, the largest tensor would need a copy of twice its size.
                total += float(torch.linalg.vector_norm(residual[block], dtype=torch.float64)) ** 2
        return math.sqrt(total)


def allocate_copies(
    kind: str, table: ParameterTable, devices: Sequence[torch.device], placement: Placement
) -> list[torch.Tensor]:
    """Return one zeroed flat FP32 tensor per tensor of the table.

    Raises:
        ConfigError: A file that is to be mapped cannot be made.
    """
    if isinstance(placement, Path):
        try:
            region = _map_new_file(placement, max(1, table.layout_size_bytes))
        except OSError as error:
            raise ConfigError(
                f"the file {placement} for {kind} cannot be made ({error.strerror or error}): give a path in a "
                f'directory that is there and can be written to, or {kind}="host"'
            ) from error
        views = (table.view(region, index).view(np.float32) for index in range(len(table.tensors)))
        return [torch.from_numpy(view) for view in views]
    if placement not in ("device", "host"):
        raise ConfigError(f'a copy is placed on "device", "host" or in a Path, not {placement!r}')
    return [
        torch.zeros(spec.element_count, dtype=torch.float32, device=device if placement == "device" else "cpu")
        for spec, device in zip(table.tensors, devices, strict=True)
    ]


def _map_new_file(path: Path, size_bytes: int) -> mmap.mmap:
    """Map a file of zeros that takes the place of one of this name.

    An older file is not written to: another process, or another copy of this one, may have it mapped. The disk's room
    is taken at once: where it ran out later, the kernel would end the process in the middle of a step.
    """
    path.unlink(missing_ok=True)
    with path.open("xb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
            return mmap.mmap(file.fileno(), size_bytes)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _dense_block(entries: Entries, block: slice, device: torch.device) -> torch.Tensor:
    if entries.indices is None:
        return outer_torch.to_tensor(entries.values[block], device)
    low, high = find_run(entries.indices, block.start, block.stop)
    dense = torch.zeros(block.stop - block.start, dtype=torch.float32, device=device)
    positions = torch.from_numpy(entries.indices[low:high].astype(np.int64) - block.start).to(device)
    dense[positions] = outer_torch.to_tensor(entries.values[low:high], device)
    return dense


def _is_host(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _numpy(tensor: torch.Tensor) -> FP32s:
    shared: FP32s = tensor.numpy()
    return shared
