"""The line of a training process to the trainer daemon beside it: made anew whenever it breaks.

Rounds (:mod:`pulsenet.training.daemon_exchange`) and mixing (:mod:`pulsenet.training.daemon_mixer`) speak over it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import cpu_count
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

import torch

from pulsenet.errors import ConfigError, RemoteProtocolError, StorageError, UnavailableError
from pulsenet.local.client import Client, PublishResult
from pulsenet.local.directories import find_data_directory
from pulsenet.local.protocol import PublishStatus
from pulsenet.local.rounds_client import RoundsConnection
from pulsenet.local.rounds_protocol import RoundSettingsReply
from pulsenet.training.publisher import Publisher
from pulsenet.training.ranks import is_first_rank
from pulsenet.training.snapshot import ComputeDtype

RECONNECT_PAUSE_SECONDS: Final = 0.2

CONNECT_SECONDS_MAX: Final = 5.0
"""For one try to reach the daemon."""

BUSY_SECONDS_MAX: Final = 5.0
"""A connection that was closed is gone for the daemon by then."""

THREADS_MAX: Final = 4
"""For encoding and decoding; the device does the rest."""

_ADVICE: Final = {
    "no-rounds": "this run has no rounds: make one with 'pulsenet run create --algorithm pulseloco', or publish with "
    "pulsenet.attach_publisher()",
    "not-trainer": "the daemon here trains nothing: start one with 'pulsenet join --role trainer'",
    "not-listed": "the run counts nothing of this trainer, because its key is not listed",
    "table": "the run trains other masters: names, shapes and frozen parameters must agree on all trainers",
    "self-test": "this trainer's arithmetic would diverge from the others': do not flush subnormals "
    "(torch.set_flush_denormal), and see docs/outer.md",
    "busy": "another training process takes part in the rounds through this daemon: one process a daemon",
}

Connection = TypeVar("Connection", bound=RoundsConnection)
Settings = TypeVar("Settings")


def advise(error: RemoteProtocolError) -> ConfigError | RemoteProtocolError:
    """Return what to tell a person about a refusal that a person can do something about."""
    advice = _ADVICE.get(error.code)
    return error if advice is None else ConfigError(f"{advice} ({error.detail})" if error.detail else advice)


def reach_daemon(
    run: str, data_dir: Path | str | None, *, publish: bool, compute_dtype: ComputeDtype | None, keep: tuple[str, ...]
) -> tuple[Client, Publisher | None] | None:
    """Return clients of the trainer daemon on this machine: one for rounds, one to publish by.

    Returns:
        ``None`` on ranks other than 0 of ``torch.distributed``.

    Raises:
        ConfigError: No daemon is there; the message says what to do.
        UnavailableError: A daemon should be there, but does not answer.
    """
    if not is_first_rank():
        return None
    directory = find_data_directory("trainer", run=run, data_dir=data_dir)
    publisher = Publisher(Client(directory), compute_dtype=compute_dtype, keep=keep) if publish else None
    return Client.connect(directory, timeout_seconds=CONNECT_SECONDS_MAX), publisher


class DaemonEnd(ABC, Generic[Connection]):
    """A training process's end of what the run does with its trainers: what rounds and mixing have in common.

    It has one connection at a time.

    Args:
        client: Reaches the daemon; owned by this object.
        publisher: Hands weights over where this node coordinates, and is owned too; ``None`` never publishes.
        kind: What is spoken.
        connect_seconds: How long one try to reach a daemon that is away may last.
        name: Of the threads that encode and decode.
    """

    def __init__(
        self,
        client: Client,
        publisher: Publisher | None,
        kind: type[Connection],
        *,
        connect_seconds: float,
        name: str,
    ) -> None:
        self._client = client
        self._publisher = publisher
        self._kind = kind
        self._connect_seconds = connect_seconds
        self._connection: Connection | None = None
        self._threads = ThreadPoolExecutor(min(THREADS_MAX, cpu_count() or 1), thread_name_prefix=name)
        self.last_publish: PublishResult | None = None
        """What became of the newest version that was handed over."""

    @abstractmethod
    def _drop(self) -> None:
        """Close the connection, and give up what was said over it. A second call does nothing."""

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Close what this object owns if it cannot be made."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _ask_settings(self) -> RoundSettingsReply:
        """Return what the run says about its rounds, over a new connection if there is none.

        Raises:
            ConfigError: The run or the daemon has none for this process.
            UnavailableError: The daemon is away.
        """
        try:
            if self._connection is None:
                self._connection = self._kind.connect(self._client, self._connect_seconds)
            return self._connection.get_settings()
        except RemoteProtocolError as error:
            self._drop()
            raise advise(error) from error
        except UnavailableError:
            self._drop()
            raise

    def _take_part(
        self,
        settings: Settings,
        read_settings: Callable[[str, tuple[tuple[str, int], ...]], Settings],
        ask: Callable[[Connection], None],
    ) -> Connection:
        """Take part over the connection, a new one if need be.

        Args:
            settings: As this process began with.
            read_settings: Reads an algorithm and its constants.
            ask: Asks to take part.

        Raises:
            ConfigError: The run does not take this trainer, changed, or another process takes part in its place.
            UnavailableError: The daemon is away.
        """
        busy_until = time.monotonic() + BUSY_SECONDS_MAX
        while True:
            reply = self._ask_settings()
            if read_settings(reply.algorithm, reply.constants) != settings:
                raise ConfigError("the run's owner changed the constants of its rounds: start this process again")
            assert self._connection is not None
            try:
                ask(self._connection)
                return self._connection
            except RemoteProtocolError as error:
                self._drop()
                # The daemon may not have noticed yet that the connection before is gone.
                if error.code != "busy" or time.monotonic() >= busy_until:
                    raise advise(error) from error
                time.sleep(RECONNECT_PAUSE_SECONDS)
            except UnavailableError:
                self._drop()
                raise

    def publish(self, model: torch.nn.Module, round_index: int, *, is_consensus: bool = True) -> None:
        """Hand the weights over as the run's next version; a node that is no authority refuses before any copy.

        A full disk is told by :attr:`last_publish`.

        Raises:
            ConfigError: The model cannot be published as it is.
        """
        if self._publisher is None:
            return
        try:
            self.last_publish = self._publisher.publish(model, step=round_index, consensus=is_consensus)
        except ConfigError as error:
            raise ConfigError(f"{error}; to train without versions, join with publish=False") from error
        except StorageError as error:
            self.last_publish = PublishResult(PublishStatus.FAILED, reason=f"{error.reason}: {error}")

    def close(self) -> None:
        """Leave; a second call does nothing."""
        self._drop()
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._publisher is not None:
            self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
