"""Turns events into effects and effects into events: the only place where core machines meet the world.

One queue feeds all machines of a node, so a machine is never called twice at once. Effects of a call are
executed by ``EXECUTION_ORDER``: what persists is awaited before the next effect starts; everything else
runs as a task and comes back as an event to the machine that ordered it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pulsenet.errors import StorageError, UnavailableError
from pulsenet.node.effects import EXECUTION_ORDER, Effect, SetTimer, ShowToMachines
from pulsenet.node.events import Event, StoreFailed, TimerFired
from pulsenet.node.machine import Machine

PERSIST_RANK: Final = 0

Post = Callable[[Event], None]
"""Queues an event; given to a handler, it addresses the machine that ordered the effect."""

Handler = Callable[[Any, Post], Coroutine[Any, Any, None]]
"""Executes one kind of effect and posts what came of it."""

Turn = Callable[[float, int], list[Effect]]
"""A machine's own method, called with the monotonic time and the Unix time in milliseconds."""


@dataclass(slots=True)
class _Seat:
    """A machine and its one timer."""

    machine: Machine
    timer: asyncio.TimerHandle | None = None


class Driver:
    """Drives a node's machines until it is cancelled.

    The queue has no bound of its own: what is in it answers requests and work the machines ordered, whose
    number they bound, or came from peers, whose number the transport bounds.

    Args:
        machines: Name (for logs) to machine.
        handlers: How each kind of effect is executed; a kind that is missing is a programming error.
        monotonic: Monotonic time in seconds.
        wall_ms: Unix time in milliseconds, corrected by the node's clock offset.
    """

    def __init__(
        self,
        machines: Mapping[str, Machine],
        handlers: Mapping[type[Effect], Handler],
        *,
        monotonic: Callable[[], float],
        wall_ms: Callable[[], int],
    ) -> None:
        self._seats = {name: _Seat(machine) for name, machine in machines.items()}
        self._handlers = handlers
        self._monotonic = monotonic
        self._wall_ms = wall_ms
        self._queue: asyncio.Queue[tuple[_Seat | None, Event | Turn, asyncio.Future[None] | None]] = asyncio.Queue()
        self._is_over = False

    def post(self, event: Event) -> None:
        """Queue an event for every machine: one that answers no order."""
        self._queue.put_nowait((None, event, None))

    def post_to(self, name: str, event: Event) -> None:
        """Queue an event for one machine."""
        self._queue.put_nowait((self._seats[name], event, None))

    def call(self, name: str, turn: Turn) -> None:
        """Queue a call of another method of a machine than ``handle``."""
        self._queue.put_nowait((self._seats[name], turn, None))

    async def show(self, event: Event) -> None:
        """Queue an event for every machine and wait until all have taken it in and its effects have started.

        Raises:
            UnavailableError: the driver ends before that, or has ended.
        """
        await self._take_in(None, event)

    async def settle(self, name: str) -> None:
        """Wait until a machine has taken in what was queued for it so far, and what it ordered has begun.

        Raises:
            UnavailableError: as :meth:`show`.
        """
        await self._take_in(self._seats[name], lambda now, now_ms: [])
        # The last turn's handlers start when the loop turns.
        await asyncio.sleep(0)

    async def _take_in(self, seat: _Seat | None, event: Event | Turn) -> None:
        taken = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((seat, event, taken))
        if self._is_over:
            self._end()
        await taken

    async def run(self) -> None:
        """Drive until cancelled; an error nobody expected ends it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for seat in self._seats.values():
                    await self._turn(seat, TimerFired(), tasks)
                while True:
                    addressee, event, taken = await self._queue.get()
                    for seat in [addressee] if addressee is not None else list(self._seats.values()):
                        await self._turn(seat, event, tasks)
                    if taken is not None and not taken.done():
                        taken.set_result(None)
        finally:
            self._end()

    def _end(self) -> None:
        """Wake nobody any more, and let nobody wait for machines that are gone."""
        self._is_over = True
        for seat in self._seats.values():
            if seat.timer is not None:
                seat.timer.cancel()
        while not self._queue.empty():
            _, _, taken = self._queue.get_nowait()
            if taken is not None and not taken.done():
                taken.set_exception(UnavailableError("the machines of this node are gone"))

    async def _turn(self, seat: _Seat, event: Event | Turn, tasks: asyncio.TaskGroup) -> None:
        now, now_ms = self._monotonic(), self._wall_ms()
        effects = event(now, now_ms) if callable(event) else seat.machine.handle(event, now, now_ms)

        def post(answer: Event) -> None:
            self._queue.put_nowait((seat, answer, None))

        for effect in sorted(effects, key=lambda effect: EXECUTION_ORDER[type(effect)]):
            if isinstance(effect, SetTimer):
                self._set_timer(seat, effect.at)
                continue
            if isinstance(effect, ShowToMachines):
                self.post(effect.event)
                continue
            handler = self._handlers[type(effect)]
            if EXECUTION_ORDER[type(effect)] == PERSIST_RANK:
                try:
                    await handler(effect, post)
                except StorageError as error:
                    # Nothing is announced that is not stored: the rest of this call is given up.
                    post(StoreFailed(None, error.reason))
                    return
            else:
                tasks.create_task(handler(effect, post))

    def _set_timer(self, seat: _Seat, at: float) -> None:
        if seat.timer is not None:
            seat.timer.cancel()
        delay = max(0.0, at - self._monotonic())
        seat.timer = asyncio.get_running_loop().call_later(delay, self._queue.put_nowait, (seat, TimerFired(), None))
