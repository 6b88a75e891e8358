"""A running vLLM as an :class:`pulsenet.Engine`: the node's side of every transaction.

Runs beside the engine, in the node's process or a user's own; needs neither torch nor vLLM.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pulsenet.errors import (
    IntegrityError,
    LocalProtocolError,
    PatchMismatchError,
    PulsenetError,
    RemoteProtocolError,
    StorageError,
    StructureError,
    UnavailableError,
)
from pulsenet.ids import Version
from pulsenet.serving.engine import (
    EngineUpdate,
    FullUpdate,
    RecordsUpdate,
    check_base,
    check_root,
    describe_names,
    require_staged,
)
from pulsenet.serving.vllm.control import Control, EngineAsleepError
from pulsenet.serving.vllm.exchange import (
    PAUSED_NAME,
    TABLE_NAME,
    Answer,
    Order,
    State,
    UpdateInfo,
    parse_version,
    read_answer,
    remove,
    write_whole,
)
from pulsenet.serving.vllm.handover import lend_memory, take_directory
from pulsenet.serving.vllm.transaction import ORDERS, STOPS, Fault, Plan, Report, Step, Transaction, find_fault
from pulsenet.serving.vllm.windows import Window, find_uncovered
from pulsenet.tensors.digest import compute_region_root
from pulsenet.tensors.params import ParameterTable

ANSWER_SECONDS_MAX: Final = 600.0
"""Comparing a large model with its checkpoint reads it from disk."""
POLL_SECONDS: Final = 0.002
PROBE_SECONDS: Final = 1.0
"""How often an engine is looked at while an answer is awaited."""
READING_ORDERS: Final = frozenset({Order.ATTACH, Order.STAGE, Order.READ_BACK})


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Where the seconds of one update went."""

    stage_seconds: float
    """While the engine served."""
    pause_seconds: float
    """From before the pause was asked for until the engine was told to go on; 0 if nothing changed."""
    commit_seconds: float
    """The longest any rank took to write, keep what it overwrote, and read back."""
    changed_count: int


@dataclass(slots=True)
class _Attached:
    """What is known of an engine since it was attached."""

    table: ParameterTable
    boots: tuple[str, ...]
    label: str
    """Name of the weights; another one means that the engine was started again."""


@dataclass(slots=True)
class _Staged:
    transaction: Transaction
    update: EngineUpdate
    stage_seconds: float


