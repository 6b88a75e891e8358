"""Takes a model's weights out of the training process: names, dtypes and row-major bytes, block by block.

A *snapshot* here is a plan, not a copy: the parameter table and where each tensor's values live. Values are read
when :meth:`Snapshot.blocks` is walked, at most ``BLOCK_SIZE_BYTES_MAX`` at a time, so that the memory beyond the
destination stays far below one tensor (the gather of a sharded tensor apart).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from pulsenet.errors import ConfigError
from pulsenet.local.torch_dtypes import BITS_DTYPES, DTYPE_NAMES
from pulsenet.tensors.bf16 import cast_to_bf16_bits
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenet.training.names import name_tensors

ComputeDtype = Literal["bf16"]
Bytes = npt.NDArray[np.uint8]

BLOCK_ELEMENTS: Final = 1 << 18
"""Elements cast at once on a CPU: result and source stay in its cache."""

BLOCK_ELEMENTS_DEVICE: Final = 1 << 24
"""Elements taken from an accelerator at once: enough to fill the bus, 64 MiB of FP32."""


@runtime_checkable
class Sharded(Protocol):
    """A tensor whose values lie on several ranks, such as FSDP2's ``DTensor``."""

    def full_tensor(self) -> torch.Tensor:
        """Gather the whole tensor; every rank must call it in the same order."""

    def to_local(self) -> torch.Tensor:
        """Return this rank's part."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Where the values of one version are, in table order. Nothing is copied before :meth:`blocks` is walked."""

    table: ParameterTable
    sources: tuple[torch.Tensor, ...]
    """One per tensor of the table: any strides, any device, possibly sharded."""

    def blocks(self) -> Iterator[tuple[int, int, Bytes]]:
        """Yield ``(tensor_index, offset_bytes, data)``: each tensor's row-major bytes, ascending and without gaps.

        An empty tensor yields nothing. ``data`` may share memory with the model: use it before the next step.
        """
        for tensor_index in range(len(self.sources)):
            offset_bytes = 0
            for bits in self.bits_blocks(tensor_index):
                data = as_host_bytes(bits)
                yield tensor_index, offset_bytes, data
                offset_bytes += data.size
            assert offset_bytes == self.table.tensors[tensor_index].size_bytes

    def bits_blocks(self, tensor_index: int, elements_max: int | None = None) -> Iterator[torch.Tensor]:
        """Yield a tensor's bits block by block where its values are: flat, contiguous, of ``BITS_DTYPES``, row-major.

        They may share memory with the model: use them before the next step.

        Args:
            tensor_index: Its position in the table.
            elements_max: Elements of a block; ``None`` chooses by the device. Where each block starts depends on this
                and on the tensor's shape, device and contiguity alone.
        """
        spec, source = self.table.tensors[tensor_index], self.sources[tensor_index]
        as_bf16 = spec.dtype == "BF16" and source.dtype == torch.float32
        for block in _flat_blocks(_gather(source), elements_max):
            flat = block.resolve_neg()  # a view may negate what lies in memory
            yield _cast_block(flat) if as_bf16 else _view_bits(flat)

    def tensor_bytes(self) -> Iterator[tuple[str, bytes]]:
        """Yield each tensor's name and row-major bytes, in table order: one whole tensor in memory at a time."""
        blocks = self.blocks()
        held = next(blocks, None)
        for tensor_index, spec in enumerate(self.table.tensors):
            data = bytearray()
            while held is not None and held[0] == tensor_index:
                data += held[2].data
                held = next(blocks, None)
            yield spec.name, bytes(data)


def take_snapshot(
    source: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    compute_dtype: ComputeDtype | None = "bf16",
    keep: tuple[str, ...] = (),
) -> Snapshot:
    """Name every tensor of ``source`` canonically and decide the dtype in which it is published.

    FP32 parameters become BF16 if ``compute_dtype`` says so; buffers and every other dtype stay exact. A plain state
    dict does not say what is a buffer: there every FP32 tensor counts as a parameter unless ``keep`` names it
    (a state dict made with ``keep_vars=True`` does say). Tied weights are published once, under the name that comes
    first. Non-persistent buffers are excluded and listed in the table.

    Args:
        source: A module, wrapped or not, or a state dict.
        compute_dtype: ``None`` publishes FP32 parameters as FP32.
        keep: Shell patterns over canonical names (``"*.norm.*"``) of FP32 parameters to publish as FP32.

    Raises:
        ConfigError: Something in ``source`` cannot be published; the message says what to do.
    """
    named = name_tensors(source, keep=keep)
    specs: list[TensorSpec] = []
    by_name: dict[str, torch.Tensor] = {}
    for name, tensor, is_cast in named.tensors:
        dtype = _dtype_name(name, tensor)
        if is_cast and dtype == "F32" and compute_dtype == "bf16":
            dtype = "BF16"
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)))
        by_name[name] = tensor
    table = make_table(specs, aliases=named.aliases, excluded=named.excluded)
    return Snapshot(table=table, sources=tuple(by_name[spec.name] for spec in table.tensors))


