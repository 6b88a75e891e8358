"""The maths of a round in eager torch, CPU or CUDA: the bits of :mod:`pulsenet.outer`.

Every arithmetic operation is a kernel of its own, so nothing can fuse a multiplication with an addition: no
``alpha=``, no ``addcmul``, no ``torch.compile``. Divisions are by a tensor on the same device. Scratch memory is a few
blocks, whatever the tensor's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import torch

from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.flush import NO_FLUSH, TensorFlush
from pulsenet.outer.reduce import Counted
from pulsenet.outer.self_test import SELF_TEST_DIGEST, run_self_test
from pulsenet.outer.settings import MANTISSA_BITS
from pulsenet.tensors.params import index_dtype
from pulsenet.training.snapshot import cast_to_bf16

BLOCK_ELEMENTS: Final = 1 << 18
"""Elements worked on at once on a CPU: the block and its scratch stay in the second-level cache."""

BLOCK_ELEMENTS_DEVICE: Final = 1 << 24
"""The same on an accelerator: enough to fill it, 64 MiB an array."""

_SCALE_ONE: Final = 1.0


def correct_delta(
    theta: torch.Tensor, local: torch.Tensor, residual: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``residual + (theta - local)``, as :func:`pulsenet.outer.gate.correct_delta`; flat FP32 tensors.

    Args:
        theta: Masters at the round's start.
        local: Masters now.
        residual: What the gate held back so far.
        out: Where to write; may be ``residual`` itself.
    """
    out = torch.empty_like(residual) if out is None else out
    for block in blocks(theta):
        torch.add(residual[block], theta[block] - local[block], out=out[block])
        _settle_nans(out[block])
    return out


