"""What a trainer of Factored Gossip DiLoCo holds beside its weights: the outer iterate z and the outer momentum.

All arithmetic is eager torch, operation by operation, with the bits of :mod:`pulsenet.outer.mixing.step`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from pulsenet.errors import ConfigError
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.mixing.settings import ALGORITHM
from pulsenet.tensors.params import ParameterTable
from pulsenet.training import outer_torch
from pulsenet.training.outer_state import Placement, allocate_copies
from pulsenet.training.state_dict import pack_copies, read_counters, read_numbers, unpack_copies

NUMBERS: Final = ("round_index", "inner_step", "warmup_left")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MixingCounters:
    """Totals since the run began, checkpoints included."""

    inner_steps: int = 0
    wasted_inner_steps: int = 0
    """Taken from a z that was given up for somebody else's, or given up because nobody takes what they led to."""
    rounds: int = 0
    mixed_jobs: int = 0
    """Mix1 and Mix2 that brought somebody else's values."""
    alone_jobs: int = 0
    """Those that did not."""
    adoptions: int = 0
    inner_seconds: float = 0.0
    """Between the calls of ``step()``."""
    blocked_seconds: float = 0.0
    """Inside them."""

    @property
    def utilization(self) -> float:
        """Time in inner steps over wall time."""
        total = self.inner_seconds + self.blocked_seconds
        return self.inner_seconds / total if total > 0.0 else 1.0


class GossipState:
    """z and momentum of every master, flat, in table order.

    Args:
        table: FP32 masters.
        locals_: The masters that the inner optimizer steps; z starts as a copy of them.
        z: Where z lies.
        momentum: Where the outer momentum lies.

    Raises:
        ConfigError: A place that is none, or a file that cannot be made there.
    """

    def __init__(
        self,
        table: ParameterTable,
        locals_: Sequence[torch.Tensor],
        *,
        z: Placement = "device",
        momentum: Placement = "device",
    ) -> None:
        self.table = table
        devices = [local.device for local in locals_]
        self.z = allocate_copies("z", table, devices, z)
        self.momentum = allocate_copies("momentum", table, devices, momentum)
        for mine, local in zip(self.z, locals_, strict=True):
            mine.copy_(outer_torch.flatten(local))

    @staticmethod
    def entries(copies: Sequence[torch.Tensor], tensor_indices: Iterable[int]) -> Iterator[Entries]:
        """Yield z or the momentum of some tensors, dense, in host memory; they may share the state's."""
        for index in tensor_indices:
            yield Entries(index, None, copies[index].cpu().numpy())

    def is_fit(self, locals_: Sequence[torch.Tensor], norm_max: float) -> bool:
        """Tell whether inner steps led to what may be mixed: in z anything else, such as a NaN, would stay for ever."""
        square = 0.0
        for z, local in zip(self.z, locals_, strict=True):
            flat = outer_torch.flatten(local)
            square += sum(_square(z[block].to(flat.device) - flat[block]) for block in outer_torch.blocks(flat))
        norm = math.sqrt(square)
        if norm <= norm_max:
            return True
        logger.warning("the inner steps of a round are given up: the norm of what they did is %g", norm)
        return False

    def compute_delta(self, tensor_index: int, local: torch.Tensor) -> FP32s:
        """Return z minus a master, flat, in host memory of its own."""
        delta = torch.empty(local.numel(), dtype=torch.float32, device="cpu")
        flat, z = outer_torch.flatten(local), self.z[tensor_index]
        for block in outer_torch.blocks(flat):
            delta[block].copy_(z[block].to(flat.device) - flat[block])
        values: FP32s = delta.numpy()
        return values

    def step(
        self,
        tensor_index: int,
        local: torch.Tensor,
        *,
        x: FP32s | None,
        delta: FP32s | None,
        momentum: FP32s | None,
        learning_rate: float,
        momentum_factor: float,
        sent: FP32s | None = None,
    ) -> tuple[float, float, float]:
        """Do ``v = mu v + D; z = x - lr (D + mu v)`` of one tensor, on the device of its master.

        Args:
            local: The master at the end of the inner steps.
            x: What Mix1 gave; ``None`` for z itself.
            delta: What Mix2 gave for D; ``None`` for the own one, z minus the master.
            momentum: What was mixed of v; ``None`` for the own one.
            sent: What was handed over of D; ``None`` for the own one.

        Returns:
            Squares of the Euclidean norms of the own delta, of x minus z, and of what was handed over minus ``delta``.
        """
        z, held, flat = self.z[tensor_index], self.momentum[tensor_index], outer_torch.flatten(local)
        device = flat.device
        delta_square = distance_square = gap_square = 0.0
        for block in outer_torch.blocks(flat):
            before = z[block].to(device)
            own = before - flat[block]
            # Clones: what was given may be read only, and z is written below.
            moved = before.clone() if x is None else _put(x[block], device).clone()
            velocity = (held[block].to(device) if momentum is None else _put(momentum[block], device)).clone()
            delta_square += _square(own)
            distance_square += 0.0 if x is None else _square(moved - before)
            mixed = own if delta is None else _put(delta[block], device)
            if delta is not None:
                gap_square += _square((own if sent is None else _put(sent[block], device)) - mixed)
            outer_torch.step_nesterov(
                moved,
                velocity,
                mixed,
                learning_rate=learning_rate,
                momentum_factor=momentum_factor,
            )
            z[block].copy_(moved)
            held[block].copy_(velocity)
        return delta_square, distance_square, gap_square

    def restart(self, tensor_index: int, local: torch.Tensor) -> None:
        """Write z into a master."""
        with torch.no_grad():
            local.copy_(self.z[tensor_index].view(local.shape))

    def adopt(self, values: Sequence[FP32s]) -> None:
        """Take over somebody else's z; the momentum begins at zero.

        Raises:
            ConfigError: other sizes than the table's; nothing was taken.
        """
        for spec, given in zip(self.table.tensors, values, strict=True):
            if given.size != spec.element_count:
                raise ConfigError(f"{spec.name}: {given.size} elements are offered for {spec.element_count}")
        for mine, velocity, given in zip(self.z, self.momentum, values, strict=True):
            mine.copy_(outer_torch.to_tensor(given, torch.device("cpu")))
            velocity.zero_()


