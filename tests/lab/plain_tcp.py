"""What plain TCP moves over a link of the lab: the measure that transfers of the project are held against."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from namespaces import Lab

READ_SIZE_BYTES: Final = 256 << 10
NAME_SIZE_BYTES: Final = 16
SETTLE_SECONDS: Final = 5.0
"""Before connections that share links have found their pace."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer, from the first byte at the reader to the last."""

    size_bytes: int
    seconds: float
    congestion: str
    """Congestion control that the sender's connection had."""

    @property
    def mbps(self) -> float:
        """Megabits of payload a second."""
        return self.size_bytes * 8 / 1e6 / max(self.seconds, 1e-9)


def measure(lab: Lab, sender: int, reader: int, size_bytes: int, seconds_max: float = 120.0) -> Transfer:
    """Send that many bytes over one new connection, or what passes before the time is up."""
    used: list[str] = []
    with lab.listen(sender) as listener:
        thread = threading.Thread(target=_send, args=(listener, size_bytes, used), daemon=True)
        thread.start()
        connection = lab.connect(reader, (lab.address(sender), listener.getsockname()[1]), 30.0)
        with connection:
            received, started = 0, 0.0
            give_up_at = time.monotonic() + seconds_max
            while received < size_bytes and time.monotonic() < give_up_at:
                connection.settimeout(max(0.1, give_up_at - time.monotonic()))
                try:
                    data = connection.recv(READ_SIZE_BYTES)
                except TimeoutError:
                    break
                if not data:
                    break
                started = started or time.monotonic()
                received += len(data)
            seconds = time.monotonic() - started
        thread.join(10)
    return Transfer(received, seconds, used[0] if used else "")


def measure_all(lab: Lab, count: int, seconds: float) -> float:
    """Have the first ``count`` nodes all send to all, over one connection of each two, both ways at once.

    Returns:
        Megabits of payload a second that a node receives, and sends, on average: acknowledgments share its link.
    """
    received = [0] * (count * (count - 1))
    stop = threading.Event()
    with ExitStack() as stack:
        threads = []
        for one, other in itertools.combinations(range(count), 2):
            listener = stack.enter_context(lab.listen(one))
            there = stack.enter_context(lab.connect(other, (lab.address(one), listener.getsockname()[1])))
            here = stack.enter_context(listener.accept()[0])
            for connection in (here, there):
                connection.settimeout(1.0)
                place = len(threads) // 2
                threads.append(threading.Thread(target=_pour, args=(connection, stop), daemon=True))
                threads.append(threading.Thread(target=_drink, args=(connection, received, place, stop), daemon=True))
        for thread in threads:
            thread.start()
        time.sleep(SETTLE_SECONDS)
        before, started = sum(received), time.monotonic()
        time.sleep(seconds)
        size_bytes, seconds = sum(received) - before, time.monotonic() - started
        stop.set()
        for thread in threads:
            thread.join()
    return size_bytes * 8e-6 / seconds / count


def _pour(connection: socket.socket, stop: threading.Event) -> None:
    block = bytes(READ_SIZE_BYTES)
    while not stop.is_set():
        with suppress(TimeoutError):
            connection.send(block)


def _drink(connection: socket.socket, received: list[int], place: int, stop: threading.Event) -> None:
    while not stop.is_set():
        with suppress(TimeoutError):
            received[place] += len(connection.recv(READ_SIZE_BYTES))


def _send(listener: socket.socket, size_bytes: int, used: list[str]) -> None:
    connection, _ = listener.accept()
    with connection:
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NAME_SIZE_BYTES)
        used.append(name.rstrip(b"\0").decode())
        try:
            connection.sendall(memoryview(bytes(size_bytes)))
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # the reader's close: everything arrived
        except OSError:  # it had enough
            return
