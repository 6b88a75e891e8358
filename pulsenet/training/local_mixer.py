"""Mixing between trainers in one process: for tests, notebooks and baselines on one machine.

::

    mixing = LocalMixing(MixingSettings(inner_steps=8), member_count=4)
    # in one thread a trainer:
    sync = GossipOptimizer(model, optimizer, mixer=mixing.member(0))

Who mixes with whom, and what a mean is, is what a run on several machines computes. Exchanges fail where a test says.
Here alone trainers wait for each other in every job, so that a run can be repeated bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
import torch

from pulsenet.errors import ConfigError
from pulsenet.ids import Digest, PeerId
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.mixing.mean import add_debt, compute_debt, mean_entries
from pulsenet.outer.mixing.pairing import match_members
from pulsenet.outer.mixing.probe import Answer, Comparison, compare_answers
from pulsenet.outer.mixing.settings import Job, MixingKind, MixingSettings
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.local_run import LocalRun
from pulsenet.training.mixer import Adoption, Mixed, MixingReport, RoundPlan, Start

JOB_SECONDS_MAX: Final = 600.0
"""How long a trainer waits for the others before it goes on without them."""

ROUNDS_HELD: Final = 2
"""Rounds whose vectors are kept: whoever is further behind mixes with nobody in them."""


class Fault(StrEnum):
    """What goes wrong with a member's part in one job."""

    NONE = "none"
    LOST = "lost"
    """Nothing of it arrives anywhere, and it hears of nobody: it goes on with its own values."""
    UNCONFIRMED = "unconfirmed"
    """Of the higher key of a pair, only the last message is lost: its partner applied the mean, and it makes up for it
    the next time it hands over a vector for the same job."""


@dataclass(slots=True)
class _JobRoom:
    """What was handed over for one job of one round."""

    parts: dict[int, list[list[FP32s]]] = field(default_factory=dict)
    """By member: vectors, tensor by tensor."""
    given_up: set[int] = field(default_factory=set)
    """Members that were not waited for."""


