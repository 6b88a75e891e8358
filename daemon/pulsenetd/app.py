"""One node: built, run until it is cancelled, taken down with nothing left behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Final

from pulsenet.chain.records import ALGORITHM_NONE, Descriptor
from pulsenet.local.sockets import socket_path
from pulsenetd.admin import AdminServer, check_port
from pulsenetd.announcing import announce_start
from pulsenetd.chores import RunFileKeeper
from pulsenetd.config import Config, parse_version
from pulsenetd.errors import first_cause
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.identity import verify
from pulsenetd.joining import DescriptorSearch
from pulsenetd.logs import logger
from pulsenetd.membership import Membership
from pulsenetd.metrics import Metrics
from pulsenetd.network.directory import Directory
from pulsenetd.network.p2pd import P2pdSettings
from pulsenetd.network.pacing import Caps
from pulsenetd.network.reachability import Reachability
from pulsenetd.network.stack import Network
from pulsenetd.network.transport import Transport
from pulsenetd.node_file import NODE_FILE
from pulsenetd.roles import Parts, build_role
from pulsenetd.rollouts import Rollouts
from pulsenetd.service_manager import ServiceManager
from pulsenetd.serving import Lasting, PartChangedError, Serving
from pulsenetd.startup import Settled, leave_link
from pulsenetd.status.log_tail import LogTail, find_hidden
from pulsenetd.status.report import NodeReport
from pulsenetd.storage.store import Store
from pulsenetd.transfer_progress import TransferProgress
from pulsenetd.trust_state import open_trust, refuse_other_run
from pulsenetd.warm_up import warm_up_aloud
from pulsenetd.watch import RoundWatch

READ_THREADS: Final = 4
"""Peers whose requests read the disk at one time."""


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
        self._disk_thread = ThreadPoolExecutor(1, "store")
        self._work_threads = ThreadPoolExecutor(config.worker_threads, "work")
        self._block_threads = ThreadPoolExecutor(config.worker_threads, "block")
        self._read_threads = ThreadPoolExecutor(READ_THREADS, "serve")
        self._transport: Transport | None = None
        self._rollouts: Rollouts | None = None
        self._log_tail = LogTail(find_hidden(settled.data_directory))

    async def run(self) -> None:
        """Start, work until cancelled, stop."""
        settled, article = self._settled, "an" if self._config.role == "inferencer" else "a"
        self._say(f"starting {article} {self._config.role} of run {settled.run_name} in {settled.data_directory}")
        logger.addHandler(self._log_tail)
        opening = self._disk_thread.submit(Store.open, settled.data_directory, lock=settled.lock)
        try:
            await self._run_with_store(await asyncio.wrap_future(opening))
        finally:
            logger.removeHandler(self._log_tail)
            # Off the loop: while it turns, a second signal is heard. A store that is being opened is waited for.
            await asyncio.to_thread(self._end_threads)
            if not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            (settled.data_directory / NODE_FILE).unlink(missing_ok=True)

    def leave_now(self, code: int) -> None:
        """End the process at once."""
        self.abandon()
        os._exit(code)

    def _end_threads(self) -> None:
        for pool in (self._work_threads, self._block_threads, self._read_threads, self._disk_thread):
            pool.shutdown(wait=True, cancel_futures=True)
        # Not before the network: a batch that a peer sent is still being stored while the machines end.
        if self._rollouts is not None:
            self._rollouts.close()

    def abandon(self) -> None:
        """Leave no process and no socket behind, without waiting; what is committed is durable already."""
        if self._transport is not None:
            self._transport.abandon()
        for path in (socket_path(self._settled.data_directory), self._settled.data_directory / NODE_FILE):
            path.unlink(missing_ok=True)

    async def _run_with_store(self, store: Store) -> None:
        config, settled, metrics = self._config, self._settled, Metrics()
        check_port(config.metrics_host, config.metrics_port)
        refuse_other_run(store, settled.token)
        leave_link(settled.run_path, settled.data_directory)
        version_min = parse_version(config.version_min) if config.version_min else None
        parts = Parts(
            config=config,
            settled=settled,
            store=store,
            trust=open_trust(store, settled.token, verify, version_min),
            ledger=Ledger(metrics, time.monotonic),
            metrics=metrics,
            work_threads=self._work_threads,
            block_threads=self._block_threads,
            monotonic=time.monotonic,
        )
        network = self._build_network()

        def take_descriptor(descriptor: Descriptor) -> None:
            listed = (*descriptor.owners, *descriptor.authorities, *descriptor.trainers, *descriptor.inferencers)
            network.directory.set_authorities(descriptor.authorities, listed)
            parts.ledger.note(revision=descriptor.revision)

        membership = Membership(settled.run_path, store, parts.trust, take_descriptor)
        search = DescriptorSearch(config, settled, parts.trust, membership, network, parts.monotonic)
        await asyncio.to_thread(membership.refresh)
        run_file = RunFileKeeper(settled.run_file, settled.identity.peer_id, network)
        await self._open_network(parts, network, search, run_file)
        try:
            await search.find(run_file)
            # In the background: the first patch may come at any time and would pay for it.
            warming = asyncio.get_running_loop().run_in_executor(self._block_threads, warm_up_aloud)
            try:
                await self._serve(parts, network, membership, search, run_file)
            finally:
                await warming
        finally:
            await network.close()

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
        directory = Directory(
            peer_id=settled.identity.peer_id, run_id=settled.token.run_id, verify=verify, secret=settled.token.secret
        )
        return Network(transport, directory, draw=secrets.SystemRandom().random)

    async def _open_network(
        self, parts: Parts, network: Network, search: DescriptorSearch, run_file: RunFileKeeper
    ) -> None:
        """Reach somebody, unless this node is the first."""
        config, settled = self._config, self._settled
        bootstraps = tuple(dict.fromkeys((*config.bootstrap, *settled.token.bootstraps)))
        if not (bootstraps or settled.is_local or config.wait) and parts.trust.descriptor is None:
            search.refuse_to_be_alone(await asyncio.to_thread(run_file.read))
        outcomes = await network.open(
            bootstraps,
            try_seconds=config.start_timeout_seconds,
            wait=config.wait,
            on_progress=lambda text: logger.info("%s", text),
        )
        for outcome in outcomes:
            if not outcome.is_connected and outcome.reason != "self":
                logger.warning("a bootstrap was not reached and is tried again later: %s", outcome)

    async def _serve(
        self,
        parts: Parts,
        network: Network,
        membership: Membership,
        search: DescriptorSearch,
        run_file: RunFileKeeper,
    ) -> None:
        """Serve, and build the machines anew whenever the owner gives this node another part in the rounds."""

        def is_private() -> bool:
            return parts.trust.descriptor is not None and parts.trust.descriptor.private

        reachability = Reachability(
            network,
            run_id=self._settled.token.run_id,
            announced=self._config.announce,
            is_public=lambda: not is_private(),
            draw=secrets.SystemRandom().random,
            clock=parts.monotonic,
        )
        report = NodeReport(parts, network, reachability)
        report.addresses = await network.transport.listen_addresses(private_too=is_private())
        # Nodes of this machine can dial what a public run does not announce.
        here = await network.transport.listen_addresses(private_too=True)
        await asyncio.to_thread(run_file.write, here)
        rollouts = report.rollouts = self._rollouts = Rollouts(
            self._config,
            self._settled.data_directory,
            self._settled.token.run_id,
            self._settled.identity,
            parts.trust,
            parts.metrics,
            parts.monotonic,
        )
        lasting = Lasting(
            parts=parts,
            network=network,
            reachability=reachability,
            membership=membership,
            search=search,
            run_file=run_file,
            rollouts=rollouts,
            report=report,
            manager=self._manager,
            round_watch=RoundWatch(parts.ledger, self._config.round_seconds),
            transfer_progress=TransferProgress(lambda: parts.ledger.fields, is_quiet=self._config.log_json),
            disk_thread=self._disk_thread,
            read_threads=self._read_threads,
        )
        await self._serve_in_turn(lasting, here)

    async def _serve_in_turn(self, lasting: Lasting, here: tuple[str, ...]) -> None:
        parts, report = lasting.parts, lasting.report
        admin = AdminServer(
            self._config.metrics_host,
            self._config.metrics_port,
            metrics=parts.metrics.text,
            live=report.live_checks,
            ready=report.ready_checks,
            status=report.status,
            history=report.observer.history.columns,
            log=self._log_tail.select,
        )

        def announce() -> None:
            descriptor = parts.trust.descriptor
            announce_start(
                self._config,
                self._settled,
                announced=report.addresses,
                listening=here,
                metrics_url=admin.url,
                algorithm="" if descriptor is None or descriptor.algorithm == ALGORITHM_NONE else descriptor.algorithm,
                may_publish=descriptor is None or self._settled.identity.peer_id in descriptor.authorities,
                say=self._say,
            )
            self._manager.ready()

        is_first = True
        try:
            while True:
                role = await build_role(parts, report.addresses, lasting.network.transport.traffic.meters)
                try:
                    serving = Serving(lasting, role, self.leave_now)
                    await (serving.run(announce) if is_first else serving.run())
                except BaseExceptionGroup as group:
                    if not isinstance(first_cause(group), PartChangedError):
                        raise
                    logger.info("the owner changed this node's part in the rounds: its machines are built anew")
                finally:
                    role.close()
                is_first = False
        finally:
            admin.close()
