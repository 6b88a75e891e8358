"""What differs between a trainer, an inferencer and a seed: the machine, its handlers, the local hooks."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from pulsenet.chain.records import Catalogue, Head, Manifest
from pulsenet.chain.retention import RetentionLimits
from pulsenet.chain.signing import record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import StorageError
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.local.protocol import PublishDone, PublishStatus, RolloutsTaken, SignedBatch, SubmitRollouts
from pulsenet.node.effects import Effect
from pulsenet.node.events import Event
from pulsenet.node.inferencer import Inferencer
from pulsenet.node.machine import Machine
from pulsenet.node.mender import Mender
from pulsenet.node.mesh import BOOK_KEY, Mesh
from pulsenet.node.order import arrange
from pulsenet.node.published import STATE_KEY
from pulsenet.node.trainer import Trainer
from pulsenet.outer.mixing.settings import ALGORITHM as GOSSIP
from pulsenet.wire.messages import PeerAddress
from pulsenetd.config import Config
from pulsenetd.driver import Handler
from pulsenetd.engines.own import DiskEngine, VllmEngine
from pulsenetd.handlers.follower import FollowerHandlers
from pulsenetd.handlers.publisher import PublisherHandlers
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.identity import verify
from pulsenetd.local.server import EngineConfirmation, LocalHooks, SnapshotOffer
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.network import addresses
from pulsenetd.outer.mixing import MixingPart
from pulsenetd.outer.pace import Meters, find_link
from pulsenetd.outer.rounds import RoundsPart
from pulsenetd.rollouts import Rollouts
from pulsenetd.startup import Settled
from pulsenetd.storage.disk import free_size_bytes
from pulsenetd.storage.mirror import Mirror
from pulsenetd.storage.orphans import Needs, release_orphans
from pulsenetd.storage.publishing import Publisher
from pulsenetd.storage.staging import StagedUpdate
from pulsenetd.storage.store import Store

STORE_SHARE_DEFAULT = 0.2
"""Share of the free disk that blobs may take unless the operator says otherwise."""

FindStatus = Callable[[], Mapping[str, Any]]
TakeUp = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Parts:
    """What every role is built from, and outlasts it."""

    config: Config
    settled: Settled
    store: Store
    trust: Trust
    ledger: Ledger
    metrics: Metrics
    work_threads: ThreadPoolExecutor
    block_threads: ThreadPoolExecutor
    monotonic: Callable[[], float]


class Role(ABC):
    """One role of a node."""

    machine: Trainer | Inferencer
    """The role's core."""
    handlers: Mapping[type[Effect], Handler]
    """How the effects only this role has are executed."""
    helpers: Mapping[str, Machine] = MappingProxyType({})
    """Further machines, by name."""
    engine: DiskEngine | VllmEngine | None = None
    """The engine this node runs itself."""

    def __init__(self, mesh: Mesh, rounds: RoundsPart | MixingPart) -> None:
        self.mesh, self.rounds = mesh, rounds
        self._post: Callable[[Event], None] = _unbound

    def bind(self, post: Callable[[Event], None]) -> None:
        """Learn how to reach the role's machine."""
        self._post = post

    @property
    def machines(self) -> dict[str, Machine]:
        """All machines of the node, in the order in which they hear of events."""
        return arrange({"role": self.machine, "mesh": self.mesh, **self.helpers, **self.rounds.machines})

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What this role refers to in the store when it is built."""

    @abstractmethod
    def hooks(self, rollouts: Rollouts, status: FindStatus, take_up_rounds: TakeUp) -> LocalHooks:
        """Return what local processes may ask."""

    def start_engine(self) -> None:
        """Start the engine this node runs itself, if any; its local socket is served."""
        self.engine = self._make_engine()
        if self.engine is not None:
            self.engine.start()

    async def watch_engine(self) -> None:
        """Wait for an error that ends the engine's thread, and raise it; return where this node runs no engine."""
        if self.engine is not None:
            await asyncio.wrap_future(self.engine.failure)

    def _make_engine(self) -> DiskEngine | VllmEngine | None:
        return None

    def stop_engine(self) -> None:
        """Stop it. Blocks."""
        if self.engine is not None:
            self.engine.stop()

    @abstractmethod
    def close(self) -> None:
        """Let go of memory."""


