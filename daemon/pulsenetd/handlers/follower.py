"""Effects of an inferencer node: hops of the mirror, and hand-overs to engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from pulsenet.errors import StorageError
from pulsenet.ids import Digest, Version
from pulsenet.local.protocol import COPIED
from pulsenet.node.effects import ApplyHop, DropPreparation, Effect, HandToEngine, PrepareHop
from pulsenet.node.events import EngineApplied, EngineFailed, Event, HopApplied
from pulsenetd.driver import Handler, Post
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.local.server import EngineConfirmation
from pulsenetd.metrics import Metrics
from pulsenetd.storage.mirror import Mirror
from pulsenetd.storage.staging import StagedUpdate

T = TypeVar("T")


class FollowerHandlers:
    """Moves the mirror and serves engines from it.

    Engines ask, they are never called: a hand-over is due from the moment the machine orders it (or the mirror
    was restored), to every engine that states an older version or none.

    Args:
        mirror: The node's mirror.
        threads: Where decoding and hashing run.
        post: Queues an event for the follower's machine.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self,
        mirror: Mirror,
        threads: Executor,
        post: Callable[[Event], None],
        ledger: Ledger,
        metrics: Metrics,
        monotonic: Callable[[], float],
    ) -> None:
        self._mirror = mirror
        self._threads = threads
        self._post = post
        self._ledger = ledger
        self._metrics = metrics
        self._monotonic = monotonic
        self._due: Version | None = None if mirror.held is None else mirror.held.version
        self._order_count = 0
        self._is_answered = False
        """Whether an engine was heard to hold what is due."""
        self._due_changed = asyncio.Condition()

    def table(self) -> dict[type[Effect], Handler]:
        """Return the handlers by effect."""
        return {
            PrepareHop: self._prepare_hop,
            DropPreparation: self._drop_preparation,
            ApplyHop: self._apply_hop,
            HandToEngine: self._hand_to_engine,
        }

    async def _prepare_hop(self, effect: PrepareHop, post: Post) -> None:
        await self._run(lambda: self._mirror.prepare(effect.manifest))

    async def _drop_preparation(self, effect: DropPreparation, post: Post) -> None:
        await self._run(self._mirror.drop_preparation)

    async def _apply_hop(self, effect: ApplyHop, post: Post) -> None:
        manifest = effect.manifest
        fetch_seconds = self._ledger.seconds_since_seen(manifest.version.number, self._monotonic())
        answer = await self._run(lambda: self._mirror.apply_hop(manifest))
        self._ledger.last_update_failed = not isinstance(answer, HopApplied)
        if isinstance(answer, HopApplied):
            times = self._mirror.last_times
            assert times is not None
            self._metrics.observe("decode", times.decode_seconds)
            self._metrics.observe("apply", times.apply_seconds)
            self._metrics.observe("verify", times.verify_seconds)
            if fetch_seconds is not None:
                self._metrics.observe("fetch", fetch_seconds)
            self._ledger.note_manifest(
                manifest,
                fetch_seconds=fetch_seconds,
                decode_seconds=times.decode_seconds,
                apply_seconds=times.apply_seconds,
                verify_seconds=times.verify_seconds,
            )
        post(answer)

    async def _hand_to_engine(self, effect: HandToEngine, post: Post) -> None:
        async with self._due_changed:
            self._due = effect.version
            self._is_answered = False
            self._order_count += 1
            self._due_changed.notify_all()

    async def serve_engine(
        self, engine_version: Version | None, engine_root: Digest | None, wait_seconds: float
    ) -> StagedUpdate | None:
        """Wait for a version the engine does not hold, and stage it."""

        if self._is_foreign(engine_version, engine_root):
            engine_version = engine_root = None
        self._hear(engine_version)

        def is_due() -> bool:
            return self._due is not None and engine_version != self._due and not _is_ahead(engine_version, self._due)

        deadline = asyncio.get_running_loop().time() + wait_seconds
        while await self._wait_until(is_due, deadline):
            order_count = self._order_count
            staged = await self._stage(engine_version, engine_root)
            if staged is not None:
                return staged
            # An engine asks again at once: what cannot be staged now is tried at the next order, not in a circle.
            if not await self._wait_until(partial(self._is_new_order, order_count), deadline):
                break
        return None

    def _is_new_order(self, order_count: int) -> bool:
        return self._order_count != order_count

    async def _wait_until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait for orders of the machine until a condition holds; False when the time is up before."""
        try:
            async with asyncio.timeout_at(deadline), self._due_changed:
                await self._due_changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def _stage(self, engine_version: Version | None, engine_root: Digest | None) -> StagedUpdate | None:
        try:
            return await self._run(lambda: self._mirror.stage(engine_version, engine_root))
        except StorageError as error:
            self._post(EngineFailed(engine_version, error.reason))
            return None

    def _is_foreign(self, engine_version: Version | None, engine_root: Digest | None) -> bool:
        """Say whether an engine names a version that nobody here handed over: it served another run before."""
        held = self._mirror.held
        if held is None or engine_version is None or engine_version < held.version:
            return False
        return engine_version > held.version or engine_root not in (None, held.root)

    def _hear(self, engine_version: Version | None) -> None:
        """Take an engine that outlived the daemon at its word: it confirmed this version to the one before."""
        if self._is_answered or engine_version is None or self._due is None or engine_version < self._due:
            return
        if self._mirror.held is None:
            return  # nobody here can vouch for what it says it holds
        self._is_answered = True
        self._ledger.note_engine(engine_version.number)
        self._post(EngineApplied(engine_version))

    async def confirm(self, confirmation: EngineConfirmation) -> None:
        """Take what an engine says of its hand-over."""
        if confirmation.reason == COPIED:
            return
        holds_it = confirmation.ok and confirmation.held == confirmation.version
        self._ledger.last_update_failed = not holds_it
        if holds_it:
            self._is_answered = self._due is not None and confirmation.version >= self._due
            self._ledger.note_engine(confirmation.version.number)
            self._post(EngineApplied(confirmation.version))
        else:
            held = confirmation.held
            if held is not None and held > confirmation.version:
                held = None  # never handed to it: its weights are unknown
            reason = confirmation.reason or f"it confirmed {confirmation.version} and says it holds {confirmation.held}"
            self._post(EngineFailed(held, reason))

    def lose_engine(self, reason: str) -> None:
        """Take note that an engine no longer holds what it confirmed: it was started again, or lost its weights."""
        self._is_answered = False
        self._ledger.last_update_failed = True
        self._post(EngineFailed(None, reason))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _is_ahead(engine_version: Version | None, due: Version) -> bool:
    """An engine may have been handed a mirror that had moved past the ordered version."""
    return engine_version is not None and engine_version > due
