"""Publishes a model from the training loop through the daemon on the same machine.

::

    publisher = attach()
    …
    optimizer.step()
    publisher.publish(model, step=step)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final

import torch

from pulsenet.errors import ConfigError, LocalProtocolError
from pulsenet.local.client import Client, PublishResult
from pulsenet.local.directories import RUN_NAME_DEFAULT, find_data_directory
from pulsenet.local.parts import SealedPart
from pulsenet.local.protocol import PublishStatus
from pulsenet.local.rollouts import ReceivedRollouts
from pulsenet.local.shared_memory import Bytes, write_parts
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.snapshot import ComputeDtype, Sharded, Snapshot, take_snapshot

CONNECT_SECONDS_MAX: Final = 10.0
ROLLOUTS_WAIT_SECONDS: Final = 10.0
"""One request's wait for rollouts; the iterator asks again until its own time is up."""


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
    """Hands snapshots of a model to the daemon. Make one with :func:`attach`.

    Args:
        client: Connection to the daemon; ``None`` on ranks that only take part in gathering sharded tensors.
        compute_dtype: As in :func:`~pulsenet.training.snapshot.take_snapshot`.
        keep: As there.
        on_progress: Called after each tensor is copied, in the thread that publishes.
    """

    def __init__(
        self,
        client: Client | None,
        *,
        compute_dtype: ComputeDtype | None = "bf16",
        keep: tuple[str, ...] = (),
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self._client = client
        self._compute_dtype: ComputeDtype | None = compute_dtype
        self._keep = keep
        self._on_progress = on_progress

    def publish(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        step: int,
        wait: bool = False,
        blocking: bool = False,
        timeout_seconds: float | None = None,
    ) -> PublishResult:
        """Copy the model's weights out and have the daemon publish them as the next version.

        Returns after the copy; the daemon compares and encodes while the copy goes on and after it, while training
        continues. While one publish is in work there, a newer one replaces the one waiting. Nothing of the model is
        changed or kept. Trouble with the daemon is a result, never an exception, so that training goes on.

        Under ``torch.distributed`` every rank calls this; rank 0 publishes, the others take part in the gathering
        of sharded tensors and get ``not_publisher``.

        Args:
            model: The module, wrapped or not, or a state dict.
            step: Optimiser steps so far.
            wait: Return only once the version is committed, replaced or given up.
            blocking: Where memory is short: wait, and copy no faster than the daemon encodes, so that beside its own
                copy of the weights no more than twice the largest tensor is in memory.
            timeout_seconds: With ``wait`` or ``blocking``, how long at most.

        Raises:
            ConfigError: The model cannot be published as it is, or ``step`` is no integer; the message says what to do.
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
            return self._write_parts(snapshot.table, snapshot.blocks() if gathered is None else gathered)

        try:
            return self._client.publish_parts(
                snapshot.table,
                make_parts,
                step,
                wait,
                is_blocking=blocking,
                is_repeatable=gathered is None,
                timeout_seconds=timeout_seconds,
            )
        finally:
            for _ in gathered or ():
                pass

    def rollouts(self, *, count_max: int = 64, timeout_seconds: float | None = None) -> Iterator[ReceivedRollouts]:
        """Yield verified rollout batches as they come in, each once.

        Ends when none came for ``timeout_seconds``; ``None`` waits for ever, 0 yields what is there.

        Raises:
            UnavailableError: The daemon is away.
            LocalProtocolError: This rank has no daemon.
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
            yield from batches
            if batches:
                idle_since = monotonic()
            elif timeout_seconds is not None and monotonic() - idle_since >= timeout_seconds:
                return

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attached(self) -> Client:
        if self._client is None:
            raise LocalProtocolError("this rank only takes part in gathering: ask on rank 0")
        return self._client

    def _write_parts(self, table: ParameterTable, blocks: Iterator[tuple[int, int, Bytes]]) -> Generator[SealedPart]:
        """Copy weights out part by part, and tell the user of each tensor that is through."""
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

        return write_parts(table, blocks, report)


def attach(
    run: str = RUN_NAME_DEFAULT,
    data_dir: Path | str | None = None,
    *,
    compute_dtype: ComputeDtype | None = "bf16",
    keep: tuple[str, ...] = (),
    on_progress: ProgressCallback | None = None,
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
        timeout_seconds: How long to wait for the daemon's answer.

    Raises:
        ConfigError: No daemon is there; the message says which command starts it.
        UnavailableError: One should be there, but does not answer.
    """
    client = None
    if _rank() == 0:
        directory = find_data_directory("trainer", run=run, data_dir=data_dir)
        client = Client.connect(directory, timeout_seconds=timeout_seconds)
    return Publisher(client, compute_dtype=compute_dtype, keep=keep, on_progress=on_progress)


def _rank() -> int:
    """Return this process's rank, 0 without ``torch.distributed``."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _take_part(snapshot: Snapshot) -> None:
    """Gather what rank 0 gathers, in its order: a gather ends only if every rank calls it."""
    for source in snapshot.sources:
        if isinstance(source, Sharded):
            source.full_tensor()