def collect_tensors(
    source: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    compute_dtype: ComputeDtype | None = "bf16",
    keep: tuple[str, ...] = (),
) -> tuple[ParameterTable, Iterator[tuple[str, bytes]]]:
    """Return the table of ``source`` and an iterator over (name, row-major bytes) in table order.

    Arguments and errors as in :func:`take_snapshot`.
    """
    snapshot = take_snapshot(source, compute_dtype=compute_dtype, keep=keep)
    return snapshot.table, snapshot.tensor_bytes()


def cast_to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Cast FP32 to BF16 on the bits: round to nearest, ties to even; a NaN becomes ``(bits >> 16) | 0x0040``.

    Torch's own cast gives every NaN one pattern of its choosing, and flushes subnormals where the process asked for
    it; this one gives the bits of :func:`pulsenet.tensors.bf16.cast_to_bf16_bits` on every device.
    """
    bits = values.view(torch.int32)
    # Wraps only for NaN, whose result is chosen below; the shifts are arithmetic, so 16 bits hold every result.
    rounded = ((bits >> 16) & 1).add_(0x7FFF).add_(bits).bitwise_right_shift_(16)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    quiet = (bits >> 16).bitwise_or_(0x0040)
    return torch.where(is_nan, quiet, rounded).to(torch.int16).view(torch.bfloat16)


def as_host_bytes(bits: torch.Tensor) -> Bytes:
    """Return a flat contiguous block as bytes on this host, without a copy if it is there."""
    # Through bytes because numpy knows no BF16 or FP8.
    data: Bytes = bits.view(torch.uint8).cpu().numpy()
    return data


def _cast_block(flat: torch.Tensor) -> torch.Tensor:
    """Return the bits of the BF16 cast of an FP32 block, on its device: from an accelerator, half crosses the bus."""
    if flat.device.type == "cpu":
        # The compiled loop is some fifty times faster than torch's integer operations.
        return torch.from_numpy(cast_to_bf16_bits(flat.numpy()).view(np.int16))
    return cast_to_bf16(flat).view(torch.int16)


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a tensor, from the other ranks too if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def _flat_blocks(tensor: torch.Tensor, elements_max: int | None = None) -> Iterator[torch.Tensor]:
    """Yield the row-major values of ``tensor`` as flat contiguous blocks; views wherever memory order allows."""
    if elements_max is None:
        elements_max = BLOCK_ELEMENTS if tensor.device.type == "cpu" else BLOCK_ELEMENTS_DEVICE
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), elements_max)
    elif tensor.numel() <= elements_max:
        yield tensor.contiguous().view(-1)
    elif tensor.ndim == 1:
        for part in torch.split(tensor, elements_max):
            yield part.contiguous()
    else:
        row_elements = tensor[0].numel()
        for part in torch.split(tensor, max(1, elements_max // row_elements)):
            # A single row may still be larger than a block: cut it along its own first dimension.
            yield from _flat_blocks(part[0] if part.shape[0] == 1 else part, elements_max)


def _view_bits(flat: torch.Tensor) -> torch.Tensor:
    """Return the memory of a flat contiguous block as integers of its elements' width."""
    # A single element counts as contiguous whatever its stride says, and such a view refuses all strides but 1.
    return flat.as_strided(flat.shape, (1,)).view(BITS_DTYPES[flat.element_size()])


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Return the safetensors name of a tensor's dtype, or refuse what has no plain values to send."""
    if tensor.device.type == "meta":
        raise ConfigError(f"tensor {name} is on the meta device and has no values: load the model before publishing")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ConfigError(f"tensor {name} is sparse or quantised ({tensor.dtype}): publish its dense form instead")
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        raise ConfigError(f"tensor {name} has dtype {tensor.dtype}, which cannot be published: cast or remove it")
    return dtype
