"""What a checkpoint keeps of the rounds: plain dictionaries of tensors, numbers and strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch

from pulsenet.errors import ConfigError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.outer_state import OuterState

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Totals = TypeVar("Totals", bound=DataclassInstance)

Copies = Mapping[str, Sequence[torch.Tensor]]

FORMAT: Final = 1
NUMBERS: Final = ("round_index", "inner_step", "extra_inner_steps", "warmup_left", "is_unsettled")


@dataclass(slots=True)
class Counters:
    """Totals since the run began."""

    inner_steps: int = 0
    """Inner steps done."""
    counted: int = 0
    """Contributions listed by a final receipt."""
    missed: int = 0
    """Contributions that were absent or late, and folded back."""
    rejected: int = 0
    """Contributions whose content was refused."""
    deferred: int = 0
    """Tries to contribute while no round was open."""
    resyncs: int = 0
    """Times the residual was given up."""
    wasted_inner_steps: int = 0
    """Inner steps whose work was discarded."""


def pack_state(
    *,
    table: ParameterTable,
    state: OuterState | None,
    masters: Sequence[torch.Tensor],
    pending: Contribution | None,
    numbers: Mapping[str, int],
    counters: Counters,
) -> dict[str, Any]:
    """Return the state dict of an outer optimizer; tensors are shared with it.

    Args:
        table: FP32 masters.
        state: Theta, residual and momentum; ``None`` where there are none.
        masters: FP32 masters that no checkpoint of the model holds; empty if there are none.
        pending: The contribution that waits for its receipt.
        numbers: ``NUMBERS`` by name.
        counters: Totals.
    """
    copies = {} if state is None else {"theta": state.theta, "residual": state.residual, "momentum": state.momentum}
    waits = None if pending is None else _pack_contribution(pending, table)
    return pack_copies(table, {**copies, "masters": masters}, numbers, counters) | {"pending": waits}


def unpack_state(
    saved: Mapping[str, Any], *, table: ParameterTable, state: OuterState | None, masters: Sequence[torch.Tensor]
) -> tuple[dict[str, int], Contribution | None, Counters]:
    """Write a saved state into ``state`` and ``masters``; return the numbers, pending contribution and totals.

    Raises:
        ConfigError: it is of other masters or another format; nothing was written.
    """
    copies = {} if state is None else {"theta": state.theta, "residual": state.residual, "momentum": state.momentum}
    unpack_copies(saved, table, {**copies, "masters": masters}, needs=("pending",))
    pending = None if saved["pending"] is None else _unpack_contribution(saved["pending"], table)
    return read_numbers(saved, NUMBERS), pending, read_counters(saved, Counters)


def pack_copies(
    table: ParameterTable, copies: Copies, numbers: Mapping[str, int], counters: DataclassInstance
) -> dict[str, Any]:
    """Return what a checkpoint keeps of a trainer; tensors are shared with it.

    Args:
        table: FP32 masters.
        copies: Tensors by kind, in table order; none of a kind that is not there.
        numbers: Where the trainer is.
        counters: Totals.
    """
    return {
        "format": FORMAT,
        "table_digest": table.digest.hex(),
        "numbers": dict(numbers),
        "counters": asdict(counters),
        **{
            kind: {spec.name: tensor.detach() for spec, tensor in zip(table.tensors, tensors, strict=False)}
            for kind, tensors in copies.items()
        },
    }


def unpack_copies(
    saved: Mapping[str, Any], table: ParameterTable, copies: Copies, *, needs: tuple[str, ...] = ()
) -> None:
    """Write the tensors that :func:`pack_copies` returned into ``copies``.

    Raises:
        ConfigError: they are of other masters or another format, or something of ``needs`` is missing; nothing was
            written.
    """
    if saved.get("format") != FORMAT:
        raise ConfigError(f"the saved outer state has format {saved.get('format')}, this version reads {FORMAT}")
    lost = [name for name in ("table_digest", "numbers", "counters", *needs) if name not in saved]
    if lost:
        raise ConfigError(f"the saved outer state lacks {', '.join(lost)}: it is damaged, take an older checkpoint")
    if saved["table_digest"] != table.digest.hex():
        raise ConfigError("the saved outer state is of other masters: names, shapes or frozen parameters differ")
    for kind, tensors in copies.items():
        held = saved.get(kind, {})
        if tensors and set(held) != {spec.name for spec in table.tensors}:
            raise ConfigError(f"the saved outer state holds no {kind}: it was saved on another rank or algorithm")
        for spec, tensor in zip(table.tensors, tensors, strict=False):
            if held[spec.name].numel() != tensor.numel():
                raise ConfigError(f"the saved {kind} of {spec.name} has another size: take an older checkpoint")
    for kind, tensors in copies.items():
        for spec, tensor in zip(table.tensors, tensors, strict=False):
            tensor.detach().copy_(saved[kind][spec.name].view(tensor.shape))


def read_numbers(saved: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Return where the trainer was; what an older version did not save is 0."""
    return {name: int(saved["numbers"].get(name, 0)) for name in names}


def read_counters(saved: Mapping[str, Any], kind: type[Totals]) -> Totals:
    """Return the totals that this version knows too."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in saved["counters"].items() if name in known})


def _pack_contribution(contribution: Contribution, table: ParameterTable) -> dict[str, Any]:
    indices, values = {}, {}
    for spec, entries in zip(table.tensors, contribution.entries, strict=True):
        values[spec.name] = torch.from_numpy(entries.values)
        if entries.indices is not None:
            # As signed integers of the same width: more of torch and of file formats knows them.
            signed = np.dtype(f"i{entries.indices.dtype.itemsize}")
            indices[spec.name] = torch.from_numpy(entries.indices.view(signed))
    return {
        "round_index": contribution.round_index,
        "state_root": contribution.state_root.hex(),
        "inner_step_count": contribution.inner_step_count,
        "indices": indices,
        "values": values,
    }


def _unpack_contribution(saved: Mapping[str, Any], table: ParameterTable) -> Contribution:
    found = []
    for tensor_index, spec in enumerate(table.tensors):
        signed = saved["indices"].get(spec.name)
        indices = None if signed is None else signed.cpu().numpy().view(spec.index_dtype)
        found.append(Entries(tensor_index, indices, saved["values"][spec.name].cpu().numpy()))
    return Contribution(
        round_index=int(saved["round_index"]),
        state_root=Digest(bytes.fromhex(saved["state_root"])),
        inner_step_count=int(saved["inner_step_count"]),
        entries=tuple(found),
    )
