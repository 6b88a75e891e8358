"""What this node answers to peers: the store and the machines, as the serving rule sees them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Final

from pulsenet.chain.records import EpochRecord
from pulsenet.chain.signing import decode_signed, encode_signed
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.events import ForkProofSeen, HaveSeen, HeadSeen
from pulsenet.node.holdings import Given
from pulsenet.node.mesh import Mesh
from pulsenet.node.mixing.respond import MIXING_REQUESTS, MixingRequest
from pulsenet.node.respond import Push, respond
from pulsenet.node.rounds_respond import ROUND_REQUESTS
from pulsenet.node.verdicts import RoundPush
from pulsenet.wire.messages import (
    ExchangeHave,
    GetAggregates,
    GetChunkList,
    GetChunks,
    GetHoldings,
    GetRecords,
    GetRounds,
    GetTasks,
    Message,
    PeerAddress,
    PushForkProof,
    PushHead,
    PushReply,
    PushRollouts,
    Refusal,
    TasksReply,
)
from pulsenet.wire.schema import decode_value
from pulsenetd.driver import Driver
from pulsenetd.handlers.store import LEASE_SECONDS
from pulsenetd.storage.store import Store

READING: Final = (GetChunks, GetChunkList, GetRecords)
"""Requests that read much from the disk, which the loop does not wait for."""

TOLD_MAX: Final = 64
"""Blobs whose last answer about their chunks is kept; one has 128 KiB at most."""

TELL_PAUSE_RATIO: Final = 20.0
"""An answer is given again for so many times as long as it took to find."""

TELL_SECONDS_MAX: Final = 0.2
TELL_RETRY_MS: Final = 1_000
"""How long a question waits while another is looked at; then it is sent away for a while."""


class NodeView:
    """Implements :class:`pulsenet.node.respond.StoreView`. May be asked from any thread.

    Args:
        descriptors: Returns the encoded revisions held, from revision 0, in order.
        monotonic: Monotonic seconds, for leases.
    """

    def __init__(
        self,
        store: Store,
        trust: Trust,
        mesh: Mesh,
        descriptors: Callable[[], Sequence[bytes]],
        monotonic: Callable[[], float],
    ) -> None:
        self._store = store
        self._trust = trust
        self._mesh = mesh
        self._descriptors = descriptors
        self._monotonic = monotonic
        self._given = Given()
        self._given_mutex = threading.Lock()
        self._told: dict[Digest, tuple[Message, float]] = {}
        """What was answered about a blob's chunks, and until when that is answered again."""
        self._telling = threading.Lock()

    def newest_head(self) -> bytes | None:
        """Return the newest accepted head."""
        signed = self._trust.head_record
        return None if signed is None else encode_signed(signed)

    def record(self, digest: Digest) -> bytes | None:
        """Return a stored record."""
        return self._store.record(digest)

    def descriptors(self, revision_min: int) -> Iterable[bytes]:
        """Return the descriptor revisions from ``revision_min``."""
        return self._descriptors()[revision_min:]

    def epochs(self, epoch_min: int) -> Iterable[bytes]:
        """Return the epoch records this node believes, from ``epoch_min``."""
        for signed in self._trust.epoch_records:
            if decode_value(EpochRecord, signed.payload).epoch >= epoch_min:
                yield encode_signed(signed)

    def chunk_list(self, blob_id: Digest) -> bytes | None:
        """Return a blob's chunk list and keep the blob while it is being read, unless it was released."""
        data = self._store.chunk_list(blob_id)
        if data is not None:
            self._store.lease_kept(blob_id, self._monotonic() + LEASE_SECONDS)
        return data

    def chunk_list_slice(self, blob_id: Digest, offset: int, size_bytes: int) -> tuple[int, bytes] | None:
        """Return the size of a blob's chunk list and a slice of it, and keep the blob, as :meth:`chunk_list` does."""
        found = self._store.chunk_list_slice(blob_id, offset, size_bytes)
        if found is not None:
            self._store.lease_kept(blob_id, self._monotonic() + LEASE_SECONDS)
        return found

    def holdings(self, blob_id: Digest) -> Message:
        """Return which chunks of a blob are here. Looking at a million takes half a second: a reply is given again
        for as long as keeps that work to a small share of the time."""
        begun = self._monotonic()
        told = self._told.get(blob_id)
        if told is not None and begun < told[1]:
            return told[0]
        if not self._telling.acquire(timeout=TELL_SECONDS_MAX):
            return Refusal("busy", "the chunks of another blob are being looked at", TELL_RETRY_MS)
        try:
            (reply,) = respond(GetHoldings(blob_id), self)
            ended = self._monotonic()
            self._told.pop(blob_id, None)
            self._told[blob_id] = reply, ended + TELL_PAUSE_RATIO * (ended - begun)
            if len(self._told) > TOLD_MAX:
                del self._told[next(iter(self._told))]
        finally:
            self._telling.release()
        return reply

    def chunk(self, digest: Digest) -> bytes | None:
        """Return a verified chunk and keep its blobs while they are being read."""
        data = self._store.chunk(digest)
        if data is not None:
            self._store.lease(digest, self._monotonic() + LEASE_SECONDS)
            with self._given_mutex:
                self._given.note(digest)
        return data

    def has_chunk(self, digest: Digest) -> bool:
        """Say whether a verified chunk is here."""
        return self._store.has_chunk(digest)

    def was_given(self, digest: Digest) -> bool:
        """Say whether a chunk was served to somebody lately."""
        return digest in self._given

    def have(self) -> bytes | None:
        """Return this node's own have record."""
        return self._mesh.own_have

    def neighbours(self) -> Sequence[PeerAddress]:
        """Return neighbours a newcomer may dial."""
        return self._mesh.neighbour_addresses()

    def push_verdict(self, push: Push) -> str:
        """Return what became of a pushed item, after the machines saw it."""
        match push:
            case PushHead() | PushForkProof():
                return self._mesh.push_verdict(push)
            case PushRollouts():
                return "not_publisher"


