"""What differs between a trainer, an inferencer and a seed: the machine, its handlers, the local hooks."""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pulsenet.chain.retention import RetentionLimits
from pulsenet.chain.trust import Trust
from pulsenet.errors import PulsenetError, StorageError
from pulsenet.ids import PeerId, Version
from pulsenet.local.protocol import PublishDone, PublishStatus, RolloutsTaken, SignedBatch, SubmitRollouts
from pulsenet.node.effects import Effect
from pulsenet.node.events import Event
from pulsenet.node.inferencer import Inferencer
from pulsenet.node.machine import Machine
from pulsenet.node.mender import Mender
from pulsenet.node.mesh import BOOK_KEY, Holdings, Mesh
from pulsenet.node.published import STATE_KEY
from pulsenet.node.trainer import Trainer
from pulsenet.outer.mixing.settings import ALGORITHM as GOSSIP
from pulsenet.serving.files import FilesEngine
from pulsenet.serving.sglang import SglangEngine
from pulsenet.serving.subscriber import Subscriber, attach_engine
from pulsenet.serving.vllm.engine import UpdateTimes
from pulsenet.wire.messages import PeerAddress
from pulsenetd.config import Config
from pulsenetd.driver import Handler
from pulsenetd.engines.openai_server import OpenAiServer
from pulsenetd.engines.vllm import VllmRunner
from pulsenetd.engines.vllm_server import find_reload_model, make_server
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
from pulsenetd.rollout_inbox import RolloutInbox
from pulsenetd.rollout_outbox import RolloutOutbox
from pulsenetd.startup import Settled
from pulsenetd.storage.disk import free_size_bytes
from pulsenetd.storage.lookup import StoreLookup, find_lacking, find_stored
from pulsenetd.storage.mirror import Mirror
from pulsenetd.storage.publishing import Publisher
from pulsenetd.storage.staging import StagedUpdate
from pulsenetd.storage.store import Store

ENGINE_RETRY_SECONDS = 5.0
"""Pause before the files engine's directory is tried again."""

STORE_SHARE_DEFAULT = 0.2
"""Share of the free disk that blobs may take unless the operator says otherwise."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What every role is built from."""

    config: Config
    settled: Settled
    store: Store
    trust: Trust
    mesh: Mesh
    ledger: Ledger
    metrics: Metrics
    work_threads: ThreadPoolExecutor
    block_threads: ThreadPoolExecutor
    monotonic: Callable[[], float]
    rounds: RoundsPart | MixingPart


class Role(Protocol):
    """One role of a node."""

    mesh: Mesh
    rounds: RoundsPart | MixingPart
    helpers: Mapping[str, Machine]  # further machines, by name

    @property
    def machine(self) -> Machine:
        """The role's core."""

    @property
    def handlers(self) -> Mapping[type[Effect], Handler]:
        """How the effects only this role has are executed."""

    def bind(self, post: Callable[[Event], None]) -> None:
        """Learn how to reach the role's machine."""

    def holdings(self) -> Holdings:
        """Return what this node can serve now."""

    def hooks(
        self,
        *,
        inbox: RolloutInbox,
        outbox: RolloutOutbox,
        status: Callable[[], Mapping[str, Any]],
        take_up_rounds: Callable[[], Awaitable[bool]],
    ) -> LocalHooks:
        """Return what local processes may ask."""

    def start_engine(self) -> None:
        """Start the engine this node runs itself, if any; its local socket is served."""

    def stop_engine(self) -> None:
        """Stop it. Blocks."""

    def close(self) -> None:
        """Let go of memory."""


async def build_role(
    config: Config,
    settled: Settled,
    *,
    store: Store,
    trust: Trust,
    addresses: tuple[str, ...],
    ledger: Ledger,
    metrics: Metrics,
    work_threads: ThreadPoolExecutor,
    block_threads: ThreadPoolExecutor,
    monotonic: Callable[[], float],
    meters: Meters,
) -> Role:
    """Build the machine of the configured role, with the state of its last run."""
    mesh = _build_mesh(config, settled, store, trust, addresses)

    def build() -> Role:
        mixes = trust.descriptor is not None and trust.descriptor.algorithm == GOSSIP
        rounds = (MixingPart if mixes else RoundsPart)(
            store,
            trust,
            settled.identity,
            role=config.role,
            metrics=metrics,
            threads=work_threads,
            note=ledger.note,
            find_link=partial(find_link, config.upload_limit, config.download_limit, meters),
            run_blocks=block_threads.map,
            monotonic=monotonic,
        )
        threads = (work_threads, block_threads)
        parts = Parts(config, settled, store, trust, mesh, ledger, metrics, *threads, monotonic, rounds)
        return TrainerRole(parts) if config.role == "trainer" else FollowerRole(parts)

    return await asyncio.get_running_loop().run_in_executor(work_threads, build)


