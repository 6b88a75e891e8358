"""What an engine is handed: records from its version to the mirror's, or the mirror itself on loan."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pulsenet.ids import Digest, Version
from pulsenet.local.protocol import UpdateKind
from pulsenet.tensors.params import ParameterTable

LOAN_SECONDS_MIN: Final = 120.0
"""How long the mirror waits for engines that read it before it moves on and withdraws their loans."""
LOAN_SECONDS_MAX: Final = 1920.0
"""The same, after engines were too slow: each time it waits twice as long, or a slow disk never held a version."""


@dataclass(slots=True)
class StagedUpdate:
    """What leads an engine to ``version``, ready to be sent."""

    kind: UpdateKind
    base_version: Version | None
    """What records start from; ``None`` for a full update."""
    version: Version
    root: Digest
    table: ParameterTable
    size_bytes: int
    descriptor: int
    """Read-only; owned by this object."""
    give_back: Callable[[], bool]
    """Ends the loan of the memory; False if it was withdrawn before. Called by :meth:`finish`."""

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def finish(self) -> bool:
        """Say that the engine is through with the memory; False if the loan was withdrawn or given back before."""
        give_back, self.give_back = self.give_back, _has_ended
        return give_back()

    def __del__(self) -> None:
        # An engine may go while a worker thread stages for it; nobody is then left to take the result, and a
        # loan that stayed open would hold up every hop.
        self.close()
        self.finish()


def _has_ended() -> bool:
    return False


class Loans:
    """Who reads the mirror at present. A loan ends when it is given back, or when it is withdrawn."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._open: set[int] = set()
        self._count = 0
        self.withdrawn_count = 0
        """Loans taken back from engines that were too slow."""
        self.patience_seconds = LOAN_SECONDS_MIN
        """How long the next is waited for."""

    def lend(self) -> Callable[[], bool]:
        """Open a loan and return what gives it back: True if its reader saw one version all the time."""
        with self._condition:
            self._count += 1
            loan = self._count
            self._open.add(loan)

        def give_back() -> bool:
            with self._condition:
                was_open = loan in self._open
                self._open.discard(loan)
                self._condition.notify_all()
                return was_open

        return give_back

    def end_all(self) -> None:
        """Wait until every loan is given back; withdraw those that are not in time."""
        with self._condition:
            if not self._condition.wait_for(lambda: not self._open, self.patience_seconds):
                self.withdrawn_count += len(self._open)
                self._open.clear()
                self.patience_seconds = min(2 * self.patience_seconds, LOAN_SECONDS_MAX)