class VllmEngine:
    """An engine in other processes.

    Args:
        control: vLLM's control routes.
        directory: Private directory of this node, made with mode 0700 if missing; the workers read and write in it.
        checkpoint: What the engine was started from, if that is not its ``--model`` directory.
        monotonic: Monotonic seconds.
        sleep: Sleeps.
        on_times: Told how long each committed update took.

    Raises:
        StorageError: The directory cannot be used, or another node uses it.
    """

    def __init__(
        self,
        control: Control,
        directory: Path | str,
        *,
        checkpoint: Path | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        on_times: Callable[[UpdateTimes], None] | None = None,
    ) -> None:
        self._control = control
        self._checkpoint = checkpoint
        self._monotonic = monotonic
        self._sleep = sleep
        self._on_times = on_times
        self._version: Version | None = None
        self._attached: _Attached | None = None
        self._staged: _Staged | None = None
        self._is_paused_since: float | None = None
        self._pause_seconds = 0.0
        self._commit_seconds = 0.0
        self._is_doubted = False
        """Whether the ranks are to believe nothing of their weights any more, and were not told yet."""
        self._must_copy = False
        """Whether the ranks cannot open this process's memory by its descriptor."""
        self.directory = Path(directory)
        self._lock = take_directory(self.directory, monotonic, sleep)

    @property
    def version(self) -> Version | None:
        """The version that every rank holds; ``None`` until that is known."""
        return self._version

    def close(self) -> None:
        """Give up what is staged and let another node take over; the engine goes on with what it holds."""
        try:
            self.rollback()
        finally:
            os.close(self._lock)

    def probe(self) -> None:
        """Look whether the engine is the one that was attached; find one again that an earlier node left.

        Raises:
            UnavailableError: It does not answer, or was started again; ``version`` is ``None`` then.
            EngineAsleepError: It sleeps or is paused; the same.
            IntegrityError: It is found again, and a sample of its weights is not what was written last.
        """
        label = self._control.label()
        self._look_for_sleep()
        if self._attached is None:
            self._find_again(label)
        elif label != self._attached.label:
            known = self._attached.label
            self._forget()
            raise UnavailableError(
                f"the engine says its weights are {label!r}, not {known!r}: it was started again, and is attached anew"
            )

    def stage(self, update: EngineUpdate) -> None:
        """Let every rank check the update while the engine serves; see :meth:`Engine.stage`."""
        self.rollback()
        self._doubt()
        started_at = self._monotonic()
        if isinstance(update, FullUpdate):
            check_root(update.version, update.root, compute_region_root(update.table, update.region))
        attached = self._attach(update.table)
        if isinstance(update, RecordsUpdate):
            check_base(self._version, update)
        transaction = self._try_to_stage(update, attached)
        if transaction.fault is not None and transaction.fault.code == "unreadable" and not self._must_copy:
            # The ranks live in another process namespace, where ours has no name.
            self._must_copy = True
            transaction = self._try_to_stage(update, attached)
        if transaction.step is not Step.STAGED:
            self._fail(transaction)
        self._staged = _Staged(transaction, update, self._monotonic() - started_at)

    def _try_to_stage(self, update: EngineUpdate, attached: _Attached) -> Transaction:
        plan = Plan(
            transaction=secrets.token_hex(8),
            version=update.version,
            held=self._version,
            boots=attached.boots,
            is_full=isinstance(update, FullUpdate),
            is_paused=(self.directory / PAUSED_NAME).exists(),
        )
        transaction = Transaction(plan)
        with lend_memory(update, self.directory, must_copy=self._must_copy) as (size_bytes, digest):
            self._run(
                transaction,
                UpdateInfo(
                    Order.STAGE,
                    plan.transaction,
                    str(self.directory),
                    version=str(update.version),
                    base_version=str(update.base_version) if isinstance(update, RecordsUpdate) else "",
                    root=update.root.hex(),
                    size_bytes=size_bytes,
                    digest=digest,
                ),
            )
        return transaction

    def commit(self) -> None:
        """Write on every rank between two steps of the scheduler; see :meth:`Engine.commit`."""
        staged = require_staged(self._staged)
        self._staged = None
        transaction, update = staged.transaction, staged.update
        held, self._version = self._version, None
        self._pause_seconds = self._commit_seconds = 0.0
        transaction.go_on()
        self._run(transaction, self._info(transaction.plan))
        if transaction.step is not Step.DONE:
            self._version = held if transaction.step is Step.REFUSED else None
            self._fail(transaction)
        if isinstance(update, FullUpdate):
            # The memory is lent: a node that moved on would have changed it under the ranks that copied or compared.
            self._is_doubted = True
            check_root(update.version, update.root, compute_region_root(update.table, update.region))
            self._is_doubted = False
        self._version = update.version
        if self._on_times is not None:
            self._on_times(
                UpdateTimes(staged.stage_seconds, self._pause_seconds, self._commit_seconds, transaction.changed_count)
            )

    def rollback(self) -> None:
        """Let every rank give up what is staged; see :meth:`Engine.rollback`."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        staged.transaction.give_up()
        self._run(staged.transaction, self._info(staged.transaction.plan))

    def read_back(self) -> None:
        """Let every rank compare a sample of what it wrote last; see :meth:`Engine.read_back`."""
        if self._version is None or self._attached is None:
            raise LocalProtocolError("no version is held: there is nothing to read back")
        self.rollback()
        self.probe()
        fault = self._order_alone(Order.READ_BACK)
        if fault is not None:
            self._forget()
            raise IntegrityError(f"{fault.reason}: load the engine in full")

    def _order_alone(self, order: Order) -> Fault | None:
        """Give an order that belongs to no update, and return the first fault of any rank."""
        transaction = secrets.token_hex(8)
        self._close_left_open()
        self._control.open()
        try:
            self._control.order(UpdateInfo(order, transaction, str(self.directory)).to_json())
            answers = self._await_answers(transaction, order)
        finally:
            self._control.close(None)
        faults = (find_fault(rank, answer, order, transaction) for rank, answer in enumerate(answers))
        return next((fault for fault in faults if fault is not None), None)

    def _look_for_sleep(self) -> None:
        """Doubt the weights of an engine that stood still for somebody else: sleep may have dropped them."""
        if (self.directory / PAUSED_NAME).exists():
            return  # for us
        if self._control.is_sleeping():
            self._is_doubted, self._version = True, None
            raise EngineAsleepError(
                f"the engine at {self._control.url} sleeps or is paused: once it goes on, its weights are compared"
            )
        self._doubt()

    def _doubt(self) -> None:
        """Let the ranks compare or write everything before they believe their weights again, where that is due."""
        if not self._is_doubted:
            return
        self._version = None
        fault = None if self._attached is None else self._order_alone(Order.DOUBT)
        if fault is not None:
            raise UnavailableError(fault.reason)
        self._is_doubted = False

    # One transaction

    def _run(self, transaction: Transaction, info: UpdateInfo) -> None:
        while transaction.step not in STOPS:
            transaction.handle(self._execute(transaction.step, transaction.plan, info))

    def _execute(self, step: Step, plan: Plan, info: UpdateInfo) -> Report:
        order = ORDERS.get(step)
        try:
            self._ask(step, plan, info)
            if order is None:
                return Report(True)
            answers = self._await_answers(plan.transaction, order)
        except (UnavailableError, StorageError) as error:
            return Report(False, str(error), tuple(self._read_answers()) if order is not None else ())
        if step is Step.COMMIT:
            self._commit_seconds = max((answer.seconds for answer in answers if answer is not None), default=0.0)
        return Report(True, answers=tuple(answers))

    def _info(self, plan: Plan) -> UpdateInfo:
        return UpdateInfo(Order.COMMIT, plan.transaction, str(self.directory))

    def _ask(self, step: Step, plan: Plan, info: UpdateInfo) -> None:
        control = self._control
        match step:
            case Step.OPEN:
                self._close_left_open()
                control.open()
            case Step.STAGE | Step.COMMIT | Step.UNSTAGE | Step.ROLL_BACK:
                control.order(replace(info, order=ORDERS[step]).to_json())
            case Step.PAUSE:
                self._is_paused_since = self._monotonic()
                write_whole(self.directory / PAUSED_NAME, plan.transaction.encode())
                control.pause()
            case Step.CLOSE:
                control.close(str(plan.version))
                self._relabel(str(plan.version))
            case Step.LABEL:
                control.set_label(str(plan.version))
                self._relabel(str(plan.version))
            case Step.CLOSE_UNCHANGED | Step.CLOSE_ROLLED_BACK:
                control.close(None)
            case Step.RESUME | Step.RESUME_ROLLED_BACK:
                self._resume()
            case _:
                raise AssertionError(step)

    def _resume(self) -> None:
        self._control.resume()
        if self._is_paused_since is not None:
            self._pause_seconds = self._monotonic() - self._is_paused_since
            self._is_paused_since = None
        remove(self.directory / PAUSED_NAME)

    def _relabel(self, label: str) -> None:
        if self._attached is not None:
            self._attached.label = label

    def _close_left_open(self) -> None:
        """End an update that vLLM holds open since an earlier transaction that could not."""
        if any(answer is not None and answer.is_open for answer in self._read_answers()):
            self._control.close(None)

    def _fail(self, transaction: Transaction) -> None:
        """Raise what a transaction met, after forgetting what it made uncertain."""
        fault = transaction.fault
        assert fault is not None
        if transaction.step is Step.LOST:
            self._forget()
            raise _make_error(Fault(fault.code, f"{fault.reason}; the engine's weights are unknown now"))
        if fault.code == "base_mismatch":
            self._version = None
        raise _make_error(fault)

    def _forget(self) -> None:
        self._version, self._attached, self._staged = None, None, None

    # Attaching

    def _attach(self, table: ParameterTable) -> _Attached:
        """Let every rank draw its map and compare its weights, unless that was done for this table."""
        if self._attached is not None and self._attached.table == table:
            return self._attached
        self._forget()
        rank_count = self._control.count_ranks()
        write_whole(self.directory / TABLE_NAME, table.encode())
        transaction = secrets.token_hex(8)
        info = UpdateInfo(
            Order.ATTACH,
            transaction,
            str(self.directory),
            engine_url=self._control.url,
            checkpoint="" if self._checkpoint is None else str(self._checkpoint),
        )
        self._control.attach(info.to_json())
        answers = self._await_answers(transaction, Order.ATTACH, rank_count)
        self._attached = self._take_up(table, answers, transaction)
        return self._attached

    def _find_again(self, label: str) -> None:
        """Take up an engine whose ranks and label say that an earlier node left it at one version."""
        first = read_answer(self.directory, 0)
        try:
            table = ParameterTable.decode((self.directory / TABLE_NAME).read_bytes())
        except (OSError, PulsenetError):
            return
        if first is None or first.held is None or first.held != label:
            return
        answers = self._read_answers(first.world_size)
        if all(answer is not None and answer.held == label for answer in answers):
            boots = tuple(answer.boot for answer in answers if answer is not None)
            self._attached = _Attached(table, boots, label)
            self._recover(answers)
            if self._version is not None:
                self.read_back()  # it may have slept while no node was there

    def _take_up(self, table: ParameterTable, answers: Sequence[Answer | None], transaction: str) -> _Attached:
        """Check what the ranks said to ATTACH, and put right what an earlier node left."""
        boots = []
        for rank, answer in enumerate(answers):
            fault = find_fault(rank, answer, Order.ATTACH, transaction)
            if fault is not None:
                raise _make_error(fault)
            assert answer is not None
            boots.append(answer.boot)
        check_coverage(table, [answer for answer in answers if answer is not None])
        self._recover(answers)
        return _Attached(table, tuple(boots), self._control.label())

    def _recover(self, answers: Sequence[Answer | None]) -> None:
        """Put right what an earlier node left: a commit it did not finish, an open update, an engine it had paused."""
        if any(answer is not None and answer.state is State.COMMITTED for answer in answers):
            transaction = secrets.token_hex(8)
            self._control.order(UpdateInfo(Order.ROLLBACK, transaction, str(self.directory)).to_json())
            answers = self._await_answers(transaction, Order.ROLLBACK, len(answers))
        if any(answer is not None and answer.is_open for answer in answers):
            self._control.close(None)
        held = {(answer.held, answer.root) for answer in answers if answer is not None}
        is_whole = all(answer is not None and answer.state in (State.READY, State.STAGED) for answer in answers)
        if is_whole and len(held) == 1:
            ((text, _),) = held
            self._version = None if text is None else parse_version(text)
            if (self.directory / PAUSED_NAME).exists():
                self._resume()

    # Answers

    def _read_answers(self, count: int | None = None) -> list[Answer | None]:
        if count is None:
            count = 0 if self._attached is None else len(self._attached.boots)
        return [read_answer(self.directory, rank) for rank in range(count)]

    def _await_answers(self, transaction: str, order: Order, count: int | None = None) -> list[Answer | None]:
        """Return each rank's answer to this transaction, ``None`` for one that has not answered in time."""
        # Orders that write are answered before vLLM is; the others run beside its steps.
        wait_seconds = ANSWER_SECONDS_MAX if order in READING_ORDERS else 0.0
        give_up_at, probe_at = self._monotonic() + wait_seconds, self._monotonic() + PROBE_SECONDS
        while True:
            answers = [
                answer if answer is not None and answer.transaction == transaction else None
                for answer in self._read_answers(count)
            ]
            is_complete = all(answer is not None and answer.order is order for answer in answers)
            if is_complete or self._monotonic() >= give_up_at:
                return answers
            if self._monotonic() >= probe_at:
                probe_at = self._monotonic() + PROBE_SECONDS
                self._control.label()  # raises if the engine is gone, and with it the answer
            self._sleep(POLL_SECONDS)


