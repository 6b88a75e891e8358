"""Keeps an engine at the newest version the daemon on the same machine has verified.

::

    engine = InProcessEngine(model)
    with attach_engine(engine) as subscriber:
        subscriber.start()
        …
        with engine.weights() as version:
            samples = generate(model)
        subscriber.submit_rollouts(samples, version_first=version, version_last=version)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Final, Literal

from pulsenet import limits
from pulsenet.chain.rollouts import RolloutArrays
from pulsenet.errors import (
    IntegrityError,
    LocalProtocolError,
    PulsenetError,
    RemoteProtocolError,
    StorageError,
    UnavailableError,
)
from pulsenet.ids import Digest, Version
from pulsenet.local.client import Client
from pulsenet.local.directories import RUN_NAME_DEFAULT, find_data_directory
from pulsenet.local.protocol import RolloutsTaken, UpdateKind
from pulsenet.local.rollouts import Sample, pack_rollouts
from pulsenet.local.tasks import Task
from pulsenet.local.update import Update
from pulsenet.serving.engine import (
    Engine,
    FullUpdate,
    NamesRoot,
    RecordsUpdate,
    apply_update,
    name_failure,
    read_back_update,
)

CONNECT_SECONDS_MAX: Final = 10.0
TASKS_WAIT_SECONDS: Final = 10.0
"""One request's wait for tasks; the iterator asks again until its own time is up."""

UPDATE_WAIT_SECONDS: Final = 2.0
"""One request's wait, and so the longest that closing takes; the next request follows at once."""

_REASONS_OF_LOSS: Final = frozenset({"damaged", "io"})
"""Of a disk that may have lost what an engine held; a full one has not."""


