"""One life of a node's machines: everything that runs while they do, until the node ends or they are built anew."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NoReturn

from pulsenet.ids import PeerId
from pulsenet.wire.messages import Message
from pulsenetd import chores
from pulsenetd.blob_kinds import BlobKinds
from pulsenetd.chores import AddressWatch, DirectoryReader, LinkWatch, RunFileKeeper, repeat
from pulsenetd.driver import Driver
from pulsenetd.handlers.network import NetworkHandlers
from pulsenetd.handlers.store import StoreHandlers
from pulsenetd.joining import DescriptorSearch
from pulsenetd.local.server import LocalServer
from pulsenetd.membership import Membership
from pulsenetd.network.reachability import LOOK_SECONDS, Reachability
from pulsenetd.network.stack import Network
from pulsenetd.outer.part import shape_of
from pulsenetd.roles import Parts, Role
from pulsenetd.rollouts import Rollouts
from pulsenetd.scrubbing import LOOK_SECONDS as SCRUB_SECONDS
from pulsenetd.scrubbing import Scrubber
from pulsenetd.service_manager import ServiceManager
from pulsenetd.startup import take_up_rounds
from pulsenetd.status.history import SAMPLE_SECONDS
from pulsenetd.status.report import NodeReport
from pulsenetd.transfer_progress import TransferProgress
from pulsenetd.view import NodeView, Responder
from pulsenetd.watch import RoundWatch, Watchdog

HEARTBEAT_SECONDS: Final = 1.0

DIRECTORY_SECONDS: Final = 3.0
"""A data directory that was removed is noticed within so many seconds."""

TRAINER_SECONDS_MAX: Final = 30.0
"""A trainer takes a rollout batch, or leases tasks, within so many seconds."""


class PartChangedError(Exception):
    """The descriptor gives this node another part in the rounds than its machines were built for."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """What a node has beside its machines, and keeps when they are built anew."""

    parts: Parts
    network: Network
    reachability: Reachability
    membership: Membership
    search: DescriptorSearch
    run_file: RunFileKeeper
    rollouts: Rollouts
    report: NodeReport
    manager: ServiceManager
    round_watch: RoundWatch
    transfer_progress: TransferProgress
    disk_thread: ThreadPoolExecutor
    read_threads: ThreadPoolExecutor


class Serving:
    """The machines of one role, driven and fed.

    Args:
        lasting: What they work with.
        role: What they are; closed by whoever built it.
        leave_now: Ends the process at once, with a code.
    """

    def __init__(self, lasting: Lasting, role: Role, leave_now: Callable[[int], object]) -> None:
        self._lasting = lasting
        self._parts = parts = lasting.parts
        self._network = network = lasting.network
        self._role = role
        self._driver = driver = Driver(
            role.machines,
            {
                **StoreHandlers(parts.store, lasting.disk_thread, parts.monotonic).table(),
                **NetworkHandlers(network, lambda event: driver.post(event)).table(),
                **parts.ledger.table(),
                **role.handlers,
                **role.rounds.handlers,
            },
            monotonic=parts.monotonic,
            wall_ms=network.directory.now_ms,
        )
        role.bind(lambda event: driver.post_to("role", event))
        role.rounds.bind(driver)
        self._links = LinkWatch(network, driver.post)
        rollouts = lasting.rollouts
        view = NodeView(parts.store, parts.trust, role.mesh, lasting.membership.encoded, parts.monotonic)
        self._responder = Responder(
            view, driver, lasting.read_threads, rollouts.take, role.rounds.answer, rollouts.give_tasks
        )
        self._local = LocalServer(
            parts.settled.data_directory,
            role.hooks(rollouts, lasting.report.status, lambda: asyncio.to_thread(self._take_up)),
            role=parts.config.role,
            allowed_uids=frozenset(int(uid) for uid in parts.config.allow_uid),
        )
        self._watchdog = Watchdog(
            lambda: lasting.report.beaten_at, parts.monotonic, parts.config.watchdog_seconds, end=leave_now
        )

    async def run(self, on_listening: Callable[[], None] = lambda: None) -> None:
        """Serve until cancelled.

        Args:
            on_listening: Called once local processes can attach.

        Raises:
            ExceptionGroup: Of one :class:`PartChangedError`, when the machines are to be built anew.
        """
        parts, network, links = self._parts, self._network, self._links
        reader = DirectoryReader(network, self._driver.post, secrets.randbelow)
        watch = AddressWatch(network, self._lasting.run_file, is_private=self._is_private, tell=self._take_addresses)
        scrubber = Scrubber(parts.store, self._lasting.read_threads, self._driver.post)
        kinds = BlobKinds(parts.store, self._lasting.read_threads, parts.monotonic)
        try:
            self._local.listen()
            on_listening()
            self._lasting.report.beaten_at = parts.monotonic()
            self._watchdog.start()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._driver.run())
                network.transport.serve(self._responder.answer, rules=parts.trust, find_kind=kinds.find)
                tasks.create_task(network.run())
                tasks.create_task(self._local.serve())
                tasks.create_task(self._watch_directory())
                tasks.create_task(repeat(HEARTBEAT_SECONDS, self._beat))
                tasks.create_task(repeat(chores.LINKS_SECONDS, links.look))
                tasks.create_task(repeat(SAMPLE_SECONDS, self._observe))
                tasks.create_task(repeat(chores.HEADS_SECONDS, reader.read_heads))
                tasks.create_task(repeat(reader.haves_wait_seconds, reader.read_haves))
                tasks.create_task(repeat(chores.MEND_SECONDS, self._mend))
                tasks.create_task(repeat(chores.MEND_SECONDS, watch.look))
                tasks.create_task(repeat(SCRUB_SECONDS, scrubber.look))
                if not parts.settled.is_local:
                    tasks.create_task(repeat(LOOK_SECONDS, self._lasting.reachability.look))
                tasks.create_task(repeat(chores.RUN_FILES_SECONDS, self._look_around))
                tasks.create_task(repeat(chores.DESCRIPTORS_SECONDS, self._ask_around))
                tasks.create_task(
                    self._lasting.rollouts.send(lambda: links.connected, self._role.mesh.have_of, self._ask_trainer)
                )
                self._role.start_engine()
                tasks.create_task(self._role.watch_engine())
        finally:
            network.transport.stop_serving()
            self._lasting.transfer_progress.close()
            self._watchdog.stop()
            await asyncio.to_thread(self._role.stop_engine)

    def _is_private(self) -> bool:
        descriptor = self._parts.trust.descriptor
        return descriptor is not None and descriptor.private

    def _take_addresses(self, addresses: tuple[str, ...]) -> None:
        self._lasting.report.addresses = addresses

    async def _beat(self) -> None:
        parts, lasting, mesh = self._parts, self._lasting, self._role.mesh
        lasting.report.beaten_at = now = parts.monotonic()
        if shape_of(parts.trust.descriptor, parts.settled.identity.peer_id) != self._role.rounds.shape:
            raise PartChangedError
        lasting.round_watch.look(now)
        lasting.transfer_progress.look()
        holdings, is_reachable = self._role.machine.holdings, lasting.reachability.is_reachable
        own = () if is_reachable is False else lasting.report.addresses  # what nobody can dial is not passed on
        self._driver.call("mesh", lambda now, now_ms: mesh.update(now, now_ms, holdings=holdings, addresses=own))
        parts.metrics.set("reachable", float("nan") if is_reachable is None else float(is_reachable))
        parts.metrics.set("clock_offset_seconds", self._network.directory.clock_offset.ahead_seconds or 0.0)
        parts.metrics.take_traffic(self._network.transport.traffic)
        parts.metrics.take_restarts(self._network.supervisor.restarts)
        lasting.manager.beat(parts.ledger.describe())

    async def _observe(self) -> None:
        now, traffic, observer = self._parts.monotonic(), self._network.transport.traffic, self._lasting.report.observer
        observer.look_at_peers(now, self._links.links, self._role.mesh, traffic.peer_bytes)
        observer.look(now, self._network.directory.now_ms(), self._parts.ledger.fields, traffic.bytes)

    def _take_up(self) -> bool:
        """Give the run that lives on this machine rounds, now that a training process asks for them."""
        settled = self._parts.settled
        is_changed = settled.is_local and take_up_rounds(settled.run_path)
        if is_changed:
            self._lasting.membership.refresh()
        return is_changed

    async def _watch_directory(self) -> NoReturn:
        """End the node whose directory is gone: it could keep nothing, and its lock excludes nobody any more."""
        while True:
            await asyncio.to_thread(self._parts.settled.lock.check)
            await asyncio.sleep(DIRECTORY_SECONDS)

    async def _mend(self) -> None:
        await self._network.mend()
        usage = await asyncio.to_thread(self._parts.store.usage)
        self._parts.metrics.take_usage(usage)
        await asyncio.to_thread(self._parts.store.sweep, self._parts.monotonic())

    async def _look_around(self) -> None:
        await asyncio.to_thread(self._lasting.membership.refresh)
        await self._lasting.run_file.dial_others(self._links.connected)

    async def _ask_around(self) -> None:
        if self._links.connected:
            peer_id = secrets.choice(sorted(self._links.connected))
            if await self._lasting.membership.ask(peer_id, self._lasting.search.ask):
                await asyncio.to_thread(self._lasting.membership.refresh)

    async def _ask_trainer(self, peer_id: PeerId, request: Message) -> Message:
        return (await self._network.transport.request(peer_id, request, TRAINER_SECONDS_MAX))[0]