def _build_mesh(config: Config, settled: Settled, store: Store, trust: Trust, own: tuple[str, ...]) -> Mesh:
    bootstraps: dict[Any, list[str]] = {}
    for text in (*config.bootstrap, *settled.token.bootstraps):
        address, peer_id = addresses.split_address(text)
        bootstraps.setdefault(peer_id, []).append(address)
    make = partial(
        Mesh,
        trust,
        settled.identity.peer_id,
        settled.identity.sign,
        secrets.randbelow,
        role=config.role,
        addresses=own,
        bootstraps=[PeerAddress(peer_id, tuple(known)) for peer_id, known in bootstraps.items()],
    )
    try:
        return make(saved=store.state(BOOK_KEY))
    except StorageError as error:
        logger.warning("the remembered peers cannot be used (%s): starting from the bootstraps", error)
        return make(saved=None)


class TrainerRole:
    """Publishes what the training process hands over, and queues rollouts for it."""

    def __init__(self, parts: Parts) -> None:
        self.mesh, self.rounds = parts.mesh, parts.rounds
        self._parts = parts
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
            leadership=parts.rounds.coordinator,
        )
        self.helpers: Mapping[str, Machine] = {
            "mender": Mender(
                parts.settled.identity.peer_id,
                secrets.randbelow,
                StoreLookup(parts.store),
                find_state=lambda: self.machine.state,
                have_of=parts.mesh.have_of,
                lacking=find_lacking(parts.store),
            )
        }
        self._post: Callable[[Event], None] = _unbound
        self._publishing = PublisherHandlers(
            self._publisher,
            parts.work_threads,
            lambda event: self._post(event),
            parts.ledger,
            parts.metrics,
            parts.monotonic,
            find_refusal=lambda snapshot: self.machine.find_refusal(snapshot, parts.monotonic()),
            takes_turns=bool(parts.rounds.shape),
        )
        self.handlers = self._publishing.table()

    def bind(self, post: Callable[[Event], None]) -> None:
        """Learn how to reach the machine."""
        self._post = post

    def holdings(self) -> Holdings:
        """Return what is committed here."""
        state = self.machine.state
        if state is None:
            return Holdings()
        return Holdings(state.version.epoch, *state.patch_range, state.anchor_numbers)

    def hooks(
        self,
        *,
        inbox: RolloutInbox,
        outbox: RolloutOutbox,
        status: Callable[[], Mapping[str, Any]],
        take_up_rounds: Callable[[], Awaitable[bool]],
    ) -> LocalHooks:
        """Serve a training process; engines have nothing to ask here."""
        return LocalHooks(
            on_snapshot=self._publishing.offer,
            on_engine_request=_no_update,
            on_confirm=_ignore_confirmation,
            on_rollouts=_refuse_rollouts,
            on_take_rollouts=inbox.give,
            on_rollouts_settled=inbox.settle,
            on_checks=inbox.note_checks,
            on_status=_threaded(status),
            rounds=self.rounds.hook(take_up_rounds),
        )

    def start_engine(self) -> None:
        """A trainer runs no engine."""

    def stop_engine(self) -> None:
        """A trainer runs no engine."""

    def close(self) -> None:
        """Let go of the baseline."""
        self._publisher.close()