def pack_mixing(
    table: ParameterTable,
    state: GossipState | None,
    masters: Sequence[torch.Tensor],
    numbers: Mapping[str, int],
    counters: MixingCounters,
) -> dict[str, Any]:
    """Return what a checkpoint keeps; tensors are shared.

    Args:
        table: FP32 masters.
        state: z and momentum; ``None`` on ranks other than 0.
        masters: FP32 masters that no checkpoint of the model holds; empty if there are none.
        numbers: ``NUMBERS`` by name.
        counters: Totals.
    """
    return pack_copies(table, _list_copies(state, masters), numbers, counters) | {"algorithm": ALGORITHM}


def unpack_mixing(
    saved: Mapping[str, Any], table: ParameterTable, state: GossipState | None, masters: Sequence[torch.Tensor]
) -> tuple[dict[str, int], MixingCounters]:
    """Take what :func:`pack_mixing` returned into ``state`` and ``masters``; return the numbers and totals.

    Raises:
        ConfigError: it is of other masters, of another algorithm or format; nothing was written.
    """
    if saved.get("algorithm") != ALGORITHM:
        raise ConfigError("the saved outer state is none of a GossipOptimizer: take a checkpoint of this run")
    unpack_copies(saved, table, _list_copies(state, masters))
    return read_numbers(saved, NUMBERS), read_counters(saved, MixingCounters)


def _list_copies(state: GossipState | None, masters: Sequence[torch.Tensor]) -> dict[str, Sequence[torch.Tensor]]:
    copies: dict[str, Sequence[torch.Tensor]] = {} if state is None else {"z": state.z, "momentum": state.momentum}
    return {**copies, "masters": masters}


def _square(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _put(values: FP32s, device: torch.device) -> torch.Tensor:
    return outer_torch.to_tensor(np.ascontiguousarray(values), device)
