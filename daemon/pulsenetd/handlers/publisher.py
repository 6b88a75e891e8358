"""Effects of a trainer node: snapshots in, versions out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from pulsenet.chain.records import Manifest
from pulsenet.local.protocol import PublishDone, PublishStatus
from pulsenet.node.effects import (
    Commit,
    DropSnapshot,
    Effect,
    EncodeSkip,
    EncodeSnapshot,
    RefuseSnapshot,
    StoreAnchor,
)
from pulsenet.node.events import Committed, EncodeFailed, Event, PatchEncoded, SnapshotOffered
from pulsenet.wire.schema import decode_value
from pulsenetd.driver import Handler, Post
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.local.server import SnapshotOffer
from pulsenetd.metrics import Metrics
from pulsenetd.storage.publishing import Publisher

T = TypeVar("T")

OFFERS_MAX = 8
"""Offers whose outcome is still to come; the machine holds two, the rest is on its way to be refused."""


class PublisherHandlers:
    """Executes the publisher's work and tells each training process what became of its snapshot.

    Args:
        publisher: The pipeline.
        threads: Where encoding and hashing run.
        post: Queues an event for the publisher's machine.
        monotonic: Monotonic seconds.
        find_refusal: Says at once why an offer can become no version, so that no weight of it is copied; the
            publisher's machine is asked. It is asked again by the machine itself when the offer comes to it.
        takes_turns: Whether the run has rounds. Then every trainer offers after each round and all but the authorities
            are no publishers, which is nothing to be counted.
    """

    def __init__(
        self,
        publisher: Publisher,
        threads: Executor,
        post: Callable[[Event], None],
        ledger: Ledger,
        metrics: Metrics,
        monotonic: Callable[[], float],
        *,
        find_refusal: Callable[[SnapshotOffered], str] = lambda snapshot: "",
        takes_turns: bool = False,
    ) -> None:
        self._publisher = publisher
        self._threads = threads
        self._post = post
        self._ledger = ledger
        self._metrics = metrics
        self._monotonic = monotonic
        self._find_refusal = find_refusal
        self._expected = frozenset({"not_publisher"} if takes_turns else ())
        self._outcomes: dict[int, asyncio.Future[PublishDone]] = {}
        self._encode_seconds: dict[int, float] = {}

    def table(self) -> dict[type[Effect], Handler]:
        """Return the handlers by effect."""
        return {
            EncodeSnapshot: self._encode_snapshot,
            StoreAnchor: self._store_anchor,
            EncodeSkip: self._encode_skip,
            Commit: self._commit,
            DropSnapshot: self._drop_snapshot,
            RefuseSnapshot: self._refuse_snapshot,
        }

    async def offer(self, offer: SnapshotOffer) -> asyncio.Future[PublishDone]:
        """Take a snapshot whose parts come in from now on; the future resolves with its outcome."""
        outcome: asyncio.Future[PublishDone] = asyncio.get_running_loop().create_future()
        offered = SnapshotOffered(offer.generation, offer.trainer_step, offer.parts.table.digest, offer.consensus)
        reason = self._find_refusal(offered)
        if reason or len(self._outcomes) >= OFFERS_MAX:
            offer.parts.close()
            outcome.set_result(_refused(reason or "busy"))
            if reason and reason not in self._expected:
                self._metrics.count("rejected", reason)
            return outcome
        self._outcomes[offer.generation] = outcome
        self._publisher.offer(offer.generation, offer.parts)
        self._post(offered)
        return outcome

    async def _encode_snapshot(self, effect: EncodeSnapshot, post: Post) -> None:
        started = self._monotonic()
        answer = await self._run(lambda: self._publisher.encode_snapshot(effect))
        if isinstance(answer, PatchEncoded):
            # A training process that is slow to hand over is no slow encoder.
            seconds = self._monotonic() - started - self._publisher.waited_seconds
            self._metrics.observe("encode", seconds)
            self._encode_seconds[effect.generation] = seconds
        else:
            self._resolve(effect.generation, _done(PublishStatus.FAILED, answer.reason))
        post(answer)

    async def _store_anchor(self, effect: StoreAnchor, post: Post) -> None:
        post(await self._run(lambda: self._publisher.store_anchor(effect)))

    async def _encode_skip(self, effect: EncodeSkip, post: Post) -> None:
        post(await self._run(lambda: self._publisher.encode_skip(effect)))

    async def _commit(self, effect: Commit, post: Post) -> None:
        started = self._monotonic()
        answer = await self._run(lambda: self._publisher.commit(effect))
        self._metrics.observe("commit", self._monotonic() - started)
        if effect.generation is not None:
            if isinstance(answer, Committed):
                self._note_committed(effect, effect.generation)
            elif isinstance(answer, EncodeFailed):
                self._resolve(effect.generation, _done(PublishStatus.FAILED, answer.reason))
        post(answer)

    async def _drop_snapshot(self, effect: DropSnapshot, post: Post) -> None:
        await self._run(lambda: self._publisher.drop(effect.generation))
        self._resolve(effect.generation, _done(PublishStatus.REPLACED, ""))

    async def _refuse_snapshot(self, effect: RefuseSnapshot, post: Post) -> None:
        await self._run(lambda: self._publisher.drop(effect.generation))
        self._resolve(effect.generation, _refused(effect.reason))

    def _note_committed(self, effect: Commit, generation: int) -> None:
        manifest = next(
            decode_value(Manifest, record.payload) for record in effect.records if record.type == Manifest.TYPE
        )
        if not effect.is_standby:
            self._metrics.count("published_versions")
        self._ledger.note_manifest(manifest, encode_seconds=self._encode_seconds[generation])
        self._resolve(
            generation,
            PublishDone(
                PublishStatus.STANDBY if effect.is_standby else PublishStatus.COMMITTED,
                effect.version,
                manifest.raw_size_bytes,
                manifest.encoded_size_bytes,
                manifest.changed_count,
                manifest.element_count,
                "",
            ),
        )

    def _resolve(self, generation: int, done: PublishDone) -> None:
        """Tell the outcome of a snapshot, which ends what is known of it."""
        self._encode_seconds.pop(generation, None)
        outcome = self._outcomes.pop(generation, None)
        if outcome is not None and not outcome.done():
            outcome.set_result(done)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _refused(reason: str) -> PublishDone:
    return _done(PublishStatus.NOT_PUBLISHER if reason == "not_publisher" else PublishStatus.FAILED, reason)


def _done(status: PublishStatus, reason: str) -> PublishDone:
    return PublishDone(status, None, 0, 0, 0, 0, reason)
