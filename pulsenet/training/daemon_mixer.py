"""Mixing between machines: a training process averages with others through the daemon beside it.

::

    mixer = pulsenet.join_mixing()
    sync = GossipOptimizer(model, optimizer, mixer=mixer)

The daemon does the waiting, the network and the means; here vectors become blobs, in a thread beside the inner steps.
While the daemon is away rounds go on with this trainer's own values, and each of them tries to reach it again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import Final

from pulsenet.errors import (
    ConfigError,
    LocalProtocolError,
    PulsenetError,
    RemoteProtocolError,
    StorageError,
    UnavailableError,
)
from pulsenet.ids import Digest
from pulsenet.local import mixing_protocol as local
from pulsenet.local.client import Client
from pulsenet.local.directories import RUN_NAME_DEFAULT
from pulsenet.local.mixing_client import MixingConnection
from pulsenet.local.rounds_protocol import as_code
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import fp32_to_bits
from pulsenet.outer.mixing.probe import Answer
from pulsenet.outer.mixing.settings import ALGORITHM, Job, MixingSettings
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.daemon_link import (
    CONNECT_SECONDS_MAX,
    RECONNECT_PAUSE_SECONDS,
    DaemonEnd,
    reach_daemon,
)
from pulsenet.training.mixer import Mixed, MixingReport, RoundPlan, Start
from pulsenet.training.mixing_work import HandedOver, MixingWork
from pulsenet.training.publisher import Publisher
from pulsenet.training.snapshot import ComputeDtype

LOCATE_SECONDS_MAX: Final = 960.0
"""A daemon that cannot say so long where the run is, is taken for away; it waits itself for a state to begin from."""

ROUND_SECONDS_MAX: Final = 30.0
"""A daemon that does not open a round by then is taken for away."""

SLACK_SECONDS: Final = 5.0
"""Beyond a job's wait, after which the daemon answers."""

RECONNECT_SECONDS_MAX: Final = 5.0
"""How long one round waits for a daemon that is away; the next one tries again."""

FP32_MAX: Final = 3.4e38

logger = logging.getLogger(__name__)


