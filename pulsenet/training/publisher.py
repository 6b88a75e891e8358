"""Publishes a model from the training loop through the daemon on the same machine.

::

    publisher = attach_publisher()
    …
    optimizer.step()
    publisher.publish(model, step=step)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch

from pulsenet.errors import ConfigError, LocalProtocolError, UnavailableError
from pulsenet.ids import PeerId
from pulsenet.local.client import Client, PublishResult
from pulsenet.local.directories import RUN_NAME_DEFAULT, find_data_directory
from pulsenet.local.handover import WholeParts
from pulsenet.local.parts import SealedPart
from pulsenet.local.protocol import Origin, PublishStatus
from pulsenet.local.rollouts import ReceivedRollouts
from pulsenet.local.shared_memory import write_parts
from pulsenet.local.tasks import encode_tasks
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.baseline_keeper import BaselineKeeper, DeviceBaselineChoice
from pulsenet.training.device_baseline import DeviceBaseline
from pulsenet.training.ranks import is_first_rank
from pulsenet.training.rollout_checks import LogprobCheck
from pulsenet.training.snapshot import ComputeDtype, Sharded, Snapshot, take_snapshot

CONNECT_SECONDS_MAX: Final = 10.0
ROLLOUTS_WAIT_SECONDS: Final = 10.0
"""One request's wait for rollouts; the iterator asks again until its own time is up."""

LEASE_SECONDS_DEFAULT: Final = 600.0

RECEIVED_COUNT_MAX: Final = 4_096
"""Batches remembered by name; more than a daemon keeps."""

BASELINE_FAULTS: Final = frozenset({"other_base", "bad_changes", "no_baseline"})
"""Why a publish of changes failed that one of whole weights would not."""


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """How far the copy out of the training process is."""

    tensor_name: str
    """The tensor just finished."""
    tensor_count: int
    """Tensors finished, and of how many."""
    tensor_count_total: int
    copied_size_bytes: int
    size_bytes: int


ProgressCallback = Callable[[CopyProgress], None]


