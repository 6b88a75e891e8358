"""Rollouts on their way from an inferencer to the training process.

An inferencer signs each batch and sends it to a publisher until one takes it (at least once); a trainer takes
each batch once, checks it and queues it for the training process. Both queues are bounded and drop the oldest,
because old samples are worth least.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Final

from pulsenet import limits
from pulsenet.chain import rules
from pulsenet.chain.records import RolloutBatch
from pulsenet.chain.rollouts import unpack_rollouts
from pulsenet.chain.signing import Sign, decode_signed, encode_signed, seal
from pulsenet.chain.trust import Trust
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, TrustError, UnavailableError
from pulsenet.ids import PeerId, RunId
from pulsenet.local import protocol
from pulsenet.local.protocol import RolloutsTaken, SignedBatch, SubmitRollouts
from pulsenet.wire.messages import PushReply, PushRollouts
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics

BATCH_IDS_MAX: Final = 16_384
"""Batches remembered, so that one sent twice counts once."""

SEND_SECONDS_MAX: Final = 30.0
ADMITTED_SECONDS: Final = 600.0
"""An unlisted inferencer keeps its place this long after its last batch."""

BATCHES_PER_SECOND: Final = 20.0
BATCH_BURST: Final = 64.0
"""Batches of one key: refilled so fast, and so many at once."""

PASSING_REASONS: Final = frozenset({"rate", "queue", "not_publisher"})
"""Refusals that say nothing against the batch: it is sent again, perhaps to another trainer."""


class RolloutOutbox:
    """The inferencer's side.

    Args:
        run_id: The run, written into each batch.
        peer_id: This node's key.
        sign: Signs with it.
        draw_bytes: Returns so many random bytes, for batch ids.
    """

    def __init__(
        self, run_id: RunId, peer_id: PeerId, sign: Sign, draw_bytes: Callable[[int], bytes], metrics: Metrics
    ) -> None:
        self._run_id = run_id
        self._peer_id = peer_id
        self._sign = sign
        self._draw_bytes = draw_bytes
        self._metrics = metrics
        self._queue: deque[bytes] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    async def take(self, submitted: SubmitRollouts) -> RolloutsTaken:
        """Sign a batch and queue it."""
        batch = RolloutBatch(
            run_id=self._run_id,
            sequence=int.from_bytes(self._draw_bytes(7), "big"),
            version_first=submitted.version_first,
            version_last=submitted.version_last,
            sample_count=submitted.sample_count,
            part_names=submitted.part_names,
            logprob_bits=submitted.logprob_bits,
            body=submitted.body,
            metadata=submitted.metadata,
        )
        try:
            rules.check_record(batch)
            unpack_rollouts(batch)
            record = encode_signed(seal(batch, self._sign, self._peer_id))
        except (RemoteProtocolError, LocalProtocolError) as error:
            self._metrics.rollouts.labels("malformed").inc()
            return RolloutsTaken(False, str(error))
        if len(self._queue) >= limits.ROLLOUT_QUEUE_BATCHES_MAX:
            self._queue.popleft()
            self._metrics.rollouts.labels("dropped").inc()
        self._queue.append(record)
        self._filled.set()
        return RolloutsTaken(True, "")

    async def run(
        self,
        choose_target: Callable[[], PeerId | None],
        send: Callable[[PeerId, PushRollouts], Awaitable[PushReply]],
    ) -> None:
        """Send what is queued, oldest first, until cancelled.

        Args:
            choose_target: Returns a connected publisher, or ``None`` while there is none.
            send: Sends one batch and returns the answer.
        """
        pause_seconds = limits.RETRY_SECONDS_MIN
        while True:
            await self._filled.wait()
            if not self._queue:
                self._filled.clear()
                continue
            record = self._queue[0]
            target = choose_target()
            answer = None if target is None else await _try_send(send, target, record)
            if answer is None or (not answer.accepted and answer.reason in PASSING_REASONS):
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, limits.RETRY_SECONDS_MAX)
                continue
            pause_seconds = limits.RETRY_SECONDS_MIN
            # A full queue may have dropped this batch while it was under way.
            if self._queue and self._queue[0] is record:
                self._queue.popleft()
            self._metrics.rollouts.labels("sent" if answer.accepted else "refused").inc()
            if not answer.accepted:
                logger.warning("a trainer refused a rollout batch: %s", answer.reason)


async def _try_send(
    send: Callable[[PeerId, PushRollouts], Awaitable[PushReply]], target: PeerId, record: bytes
) -> PushReply | None:
    try:
        return await send(target, PushRollouts(record))
    except (UnavailableError, RemoteProtocolError) as error:
        logger.debug("a rollout batch was not delivered: %s", error)
        return None


class RolloutInbox:
    """The trainer's side.

    Args:
        trust: Says whose rollouts count.
        monotonic: Monotonic seconds, for rates.
    """

    def __init__(self, trust: Trust, metrics: Metrics, monotonic: Callable[[], float]) -> None:
        self._trust = trust
        self._metrics = metrics
        self._monotonic = monotonic
        self._seen: OrderedDict[tuple[PeerId, int], None] = OrderedDict()
        self._admitted: dict[PeerId, float] = {}
        self._budgets: dict[PeerId, tuple[float, float]] = {}
        self._queue: deque[SignedBatch] = deque()
        self._arrived = asyncio.Condition()

    async def take(self, record: bytes) -> str:
        """Check and queue a batch; return the empty string, or why it was refused."""
        outcome, reason = self._judge(record)
        self._metrics.rollouts.labels(outcome).inc()
        if reason:
            self._metrics.count("rejected", reason)
        self._metrics.set("rollout_queue_batches", len(self._queue))
        async with self._arrived:
            self._arrived.notify_all()
        return reason

    async def give(self, count_max: int, wait_seconds: float) -> tuple[SignedBatch, ...]:
        """Return up to so many batches, oldest first, waiting for the first."""
        try:
            async with asyncio.timeout(wait_seconds), self._arrived:
                await self._arrived.wait_for(lambda: bool(self._queue))
        except TimeoutError:
            return ()
        taken: list[SignedBatch] = []
        size_bytes = 0
        while self._queue and len(taken) < count_max:
            size_bytes += len(self._queue[0].batch)
            if taken and size_bytes > protocol.ROLLOUTS_REPLY_SIZE_BYTES_MAX:
                break
            taken.append(self._queue.popleft())
        self._metrics.set("rollout_queue_batches", len(self._queue))
        return tuple(taken)

    def _judge(self, record: bytes) -> tuple[str, str]:
        """Queue a batch that counts; return the outcome's label, and the reason of a refusal."""
        now = self._monotonic()
        self._admitted = {key: at for key, at in self._admitted.items() if now - at < ADMITTED_SECONDS}
        try:
            signed = decode_signed(record)
            signer = signed.signers[0]
            batch = self._trust.accept_rollouts(signed, frozenset(self._admitted))
            if (signer, batch.sequence) in self._seen:
                return "duplicate", ""
            if not self._spend(signer, now):
                return "refused", "rate"
            unpack_rollouts(batch)
        except (RemoteProtocolError, TrustError) as error:
            return "refused", error.code
        descriptor = self._trust.descriptor
        if descriptor is not None and signer not in descriptor.inferencers:
            self._admitted[signer] = now
        self._seen[signer, batch.sequence] = None
        if len(self._seen) > BATCH_IDS_MAX:
            self._seen.popitem(last=False)
        if len(self._queue) >= limits.ROLLOUT_QUEUE_BATCHES_MAX:
            self._queue.popleft()
            self._metrics.rollouts.labels("dropped").inc()
        self._queue.append(SignedBatch(signer, signed.payload))
        return "taken", ""

    def _spend(self, signer: PeerId, now: float) -> bool:
        """Take one batch from the key's budget. Only keys that count get here, and full budgets are forgotten."""
        full_seconds = BATCH_BURST / BATCHES_PER_SECOND
        self._budgets = {key: spent for key, spent in self._budgets.items() if now - spent[1] < full_seconds}
        budget, at = self._budgets.get(signer, (BATCH_BURST, now))
        budget = min(BATCH_BURST, budget + (now - at) * BATCHES_PER_SECOND)
        if budget < 1:
            return False
        self._budgets[signer] = (budget - 1, now)
        return True