class DaemonMixer(DaemonEnd[MixingConnection]):
    """A :class:`pulsenet.training.Mixer` over a trainer daemon. Make one with :func:`join_mixing`.

    Args:
        client: Reaches the daemon; owned by this object.
        publisher: Hands weights over where this node coordinates; ``None`` never publishes.
        locate_seconds: How long to ask where the run is.
        reconnect_seconds: How long a round waits for a daemon that is away.

    Raises:
        ConfigError: The daemon, the run or its algorithm has no mixing for this process; the message says what to do.
        UnavailableError: The daemon does not answer.
    """

    def __init__(
        self,
        client: Client,
        *,
        publisher: Publisher | None = None,
        locate_seconds: float = LOCATE_SECONDS_MAX,
        reconnect_seconds: float = RECONNECT_SECONDS_MAX,
    ) -> None:
        super().__init__(
            client,
            publisher,
            MixingConnection,
            connect_seconds=min(CONNECT_SECONDS_MAX, max(0.1, reconnect_seconds)),
            name="pulsenet-mixing",
        )
        self._hands = ThreadPoolExecutor(1, thread_name_prefix="pulsenet-hand-over")
        self._locate_seconds = locate_seconds
        self._reconnect_seconds = reconnect_seconds
        self._masters: tuple[ParameterTable, Digest] | None = None
        self._work: MixingWork | None = None
        self._is_located = False
        """Whether the daemon knows on this connection where this trainer is."""
        self._opened: local.RoundOpened | None = None
        self._handed: dict[Job, HandedOver] = {}
        self._failures: dict[Job, str] = {}
        """Why a job of the round was not handed over."""
        self._pending: list[Future[None]] = []
        self._iterate: Callable[[], Iterable[Entries]] | None = None
        """z, while it is to be stored for joiners."""
        self._is_away = False
        with self._closed_on_failure():
            reply = self._ask_settings()
            if reply.algorithm != ALGORITHM:
                raise ConfigError(
                    f"the run's outer algorithm is {reply.algorithm!r}, which has rounds: use "
                    "pulsenet.join_rounds() and OuterOptimizer, or create a run with --algorithm gossip"
                )
            self._settings = MixingSettings.from_constants(reply.algorithm, reply.constants)

    @property
    def settings(self) -> MixingSettings:
        """See :class:`pulsenet.training.Mixer`, as below."""
        return self._settings

    @property
    def publishes(self) -> bool:
        """Whether this node coordinates the run, as it said when the round was opened."""
        return self._publisher is not None and self._opened is not None and self._opened.publishes

    def open(self, table: ParameterTable, self_test: Digest) -> None:
        """Take part with these masters."""
        self._masters = (table, self_test)
        self._work = MixingWork(table, self._settings, run_blocks=self._threads.map)
        self._connect()

    def locate(self, held_round_index: int | None) -> Start:
        """Ask where the run is, and read the state that a new process begins from."""
        assert self._work is not None
        give_up_at = time.monotonic() + self._locate_seconds
        held = held_round_index
        while time.monotonic() < give_up_at:
            try:
                connection = self._ready()
                begin = connection.locate(held, give_up_at - time.monotonic())
                while begin is not None:
                    if held is not None and begin.round_index > held + self._settings.roster_rounds:
                        # Nothing of what this trainer holds is in the others any more.
                        held = None
                        break
                    self._is_located = True
                    if not begin.parts:
                        return Start(max(begin.round_index, held_round_index or 0))
                    try:
                        return Start(begin.round_index, self._work.read_state(connection, begin))
                    except (RemoteProtocolError, StorageError) as error:
                        reason = error.code if isinstance(error, RemoteProtocolError) else error.reason
                        begin = connection.refuse_state(reason, max(0.0, give_up_at - time.monotonic()))
            except UnavailableError:
                self._drop()
                time.sleep(RECONNECT_PAUSE_SECONDS)
        logger.warning("nobody told where the run is within %.0f s: this trainer begins alone", self._locate_seconds)
        return Start(held_round_index or 0)

    def begin_round(self, round_index: int, iterate: Callable[[], Iterable[Entries]]) -> RoundPlan:
        """Open a round; alone if the daemon is away."""
        self._opened, self._iterate = None, None
        self._handed.clear()
        self._failures.clear()
        give_up_at = time.monotonic() + self._reconnect_seconds
        while True:
            try:
                connection = self._ready()
                if not self._is_located:
                    connection.locate(round_index, ROUND_SECONDS_MAX)
                    self._is_located = True
                opened = connection.want_round(round_index, ROUND_SECONDS_MAX)
                break
            except (UnavailableError, RemoteProtocolError) as error:
                self._drop()
                if time.monotonic() >= give_up_at:
                    self._note_away(str(error))
                    return RoundPlan(round_index, is_listed=False)
                time.sleep(RECONNECT_PAUSE_SECONDS)
        if opened is None:
            self._drop()
            self._note_away("it did not open the round")
            return RoundPlan(round_index, is_listed=False)
        if self._is_away:
            logger.info("the daemon is back in round %d", opened.round_index)
        self._is_away, self._opened = False, opened
        self._iterate = iterate if opened.wants_iterate else None
        subset = opened.subset or None
        return RoundPlan(opened.round_index, subset, is_listed=opened.is_listed, is_probed=opened.is_probed)

    def start(self, job: Job, sections: Sequence[Iterable[Entries]], *, mixed_root: Digest | None = None) -> None:
        """Let the thread beside the inner steps hand a vector over."""
        opened, iterate = self._opened, self._iterate
        if opened is None:
            return
        if self._plan(job).slice_count:
            self._pending.append(self._hands.submit(self._hand_over, job, opened, sections, mixed_root))
        if iterate is not None:
            self._iterate = None
            self._pending.append(self._hands.submit(self._hand_iterate, opened, iterate))

    def result(self, job: Job) -> Mixed:
        """Wait for the daemon, until the job's deadline and a little more."""
        wait = self._settings.mix1_wait_seconds if job is Job.MIX1 else self._settings.mix2_wait_seconds
        give_up_at = time.monotonic() + wait + SLACK_SECONDS
        self._settle(give_up_at)
        handed, opened = self._handed.pop(job, None), self._opened
        if handed is None:
            if opened is not None and opened.is_listed and not self._plan(job).slice_count:
                # Alone by the matching, or the only member: nothing is missing.
                return Mixed(None, 1, "", is_common=opened.member_count == 1)
            return Mixed(None, 1, self._failures.get(job, "unlisted" if opened is not None else "away"))
        nothing = local.MixDone(handed.message.round_index, int(job), (), "late")
        assert self._work is not None
        connection = self._connection
        if connection is None:
            return self._own(handed, "away")
        try:
            done = None
            while done is None and time.monotonic() < give_up_at:
                done = connection.await_mix(handed.message.round_index, int(job), give_up_at - time.monotonic())
            return self._work.take(connection, handed, done or nothing)
        except (UnavailableError, RemoteProtocolError) as error:
            logger.warning("the daemon went away in %s of round %d: %s", job.name, handed.message.round_index, error)
            self._drop()
            return self._own(handed, "away")

    def abandon(self) -> None:
        """Give up the round that is open; the daemon learns of it by the connection's end."""
        self._drop()
        self._opened = None
        self._handed.clear()
        if self._work is not None:
            self._work.forget_debts()

    def tell(self, report: MixingReport) -> None:
        """Tell the daemon, which shows it in its status and metrics."""
        if self._connection is None:
            return
        message = local.TellRound(
            round_index=report.round_index,
            mix1_count=report.mix1_count,
            mix2_count=report.mix2_count,
            mix1_reason=as_code(report.mix1_reason),
            mix2_reason=as_code(report.mix2_reason),
            inner_seconds_bits=fp32_to_bits(report.inner_seconds),
            blocked_seconds_bits=fp32_to_bits(report.blocked_seconds),
            utilization_bits=fp32_to_bits(report.utilization_total),
            delta_norm_bits=fp32_to_bits(report.delta_norm),
            distance_bits=_as_bits(report.distance),
            start_square_bits=_as_bits(report.start_square),
            end_square_bits=_as_bits(report.end_square),
            noise_square_bits=_as_bits(report.noise_square),
            is_consensus=report.is_consensus,
        )
        # After what is being handed over: a connection has one request at a time.
        self._pending.append(self._hands.submit(self._tell, message))

    def tell_probe(self, round_index: int, answer: Answer, scores: bytes) -> None:
        """Tell the daemon what this trainer predicts."""
        # Every job of the round has its result, so nothing else is being said; and the next round is asked for soon.
        self._tell(local.StoreProbe(round_index, answer.batch, answer.bins, answer.data, scores))

    def close(self) -> None:
        """Leave; a second call does nothing."""
        super().close()
        self._hands.shutdown(wait=False, cancel_futures=True)

    # In the thread that hands over

    def _hand_over(
        self, job: Job, opened: local.RoundOpened, sections: Sequence[Iterable[Entries]], mixed_root: Digest | None
    ) -> None:
        assert self._work is not None
        connection = self._connection
        if connection is None:
            self._failures[job] = "away"
            return
        try:
            try:
                handed = self._work.put(connection, job, opened, sections, mixed_root=mixed_root)
            except (LocalProtocolError, StorageError) as error:
                reason = error.reason if isinstance(error, StorageError) else str(error)
                self._failures[job] = reason
                connection.tell(local.FailPart(opened.round_index, int(job), as_code(reason)))
                return
            # Debts are in the vector from here on, whether or not the daemon hears that they are settled.
            self._handed[job] = handed
            connection.tell(handed.message)
        except (UnavailableError, RemoteProtocolError) as error:
            self._failures[job] = "away"
            logger.warning("%s of round %d was not handed over: %s", job.name, opened.round_index, error)
            connection.close()

    def _hand_iterate(self, opened: local.RoundOpened, iterate: Callable[[], Iterable[Entries]]) -> None:
        assert self._work is not None
        connection = self._connection
        if connection is None:
            return
        try:
            connection.tell(self._work.put_iterate(connection, opened.round_index, iterate()))
        except (LocalProtocolError, StorageError) as error:
            logger.warning("the state of round %d is not offered to joiners: %s", opened.round_index, error)
        except (UnavailableError, RemoteProtocolError):
            connection.close()

    def _tell(self, message: local.TellRound | local.StoreProbe) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            connection.tell(message)
        except (UnavailableError, RemoteProtocolError):
            connection.close()

    # The connection

    def _settle(self, give_up_at: float) -> None:
        """Wait for the thread that hands over; cut it off when the time is up."""
        for future in self._pending:
            try:
                future.result(max(0.0, give_up_at - time.monotonic()))
            except FutureTimeoutError:
                break
        else:
            self._pending.clear()
            return
        self._drop()

    def _drop(self) -> None:
        """Close the connection: for the daemon this process is gone. Nothing is read afterwards."""
        connection, self._connection = self._connection, None
        self._is_located = False
        if connection is not None:
            connection.abort()
        for future in self._pending:
            if not future.cancel():
                with suppress(PulsenetError):
                    future.result()
        self._pending.clear()
        if connection is not None:
            connection.close()

    def _ready(self) -> MixingConnection:
        if self._connection is None or not self._connection.is_open():
            self._drop()
            return self._connect()
        return self._connection

    def _connect(self) -> MixingConnection:
        """Open mixing on a connection, a new one if need be."""
        assert self._masters is not None
        table, self_test = self._masters
        return self._take_part(
            self._settings, MixingSettings.from_constants, lambda line: line.open_mixing(table, self_test)
        )

    def _plan(self, job: Job) -> local.JobPlan:
        assert self._opened is not None
        return self._opened.mix1 if job is Job.MIX1 else self._opened.mix2

    def _own(self, handed: HandedOver, reason: str) -> Mixed:
        """Return the own values, the debts in them settled."""
        assert self._work is not None
        for index in range(len(handed.message.slices)):
            handed.restore(index, len(handed.message.slices))
        return MixingWork.gather(handed, 1, reason)

    def _note_away(self, why: str) -> None:
        if not self._is_away:
            logger.warning("rounds go on alone, because the daemon is away: %s", why)
        self._is_away = True