async def build_role(parts: Parts, own_addresses: tuple[str, ...], meters: Meters) -> Role:
    """Build the machine of the configured role, with the state of its last run.

    Args:
        parts: What it is built from.
        own_addresses: Where others can dial this node.
        meters: Of this node's link.
    """
    config, trust = parts.config, parts.trust
    mesh = _build_mesh(parts, own_addresses)

    def build() -> Role:
        mixes = trust.descriptor is not None and trust.descriptor.algorithm == GOSSIP
        rounds = (MixingPart if mixes else RoundsPart)(
            parts.store,
            trust,
            parts.settled.identity,
            role=config.role,
            metrics=parts.metrics,
            threads=parts.work_threads,
            note=parts.ledger.note,
            find_link=partial(find_link, config.upload_limit, config.download_limit, meters),
            run_blocks=parts.block_threads.map,
            monotonic=parts.monotonic,
        )
        role = (TrainerRole if config.role == "trainer" else FollowerRole)(parts, mesh, rounds)
        release_orphans(parts.store, (_find_believed(trust), rounds.needs, role.needs), parts.monotonic())
        return role

    return await asyncio.get_running_loop().run_in_executor(parts.work_threads, build)


def _find_believed(trust: Trust) -> Needs:
    """Return the heads and catalogues of the newest version, and the proof of a fork."""
    proof = () if trust.fork is None else (trust.fork.first, trust.fork.second)
    records = [record for record in (trust.head_record, trust.catalogue_record, *proof) if record is not None]
    return Needs((Head, Catalogue), frozenset(map(record_digest, records)))


def _build_mesh(parts: Parts, own: tuple[str, ...]) -> Mesh:
    config, settled = parts.config, parts.settled
    bootstraps: dict[Any, list[str]] = {}
    for text in (*config.bootstrap, *settled.token.bootstraps):
        address, peer_id = addresses.split_address(text)
        bootstraps.setdefault(peer_id, []).append(address)
    make = partial(
        Mesh,
        parts.trust,
        settled.identity.peer_id,
        settled.identity.sign,
        secrets.randbelow,
        role=config.role,
        addresses=own,
        bootstraps=[PeerAddress(peer_id, tuple(known)) for peer_id, known in bootstraps.items()],
    )
    try:
        return make(saved=parts.store.state(BOOK_KEY))
    except StorageError as error:
        logger.warning("the remembered peers cannot be used (%s): starting from the bootstraps", error)
        return make(saved=None)


class TrainerRole(Role):
    """Publishes what the training process hands over, and queues rollouts for it."""

    def __init__(self, parts: Parts, mesh: Mesh, rounds: RoundsPart | MixingPart) -> None:
        super().__init__(mesh, rounds)
        self._publisher = Publisher(
            parts.store,
            parts.settled.data_directory / "spools",
            codec=parts.config.codec,
            cpu_seconds_max=parts.config.encode_cpu_seconds,
            run_blocks=parts.block_threads.map,
        )
        restored = self._publisher.restore()
        if restored is not None:
            logger.info("the committed version %s was rebuilt from the store", restored)
        self.machine: Trainer = Trainer(
            parts.trust,
            parts.settled.identity.peer_id,
            parts.settled.identity.sign,
            secrets.randbelow,
            verify=verify,
            state=parts.store.state(STATE_KEY),
            leadership=rounds.coordinator,
        )
        self.helpers = {
            "mender": Mender(
                parts.settled.identity.peer_id,
                secrets.randbelow,
                parts.store,
                find_state=lambda: self.machine.state,
                have_of=mesh.have_of,
                lacking=_find_lacking(parts.store),
            )
        }
        self._publishing = PublisherHandlers(
            self._publisher,
            parts.work_threads,
            lambda event: self._post(event),
            parts.ledger,
            parts.metrics,
            parts.monotonic,
            find_refusal=lambda snapshot: self.machine.find_refusal(snapshot, parts.monotonic()),
            takes_turns=bool(rounds.shape),
        )
        self.handlers = self._publishing.table()

    @property
    def needs(self) -> Needs:
        """What is committed here."""
        state = self.machine.state
        return Needs() if state is None else Needs((Manifest,), state.record_digests)

    def hooks(self, rollouts: Rollouts, status: FindStatus, take_up_rounds: TakeUp) -> LocalHooks:
        """Serve a training process; engines have nothing to ask here."""
        return LocalHooks(
            on_snapshot=self._publishing.offer,
            on_engine_request=_no_update,
            on_confirm=_ignore_confirmation,
            on_rollouts=_refuse_rollouts,
            on_take_rollouts=rollouts.inbox.give,
            on_rollouts_settled=rollouts.inbox.settle,
            on_checks=rollouts.inbox.note_checks,
            on_status=_threaded(status),
            tasks=rollouts.tasks,
            rounds=self.rounds.hook(take_up_rounds),
        )

    def close(self) -> None:
        """Let go of the baseline."""
        self._publisher.close()


