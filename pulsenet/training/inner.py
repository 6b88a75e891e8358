"""What the rounds do to the inner optimizer: learning-rate factors, resets, and a look before each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from pulsenet.errors import ConfigError, LocalProtocolError

Schedule = Callable[[int], float]
"""Factor on the inner learning rate by round index."""

Hook = Callable[[torch.optim.Optimizer, Any, Any], None]

_UNDO: Final = "_pulsenet_undo"
"""Attribute of an optimizer: what takes away again all that a wrapper hung on it."""


class InnerOptimizer:
    """Watches one torch optimizer through its hooks.

    The learning rate is scaled only inside a step and restored after it, so that any scheduler of the user's own goes
    on working on the groups' ``lr``.

    Args:
        optimizer: Steps the masters.
        schedule: Factor on the learning rate by round index.
        warmup_steps: After a reset, so many steps rise linearly to the full learning rate.
        before_step: Called before each step, when the gradients of the masters are there.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None = None,
        warmup_steps: int = 0,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.optimizer = optimizer
        self._schedule = schedule
        self._warmup_steps = warmup_steps
        self._before_step = before_step
        self._original_rates: list[Any] | None = None
        self.round_index = 0
        """Given by the rounds; the schedule follows it."""
        self.warmup_left = 0
        """Steps of the warm-up still to come."""
        self.reset_count = 0
        hook_steps(optimizer, before=self._scale_rates, after=self._restore_rates)

    def reset(self) -> None:
        """Forget momenta and step counts, and warm up again: the masters jumped to values they do not belong to."""
        self.reset_count += 1
        self.optimizer.state.clear()
        self.warmup_left = self._warmup_steps

    def take_warmup(self, steps_left: int) -> None:
        """Go on with the warm-up of a checkpoint: from its first step, if this one is shorter than what was left."""
        self.warmup_left = min(steps_left, self._warmup_steps)

    def compute_factor(self) -> float:
        """Return the factor on the learning rate of the next step."""
        factor = 1.0 if self._schedule is None else float(self._schedule(self.round_index))
        if self.warmup_left:
            factor *= (self._warmup_steps - self.warmup_left + 1) / (self._warmup_steps + 1)
        return factor

    def _scale_rates(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._before_step()
        # A step that raised left the rates scaled.
        self._put_back()
        factor = self.compute_factor()
        if factor != 1.0:
            self._original_rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _restore_rates(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()
        if self.warmup_left:
            self.warmup_left -= 1

    def _put_back(self) -> None:
        if self._original_rates is not None:
            for group, rate in zip(self.optimizer.param_groups, self._original_rates, strict=True):
                group["lr"] = rate
            self._original_rates = None


def hook_steps(optimizer: torch.optim.Optimizer, *, before: Hook, after: Hook | None = None) -> None:
    """Have functions called around each step, until it is taken from here."""
    undo_when_taken(optimizer, optimizer.register_step_pre_hook(before).remove)
    if after is not None:
        undo_when_taken(optimizer, optimizer.register_step_post_hook(after).remove)


def undo_when_taken(optimizer: torch.optim.Optimizer, undo: Callable[[], None]) -> None:
    """Have a function called when the optimizer is taken from here."""
    vars(optimizer).setdefault(_UNDO, []).append(undo)


def take_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside wrappers such as Accelerate's, taken from whatever rounds had it before.

    As where a cell of a notebook is run again: both would scale its rates, take its gradients and refuse its steps.

    Raises:
        ConfigError: there is none.
    """
    inner = unwrap_optimizer(optimizer)
    for undo in reversed(vars(inner).pop(_UNDO, [])):
        undo()
    return inner


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside wrappers such as Accelerate's.

    Raises:
        ConfigError: there is none.
    """
    inner = optimizer
    for _ in range(4):
        if isinstance(inner, torch.optim.Optimizer) and not hasattr(inner, "optimizer"):
            return inner
        inner = getattr(inner, "optimizer", None)
    raise ConfigError(
        f"{type(optimizer).__name__} is no torch.optim.Optimizer: OuterOptimizer needs one whose step hooks it can use"
    )


def check_no_closure(args: Any, kwargs: Any) -> None:
    """Refuse ``optimizer.step(closure)`` where gradients are taken before the step.

    Args:
        args: Of the step, the optimizer itself first, as torch passes them to its hooks.
        kwargs: Likewise.

    Raises:
        LocalProtocolError: there is a closure.
    """
    if any(argument is not None for argument in (*args[1:], kwargs.get("closure"))):
        raise LocalProtocolError(
            "optimizer.step(closure) computes gradients inside the step, past what trains them together: call "
            "backward() before optimizer.step(). For BF16 or FP16 parameters, FP32 ones with autocast allow a closure"
        )


def check_no_pending(is_pending: bool) -> None:
    """Refuse an inner step while a contribution waits for its receipt: its residual would be lost.

    Raises:
        LocalProtocolError: one waits.
    """
    if is_pending:
        raise LocalProtocolError(
            "a contribution waits for its round's receipt: call sync.step() again before optimizer.step()"
        )