class LocalMixing(LocalRun):
    """All mixing of one process.

    Args:
        settings: Variant and constants for all members.
        member_count: Members, all live at first; member *i* has the key of 32 bytes *i*.
        seed: Of the matchings.
        subset: Tensors of Mix2, for the variant that mixes a subset; ``None`` for all.
        find_fault: Tells what goes wrong: ``(round_index, job, member)``.
        job_seconds: How long one member waits for the others.

    Raises:
        ConfigError: a gate, which only a mixer that sends something has.
    """

    def __init__(
        self,
        settings: MixingSettings,
        member_count: int,
        *,
        seed: bytes = b"local",
        subset: Sequence[int] | None = None,
        find_fault: Callable[[int, Job, int], Fault] = lambda round_index, job, member: Fault.NONE,
        job_seconds: float = JOB_SECONDS_MAX,
    ) -> None:
        super().__init__(member_count)
        if settings.mixing_gate:
            raise ConfigError("mixing_gate within one process: nothing is sent that a gate could make smaller")
        self.settings = settings
        self.subset = None if subset is None or not settings.variant.mixes_subset else tuple(subset)
        self.reports: dict[int, list[MixingReport]] = {}
        """What each member's rounds did."""
        self.answers: dict[int, dict[int, Answer]] = {}
        """Answers to the probe, by round and member."""
        self._seed = seed
        self._find_fault = find_fault
        self._job_seconds = job_seconds
        self._rooms: dict[tuple[int, Job], _JobRoom] = {}
        self._members_of: dict[int, tuple[int, ...]] = {}
        """By round, who was live when it was opened."""
        self._newest_round_index = 0
        self._common: tuple[int, tuple[FP32s, ...], bool] | None = None
        """Round, values of the newest Mix1, and whether all of its members hold them."""
        self._debts: dict[tuple[int, Job], list[list[Entries]]] = {}

    def member(self, index: int) -> LocalMixer:
        """Return one trainer's end."""
        return LocalMixer(self, index)

    def leave(self, index: int) -> None:
        """Take a member out: nobody waits for it any more."""
        with self._changed:
            self._live.discard(index)
            self._changed.notify_all()

    def locate(self, held_round_index: int | None) -> Start:
        """Return where a member begins: one that is new, or further behind than a roster lasts, takes a mean over."""
        with self._changed:
            newest = self._newest_round_index
            is_behind = held_round_index is None or held_round_index + self.settings.roster_rounds < newest
            if self._common is None or not is_behind:
                return Start(max(newest, held_round_index or 0))
            _, values, is_consensus = self._common
            return Start(newest, Adoption(values, is_consensus))

    def begin_round(self, round_index: int) -> RoundPlan:
        """Open a round, the newest one for a member that is behind."""
        with self._changed:
            newest = self._newest_round_index = max(self._newest_round_index, round_index)
            if newest not in self._members_of:
                self._members_of[newest] = tuple(sorted(self._live))
                for held in [one for one in self._rooms if one[0] <= newest - ROUNDS_HELD]:
                    del self._rooms[held]
                for old in [one for one in self._members_of if one <= newest - ROUNDS_HELD]:
                    del self._members_of[old]
            self._changed.notify_all()
            interval = self.settings.probe_interval
            is_probed = bool(interval) and newest % interval == 0 and len(self._members_of[newest]) > 1
            return RoundPlan(newest, self.subset, is_probed=is_probed)

    def start(self, member: int, round_index: int, job: Job, sections: Sequence[Iterable[Entries]]) -> None:
        """Take a copy of what a member hands over, with what it has to make up for."""
        held = [[entries.values.copy() for entries in section] for section in sections]
        with self._changed:
            for values, debts in zip(held, self._debts.pop((member, job), []), strict=False):
                for one, debt in zip(values, debts, strict=True):
                    add_debt(one, debt)
            self._rooms.setdefault((round_index, job), _JobRoom()).parts[member] = held
            self._changed.notify_all()

    def result(self, member: int, round_index: int, job: Job) -> Mixed:
        """Wait for everybody, and return the mean of those of a member's group who are there."""
        with self._changed:
            room = self._rooms.get((round_index, job))
            if room is None:
                return Mixed(None, 1, "late")
            group = self._group(member, round_index, job)
            awaited = set(self._members_of.get(round_index, ()))
            own = room.parts[member]

            def is_settled() -> bool:
                return all(one in room.parts or one not in self._live for one in awaited)

            # Whoever was given up once stays so: the members of a group take the mean of the same parts.
            if not self._changed.wait_for(is_settled, self._job_seconds):
                room.given_up |= {one for one in awaited if one not in room.parts}
            is_cut_off = self._fault(round_index, job, member) is Fault.LOST
            there = {member} if is_cut_off else {member, *self._arrived(round_index, job, room, group)}
            if len(there) == 1:
                return Mixed(_freeze(own), 1, "" if len(group) == 1 else "lost", is_common=len(awaited) == 1)
            mean = self._mean({one: room.parts[one] for one in there})
            reason = "" if len(there) == len(group) else "lost"
            if self._fault(round_index, job, member) is Fault.UNCONFIRMED and member == max(group) and len(group) == 2:
                self._debts[member, job] = [
                    [_debt(one, held, index) for index, (one, held) in enumerate(zip(*pair, strict=True))]
                    for pair in zip(mean, own, strict=True)
                ]
                return Mixed(_freeze(own), 1, "unconfirmed")
            is_common = self.settings.variant.kind(job) is MixingKind.GLOBAL
            if job is Job.MIX1 and (self._common is None or self._common[0] <= round_index):
                self._common = (round_index, tuple(mean[0]), is_common)
            return Mixed(_freeze(mean), len(there), reason, is_common=is_common)

    def take_probe(self, round_index: int, member: int, answer: Answer) -> None:
        """Keep what a member predicts."""
        with self._changed:
            self.answers.setdefault(round_index, {})[member] = answer

    def compare(self, round_index: int) -> Comparison:
        """Return how far apart the members' answers of a round are."""
        with self._changed:
            told = self.answers.get(round_index, {})
            return compare_answers([told[member] for member in sorted(told)], round_index)

    def note(self, member: int, report: MixingReport) -> None:
        """Keep what a round did."""
        with self._changed:
            self.reports.setdefault(member, []).append(report)

    def _fault(self, round_index: int, job: Job, member: int) -> Fault:
        return self._find_fault(round_index, job, member)

    def _arrived(self, round_index: int, job: Job, room: _JobRoom, group: Iterable[int]) -> Iterator[int]:
        """Yield the members of a group whose parts reached the others."""
        for one in group:
            is_there = one in room.parts and one not in room.given_up
            if is_there and self._fault(round_index, job, one) is not Fault.LOST:
                yield one

    def _group(self, member: int, round_index: int, job: Job) -> tuple[int, ...]:
        """Return with whom a member mixes, itself among them."""
        members = self._members_of.get(round_index, ())
        if member not in members:
            return (member,)
        if self.settings.variant.kind(job) is MixingKind.GLOBAL:
            return members
        by_key = {_key(one): one for one in members}
        for group in match_members(self._seed, round_index, job, by_key):
            if _key(member) in group:
                return tuple(by_key[key] for key in group)
        raise AssertionError("a matching names every member")

    @staticmethod
    def _mean(parts: dict[int, list[list[FP32s]]]) -> list[list[FP32s]]:
        first = next(iter(parts.values()))
        return [
            [
                mean_entries(
                    {_key(one): Entries(index, None, held[vector][index]) for one, held in parts.items()},
                    tensor_index=index,
                    element_count=values.size,
                ).values
                for index, values in enumerate(section)
            ]
            for vector, section in enumerate(first)
        ]


