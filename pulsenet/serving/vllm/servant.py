"""Carries out the node's orders on one rank and answers each in a file; never raises.

Orders that only read (comparing with a checkpoint, staging, reading back) run in a thread of their own while the
engine goes on stepping. Those that write run in the calling thread, in which vLLM does not step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pulsenet.errors import (
    LocalProtocolError,
    PulsenetError,
    StorageError,
    StructureError,
)
from pulsenet.serving.engine import name_failure
from pulsenet.serving.vllm.attest import Checkpoint
from pulsenet.serving.vllm.exchange import (
    MEMORY_NAME,
    TABLE_NAME,
    Answer,
    Order,
    Outcome,
    State,
    UpdateInfo,
    check_private,
    read_answer,
    write_answer,
)
from pulsenet.serving.vllm.map import EngineMap
from pulsenet.serving.vllm.rank import RankWeights
from pulsenet.tensors.params import ParameterTable

DRAWING_ORDERS: Final = frozenset({Order.ATTACH, Order.SURVEY, Order.LOOK})
READING_ORDERS: Final = frozenset({*DRAWING_ORDERS, Order.STAGE, Order.READ_BACK, Order.COMPARE})

Work = Callable[[], None]


class RankServant:
    """One rank's hands.

    Args:
        weights: What the orders are about.
        rank: Of this worker, from 0.
        world_size: Ranks of the engine.
        boot: Drawn when the worker started.
        monotonic: Monotonic seconds.
        find_obstacle: Returns why this engine cannot be patched, or nothing.
        find_checkpoint: Returns the directory that the engine was started from.
        guard: Entered around all work on tensors.
        synchronize: Waits until the device has done what it was told.
    """

    def __init__(
        self,
        weights: RankWeights,
        *,
        rank: int,
        world_size: int,
        boot: str,
        monotonic: Callable[[], float],
        find_obstacle: Callable[[], str],
        find_checkpoint: Callable[[], Path],
        guard: Callable[[], AbstractContextManager[Any]],
        synchronize: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._monotonic = monotonic
        self._find_obstacle = find_obstacle
        self._find_checkpoint = find_checkpoint
        self._guard = guard
        self._synchronize = synchronize
        self._mutex = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pulsenet-stage")
        self._running: Future[None] | None = None
        self._is_open = False
        self.rank = rank
        self.world_size = world_size
        self.boot = boot
        self.directory: Path | None = None
        """The node's private directory, from the order ATTACH."""
        self.engine_url = ""
        self.changed_at = monotonic()
        """When the last order changed the weights; a watchdog's deadline starts here."""
        self.answer: Answer | None = None
        """The newest answer."""

    @property
    def state(self) -> State:
        """How this rank's weights are."""
        return self._weights.state

    def note_open(self, is_open: bool) -> None:
        """Take note of whether vLLM holds an update open. The end of one that was committed is the order FINISH."""
        self.wait()
        self._is_open = is_open
        if self.answer is None or self.directory is None:
            return
        if not is_open and self.state is State.COMMITTED:
            order = UpdateInfo(Order.FINISH, self.answer.transaction, str(self.directory))
            self._carry_out(order, self._monotonic(), self._weights.finish)
        else:
            self._publish(replace(self.answer, is_open=is_open))

    def take(self, raw: Mapping[str, Any]) -> None:
        """Carry out an order, or start to."""
        started_at = self._monotonic()
        try:
            order = UpdateInfo.from_json(raw)
            directory = Path(order.directory)
            check_private(directory)
        except PulsenetError as error:
            # Without a directory there is nowhere to answer; the node hears silence and says so.
            print(f"pulsenet: an order cannot be answered: {error}", flush=True)
            return
        self.directory = directory
        if order.order in DRAWING_ORDERS:
            self.engine_url = order.engine_url
        self.wait()
        if order.order not in READING_ORDERS:
            self._carry_out(order, started_at, self._find_work(order, directory))
            return
        mapped: EngineMap | None = None
        if order.order in DRAWING_ORDERS:
            # The loader is the model's own code and may not run beside a step.
            try:
                mapped = self._draw(directory, must_be_patchable=order.order is Order.ATTACH)
            except Exception as error:
                self._answer(order, started_at, error)
                return
        self._running = self._thread.submit(
            self._carry_out, order, started_at, self._find_work(order, directory, mapped)
        )

    def roll_back_alone(self) -> None:
        """Undo an update whose node is gone, and say so."""
        self.wait()
        transaction = "" if self.answer is None else self.answer.transaction
        order = UpdateInfo(Order.WATCHDOG, transaction, str(self.directory))
        self._carry_out(order, self._monotonic(), self._weights.rollback)

    def is_commit_forgotten(self, seconds_max: float) -> bool:
        """Say whether a commit waits longer than that to be finished or rolled back."""
        return self.state is State.COMMITTED and self._monotonic() - self.changed_at > seconds_max

    def others(self) -> list[Answer | None]:
        """Return the newest answers of all ranks, this one's included."""
        assert self.directory is not None
        return [read_answer(self.directory, rank) for rank in range(self.world_size)]

    def wait(self) -> None:
        """Wait for an order that still runs."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Finish what runs and take no more."""
        self.wait()
        self._thread.shutdown()

    def _draw(self, directory: Path, *, must_be_patchable: bool) -> EngineMap:
        obstacle = self._find_obstacle() if must_be_patchable else ""
        if obstacle:
            raise StructureError(obstacle)
        table = ParameterTable.decode((directory / TABLE_NAME).read_bytes())
        with self._mutex, self._guard():
            return self._weights.draw(table)

    def _find_work(self, order: UpdateInfo, directory: Path, mapped: EngineMap | None = None) -> Work:
        weights, memory = self._weights, directory / MEMORY_NAME
        match order.order:
            case Order.ATTACH:
                assert mapped is not None
                place = Path(order.checkpoint) if order.checkpoint else None
                return lambda: weights.attach(
                    mapped, lambda table: Checkpoint(self._find_checkpoint() if place is None else place, table)
                )
            case Order.SURVEY:
                assert mapped is not None
                return lambda: weights.survey(mapped, lambda table: Checkpoint(self._find_checkpoint(), table))
            case Order.LOOK:
                assert mapped is not None
                return lambda: weights.look(mapped, Checkpoint(Path(order.checkpoint), mapped.table))
            case Order.STAGE:
                return lambda: weights.stage(order, memory)
            case Order.READ_BACK:
                return weights.read_back
            case Order.COMPARE:
                return lambda: weights.compare(Checkpoint(Path(order.checkpoint), weights.map.table), order.checkpoint)
            case Order.COMMIT:
                return weights.commit
            case Order.DOUBT:
                return weights.doubt
            case Order.FINISH:
                return weights.finish
            case Order.ROLLBACK | Order.WATCHDOG:
                return weights.rollback

    def _carry_out(self, order: UpdateInfo, started_at: float, work: Work) -> None:
        try:
            with self._mutex, self._guard():
                if order.order not in READING_ORDERS:
                    self.changed_at = self._monotonic()
                work()
                self._synchronize()
        except Exception as error:
            self._answer(order, started_at, error)
            return
        self._answer(order, started_at, None)

    def _answer(self, order: UpdateInfo, started_at: float, error: Exception | None) -> None:
        weights = self._weights
        is_done = error is None
        windows: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...] = ()
        if is_done and order.order is Order.ATTACH:
            windows = tuple(
                (index, window.source_offset, window.sizes, window.source_strides)
                for index, _, window in weights.map.walk()
            )
        refused = isinstance(error, PulsenetError) and weights.state not in (State.COMMITTED, State.UNKNOWN)
        self._publish(
            Answer(
                rank=self.rank,
                world_size=self.world_size,
                boot=self.boot,
                transaction=order.transaction,
                order=order.order,
                outcome=Outcome.DONE if is_done else Outcome.REFUSED if refused else Outcome.FAILED,
                state=weights.state,
                is_open=self._is_open,
                held=None if weights.held is None else str(weights.held),
                root=weights.root,
                code="" if error is None else name_fault(error),
                reason="" if error is None else str(error) or type(error).__name__,
                changed_count=weights.plain_count if order.order is Order.SURVEY else weights.changed_count,
                seconds=self._monotonic() - started_at,
                windows=windows,
            )
        )

    def _publish(self, answer: Answer) -> None:
        self.answer = answer
        assert self.directory is not None
        try:
            write_answer(self.directory, answer)
        except StorageError as error:
            # The node hears silence, which counts as a failure of this rank.
            print(f"pulsenet: rank {self.rank} of {os.getpid()} cannot answer: {error}", flush=True)


def name_fault(error: Exception) -> str:
    """Return the stable code of why an order was not done; the node's counters use the same words."""
    return "order" if isinstance(error, LocalProtocolError) else name_failure(error)
