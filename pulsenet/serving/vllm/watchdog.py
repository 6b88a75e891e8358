"""Frees an engine whose node died while it was paused.

The node holds a lock on its private directory as long as it lives; the kernel lets go of it whatever happens. Each
rank looks at the lock, puts back what an unfinished commit overwrote, and once all ranks are whole again the first
one resumes the engine, if it was the node that had paused it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from pulsenet.errors import PulsenetError
from pulsenet.serving.vllm.control import HttpControl
from pulsenet.serving.vllm.exchange import LOCK_NAME, PAUSED_NAME, Answer, State
from pulsenet.serving.vllm.servant import RankServant

LOOK_SECONDS: Final = 0.5
GRACE_SECONDS: Final = 1.0
"""What the node had asked for before it died may still arrive."""
COMMIT_SECONDS_MAX: Final = 120.0
"""A node that lives but leaves a commit unfinished this long counts as gone."""


class Action(StrEnum):
    """What a rank does about a node that is gone."""

    NOTHING = "nothing"
    ROLL_BACK = "roll_back"
    RESUME = "resume"


def decide(rank: int, state: State, answers: Sequence[Answer | None], *, is_paused: bool) -> Action:
    """Return what this rank does now that the node is gone.

    Args:
        rank: This one; only rank 0 resumes, for all.
        state: How its weights are.
        answers: The newest answer of each rank.
        is_paused: Whether the node had paused the engine.
    """
    if state is State.COMMITTED:
        return Action.ROLL_BACK
    if rank != 0 or not is_paused:
        return Action.NOTHING
    # Weights of two versions, or of none, are served to nobody: only the next node's full update frees such an engine.
    whole = [answer for answer in answers if answer is not None and answer.state in (State.READY, State.STAGED)]
    is_whole = len(whole) == len(answers) and len({(answer.held, answer.root) for answer in whole}) == 1
    return Action.RESUME if is_whole else Action.NOTHING


def resume_vllm(url: str) -> None:
    """Let the requests of a vLLM go on.

    Raises:
        PulsenetError: It does not.
    """
    HttpControl(url).resume()


class Watchdog:
    """One rank's thread that looks after a node that may die.

    Args:
        servant: The rank's hands.
        resume: Lets the engine at a URL go on; raises a :class:`pulsenet.errors.PulsenetError` if it does not.
    """

    def __init__(self, servant: RankServant, resume: Callable[[str], None] = resume_vllm) -> None:
        self._servant = servant
        self._resume = resume
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulsenet-watchdog", daemon=True)

    def start(self) -> None:
        """Start to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; waits for a look that is under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        gone_seconds = 0.0
        while not self._stop.wait(LOOK_SECONDS):
            try:
                gone_seconds = gone_seconds + LOOK_SECONDS if self.is_node_gone() else 0.0
                if gone_seconds > GRACE_SECONDS:
                    self.look()
            except Exception as error:  # an engine that stands still has nobody else: look again
                print(f"pulsenet: the watchdog cannot look after the engine: {error}", flush=True)

    def is_node_gone(self) -> bool:
        """Say whether nobody holds the directory, or whoever does has forgotten a commit."""
        directory = self._servant.directory
        if directory is None:
            return False
        return self._servant.is_commit_forgotten(COMMIT_SECONDS_MAX) or not is_locked(directory / LOCK_NAME)

    def look(self) -> None:
        """Do what is to be done once."""
        servant = self._servant
        directory = servant.directory
        assert directory is not None
        is_paused = (directory / PAUSED_NAME).exists()
        match decide(servant.rank, servant.state, servant.others(), is_paused=is_paused):
            case Action.ROLL_BACK:
                servant.roll_back_alone()
            case Action.RESUME:
                try:
                    self._resume(servant.engine_url)
                except PulsenetError as error:
                    print(f"pulsenet: the engine cannot be resumed yet: {error}", flush=True)
                    return
                (directory / PAUSED_NAME).unlink(missing_ok=True)
            case Action.NOTHING:
                pass


def is_locked(path: Path) -> bool:
    """Say whether another process holds the lock on a file, or may: only one that is gone is surely held by nobody."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # held; or this process has no descriptor left, which says nothing of the node
        return True
    return False