class FollowerRole(Role):
    """Keeps a mirror and engines current, or as a seed stores and serves blobs."""

    def __init__(self, parts: Parts, mesh: Mesh, rounds: RoundsPart | MixingPart) -> None:
        super().__init__(mesh, rounds)
        config = parts.config
        self._parts = parts
        self._mirror = Mirror(parts.store, parts.settled.data_directory / "spools", run_blocks=parts.block_threads.map)
        if config.role == "inferencer":
            self._mirror.restore()
        held = self._mirror.held
        if held is not None:
            logger.info("version %s was rebuilt from the store", held.version)
        stored = parts.store.whole_manifests()
        catalogue = parts.trust.catalogue
        offered = () if catalogue is None else catalogue.entries
        self._needed = frozenset(stored) | {entry.manifest_digest for entry in offered}
        self.machine: Inferencer = Inferencer(
            parts.trust,
            parts.settled.identity.peer_id,
            secrets.randbelow,
            parts.store,
            role=config.role,
            held=None if held is None else (held.version, held.root),
            stored=stored,
            retention_limits=RetentionLimits(size_bytes_max=_choose_store_limit(config, parts.store)),
            have_of=mesh.have_of,
        )
        self._following = FollowerHandlers(
            self._mirror,
            parts.work_threads,
            lambda event: self._post(event),
            parts.ledger,
            parts.metrics,
            parts.monotonic,
        )
        self.handlers = self._following.table()

    @property
    def needs(self) -> Needs:
        """What is whole here, and what was being fetched and is still offered."""
        return Needs((Manifest,), self._needed)

    def hooks(self, rollouts: Rollouts, status: FindStatus, take_up_rounds: TakeUp) -> LocalHooks:
        """Serve engines, and take their rollouts; a training process is told that this node may not publish."""
        return LocalHooks(
            on_snapshot=_refuse_snapshot,
            on_engine_request=self._following.serve_engine,
            on_confirm=self._following.confirm,
            on_rollouts=rollouts.outbox.take,
            on_take_rollouts=_no_rollouts,
            on_rollouts_settled=_ignore_settled,
            on_checks=_ignore_checks,
            on_status=_threaded(status),
            tasks=rollouts.tasks,
        )

    def _make_engine(self) -> DiskEngine | VllmEngine | None:
        parts, directory = self._parts, self._parts.settled.data_directory
        if parts.config.role == "inferencer" and parts.config.engine == "vllm":
            return VllmEngine(parts.config, directory, parts.ledger, parts.metrics, on_lost=self._following.lose_engine)
        if parts.config.role == "inferencer" and parts.config.engine in ("files", "sglang"):
            return DiskEngine(parts.config, directory)
        return None

    def close(self) -> None:
        """Let go of the mirror."""
        self._mirror.close()


def _find_lacking(store: Store) -> list[Digest]:
    """Return the blobs that a stored manifest names and that are not whole."""
    return [manifest.blob_id for _, manifest in store.manifests() if not store.is_complete(manifest.blob_id)]


def _choose_store_limit(config: Config, store: Store) -> int:
    if config.store_limit_bytes:
        return config.store_limit_bytes
    return int(STORE_SHARE_DEFAULT * (free_size_bytes(store.directory) + store.usage().chunk_size_bytes))


def _unbound(event: Event) -> None:
    raise AssertionError("the role was not bound to its machine")


def _threaded(status: FindStatus) -> Callable[[], Awaitable[Mapping[str, Any]]]:
    async def ask() -> Mapping[str, Any]:
        return await asyncio.to_thread(status)

    return ask


async def _no_update(
    engine_version: Version | None, engine_root: Digest | None, wait_seconds: float
) -> StagedUpdate | None:
    await asyncio.sleep(min(wait_seconds, 1.0))
    return None


async def _ignore_confirmation(confirmation: EngineConfirmation) -> None:
    pass


async def _refuse_rollouts(rollouts: SubmitRollouts) -> RolloutsTaken:
    return RolloutsTaken(False, "this node is a trainer; rollouts are submitted at an inferencer")


async def _no_rollouts(count_max: int, wait_seconds: float) -> tuple[()]:
    await asyncio.sleep(min(wait_seconds, 1.0))
    return ()


async def _ignore_settled(batches: Sequence[SignedBatch], is_delivered: bool) -> None:
    pass


def _ignore_checks(peer_id: PeerId, checked_count: int, mismatched_count: int) -> None:
    pass


async def _refuse_snapshot(offer: SnapshotOffer) -> asyncio.Future[PublishDone]:
    offer.parts.close()
    outcome: asyncio.Future[PublishDone] = asyncio.get_running_loop().create_future()
    outcome.set_result(PublishDone(PublishStatus.NOT_PUBLISHER, None, 0, 0, 0, 0, "this node is not a trainer"))
    return outcome
