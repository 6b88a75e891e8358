"""The process of one node: run until a signal comes, whatever state the node is in, and end with the right code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from typing import Final

from pulsenetd import logs
from pulsenetd.app import Node
from pulsenetd.config import Config
from pulsenetd.errors import first_cause
from pulsenetd.logs import logger
from pulsenetd.service_manager import ServiceManager
from pulsenetd.startup import settle

STOP_SECONDS_MAX: Final = 8.0
"""A node leaves within 10 s of SIGTERM; what is not done by then is redone at the next start."""


def run_node(config: Config) -> int:
    """Run a node until SIGINT, SIGTERM or SIGHUP (its terminal closed); return its exit code."""
    import uvloop

    logs.set_up(config.log_level, as_json=config.log_json)
    manager = ServiceManager.take_from(os.environ, os.getpid(), time.monotonic)
    settled = settle(config, os.environ, say=_say, now_ms=lambda: int(time.time() * 1000))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run_until_signal(Node(config, settled, manager, _say), manager))
    finally:
        settled.lock.release()


async def _run_until_signal(node: Node, manager: ServiceManager) -> int:
    work = asyncio.create_task(node.run())
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def stop(number: int) -> None:
        if received:
            node.leave_now(128 + number)  # the second signal means: at once
        received.append(number)
        logger.info("stopping; a second signal ends the node at once")
        manager.stopping()
        work.cancel()
        # Not a timer of the loop: it has to fire even where the loop stands still or is gone.
        limit = threading.Timer(STOP_SECONDS_MAX, node.leave_now, (128 + number,))
        limit.daemon = True
        limit.start()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup or in the background of a script, the shell has decided that a signal does not count.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop, number)
    try:
        await work
    except asyncio.CancelledError:
        if not received:
            raise
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    return 128 + received[0] if received else 0


def _say(text: str) -> None:
    """Print a line for the person who started the node; where nobody reads it any more, the node works on."""
    try:
        print(text, flush=True)
    except OSError:
        # As in 'pulsenet join | grep -m1 token', or into a file on a full disk. The rest goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