class FollowerRole:
    """Keeps a mirror and engines current, or as a seed stores and serves blobs."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self.helpers: Mapping[str, Machine] = {}
        self.mesh, self.rounds = parts.mesh, parts.rounds
        self._parts = parts
        self._mirror = Mirror(parts.store, parts.settled.data_directory / "spools", run_blocks=parts.block_threads.map)
        if config.role == "inferencer":
            self._mirror.restore()
        held = self._mirror.held
        if held is not None:
            logger.info("version %s was rebuilt from the store", held.version)
        self.machine: Inferencer = Inferencer(
            parts.trust,
            parts.settled.identity.peer_id,
            secrets.randbelow,
            StoreLookup(parts.store),
            role=config.role,
            held=None if held is None else (held.version, held.root),
            stored=find_stored(parts.store),
            retention_limits=RetentionLimits(size_bytes_max=_choose_store_limit(config, parts.store)),
            have_of=parts.mesh.have_of,
        )
        self._post: Callable[[Event], None] = _unbound
        self._following = FollowerHandlers(
            self._mirror,
            parts.work_threads,
            lambda event: self._post(event),
            parts.ledger,
            parts.metrics,
            parts.monotonic,
        )
        self.handlers = self._following.table()
        self._engine_thread: threading.Thread | None = None
        self._engine_stop = threading.Event()
        self._subscriber: Subscriber | None = None
        self._vllm: VllmRunner | None = None
        self._openai: OpenAiServer | None = None

    def bind(self, post: Callable[[Event], None]) -> None:
        """Learn how to reach the machine."""
        self._post = post

    def holdings(self) -> Holdings:
        """Return what is stored whole here."""
        return self.machine.holdings

    def hooks(
        self,
        *,
        inbox: RolloutInbox,
        outbox: RolloutOutbox,
        status: Callable[[], Mapping[str, Any]],
        take_up_rounds: Callable[[], Awaitable[bool]],
    ) -> LocalHooks:
        """Serve engines, and take their rollouts; a training process is told that this node may not publish."""
        return LocalHooks(
            on_snapshot=_refuse_snapshot,
            on_engine_request=self._serve_engine,
            on_confirm=self._following.confirm,
            on_rollouts=outbox.take,
            on_take_rollouts=_no_rollouts,
            on_rollouts_settled=_ignore_settled,
            on_checks=_ignore_checks,
            on_status=_threaded(status),
        )

    async def _serve_engine(self, engine_version: Version | None, wait_seconds: float) -> StagedUpdate | None:
        return await self._following.serve_engine(engine_version, wait_seconds)

    def start_engine(self) -> None:
        """Start what keeps the configured engine current: a subscriber like any other, in a thread of this process."""
        config = self._parts.config
        if config.role == "inferencer" and config.engine == "vllm":
            self._start_vllm()
        if config.role != "inferencer" or config.engine not in ("files", "sglang"):
            return
        directory = Path(config.engine_dir) if config.engine_dir else self._parts.settled.data_directory / "weights"
        self._engine_thread = threading.Thread(
            target=self._run_disk_engine, args=(directory,), name=f"{config.engine}-engine", daemon=True
        )
        self._engine_thread.start()

    def _start_vllm(self) -> None:
        parts, loop = self._parts, asyncio.get_running_loop()
        directory = parts.settled.data_directory
        server = make_server(
            parts.config.engine_url,
            parts.config.serve,
            python=parts.config.engine_python or sys.executable,
            data_directory=directory,
            states_versions=bool(parts.config.openai_port),
        )

        def note_times(times: UpdateTimes) -> None:
            parts.metrics.observe("stage", times.stage_seconds)
            if times.pause_seconds:
                parts.metrics.observe("pause", times.pause_seconds)

        def note_ready(is_ready: bool) -> None:
            loop.call_soon_threadsafe(lambda: parts.ledger.note(engine_ready=is_ready))

        def note_loss(reason: str) -> None:
            loop.call_soon_threadsafe(self._following.lose_engine, reason)

        self._vllm = VllmRunner(
            directory,
            server,
            on_times=note_times,
            on_ready=note_ready,
            on_lost=note_loss,
            reload_from=find_reload_model(parts.config.engine_reload, parts.config.companions, parts.config.serve),
        )
        if parts.config.openai_port:
            host, port = parts.config.openai_host, parts.config.openai_port
            self._openai = OpenAiServer(host, port, self._vllm.find_upstream, count=parts.metrics.count)
        self._vllm.start()

    def _run_disk_engine(self, directory: Path) -> None:
        engine, name = self._open_disk_engine(directory), self._parts.config.engine
        if engine is None:
            return
        try:
            self._subscriber = attach_engine(
                engine,
                data_dir=self._parts.settled.data_directory,
                on_update=lambda version: logger.info("version %s is in %s", version, directory / "current"),
                on_failure=lambda error: logger.warning("the %s engine: %s", name, error),
            )
            self._subscriber.run()
        except PulsenetError as error:
            logger.error("the %s engine stopped: %s", name, error)
        finally:
            engine.close()

    def _open_disk_engine(self, directory: Path) -> FilesEngine | SglangEngine | None:
        """Open the engine's directory, as often as it takes: a full disk or a lock may be gone in a minute.

        Returns:
            ``None`` once the node stops.
        """
        config = self._parts.config
        companions = Path(config.companions) if config.companions else None
        told = ""
        while not self._engine_stop.is_set():
            try:
                if config.engine == "sglang" and companions is not None:
                    return SglangEngine(config.engine_url, directory, companions=companions)
                return FilesEngine(directory, companions=companions)
            except PulsenetError as error:
                if str(error) != told:
                    told = str(error)
                    logger.error("the %s engine cannot start: %s; it is tried again by itself", config.engine, error)
            self._engine_stop.wait(ENGINE_RETRY_SECONDS)
        return None

    def stop_engine(self) -> None:
        """Stop the engine's thread; an update in work is finished first."""
        self._engine_stop.set()
        if self._openai is not None:
            self._openai.close()
        if self._vllm is not None:
            self._vllm.stop()
        if self._subscriber is not None:
            self._subscriber.close()
        if self._engine_thread is not None:
            self._engine_thread.join(timeout=5)

    def close(self) -> None:
        """Let go of the mirror."""
        self._mirror.close()


def _choose_store_limit(config: Config, store: Store) -> int:
    if config.store_limit_bytes:
        return config.store_limit_bytes
    return int(STORE_SHARE_DEFAULT * (free_size_bytes(store.directory) + store.usage().chunk_size_bytes))


def _unbound(event: Event) -> None:
    raise AssertionError("the role was not bound to its machine")


def _threaded(status: Callable[[], Mapping[str, Any]]) -> Callable[[], Awaitable[Mapping[str, Any]]]:
    async def ask() -> Mapping[str, Any]:
        return await asyncio.to_thread(status)

    return ask


async def _no_update(engine_version: Version | None, wait_seconds: float) -> StagedUpdate | None:
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