class Subscriber:
    """Asks the daemon for what leads from the engine's version to the newest, applies it and confirms it.

    Args:
        client: Connection to the daemon.
        engine: Brought forward by one thread at a time.
        on_update: Called after each version was applied and confirmed.
        on_failure: Called with each error that :meth:`run` met and will try again after.
    """

    def __init__(
        self,
        client: Client,
        engine: Engine,
        *,
        on_update: Callable[[Version], None] | None = None,
        on_failure: Callable[[PulsenetError], None] | None = None,
    ) -> None:
        self._client = client
        self._engine = engine
        self._on_update = on_update
        self._on_failure = on_failure
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._applied: tuple[Version, Digest] | None = None
        """Version and root of the last update that the engine took."""
        self.failures: Counter[str] = Counter()
        """Updates that failed, by stable reason."""
        self.last_failure: BaseException | None = None
        """Why the last update failed, or what ended the loop; ``None`` once an update succeeded."""

    def step(self, timeout_seconds: float = 0.0) -> Version | None:
        """Wait for one update, apply it and read it back; return its version, or ``None`` when the time is up.

        An engine that fails is reported to the daemon before the error is raised; the next call asks for what the
        engine then needs, which is everything if it no longer knows its weights. One that refused records is read back
        first: it may not hold what they start from.

        Args:
            timeout_seconds: How long to wait; 0 takes what is there.

        Raises:
            UnavailableError: The daemon is away.
            PulsenetError: The engine refused the update; it says what it holds.
        """
        update = self._client.next_update(self._engine.version, timeout_seconds, engine_root=self._find_root())
        if update is None:
            return None
        with update:
            is_applied = False
            try:
                self._apply(update)
                is_applied = True
                read_back_update(self._engine)
            except BaseException as error:
                is_other = is_applied and isinstance(error, IntegrityError)
                reason = "read_back" if is_other else name_failure(error)
                self.failures[reason] += 1
                self.last_failure = error
                if update.kind is UpdateKind.RECORDS:
                    self._look_again(error)
                self._confirm(ok=False, reason=f"{reason}: {error}")
                raise
        self._applied = update.version, update.root
        self._confirm(ok=True, reason="")
        self.last_failure = None
        if self._on_update is not None:
            self._on_update(update.version)
        return update.version

    def run(self) -> None:
        """Keep the engine current until :meth:`close`, through restarts of the daemon and failures of the engine.

        A refused update is tried again after a growing pause. Errors that are not pulsenet's end the loop: they
        are the engine's own, and were reported to the daemon.
        """
        pause_seconds = limits.RETRY_SECONDS_MIN
        while not self._stop.is_set():
            try:
                self.step(UPDATE_WAIT_SECONDS)
                pause_seconds = limits.RETRY_SECONDS_MIN
            except PulsenetError as error:
                if self._stop.is_set():
                    return
                self.last_failure = error
                if self._on_failure is not None:
                    self._on_failure(error)
                self._stop.wait(pause_seconds)
                pause_seconds = min(2 * pause_seconds, limits.RETRY_SECONDS_MAX)
            except BaseException as error:
                self.last_failure = error
                raise

    def start(self) -> None:
        """Run :meth:`run` in a thread of its own, again if an error ended the one before.

        Raises:
            LocalProtocolError: It was closed.
        """
        if self._stop.is_set():
            raise LocalProtocolError("this subscriber was closed: attach the engine again")
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.run, name="pulsenet-subscriber", daemon=True)
            self._thread.start()

    def submit_rollouts(
        self,
        samples: Iterable[Sample] | RolloutArrays,
        *,
        version_first: Version,
        version_last: Version,
        metadata: Mapping[str, Any] | None = None,
        part_names: Sequence[str] = (),
        logprob_bits: Literal[16, 32] = 32,
        tasks: Sequence[Task] = (),
        timeout_seconds: float = 0.0,
    ) -> RolloutsTaken:
        """Send samples to the trainers, stamped with the versions that generated the oldest and the newest token.

        Accepted means stored: the daemon sends the batch until a trainer has it, through restarts. While too many wait
        it says ``busy``, with ``retry_after_ms``: then the trainers are behind, and generating more helps nobody.

        Args:
            samples: Samples, or arrays with everything but ``metadata``.
            version_first: Weights of the oldest token, of samples that do not say so themselves.
            version_last: Weights of the newest.
            metadata: JSON object for the training loop.
            part_names: Names of the rows of ``reward_parts`` of arrays.
            logprob_bits: 16 sends logprobs as FP16.
            tasks: What the batch answers, all of one trainer; it goes to that trainer first.
            timeout_seconds: How long to wait for a daemon that is away or busy.

        Raises:
            LocalProtocolError: The samples do not form a batch (SPEC 4.7 has its bounds).
            UnavailableError: The daemon is away.
        """
        batch = pack_rollouts(
            version_first,
            version_last,
            samples,
            metadata,
            part_names=part_names,
            logprob_bits=logprob_bits,
            tasks=tasks,
        )
        return self._client.submit_rollouts(batch, timeout_seconds)

    def tasks(self, *, count_max: int = 8, timeout_seconds: float | None = None) -> Iterator[Task]:
        """Yield what training processes ask for, leased to this node.

        Answer each by a batch that names it (``submit_rollouts(..., tasks=[task])``) before its lease ends; else
        another inferencer gets it too.

        Args:
            count_max: Tasks taken at one time, 64 at most; their leases begin then.
            timeout_seconds: Ends when there were none for so long; ``None`` waits for ever, 0 yields what is there.

        Raises:
            UnavailableError: The daemon is away.
        """
        idle_since = monotonic()
        while True:
            rest_seconds = TASKS_WAIT_SECONDS
            if timeout_seconds is not None:
                rest_seconds = min(rest_seconds, max(0.0, timeout_seconds - (monotonic() - idle_since)))
            taken = self._client.take_tasks(count_max, rest_seconds)
            yield from taken
            if taken:
                idle_since = monotonic()
            elif timeout_seconds is not None and monotonic() - idle_since >= timeout_seconds:
                return

    def status(self) -> dict[str, Any]:
        """Return how the daemon is, as ``pulsenet status --json`` does.

        Raises:
            UnavailableError: It is away.
        """
        return self._client.status()

    def close(self) -> None:
        """Stop the loop and close the connection; an update in work is finished first. Its callbacks may call this."""
        self._stop.set()
        self._client.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _apply(self, update: Update) -> None:
        """Hand an update to the engine in the form it came."""
        if update.kind is UpdateKind.FULL:
            # Kept open for engines in other processes; the region owns the descriptor from here on.
            descriptor = update.descriptor
            region = update.open_region()
            try:
                apply_update(
                    self._engine,
                    FullUpdate(
                        version=update.version,
                        root=update.root,
                        table=update.table,
                        region=region.bytes,
                        descriptor=descriptor,
                    ),
                )
            finally:
                region.close()
            return
        if update.base_version is None:
            raise RemoteProtocolError("schema", "records without a base version")
        apply_update(
            self._engine,
            RecordsUpdate(
                base_version=update.base_version,
                version=update.version,
                root=update.root,
                table=update.table,
                changes=update.read_changes,
                descriptor=update.descriptor if update.size_bytes else -1,
            ),
        )

    def _find_root(self) -> Digest | None:
        """Return the root of the version that the engine names, if it is known."""
        if isinstance(self._engine, NamesRoot):
            return self._engine.version_root
        version, root = self._applied or (None, None)
        return root if version == self._engine.version else None

    def _look_again(self, error: BaseException) -> None:
        """Have an engine that refused records look at its weights, which may no longer be the version that it names.

        If so it names none from then on, and is handed everything. Otherwise it would be handed the same records for
        ever.
        """
        is_doubtful = isinstance(error, IntegrityError) or (
            isinstance(error, StorageError) and error.reason in _REASONS_OF_LOSS
        )
        if is_doubtful and self._engine.version is not None:
            with suppress(PulsenetError):
                self._engine.read_back()

    def _confirm(self, *, ok: bool, reason: str) -> None:
        """Tell the daemon what the engine holds now."""
        try:
            # A withdrawn hand-over changes nothing here: the engine checked the root of what it holds.
            self._client.confirm(self._engine.version, ok, reason)
        except UnavailableError:
            # The next request for an update says what the engine holds; nothing is lost but time.
            return


def attach_engine(
    engine: Engine,
    run: str = RUN_NAME_DEFAULT,
    data_dir: Path | str | None = None,
    *,
    on_update: Callable[[Version], None] | None = None,
    on_failure: Callable[[PulsenetError], None] | None = None,
    timeout_seconds: float = CONNECT_SECONDS_MAX,
) -> Subscriber:
    """Connect an engine to the inferencer daemon on this machine (``pulsenet join --role inferencer``).

    Args:
        engine: What to keep current.
        run: Name of the run; the daemon's data directory is found by it.
        data_dir: The daemon's ``--data-dir``, if it was given one.
        on_update: As in :class:`Subscriber`.
        on_failure: As in :class:`Subscriber`.
        timeout_seconds: How long to wait for the daemon's answer.

    Raises:
        ConfigError: No daemon is there; the message says which command starts it.
        UnavailableError: One should be there, but does not answer.
    """
    directory = find_data_directory("inferencer", run=run, data_dir=data_dir)
    client = Client.connect(directory, timeout_seconds=timeout_seconds)
    return Subscriber(client, engine, on_update=on_update, on_failure=on_failure)
