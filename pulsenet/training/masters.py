"""FP32 masters of the parameters an inner optimizer steps.

A BF16 or FP16 parameter gets an FP32 master that takes its place in the optimizer: without one its own rounding,
not training, would decide what passes the gate. An FP32 parameter is its own master.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from pulsenet.errors import ConfigError
from pulsenet.tensors.params import ParameterTable, TensorSpec, canonical_name, make_table
from pulsenet.training.inner import Hook, check_no_closure, hook_steps, undo_when_taken
from pulsenet.training.names import is_flat_sharded
from pulsenet.training.snapshot import cast_to_bf16

_NARROW: Final = (torch.bfloat16, torch.float16)

_NO_SHARDS: Final = (
    "which OuterOptimizer cannot gate: use DistributedDataParallel inside one trainer, or one trainer a device"
)

_MAKE_LATER: Final = " after OuterOptimizer was made: make OuterOptimizer once model and optimizer are complete"


@dataclass(frozen=True, slots=True, eq=False)
class _Narrow:
    """A model's parameter and the FP32 master that is stepped in its place."""

    parameter: torch.nn.Parameter
    master: torch.nn.Parameter


class Masters:
    """The FP32 tensors that an inner optimizer steps, in table order. Make one with :func:`adopt_masters`."""

    def __init__(
        self,
        table: ParameterTable,
        tensors: tuple[torch.nn.Parameter, ...],
        narrow: tuple[_Narrow, ...],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.table = table
        self.tensors = tensors
        """One per tensor of the table, FP32."""
        self._narrow = narrow
        self._optimizer = optimizer
        self.is_stepping = False
        """Whether the step in progress is :meth:`step_by`'s, not the user's."""
        if narrow:
            hook_steps(optimizer, before=self._take_gradients, after=self._write_parameters)
            self._replace_zero_grad(optimizer)
            undo_when_taken(optimizer, self._give_back)

    @property
    def separate(self) -> tuple[torch.nn.Parameter, ...]:
        """All, if any parameter has a master beside it, which a checkpoint of the model does not hold; else none."""
        return self.tensors if self._narrow else ()

    def check_model(self, model: torch.nn.Module) -> None:
        """Make sure that these are still what ``model`` computes with, and all that the optimizer steps.

        Raises:
            ConfigError: Parameters were added, or replaced by others, after they were adopted.
        """
        computed = {id(parameter) for parameter in model.parameters()}
        stepped = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        shown = {id(pair.master): pair.parameter for pair in self._narrow}
        for spec, tensor in zip(self.table.tensors, self.tensors, strict=True):
            if id(shown.get(id(tensor), tensor)) not in computed:
                raise ConfigError(f"parameter {spec.name} was replaced in the model{_MAKE_LATER}")
        if stepped != {id(tensor) for tensor in self.tensors}:
            raise ConfigError(f"the optimizer's parameters were changed{_MAKE_LATER}")

    def step_by(self, gradients: Sequence[torch.Tensor]) -> None:
        """Let the optimizer step by these gradients, and leave none behind.

        A parameter that needs no gradient gets none, so that weight decay does not move it either.

        Args:
            gradients: FP32, one per master, of its shape and on its device.
        """
        frozen = {id(pair.master) for pair in self._narrow if not pair.parameter.requires_grad}
        try:
            self.is_stepping = True
            for master, gradient in zip(self.tensors, gradients, strict=True):
                if master.requires_grad and id(master) not in frozen:
                    master.grad = gradient
            self._optimizer.step()
        finally:
            self.is_stepping = False
            for master in self.tensors:
                master.grad = None

    def write_parameters(self) -> None:
        """Cast every separate master into its parameter."""
        with torch.no_grad():
            for pair in self._narrow:
                if pair.parameter.dtype == torch.bfloat16:
                    pair.parameter.copy_(cast_to_bf16(pair.master.detach().contiguous()))
                else:
                    pair.parameter.copy_(pair.master)

    def _take_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_stepping:
            return
        check_no_closure(args, kwargs)
        for pair in self._narrow:
            gradient = pair.parameter.grad
            pair.master.grad = None if gradient is None else gradient.float()
            pair.parameter.grad = None

    def _write_parameters(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.write_parameters()

    def _replace_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Make ``optimizer.zero_grad`` clear the model's gradients too: the optimizer does not hold those any more."""
        clear: Callable[..., None] = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            clear(set_to_none)
            for pair in self._narrow:
                pair.parameter.grad = None

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        undo_when_taken(optimizer, lambda: vars(optimizer).update(zero_grad=clear))

    def _give_back(self) -> None:
        """Let the optimizer step the model's own parameters again."""
        shown = {id(pair.master): pair.parameter for pair in self._narrow}
        for group in self._optimizer.param_groups:
            group["params"][:] = [shown.get(id(parameter), parameter) for parameter in group["params"]]


def adopt_masters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, check_step: Hook | None = None
) -> Masters:
    """Find or make the FP32 master of every parameter that ``optimizer`` steps.

    Parameters of BF16 or FP16 are replaced in the optimizer's groups by FP32 masters, with hooks that hand gradients
    over before each step and cast the result back after it.

    Args:
        model: What the parameters are of.
        optimizer: Steps them.
        check_step: Called before each step, when no gradient has moved yet; may refuse it.

    Raises:
        ConfigError: parameters that are sharded, of another dtype, stepped but not in the model, or already stepped
            as BF16 or FP16; the message says what to do.
    """
    if is_flat_sharded(model):
        raise ConfigError(f"the model is sharded by FullyShardedDataParallel, {_NO_SHARDS}")
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    found: dict[str, tuple[dict[str, Any], int, torch.nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise ConfigError(
                    f"the optimizer steps a tensor of shape {tuple(parameter.shape)} that is no parameter of the "
                    "model: give OuterOptimizer the same module that the optimizer was made from"
                )
            _check_parameter(name, parameter)
            if name in found:
                raise ConfigError(f"two parameters are both called {name} once wrapper prefixes are stripped")
            found[name] = (group, position, parameter)
    if not found:
        raise ConfigError("the optimizer steps no parameters")
    narrow_names = [name for name, (_, _, parameter) in found.items() if parameter.dtype in _NARROW]
    if narrow_names and optimizer.state:
        raise ConfigError(
            f"{len(narrow_names)} parameters are BF16 or FP16 ({narrow_names[0]}, …) and the optimizer has stepped "
            "them already: make OuterOptimizer before the first optimizer.step(), or train FP32 parameters"
        )
    table = make_table(TensorSpec(name, "F32", tuple(parameter.shape)) for name, (_, _, parameter) in found.items())
    tensors, narrow = [], []
    for spec in table.tensors:
        group, position, parameter = found[spec.name]
        if parameter.dtype in _NARROW:
            master = torch.nn.Parameter(parameter.detach().float().contiguous())
            group["params"][position] = master
            narrow.append(_Narrow(parameter, master))
            tensors.append(master)
        else:
            tensors.append(parameter)
    if check_step is not None:
        hook_steps(optimizer, before=check_step)
    return Masters(table, tuple(tensors), tuple(narrow), optimizer)


def _check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    if hasattr(parameter, "full_tensor") or hasattr(parameter, "local_shards"):
        raise ConfigError(f"parameter {name} is sharded over ranks (FSDP2, tensor parallel), {_NO_SHARDS}")
    if parameter.device.type == "meta":
        raise ConfigError(f"parameter {name} is on the meta device and has no values: load the model first")
    if parameter.dtype not in (torch.float32, *_NARROW):
        raise ConfigError(
            f"parameter {name} is {parameter.dtype}: OuterOptimizer steps FP32 parameters, or FP32 masters of BF16 "
            "and FP16 ones"
        )
