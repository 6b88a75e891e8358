"""All trainers of one gossip run in one process: the maths of pulsenet.outer.mixing, without daemons between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pulsenet.ids import PeerId, compute_digest
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.mixing.gating import gate_vector, move_common, take_whole
from pulsenet.outer.mixing.mean import mean_entries, spread
from pulsenet.outer.mixing.pairing import match_members
from pulsenet.outer.mixing.payload import JobTable, MixingHeader, encode_part, make_job_table
from pulsenet.outer.mixing.settings import Job, MixingKind, MixingSettings, Vector
from pulsenet.outer.mixing.step import compute_gradient, step_mixed
from pulsenet.tensors.params import ParameterTable

Tensors = list[FP32s]
"""Of one trainer, flat."""

FP32_SIZE_BYTES: Final = 4


@dataclass(slots=True)
class Payload:
    """What the first trainer handed over in a job, summed over rounds."""

    size_bytes: int = 0
    """Encoded as for the transport, once."""
    dense_size_bytes: int = 0
    """The same elements as FP32."""
    entry_count: int = 0
    gated_element_count: int = 0
    """Elements that the gate looked at."""
    gated_entry_count: int = 0
    """Of them, sent."""


@dataclass(slots=True)
class Member:
    """What one trainer holds."""

    iterate: Tensors
    momentum: Tensors
    held: dict[Vector, Tensors]
    """Residuals of the gate."""
    mixed: Tensors = field(default_factory=list)
    """The mean of the iterates (x), while a round is open."""


class GossipRounds:
    """The trainers of one run, round by round.

    Args:
        settings: Of the run.
        table: FP32 masters.
        start: Masters that all begin with, flat; copied.
        member_count: Trainers.
        seed: Of the matchings.
        subset: Tensors of Mix2, where the variant mixes some.
        measures_payload: Whether what the first trainer sends is encoded to see its size.
    """

    def __init__(
        self,
        settings: MixingSettings,
        table: ParameterTable,
        start: Sequence[FP32s],
        member_count: int,
        *,
        seed: int,
        subset: Sequence[int] | None = None,
        measures_payload: bool = False,
    ) -> None:
        self.settings = settings
        self.members = [
            Member(
                [values.copy() for values in start],
                [np.zeros_like(values) for values in start],
                {vector: [np.zeros_like(values) for values in start] for vector in (Vector.ITERATE, Vector.GRADIENT)},
            )
            for _ in range(member_count)
        ]
        self.payloads = {job: Payload() for job in Job}
        self.round_index = 0
        self._table = table
        self._seed = compute_digest(seed.to_bytes(8, "little"))
        self._keys = [PeerId(compute_digest(b"trainer" + bytes([place]))) for place in range(member_count)]
        self._subset = subset
        self._measures_payload = measures_payload
        self._common = [values.copy() for values in start]
        self._constants = {
            "learning_rate": np.float32(settings.learning_rate),
            "momentum_factor": np.float32(settings.momentum_factor),
        }

    def open(self) -> None:
        """Do Mix1 of a round."""

        def take(member: Member, job_table: JobTable, vector: Vector, index: int, place: int) -> Entries:
            if vector is Vector.MOMENTUM:
                return Entries(place, None, member.momentum[index])
            held = member.held[Vector.ITERATE][index]
            if vector in job_table.gated:
                return gate_vector(self._common[index], member.iterate[index], held, tensor_index=place)
            own = member.iterate[index]
            return Entries(place, None, take_whole(own, held) if self.settings.mixing_gate else own)

        for member in self.members:
            member.mixed = [values.copy() for values in member.iterate]
        job_table = self._make_table(Job.MIX1)
        if job_table is None:
            return
        for member, means in zip(self.members, self._mix(job_table, take), strict=True):
            for place, mean in enumerate(means):
                vector, index = job_table.source(place)
                if vector is Vector.MOMENTUM:
                    member.momentum[index] = mean.values.copy()
                elif vector in job_table.gated:
                    member.mixed[index] = move_common(self._common[index], mean)
                else:
                    member.mixed[index] = mean.values.copy()
        if self.settings.variant.mix1 is MixingKind.GLOBAL:
            self._common = [values.copy() for values in self.members[0].mixed]

    def close(self, locals_: Sequence[Sequence[FP32s]]) -> None:
        """Do Mix2 and the outer step.

        Args:
            locals_: Masters of each trainer after the inner steps.
        """
        gradients = [
            [compute_gradient(start, now) for start, now in zip(member.iterate, own, strict=True)]
            for member, own in zip(self.members, locals_, strict=True)
        ]
        own_locals = {id(member): own for member, own in zip(self.members, locals_, strict=True)}
        own_gradients = {id(member): own for member, own in zip(self.members, gradients, strict=True)}

        def take(member: Member, job_table: JobTable, vector: Vector, index: int, place: int) -> Entries:
            if vector is Vector.MOMENTUM:
                return Entries(place, None, member.momentum[index])
            if vector in job_table.gated:
                held, now = member.held[Vector.GRADIENT][index], np.ascontiguousarray(own_locals[id(member)][index])
                return gate_vector(member.iterate[index], now, held, tensor_index=place)
            return Entries(place, None, own_gradients[id(member)][index])

        job_table = self._make_table(Job.MIX2)
        if job_table is not None:
            for member, own, means in zip(self.members, gradients, self._mix(job_table, take), strict=True):
                for place, mean in enumerate(means):
                    vector, index = job_table.source(place)
                    values = spread(mean, own[index].size).copy()
                    (member.momentum if vector is Vector.MOMENTUM else own)[index] = values
        for member, own in zip(self.members, gradients, strict=True):
            member.iterate = [
                step_mixed(mixed, momentum, gradient, **self._constants)
                for mixed, momentum, gradient in zip(member.mixed, member.momentum, own, strict=True)
            ]
        self.round_index += 1

    def publish(self) -> list[Tensors]:
        """Return what would be published: one model where trainers have a consensus, else everyone's own."""
        iterates = [member.iterate for member in self.members]
        if self.settings.variant.mix1 is MixingKind.GLOBAL:
            keys = self._keys
            return [
                [
                    mean_entries(
                        {key: Entries(0, None, own[index]) for key, own in zip(keys, iterates, strict=True)},
                        tensor_index=0,
                        element_count=values.size,
                    ).values
                    for index, values in enumerate(iterates[0])
                ]
            ]
        return iterates[:1] if self.settings.variant.has_consensus else iterates

    def _make_table(self, job: Job) -> JobTable | None:
        return make_job_table(self._table, self.settings, job, round_index=self.round_index, subset=self._subset)

    def _mix(
        self, job_table: JobTable, take: Callable[[Member, JobTable, Vector, int, int], Entries]
    ) -> list[list[Entries]]:
        """Return what each trainer gets, a mean for each tensor of the job."""
        parts = {
            key: [
                take(member, job_table, *job_table.source(place), place)
                for place in range(len(job_table.table.tensors))
            ]
            for key, member in zip(self._keys, self.members, strict=True)
        }
        self._measure(job_table, parts[self._keys[0]])
        groups = [tuple(self._keys)]
        if self.settings.variant.kind(job_table.job) is MixingKind.PAIR:
            groups = list(match_members(self._seed, self.round_index, job_table.job, self._keys))
        means = {}
        for group in groups:
            found = [
                mean_entries(
                    {key: parts[key][place] for key in group}, tensor_index=place, element_count=spec.element_count
                )
                for place, spec in enumerate(job_table.table.tensors)
            ]
            means.update(dict.fromkeys(group, found))
        return [means[key] for key in self._keys]

    def _measure(self, job_table: JobTable, part: Sequence[Entries]) -> None:
        payload = self.payloads[job_table.job]
        if not self._measures_payload:
            return
        header = MixingHeader(job_table.digest, job_table.job, self.round_index)
        payload.size_bytes += sum(len(piece) for piece in encode_part(job_table, part, header=header))
        payload.dense_size_bytes += FP32_SIZE_BYTES * job_table.table.element_count
        for place, entries in enumerate(part):
            payload.entry_count += len(entries)
            if not job_table.is_dense(place):
                payload.gated_element_count += job_table.table.tensors[place].element_count
                payload.gated_entry_count += len(entries)
