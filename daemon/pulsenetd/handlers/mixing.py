"""Effects for the training process of a trainer that mixes: what the machine ordered waits here until it is asked for.

The process asks one thing at a time and waits; the machine answers when it can. This desk matches the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pulsenet.errors import RemoteProtocolError
from pulsenet.local import mixing_protocol as local
from pulsenet.node.effects import Effect
from pulsenet.node.mixing.effects import Debt, JobPlan, MixReady, OpenRound, StartMixing, StoreState
from pulsenet.node.mixing.events import (
    AdoptFailed,
    DebtName,
    MixingAttached,
    MixingEvent,
    MixingLost,
    PartFailed,
    PartSlice,
    PartStored,
    ProbeMade,
    ResultWanted,
    RoundWanted,
    StateStored,
)
from pulsenet.outer.mixing.settings import Job
from pulsenet.tensors.params import ParameterTable
from pulsenetd.driver import Handler, Post

Answer = TypeVar("Answer")


class MixingDesk:
    """Between the machine of mixing and one training process. Everything runs in the event loop.

    Args:
        post: Queues an event for that machine.
        is_leading: Whether this node coordinates the run now.
    """

    def __init__(
        self,
        *,
        post: Callable[[MixingEvent], None],
        is_leading: Callable[[], bool],
    ) -> None:
        self._post = post
        self._is_leading = is_leading
        self._owner: object | None = None
        self.masters: ParameterTable | None = None
        """What the process trains, the newest that was told."""
        self._is_attached = False
        self._located: int | None = None
        """The round that the process said last that it opens next."""
        self._start: StartMixing | None = None
        self._wanted: int | None = None
        self._opened: OpenRound | None = None
        self._asked: set[tuple[int, Job]] = set()
        self._results: dict[tuple[int, Job], MixReady] = {}
        self._wants_state = False
        self._has_changed = asyncio.Event()

    def table(self) -> dict[type[Effect], Handler]:
        """Return the handlers by effect."""
        return {
            StartMixing: self._take_start,
            OpenRound: self._take_round,
            MixReady: self._take_result,
            StoreState: self._take_state_wish,
        }

    # The process comes and goes

    def open(self, owner: object) -> None:
        """Let a process take part; only one may at a time.

        Raises:
            RemoteProtocolError: ``busy``.
        """
        if self._owner is not None and self._owner is not owner:
            raise RemoteProtocolError("busy", "another training process mixes through this node")
        self._owner = owner

    def close(self, owner: object) -> None:
        """The process is gone; another one's closing changes nothing."""
        if self._owner is not owner:
            return
        self._owner = None
        self._forget()
        if self._is_attached:
            self._is_attached = False
            self._post(MixingLost())

    def _forget(self) -> None:
        self._located = self._start = self._wanted = self._opened = None
        self._asked.clear()
        self._results.clear()
        self._wants_state = False

    # What the machine orders

    async def _take_start(self, effect: StartMixing, post: Post) -> None:
        self._start = effect
        self._has_changed.set()

    async def _take_round(self, effect: OpenRound, post: Post) -> None:
        self._opened = effect
        self._has_changed.set()

    async def _take_result(self, effect: MixReady, post: Post) -> None:
        self._results[effect.round_index, effect.job] = effect
        self._has_changed.set()

    async def _take_state_wish(self, effect: StoreState, post: Post) -> None:
        self._wants_state = True

    # What the process asks

    async def locate(self, round_index: int | None, wait_seconds: float) -> local.Begin | None:
        """Return where to begin; ``None`` if that is not known in time. Asked again, it waits on."""
        assert self.masters is not None
        if self._located != round_index or not self._is_attached:
            self._forget()
            self._located, self._is_attached = round_index, True
            self._post(MixingAttached(round_index, self.masters.element_count))
        return await self._wait_start(wait_seconds)

    async def refuse_state(self, reason: str, wait_seconds: float) -> local.Begin | None:
        """Look for another state than the one offered.

        Raises:
            RemoteProtocolError: ``message-unexpected``: none was.
        """
        if self._start is None or not self._start.parts:
            raise RemoteProtocolError("message-unexpected", "no state was offered")
        self._start = None
        self._post(AdoptFailed(reason))
        return await self._wait_start(wait_seconds)

    async def _wait_start(self, wait_seconds: float) -> local.Begin | None:
        start = await self._wait(lambda: self._start, wait_seconds)
        if start is None:
            return None
        parts = tuple(local.MixBlob(part.blob_id, part.encoded_size_bytes) for part in start.parts)
        return local.Begin(start.round_index, parts, start.is_consensus)

    async def want_round(self, round_index: int, wait_seconds: float) -> local.RoundOpened | None:
        """Open a round; ``None`` if the machine did not in time. Asked again, it waits on.

        Raises:
            RemoteProtocolError: ``message-unexpected``: before the process said where it is.
        """
        if not self._is_attached:
            raise RemoteProtocolError("message-unexpected", "a round is wanted before the process said where it is")
        if self._wanted != round_index:
            self._wanted, self._opened = round_index, None
            self._asked.clear()
            self._results.clear()
            self._post(RoundWanted(round_index))
        opened = await self._wait(lambda: self._opened, wait_seconds)
        if opened is None:
            return None
        wants_state, self._wants_state = self._wants_state, False
        return local.RoundOpened(
            round_index=opened.round_index,
            is_listed=opened.is_listed,
            member_count=opened.member_count,
            subset=opened.subset,
            mix1=_as_plan(opened.mix1),
            mix2=_as_plan(opened.mix2),
            wants_iterate=wants_state,
            publishes=self._is_leading(),
            is_probed=opened.is_probed,
        )

    async def await_mix(self, round_index: int, job: Job, wait_seconds: float) -> local.MixDone | None:
        """Return the result of a job; ``None`` if it is not there in time. Asked again, it waits on."""
        if (round_index, job) not in self._asked:
            self._asked.add((round_index, job))
            self._post(ResultWanted(round_index, job))
        found = await self._wait(lambda: self._results.get((round_index, job)), wait_seconds)
        if found is None:
            return None
        slices = tuple(
            local.MixSlice(
                None if piece.mean is None else local.MixBlob(piece.mean.blob_id, piece.mean.encoded_size_bytes),
                piece.contributor_count,
            )
            for piece in found.slices
        )
        return local.MixDone(round_index, int(job), slices, found.reason)

    def store_part(self, message: local.StorePart) -> None:
        """Take the blobs of a job's vector, which are durable."""
        slices = tuple(_as_slice(part) for part in message.slices)
        debts = tuple(DebtName(name.round_index, as_job(name.job)) for name in message.debts)
        self._post(PartStored(message.round_index, as_job(message.job), slices, debts, message.mixed_root))

    def fail_part(self, message: local.FailPart) -> None:
        """Take why there is no vector."""
        self._post(PartFailed(message.round_index, as_job(message.job), message.reason))

    def store_probe(self, message: local.StoreProbe) -> None:
        """Take what the process predicts for the probe."""
        self._post(
            ProbeMade(message.round_index, message.batch, message.bins, message.answer, message.scores),
        )

    def store_iterate(self, message: local.StoreIterate) -> None:
        """Take z, for joiners."""
        self._post(StateStored(message.round_index, _as_slice(message.part)))

    async def _wait(self, read: Callable[[], Answer | None], wait_seconds: float) -> Answer | None:
        give_up_at = asyncio.get_running_loop().time() + wait_seconds
        while (found := read()) is None:
            self._has_changed.clear()
            try:
                async with asyncio.timeout_at(give_up_at):
                    await self._has_changed.wait()
            except TimeoutError:
                return read()
        return found


def as_job(number: int) -> Job:
    """Return the job of a number.

    Raises:
        RemoteProtocolError: ``schema``.
    """
    if number not in tuple(Job):
        raise RemoteProtocolError("schema", f"job {number}")
    return Job(number)


def _as_slice(part: local.PartBlob) -> PartSlice:
    return PartSlice(part.blob_id, part.encoded_size_bytes, part.element_count, part.norm_bits)


def _as_plan(plan: JobPlan) -> local.JobPlan:
    return local.JobPlan(plan.slice_count, tuple(_as_debt(debt) for debt in plan.debts[: local.DEBTS_MAX]))


def _as_debt(debt: Debt) -> local.DebtBlobs:
    return local.DebtBlobs(
        local.DebtName(debt.name.round_index, int(debt.name.job)),
        local.MixBlob(debt.own.blob_id, debt.own.encoded_size_bytes),
        local.MixBlob(debt.mean.blob_id, debt.mean.encoded_size_bytes),
        debt.subset,
    )