class Responder:
    """Answers one request: shows pushed news to the machines first, reads the disk off the loop.

    Args:
        take_rollouts: Judges a pushed batch; ``None`` on a node that wants none.
        answer_round: Answers what peers ask and push about rounds.
        give_tasks: Leases tasks to a peer; ``None`` on a node that has none.
        threads: Where the disk is read.
    """

    def __init__(
        self,
        view: NodeView,
        driver: Driver,
        threads: Executor,
        take_rollouts: Callable[[bytes], Awaitable[str]] | None,
        answer_round: Callable[[PeerId, RoundPush | GetRounds | GetAggregates | MixingRequest], Awaitable[Message]],
        give_tasks: Callable[[PeerId, GetTasks], Awaitable[Message]] | None = None,
    ) -> None:
        self._view = view
        self._driver = driver
        self._threads = threads
        self._take_rollouts = take_rollouts
        self._answer_round = answer_round
        self._give_tasks = give_tasks

    async def answer(self, peer_id: PeerId, request: Message) -> list[Message]:
        """Return the replies to a peer's request."""
        match request:
            case PushHead(head):
                await self._driver.show(HeadSeen(head, peer_id))
            case PushForkProof(first, second):
                await self._driver.show(ForkProofSeen(first, second, peer_id))
            case ExchangeHave(have):
                _check_sender(have, peer_id)
                await self._driver.show(HaveSeen(have, peer_id))
            case PushRollouts(batch) if self._take_rollouts is not None:
                reason = await self._take_rollouts(batch)
                return [PushReply(accepted=not reason, reason=reason)]
            case GetTasks():
                return [TasksReply(()) if self._give_tasks is None else await self._give_tasks(peer_id, request)]
            case _ if isinstance(request, ROUND_REQUESTS):
                return [await self._answer_round(peer_id, request)]
            case _ if isinstance(request, MIXING_REQUESTS):
                return [await self._answer_round(peer_id, request)]
        loop = asyncio.get_running_loop()
        if isinstance(request, GetHoldings):
            return [await loop.run_in_executor(self._threads, self._view.holdings, request.blob_id)]
        if isinstance(request, READING):
            return await loop.run_in_executor(self._threads, respond, request, self._view)
        return respond(request, self._view)


def _check_sender(have: bytes, peer_id: PeerId) -> None:
    """A peer tells its own have record in an exchange; those of others travel through the directory."""
    if decode_signed(have).signers != (peer_id,):
        raise RemoteProtocolError("schema", "a have record of somebody else")
