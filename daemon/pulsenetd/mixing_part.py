"""A node's part in a run that mixes: the machines, and what they need of the shell. As :mod:`pulsenetd.rounds_part`.

One whose key is an authority votes, and in its term says who mixes; a trainer mixes. Nothing is ever final.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Final

from pulsenet.chain.rosters import Rosters
from pulsenet.chain.trust import Trust
from pulsenet.codec.patch import RunBlocks
from pulsenet.errors import StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.local import mixing_protocol as local
from pulsenet.local.rounds_protocol import RoundSettingsReply
from pulsenet.node.candidacy import BALLOT_KEY
from pulsenet.node.effects import Effect
from pulsenet.node.events import Event
from pulsenet.node.listener import Listener
from pulsenet.node.machine import Machine
from pulsenet.node.mixing.convener import Convener
from pulsenet.node.mixing.events import MastersTold
from pulsenet.node.mixing.journal import MIXING_KEY
from pulsenet.node.mixing.machine import Mixing
from pulsenet.node.mixing.respond import MIXING_REQUESTS, MixingRequest, respond_to_mixing
from pulsenet.node.mixing.respond import event_of as mixing_event_of
from pulsenet.node.rounds_respond import event_of, respond_to_round
from pulsenet.node.verdicts import RoundPush
from pulsenet.outer.floats import fp32_from_bits
from pulsenet.outer.mixing.bound import bound_measured
from pulsenet.outer.mixing.settings import MixingKind, MixingSettings
from pulsenet.outer.mixing.subset import measure_share
from pulsenet.outer.plan import Variant, Workload, predict_utilization
from pulsenet.outer.plan_link import Link
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.messages import GetAggregates, GetRounds, Message, Refusal
from pulsenetd.driver import Driver, Handler
from pulsenetd.handlers.means import MixingMeans
from pulsenetd.handlers.mixing import MixingDesk
from pulsenetd.identity import Identity
from pulsenetd.local_mixing import MixingHook
from pulsenetd.logs import logger
from pulsenetd.masters import check_masters
from pulsenetd.metrics import Metrics
from pulsenetd.rounds_part import BUSY_RETRY_MS, PUSHES_WAITING_MAX, restore_ledger, shape_of
from pulsenetd.storage.lookup import StoreLookup
from pulsenetd.storage.round_blobs import RoundBlobs
from pulsenetd.storage.store import Store

BUSY: Final = Refusal("busy", "others are being heard", retry_after_ms=BUSY_RETRY_MS)

ROUNDS_REMEMBERED: Final = 16
"""Rounds that the shown utilisation is the mean of."""


class MixingPart:
    """Built before the role, from what the store holds; blocks on the disk.

    Args:
        trust: The run's rules; its descriptor is known, and its algorithm is ``gossip``.
        identity: This node's key.
        role: The node's.
        threads: Where blobs are read and written, and means are made.
        run_blocks: An executor's ``map`` for the blocks of a mean.
        note: Takes fields for status and metrics that no machine reports.
        find_link: Returns this node's link, to predict with, as far as it is known.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        trust: Trust,
        identity: Identity,
        *,
        role: str,
        metrics: Metrics,
        threads: Executor,
        note: Callable[..., None],
        find_link: Callable[[], Link | None] = lambda: None,
        run_blocks: RunBlocks = map,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        assert trust.descriptor is not None
        self._store = store
        self._trust = trust
        self._peer_id = identity.peer_id
        self._metrics = metrics
        self._threads = threads
        self._note = note
        self._find_link = find_link
        self._monotonic = monotonic
        self._driver: Driver | None = None
        self._waiting_count = 0
        self._left: set[Digest] = set()
        """Blobs of training processes that are gone."""
        self.shape = shape_of(trust.descriptor, self._peer_id)
        self.settings = MixingSettings.from_constants(trust.descriptor.algorithm, trust.descriptor.constants)
        self.ledger, _ = restore_ledger(store, trust)
        self.rosters = Rosters(trust, self.ledger)
        self.coordinator: Convener | None = None
        """``None`` unless this node's key is an authority."""
        self.mixing: Mixing | None = None
        """``None`` unless this node is a trainer."""
        self.machines: dict[str, Machine] = {}
        self._times: deque[tuple[float, float]] = deque(maxlen=ROUNDS_REMEMBERED)
        self._desk = MixingDesk(
            post=lambda event: self._require_driver().post_to("mixing", event),
            is_leading=lambda: self.coordinator is not None and self.coordinator.is_leading(self._monotonic()),
        )
        self._means = MixingMeans(
            store,
            self.settings,
            self._peer_id,
            lambda: self._desk.masters,
            threads=threads,
            run_blocks=run_blocks,
        )
        self._build(identity, role)
        note(mixing_variant=str(self.settings.variant), consensus=self.settings.variant.has_consensus)

    def _build(self, identity: Identity, role: str) -> None:
        assert self._trust.descriptor is not None
        index = StoreLookup(self._store)
        common = (self._trust, self.ledger, self.rosters, self.settings, self._peer_id, identity.sign)
        if role == "trainer":
            try:
                self.mixing = Mixing(*common, secrets.randbelow, index, journal=self._store.state(MIXING_KEY))
            except StorageError as error:
                logger.warning("%s: what was agreed to before is forgotten", error)
                self.mixing = Mixing(*common, secrets.randbelow, index)
            self.machines["mixing"] = self.mixing
        if self._peer_id in self._trust.descriptor.authorities:
            try:
                self.coordinator = Convener(*common, secrets.randbelow, ballot=self._store.state(BALLOT_KEY))
            except StorageError as error:
                logger.error("%s: this key must not vote; let the owner promote another one", error)
            else:
                self.machines["coordinator"] = self.coordinator
                if role == "trainer":
                    self.machines["listener"] = Listener(self._trust, self._peer_id, secrets.randbelow, index)

    # Into the node

    def bind(self, driver: Driver) -> None:
        """Learn how to reach the machines."""
        self._driver = driver

    def _require_driver(self) -> Driver:
        assert self._driver is not None
        return self._driver

    @property
    def handlers(self) -> Mapping[type[Effect], Handler]:
        """How the effects of these machines are executed, beside those that every machine has."""
        return {**self._desk.table(), **self._means.table()}

    def hook(self, take_up: Callable[[], Awaitable[bool]]) -> MixingHook:
        """Return what local processes may ask.

        Args:
            take_up: Of no use here: the run has an algorithm.
        """

        async def settings() -> RoundSettingsReply:
            descriptor = self._trust.descriptor
            assert descriptor is not None
            return RoundSettingsReply(descriptor.algorithm, descriptor.constants, self._peer_id)

        return MixingHook(
            desk=self._desk,
            settings=settings,
            check_masters=self._check_masters,
            make_blobs=lambda: RoundBlobs(self._store, self._left),
            on_round=self._take_round,
            threads=self._threads,
            metrics=self._metrics,
        )

    async def _check_masters(self, table: ParameterTable, self_test: Digest) -> None:
        if self.shape != shape_of(self._trust.descriptor, self._peer_id):
            # The process finds the machines that are meant for it when it comes back.
            raise UnavailableError("the machines of this node are about to be built anew")
        has_rounds = self.mixing is not None and self.mixing.round_index is not None
        await check_masters(
            self._store,
            self._trust,
            self._peer_id,
            table,
            self_test,
            has_rounds=has_rounds,
            metrics=self._metrics,
        )
        if self.coordinator is not None:
            # Only a coordinator's word on the subset of Mix2 counts.
            self._require_driver().post_to("coordinator", MastersTold(table))

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

    # What peers ask

    async def answer(self, peer_id: PeerId, request: RoundPush | GetRounds | GetAggregates | MixingRequest) -> Message:
        """Answer a peer's request about mixing: what it says is shown to the machines first."""
        if isinstance(request, GetRounds | GetAggregates):
            return respond_to_round(request, self.ledger, None)
        if isinstance(request, MIXING_REQUESTS):
            event = mixing_event_of(request, peer_id)
            if event is not None and not await self._show(event):
                return BUSY
            both = (self.mixing, self.coordinator)
            return respond_to_mixing(request, peer_id, self.ledger, self.rosters, *both)
        if not await self._show(event_of(request, peer_id)):
            return BUSY
        find_verdict = None if self.coordinator is None else self.coordinator.verdicts.find
        return respond_to_round(request, self.ledger, find_verdict)

    async def _show(self, event: Event) -> bool:
        """Show the machines what a peer said; ``False`` if too many wait to be heard."""
        if self._waiting_count >= PUSHES_WAITING_MAX:
            return False
        self._waiting_count += 1
        try:
            await self._require_driver().show(event)
        finally:
            self._waiting_count -= 1
        return True


def _as_real(bits: int | None) -> float | None:
    return None if bits is None else float(fp32_from_bits(bits))
