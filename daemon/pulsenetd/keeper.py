"""``--supervise``: a parent that starts the node again when it dies of a passing fault.

For machines without systemd. Faults that a restart cannot cure (wrong options, a taken port, broken trust)
end the parent too, so that nothing loops.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from pulsenetd.logs import logger

PASSING_CODES: Final = frozenset({1, 3, 6, 7})
"""Runtime failure, no bootstrap, storage, p2pd: each may be gone in a minute. A signal counts as passing too."""

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PAUSE_SECONDS_MIN: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
HEALTHY_SECONDS: Final = 120.0
"""A node that lived so long starts again with the shortest pause."""


class Child(Protocol):
    """What is needed of a started node."""

    def wait(self) -> int:
        """Return the exit status; negative for a signal."""

    def send_signal(self, number: int) -> None:
        """Pass a signal on."""


def _start_apart(command: list[str]) -> Child:
    """Start a process that Ctrl-C in our terminal does not reach: it would count as a second signal after ours."""
    return subprocess.Popen(command, start_new_session=True)


def keep(
    arguments: Sequence[str],
    *,
    start: Callable[[list[str]], Child] = _start_apart,
    sleep: Callable[[float], object] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> int:
    """Run ``pulsenet`` with these arguments until it ends for good; return its exit code.

    Args:
        arguments: The command line; supervision is switched off in the child.
        start: Starts a process.
        sleep: Waits so many seconds.
        monotonic: Monotonic seconds.
    """
    # Before '--': what comes after it is the engine's.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, rest = arguments[:end], arguments[end:]
    command = [sys.executable, "-m", "pulsenetd.cli", *own, "--no-supervise", *rest]
    child: Child | None = None
    stopping: list[int] = []
    is_pausing = False

    def pass_on(number: int, frame: object) -> None:
        stopping.append(number)
        if child is not None:
            child.send_signal(number)
        elif is_pausing:
            raise InterruptedError  # ends the pause at once

    # Under nohup or in the background of a script a signal does not count, here as little as in the node.
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in heard}
    pause_seconds = PAUSE_SECONDS_MIN
    try:
        while True:
            started = monotonic()
            try:
                child = start(command)
            except OSError as error:
                # No memory or no room for a process, perhaps what the node died of: gone in a minute as well.
                what = f"cannot be started ({error.strerror})"
            else:
                if stopping:  # before there was anybody to pass it on to
                    child.send_signal(stopping[0])
                status = child.wait()
                child = None
                if stopping or (status >= 0 and status not in PASSING_CODES):
                    return status if status >= 0 else 128 - status
                what = f"ended with signal {-status}" if status < 0 else f"ended with exit code {status}"
            if monotonic() - started >= HEALTHY_SECONDS:
                pause_seconds = PAUSE_SECONDS_MIN
            logger.warning("the node %s: starting it again in %.0f s", what, pause_seconds)
            is_pausing = True
            if stopping:  # since it was looked at last
                return 128 + stopping[0]
            sleep(pause_seconds)
            is_pausing = False
            pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_MAX)
    except InterruptedError:
        if not stopping:
            raise
        return 128 + stopping[0]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
