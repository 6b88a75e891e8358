"""The baseline algorithm ``ddp``: a round is one inner step, made by the mean of all trainers' gradients.

What all trainers agree on is then the masters and the inner optimizer's own state, so both are in the state root and
in state anchors, and a receipted round is made again by letting the optimizer step by its mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pulsenet.errors import ConfigError, LocalProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.inner_state import Slot, StateBytes, decode_slots, encode_slots
from pulsenet.outer.settings import OuterSettings
from pulsenet.outer.state import compute_state_root
from pulsenet.tensors.digest import hash_tensor
from pulsenet.training.exchange import FinalRound, Restoration
from pulsenet.training.inner import InnerOptimizer
from pulsenet.training.masters import Masters
from pulsenet.training.stepper import Stepper


def take_gradients(masters: Masters, optimizer: torch.optim.Optimizer) -> tuple[Entries, ...] | None:
    """Take the gradients away from the masters, so that the step that follows moves nothing.

    Returns:
        One dense array a tensor, zeros where there is no gradient; ``None`` if no tensor has one.

    Raises:
        LocalProtocolError: gradients that a loss scaler has not unscaled.
    """
    if getattr(optimizer, "grad_scale", None) is not None:
        raise LocalProtocolError("the loss scaler left the gradients scaled: call scaler.unscale_(optimizer) first")
    if all(master.grad is None for master in masters.tensors):
        return None
    entries = []
    for index, master in enumerate(masters.tensors):
        gradient, master.grad = master.grad, None
        if gradient is None:
            entries.append(Entries(index, None, np.zeros(master.numel(), np.float32)))
            continue
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        entries.append(Entries(index, None, dense.float().reshape(-1).cpu().numpy().copy()))
    return tuple(entries)


def read_slots(optimizer: torch.optim.Optimizer, master: torch.Tensor) -> list[Slot]:
    """Return what an optimizer keeps for a tensor; values may share its memory.

    Raises:
        ConfigError: anything but FP32 tensors no larger than the tensor, which could not be handed to a joiner.
    """
    slots = []
    for name, value in optimizer.state.get(master, {}).items():
        if (
            not isinstance(value, torch.Tensor)
            or value.dtype != torch.float32
            or value.numel() > max(1, master.numel())
        ):
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(
                f"under the algorithm ddp joiners take the inner optimizer's state over, but {name!r} of "
                f"{type(optimizer).__name__} is {kind}: use an optimizer that keeps FP32 tensors, such as "
                "torch.optim.AdamW or SGD, or the algorithm diloco"
            )
        slots.append(Slot(name, tuple(value.shape), value.detach().cpu().contiguous().reshape(-1).numpy()))
    return slots


def write_slots(optimizer: torch.optim.Optimizer, master: torch.Tensor, slots: Sequence[Slot]) -> None:
    """Give an optimizer the state of a tensor in place of what it has."""
    optimizer.state.pop(master, None)
    if not slots:
        return
    group = _group_of(optimizer, master)
    # As torch does when it loads: single numbers lie in host memory, unless the optimizer reads them on the device.
    on_device = bool(group.get("capturable")) or bool(group.get("fused"))
    state = {}
    for slot in slots:
        device = master.device if slot.shape or on_device else torch.device("cpu")
        state[slot.name] = torch.from_numpy(slot.values.copy()).reshape(slot.shape).to(device)
    optimizer.state[master] = state


def _group_of(optimizer: torch.optim.Optimizer, master: torch.Tensor) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(one is master for one in group["params"]))


class GradientStepper(Stepper):
    """The masters and the inner optimizer's state, moved by mean gradients; nothing is held beside them.

    Args:
        masters: What the inner optimizer steps.
        settings: Of the run.
        inner: That optimizer; its schedule counts ``inner_steps`` rounds as one.
    """

    def __init__(self, masters: Masters, settings: OuterSettings, inner: InnerOptimizer) -> None:
        super().__init__(masters, settings, None)
        self._inner = inner
        self.refresh_root()

    @property
    def holds_state(self) -> bool:
        """Whether there is a state whose root can be computed."""
        return True

    def theta(self, tensor_index: int) -> FP32s:
        """Return a master in host memory."""
        flat: FP32s = self._masters.tensors[tensor_index].detach().reshape(-1).cpu().numpy()
        return flat

    def momentum(self, tensor_index: int) -> StateBytes:
        """Return the inner optimizer's state of a tensor as bytes."""
        return encode_slots(read_slots(self._inner.optimizer, self._masters.tensors[tensor_index]))

    def residual_norm(self) -> float:
        """Return 0: nothing is held back."""
        return 0.0

    def restart(self) -> None:
        """Move nothing: the masters are the state."""
        self.is_ahead = False

    def _move(self, final: FinalRound, *, has_work: bool) -> None:
        if final.aggregate is None:
            return
        means = []
        for index, master in enumerate(self._masters.tensors):
            values = torch.from_numpy(final.aggregate.entries(index).values)
            means.append(values.view(master.shape).to(master.device))
        self._inner.round_index = final.round_index // self._settings.inner_steps
        self._masters.step_by(means)

    def _take(self, move: Restoration) -> None:
        for index, theta, inner_state in move.anchor.tensors():
            master = self._masters.tensors[index]
            if theta.size != master.numel():
                raise LocalProtocolError(f"a state of {theta.size} elements for {master.numel()}")
            slots = decode_slots(inner_state.view(np.uint8), master.numel())
            with torch.no_grad():
                master.copy_(torch.from_numpy(theta.copy()).view(master.shape))
            write_slots(self._inner.optimizer, master, slots)
        self._masters.write_parameters()

    def _compute_root(self, round_index: int) -> Digest:
        hashes = [
            (hash_tensor(self.theta(index)), hash_tensor(self.momentum(index)))
            for index in range(len(self._masters.tensors))
        ]
        return compute_state_root(self._masters.table, round_index=round_index, hashes=hashes)