class LocalMixer:
    """One trainer's end of :class:`LocalMixing`."""

    def __init__(self, mixing: LocalMixing, index: int) -> None:
        self._mixing = mixing
        self._index = index
        self._round_index = 0
        self.versions: list[tuple[int, bool, dict[str, torch.Tensor]]] = []
        """What was published: rounds, whether all members hold it, and the weights."""
        self.publishes = False
        """See :class:`pulsenet.training.Mixer`, as below."""

    @property
    def settings(self) -> MixingSettings:
        """Return the run's variant and constants."""
        return self._mixing.settings

    def open(self, table: ParameterTable, self_test: Digest) -> None:
        """Take part with these masters."""
        self._mixing.take_table(table, self_test)

    def locate(self, held_round_index: int | None) -> Start:
        """Say where the others are."""
        return self._mixing.locate(held_round_index)

    def begin_round(self, round_index: int, iterate: Callable[[], Iterable[Entries]] = tuple) -> RoundPlan:
        """Open a round."""
        plan = self._mixing.begin_round(round_index)
        self._round_index = plan.round_index
        return plan

    def start(self, job: Job, sections: Sequence[Iterable[Entries]], *, mixed_root: Digest | None = None) -> None:
        """Hand vectors over; they are copied before this returns."""
        self._mixing.start(self._index, self._round_index, job, sections)

    def result(self, job: Job) -> Mixed:
        """Wait for the others of the job."""
        return self._mixing.result(self._index, self._round_index, job)

    def abandon(self) -> None:
        """Do nothing: what was handed over is a copy."""

    def tell(self, report: MixingReport) -> None:
        """Keep what a round did, for the test."""
        self._mixing.note(self._index, report)

    def tell_probe(self, round_index: int, answer: Answer, scores: bytes) -> None:
        """Keep what this trainer predicts; the subset of one process never changes, so scores are not looked at."""
        self._mixing.take_probe(round_index, self._index, answer)

    def publish(self, model: torch.nn.Module, round_index: int, *, is_consensus: bool) -> None:
        """Keep a copy of the weights."""
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.versions.append((round_index, is_consensus, weights))

    def close(self) -> None:
        """Leave the others."""
        self._mixing.leave(self._index)


def _key(member: int) -> PeerId:
    return PeerId(bytes([member]) * 32)


def _debt(mean: FP32s, own: FP32s, index: int) -> Entries:
    return compute_debt(Entries(index, None, mean), Entries(index, None, own), element_count=own.size)


def _freeze(held: list[list[FP32s]]) -> tuple[tuple[FP32s, ...], ...]:
    """Return what a member may read; others may read it as well."""
    for section in held:
        for values in section:
            values.flags.writeable = False
    return tuple(tuple(np.asarray(values) for values in section) for section in held)