class Publisher:
    """Hands snapshots of a model to the daemon. Make one with :func:`attach_publisher`.

    Args:
        client: Connection to the daemon; ``None`` on ranks that only take part in gathering sharded tensors.
        compute_dtype: As in :func:`pulsenet.training.take_snapshot`.
        keep: As there.
        on_progress: Called after each tensor is copied, in the thread that publishes.
        device_baseline: As in :func:`attach_publisher`.

    Raises:
        ConfigError: ``device_baseline`` is something else.
    """

    def __init__(
        self,
        client: Client | None,
        *,
        compute_dtype: ComputeDtype | None = "bf16",
        keep: tuple[str, ...] = (),
        on_progress: ProgressCallback | None = None,
        device_baseline: DeviceBaselineChoice = "auto",
    ) -> None:
        self._client = client
        self._compute_dtype: ComputeDtype | None = compute_dtype
        self._keep = keep
        self._on_progress = on_progress
        self._keeper = BaselineKeeper(device_baseline)
        self._received: dict[tuple[PeerId, int], None] = {}

    def publish(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        step: int,
        wait: bool = False,
        blocking: bool = False,
        timeout_seconds: float | None = None,
        consensus: bool = True,
    ) -> PublishResult:
        """Copy the model's weights out and have the daemon publish them as the next version.

        Returns after the copy; the daemon compares and encodes while the copy goes on and after it, while training
        continues. While one publish is in work there, a newer one replaces the one waiting. Nothing of the model is
        changed. With a device baseline (see :func:`attach_publisher`) the weights are compared where they are, and only
        what changed is copied out. Trouble with the daemon is a result, never an exception, so that training goes on.

        Under ``torch.distributed`` every rank calls this; rank 0 publishes, the others take part in the gathering
        of sharded tensors and get ``not_publisher``.

        Args:
            model: The module, wrapped or not, or a state dict: dense tensors of any shape, stride and device, of the
                dtypes of spec-codec 2. FP32 parameters are cast as ``compute_dtype`` says, the rest stays as it is.
            step: Optimiser steps so far.
            wait: Return only once the version is committed, replaced or given up.
            blocking: Where memory is short: wait, and copy no faster than the daemon encodes, so that beside its own
                copy of the weights no more than twice the largest tensor is in memory.
            timeout_seconds: With ``wait`` or ``blocking``, how long at most; ``None`` waits for ever.
            consensus: Whether all members of a run that mixes hold these weights; its manifest says so.

        Raises:
            ConfigError: The model cannot be published as it is, ``step`` is no integer, or there is no room for a
                device baseline that was asked for; the message says what to do.
            StorageError: No shared memory for the copy.
        """
        try:
            step = operator.index(step)  # integers of numpy and torch too
        except TypeError:
            raise ConfigError(f"step {step!r} is no integer: count optimiser steps") from None
        snapshot = take_snapshot(model, compute_dtype=self._compute_dtype, keep=self._keep)
        if self._client is None:
            _take_part(snapshot)
            return PublishResult(PublishStatus.NOT_PUBLISHER, reason="rank: only rank 0 publishes")
        # Every rank takes part in a gather, so it happens once and to its end, whatever becomes of the publish.
        gathered = snapshot.blocks() if any(isinstance(source, Sharded) for source in snapshot.sources) else None

        def make_parts() -> Generator[SealedPart]:
            blocks = snapshot.blocks() if gathered is None else gathered
            return write_parts(snapshot.table, blocks, self._make_report(snapshot.table))

        give_up_at = None if timeout_seconds is None else monotonic() + timeout_seconds
        hand_over = partial(
            self._client.publish_from,
            snapshot.table,
            trainer_step=step,
            wait=wait,
            is_blocking=blocking,
            consensus=consensus,
        )
        try:
            with self._keeper.lend(snapshot) as baseline:
                result = None if baseline is None else self._publish_changes(snapshot, baseline, hand_over, give_up_at)
                if result is not None:
                    return result
                return hand_over(
                    WholeParts(make_parts), is_repeatable=gathered is None, timeout_seconds=_rest_seconds(give_up_at)
                )
        finally:
            for _ in gathered or ():
                pass

    def rollouts(
        self, *, count_max: int = 64, timeout_seconds: float | None = None, check: LogprobCheck | None = None
    ) -> Iterator[ReceivedRollouts]:
        """Yield verified rollout batches as they come in, each once.

        A batch is no more the daemon's once it is handed over: what this process did not use is lost if it dies.

        Args:
            count_max: Batches of one request.
            timeout_seconds: Ends when none came for so long; ``None`` waits for ever, 0 yields what is there.
            check: Recomputes the logprobs of a few samples. A batch in which one does not match is not yielded, and
                the daemon counts it for its key: see ``rollouts`` in the status.

        Raises:
            UnavailableError: The daemon is away.
            LocalProtocolError: This rank has no daemon, or the check's function returned something else than due.
        """
        client = self._attached()
        idle_since = monotonic()
        while True:
            waited_seconds = monotonic() - idle_since
            if timeout_seconds is None:
                rest_seconds = ROLLOUTS_WAIT_SECONDS
            else:
                rest_seconds = min(ROLLOUTS_WAIT_SECONDS, max(0.0, timeout_seconds - waited_seconds))
            batches = client.take_rollouts(count_max, rest_seconds)
            for batch in batches:
                if self._is_new(batch) and self._passes(batch, check):
                    yield batch
            if batches:
                idle_since = monotonic()
            elif timeout_seconds is not None and monotonic() - idle_since >= timeout_seconds:
                return

    def send_tasks(
        self,
        tasks: Iterable[Mapping[str, Any]],
        *,
        lease_seconds: float = LEASE_SECONDS_DEFAULT,
        timeout_seconds: float = 0.0,
    ) -> tuple[bytes, ...]:
        """Ask the inferencers to sample something; each task is one inferencer's at a time.

        A task is done once a batch that answers it is taken (``ReceivedRollouts.task_ids``), and goes to another
        inferencer when its lease ends before that. It is given up after eight leases. The daemon keeps 4,096 tasks or
        64 MiB, on disk until they are answered.

        Args:
            tasks: JSON objects, 1,024 at most and 64 KiB each; what they mean is between you and your engines.
            lease_seconds: How long an inferencer has, until its batch has arrived.
            timeout_seconds: How long to wait for a daemon that is away, and for room.

        Returns:
            An id for each task, in their order.

        Raises:
            UnavailableError: The daemon is away, or has no room; none is queued.
            LocalProtocolError: Not JSON, too many, too large, a lease out of range, or this rank has no daemon.
        """
        queued = self._attached().send_tasks(encode_tasks(tasks), lease_seconds, timeout_seconds)
        if queued.retry_after_ms:
            raise UnavailableError(f"the tasks are not queued: {queued.reason}")
        if queued.reason:
            raise LocalProtocolError(queued.reason)
        return queued.task_ids

    def _is_new(self, batch: ReceivedRollouts) -> bool:
        """Return whether this process did not get the batch before: a daemon that died may hand it out again."""
        name = (batch.peer_id, batch.sequence)
        if name in self._received:
            return False
        self._received[name] = None
        if len(self._received) > RECEIVED_COUNT_MAX:
            del self._received[next(iter(self._received))]
        return True

    def _passes(self, batch: ReceivedRollouts, check: LogprobCheck | None) -> bool:
        if check is None:
            return True
        result = check.judge(batch)
        if result.checked_count:
            self._attached().tell_checks(batch.peer_id, result.checked_count, result.mismatched_count)
        return not result.mismatched_count

    def status(self) -> dict[str, Any]:
        """Return how the daemon is, as ``pulsenet status --json`` does.

        Raises:
            UnavailableError: It is away.
            LocalProtocolError: This rank has no daemon.
        """
        return self._attached().status()

    def close(self) -> None:
        """Close the connection; what was handed over is still published."""
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attached(self) -> Client:
        if self._client is None:
            raise LocalProtocolError("this rank only takes part in gathering: ask on rank 0")
        return self._client

    def _publish_changes(
        self,
        snapshot: Snapshot,
        baseline: DeviceBaseline,
        hand_over: Callable[..., PublishResult],
        give_up_at: float | None,
    ) -> PublishResult | None:
        """Hand over what changed; ``None`` if the device has no room to find out."""
        source = _ChangedParts(snapshot, baseline, lambda: self._make_report(snapshot.table))
        try:
            result = hand_over(source, timeout_seconds=_rest_seconds(give_up_at))
            if baseline.is_listed and result.reason in BASELINE_FAULTS:
                # The daemon lost its half after it had asked for changes. It asks for all of it now.
                result = hand_over(source, timeout_seconds=_rest_seconds(give_up_at))
        except torch.cuda.OutOfMemoryError as error:
            self._keeper.give_up(str(error))
            return None
        return result

    def _make_report(self, table: ParameterTable) -> Callable[[int], None]:
        """Return what tells the user of each tensor that is through."""
        copied_size_bytes = 0

        def report(tensor_index: int) -> None:
            nonlocal copied_size_bytes
            spec = table.tensors[tensor_index]
            copied_size_bytes += spec.size_bytes
            if self._on_progress is not None:
                progress = CopyProgress(
                    tensor_name=spec.name,
                    tensor_count=tensor_index + 1,
                    tensor_count_total=len(table.tensors),
                    copied_size_bytes=copied_size_bytes,
                    size_bytes=table.size_bytes,
                )
                self._on_progress(progress)

        return report


