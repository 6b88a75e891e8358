"""One cable between two network namespaces, as a process: it delays every frame and loses some.

    cable.py NAMESPACE:DEVICE NAMESPACE:DEVICE

Makes a TAP device at either end and carries frames between them. A line of JSON on standard input sets
``delay_seconds`` (one way), ``loss_there`` (share of IP packets lost from the first end to the second) and
``loss_back``; the end of standard input ends the cable. Prints ``ready`` once both devices are there.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Final

CLONE_NEWNET: Final = 0x40000000
TUNSETIFF: Final = 0x400454CA
IFF_TAP_WITHOUT_HEADER: Final = 0x0002 | 0x1000
FRAME_SIZE_MAX: Final = 65_536
FRAMES_PER_TURN_MAX: Final = 64
IP_TYPES: Final = (b"\x08\x00", b"\x86\xdd")

libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace: int) -> None:
    """Move the calling thread into the network namespace of this descriptor; sockets made before stay behind."""
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def open_tap(end: str) -> int:
    """Make ``NAMESPACE:DEVICE``; return the descriptor that reads what is sent there."""
    namespace, _, device = end.partition(":")
    with open(f"/run/netns/{namespace}") as handle:
        enter(handle.fileno())
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP_WITHOUT_HEADER))
    return descriptor


class Cable:
    """Frames on their way between two descriptors."""

    def __init__(self, first: int, second: int, seed: int) -> None:
        self._ends = {first: second, second: first}
        self._loss = {first: 0.0, second: 0.0}
        self._first, self._second = first, second
        self._delay_seconds = 0.0
        self._random = random.Random(seed)
        self._under_way: deque[tuple[float, int, bytes]] = deque()

    def set(self, delay_seconds: float, loss_there: float, loss_back: float) -> None:
        """Change the cable; what is on its way keeps its time, so frames never overtake."""
        self._delay_seconds = delay_seconds
        self._loss = {self._first: loss_there, self._second: loss_back}

    @property
    def wait_seconds(self) -> float | None:
        """How long until a frame arrives; ``None`` if none is under way."""
        return max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None

    def take(self, end: int) -> None:
        """Take in what was sent at one end."""
        loss = self._loss[end]
        for _ in range(FRAMES_PER_TURN_MAX):
            try:
                frame = os.read(end, FRAME_SIZE_MAX)
            except BlockingIOError:
                return
            except OSError:  # the device is down
                return
            if loss and frame[12:14] in IP_TYPES and self._random.random() < loss:
                continue
            due = time.monotonic() + self._delay_seconds
            if self._under_way:
                due = max(due, self._under_way[-1][0])
            self._under_way.append((due, self._ends[end], frame))

    def deliver(self) -> None:
        """Hand over what has arrived; a device that is down or full loses it, as real ones do."""
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, end, frame = self._under_way.popleft()
            with suppress(OSError):
                os.write(end, frame)


def main(first_end: str, second_end: str) -> None:
    first, second = open_tap(first_end), open_tap(second_end)
    with suppress(PermissionError):
        os.nice(-10)  # wires do not wait for a busy processor
    cable = Cable(first, second, seed=7)
    print("ready", flush=True)
    orders = sys.stdin.fileno()
    pending = b""
    while True:
        readable, _, _ = select.select([first, second, orders], [], [], cable.wait_seconds)
        for end in (first, second):
            if end in readable:
                cable.take(end)
        cable.deliver()
        if orders in readable:
            data = os.read(orders, 4096)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                cable.set(**json.loads(line))
                print("ready", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
