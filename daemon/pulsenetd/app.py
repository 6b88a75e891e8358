"""One node: built, run until it is cancelled, taken down with nothing left behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Final, NoReturn

from pulsenet.chain.records import ALGORITHM_NONE, Descriptor
from pulsenet.ids import PeerId
from pulsenet.local.sockets import socket_path
from pulsenet.wire.messages import Message
from pulsenetd import chores
from pulsenetd.admin import AdminServer, check_port
from pulsenetd.announcing import announce_start
from pulsenetd.blob_kinds import BlobKinds
from pulsenetd.chores import DirectoryReader, LinkWatch, RunFileKeeper, repeat
from pulsenetd.config import Config, parse_version
from pulsenetd.driver import Driver
from pulsenetd.errors import first_cause
from pulsenetd.handlers.network import NetworkHandlers
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.handlers.store import StoreHandlers
from pulsenetd.identity import to_libp2p_text, verify
from pulsenetd.joining import DescriptorSearch
from pulsenetd.local.server import LocalServer
from pulsenetd.logs import logger
from pulsenetd.membership import Membership
from pulsenetd.metrics import Metrics
from pulsenetd.network.directory import Directory
from pulsenetd.network.p2pd import P2pdSettings
from pulsenetd.network.pacing import Caps
from pulsenetd.network.reachability import LOOK_SECONDS, Reachability
from pulsenetd.network.stack import Network
from pulsenetd.network.transport import Transport
from pulsenetd.node_file import NODE_FILE
from pulsenetd.outer.part import shape_of
from pulsenetd.readiness import check_readiness
from pulsenetd.roles import Role, build_role
from pulsenetd.rollouts import Rollouts
from pulsenetd.scrubbing import LOOK_SECONDS as SCRUB_SECONDS
from pulsenetd.scrubbing import Scrubber
from pulsenetd.service_manager import ServiceManager
from pulsenetd.startup import Settled, take_up_rounds
from pulsenetd.status.conditions import find_conditions
from pulsenetd.status.history import SAMPLE_SECONDS
from pulsenetd.status.log_tail import LogTail, find_hidden
from pulsenetd.status.observer import Observer
from pulsenetd.status.peers import list_peers
from pulsenetd.status.transfers import list_transfers
from pulsenetd.storage.store import Store
from pulsenetd.transfer_progress import TransferProgress
from pulsenetd.trust_state import open_trust
from pulsenetd.view import NodeView, Responder
from pulsenetd.warm_up import warm_up_aloud
from pulsenetd.watch import RoundWatch, Watchdog

HEARTBEAT_SECONDS: Final = 1.0
HEARTBEAT_MISSED_SECONDS: Final = 15.0
"""An event loop that did not turn for so long is stuck, and ``/livez`` says so."""

DIRECTORY_SECONDS: Final = 3.0
"""A data directory that was removed is noticed within so many seconds."""

REPORTED_FIELDS: Final = ("applied_version", "latest_seen_version", "version_lag", "version_age_seconds", "revision")
"""Fields every status has, as ``None`` until a machine has reported."""

TRAINER_SECONDS_MAX: Final = 30.0
"""A trainer takes a rollout batch, or leases tasks, within so many seconds."""


class _PartChangedError(Exception):
    """The descriptor gives this node another part in the rounds than its machines were built for."""


class Node:
    """Everything a node consists of.

    Args:
        config: What the operator chose.
        settled: Run, directory and key.
        manager: Told when the node serves, and that it lives.
        say: Prints a line for the person who started the node.
    """

    def __init__(self, config: Config, settled: Settled, manager: ServiceManager, say: Callable[[str], None]) -> None:
        self._config = config
        self._settled = settled
        self._manager = manager
        self._say = say
        self._monotonic: Callable[[], float] = time.monotonic
        self._heartbeat_at = time.monotonic()
        self._metrics = Metrics()
        self._ledger = Ledger(self._metrics, self._monotonic)
        self._round_watch = RoundWatch(self._ledger, config.round_seconds)
        self._transfer_progress = TransferProgress(lambda: self._ledger.fields, is_quiet=config.log_json)
        self._disk_thread = ThreadPoolExecutor(1, "store")
        self._work_threads = ThreadPoolExecutor(config.worker_threads, "work")
        self._block_threads = ThreadPoolExecutor(config.worker_threads, "block")
        self._read_threads = ThreadPoolExecutor(4, "serve")
        self._addresses: tuple[str, ...] = ()
        self._local_addresses: tuple[str, ...] = ()
        self._transport: Transport | None = None
        self._rollouts: Rollouts | None = None
        self._observer = Observer()
        self._log_tail = LogTail(find_hidden(settled.data_directory))
        self._started_at = time.monotonic()

    async def run(self) -> None:
        """Start, work until cancelled, stop."""
        loop = asyncio.get_running_loop()
        settled, article = self._settled, "an" if self._config.role == "inferencer" else "a"
        self._say(f"starting {article} {self._config.role} of run {settled.run_name} in {settled.data_directory}")
        logger.addHandler(self._log_tail)
        store = await loop.run_in_executor(self._disk_thread, self._open_store)
        try:
            await self._run_with_store(store)
        finally:
            logger.removeHandler(self._log_tail)
            # Off the loop: while it turns, a second signal is heard.
            await asyncio.to_thread(self._end_threads)
            if self._rollouts is not None:
                self._rollouts.close()
            store.close()
            (self._settled.data_directory / NODE_FILE).unlink(missing_ok=True)

    def leave_now(self, code: int) -> None:
        """End the process at once."""
        self.abandon()
        os._exit(code)

    def _end_threads(self) -> None:
        for pool in (self._work_threads, self._block_threads, self._read_threads, self._disk_thread):
            pool.shutdown(wait=True, cancel_futures=True)

    def abandon(self) -> None:
        """Leave no process and no socket behind, without waiting; what is committed is durable already."""
        if self._transport is not None:
            self._transport.abandon()
        for path in (socket_path(self._settled.data_directory), self._settled.data_directory / NODE_FILE):
            path.unlink(missing_ok=True)

    def _open_store(self) -> Store:
        return Store.open(self._settled.data_directory, lock=self._settled.lock)

    async def _run_with_store(self, store: Store) -> None:
        check_port(self._config.metrics_host, self._config.metrics_port)
        settled = self._settled
        self._store = store
        version_min = parse_version(self._config.version_min) if self._config.version_min else None
        self._trust = open_trust(store, settled.token, verify, version_min)
        self._membership = Membership(settled.run_path, store, self._trust, self._on_descriptor)
        self._network = self._build_network()
        self._search = DescriptorSearch(
            self._config, settled, self._trust, self._membership, self._network, self._monotonic
        )
        await asyncio.to_thread(self._membership.refresh)
        live = RunFileKeeper(settled.run_file, settled.identity.peer_id, self._network)
        bootstraps = tuple(dict.fromkeys((*self._config.bootstrap, *settled.token.bootstraps)))
        if not (bootstraps or settled.is_local or self._config.wait) and self._trust.descriptor is None:
            self._search.refuse_to_be_alone(await asyncio.to_thread(live.read))
        outcomes = await self._network.open(
            bootstraps,
            try_seconds=self._config.start_timeout_seconds,
            wait=self._config.wait,
            on_progress=lambda text: logger.info("%s", text),
        )
        for outcome in outcomes:
            if not outcome.is_connected and outcome.reason != "self":
                logger.warning("a bootstrap was not reached and is tried again later: %s", outcome)
        try:
            await self._search.find(live)
            transport = self._network.transport
            self._addresses = await transport.listen_addresses(private_too=self._is_private())
            # Nodes of this machine can dial what a public run does not announce.
            self._local_addresses = await transport.listen_addresses(private_too=True)
            await asyncio.to_thread(live.write, self._local_addresses)
            # In the background: the first patch may come at any time and would pay for it.
            warming = asyncio.get_running_loop().run_in_executor(self._block_threads, warm_up_aloud)
            try:
                await self._serve_in_turn(live)
            finally:
                await warming
        finally:
            await self._network.close()

    async def _serve_in_turn(self, live: RunFileKeeper) -> None:
        """Serve, and build the machines anew whenever the owner gives this node another part in the rounds."""
        admin = self._open_admin()
        try:
            is_first = True
            while True:
                role = await self._build_role()
                try:
                    await self._serve(role, live, admin if is_first else None)
                except BaseExceptionGroup as group:
                    if not isinstance(first_cause(group), _PartChangedError):
                        raise
                    logger.info("the owner changed this node's part in the rounds: its machines are built anew")
                finally:
                    self._network.transport.stop_serving()
                    role.close()
                is_first = False
        finally:
            admin.close()

    def _build_network(self) -> Network:
        config, settled = self._config, self._settled
        self._transport = transport = Transport(
            P2pdSettings(
                identity_path=settled.identity.path,
                socket_directory=settled.data_directory / "p2pd",
                listen_addresses=(config.listen or settled.listen_address,),
                announce_addresses=config.announce,
                binary=Path(config.p2pd) if config.p2pd else None,
                start_timeout_seconds=config.start_timeout_seconds,
            ),
            peer_id=settled.identity.peer_id,
            run_id=settled.token.run_id,
            role=config.role,
            software=f"pulsenet/{package_version('pulsenet')}",
            caps=Caps(config.upload_limit, config.download_limit),
        )
        self._directory = Directory(
            peer_id=settled.identity.peer_id, run_id=settled.token.run_id, verify=verify, secret=settled.token.secret
        )
        draw = secrets.SystemRandom().random
        network = Network(transport, self._directory, draw=draw)
        self._reachability = Reachability(
            network,
            run_id=settled.token.run_id,
            announced=config.announce,
            is_public=lambda: not self._is_private(),
            draw=draw,
            clock=self._monotonic,
        )
        return network

    def _on_descriptor(self, descriptor: Descriptor) -> None:
        listed = (*descriptor.owners, *descriptor.authorities, *descriptor.trainers, *descriptor.inferencers)
        self._directory.set_authorities(descriptor.authorities, listed)
        self._ledger.note(revision=descriptor.revision)

    def _is_private(self) -> bool:
        return self._trust.descriptor is not None and self._trust.descriptor.private

    async def _build_role(self) -> Role:
        return await build_role(
            self._config,
            self._settled,
            store=self._store,
            trust=self._trust,
            addresses=self._addresses,
            ledger=self._ledger,
            metrics=self._metrics,
            work_threads=self._work_threads,
            block_threads=self._block_threads,
            monotonic=self._monotonic,
            meters=self._network.transport.traffic.meters,
        )

    async def _serve(self, role: Role, live: RunFileKeeper, admin: AdminServer | None) -> None:
        """Serve until cancelled; an ``admin`` means that the node is new, and says where it is."""
        store_handlers = StoreHandlers(self._store, self._disk_thread, self._monotonic)
        network_handlers = NetworkHandlers(self._network, lambda event: driver.post(event))
        driver = Driver(
            {"role": role.machine, "mesh": role.mesh, **role.helpers, **role.rounds.machines},
            {
                **store_handlers.table(),
                **network_handlers.table(),
                **self._ledger.table(),
                **role.handlers,
                **role.rounds.handlers,
            },
            monotonic=self._monotonic,
            wall_ms=self._directory.now_ms,
        )
        role.bind(lambda event: driver.post_to("role", event))
        role.rounds.bind(driver)
        rollouts = self._open_rollouts()
        view = NodeView(self._store, self._trust, role.mesh, self._membership.encoded, self._monotonic)
        responder = Responder(view, driver, self._read_threads, rollouts.take, role.rounds.answer, rollouts.give_tasks)
        kinds = BlobKinds(self._store, self._read_threads, self._monotonic)
        links = LinkWatch(self._network, driver.post)
        reader = DirectoryReader(self._network, driver.post, secrets.randbelow)
        local = LocalServer(
            self._settled.data_directory,
            replace(
                role.hooks(
                    inbox=rollouts.inbox,
                    outbox=rollouts.outbox,
                    status=self.status,
                    take_up_rounds=lambda: asyncio.to_thread(self._take_up),
                ),
                tasks=rollouts.tasks,
            ),
            role=self._config.role,
            allowed_uids=frozenset(int(uid) for uid in self._config.allow_uid),
        )
        watchdog = Watchdog(
            lambda: self._heartbeat_at, self._monotonic, self._config.watchdog_seconds, end=self.leave_now
        )
        try:
            local.listen()
            if admin is not None:
                self._announce_start(admin)
            self._heartbeat_at = self._monotonic()
            watchdog.start()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(driver.run())
                self._network.transport.serve(responder.answer, rules=self._trust, find_kind=kinds.find)
                tasks.create_task(self._network.run())
                tasks.create_task(local.serve())
                tasks.create_task(self._watch_directory())
                tasks.create_task(repeat(HEARTBEAT_SECONDS, lambda: self._beat(role, driver)))
                tasks.create_task(repeat(chores.LINKS_SECONDS, links.look))
                tasks.create_task(repeat(SAMPLE_SECONDS, lambda: self._observe(role, links)))
                tasks.create_task(repeat(chores.HEADS_SECONDS, reader.read_heads))
                tasks.create_task(repeat(reader.haves_wait_seconds, reader.read_haves))
                tasks.create_task(repeat(chores.MEND_SECONDS, self._mend))
                tasks.create_task(repeat(SCRUB_SECONDS, Scrubber(self._store, self._read_threads, driver.post).look))
                if not self._settled.is_local:
                    tasks.create_task(repeat(LOOK_SECONDS, self._reachability.look))
                tasks.create_task(repeat(chores.RUN_FILES_SECONDS, lambda: self._look_around(live, links)))
                tasks.create_task(repeat(chores.DESCRIPTORS_SECONDS, lambda: self._ask_around(links)))
                tasks.create_task(rollouts.send(lambda: links.connected, role.mesh.have_of, self._ask_trainer))
                role.start_engine()
        finally:
            self._transfer_progress.close()
            watchdog.stop()
            await asyncio.to_thread(role.stop_engine)

    # Chores

    async def _beat(self, role: Role, driver: Driver) -> None:
        self._heartbeat_at = self._monotonic()
        if shape_of(self._trust.descriptor, self._settled.identity.peer_id) != role.rounds.shape:
            raise _PartChangedError
        self._round_watch.look(self._heartbeat_at)
        self._transfer_progress.look()
        holdings = role.holdings()
        is_reachable = self._reachability.is_reachable
        own = () if is_reachable is False else self._addresses  # what nobody can dial is not passed on
        driver.call("mesh", lambda now, now_ms: role.mesh.update(now, now_ms, holdings=holdings, addresses=own))
        self._metrics.set("reachable", float("nan") if is_reachable is None else float(is_reachable))
        self._metrics.set("clock_offset_seconds", self._directory.clock_offset.ahead_seconds or 0.0)
        self._metrics.take_traffic(self._network.transport.traffic)
        self._metrics.take_restarts(self._network.supervisor.restarts)
        self._manager.beat(self._ledger.describe())

    async def _observe(self, role: Role, links: LinkWatch) -> None:
        now, traffic = self._monotonic(), self._network.transport.traffic
        rates = self._observer.measure_peers(now, traffic.peer_bytes)
        self._observer.peers = list_peers(links.links, role.mesh, traffic.peer_bytes, rates)
        self._observer.look(now, self._directory.now_ms(), self._ledger.fields, traffic.bytes)

    def _take_up(self) -> bool:
        """Give the run that lives on this machine rounds, now that a training process asks for them."""
        is_changed = self._settled.is_local and take_up_rounds(self._settled.run_path)
        if is_changed:
            self._membership.refresh()
        return is_changed

    async def _watch_directory(self) -> NoReturn:
        """End the node whose directory is gone: it could keep nothing, and its lock excludes nobody any more."""
        while True:
            await asyncio.to_thread(self._settled.lock.check)
            await asyncio.sleep(DIRECTORY_SECONDS)

    async def _mend(self) -> None:
        await self._network.mend()
        usage = await asyncio.to_thread(self._store.usage)
        self._metrics.take_usage(usage)
        await asyncio.to_thread(self._store.sweep, self._monotonic())

    async def _look_around(self, live: RunFileKeeper, links: LinkWatch) -> None:
        await asyncio.to_thread(self._membership.refresh)
        await live.dial_others(links.connected)

    async def _ask_around(self, links: LinkWatch) -> None:
        if links.connected:
            peer_id = secrets.choice(sorted(links.connected))
            if await self._membership.ask(peer_id, self._search.ask):
                await asyncio.to_thread(self._membership.refresh)

    def _open_rollouts(self) -> Rollouts:
        """Open the files of the rollouts once; they outlast a change of the role's machines."""
        if self._rollouts is None:
            settled = self._settled
            self._rollouts = Rollouts(
                self._config,
                settled.data_directory,
                settled.token.run_id,
                settled.identity,
                self._trust,
                self._metrics,
                self._monotonic,
            )
        return self._rollouts

    async def _ask_trainer(self, peer_id: PeerId, request: Message) -> Message:
        return (await self._network.transport.request(peer_id, request, TRAINER_SECONDS_MAX))[0]

    # What people and scrapers see

    def _open_admin(self) -> AdminServer:
        return AdminServer(
            self._config.metrics_host,
            self._config.metrics_port,
            metrics=self._metrics.text,
            live=self._live_checks,
            ready=self._ready_checks,
            status=self.status,
            history=self._observer.history.columns,
            log=self._log_tail.select,
        )

    def _live_checks(self) -> Mapping[str, bool]:
        return {"event loop turns": self._monotonic() - self._heartbeat_at < HEARTBEAT_MISSED_SECONDS}

    def _ready_checks(self) -> Mapping[str, bool]:
        is_healthy = self._network.supervisor.is_healthy
        return {**self._live_checks(), **check_readiness(self._config, self._ledger, p2pd_answers=is_healthy)}

    def status(self) -> dict[str, Any]:
        """Return the node's state as plain values; called from any thread. docs/status-page.md names every field."""
        usage = self._store.usage()
        traffic = self._network.transport.traffic
        observed = self._observer.status()
        status: dict[str, Any] = {
            "run": self._settled.run_name,
            "run_id": self._settled.token.run_id.hex(),
            "peer_id": to_libp2p_text(self._settled.identity.peer_id),
            "pid": os.getpid(),
            "role": self._config.role,
            "addresses": list(self._addresses),
            "reachability": self._reachability.status(),
            "clock_offset_seconds": self._directory.clock_offset.ahead_seconds,
            "p2pd_restarts": self._network.supervisor.restart_count,
            "p2pd_healthy": self._network.supervisor.is_healthy,
            "software": f"pulsenet {package_version('pulsenet')}",
            "now_ms": self._directory.now_ms(),
            "uptime_seconds": self._monotonic() - self._started_at,
            "event_loop_turns": all(self._live_checks().values()),
            "store_bytes": usage.chunk_size_bytes,
            "store_damaged_chunks": usage.damaged_count,
            "disk_free_bytes": usage.free_size_bytes,
            "last_update_failed": self._ledger.last_update_failed,
            "bytes": {f"{direction}_{kind}": count for (direction, kind), count in list(traffic.bytes.items())},
            "blob_bytes": {f"{direction}_{kind}": size for (direction, kind), size in list(traffic.blob_bytes.items())},
            "rollouts": None if self._rollouts is None else self._rollouts.status(),
            "versions": [dict(facts) for facts in list(self._ledger.versions.values())],
            **dict.fromkeys(REPORTED_FIELDS),
            **dict(self._ledger.fields),
            "state": self._ledger.fields.get("phase", "starting"),
            "peers": self._ledger.fields.get("peers_connected", 0),
            **observed,
        }
        status["transfers"] = list_transfers(status, observed["received_bytes_per_second"])
        status["conditions"] = find_conditions(status)
        return status

    def _announce_start(self, admin: AdminServer) -> None:
        descriptor = self._trust.descriptor
        announce_start(
            self._config,
            self._settled,
            announced=self._addresses,
            listening=self._local_addresses,
            metrics_url=admin.url,
            algorithm="" if descriptor is None or descriptor.algorithm == ALGORITHM_NONE else descriptor.algorithm,
            say=self._say,
        )
        self._manager.ready()
