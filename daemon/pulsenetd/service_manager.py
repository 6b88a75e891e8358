"""Tells systemd what the node is at: started, alive, stopping (sd_notify(3)); does nothing where nobody listens."""

from __future__ import annotations

import socket
from collections.abc import Callable, MutableMapping
from typing import Final

from pulsenetd.logs import logger, printable

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
WATCHDOG_VARIABLES: Final = ("WATCHDOG_USEC", "WATCHDOG_PID")

BEATS_PER_LIMIT: Final = 4
"""Signs of life within the time after which systemd takes the node for dead."""


class ServiceManager:
    """One end of systemd's notification socket. All methods may be called from any thread, and none of them fails.

    Args:
        address: Path of the socket, ``@`` for a name without one, or empty: nobody listens.
        watchdog_seconds: After so long without a sign of life the manager ends the node; 0 for never.
        monotonic: Monotonic seconds.
    """

    def __init__(self, address: str, watchdog_seconds: float, monotonic: Callable[[], float]) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._interval_seconds = watchdog_seconds / BEATS_PER_LIMIT
        self._monotonic = monotonic
        self._beaten_at: float | None = None
        self._text = ""

    @classmethod
    def take_from(
        cls, environment: MutableMapping[str, str], process_id: int, monotonic: Callable[[], float]
    ) -> ServiceManager:
        """Return the manager that an environment names, and hide it there from processes that this one starts."""
        address = environment.pop(SOCKET_VARIABLE, "")
        limit, owner = (environment.pop(name, "") for name in WATCHDOG_VARIABLES)
        is_ours = owner in ("", str(process_id)) and limit.isdecimal()
        return cls(address, int(limit) / 1e6 if is_ours else 0.0, monotonic)

    def ready(self) -> None:
        """The node serves."""
        self._send("READY=1")

    def stopping(self) -> None:
        """The node is on its way out."""
        self._send("STOPPING=1")

    def beat(self, text: str) -> None:
        """The node's loop turns; called at least every second.

        Args:
            text: What ``systemctl status`` shows.
        """
        now = self._monotonic()
        is_due = self._beaten_at is None or now - self._beaten_at >= self._interval_seconds
        lines = ["WATCHDOG=1"] if self._interval_seconds and is_due else []
        if lines:
            self._beaten_at = now
        if text != self._text:
            self._text = text
            lines.append(f"STATUS={printable(text)}")
        if lines:
            self._send("\n".join(lines))

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sender:
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            logger.debug("the service manager was not told %s: %s", message.partition("\n")[0], error)
