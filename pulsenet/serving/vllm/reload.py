"""A running vLLM that cannot be patched in place, kept current by its own ``reload_weights``: the slow way round.

Each version is written as a model directory while the old one is served. Then vLLM stands still, reads all of it, and
packs it as it did when it started. What lies in its memory as published is compared with the files, bit by bit, before
the label moves; what it packed cannot be (docs/vllm.md).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pulsenet.errors import IntegrityError, LocalProtocolError, PatchMismatchError, StructureError, UnavailableError
from pulsenet.ids import Version
from pulsenet.serving.engine import EngineUpdate, RecordsUpdate, check_base, require_staged
from pulsenet.serving.files import FilesEngine
from pulsenet.serving.vllm.control import Control, EngineAsleepError
from pulsenet.serving.vllm.engine import UpdateTimes
from pulsenet.serving.vllm.exchange import (
    PAUSED_NAME,
    TABLE_NAME,
    Answer,
    Order,
    UpdateInfo,
    describe_refusal,
    read_answer,
    remove,
    write_whole,
)
from pulsenet.serving.vllm.handover import take_directory
from pulsenet.serving.vllm.transaction import find_fault
from pulsenet.tensors.params import ParameterTable

ANSWER_SECONDS_MAX: Final = 600.0
"""Comparing a large model reads it from disk."""
POLL_SECONDS: Final = 0.01
REHEARSED_NAME: Final = "rehearsed"
"""Names the workers that were seen to load what they pack as they did at their start."""
PROBE_SECONDS: Final = 1.0

_NEXT_STEP: Final = "start vLLM again from the newest version instead"


class ReloadEngine:
    """An :class:`pulsenet.Engine` that lets vLLM load each version as a whole.

    Args:
        control: vLLM's control routes.
        directory: Private directory of this node, made with mode 0700 if missing; versions are written under it.
        companions: The model directory that vLLM was started from.
        monotonic: Monotonic seconds.
        sleep: Sleeps.
        on_times: Told how long each committed update took.
        on_survey: Told how many of how many elements are compared after each load.

    Raises:
        StorageError: The directory cannot be used, or another node uses it.
    """

    def __init__(
        self,
        control: Control,
        directory: Path,
        companions: Path,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        on_times: Callable[[UpdateTimes], None] | None = None,
        on_survey: Callable[[int, int], None] | None = None,
    ) -> None:
        self._control = control
        self._companions = companions
        self._monotonic = monotonic
        self._sleep = sleep
        self._on_times = on_times
        self._on_survey = on_survey
        self.directory = directory
        self._lock = take_directory(directory, monotonic, sleep)
        try:
            self._files = FilesEngine(directory / "reloaded", companions=companions)
        except BaseException:
            os.close(self._lock)
            raise
        self._version: Version | None = None
        self._label: str | None = None
        """What vLLM calls its weights; ``None`` before it was surveyed, and after it was started again."""
        self._staged: tuple[EngineUpdate, float] | None = None

    @property
    def version(self) -> Version | None:
        """The version that vLLM loaded last; ``None`` until this engine has loaded one, and after a failure."""
        return self._version

    def close(self) -> None:
        """Let another node take over; vLLM serves on."""
        self._files.close()
        os.close(self._lock)

    def probe(self) -> None:
        """Look whether vLLM is the one that was loaded.

        Raises:
            UnavailableError: It does not answer, or was started again; ``version`` is ``None`` then.
            EngineAsleepError: It sleeps or is paused; the same.
        """
        label = self._control.label()
        if not (self.directory / PAUSED_NAME).exists() and self._control.is_sleeping():
            self._version = None
            raise EngineAsleepError(f"vLLM at {self._control.url} sleeps or is paused: it is loaded again after that")
        if self._label is not None and label != self._label:
            known, self._label, self._version = self._label, None, None
            raise UnavailableError(f"vLLM says its weights are {label!r}, not {known!r}: it was started again")

    def stage(self, update: EngineUpdate) -> None:
        """Write the whole new version beside the current one; see :meth:`FilesEngine.stage`."""
        self.rollback()
        started_at = self._monotonic()
        if isinstance(update, RecordsUpdate):
            check_base(self._version, update)
            if self._files.version != update.base_version:
                raise PatchMismatchError(f"the files are {self._files.version}: ask for a full load")
        if self._label is None:
            self._survey(update.table)
        self._files.stage(update)
        self._staged = update, self._monotonic() - started_at

    def commit(self) -> None:
        """Let vLLM load what is staged while its requests wait; see :meth:`Engine.commit`.

        Raises:
            UnavailableError: vLLM did not pause, and nothing has changed; or it did not load: then it is left paused
                until a full update was committed, and ``version`` is ``None``.
            IntegrityError: What it loaded is not the version; the same.
        """
        update, stage_seconds = require_staged(self._staged)
        held, self._version = self._version, None
        paused_at = self._monotonic()
        try:
            write_whole(self.directory / PAUSED_NAME, b"reload")
            self._control.pause()
            self._files.commit()
        except BaseException:
            if held is not None:
                self._resume()
                self._version = held
            raise
        self._staged = None
        place = self._files.current.resolve()
        self._control.reload(place)
        self._compare(place)
        label = str(update.version)
        self._control.set_label(label)
        self._label = label
        self._resume()
        self._version = update.version
        if self._on_times is not None:
            count = sum(spec.element_count for spec in update.table.tensors)
            pause_seconds = self._monotonic() - paused_at
            self._on_times(UpdateTimes(stage_seconds, pause_seconds, pause_seconds, count))

    def rollback(self) -> None:
        """Remove the staged files; a load that failed is mended by a full update."""
        self._staged = None
        self._files.rollback()

    def read_back(self) -> None:
        """Compare what lies in vLLM's memory as published with the files; see :meth:`Engine.read_back`."""
        if self._version is None:
            raise LocalProtocolError("no version is held: there is nothing to read back")
        held, self._version = self._version, None
        self.probe()
        self._files.read_back()
        self._compare(self._files.current.resolve())
        self._version = held

    def read_back_sample(self) -> None:
        """Nothing more than the commit did, which compared all that can be."""
        if self._version is None:
            raise LocalProtocolError("no version is held: there is nothing to read back")

    def _resume(self) -> None:
        self._control.resume()
        remove(self.directory / PAUSED_NAME)

    def _survey(self, table: ParameterTable) -> None:
        """Learn which tensors lie in vLLM's memory as published, while they are those of its checkpoint."""
        write_whole(self.directory / TABLE_NAME, table.encode())
        try:
            answers = self._ask(Order.SURVEY, self._companions)
        except StructureError as error:
            raise StructureError(f"{error}; nor could a load be checked: {_NEXT_STEP}") from error
        compared_count = sum(answer.changed_count for answer in answers)
        if not compared_count:
            raise StructureError(
                f"nothing of this engine's memory lies as published, so that no load could be checked: {_NEXT_STEP}"
            )
        element_count = sum(spec.element_count for spec in table.tensors)
        label = self._control.label()
        # Once in the workers' lives: after a load that failed they hold nothing that could come out the same.
        boots, path = ",".join(answer.boot for answer in answers).encode(), self.directory / REHEARSED_NAME
        if compared_count < element_count and _read_whole(path) != boots:
            self._rehearse()
            write_whole(path, boots)
        self._label = label
        if self._on_survey is not None:
            self._on_survey(compared_count, element_count)

    def _rehearse(self) -> None:
        """Load once more what vLLM was started from: what it packs must come out as it was, for nobody can compare it.

        Raises:
            StructureError: It does not; vLLM stays paused, for its weights may not be what it was started with.
        """
        write_whole(self.directory / PAUSED_NAME, b"reload")
        self._control.pause()
        before = self._control.checksums()
        self._control.reload(None)
        if before is None or self._control.checksums() != before:
            raise StructureError(
                "vLLM does not load these weights as it did when it started: what it packs comes out with other bits "
                "and may be wrong. It is left paused: start it again from the newest version, without --engine-reload"
            )
        self._resume()

    def _compare(self, place: Path) -> None:
        """Compare what can be compared.

        Raises:
            IntegrityError: The bits differ.
        """
        self._ask(Order.LOOK, place)

    def _ask(self, order: Order, checkpoint: Path) -> list[Answer]:
        """Give an order to all ranks and return their answers; raises the first fault."""
        transaction = secrets.token_hex(8)
        rank_count = self._control.count_ranks()
        info = UpdateInfo(order, transaction, str(self.directory), checkpoint=str(checkpoint))
        self._control.attach({**info.to_json(), "engine_url": self._control.url})
        give_up_at, probe_at = self._monotonic() + ANSWER_SECONDS_MAX, self._monotonic() + PROBE_SECONDS
        while True:
            answers = [read_answer(self.directory, rank) for rank in range(rank_count)]
            faults = [find_fault(rank, answer, order, transaction) for rank, answer in enumerate(answers)]
            is_silent = any(fault is not None and fault.code == "silent" for fault in faults)
            if not is_silent or self._monotonic() >= give_up_at:
                break
            if self._monotonic() >= probe_at:
                probe_at = self._monotonic() + PROBE_SECONDS
                self._control.label()  # raises if vLLM is gone, and with it the answer
            self._sleep(POLL_SECONDS)
        for fault in faults:
            if fault is not None:
                errors = {"root_mismatch": IntegrityError, "structure": StructureError}
                raise errors.get(fault.code, UnavailableError)(fault.reason)
        return [answer for answer in answers if answer is not None]


def _read_whole(path: Path) -> bytes | None:
    """Return a small file's bytes; ``None`` if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise describe_refusal(f"{path} cannot be read", error) from error
