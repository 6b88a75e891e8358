"""What a trainer of a gated run holds back, and what it moves from: only entries that would change a BF16 cast travel.

Each vector has a residual of its own, in host memory like everything here. What is sent counts as used whether or not
anybody heard it, so what is sent and what is held are together what moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.mixing.gating import gate_vector, move_common, take_whole
from pulsenet.outer.mixing.mean import spread
from pulsenet.tensors.params import ParameterTable

NO_BASE = "base"
"""Why a trainer without a common mean sends nothing that is relative to one."""


class GossipGate:
    """The residuals of both vectors, and the last mean that all members hold.

    Args:
        table: FP32 masters.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        self.iterate_residual: list[FP32s] = [np.zeros(spec.element_count, np.float32) for spec in table.tensors]
        self.gradient_residual: list[FP32s] = [np.zeros(spec.element_count, np.float32) for spec in table.tensors]
        self.common: list[FP32s] | None = None
        """The newest common mean of the outer iterates."""
        self._sent: tuple[int, list[Entries], bool] | None = None
        """Round, what of z was sent in it, and whether that is relative to the common mean."""

    def send_iterate(self, iterate: Iterable[Entries], *, round_index: int, is_relative: bool) -> Iterable[Entries]:
        """Settle what of z travels in a round, and return it, tensor by tensor.

        Asked again in the same round, as after a checkpoint was loaded, it is the same.

        Args:
            iterate: z, dense.
            round_index: Of the round.
            is_relative: Whether only what moved since the common mean travels; else all of it.

        Raises:
            LocalProtocolError: ``base``: there is no common mean to move from; while iterating.
        """
        if self._sent is not None and self._sent[0] == round_index:
            return self._sent[1]
        self._sent = None
        if is_relative and self.common is None:
            return _Nothing()
        sent = []
        for own, residual in zip(iterate, self.iterate_residual, strict=True):
            if not is_relative:
                sent.append(Entries(own.tensor_index, None, take_whole(own.values, residual)))
                continue
            assert self.common is not None
            start = self.common[own.tensor_index]
            sent.append(gate_vector(start, own.values, residual, tensor_index=own.tensor_index))
        self._sent = (round_index, sent, is_relative)
        return sent

    def take_iterate(self, mean: Sequence[FP32s] | None, *, is_common: bool) -> list[FP32s] | None:
        """Return x of the round: what the step is taken from. ``None`` if nothing of z was sent.

        Args:
            mean: What Mix1 gave; ``None`` if it gave nothing, not even the own values back.
            is_common: Whether all who took the mean hold it.
        """
        held, self._sent = self._sent, None
        if held is None:
            return None
        _, sent, is_relative = held
        if mean is None:
            mean = [spread(one, self._table.tensors[one.tensor_index].element_count) for one in sent]
        if is_relative:
            assert self.common is not None
            pairs = zip(self.common, mean, strict=True)
            mean = [move_common(common, Entries(index, None, moved)) for index, (common, moved) in enumerate(pairs)]
        if is_common:
            self.common = [values.copy() for values in mean]
        return list(mean)

    def send_gradient(self, tensor_index: int, iterate: FP32s, local: FP32s) -> Entries:
        """Return what of one tensor's pseudo-gradient travels; the rest is held back.

        Args:
            tensor_index: Of the tensor.
            iterate: z, flat.
            local: The master after the inner steps, flat.
        """
        return gate_vector(iterate, local, self.gradient_residual[tensor_index], tensor_index=tensor_index)

    def spread(self, sent: Entries) -> FP32s:
        """Return what was sent as every element of its tensor."""
        return spread(sent, self._table.tensors[sent.tensor_index].element_count)

    def forget_sent(self) -> None:
        """z was replaced by somebody else's: what was sent of it is not what will be."""
        self._sent = None

    def pack(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; arrays are shared."""
        copies = {"iterate_residual": self.iterate_residual, "gradient_residual": self.gradient_residual}
        if self.common is not None:
            copies["common"] = self.common
        packed: dict[str, Any] = {kind: self._name(arrays) for kind, arrays in copies.items()}
        if self._sent is not None:
            round_index, sent, is_relative = self._sent
            packed["sent"] = {
                "round_index": round_index,
                "is_relative": is_relative,
                "values": self._name([one.values for one in sent]),
                "indices": self._name([one.indices.astype(np.int64) for one in sent if one.indices is not None]),
            }
        return packed

    def unpack(self, saved: Mapping[str, Any]) -> None:
        """Take what :meth:`pack` returned; without it everything begins anew."""
        self._sent = None
        if "sent" in saved:
            sent = saved["sent"]
            self._sent = (int(sent["round_index"]), self._read_sent(sent), bool(sent["is_relative"]))
        self.iterate_residual = self._read(saved.get("iterate_residual"))
        self.gradient_residual = self._read(saved.get("gradient_residual"))
        self.common = None if "common" not in saved else self._read(saved["common"])

    def _name(self, arrays: Sequence[Any]) -> dict[str, torch.Tensor]:
        return {
            spec.name: torch.from_numpy(np.ascontiguousarray(one))
            for spec, one in zip(self._table.tensors, arrays, strict=False)
        }

    def _read_sent(self, sent: Mapping[str, Any]) -> list[Entries]:
        found = []
        for place, spec in enumerate(self._table.tensors):
            values = sent["values"][spec.name].cpu().numpy().copy()
            indices = sent["indices"].get(spec.name)
            listed = None if indices is None else indices.cpu().numpy().astype(spec.index_dtype)
            found.append(Entries(place, listed, values))
        return found

    def _read(self, named: Mapping[str, torch.Tensor] | None) -> list[FP32s]:
        if named is None:
            return [np.zeros(spec.element_count, np.float32) for spec in self._table.tensors]
        return [named[spec.name].cpu().numpy().reshape(-1).copy() for spec in self._table.tensors]


class _Nothing:
    """In place of a vector that there is not."""

    def __iter__(self) -> Iterator[Entries]:
        raise LocalProtocolError(NO_BASE)