def check_coverage(table: ParameterTable, answers: Sequence[Answer]) -> None:
    """Refuse an engine that has no place for part of a tensor: a patch there would be lost.

    Raises:
        StructureError: The message names the tensors.
    """
    windows: list[list[Window]] = [[] for _ in table.tensors]
    for answer in answers:
        for tensor_index, offset, sizes, strides in answer.windows:
            windows[tensor_index].append(Window(offset, 0, sizes, strides, strides))
    lacking = [
        spec.name
        for spec, found in zip(table.tensors, windows, strict=True)
        if find_uncovered(spec.element_count, found)
    ]
    if lacking:
        raise StructureError(
            f"the engine has no place for tensors of the version: {describe_names(lacking)}; a model that ties what "
            "the version holds apart must be loaded untied"
        )


def _make_error(fault: Fault) -> PulsenetError:
    """Return the error that means what a fault's code says."""
    match fault.code:
        case "structure":
            return StructureError(fault.reason)
        case "base_mismatch":
            return PatchMismatchError(fault.reason)
        case "root_mismatch":
            return IntegrityError(fault.reason)
        case "decode":
            return RemoteProtocolError("decode", fault.reason)
        case "io" | "damaged" | "memory" | "enospc" | "readonly" | "unreadable":
            return StorageError(fault.reason, fault.code)
        case _:
            return UnavailableError(fault.reason)
