"""A node's part in a run that mixes: an authority says in its term who mixes, a trainer mixes; nothing is final."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from pulsenet.chain.rosters import Rosters
from pulsenet.errors import StorageError
from pulsenet.ids import PeerId
from pulsenet.local import mixing_protocol as local
from pulsenet.node.effects import Effect
from pulsenet.node.mixing.convener import Convener
from pulsenet.node.mixing.events import MastersTold
from pulsenet.node.mixing.journal import MIXING_KEY, Journal
from pulsenet.node.mixing.machine import Mixing
from pulsenet.node.mixing.respond import MIXING_REQUESTS, MixingRequest, event_of, respond_to_mixing
from pulsenet.node.verdicts import RoundPush
from pulsenet.outer.floats import fp32_from_bits
from pulsenet.outer.mixing.bound import bound_measured
from pulsenet.outer.mixing.settings import MixingKind, MixingSettings
from pulsenet.outer.mixing.subset import measure_share
from pulsenet.outer.plan import Variant, Workload, predict_utilization
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.messages import GetAggregates, GetRounds, Message
from pulsenetd.driver import Handler
from pulsenetd.handlers.means import MixingMeans
from pulsenetd.handlers.mixing import MixingDesk
from pulsenetd.local.mixing import MixingHook
from pulsenetd.logs import logger
from pulsenetd.outer.part import BUSY, OuterPart
from pulsenetd.storage.orphans import Needs

ROUNDS_REMEMBERED: Final = 16
"""Rounds that the shown utilisation is the mean of."""


class MixingPart(OuterPart):
    """The part of a node whose run's algorithm is ``gossip``."""

    name = "mixing"
    coordinator: Convener | None

    def _build(self) -> None:
        self.settings = MixingSettings.from_constants(self.descriptor.algorithm, self.descriptor.constants)
        self.rosters = Rosters(self._trust, self.ledger)
        self.mixing: Mixing | None = None
        """``None`` unless this node is a trainer."""
        self._times: deque[tuple[float, float]] = deque(maxlen=ROUNDS_REMEMBERED)
        self._desk = MixingDesk(
            post=self._post,
            is_leading=lambda: self.coordinator is not None and self.coordinator.is_leading(self._monotonic()),
        )
        self._means = MixingMeans(
            self._store,
            self.settings,
            self._peer_id,
            lambda: self._desk.masters,
            threads=self._threads,
            run_blocks=self._run_blocks,
        )
        machine = (self._seat, self.rosters, self.settings)
        if self._is_trainer:
            try:
                self.mixing = Mixing(*machine, self._store, journal=self._store.state(MIXING_KEY))
            except StorageError as error:
                logger.warning("%s: what was agreed to before is forgotten", error)
                self.mixing = Mixing(*machine, self._store)
            self.machines[self.name] = self.mixing
        self.coordinator = self._add_voter(lambda ballot: Convener(*machine, ballot=ballot))
        self._add_listener()
        self._note(mixing_variant=str(self.settings.variant), consensus=self.settings.variant.has_consensus)

    @property
    def handlers(self) -> Mapping[type[Effect], Handler]:
        """How the effects of these machines are executed, beside those that every machine has."""
        return {**self._desk.table(), **self._means.table()}

    @property
    def needs(self) -> Needs:
        """What the journal names; a node that trains nothing at present may have been a trainer before."""
        try:
            return Needs(blob_ids=Journal(self._store.state(MIXING_KEY)).blob_ids)
        except StorageError:
            return Needs()  # said aloud where the machine is built

    def hook(self, take_up: Callable[[], Awaitable[bool]]) -> MixingHook:
        """Return what local processes may ask; ``take_up`` as in :meth:`tell_settings`."""
        return MixingHook(
            desk=self._desk,
            settings=lambda: self.tell_settings(take_up),
            check_masters=self.check_masters,
            make_blobs=self.make_blobs,
            on_round=self._take_round,
            threads=self._threads,
            metrics=self._metrics,
        )

    def _has_rounds(self) -> bool:
        return self.mixing is not None and self.mixing.round_index is not None

    def _take_masters(self, table: ParameterTable) -> None:
        self._desk.masters = table
        if self.coordinator is not None:
            # Only a coordinator's word on the subset of Mix2 counts.
            self._post(MastersTold(table), "coordinator")

    def _take_round(self, told: local.TellRound) -> None:
        """Show what a round did, and how ``pulsenet plan`` would have it."""
        inner, blocked = (float(fp32_from_bits(bits)) for bits in (told.inner_seconds_bits, told.blocked_seconds_bits))
        self._times.append((inner, blocked))
        work_seconds = sum(one for one, _ in self._times)
        total = work_seconds + sum(one for _, one in self._times)
        self._note(
            utilization_ratio=work_seconds / total if total > 0.0 else 1.0,
            utilization_predicted_ratio=self._predict(work_seconds / len(self._times)),
            mix1_contributors=told.mix1_count,
            mix2_contributors=told.mix2_count,
            delta_norm=float(fp32_from_bits(told.delta_norm_bits)),
            mixing_distance=_as_real(told.distance_bits),
            **self._compare_weights(told),
        )
        if told.is_consensus is not None:
            self._note(consensus=told.is_consensus)

    def _compare_weights(self, told: local.TellRound) -> dict[str, float | None]:
        """Return how far apart two trainers are, Euclidean, and what theory bounds that by."""
        start, end, noise = map(_as_real, (told.start_square_bits, told.end_square_bits, told.noise_square_bits))
        known, masters = self.rosters.find(told.round_index), self._desk.masters
        bound = None
        if noise is not None and known is not None:
            settings = self.settings
            bound = bound_measured(
                settings.variant, len(known.members), noise, outer_learning_rate=settings.learning_rate
            )
        share = None
        if known is not None and masters is not None and self.settings.variant.mix2 is not MixingKind.NONE:
            share = measure_share(masters, known.roster.subset)
        return {
            "disagreement_l2_start": None if start is None else math.sqrt(start),
            "disagreement_l2_end": None if end is None else math.sqrt(end),
            "disagreement_l2_bound": None if bound is None else math.sqrt(bound),
            "mixing_subset_ratio": share,
        }

    def _predict(self, work_seconds: float) -> float | None:
        masters, newest, link = self._desk.masters, self.rosters.newest, self._find_link()
        if link is None or masters is None or not masters.element_count or work_seconds <= 0.0:
            return None
        members = 1 if newest is None else len(newest.members)
        workload = Workload(
            params=masters.element_count,
            peer_count=members,
            step_seconds=work_seconds / self.settings.inner_steps,
            inner_steps=self.settings.inner_steps,
            subset_ratio=measure_share(masters, () if newest is None else newest.roster.subset),
        )
        return predict_utilization(Variant(str(self.settings.variant)), workload, link)

    async def answer(self, peer_id: PeerId, request: RoundPush | GetRounds | GetAggregates | MixingRequest) -> Message:
        """Answer a peer's request about mixing."""
        if not isinstance(request, MIXING_REQUESTS):
            return await self._answer_round(peer_id, request)
        event = event_of(request, peer_id)
        if event is not None and not await self._show(event):
            return BUSY
        return respond_to_mixing(request, peer_id, self.ledger, self.rosters, self.mixing, self.coordinator)


def _as_real(bits: int | None) -> float | None:
    return None if bits is None else float(fp32_from_bits(bits))