def _as_bits(value: float | None) -> int | None:
    """Return FP32 bits; what FP32 cannot hold is not told."""
    if value is None or not math.isfinite(value) or value > FP32_MAX:
        return None
    return fp32_to_bits(value)


def join_mixing(
    run: str = RUN_NAME_DEFAULT,
    data_dir: Path | str | None = None,
    *,
    publish: bool = True,
    compute_dtype: ComputeDtype | None = "bf16",
    keep: tuple[str, ...] = (),
    locate_seconds: float = LOCATE_SECONDS_MAX,
    reconnect_seconds: float = RECONNECT_SECONDS_MAX,
) -> DaemonMixer | None:
    """Mix with the other trainers of a run through the trainer daemon on this machine.

    Args:
        run: Name of the run; the daemon's data directory is found by it.
        data_dir: The daemon's ``--data-dir``, if it was given one.
        publish: Whether each round's weights become the run's next version, where this node coordinates the run.
        compute_dtype: As in :func:`pulsenet.attach_publisher`, for those versions.
        keep: As there.
        locate_seconds: How long to ask at the beginning where the run is, before this trainer begins alone.
        reconnect_seconds: How long one round waits for a daemon that is away.

    Returns:
        What ``GossipOptimizer`` takes as its mixer: ``None`` on ranks other than 0 of ``torch.distributed``.

    Raises:
        ConfigError: No daemon is there, or its run does not mix; the message says what to do.
        UnavailableError: A daemon should be there, but does not answer.
    """
    reached = reach_daemon(run, data_dir, publish=publish, compute_dtype=compute_dtype, keep=keep)
    if reached is None:
        return None
    client, publisher = reached
    return DaemonMixer(client, publisher=publisher, locate_seconds=locate_seconds, reconnect_seconds=reconnect_seconds)