@dataclass(frozen=True, slots=True)
class _ChangedParts:
    """The parts of one publish against a device baseline."""

    snapshot: Snapshot
    baseline: DeviceBaseline
    make_report: Callable[[], Callable[[int], None]]

    def begin(self) -> Origin:
        return self.baseline.begin()

    def make_parts(self, base_number: int | None) -> Generator[SealedPart]:
        return self.baseline.make_parts(self.snapshot, base_number, self.make_report())


def attach_publisher(
    run: str = RUN_NAME_DEFAULT,
    data_dir: Path | str | None = None,
    *,
    compute_dtype: ComputeDtype | None = "bf16",
    keep: tuple[str, ...] = (),
    on_progress: ProgressCallback | None = None,
    device_baseline: DeviceBaselineChoice = "auto",
    timeout_seconds: float = CONNECT_SECONDS_MAX,
) -> Publisher:
    """Connect to the trainer daemon on this machine (``pulsenet join --role trainer``).

    Under ``torch.distributed`` only rank 0 connects.

    Args:
        run: Name of the run; the daemon's data directory is found by it.
        data_dir: The daemon's ``--data-dir``, if it was given one.
        compute_dtype: ``"bf16"`` publishes FP32 parameters as BF16, ``None`` as they are.
        keep: Shell patterns over names of FP32 parameters to publish exactly, such as ``"*.norm.*"``.
        on_progress: Called after each tensor is copied out.
        device_baseline: Whether to keep what was handed over last beside the weights, on their device and in the
            published dtypes: one more copy of the model there (2 bytes a parameter as BF16), so that only what changed
            leaves the device. ``"auto"`` keeps it for models on a CUDA device with twice that free, and none for
            sharded models.
        timeout_seconds: How long to wait for the daemon's answer.

    Raises:
        ConfigError: No daemon is there; the message says which command starts it. Or ``device_baseline`` is no choice.
        UnavailableError: One should be there, but does not answer.
    """
    client = None
    if is_first_rank():
        directory = find_data_directory("trainer", run=run, data_dir=data_dir)
        client = Client.connect(directory, timeout_seconds=timeout_seconds)
    return Publisher(
        client, compute_dtype=compute_dtype, keep=keep, on_progress=on_progress, device_baseline=device_baseline
    )


def _rest_seconds(give_up_at: float | None) -> float | None:
    return None if give_up_at is None else max(0.0, give_up_at - monotonic())


def _take_part(snapshot: Snapshot) -> None:
    """Gather what rank 0 gathers, in its order: a gather ends only if every rank calls it."""
    for source in snapshot.sources:
        if isinstance(source, Sharded):
            source.full_tensor()