def gate_entries(
    theta: torch.Tensor, local: torch.Tensor, residual: torch.Tensor, *, flush: TensorFlush = NO_FLUSH
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions (int64, ascending) and values of what passes the gate, on the tensors' device.

    As :func:`pulsenet.outer.gate.gate_entries`.
    """
    positions, values = [], []
    for block, passes_whole in split_blocks(theta, flush):
        before = theta[block]
        corrected = correct_delta(before, local[block], residual[block])
        if passes_whole:
            positions.append(torch.arange(block.start, block.stop, device=theta.device))
            values.append(cut_values(corrected, flush.mantissa_bits))
            continue
        moved = _settle_nans(before - corrected)
        differs = cast_to_bf16(before).view(torch.int16) != cast_to_bf16(moved).view(torch.int16)
        found = torch.nonzero(differs).view(-1)
        positions.append(found + block.start)
        values.append(corrected[found])
    if not positions:
        return torch.empty(0, dtype=torch.int64, device=theta.device), theta.new_empty(0)
    return torch.cat(positions), torch.cat(values)


def cut_values(values: torch.Tensor, mantissa_bits: int) -> torch.Tensor:
    """Return the values with fewer mantissa bits, as :func:`pulsenet.outer.flush.cut_values`."""
    return (values.view(torch.int32) & (-1 << (MANTISSA_BITS - mantissa_bits))).view(torch.float32)


def split_scaled(values: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(counted, held)`` of sent values, as :func:`pulsenet.outer.residual.split_scaled`.

    Raises:
        LocalProtocolError: a scale outside 0 to 1.
    """
    if not 0.0 <= scale <= 1.0:
        raise LocalProtocolError(f"a contribution is scaled by {scale}, which is not from 0 to 1")
    if scale == _SCALE_ONE:
        return values, torch.zeros_like(values)
    # A tensor, so that no backend multiplies in a wider type.
    product = values * torch.full((1,), float(scale), dtype=torch.float32, device=values.device)
    held = _settle_nans(values - product)
    return _settle_nans(values - held), held


def settle_counted(
    residual: torch.Tensor,
    theta: torch.Tensor,
    local: torch.Tensor,
    positions: torch.Tensor | None,
    values: torch.Tensor,
    *,
    scale: float = _SCALE_ONE,
    keeps_rest: bool = False,
) -> None:
    """Make the residual what was not sent, in place, as :func:`pulsenet.outer.residual.settle_counted`.

    Args:
        residual: Of the round before.
        theta: Masters at the round's start.
        local: Masters at its end.
        positions: Sent positions (int64), or ``None`` for all.
        values: Sent values.
        scale: Given by the receipt.
        keeps_rest: Sent values may be cut; what was cut off stays.
    """
    correct_delta(theta, local, residual, out=residual)
    clear_sent(residual, positions, values, scale=scale, keeps_rest=keeps_rest)


def clear_sent(
    residual: torch.Tensor,
    positions: torch.Tensor | None,
    values: torch.Tensor,
    *,
    scale: float = _SCALE_ONE,
    keeps_rest: bool = False,
) -> None:
    """Take counted entries out of the residual, as :func:`pulsenet.outer.residual.clear_sent`."""
    _, held = split_scaled(values, scale)
    if keeps_rest:
        rest = (residual if positions is None else residual[positions]) - values
        held = _settle_nans(rest + held)
    if positions is None:
        residual.copy_(held)
    else:
        residual[positions] = held


def reduce_mean(
    contributions: Mapping[bytes, tuple[torch.Tensor | None, torch.Tensor, float]], *, out: torch.Tensor
) -> None:
    """Write the mean of one tensor's contributions into ``out``, dense.

    As :func:`pulsenet.outer.reduce.reduce_mean`, with zeros where nobody sent.

    Args:
        contributions: By sender's key in any order: positions (int64, unique) or ``None`` for all, values, scale.
        out: Flat FP32 tensor of all elements.

    Raises:
        LocalProtocolError: nothing to combine.
    """
    if not contributions:
        raise LocalProtocolError("a round without contributions has no aggregate")
    out.zero_()
    for key in sorted(contributions):
        positions, values, scale = contributions[key]
        counted, _ = split_scaled(values, scale)
        if positions is None:
            out.add_(counted)
        else:
            # Positions are unique, so each element gets one plain addition; an atomic scatter-add is not needed.
            out[positions] = out[positions] + counted
    count = torch.full((1,), float(len(contributions)), dtype=torch.float32, device=out.device)
    for block in blocks(out):
        out[block].div_(count)
        _settle_nans(out[block])


def step_nesterov(
    theta: torch.Tensor,
    momentum: torch.Tensor,
    gradient: torch.Tensor,
    *,
    learning_rate: float,
    momentum_factor: float,
) -> None:
    """Do the outer step in place, as :func:`pulsenet.outer.optimizer.step_nesterov`."""
    rate = torch.full((1,), float(learning_rate), dtype=torch.float32, device=theta.device)
    factor = torch.full((1,), float(momentum_factor), dtype=torch.float32, device=theta.device)
    for block in blocks(theta):
        velocity, pull = momentum[block], gradient[block]
        velocity.mul_(factor)
        velocity.add_(pull)
        _settle_nans(velocity)
        move = velocity * factor
        torch.add(pull, move, out=move)
        move.mul_(rate)
        theta[block].sub_(move)
        _settle_nans(theta[block])


def flatten(local: torch.Tensor) -> torch.Tensor:
    """Return a master's elements as one row; they are the master's own where it is contiguous."""
    return local.detach().reshape(-1)


def blocks(tensor: torch.Tensor) -> Iterator[slice]:
    """Yield slices that cover a flat tensor, each small enough for scratch copies."""
    size = BLOCK_ELEMENTS if tensor.device.type == "cpu" else BLOCK_ELEMENTS_DEVICE
    for start in range(0, tensor.numel(), size):
        yield slice(start, min(start + size, tensor.numel()))


def split_blocks(tensor: torch.Tensor, flush: TensorFlush) -> Iterator[tuple[slice, bool]]:
    """Yield slices that cover a flat tensor, each small enough for scratch copies, and whether each passes whole."""
    for part, passes_whole in flush.split(tensor.numel()):
        for block in blocks(tensor[part]):
            yield slice(part.start + block.start, part.start + block.stop), passes_whole


def to_entries(tensor_index: int, positions: torch.Tensor | None, values: torch.Tensor, element_count: int) -> Entries:
    """Return entries in host memory, of which nothing is shared with the tensors."""
    indices = None if positions is None else positions.cpu().numpy().astype(index_dtype(element_count))
    return Entries(tensor_index, indices, values.cpu().numpy().copy())


def from_entries(entries: Entries, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return positions (int64, ``None`` for all) and values on ``device``."""
    positions = None if entries.indices is None else torch.from_numpy(entries.indices.astype(np.int64)).to(device)
    return positions, to_tensor(entries.values, device)


def to_tensor(values: FP32s, device: torch.device) -> torch.Tensor:
    """Return ``values`` as a tensor on ``device`` that may share their memory: to be read only."""
    # Torch warns of arrays it must not write to, such as those over received bytes; the copy is of sent entries.
    return torch.from_numpy(values if values.flags.writeable else values.copy()).to(device)


class TorchMaths:
    """The operations on one device, for :func:`pulsenet.outer.self_test.run_self_test` and for property tests."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def gate(self, theta: FP32s, local: FP32s, residual: FP32s, *, flush: TensorFlush = NO_FLUSH) -> Entries:
        """See :class:`pulsenet.outer.self_test.OuterMaths`."""
        positions, values = gate_entries(self._put(theta), self._put(local), self._put(residual), flush=flush)
        return to_entries(0, positions, values, theta.size)

    def settle(
        self,
        residual: FP32s,
        theta: FP32s,
        local: FP32s,
        sent: Entries,
        scale: np.float32,
        *,
        keeps_rest: bool = False,
    ) -> FP32s:
        """See :class:`pulsenet.outer.self_test.OuterMaths`."""
        settled = self._put(residual)
        positions, values = from_entries(sent, self._device)
        before, now = self._put(theta), self._put(local)
        settle_counted(settled, before, now, positions, values, scale=float(scale), keeps_rest=keeps_rest)
        return _take(settled)

    def mean(self, contributions: dict[bytes, Counted], element_count: int) -> FP32s:
        """See :class:`pulsenet.outer.self_test.OuterMaths`."""
        out = torch.empty(element_count, dtype=torch.float32, device=self._device)
        parts = {}
        for key, counted in contributions.items():
            positions, values = from_entries(counted.entries, self._device)
            parts[key] = (positions, values, float(counted.scale))
        reduce_mean(parts, out=out)
        return _take(out)

    def step(
        self, theta: FP32s, momentum: FP32s, gradient: FP32s, learning_rate: np.float32, momentum_factor: np.float32
    ) -> tuple[FP32s, FP32s]:
        """See :class:`pulsenet.outer.self_test.OuterMaths`."""
        new_theta, new_momentum = self._put(theta), self._put(momentum)
        step_nesterov(
            new_theta,
            new_momentum,
            self._put(gradient),
            learning_rate=float(learning_rate),
            momentum_factor=float(momentum_factor),
        )
        return _take(new_theta), _take(new_momentum)

    def _put(self, values: FP32s) -> torch.Tensor:
        return torch.tensor(values, device=self._device)


def run_self_tests(tensors: Iterable[torch.Tensor]) -> Digest:
    """Return the self-test's digest if the host and the devices of all tensors compute it; else the first wrong one."""
    devices = {tensor.device for tensor in tensors}
    digests = [run_self_test(), *(run_device_self_test(device) for device in devices)]
    return next((digest for digest in digests if digest != SELF_TEST_DIGEST), SELF_TEST_DIGEST)


def run_device_self_test(device: torch.device | str) -> Digest:
    """Return the self-test's digest as computed by torch on ``device``."""
    return run_self_test(TorchMaths(device))


def _take(values: torch.Tensor) -> FP32s:
    taken: FP32s = values.cpu().numpy()
    return taken


def _settle_nans(values: torch.Tensor) -> torch.Tensor:
    """Write every NaN in place as 0x7FC00000, and return the values."""
    return values.masked_fill_(values != values, float("nan"))
