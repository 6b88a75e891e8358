"""The session side of a run's outer algorithm: what a training process says on its connection, and what it is told.

Rounds (:mod:`pulsenetd.local.rounds`) and mixing (:mod:`pulsenetd.local.mixing`) begin, move blobs and end alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.local import rounds_protocol as rounds
from pulsenet.local.framing import Frame
from pulsenet.local.mixing_protocol import MixingOpened, OpenMixing
from pulsenet.local.protocol import LocalMessage
from pulsenet.outer.floats import fp32_from_bits
from pulsenet.outer.inner_state import compute_slots_size_max
from pulsenet.tensors.params import ParameterTable
from pulsenetd.handlers.mixing import MixingDesk
from pulsenetd.handlers.training import TrainingDesk
from pulsenetd.local.blobs import BlobTraffic
from pulsenetd.local.link import Link
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.storage.round_blobs import RoundBlobs


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterHook:
    """What a node offers to the training process that takes part through it."""

    desk: TrainingDesk | MixingDesk
    """Where what the machines order waits for the process."""
    settings: Callable[[], Awaitable[rounds.RoundSettingsReply]]
    """What the run says, or a refusal: ``no-rounds``."""
    check_masters: Callable[[ParameterTable, Digest], Awaitable[None]]
    """Refuse masters (``table``) or arithmetic (``self-test``) that the run does not have, and remember them."""
    make_blobs: Callable[[], RoundBlobs]
    threads: Executor
    """Where blobs are written and read."""
    metrics: Metrics
    on_damage: Callable[[], None] = lambda: None
    """Told that a blob that the process wants lost chunks."""


Hook = TypeVar("Hook", bound=OuterHook)
Reply = TypeVar("Reply", bound=LocalMessage)


class OuterSession(ABC, Generic[Hook]):
    """One connection's part; made for every connection, used by those that speak of it.

    Args:
        hook: The node's offer.
        link: The connection.
        decode_table: Decodes a parameter table off the event loop.
    """

    opening: ClassVar[type[rounds.OpenRounds | OpenMixing]]
    """What begins it."""
    opened: ClassVar[rounds.RoundsOpened | MixingOpened]
    foreign: ClassVar[tuple[type[Any], ...]]
    """Messages of the other kind of algorithm."""
    refusal: ClassVar[tuple[str, str]]
    """Code and text for whoever sends one."""

    def __init__(
        self,
        hook: Hook,
        link: Link,
        decode_table: Callable[[bytes], Awaitable[ParameterTable]],
    ) -> None:
        self._hook = hook
        self._link = link
        self._decode_table = decode_table
        self._traffic: BlobTraffic | None = None
        """Blobs of this connection, once it takes part."""

    async def answer(self, frame: Frame) -> None:
        """Answer one message of :mod:`pulsenet.local.rounds_protocol` or :mod:`pulsenet.local.mixing_protocol`.

        Raises:
            RemoteProtocolError: It is refused; the connection closes.
        """
        message, traffic = frame.message, self._traffic
        if isinstance(message, self.foreign):
            raise RemoteProtocolError(*self.refusal)
        if isinstance(message, rounds.GetRoundSettings):
            await self._link.send(await self._hook.settings())
        elif isinstance(message, self.opening):
            await self._open(message)
        elif traffic is None:
            raise RemoteProtocolError("message-unexpected", f"{type(message).__name__} before {self.opening.__name__}")
        elif isinstance(message, rounds.PutBlobPart):
            await traffic.put(message, frame)
        elif isinstance(message, rounds.FetchBlobPart):
            await traffic.fetch(message)
        else:
            reply = await self._take(message, traffic)
            await self._link.send(rounds.Waiting() if reply is None else reply)

    async def close(self) -> None:
        """The connection is gone: so is the process, as far as its part goes."""
        traffic, self._traffic = self._traffic, None
        if traffic is None:
            return
        self._hook.desk.close(self)
        await traffic.close()
        logger.info("the training process takes part no more")

    async def _open(self, message: rounds.OpenRounds | OpenMixing) -> None:
        hook = self._hook
        settings = await hook.settings()
        table = await self._decode_table(message.table)
        hook.desk.open(self)
        # From here on, closing the connection gives the place up again.
        self._traffic = BlobTraffic(
            self._link,
            hook.make_blobs(),
            hook.threads,
            hook.metrics,
            size_bytes_max=_compute_blob_size_bytes_max(table, settings.algorithm),
            on_damage=hook.on_damage,
        )
        await hook.check_masters(table, message.self_test)
        logger.info("a training process takes part")
        await self._link.send(self.opened)

    @abstractmethod
    async def _take(self, message: LocalMessage, traffic: BlobTraffic) -> LocalMessage | None:
        """Take a message of a process that takes part; return the reply if it is more than that it was taken."""

    async def _wait(self, ask: Callable[[float], Coroutine[Any, Any, Reply | None]], timeout_ms: int) -> LocalMessage:
        """Return what the process waits for; it asks again if that does not come in time."""
        found = await self._link.wait_for(ask, timeout_ms)
        return rounds.NoOrder() if found is None else found


def read_real(bits: int) -> float:
    """Return the FP32 value of bits that a process told, finite and not negative.

    Raises:
        RemoteProtocolError: ``schema``.
    """
    value = float(fp32_from_bits(bits)) if bits < 1 << 32 else -1.0
    if not 0.0 <= value < math.inf:
        raise RemoteProtocolError("schema", f"a size of bits {bits:#x}")
    return value


def _compute_blob_size_bytes_max(table: ParameterTable, algorithm: str) -> int:
    """Return the most bytes that a vector, a contribution or a state anchor of these masters may have.

    An anchor holds two FP32 values an element, under ``ddp`` theta and whatever the inner optimizer keeps; a
    contribution a position and a value, grown by no more than a patch.
    """
    values = 3 * 4 * table.element_count
    if algorithm == "ddp":
        values = sum(compute_slots_size_max(spec.element_count) for spec in table.tensors) + 4 * table.element_count
    return values + 64 * len(table.tensors) + limits.CHUNK_SIZE_BYTES_MAX
